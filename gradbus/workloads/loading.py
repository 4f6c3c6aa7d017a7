"""From the text of the setting `workload` to a workload: a shipped one, a file of the user's, or a module."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Literal, cast

from gradbus.workloads.base import Arrays, DataError, StatefulWorkload, Workload, WorkloadError

_SHIPPED = {
    "digits": "gradbus.workloads.digits:Digits",
    "fashion": "gradbus.workloads.fashion:Fashion",
    "cifar10": "gradbus.workloads.cifar10:Cifar10",
    "quadratic": "gradbus.workloads.quadratic:Quadratic",
    "quadratic_state": "gradbus.workloads.quadratic:QuadraticState",
}

_METHODS = ("init", "loss", "train_data", "eval_data", "score")


def load(spec: str) -> Workload:
    """The workload that `spec` names: `digits`, `path/to/file.py:name` or `module:name`.

    A relative path is taken from the working directory. The file is run anew by every call, with its folder on the
    import path, so that it may import its neighbours.
    Raises `WorkloadError` for everything that goes wrong, the user's own exceptions included.
    """
    place, name = _split(spec)
    module = _run_file(spec, Path(place).expanduser()) if place.endswith(".py") else _import(spec, place)
    try:
        found = getattr(module, name)
    except AttributeError:
        names = [each for each in vars(module) if not each.startswith("_")]
        raise WorkloadError(f"workload {spec}: {place} defines no {name!r}{_nearest(name, names)}") from None
    if isinstance(found, type) or (callable(found) and not hasattr(found, "loss")):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise WorkloadError(f"workload {spec}: calling {name}() raised {describe(error, module)}") from error
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise WorkloadError(
            f"workload {spec}: {name} is of type {type(found).__name__}, without {', '.join(missing)}; "
            f"expected an object with the methods {', '.join(_METHODS)} (see gradbus.Workload)"
        )
    return cast(Workload, found)


def read_data(
    workload: Workload | StatefulWorkload, spec: str, part: Literal["train_data", "eval_data"], folder: Path | None
) -> Arrays:
    """What the workload's `part` returns. Raises `DataError` as it does, and `WorkloadError` for all else it raises."""
    try:
        return getattr(workload, part)(folder)
    except (DataError, WorkloadError):
        raise
    except (Exception, SystemExit) as error:
        module = sys.modules.get(type(workload).__module__)
        raise WorkloadError(f"workload {spec}: {part} raised {describe(error, module)}") from error


def source_sha256(spec: str) -> str | None:
    """SHA-256 of the file a user's workload comes from, in hex; None for a shipped one. Raises `WorkloadError`."""
    if spec in _SHIPPED:
        return None
    place, _ = _split(spec)
    if place.endswith(".py"):
        path = Path(place).expanduser()
    else:
        origin = getattr(_import(spec, place), "__file__", None)
        if origin is None:
            raise WorkloadError(f"workload {spec}: the module {place} has no source file; expected one made of a file")
        path = Path(origin)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise _unreadable(spec, path, error) from error


def _split(spec: str) -> tuple[str, str]:
    """(file or module, name); raises `WorkloadError`."""
    place, colon, name = _SHIPPED.get(spec, spec).rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise WorkloadError(f"workload {spec}: expected the name of a workload in it too, as in {spec}:MyModel")
        raise WorkloadError(
            f"workload {spec}: no shipped workload has this name{_nearest(spec, list(_SHIPPED))}; "
            "for your own write path/to/file.py:name or module:name"
        )
    if not place or not name.isidentifier():
        raise WorkloadError(f"workload {spec}: expected path/to/file.py:name or module:name, name being one identifier")
    return place, name


def _run_file(spec: str, path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        near = _nearest(path.name, [each.name for each in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise WorkloadError(f"workload {spec}: no file {path}{near}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that a user's file never hides a library
    # A name that no import statement can mean, and the same in every process: it is part of how JAX names functions.
    module_name = f"gradbus-workload-{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise WorkloadError(f"workload {spec}: Python cannot load {path}; expected a Python source file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it runs
    try:
        module_spec.loader.exec_module(module)
    except OSError as error:
        if error.filename == str(path):
            raise _unreadable(spec, path, error) from error
        raise WorkloadError(f"workload {spec}: importing it raised {describe(error, module)}") from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload {spec}: importing it raised {describe(error, module)}") from error
    return module


def _import(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise WorkloadError(
                f"workload {spec}: no module {error.name} on the import path; a file is written path/to/file.py:name"
            ) from error
        raise WorkloadError(f"workload {spec}: importing {name} raised {describe(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload {spec}: importing {name} raised {describe(error, None)}") from error


def _unreadable(spec: str, path: Path, error: OSError) -> WorkloadError:
    return WorkloadError(f"workload {spec}: cannot read {path}: {error.strerror}")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(sorted(known)[:12])}" if known else ""


def describe(error: BaseException, module: ModuleType | None) -> str:
    """One line: type, the first line of the message, and the place, if possible in the file of `module`."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f"{error.filename}:{error.lineno}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        frames = [frame for frame in frames if frame.filename != __file__] or frames
        own = [frame for frame in frames if module is not None and frame.filename == getattr(module, "__file__", None)]
        last = (own or frames)[-1] if frames else None
        place = f"{last.filename}:{last.lineno}" if last else ""
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{f' ({place})' if place else ''}"

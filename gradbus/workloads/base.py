"""What a workload is: the one thing a user writes to train a model of their own.

Also how the text of the setting `workload` becomes one (`load`), and the check that it keeps the contract (`validate`).
Importing this module imports neither JAX nor NumPy, so the launcher may.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeGuard, cast

if TYPE_CHECKING:
    import jax

Params = Any  # a pytree of arrays; the leaves of inexact dtype are trained, the others are carried along unchanged
State = Any  # a pytree of floating arrays
Arrays = Any  # a pytree of arrays that share their leading axis, one entry per example
Metrics = dict[str, Any]  # names to scalars


class WorkloadError(ValueError):
    """The workload cannot be loaded or breaks the contract: one line with what was found and what was expected."""


class DataError(ValueError):
    """A dataset is missing or not what it should be: one line with what was found, where, and what to put there."""


class Workload(Protocol):
    """A model, its loss and its data, as five pure functions. The whole contract:

    * The functions must give the same answer whenever and wherever they are called: no global state, no clock, no
      random numbers but from `key`. `init`, `loss` and `score` are traced by JAX (jit, grad), the data functions are
      plain NumPy.
    * The batch given to `loss` and `score` is `train_data` or `eval_data` with another leading axis: the same pytree of
      JAX arrays, holding the examples of one shard. All shards of all steps have the same number of examples.
    * A workload with model state that is not trained (the statistics of BatchNorm, say) also has
      `init_state(key) -> State`, and then takes and returns it: see `StatefulWorkload`.

    A workload is chosen by the setting `workload`: the name of a shipped one, `path/to/file.py:name` or `module:name`,
    where name is an instance, or a class or function without arguments that returns one.
    """

    def init(self, key: jax.Array) -> Params:
        """The weights of version 0 from a typed key: any pytree of arrays, at least one of them of inexact dtype."""
        ...

    def loss(self, params: Params, batch: Arrays, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """The number to minimise, a floating scalar, and metrics, each a scalar.

        Both are means over the examples of the batch, as the results of shards are averaged by their examples; a
        regulariser that depends on the weights only is simply added. `key` differs for every step and shard: use it for
        dropout and augmentation, split per example where examples shall differ.
        """
        ...

    def train_data(self, folder: Path | None) -> Arrays:
        """The training examples: a pytree of NumPy arrays that share their leading axis. Memory-mapped ones are fine.

        `folder` is the setting `data.dir`. Every process calls this, and all must find the same examples in the same
        order. Raise `DataError` with one line for the user when the data is not there.
        """
        ...

    def eval_data(self, folder: Path | None) -> Arrays:
        """The examples that evaluation runs over, of the same structure as `train_data`."""
        ...

    def score(self, params: Params, batch: Arrays) -> dict[str, jax.Array]:
        """Values per example by name, each of shape (batch,); evaluation reports their means over `eval_data`."""
        ...


class StatefulWorkload(Protocol):
    """A workload with model state: as `Workload`, but for these.

    The state is a pytree of floating arrays. Each shard starts from the state of the current version; the new states of
    the shards are averaged by their examples and become the state of the next version.
    """

    def init(self, key: jax.Array) -> Params: ...

    def init_state(self, key: jax.Array) -> State: ...

    def loss(
        self, params: Params, state: State, batch: Arrays, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, State]]: ...

    def train_data(self, folder: Path | None) -> Arrays: ...

    def eval_data(self, folder: Path | None) -> Arrays: ...

    def score(self, params: Params, state: State, batch: Arrays) -> dict[str, jax.Array]: ...


def is_stateful(workload: object) -> TypeGuard[StatefulWorkload]:
    """Whether `loss` and `score` take a model state: whether the workload has `init_state`."""
    return callable(getattr(workload, "init_state", None))


# --- from a name to a workload -------------------------------------------------------------------------------------

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
            raise WorkloadError(f"workload {spec}: calling {name}() raised {_describe(error, module)}") from error
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
        raise WorkloadError(f"workload {spec}: {part} raised {_describe(error, module)}") from error


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
        raise WorkloadError(f"workload {spec}: importing it raised {_describe(error, module)}") from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload {spec}: importing it raised {_describe(error, module)}") from error
    return module


def _import(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise WorkloadError(
                f"workload {spec}: no module {error.name} on the import path; a file is written path/to/file.py:name"
            ) from error
        raise WorkloadError(f"workload {spec}: importing {name} raised {_describe(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload {spec}: importing {name} raised {_describe(error, None)}") from error


def _unreadable(spec: str, path: Path, error: OSError) -> WorkloadError:
    return WorkloadError(f"workload {spec}: cannot read {path}: {error.strerror}")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(sorted(known)[:12])}" if known else ""


def _describe(error: BaseException, module: ModuleType | None) -> str:
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


# --- the check of the contract -------------------------------------------------------------------------------------


def validate(workload: Workload, train: Arrays, *, examples: int = 7) -> None:
    """Check that `workload` keeps the contract on data like `train`, by tracing: nothing is computed.

    `examples` is the number of examples in a shard, if known. Raises `WorkloadError` for the first fault found.
    """
    import jax
    import jax.numpy as jnp

    _check_data(train)
    module = sys.modules.get(type(workload).__module__)

    def trace(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return jax.eval_shape(function, *arguments)
        except Exception as error:
            raise WorkloadError(f"workload: {what} raised {_describe(error, module)}") from error

    def batch_leaf(array: Any) -> Any:
        return jax.ShapeDtypeStruct((examples, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype))

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.tree.map(batch_leaf, train)
    params = trace("init", workload.init, key)
    leaves, structure = jax.tree.flatten(params)
    flagged = [(jnp.issubdtype(leaf.dtype, jnp.inexact), leaf) for leaf in leaves]
    if not any(trained for trained, _ in flagged):
        _fail("init returned", _show(params), "at least one array of floating dtype to train")

    loss: Callable[..., Any] = workload.loss
    score: Callable[..., Any] = workload.score
    state: tuple[Any, ...] = ()
    if has_state := is_stateful(workload):
        state = (trace("init_state", workload.init_state, key),)
        _check_state(state[0])
    result = trace("loss", loss, params, *state, batch, key)
    wanted = "(loss, (metrics, new_state))" if has_state else "(loss, metrics)"
    if not isinstance(result, tuple) or len(result) != 2:
        _fail("loss returned", _show(result), f"the pair {wanted}")
    value, metrics = result
    if not _is_array(value) or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        _fail("loss returned", _show(value), "a floating scalar as its first value: the mean over the batch")
    if has_state:
        if not isinstance(metrics, tuple) or len(metrics) != 2:
            _fail("loss returned as its second value", _show(metrics), "the pair (metrics, new_state)")
        metrics, new_state = metrics
        _check_same(state[0], new_state)
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        _fail("loss returned as metrics", _show(metrics), "a dict of names to scalars, {} if there are none")
    for name, metric in metrics.items():
        if not _is_array(metric) or metric.shape != () or not jnp.isrealobj(metric):
            _fail(f"metric {name!r} is", _show(metric), "a real scalar: the mean over the batch")

    def gradient(weights: list[Any], *rest: Any) -> Any:
        merged = iter(weights)
        full = [next(merged) if flag else jnp.zeros(leaf.shape, leaf.dtype) for flag, leaf in flagged]
        return loss(jax.tree.unflatten(structure, full), *rest)

    weights = [leaf for flag, leaf in flagged if flag]
    trace("the gradient of loss", jax.grad(gradient, has_aux=True), weights, *state, batch, key)

    scores = trace("score", score, params, *state, batch)
    if not isinstance(scores, dict) or not scores or not all(isinstance(name, str) for name in scores):
        _fail("score returned", _show(scores), "a dict of names to arrays with one value per example")
    for name, values in scores.items():
        if not _is_array(values) or values.shape != (examples,):
            _fail(
                f"score {name!r} of {examples} examples is", _show(values), f"a value per example, shape ({examples},)"
            )


def describe_data(arrays: Arrays) -> str:
    """The hash of a dataset, in hex: SHA-256 over name, dtype, shape and little-endian bytes of each array in order."""
    import jax
    import numpy as np

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        array = np.asanyarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}\n".encode())
        row_bytes = max(1, array.nbytes // max(1, len(array)))
        rows = max(1, (16 << 20) // row_bytes)  # so that a memory-mapped file is never held whole
        for first in range(0, len(array), rows):
            part = array[first : first + rows]
            little = part.astype(part.dtype.newbyteorder("<"), order="C", copy=False)
            digest.update(little.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _check_data(train: Arrays) -> None:
    import jax
    import jax.numpy as jnp

    leaves = jax.tree_util.tree_leaves_with_path(train)
    if not leaves:
        _fail("train_data returned", repr(train), "a pytree with at least one NumPy array")
    first = ""
    count = 0
    for path, leaf in leaves:
        name = f"train_data{jax.tree_util.keystr(path)}"
        if not _is_array(leaf) or not leaf.shape:
            _fail(f"{name} is", _show(leaf), "an array whose first axis is the examples")
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            _fail(f"{name} is", _show(leaf), "a numeric or boolean dtype")
        if not first:
            first, count = name, leaf.shape[0]
        if leaf.shape[0] != count:
            _fail(f"{name} has {leaf.shape[0]} examples", f"while {first} has {count}", "one shared leading axis")
    if count < 1:
        _fail(f"{first} is", _show(leaves[0][1]), "at least 1 example")


def _check_state(state: State) -> None:
    import jax
    import jax.numpy as jnp

    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            _fail(
                f"init_state(){jax.tree_util.keystr(path)} is", _show(leaf), "a floating dtype, to average over shards"
            )


def _check_same(old: State, new: State) -> None:
    import jax

    if str(jax.tree.structure(old)) != str(jax.tree.structure(new)):
        _fail("loss returned as new_state", _show(new), f"the structure of init_state: {_show(old)}")
    for (path, before), after in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            _fail(f"new_state{jax.tree_util.keystr(path)} is", _show(after), f"{_show(before)}, as init_state returned")


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _show(tree: Any) -> str:
    """A pytree with each array as dtype[shape], cut to a readable length."""
    import jax

    def leaf(value: Any) -> str:
        return f"{value.dtype}[{','.join(map(str, value.shape))}]" if _is_array(value) else repr(value)

    text = str(jax.tree.map(leaf, tree)).replace("'", "")
    return text if len(text) <= 200 else text[:200] + "..."


def _fail(found: str, value: str, expected: str) -> NoReturn:
    raise WorkloadError(f"workload: {found} {value}; expected {expected}")

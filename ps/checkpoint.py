"""A version on disk, whole or not there at all. Knows arrays by name, and no JAX.

    checkpoints/version_000100/
        weights.safetensors  optimizer.safetensors  [average.safetensors]     name -> array, readable by any framework
        manifest.json        format, version, updates, size and SHA-256 of each file, and what the caller adds as `meta`

A save writes a folder beside it, a piece at a time, flushes it to the disk and renames it; names that begin with a dot
are saves that never ended, or folders on their way out, and no checkpoints. Any plain copy of a checkpoint is one.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors

FORMAT = 1
MANIFEST = "manifest.json"
PIECE_BYTES = 1 << 18  # of work between two looks at how much was done
SHARE = 0.1  # of a processor, for saving while training goes on
PARTS = ("weights", "optimizer")  # `average` may be there besides

_NAME = re.compile(r"(?:\.replaced-)?version_([0-9]{6,})")
_SAVING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_DTYPES = {
    "BOOL": np.bool_, "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16, "I32": np.int32,
    "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}

Array = npt.NDArray[Any]
Bytes = bytes | memoryview


class CheckpointError(Exception):
    """A checkpoint that cannot be written or believed. One line: which file, what is wrong with it, what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after `updates` updates, as version `version`.

    tensors  part -> name -> array; the parts weights and optimizer are always there
    meta     whatever else a resume needs, as JSON
    """

    version: int
    updates: int
    tensors: dict[str, dict[str, Array]]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A version is on disk; `removed` are the older ones that made room for it."""

    version: int
    path: Path
    seconds: float
    removed: tuple[Path, ...]


@dataclass(frozen=True)
class Failed:
    """A version could not be saved; the older ones are untouched."""

    version: int
    reason: str


def folder_name(version: int) -> str:
    """`version_000100`."""
    return f"version_{version:06d}"


def save(folder: Path, checkpoint: Checkpoint, rest: Callable[[], None] = lambda: None) -> Path:
    """Write the checkpoint into `folder` and return its own folder. The same version is replaced. `rest` is called
    after each piece of work.

    Raises CheckpointError; then nothing of it is left and what was there before is untouched.
    """
    final = folder / folder_name(checkpoint.version)
    saving = folder / f"{_SAVING}{final.name}"
    size = sum(array.nbytes for tensors in checkpoint.tensors.values() for array in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise CheckpointError(f"{final}: expected room for {_mega(size)}, got {_mega(free)} free; {_WRITE_HINT}")
        saving.mkdir()
        files = {}
        for part, tensors in checkpoint.tensors.items():
            files[f"{part}.safetensors"] = _write(saving / f"{part}.safetensors", _encode(tensors), rest)
        _write(saving / MANIFEST, [_manifest(checkpoint, files)], rest)
        _flush(saving)
        if final.exists():
            final.rename(folder / f"{_REPLACED}{final.name}")
        saving.rename(final)
        _flush(folder)
        _tidy(folder)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written: {error.strerror or error}; {_WRITE_HINT}") from None
    finally:
        shutil.rmtree(saving, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in the folder `path`. Changes nothing there. Raises CheckpointError."""
    manifest = _read_manifest(path)
    tensors = {}
    for name, recorded in manifest["files"].items():
        content = _read(path / name)
        _compare(path / name, len(content), hashlib.sha256(content).hexdigest(), recorded)
        tensors[name.removesuffix(".safetensors")] = _decode(content, path / name)
    return Checkpoint(manifest["version"], manifest["updates"], tensors, manifest["meta"])


def verify(path: Path, rest: Callable[[], None] = lambda: None) -> None:
    """Read the checkpoint in the folder `path`, a piece at a time, and raise CheckpointError if it is not what was
    written. `rest` is called after each piece."""
    for name, recorded in _read_manifest(path)["files"].items():
        digest, size = hashlib.sha256(), 0
        for piece in _pieces(path / name):
            digest.update(piece)
            size += len(piece)
            rest()
        _compare(path / name, size, digest.hexdigest(), recorded)


def newest(folder: Path, rest: Callable[[], None] = lambda: None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` that verifies, and one line for each newer one that does not."""
    passed_over: list[str] = []
    for path in _present(folder):
        try:
            verify(path, rest)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, passed_over
    return None, passed_over


def prune(folder: Path, keep: int, rest: Callable[[], None] = lambda: None) -> list[Path]:
    """Remove all but the newest `keep` checkpoints, and return what was removed.

    Nothing goes before the newest has been read back whole, and a damaged one does not count as kept.
    Raises CheckpointError when a folder cannot be removed, ValueError for a keep below 1.
    """
    if keep < 1:
        raise ValueError(f"keep: expected at least 1, got {keep}")
    best, _ = newest(folder, rest)
    if best is None:
        return []
    present = _present(folder)
    older = present[present.index(best) + 1 :]
    kept, removed = 1, []
    try:
        for path in older:
            if kept < keep:
                kept += _complete(path)
                continue
            leaving = folder / f"{_REMOVED}{path.name.lstrip('.')}"
            path.rename(leaving)  # at once, so that nobody finds half of it
            shutil.rmtree(leaving)
            removed.append(path)
    except OSError as error:
        raise CheckpointError(f"{folder}: an old checkpoint cannot be removed: {error.strerror or error}") from None
    return removed


class _Pace:
    """Holds a thread to SHARE of a processor, which workers on this machine want too, until `hurry` is set."""

    def __init__(self, hurry: threading.Event) -> None:
        self._hurry = hurry
        self._used_s = time.thread_time()

    def __call__(self) -> None:
        worked_s = time.thread_time() - self._used_s
        self._hurry.wait(worked_s * (1 / SHARE - 1))
        self._used_s = time.thread_time()


class Saver:
    """Saves in a thread of its own, without haste, so that training goes on. Of what has to wait, only the newest is
    saved."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._changed = threading.Condition()
        self._waiting: Checkpoint | None = None
        self._closing = threading.Event()
        self._events: list[Saved | Failed] = []
        self._thread = self._start()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Save this as soon as may be. Its arrays must not change any more. Takes the place of one still waiting."""
        with self._changed:
            self._waiting = checkpoint
            if not self._thread.is_alive():  # ended by an error nobody foresaw: that save was reported as failed
                self._thread = self._start()
            self._changed.notify_all()

    def poll(self, timeout_s: float = 0.0) -> list[Saved | Failed]:
        """What has happened since the last call, in order; waits so long for something to happen."""
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            events, self._events = self._events, []
        return events

    def close(self, timeout_s: float) -> bool:
        """Finish what was submitted, the waiting one too. False if that took longer; `poll` tells what became of it."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing.is_set())
                checkpoint, self._waiting = self._waiting, None
            if checkpoint is None:
                return
            event: Saved | Failed = Failed(checkpoint.version, "the saving thread ended; its log has the reason")
            try:
                event = self._save(checkpoint)
            finally:
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()

    def _save(self, checkpoint: Checkpoint) -> Saved | Failed:
        started, pace = time.monotonic(), _Pace(self._closing)
        try:
            path = save(self._folder, checkpoint, pace)
            removed = prune(self._folder, self._keep, pace)
        except CheckpointError as error:
            return Failed(checkpoint.version, str(error))
        return Saved(checkpoint.version, path, time.monotonic() - started, tuple(removed))


_WRITE_HINT = "older checkpoints are untouched; make room or mend the folder, the next save tries again"
_READ_HINT = "it was damaged after it was written; take an older one"


def _manifest(checkpoint: Checkpoint, files: Mapping[str, Any]) -> bytes:
    manifest = {
        "format": FORMAT,
        "version": checkpoint.version,
        "updates": checkpoint.updates,
        "files": files,
        "meta": checkpoint.meta,
    }
    return json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(_read(file))
    except ValueError:
        raise CheckpointError(f"{file}: expected JSON, got something else; {_READ_HINT}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{file}: expected format {FORMAT}, the one this release reads, got {found!r}; "
            "use the release of Gradbus that wrote it"
        )
    if manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(f"{file}: expected contents that match their own SHA-256, got others; {_READ_HINT}")
    for part in PARTS:
        if f"{part}.safetensors" not in manifest["files"]:
            raise CheckpointError(
                f"{file}: expected a part {part}, got {', '.join(manifest['files'])}; take another one"
            )
    return dict(manifest)


def _digest(manifest: Mapping[str, Any]) -> str:
    as_read_back = json.loads(json.dumps(manifest))  # a number as a key becomes text, and sorts as such
    return hashlib.sha256(json.dumps(as_read_back, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _present(folder: Path) -> list[Path]:
    """The folders of all versions, newest first. One that was about to be replaced counts if nothing took its place."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    found = [(version, p) for version, p in found if p.name[0] != "." or not (folder / folder_name(version)).exists()]
    return [path for _, path in sorted(found, reverse=True)]


def _complete(path: Path) -> bool:
    """Whether all files are there in their sizes: much faster than reading them."""
    try:
        files = _read_manifest(path)["files"]
        return all((path / name).stat().st_size == recorded["size_bytes"] for name, recorded in files.items())
    except (CheckpointError, OSError):
        return False


def _tidy(folder: Path) -> None:
    """Remove what saves that never ended have left, and put back what was about to be replaced."""
    for path in folder.iterdir():
        if path.name.startswith(_REPLACED) and not (folder / path.name.removeprefix(_REPLACED)).exists():
            path.rename(folder / path.name.removeprefix(_REPLACED))
        elif path.name.startswith((_SAVING, _REPLACED, _REMOVED)):
            shutil.rmtree(path)


def _encode(tensors: Mapping[str, Array]) -> Iterator[Bytes]:
    """The content of a safetensors file in pieces (https://huggingface.co/docs/safetensors, `Format`).

    The library's own writer holds the interpreter for all of a large model, and copies it twice.
    """
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[array.dtype], "shape": array.shape, "data_offsets": (end, end + array.nbytes)
        }  # fmt: skip
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in tensors.values():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES].data


def _decode(content: bytes, file: Path) -> dict[str, Array]:
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        return {
            name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in entries
        }
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: expected safetensors of known dtypes, got an error: {error}") from None


def _read(file: Path) -> bytes:
    return b"".join(_pieces(file))


def _pieces(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                yield piece
    except FileNotFoundError:
        raise CheckpointError(f"{file}: expected a file, got nothing there; the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


def _write(file: Path, pieces: Iterable[Bytes], rest: Callable[[], None]) -> dict[str, Any]:
    """What the manifest says of the file."""
    digest, size = hashlib.sha256(), 0
    with file.open("xb") as stream:
        for piece in pieces:
            stream.write(piece)
            digest.update(piece)
            size += len(piece)
            rest()
        stream.flush()
        os.fsync(stream.fileno())
    return {"size_bytes": size, "sha256": digest.hexdigest()}


def _compare(file: Path, size: int, sha256: str, recorded: Mapping[str, Any]) -> None:
    if size != recorded["size_bytes"]:
        raise CheckpointError(f"{file}: expected {recorded['size_bytes']} bytes, got {size}; {_READ_HINT}")
    if sha256 != recorded["sha256"]:
        raise CheckpointError(
            f"{file}: expected SHA-256 {recorded['sha256'][:12]}..., got {sha256[:12]}...; {_READ_HINT}"
        )


def _flush(folder: Path) -> None:
    """Names, too, are on disk only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mega(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"

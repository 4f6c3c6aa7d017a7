"""Checkpoints: whole or not there, whatever happens to the process, the disk or the files."""

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ps import checkpoint as module
from ps.checkpoint import Checkpoint, CheckpointError, Failed, Saved, Saver, load, newest, prune, save


def some(version: int, **meta: Any) -> Checkpoint:
    weights = {
        "params['w']": np.full((3, 2), version, np.float32),
        "params['t']": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "params['half']": np.array([1.5, version], ml_dtypes.bfloat16),
        "params['ids']": np.array([version], np.int64),
        "params['on']": np.array(True),
        "state['n']": np.zeros((0, 3), np.float32),
    }
    optimizer = {"optimizer[0].count": np.array(version, np.int32)}
    return Checkpoint(version, version, {"weights": weights, "optimizer": optimizer}, {"session": 5} | meta)


def same(a: Checkpoint, b: Checkpoint) -> bool:
    flat = [
        {(part, name): (x.dtype.name, x.shape, x.tobytes()) for part, xs in c.tensors.items() for name, x in xs.items()}
        for c in (a, b)
    ]
    return flat[0] == flat[1] and (a.version, a.updates, a.meta) == (b.version, b.updates, b.meta)


def versions(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("version_")) for path in folder.glob("version_*"))


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    average = {"average": {"params['w']": np.ones(2, np.float32)}}
    checkpoint = some(100, loss_average=0.1, leaves=[["params['w']", [3, 2]]], nan=math.inf)
    checkpoint = Checkpoint(100, 98, checkpoint.tensors | average, checkpoint.meta)
    path = save(tmp_path / "checkpoints", checkpoint)
    assert path == tmp_path / "checkpoints" / "version_000100"
    assert sorted(file.name for file in path.iterdir()) == [
        "average.safetensors", "manifest.json", "optimizer.safetensors", "weights.safetensors"]  # fmt: skip
    assert same(load(path), checkpoint)
    assert hidden(path.parent) == []


def test_numbers_as_keys_of_meta_are_text_once_read(tmp_path: Path) -> None:
    path = save(tmp_path, some(1, counts={10: "a", 9: "b"}))
    assert load(path).meta["counts"] == {"10": "a", "9": "b"}


def test_a_plain_copy_is_a_checkpoint_and_extra_files_do_no_harm(tmp_path: Path) -> None:
    path = save(tmp_path / "a", some(7))
    shutil.copytree(path, tmp_path / "b" / path.name)
    (tmp_path / "b" / path.name / "notes.txt").write_text("mine")
    (tmp_path / "b" / "other").mkdir()
    assert newest(tmp_path / "b") == (tmp_path / "b" / path.name, [])
    assert same(load(tmp_path / "b" / path.name), some(7))


def test_the_same_version_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, some(3, session=1))
    path = save(tmp_path, some(3, session=2))
    assert load(path).meta["session"] == 2
    assert (versions(tmp_path), hidden(tmp_path)) == ([3], [])


def test_what_an_earlier_release_has_saved_is_still_read() -> None:
    """A folder for each format there was: a release that changes it adds one, and says what it still reads."""
    folder = Path(__file__).parent / "checkpoints_of_format_1"
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    path, passed_over = newest(folder)
    assert path == folder / "version_000007" and passed_over == []
    assert same(load(path), some(7))
    assert before == {path: path.read_bytes() for path in folder.glob("*/*")}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def set_format(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 999}))


def drop_part(file: Path) -> None:
    manifest = json.loads(file.read_text())
    del manifest["files"]["optimizer.safetensors"], manifest["sha256"]
    file.write_text(json.dumps(manifest | {"sha256": module._digest(manifest)}))


@pytest.mark.parametrize(
    ("name", "spoil", "line"),
    [
        ("weights.safetensors", truncate, r"expected \d+ bytes, got \d+; it was damaged after it was written"),
        ("weights.safetensors", flip, r"expected SHA-256 [0-9a-f]{12}\.\.\., got [0-9a-f]{12}\.\.\.; it was damaged"),
        ("optimizer.safetensors", flip, "expected SHA-256"),
        ("optimizer.safetensors", Path.unlink, "expected a file, got nothing there; the checkpoint is incomplete"),
        ("manifest.json", Path.unlink, "expected a file, got nothing there; the checkpoint is incomplete"),
        ("manifest.json", truncate, "expected JSON, got something else"),
        ("manifest.json", flip, "expected (JSON|contents that match their own SHA-256), got"),
        ("manifest.json", drop_part, "expected a part optimizer, got weights.safetensors; take another one"),
        ("manifest.json", set_format, "expected format 1, the one this release reads, got 999; "
                                      "use the release of Gradbus that wrote it"),
    ],
)  # fmt: skip
def test_damage_is_found_and_the_one_before_is_taken(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], line: str
) -> None:
    before, path = save(tmp_path, some(1)), save(tmp_path, some(2))
    spoil(path / name)
    left = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError, match=line) as error:
        load(path)
    assert str(error.value).startswith(f"{path / name}: ") and "\n" not in str(error.value)
    assert newest(tmp_path) == (before, [str(error.value)])
    assert left == {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_flip_anywhere_in_the_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, some(2))
    whole = (path / "manifest.json").read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        (path / "manifest.json").write_bytes(changed)
        try:
            assert same(load(path), some(2)), f"byte {position}"  # white space may be another
        except CheckpointError:
            continue


def test_there_may_be_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "no such folder") == (None, [])
    assert newest(tmp_path) == (None, [])
    assert prune(tmp_path, 1) == []


class Killed(BaseException):
    """Stands for kill -9: from here on, nothing the process does has an effect."""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Saves version 1 again, then 2, keeping one; dies at each operation on files in turn, in the middle of it."""
    operations = 0
    while True:
        folder = tmp_path / str(operations)
        save(folder, some(1))
        with pytest.MonkeyPatch.context() as patch:
            die_at_operation(patch, operations)
            try:
                save(folder, some(1))
                save(folder, some(2))
                prune(folder, 1)
                break
            except Killed:
                pass
        path, _ = newest(folder)
        assert path is not None, operations
        assert same(load(path), some(load(path).version)), operations
        save(folder, some(3))
        prune(folder, 1)
        assert (versions(folder), hidden(folder)) == ([3], []), operations
        operations += 1
    assert operations > 15


def die_at_operation(patch: pytest.MonkeyPatch, last: int) -> None:
    done = 0

    def dying(operation: Callable[..., Any], half: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == last:
                half(*args)
            done += 1
            if done > last:
                raise Killed
            return operation(*args, **kwargs)

        return perform

    def half_written(file: Path, pieces: Iterable[Any], _: Any) -> None:
        content = b"".join(pieces)
        file.write_bytes(content[: len(content) // 2])

    def half_removed(folder: Path, *_: Any) -> None:
        for file in list(folder.glob("*"))[:1]:
            file.unlink()

    rmtree = shutil.rmtree
    patch.setattr(module, "_write", dying(module._write, half_written))
    patch.setattr(module, "_flush", dying(module._flush, lambda *_: None))
    patch.setattr(shutil, "rmtree", dying(rmtree, half_removed))
    patch.setattr(Path, "rename", dying(Path.rename, lambda *_: None))
    patch.setattr(Path, "mkdir", dying(Path.mkdir, lambda *_: None))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("failing", range(3))
def test_a_failed_save_leaves_nothing_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, failing: int
) -> None:
    save(tmp_path, some(1))
    written = 0

    def write(file: Path, pieces: Iterable[Any], rest: Any) -> dict[str, Any]:
        nonlocal written
        file.write_bytes(b"".join(pieces)[:5])
        written += 1
        if written > failing:
            raise OSError(code, os.strerror(code))
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", write)
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, some(2))
    assert str(error.value) == (
        f"{tmp_path}/version_000002: cannot be written: {os.strerror(code)}; older checkpoints are untouched; "
        "make room or mend the folder, the next save tries again"
    )
    assert (versions(tmp_path), hidden(tmp_path)) == ([1], [])
    assert same(load(tmp_path / "version_000001"), some(1))
    assert same(load(save(tmp_path, some(2))), some(2))


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("written"))
    with pytest.raises(CheckpointError, match=r"version_000001: expected room for 0\.0 MB, got 0\.0 MB free; "):
        save(tmp_path, some(1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/version_000001: cannot be written: File exists; "):
        save(tmp_path / "file", some(1))
    with pytest.raises(CheckpointError, match=r"cannot be written: Not a directory; "):
        save(tmp_path / "file" / "inside", some(1))


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, [6]), (3, [4, 5, 6]), (6, [1, 2, 3, 4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_prune_keeps_the_newest(tmp_path: Path, keep: int, expected: list[int]) -> None:
    for version in range(1, 7):
        save(tmp_path, some(version))
    removed = prune(tmp_path, keep)
    assert versions(tmp_path) == expected
    assert sorted([int(path.name[-6:]) for path in removed] + expected) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("keep", [0, -1])
def test_prune_refuses_to_keep_none(tmp_path: Path, keep: int) -> None:
    save(tmp_path, some(1))
    with pytest.raises(ValueError, match=f"keep: expected at least 1, got {keep}"):
        prune(tmp_path, keep)
    assert versions(tmp_path) == [1]


def test_prune_counts_only_what_is_whole(tmp_path: Path) -> None:
    for version in range(1, 6):
        save(tmp_path, some(version))
    flip(tmp_path / "version_000005" / "weights.safetensors")
    truncate(tmp_path / "version_000003" / "weights.safetensors")
    prune(tmp_path, 2)
    assert versions(tmp_path) == [2, 3, 4, 5]
    flip(tmp_path / "version_000004" / "weights.safetensors")
    flip(tmp_path / "version_000002" / "weights.safetensors")
    assert prune(tmp_path, 1) == []  # no whole one: nothing may go


def test_the_saver_saves_and_prunes(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    removed = []
    for version in (1, 2, 3):
        saver.submit(some(version))
        (event,) = saver.poll(timeout_s=10)
        assert isinstance(event, Saved) and event.path == tmp_path / f"version_{version:06d}"
        removed += event.removed
    assert saver.close(timeout_s=10) and saver.poll() == []
    assert removed == [tmp_path / "version_000001"]
    assert versions(tmp_path) == [2, 3]


class Gate:
    """Holds a save until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        patch.setattr(module, "save", self._save)

    def _save(self, folder: Path, checkpoint: Checkpoint, rest: Any, save: Any = save) -> Path:
        self.reached.set()
        assert self.opened.wait(10)
        return save(folder, checkpoint, rest)


def test_saving_takes_a_tenth_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s, waited_s = 5.0, []
    monkeypatch.setattr(module.time, "thread_time", lambda: used_s)
    hurry = threading.Event()
    monkeypatch.setattr(hurry, "wait", waited_s.append)
    pace = module._Pace(hurry)
    for work_s in (0.002, 0.0, 0.05):
        used_s += work_s
        pace()
    assert waited_s == pytest.approx([0.018, 0.0, 0.45])


def test_the_last_save_of_a_run_makes_haste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE", 1e-6)
    saver = Saver(tmp_path, keep=1)
    saver.submit(some(1))
    saver.submit(some(2))
    assert saver.close(timeout_s=20) and versions(tmp_path) == [2]


def test_a_large_array_is_saved_in_pieces_and_holds_up_nobody(tmp_path: Path) -> None:
    large = {"a": np.arange(module.PIECE_BYTES, dtype=np.float32), "b": np.ones((3, 5), np.int8)}
    rests: list[None] = []
    checkpoint = Checkpoint(1, 1, {"weights": large, "optimizer": large}, {})
    path = save(tmp_path, checkpoint, lambda: rests.append(None))
    assert len(rests) == 2 * (1 + 4 + 1) + 1, "header, pieces of a, b; twice, and the manifest"
    assert same(load(path), checkpoint)
    rests.clear()
    assert prune(tmp_path, 1, lambda: rests.append(None)) == [] and len(rests) == 2 * 5


def test_while_one_is_saved_only_the_newest_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, keep=9)
    saver.submit(some(1))
    assert gate.reached.wait(10)
    for version in (2, 3, 4):
        saver.submit(some(version))
    assert saver.poll() == [] and not saver.close(timeout_s=0)
    gate.opened.set()
    assert saver.close(timeout_s=10)
    assert [event.version for event in saver.poll()] == [1, 4]
    assert versions(tmp_path) == [1, 4]


def test_a_failure_is_reported_and_the_next_save_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    saver = Saver(folder, keep=1)
    saver.submit(some(1))
    (failed,) = saver.poll(timeout_s=10)
    assert isinstance(failed, Failed) and failed.version == 1 and "File exists" in failed.reason
    folder.unlink()
    saver.submit(some(2))
    assert saver.close(timeout_s=10)
    (saved,) = saver.poll()
    assert isinstance(saved, Saved) and saved.path == folder / "version_000002"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unforeseen_error_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "save", lambda *_: 1 / 0)
        saver.submit(some(1))
        saver._thread.join(10)
    assert [type(event) for event in saver.poll()] == [Failed]
    saver.submit(some(2))
    assert saver.close(timeout_s=10)
    assert versions(tmp_path) == [2]

"""The run folder: unique, complete, and readable after any kill or full disk."""

import errno
import json
import os
import struct
import threading

import pytest

from gradbus.records import Ledger, Metrics, RunFolder, RunFolderError, create, find, read_rows
from gradbus.settings import load


def settings(tmp_path, *overrides):
    return load(None, [f"run.dir={tmp_path / 'runs'}", *overrides])


def test_a_new_run_folder(tmp_path):
    run = create(settings(tmp_path, "name=mine", "seed=7", "train.threads=2"), ["name=mine", "seed=7"])
    assert run.path.name.endswith("-mine") and run.path.parent == tmp_path / "runs"
    assert load(run.config).seed == 7
    assert (run.path / "overrides.txt").read_text() == "name=mine\nseed=7\n"
    assert run.checkpoints.is_dir() and run.log("w0").parent.is_dir()
    manifest = run.read_manifest()
    assert manifest["seed"] == 7 and manifest["threads"] == 2
    assert set(manifest["packages"]) == {"gradbus", "jax", "jaxlib", "numpy", "optax", "pyzmq"}
    assert all(manifest["packages"].values())
    assert {"python", "host", "os", "cpu", "cores", "commit", "argv", "created"} <= set(manifest)
    assert run.read_summary() == {} and run.updates() == {}


def test_latest_points_to_the_newest(tmp_path):
    first, second, _ = (create(settings(tmp_path), []) for _ in range(3))
    first.make_latest()
    second.make_latest()  # the third never began
    assert first.path != second.path, "both began in the same second, or nearly"
    link = tmp_path / "runs" / "latest"
    assert os.readlink(link) == second.path.name, "relative, so that the folder can be moved"
    assert find("latest", tmp_path / "runs") == second
    assert find(first.path.name, tmp_path / "runs") == first
    assert find(str(first.path), tmp_path / "elsewhere") == first


def test_many_starts_at_once_get_a_folder_each(tmp_path):
    made: list[RunFolder] = []
    chosen = settings(tmp_path)
    threads = [threading.Thread(target=lambda: made.append(create(chosen, []))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({run.path for run in made}) == 8


def test_a_folder_called_latest_is_left_alone(tmp_path):
    (tmp_path / "runs" / "latest" / "precious").mkdir(parents=True)
    create(settings(tmp_path), []).make_latest()
    assert (tmp_path / "runs" / "latest" / "precious").is_dir()
    assert not list((tmp_path / "runs").glob(".latest*"))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFolderError) as caught:
        create(settings(tmp_path), [])
    assert str(caught.value) == (
        f"run.dir: cannot write a run folder in {tmp_path / 'runs'}: File exists; "
        "choose another place with run.dir=PATH"
    )


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("latest", "there is no latest run in {runs}; start one with: gradbus cluster"),
        ("nowhere", "nowhere is not a run folder: there is no nowhere/config.yaml"),
    ],
)
def test_a_run_that_is_not_there(tmp_path, where, message):
    with pytest.raises(RunFolderError) as caught:
        find(where, tmp_path)
    assert str(caught.value) == message.format(runs=tmp_path)


def test_the_manifest_is_updated_field_by_field(tmp_path):
    run = RunFolder(tmp_path)
    run.update_manifest(seed=1)
    run.update_manifest(dataset={"sha256": "ab"})
    assert run.read_manifest() == {"seed": 1, "dataset": {"sha256": "ab"}}
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_manifest_that_cannot_be_written_does_not_disturb(tmp_path):
    RunFolder(tmp_path / "gone").update_manifest(seed=1)


def test_the_summary_is_strict_json(tmp_path):
    run = RunFolder(tmp_path)
    run.write_summary({"status": "failed", "loss": float("nan")})
    assert json.loads(run.summary.read_text(), parse_constant=pytest.fail) == {"status": "failed", "loss": None}
    assert run.read_summary()["status"] == "failed"


def test_rows_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append({"kind": "update", "version": 1})
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "update", "vers')
    again = Ledger(path)
    again.append({"kind": "update", "version": 2})
    again.close()
    assert [row["version"] for row in read_rows(path)] == [1, 2]
    assert list(RunFolder(tmp_path).updates()) == [1, 2]


@pytest.mark.parametrize("junk", [b"", b"\n", b"nonsense\n", b"[1, 2]\n", b"\xff\xfe\n", b'{"kind": "upd'])
def test_readers_skip_what_is_no_row(tmp_path, junk):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 1}\n' + junk)
    assert list(read_rows(path)) == [{"version": 1}]
    assert list(read_rows(tmp_path / "missing.jsonl")) == []


def test_a_full_disk_is_told_once_and_the_rows_come_later(tmp_path, monkeypatch):
    faults = []
    ledger = Ledger(tmp_path / "ledger.jsonl", faults.append)
    ledger.append({"version": 1})
    write = os.write
    full = OSError(errno.ENOSPC, "No space left on device")

    def half_then_nothing(fd, data):
        if len(faults) == 0 and len(data) > 5:
            return write(fd, data[:5])
        raise full

    monkeypatch.setattr(os, "write", half_then_nothing)
    for version in (2, 3, 4):
        ledger.append({"version": version})
    assert "the disk is full" in faults[0] and "No space left" in faults[1] and len(faults) == 2
    assert ledger.fault is not None
    monkeypatch.setattr(os, "write", write)
    ledger.append({"version": 5})
    assert ledger.fault is None
    ledger.close()
    assert [row["version"] for row in read_rows(tmp_path / "ledger.jsonl")] == [1, 2, 3, 4, 5]


def test_a_missing_folder_is_a_fault_not_an_exception(tmp_path):
    ledger = Ledger(tmp_path / "gone" / "ledger.jsonl")
    ledger.append({"version": 1})
    assert ledger.fault == "ledger.jsonl cannot be written: No such file or directory; training goes on"


def test_an_array_scalar_is_a_number(tmp_path):
    numpy = pytest.importorskip("numpy")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append({"loss": numpy.float32(0.5), "shards": [numpy.int64(3)], "path": tmp_path})
    (row,) = read_rows(tmp_path / "ledger.jsonl")
    assert row["loss"] == 0.5 and row["shards"] == [3] and row["path"] == str(tmp_path)


def test_updates_are_the_history_of_the_weights_as_they_are(tmp_path):
    run = RunFolder(tmp_path)
    ledger = Ledger(run.ledger)
    ledger.append({"kind": "session", "session": 1, "version": 0})
    for version in (1, 2, 3, 4):
        ledger.append({"kind": "update", "version": version, "session": 1})
    ledger.append({"kind": "session", "session": 2, "version": 2})
    ledger.append({"kind": "update", "version": 3, "session": 2})
    ledger.close()
    assert {version: row["session"] for version, row in run.updates().items()} == {1: 1, 2: 1, 3: 2}


def records(path):
    """The records of an event file: length, checksum of it, data, checksum of that."""
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + size]
        data = data[16 + size :]


def test_metrics_become_event_files(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    metrics = Metrics(tmp_path / "metrics.jsonl", events=tmp_path / "eval")
    metrics.append({"version": 10, "loss": 0.5, "learning_rate": None, "metrics": {"accuracy": 0.25}})
    metrics.append({"version": 10, "eval": {"accuracy": 0.75}, "seconds": 1.0})
    metrics.close()
    (file,) = (tmp_path / "eval").glob("events.out.tfevents.*")
    events = [event_pb2.Event.FromString(record) for record in records(file)]
    values = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert values == [(10, "loss", 0.5), (10, "metrics/accuracy", 0.25), (10, "eval/accuracy", 0.75)]
    assert [row["version"] for row in read_rows(tmp_path / "metrics.jsonl")] == [10, 10]


def test_without_tensorboardx_metrics_are_still_written(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX.event_file_writer", None)
    metrics = Metrics(tmp_path / "metrics.jsonl", events=tmp_path)
    metrics.append({"version": 1, "loss": 0.5})
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_event_files_that_cannot_be_written_do_not_disturb(tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "eval").write_text("a file")
    metrics = Metrics(tmp_path / "metrics.jsonl", events=tmp_path / "eval")
    metrics.append({"version": 1, "loss": 0.5})
    metrics.append({"version": 2, "loss": 0.4})
    assert [row["version"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    metrics.close()

"""`gradbus explain`: the ledger in words. tests/transcripts/explain-*.txt are what a person reads.

REGENERATE=1 writes them anew; read the difference before you keep it.
"""

import os
from pathlib import Path

import pytest

from gradbus.drawing import picture
from gradbus.explain import explain_run, explain_version
from gradbus.records import Ledger, RunFolder, RunFolderError
from gradbus.settings import dump, load

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"


def at(second: int) -> str:
    return f"2026-12-01T10:00:{second:02}.250Z"


def update(version: int, shards, **more):
    row = {
        "kind": "update",
        "version": version,
        "from_version": version - 1,
        "session": "00ab",
        "shards": shards,
        "examples": 128,
        "updates": version,
        "applied": True,
        "left_out": [],
        "learning_rate": 1e-3,
        "loss": 2.0 / version,
        "metrics": {},
        "gradient_norm": 1.25,
        "update_norm": 0.0123,
        "time": at(2 + version),
        "seconds": 0.021,
        "bus_seconds": 0.001,
        "apply_seconds": 0.002,
    }
    return row | more


def member(event: str, number: int, name: str, second: int, reason: str = ""):
    row = {"kind": "member", "event": event, "member": number, "name": name, "host": "vm", "pid": 70 + number}
    return row | {"reason": reason, "time": at(second)}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """Two workers; w1 is lost and comes back as member 3; a session ends after version 6 and the next begins at 5."""
    folder = RunFolder(tmp_path)
    folder.config.write_text(dump(load(None, ["optimizer={name: adam, learning_rate: 1e-3}"])))
    ledger = Ledger(folder.ledger)
    both = [[0, 2, 1], [2, 4, 2]]
    for row in [
        {"kind": "session", "session": "00ab", "version": 0, "resumed_from": None, "time": at(0)},
        member("joined", 1, "w0", 1),
        member("joined", 2, "w1", 1),
        update(1, both),
        update(2, both),
        member("lost", 2, "w1", 5, "silent for 10.0 s"),
        update(3, [[0, 2, 1], [2, 3, 1], [3, 4, 1]]),
        {
            "kind": "refused",
            "time": at(6),
            "member": 2,
            "name": "w1",
            "version": 2,
            "bucket": 0,
            "shards": [2, 4],
            "reason": "computed from version 2, the open step is 3",
            "open_version": 3,
        },
        member("joined", 3, "w1", 6),
        update(
            4, [[0, 2, 1], [2, 4, 3]], applied=False, updates=3, learning_rate=None, left_out=[], gradient_norm=None
        ),
        update(5, [[0, 1, 3], [1, 2, 1], [2, 3, 3]], left_out=[3], examples=96, updates=4),
        update(6, [[0, 2, 1], [2, 4, 3]]),
        {
            "kind": "session",
            "session": "00cd",
            "version": 5,
            "resumed_from": "checkpoints/version_000005",
            "time": at(20),
        },
        member("joined", 1, "w0", 21),
    ]:
        ledger.append(row)
    ledger.close()
    return folder


def compare(name: str, text: str, run: RunFolder) -> None:
    text = text.replace(str(run.path), "RUN") + "\n"
    path = TRANSCRIPTS / f"explain-{name}.txt"
    if os.environ.get("REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


def test_a_whole_run(run):
    run.write_summary({"status": "done", "version": 5, "loss": 0.4, "eval": {"accuracy": 0.9731}, "reason": ""})
    compare("run", explain_run(run), run)


def test_a_worker_of_the_run(run):
    compare("run-worker", explain_run(run, "w1"), run)


def test_one_version(run):
    compare("version", explain_version(run, 3), run)


def test_a_contribution_that_was_refused(run):
    compare("version-worker", explain_version(run, 3, "w1"), run)


def test_a_step_that_was_skipped(run):
    compare("skipped", explain_version(run, 4), run)


def test_a_shard_that_was_left_out(run):
    compare("left-out", explain_version(run, 5, "w0"), run)


def test_the_initial_weights(run):
    assert "initial weights" in explain_version(run, 0)


@pytest.mark.parametrize("version", [6, 7, -1])
def test_a_version_that_is_not_there(run, version):
    """Version 6 was made, and lost with the first session."""
    with pytest.raises(
        RunFolderError, match=f"^version {version} is not in the ledger of .*, which has versions 1 to 5$"
    ):
        explain_version(run, version)


def test_a_worker_that_was_never_there(run):
    with pytest.raises(RunFolderError, match=r"^no worker of this run was called 'w7'; there were: w0, w1$"):
        explain_version(run, 3, "w7")


def test_an_empty_ledger(tmp_path):
    run = RunFolder(tmp_path)
    run.config.write_text(dump(load(None)))
    assert "No update has been made yet" in explain_run(run)
    with pytest.raises(RunFolderError, match="no update yet"):
        explain_version(run, 3)


def test_rows_of_another_release_do_not_break_it(tmp_path):
    run = RunFolder(tmp_path)
    run.config.write_text(dump(load(None)))
    ledger = Ledger(run.ledger)
    for row in ({"kind": "update", "version": 1}, {"kind": "refused"}, {"kind": "member"}, {"kind": "session"}, {}):
        ledger.append(row)
    ledger.close()
    assert "Version 1 was made" in explain_version(run, 1)
    assert "versions 1 to 1" in explain_run(run)


def test_a_drawing_of_many_workers_stays_small():
    work = {f"w{index}": "shard 1" for index in range(40)}
    drawing = picture(work, "3", "4", "of 64 shards", "256 examples", "sgd")
    assert "and 35 more" in drawing and len(drawing.splitlines()) < 20
    assert max(map(len, drawing.splitlines())) < 130


def test_a_drawing_of_one_worker():
    drawing = picture({"w0": "shards 0-3"}, "3", "4", "((0+1)+(2+3))", "128 examples", "sgd")
    assert drawing.splitlines()[0].startswith("  w0  shards 0-3 ----- PUSH --> PULL")

"""The audit passes what is right and names the first thing that is not."""

from typing import Any

import pytest

from gradbus.audit import Violation, audit
from gradbus.records import Ledger, RunFolder, RunFolderError
from gradbus.settings import dump, load

SETTINGS = load(None, ["train.batch_size=8", "train.shards=4", "workload=quadratic"])
SESSION = {"kind": "session", "session": "s1", "version": 0, "resumed_from": None}
JOINED = {"kind": "member", "event": "joined", "member": 1, "name": "w0"}


def update(version: int, **changes: Any) -> dict[str, Any]:
    row = {
        "kind": "update", "version": version, "from_version": version - 1, "session": "s1",
        "shards": [[0, 2, 1], [2, 4, 1]], "examples": 8, "updates": version, "applied": True, "left_out": [],
    }  # fmt: skip
    return row | changes


def run_of(tmp_path: Any, *rows: dict[str, Any]) -> RunFolder:
    run = RunFolder(tmp_path)
    run.write_config(dump(SETTINGS), [])
    run.update_manifest(dataset={"samples": 10})
    ledger = Ledger(run.ledger)
    for row in rows:
        ledger.append(row)
    ledger.close()
    return run


def test_a_whole_run_is_clean_and_its_epochs_are_counted(tmp_path: Any) -> None:
    text = audit(run_of(tmp_path, SESSION, JOINED, *map(update, range(1, 6))))
    assert "5 versions" in text and "40 examples" in text and "4 whole epochs hold each of 10 samples" in text


def test_a_resumed_session_replaces_what_came_after_its_start(tmp_path: Any) -> None:
    again = SESSION | {"session": "s2", "version": 2}
    later = [update(version, session="s2") for version in (3, 4)]
    text = audit(run_of(tmp_path, SESSION, JOINED, *map(update, range(1, 6)), again, JOINED, *later))
    assert "4 versions" in text


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([SESSION, JOINED, update(1), update(1)], "version 1: version: found 1, expected 2"),
        ([SESSION, JOINED, update(1), update(3)], "expected 2"),
        ([SESSION, JOINED, update(1, from_version=7)], "made from version: found 7, expected 0"),
        ([SESSION, JOINED, update(1, shards=[[0, 2, 1], [0, 2, 1], [2, 4, 1]])], "shards: found [0, 1, 0, 1, 2, 3]"),
        ([SESSION, JOINED, update(1, shards=[[0, 2, 1]])], "shards: found [0, 1]"),
        ([SESSION, JOINED, update(1, shards=[[0, 3, 1], [3, 4, 1]])], "no nodes of the tree"),
        ([SESSION, JOINED, update(1, examples=10)], "examples: found 10, expected 8"),
        ([SESSION, JOINED, update(1, left_out=[0])], "examples: found 8, expected 6"),
        ([SESSION, JOINED, update(1, session="s0")], "session: found s0"),
        ([SESSION, update(1)], "contributions of strangers: found [1, 1]"),
        ([SESSION, JOINED, update(1, updates=2)], "updates: found 2, expected 1"),
        ([SESSION | {"version": 5}], "began at version 5, which nobody made"),
        ([update(1)], "an update before any session"),
    ],
)
def test_the_first_violation_is_named(tmp_path: Any, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(Violation, match=r"^ledger row \d+: ") as caught:
        audit(run_of(tmp_path, *rows))
    assert words in str(caught.value)


def test_what_was_skipped_does_not_count_as_used(tmp_path: Any) -> None:
    skipped = update(2, applied=False, left_out=[0], examples=6, updates=1)
    text = audit(run_of(tmp_path, SESSION, JOINED, update(1), skipped, update(3, updates=2, left_out=[1], examples=6)))
    assert "3 versions" in text and "; 14 examples stand behind the weights; " in text
    assert text.endswith("; left out as not finite: 1 shard; skipped as not finite: 1 step")


def test_a_folder_without_updates_is_no_proof(tmp_path: Any) -> None:
    with pytest.raises(RunFolderError):
        audit(run_of(tmp_path, SESSION))

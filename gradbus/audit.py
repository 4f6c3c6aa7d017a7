"""Exactly once, proven from the ledger: every sample of every epoch stands behind one applied contribution.

The ledger of all sessions is read in order. What must hold is checked row by row; the first that breaks it is named.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bus import tree
from gradbus.records import Row, RunFolder, RunFolderError, read_rows
from gradbus.settings import Settings, load
from gradbus.wording import plural


class Violation(Exception):
    """The ledger tells of something that must not be. One line: where, what was found, what was expected."""


@dataclass(slots=True)
class Session:
    """One life of the PS as the ledger tells it."""

    name: str
    version: int
    members: set[int] = field(default_factory=set)


def audit(run: RunFolder) -> str:
    """One line that says what was proven. Raises Violation, or RunFolderError where there is nothing to audit."""
    settings = load(run.config)
    samples = run.read_manifest().get("dataset", {}).get("samples")
    if not isinstance(samples, int) or not run.ledger.is_file():
        raise RunFolderError(f"{run.path} has no ledger to audit")
    history = _check_rows(read_rows(run.ledger), settings)
    if not history:
        raise RunFolderError(f"{run.ledger} holds no update yet")
    epochs = _check_epochs(len(history), samples, settings)
    applied = [row for row in history.values() if row["applied"]]
    examples = sum(row["examples"] for row in applied)
    left_out = sum(len(row.get("left_out", ())) for row in applied)
    skipped = len(history) - len(applied)
    text = (
        f"audit clean: {plural(len(history), 'version')}, each made once from the one before, of "
        f"{plural(settings.train.shards, 'shard')} each; {examples} examples stand behind the weights; "
        f"{epochs} whole epochs hold each of {samples} samples exactly once"
    )
    text += f"; left out as not finite: {plural(left_out, 'shard')}" if left_out else ""
    return f"{text}; skipped as not finite: {plural(skipped, 'step')}" if skipped else text


def _check_rows(rows: Iterable[Row], settings: Settings) -> dict[int, Row]:
    """The updates that made the weights as they are now, by version."""
    history: dict[int, Row] = {}
    session: Session | None = None
    for number, row in enumerate(rows, start=1):
        where = f"ledger row {number}"
        match row.get("kind"):
            case "session":
                start = row["version"]
                if start > 0 and start not in history:
                    raise Violation(f"{where}: session {row['session']} began at version {start}, which nobody made")
                session = Session(row["session"], start)
                history = {version: kept for version, kept in history.items() if version <= start}
            case "member" if session is not None and row["event"] == "joined":
                session.members.add(row["member"])
            case "update":
                if session is None:
                    raise Violation(f"{where}: an update before any session")
                _check_update(where, row, session, history, settings)
                history[row["version"]] = row
    return history


def _check_update(where: str, row: Row, session: Session, history: dict[int, Row], settings: Settings) -> None:
    shards, shard_size = settings.train.shards, settings.train.batch_size // settings.train.shards
    last = max(history, default=0)

    def expect(what: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise Violation(f"{where}: version {row['version']}: {what}: found {found}, expected {expected}")

    expect("version", row["version"], last + 1)
    expect("made from version", row["from_version"], last)
    expect("session", row["session"], session.name)
    ranges = [(low, high) for low, high, _ in row["shards"]]
    expect("shards", [shard for low, high in ranges for shard in range(low, high)], list(range(shards)))
    expect("shard ranges that are no nodes of the tree", [r for r in ranges if not tree.is_node(r, shards)], [])
    expect("contributions of strangers", [m for _, _, m in row["shards"] if m not in session.members], [])
    left_out = row.get("left_out", [])
    expect("examples", row["examples"], (shards - len(left_out)) * shard_size)
    applied = sum(each["applied"] for each in history.values()) + row["applied"]
    expect("updates", row["updates"], applied)


def _check_epochs(steps: int, samples: int, settings: Settings) -> int:
    """How many whole epochs the steps hold, each sample of each of them exactly once."""
    import numpy as np

    from worker.batches import Batches

    batches = Batches(settings.seed, samples, settings.train.batch_size, settings.train.shards)
    seen = np.zeros(samples, np.int64)
    epoch = position = 0
    for indices in _in_order(batches, steps, settings.train.shards):
        while len(indices):
            part, indices = np.split(indices, [min(samples - position, len(indices))])
            np.add.at(seen, part, 1)
            position += len(part)
            if position == samples:
                if not (seen == epoch + 1).all():
                    wrong = int(np.flatnonzero(seen != epoch + 1)[0])
                    raise Violation(f"epoch {epoch}: sample {wrong} was used {seen[wrong] - epoch} times, not once")
                epoch, position = epoch + 1, 0
    return epoch


def _in_order(batches: Any, steps: int, shards: int) -> Iterator[Any]:
    for step in range(steps):
        for shard in range(shards):
            yield batches.indices(step, shard)

"""What the PS tells people about its members."""

from pathlib import Path
from typing import Any

import pytest

from gradbus.recorder import RunRecorder
from gradbus.records import RunFolder
from ps.actions import MemberChanged
from ps.membership import Member

OURS = {"python": "3.11.2", "jax": "0.10.2", "numpy": "2.1.0"}


class Told:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def event(self, event: str, **fields: Any) -> None:
        self.notes.append(fields["text"])


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (OURS, None),
        (OURS | {"pytest": "9"}, None),
        (OURS | {"jax": "0.10.3"}, "jax 0.10.3 (here 0.10.2)"),
        ({"python": "3.13.0", "jax": "0.10.2"}, "python 3.13.0 (here 3.11.2), numpy unknown (here 2.1.0)"),
    ],
)
def test_a_worker_with_other_releases_is_told_by_name_when_it_joins(
    tmp_path: Path, theirs: dict[str, str], said: str | None
) -> None:
    told, member = Told(), Member(1, "w0", "lab", 40, 1, b"peer", theirs)
    recorder = RunRecorder(
        RunFolder(tmp_path),
        told,  # type: ignore[arg-type]
        steps=10,
        session=1,
        log_every=1,
        members=lambda: {1: member},
        versions=OURS,
        workers={"w7": {"member": 1}},
    )
    for event in ("joined", "ready", "ready"):
        recorder.member(MemberChanged(event, 1, "w0", "lab", 40))  # type: ignore[arg-type]
    recorder.close()
    assert recorder.workers == 2, "with w7, of an earlier life of the PS, each once"
    lines = [f"w0 has other releases, which may change the bits: {said}"] if said else []
    assert [note for note in told.notes if "releases" in note] == lines

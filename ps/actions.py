"""What the machine is told beside messages, and what it asks for. The edge carries actions out in the order given.

The order is part of the design: a version is published before it is saved or evaluated, because all three read the same
immutable buffer and workers are waiting for the first; the step that follows cannot close before they are done, as it
takes contributions computed from what was published.
"""

from dataclasses import dataclass
from typing import Literal

from bus.messages import Contribution, Message
from ps.plan import Plan
from ps.rounds import Part, Taken

Status = Literal["done", "interrupted", "failed"]


# Events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone wants the run to end: finish the open step if that takes no longer than ``grace_s``."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Updated:
    """The answer to CloseStep. ``applied`` is False where the weights were left as they are, ``trouble`` says why."""

    applied: bool
    trouble: str = ""


# Actions


@dataclass(frozen=True, slots=True)
class Admit:
    """Send a Welcome to ``peer``, who is ``member`` from now on."""

    peer: bytes
    member: int


@dataclass(frozen=True, slots=True)
class Reply:
    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Broadcast:
    message: Message


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send the current version to one peer, with the plan of the open step."""

    peer: bytes
    revision: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Accept:
    """Hold the payload of ``contribution`` and make the sums that have become possible."""

    contribution: Contribution
    taken: Taken


@dataclass(frozen=True, slots=True)
class Refused:
    """A contribution was not used. Its payload is dropped; the ledger keeps the reason."""

    contribution: Contribution
    name: str
    reason: str
    open_version: int


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Every shard is in. Divide the sums at the root by ``result.examples``, update, and answer with Updated.

    ``skip``: leave the weights as they are (the version rises all the same). An update whose gradient turns out not
    to be finite must leave the state untouched too.
    """

    version: int
    result: Part
    skip: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the current weights as ``version``, with the plan of the step it opens."""

    version: int
    revision: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Save:
    version: int
    final: bool


@dataclass(frozen=True, slots=True)
class PublishEvaluation:
    version: int


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """For the ledger and the console."""

    event: Literal["joined", "ready", "left", "lost", "replaced", "failed"]
    member: int
    name: str
    host: str
    pid: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """One line for a person."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over and everyone has left, or had the time to."""

    status: Status
    reason: str
    exit_code: int


Event = Message | Tick | StopRequested | Updated
Action = (
    Admit | Reply | Broadcast | SendSnapshot | Accept | Refused | CloseStep | Publish | Save | PublishEvaluation
    | MemberChanged | Note | Finish
)  # fmt: skip

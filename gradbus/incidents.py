"""The vocabulary of supervision: what happens to processes (events), and what is done about it (actions)."""

from dataclasses import dataclass

PS, EVALUATOR, EVAL = "ps", "evaluator", "eval"
"""Names of processes; workers are w0, w1, ... EVAL evaluates the last version where the evaluator did not."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The PS is ready for workers."""


@dataclass(frozen=True, slots=True)
class Members:
    """Names of the members the PS has now."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Version `version` has been evaluated."""

    version: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker says that it leaves in good order."""

    name: str


@dataclass(frozen=True, slots=True)
class OnPurpose:
    """A fault on purpose is about to befall a process: what happens to it next has its reason there."""

    name: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A process says why it is about to end."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The PS has declared the run over. status: done | interrupted | failed."""

    status: str
    reason: str
    version: int | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A process is gone. code: its exit code, or minus the signal that killed it."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher received a signal."""

    number: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Listening | Members | Evaluated | Left | OnPurpose | Failed | Finished | Ended | Signalled | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start the process of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Ask:
    """SIGTERM to the process itself: it ends in its own way."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to its whole process group."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to its whole process group."""

    name: str


@dataclass(frozen=True, slots=True)
class Blame:
    """Enter a process that ended badly into the failure report. answer: what the run does about it."""

    name: str
    code: int
    reason: str
    answer: str


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the user."""

    text: str


Action = Start | Ask | Terminate | Kill | Blame | Note

"""A worker's decisions, without sockets, clock or arrays: an event and the time in, actions out.

              Welcome              Prepared              Stop, or asked to stop
    DIALLING ─────────► PREPARING ──────────► SERVING ──────────────────────────► LEAVING ──► FINISHED
       ▲                    │                    │                                     Left, or time is up
       └────────────────────┴────────────────────┘ the PS is silent, or has another session

While SERVING: versions rise; a gap, or a heartbeat that names what this worker has not seen, makes it fetch a snapshot.
It computes what the plan gives it, pushes it, and keeps it until the version has passed: when the PS lists it as
missing twice, it is pushed again.
"""

from dataclasses import dataclass
from enum import Enum

from bus import messages
from bus.messages import (
    Alive,
    Assignment,
    Failure,
    Fetch,
    Hello,
    Leave,
    Left,
    Malformed,
    Message,
    Node,
    Ready,
    Refusal,
    Serving,
    Stop,
    Subscribed,
    Weights,
    Welcome,
)

EXIT_DONE, EXIT_FAILED, EXIT_NO_SERVER = 0, 2, 3
LEAVING_S = 3.0  # how long to wait for the PS to take note of a goodbye
ASKED_LEAVING_S = 1.5  # the same after a signal: who sends one is waiting, too
FIRST_HELLO_S, LAST_HELLO_S = 0.05, 2.0  # between hellos that nobody answers
COMPLAIN_AFTER_S, COMPLAIN_EVERY_S = 2.0, 10.0
QUIET_BEATS = 2.5  # heartbeats of the PS that may be missed before a line says so


# Events beside messages


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    exit_code: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The workload is loaded and compiled for ``session``."""

    session: int
    device: str


@dataclass(frozen=True, slots=True)
class Computed:
    """The sum over ``node`` of step ``version`` is ready."""

    session: int
    version: int
    node: Node


@dataclass(frozen=True, slots=True)
class Unable:
    """The workload cannot be loaded, or raised."""

    reason: str


# Actions


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Prepare:
    """Connect the data sockets, load and compile what the welcome describes, and answer with Prepared or Unable."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy the payload of these weights: it belongs to a version that is to be computed on."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class Compute:
    """All buckets of ``version`` are there: compute the sums over ``nodes``. Work on other versions is void."""

    version: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Push:
    """Send the finished sum over ``node``, bucket by bucket."""

    version: int
    node: Node


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop everything that belongs to the session that is over, and dial anew."""


@dataclass(frozen=True, slots=True)
class Note:
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    exit_code: int
    reason: str


Action = Send | Prepare | Keep | Compute | Push | Forget | Note | Exit
Event = Message | Malformed | Subscribed | Tick | StopRequested | Prepared | Computed | Unable


class Phase(Enum):
    DIALLING = "dialling"
    PREPARING = "preparing"
    SERVING = "serving"
    LEAVING = "leaving"
    FINISHED = "finished"


class Machine:
    """``hello`` introduces this process; ``address`` is only named in what people read."""

    def __init__(self, hello: Hello, *, address: str, connect_timeout_s: float, now: float) -> None:
        self.hello, self.address, self.connect_timeout_s = hello, address, connect_timeout_s
        self.phase = Phase.DIALLING
        self.welcome: Welcome | None = None
        self.held = -1  # the version whose weights are all here
        self.buckets = 1  # of the weights layout; the edge sets it when it has laid out what the welcome describes
        self.wake_at = now
        self._forget_session(now)
        self._exit = Exit(EXIT_DONE, "")

    def _forget_session(self, now: float) -> None:
        self.phase, self.welcome = Phase.DIALLING, None
        self.held = -1
        self._ready: Ready | None = None  # once it is prepared
        self._known = -1  # the newest version that is known to exist
        self._revision = 0  # of its plan
        self._plan: tuple[Assignment, ...] = ()
        self._arriving: set[int] = set()  # buckets of the known version that are here
        self._late = False  # the known version was incomplete at the last heartbeat too
        self._nodes: dict[Node, int] = {}  # of the held version: -1 computing, else how often it was listed as missing
        self._silent_s, self._quiet, self._now = 0.0, False, now
        self._dialled_s, self._hello_at = 0.0, now
        self._hello_gap_s = FIRST_HELLO_S
        self._complain_at = now + COMPLAIN_AFTER_S
        self._heartbeat_at = now
        self._fetch_at = now
        self._deadline = now

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def doing(self) -> str:
        """For people: what this worker is busy with."""
        computing = [node for node, state in self._nodes.items() if state < 0]
        if self.phase is Phase.SERVING and computing:
            low, high = min(computing)
            shards = f"shard {low}" if high - low == 1 else f"shards {low}-{high - 1}"
            return f"computing {shards} of step {self.held}"
        if self.phase is Phase.SERVING:
            return f"waiting for version {self._known + 1}"
        return "loading and compiling" if self.phase is Phase.PREPARING else str(self.phase.value)

    def handle(self, event: Event, *, now: float) -> list[Action]:
        if self.finished:
            return []
        actions = self._react(event, now)
        self._set_wake(now)
        return actions

    def _react(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Message):
            self._silent_s, self._quiet = 0.0, False
            session = getattr(event, "session", None)
            if self.welcome and session not in (None, self.welcome.session) and self.phase is not Phase.LEAVING:
                return [Note("the parameter server was restarted; joining again"), *self._rejoin(now)]
        match event:
            case Weights():
                return self._weights(event)
            case Computed():
                return self._computed(event)
            case Tick():
                return self._tick(now)
            case Serving():
                return self._serving(event, now)
            case messages.Plan():
                return self._revised(event, now)
            case Welcome() if self.phase is Phase.DIALLING:
                self.welcome, self.phase = event, Phase.PREPARING
                self._heartbeat_at = now
                return [Prepare(event)]
            case Prepared() if self.phase is Phase.PREPARING and self.welcome is not None:
                if event.session != self.welcome.session:
                    return []  # of a session that is over; this one's is on its way
                self.phase = Phase.SERVING
                self._ready = Ready(self.welcome.session, self.welcome.member, event.device)
                return [Send(self._ready)]
            case Unable():
                return self._unable(event)
            case Stop():
                return self._stop(event, now)
            case StopRequested():
                return self._leave(Exit(event.exit_code, "asked to stop"), now)
            case Left() if self.phase is Phase.LEAVING:
                return self._finish()
            case Refusal():
                if event.rejoin:
                    return [Note(f"the parameter server: {event.reason}"), *self._rejoin(now)]
                return self._finish(Exit(EXIT_FAILED, f"refused by {self.address}: {event.reason}"))
            case Malformed():
                return [Note(f"not understood, on {event.socket}: {event.reason}")]
            case _:
                return []  # late, doubled, or not for this phase

    # Weights and plans

    def _weights(self, weights: Weights) -> list[Action]:
        if self.phase is not Phase.SERVING or self.welcome is None or weights.version < self._known:
            return []
        if weights.version > self._known:
            self._known, self._revision, self._plan = weights.version, weights.revision, weights.plan
            self._arriving, self._late = set(), False
        elif weights.revision > self._revision:
            self._revision, self._plan = weights.revision, weights.plan
        if self.held == self._known:
            return self._compute_new()
        if not self._mine() or weights.bucket in self._arriving:
            return []
        self._arriving.add(weights.bucket)
        actions: list[Action] = [Keep(weights)]
        if len(self._arriving) == self.buckets:
            self.held, self._nodes = self._known, {}
            actions += self._compute_new()
        return actions

    def _revised(self, plan: messages.Plan, now: float) -> list[Action]:
        if self.phase is not Phase.SERVING or (plan.version, plan.revision) <= (self._known, self._revision):
            return []
        if plan.version > self._known:
            self._arriving = set()
        self._known, self._revision, self._plan = plan.version, plan.revision, plan.plan
        if not self._mine():
            return []
        return self._compute_new() if self.held == self._known else self._fetch(now)

    def _mine(self) -> list[Node]:
        member = self.welcome.member if self.welcome else -1
        return [(assignment.low, assignment.high) for assignment in self._plan if assignment.member == member]

    def _compute_new(self) -> list[Action]:
        new = tuple(node for node in self._mine() if node not in self._nodes)
        self._nodes.update(dict.fromkeys(new, -1))
        return [Compute(self.held, new)] if new else []

    def _computed(self, computed: Computed) -> list[Action]:
        current = self.welcome is not None and computed.session == self.welcome.session
        if self.phase is not Phase.SERVING or not current or computed.version != self.held:
            return []
        if computed.node not in self._nodes:
            return []
        self._nodes[computed.node] = 0
        return [Push(self.held, computed.node)] if self.held == self._known else []

    def _serving(self, serving: Serving, now: float) -> list[Action]:
        if self.phase is not Phase.SERVING:
            return []
        if (serving.version, serving.revision) > (self._known, self._revision):
            return self._fetch(now)
        if serving.version != self._known or not self._mine():
            return []
        if self.held != self._known:
            self._late, was_late = True, self._late  # once it may still be on its way
            return self._fetch(now) if was_late else []
        again: list[Action] = []
        for node in sorted(set(self._nodes) & _subnodes(serving.missing, self._nodes)):
            if self._nodes[node] >= 0:
                self._nodes[node] += 1
                if self._nodes[node] >= 2:
                    self._nodes[node] = 0
                    again.append(Push(self.held, node))
        return again

    def _fetch(self, now: float) -> list[Action]:
        """Ask for a snapshot, once per heartbeat at most."""
        if self.welcome is None or now < self._fetch_at:
            return []
        self._fetch_at = now + self.welcome.heartbeat_s
        return [Send(Fetch(self.welcome.session, self.welcome.member, self.held))]

    # Coming and going

    def _rejoin(self, now: float) -> list[Action]:
        if self.phase is Phase.LEAVING:
            return self._finish()
        self._forget_session(now)
        return [Forget()]

    def _unable(self, unable: Unable) -> list[Action]:
        actions: list[Action] = []
        if self.welcome:
            actions.append(Send(Failure(self.welcome.session, self.welcome.member, unable.reason)))
        return actions + self._finish(Exit(EXIT_FAILED, unable.reason))

    def _stop(self, stop: Stop, now: float) -> list[Action]:
        if self.phase is Phase.LEAVING:
            return []
        return self._leave(Exit(EXIT_DONE, f"the run is over: {stop.reason}"), now)

    def _leave(self, exit: Exit, now: float) -> list[Action]:
        self._exit = exit
        if self.welcome is None or self.phase is Phase.LEAVING:
            return self._finish()
        leaving_s = LEAVING_S if exit.exit_code == EXIT_DONE else ASKED_LEAVING_S
        self.phase, self._deadline = Phase.LEAVING, now + leaving_s
        return [Send(Leave(self.welcome.session, self.welcome.member))]

    def _finish(self, exit: Exit | None = None) -> list[Action]:
        self.phase = Phase.FINISHED
        return [exit or self._exit]

    # Time

    def _tick(self, now: float) -> list[Action]:
        hearing_s = self.welcome.heartbeat_s if self.welcome else LAST_HELLO_S
        passed_s, self._now = min(max(now - self._now, 0.0), hearing_s), now  # as in ps.membership
        self._silent_s += passed_s
        if self.phase is Phase.LEAVING:
            return self._finish() if now >= self._deadline else []
        if self.welcome is None:
            self._dialled_s += passed_s
            return self._dial(now)
        if self._silent_s > self.welcome.heartbeat_timeout_s:
            text = f"{self.address} has been silent for {self._silent_s:.1f} s; joining again"
            return [Note(text), *self._rejoin(now)]
        notes: list[Action] = []
        if self._silent_s > QUIET_BEATS * self.welcome.heartbeat_s and not self._quiet:
            self._quiet = True
            timeout_s = self.welcome.heartbeat_timeout_s
            text = f"nothing heard from {self.address} for {self._silent_s:.1f} s, while {self.doing}; after"
            notes.append(Note(f"{text} {timeout_s:g} s it is dialled anew"))
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self.welcome.heartbeat_s
            # Until it is given work it cannot know that its Ready was heard.
            again: list[Action] = [Send(self._ready)] if self._ready and self.held < 0 else []
            return [*notes, *again, Send(Alive(self.welcome.session, self.welcome.member, self.held, self.doing))]
        return notes

    def _dial(self, now: float) -> list[Action]:
        if self._dialled_s >= self.connect_timeout_s:
            reason = (
                f"no answer from {self.address} for {self._dialled_s:.0f} s: is the parameter server running there, "
                "and does a firewall let this machine reach it?"
            )
            return self._finish(Exit(EXIT_NO_SERVER, reason))
        actions: list[Action] = []
        if now >= self._hello_at:
            self._hello_at, self._hello_gap_s = now + self._hello_gap_s, min(2 * self._hello_gap_s, LAST_HELLO_S)
            actions.append(Send(self.hello))
        if now >= self._complain_at:
            self._complain_at = now + COMPLAIN_EVERY_S
            left_s = self.connect_timeout_s - self._dialled_s
            actions.append(Note(f"no answer from {self.address} yet; trying for another {left_s:.0f} s"))
        return actions

    def _set_wake(self, now: float) -> None:
        if self.phase is Phase.LEAVING:
            self.wake_at = self._deadline
        elif self.welcome is None:
            self.wake_at = min(self._hello_at, self._complain_at, now + self.connect_timeout_s - self._dialled_s)
        else:
            self.wake_at = self._heartbeat_at


def _subnodes(missing: tuple[Node, ...], nodes: dict[Node, int]) -> set[Node]:
    """Which of ``nodes`` overlap what is missing."""
    return {node for node in nodes if any(low < node[1] and node[0] < high for low, high in missing)}

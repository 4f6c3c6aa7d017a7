"""Faults on purpose, as data: what goes wrong, with whom, and when. A run takes them (`faults:` in its YAML) and so
does the simulation.

    worker 2: SIGKILL at version 7            ps: SIGKILL at 3.5 s
    worker 1: SIGSTOP for 2 s at version 30   worker 0: SIGTERM at version 12
    worker 3: 5 times slower at version 0     worker 3: prepares 20 s longer
    ps: clock jumps 600 s at version 5        NaN in shard 3 at version 10
    drop weights 12 to worker 1               delay weights 12 to worker 1 by 0.5 s
    double gradient 12 from worker 1          drop gradient 12 from worker 1

A version is that of a process: for the PS what it publishes, for a worker the weights that reach it; seconds count from
the start of the process. `w2` is worker 2, too. What befalls a process or a message happens once, even if the process
lives again; a slow worker and a NaN stay.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bus.messages import Contribution, Message, Node, Segment, Weights, Welcome
from bus.transport import Arrival, Payload, Peer, ServerTransport, WorkerTransport

What = Literal["SIGKILL", "SIGSTOP", "SIGTERM", "clock", "slower", "prepares", "NaN", "drop", "double", "delay"]
PS, ANYONE = "ps", ""
_EXAMPLES = tuple(
    form.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines() for form in line.split("   ") if form
)
_NUMBER = r"(?P<{}>\d+(?:\.\d+)?)"
_FORMS = tuple(
    re.compile(form.format(who=r"(?P<who>(?:worker )?\S+?)", worker=r"(?:worker )?(?P<worker>\S+)", **numbers))
    for numbers in [{name: _NUMBER.format(name) for name in ("amount", "seconds")} | {"version": r"(?P<version>\d+)"}]
    for form in (
        r"{who}: (?P<what>SIGKILL|SIGTERM) at (?:version {version}|{seconds} s)",
        r"{who}: (?P<what>SIGSTOP) for {amount} s at (?:version {version}|{seconds} s)",
        r"{who}: (?P<what>clock) jumps {amount} s at (?:version {version}|{seconds} s)",
        r"{who}: {amount} times (?P<what>slower) at version {version}",
        r"{who}: (?P<what>prepares) {amount} s longer",
        r"(?P<what>NaN) in shard (?P<shard>\d+) at version {version}",
        r"(?P<what>drop|double) (?P<kind>weights) {version} to {worker}",
        r"(?P<what>drop|double) (?P<kind>gradient) {version} from {worker}",
        r"(?P<what>delay) (?P<kind>weights) {version} to {worker} by {amount} s",
        r"(?P<what>delay) (?P<kind>gradient) {version} from {worker} by {amount} s",
    )
)


@dataclass(frozen=True, slots=True)
class Fault:
    """``who``: a process by its name, or ANYONE. ``version`` or ``at_s`` says when, the other is None. ``amount``: in
    seconds, or how many times slower. ``kind``: of a message, weights or gradient."""

    text: str
    who: str
    what: What
    version: int | None = None
    at_s: float | None = None
    amount: float = 0.0
    kind: str = ""
    shard: int = -1

    @property
    def of_process(self) -> bool:
        """It befalls a process, once."""
        return self.what in ("SIGKILL", "SIGSTOP", "SIGTERM", "clock")

    @property
    def stays(self) -> bool:
        """It is not over once it has happened."""
        return self.what in ("slower", "prepares", "NaN")


def parse(text: str) -> Fault:
    """The fault that ``text`` describes. Raises ValueError, whose text says what was expected.

    >>> parse("worker 1: SIGSTOP for 2 s at version 30").who
    'w1'
    """
    for form in _FORMS:
        found = form.fullmatch(" ".join(text.split()))
        if found:
            parts = found.groupdict()
            version, seconds = parts.get("version"), parts.get("seconds")
            return Fault(
                text,
                _name(parts.get("who") or f"worker {parts['worker']}") if parts["what"] != "NaN" else ANYONE,
                parts["what"],  # type: ignore[arg-type]
                int(version) if version else None,
                float(seconds) if seconds else None,
                float(parts.get("amount") or 0.0),
                parts.get("kind") or "",
                int(parts.get("shard") or -1),
            )
    near = difflib.get_close_matches(text, _EXAMPLES, n=1, cutoff=0.0)
    raise ValueError(f"a fault such as {near[0]!r}")


def _name(who: str) -> str:
    """Workers that a launcher starts are w0, w1, ...; others have the names they were given."""
    name = who.removeprefix("worker ")
    return f"w{name}" if name.isdecimal() else name


def poisoned(faults: Iterable[Fault]) -> frozenset[tuple[int, int]]:
    """Each (version, shard) whose gradient is to be NaN."""
    return frozenset((fault.version or 0, fault.shard) for fault in faults if fault.what == "NaN")


@dataclass(slots=True)
class Clock:
    """``read`` with jumps."""

    read: Callable[[], float]
    offset_s: float = 0.0

    def __call__(self) -> float:
        return self.read() + self.offset_s


@dataclass(slots=True)
class _Trigger:
    """Carries out what befalls a process, as its time or version comes. ``strike`` does it."""

    faults: list[Fault]
    strike: Callable[[Fault], None]
    clock: Callable[[], float]
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def next_s(self) -> float:
        """Seconds until the next that has a time."""
        times = [fault.at_s for fault in self.faults if fault.at_s is not None]
        return max(min(times, default=float("inf")) + self.began - self.clock(), 0.0)

    def check(self, version: int = -1) -> None:
        age_s = self.clock() - self.began
        for fault in list(self.faults):
            by_version = fault.version is not None and version >= fault.version
            if by_version or (fault.at_s is not None and age_s >= fault.at_s):
                self.faults.remove(fault)
                self.strike(fault)


class FaultyServer:
    """A ServerTransport that brings ``faults`` about. ``clock`` should be one that no fault makes jump.

    ``strike`` carries out what befalls the process; of what befalls a message, or of a NaN that arrives, it only hears.
    """

    def __init__(
        self,
        inner: ServerTransport,
        faults: Sequence[Fault],
        strike: Callable[[Fault], None],
        clock: Callable[[], float],
    ) -> None:
        self._inner, self._strike = inner, strike
        self._trigger = _Trigger([fault for fault in faults if fault.of_process], strike, clock)
        self._not_finite = [fault for fault in faults if fault.what == "NaN"]

    def receive(self, timeout_s: float) -> Arrival | None:
        self._trigger.check()
        arrival = self._inner.receive(min(timeout_s, self._trigger.next_s))
        if arrival is not None and isinstance(arrival.message, Contribution):
            self._tell_not_finite(arrival.message)
        return arrival

    def _tell_not_finite(self, contribution: Contribution) -> None:
        for fault in list(self._not_finite):
            if contribution.version == fault.version and contribution.low <= fault.shard < contribution.high:
                self._not_finite.remove(fault)
                self._strike(fault)

    def send(self, peer: Peer, message: Message, payload: Payload = None) -> None:
        self._inner.send(peer, message, payload)

    def publish(self, message: Message, payload: Payload = None) -> None:
        """Strikes after the first bucket of a version, so that a killed PS leaves it in pieces."""
        self._inner.publish(message, payload)
        if isinstance(message, Weights):
            self._trigger.check(message.version)

    def share(self, size_bytes: int) -> Payload:
        return self._inner.share(size_bytes)

    def lend(self, member: int, size_bytes: int) -> None:
        self._inner.lend(member, size_bytes)

    def reclaim(self, member: int) -> None:
        self._inner.reclaim(member)

    def describe(self, member: int) -> tuple[Segment | None, Segment | None]:
        return self._inner.describe(member)


class FaultyWorker:
    """A WorkerTransport that brings ``faults`` about; ``strike`` and ``clock`` as for FaultyServer."""

    def __init__(
        self,
        inner: WorkerTransport,
        faults: Sequence[Fault],
        strike: Callable[[Fault], None],
        clock: Callable[[], float],
    ) -> None:
        self._inner, self._strike, self._clock = inner, strike, clock
        self._trigger = _Trigger([fault for fault in faults if fault.of_process], strike, clock)
        self._messages = [fault for fault in faults if fault.kind]
        self._struck: set[tuple[Fault, int, Node]] = set()
        self._held: list[tuple[float, Arrival | tuple[Contribution, Payload]]] = []

    @property
    def wake_at(self) -> float:
        """When it has something to do by itself."""
        times = [at for at, _ in self._held]
        return min(min(times, default=float("inf")), self._clock() + self._trigger.next_s)

    def receive(self, timeout_s: float) -> Arrival | None:
        self._trigger.check()
        arrival = self._due() or self._inner.receive(min(timeout_s, max(self.wake_at - self._clock(), 0.0)))
        if arrival is None or not isinstance(arrival.message, Weights):
            return arrival
        weights = arrival.message
        fault = self._fault("weights", weights.version, weights.bucket, (0, 0))
        match fault.what if fault else "":
            case "drop":
                return None
            case "double":
                self._held.append((self._clock(), arrival))
            case "delay":
                assert fault is not None
                self._held.append((self._clock() + fault.amount, arrival))
                return None
        self._trigger.check(weights.version)
        return arrival

    def push(self, contribution: Contribution, payload: Payload) -> bool:
        node = (contribution.low, contribution.high)
        fault = self._fault("gradient", contribution.version, contribution.bucket, node)
        match fault.what if fault else "":
            case "drop":
                return True
            case "double":
                self._inner.push(contribution, payload)
            case "delay":
                assert fault is not None
                self._held.append((self._clock() + fault.amount, (contribution, payload)))
                return True
        return self._inner.push(contribution, payload)

    def send(self, message: Message) -> None:
        self._inner.send(message)

    def follow(self, welcome: Welcome, gradients: str, weights: str, bucket_bytes: int) -> None:
        self._inner.follow(welcome, gradients, weights, bucket_bytes)

    def lent(self) -> Payload:
        return self._inner.lent()

    def around(self, payload: Payload, before_bytes: int, size_bytes: int) -> Payload:
        return self._inner.around(payload, before_bytes, size_bytes)

    def forsake(self) -> None:
        self._held.clear()
        self._inner.forsake()

    def redial(self) -> None:
        self._inner.redial()

    def _fault(self, kind: str, version: int, bucket: int, node: Node) -> Fault | None:
        """The one for this message: each bucket of a version is struck once, so that what is sent again arrives."""
        for fault in self._messages:
            if (fault.kind, fault.version) == (kind, version) and (fault, bucket, node) not in self._struck:
                if not any(fault is other for other, _, _ in self._struck):
                    self._strike(fault)
                self._struck.add((fault, bucket, node))
                return fault
        return None

    def _due(self) -> Arrival | None:
        """Let go of what has been held for long enough."""
        for held in [held for held in self._held if held[0] <= self._clock()]:
            self._held.remove(held)
            if isinstance(held[1], Arrival):
                return held[1]
            self._inner.push(*held[1])
        return None

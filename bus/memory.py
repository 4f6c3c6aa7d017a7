"""The transports within one process, on a virtual clock: a network that loses, doubles and delays, and no waiting.

Everything that happens follows from one seed. Connections keep the order of their messages, as TCP does, but for those
that a fault picks out. The wire is real: every message is encoded and decoded, and payloads are copied, so what a peer
receives is what it would have received.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from bus import codec
from bus.layout import zeros
from bus.messages import Contribution, Message, Plan, Segment, Stop, Subscribed, Weights, Welcome
from bus.transport import Arrival, Payload, Peer


@dataclass(frozen=True, slots=True)
class Chances:
    """Chances, from 0 to 1, for each message; ``delay_s`` is drawn evenly between its ends."""

    delay_s: tuple[float, float] = (0.0001, 0.001)
    lose_weights: float = 0.0
    lose_gradients: float = 0.0
    lose_control: float = 0.0
    double: float = 0.0
    reorder: float = 0.0


@dataclass(slots=True)
class Network:
    """Owns the clock, the random numbers and everything that is on its way. ``log`` keeps the newest events, for people
    who have to find out what happened."""

    seed: int
    chances: Chances = field(default_factory=Chances)
    now: float = 0.0
    shared: bool = False  # weights and gradients stay where they are, and are read there
    log: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    server: "MemoryServer | None" = None
    workers: dict[Peer, "MemoryWorker"] = field(default_factory=dict)
    lent: dict[tuple[int, int], Payload] = field(default_factory=dict)  # by server and member
    random: Random = field(init=False)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _last: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Do something when the clock reaches ``time``."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, act))

    def advance(self, until: float) -> None:
        """Let the clock run to the next thing that is due, or to ``until`` if nothing is due before."""
        if self._due and self._due[0][0] <= until:
            self.now, _, act = heapq.heappop(self._due)
            act()
        else:
            self.now = max(self.now, until)

    def carry(
        self, route: tuple[object, ...], message: Message, payload: Payload, lose: float, deliver: Callable[..., None]
    ) -> None:
        """Take a message to its destination, or not. ``route`` names the connection, which keeps its order."""
        kind, header = codec.encode(message)
        frames = [memoryview(kind), memoryview(header)]
        shared = self.shared and isinstance(message, Weights | Contribution)
        if payload is not None:
            frames.append(payload.data if shared else np.array(payload, np.uint8).data)
        label = f"{route} {type(message).__name__}"
        for copy in range(1 + (self.random.random() < self.chances.double)):
            if self.random.random() < lose:
                self.log.append(f"{self.now:.4f} lost {label}")
                continue
            time = self.now + self.random.uniform(*self.chances.delay_s)
            if self.random.random() >= self.chances.reorder:
                time = self._last[route] = max(time, self._last.get(route, 0.0))
            self.at(time, lambda: deliver(*codec.decode(frames)))
            self.log.append(f"{self.now:.4f} {label}{' again' if copy else ''}, due {time:.4f}")


@dataclass(slots=True)
class MemoryServer:
    """A ServerTransport. A new one on the same network takes the place of the old, whose mail is lost."""

    network: Network
    inbox: deque[Arrival] = field(default_factory=deque)
    memory: Payload = None

    def __post_init__(self) -> None:
        self.network.server = self

    def receive(self, timeout_s: float) -> Arrival | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, peer: Peer, message: Message, payload: Payload = None) -> None:
        worker = self.network.workers.get(peer)
        if worker is not None:
            lose = self.network.chances.lose_control
            self.network.carry(("control", peer), message, payload, lose, worker.deliver)

    def publish(self, message: Message, payload: Payload = None) -> None:
        for worker in list(self.network.workers.values()):
            if worker.subscribed and isinstance(message, Weights | Plan | Stop):
                lose = self.network.chances.lose_weights
                self.network.carry(("weights", worker.peer), message, payload, lose, worker.deliver)

    def share(self, size_bytes: int) -> Payload:
        self.memory = zeros(size_bytes)
        return self.memory

    def lend(self, member: int, size_bytes: int) -> None:
        self.network.lent.setdefault((id(self), member), zeros(size_bytes))

    def reclaim(self, member: int) -> None:
        self.network.lent.pop((id(self), member), None)

    def describe(self, member: int) -> tuple[Segment | None, Segment | None]:
        return None, None


@dataclass(slots=True)
class MemoryWorker:
    """A WorkerTransport."""

    network: Network
    inbox: deque[Arrival] = field(default_factory=deque)
    peer: Peer = b""
    subscribed: bool = False
    _published: Payload = None
    _lent: Payload = None

    def __post_init__(self) -> None:
        self.redial()

    def receive(self, timeout_s: float) -> Arrival | None:
        return self.inbox.popleft() if self.inbox else None

    def deliver(self, message: Message, payload: Payload) -> None:
        self.inbox.append(Arrival(b"", message, payload))

    def send(self, message: Message) -> None:
        self._to_server("control", message, None, self.network.chances.lose_control)

    def push(self, contribution: Contribution, payload: Payload) -> bool:
        self._to_server("gradients", contribution, payload, self.network.chances.lose_gradients)
        return True

    def follow(self, welcome: Welcome, gradients: str, weights: str, bucket_bytes: int) -> None:
        server, member = self.network.server, welcome.member
        if self.network.shared and server is not None:
            self._published, self._lent = server.memory, self.network.lent.get((id(server), member))

        def arrive() -> None:
            self.subscribed = True
            if server is not None and self.network.server is server:
                server.inbox.append(Arrival(b"", Subscribed(member)))

        self.network.at(self.network.now + self.network.chances.delay_s[1], arrive)

    def lent(self) -> Payload:
        return self._lent

    def around(self, payload: Payload, before_bytes: int, size_bytes: int) -> Payload:
        """By address, as bus.shm does."""
        if self._published is None:
            return None
        start = payload.ctypes.data - before_bytes - self._published.ctypes.data
        inside = start >= 0 and start + size_bytes <= self._published.nbytes
        return self._published[start : start + size_bytes] if inside else None

    def forsake(self) -> None:
        self.subscribed = False
        self._published = self._lent = None

    def redial(self) -> None:
        self.network.workers.pop(self.peer, None)
        self.inbox.clear()
        self.network._count += 1
        self.peer = b"peer %d" % self.network._count
        self.network.workers[self.peer] = self

    def close(self) -> None:
        self.network.workers.pop(self.peer, None)
        self.subscribed = False

    def _to_server(self, socket: str, message: Message, payload: Payload, lose: float) -> None:
        server, peer = self.network.server, self.peer
        sender = peer if socket == "control" else b""

        def deliver(message: Message, payload: Payload) -> None:
            if server is not None and self.network.server is server:  # else it died meanwhile
                server.inbox.append(Arrival(sender, message, payload, self.network.shared))

        self.network.carry((socket, peer), message, payload, lose, deliver)

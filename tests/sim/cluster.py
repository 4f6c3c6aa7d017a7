"""A whole cluster in one process on a virtual clock: the real loops and machines, a toy model, seeded faults."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from bus.faults import Clock, Fault, FaultyServer, FaultyWorker, poisoned
from bus.finite import within_limit
from bus.layout import Bytes, gradient_layout
from bus.memory import Chances, MemoryServer, MemoryWorker, Network
from bus.messages import Hello, Leaf, Node, Welcome
from ps.actions import MemberChanged, Refused
from ps.advance import Advanced, WholeTree
from ps.checkpoint import Checkpoint
from ps.history import History, StepRecord
from ps.machine import Machine as ServerMachine
from ps.machine import Rules
from ps.reduce import Reducer
from ps.server import Offer, Server
from worker.client import Client
from worker.executor import Calculator, ShardSum
from worker.machine import Computed, Prepared
from worker.machine import Machine as WorkerMachine

LEAVES = (Leaf("w", "float32", (33,), "trainable"), Leaf("b", "float32", (5,), "trainable"))
STRETCH = 12  # elements, across the ends of buckets
BUCKET_BYTES = 64  # so that even this model has several buckets, and a leaf is cut
LAYOUT = gradient_layout(LEAVES, BUCKET_BYTES)
EXAMPLES = 3  # of a shard
HEARTBEAT_S = 0.2


class Killed(Exception):
    """Unwinds the turn in which a process dies."""


Bad = frozenset[tuple[int, int]]  # (version, shard) whose gradient is not finite


class ToyUpdater(WholeTree):
    """Gradient descent in float32, where the order of sums shows, from weights between -``scale`` and ``scale``."""

    leaves = LEAVES

    def __init__(self, scale: float = 1.0) -> None:
        self.updates = 0
        self._weights = [np.linspace(-scale, scale, leaf.size, dtype=np.float32) for leaf in LEAVES]

    def apply(self, sums: list[np.ndarray], examples: int) -> None:
        rate = np.float32(0.1)
        self._weights = [w - rate * (s / np.float32(examples)) for w, s in zip(self._weights, sums, strict=True)]
        self.updates += 1

    def weights(self) -> list[np.ndarray]:
        return self._weights

    averaged = weights

    def snapshot(self) -> dict[str, dict[str, np.ndarray]]:
        return {"weights": {leaf.name: w.copy() for leaf, w in zip(LEAVES, self._weights, strict=True)}}

    def restore(self, snapshot: dict[str, dict[str, np.ndarray]], updates: int) -> None:
        self._weights = [snapshot["weights"][leaf.name].copy() for leaf in LEAVES]
        self.updates = updates


class StretchToy(ToyUpdater):
    """The same bits, a few elements at a time, from wherever the contributions still lie."""

    by_stretch = True

    def advance(self, sums: Reducer, examples: int, before: Bytes, after: Bytes) -> Advanced:
        totals = [np.empty(leaf.size, np.float32) for leaf in LEAVES]
        for total, (_, at) in zip(totals, LAYOUT.placed(), strict=True):
            for low in range(0, total.size, STRETCH):
                part = total[low : low + STRETCH]
                part[...] = sums.stretch(at + 4 * low, np.empty(part.size, np.float32))
        if not all(map(within_limit, totals)):
            return Advanced(sums.trouble(), lambda: (sums.norm(examples), 0.0))
        self.apply(totals, examples)
        LAYOUT.pack(self._weights, after)
        return Advanced("", lambda: (0.0, 0.0))


def shard_gradient(weights: list[np.ndarray], version: int, shard: int) -> list[np.ndarray]:
    """A pure function of its arguments whose sums round differently in every order."""
    rng = np.random.default_rng([version, shard])
    return [
        (np.float32(EXAMPLES) * (w + rng.standard_normal(w.shape).astype(np.float32) * np.float32(10.0 ** (shard % 5))))
        for w in weights
    ]


def reference(
    steps: int, shards: int, *, scale: float = 1.0, bad: Bad = frozenset(), nonfinite: str = "stop"
) -> list[np.ndarray]:
    """The weights after ``steps``, by a loop that knows no bus, no tree and no members."""

    def total(version: int, low: int, high: int) -> list[np.ndarray]:
        if high - low == 1:
            gradient = shard_gradient(updater.weights(), version, low)
            return [np.zeros_like(part) for part in gradient] if (version, low) in bad else gradient
        middle = low + (1 << (high - low - 1).bit_length()) // 2
        left, right = total(version, low, middle), total(version, middle, high)
        return [a + b for a, b in zip(left, right, strict=True)]

    updater = ToyUpdater(scale)
    for version in range(steps):
        good = sum((version, shard) not in bad for shard in range(shards))
        if good == shards or (nonfinite == "skip_shard" and good):
            updater.apply(total(version, 0, shards), EXAMPLES * good)
    return updater.weights()


@dataclass
class ToyGradients:
    bad: Bad
    device = "toy"
    layout = LAYOUT

    def load(self, buffer: Bytes) -> None:
        self._weights = LAYOUT.views(buffer)  # all leaves are trainable: one layout serves for both

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        if (version, shard) in self.bad:
            buffer = LAYOUT.empty() if into is None else into
            buffer[:] = 0
            return ShardSum(buffer, 0, {}, (shard,), f"shard {shard}: loss = nan")
        gradient = shard_gradient(self._weights, version, shard)
        return ShardSum(LAYOUT.pack(gradient, into), EXAMPLES, {"loss": float(EXAMPLES * shard)})

    def prefetch(self, version: int, shards: list[int]) -> None:
        pass


@dataclass
class SimExecutor:
    """One order after the other, as the computing thread does. A shard is computed when the virtual clock says that it
    took its time, on what its memory holds by then, wanted or not."""

    network: Network
    client: Client
    shard_s: Callable[[], float]
    alive: Callable[[], bool]
    bad: Bad
    longer_s: float = 0.0  # to prepare
    wanted: tuple[int, int] = (-1, -1)
    orders: deque[Callable[[], float]] = field(default_factory=deque)  # each begins, and says when to go on
    busy: bool = False
    calculator: Calculator = field(init=False)

    def prepare(self, welcome: Welcome) -> None:
        def done() -> None:
            self.calculator = Calculator(ToyGradients(self.bad), lambda: self.network.now)
            self.client.post(Prepared(welcome.session, "toy"))

        self._order(lambda: self._later(0.1 + self.longer_s, done))

    def compute(self, session: int, version: int, buffer: Bytes, nodes: dict[Node, Bytes | None]) -> None:
        self.wanted = (session, version)
        for node, into in nodes.items():
            self._order(partial(self._begin, session, version, buffer, node, into))

    def prefetch(self, version: int, nodes: tuple[Node, ...]) -> None:
        self.calculator.prefetch(version, nodes)

    def cancel(self) -> None:
        self.wanted = (-1, -1)

    def _begin(self, session: int, version: int, buffer: Bytes, node: Node, into: Bytes | None) -> float:
        if self.wanted != (session, version):
            return 0.0
        return self._later(
            self.shard_s() * (node[1] - node[0]), partial(self._done, session, version, buffer, node, into)
        )

    def _done(self, session: int, version: int, buffer: Bytes, node: Node, into: Bytes | None) -> None:
        result = self.calculator.compute(session, version, buffer, node, lambda: True, into)
        if self.wanted == (session, version):
            self.client.post(Computed(session, version, node), result)

    def _order(self, begin: Callable[[], float]) -> None:
        self.orders.append(begin)
        if not self.busy:
            self._go_on()

    def _go_on(self) -> None:
        self.busy = False
        while self.orders and not self.busy:
            self.busy = self.orders.popleft()() > 0

    def _later(self, delay_s: float, act: Callable[[], None]) -> float:
        def then() -> None:
            if self.alive():
                act()
                self._go_on()

        self.network.at(self.network.now + delay_s, then)
        return delay_s


@dataclass
class MemorySaver:
    """Keeps checkpoints where a killed PS finds them again."""

    disk: dict[int, Checkpoint]

    def submit(self, checkpoint: Checkpoint) -> None:
        self.disk[checkpoint.version] = checkpoint

    def poll(self) -> list[object]:
        return []

    def close(self, timeout_s: float) -> None:
        pass


@dataclass
class Witness:
    """A recorder that remembers."""

    steps: list[StepRecord] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    changes: list[MemberChanged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def refused(self, refused: Refused) -> None:
        self.refusals.append(refused)

    def member(self, change: MemberChanged) -> None:
        self.changes.append(change)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Cluster:
    """One PS and some workers. ``run`` goes on until the PS is finished, and checks the invariants as it goes.

    Who is ``frozen`` (a worker, or "ps") does nothing and hears nothing, but its mail waits. Who is killed or ends by
    one of ``faults`` is started again after a while, as by a supervisor. ``disk`` is where checkpoints are; ``scale``
    sets one experiment apart from another.
    """

    seed: int
    shards: int = 4
    steps: int = 10
    chances: Chances = field(default_factory=Chances)
    faults: tuple[Fault, ...] = ()
    restart_s: tuple[float, float] = (0.0, 6.0)
    shared: bool = False
    save_every: int = 3
    shard_s: tuple[float, float] = (0.01, 0.05)
    min_workers: int = 1
    nonfinite: Literal["stop", "skip_step", "skip_shard"] = "stop"
    bad: Bad = frozenset()
    scale: float = 1.0
    network: Network = field(init=False)
    witness: Witness = field(default_factory=Witness)
    disk: dict[int, Checkpoint] = field(default_factory=dict)
    workers: dict[str, Client] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    server: Server | None = None
    sessions: int = 0

    def __post_init__(self) -> None:
        self.network = Network(self.seed, self.chances, shared=self.shared)
        self.bad |= poisoned(self.faults)
        self.spent: set[Fault] = set()
        self.clocks: dict[str, Clock] = {}
        self.start_server()

    def start_server(self) -> None:
        self.sessions += 1
        updater, version = (StretchToy if self.shared else ToyUpdater)(self.scale), 0
        if self.disk:
            version = max(self.disk)
            updater.restore(self.disk[version].tensors, self.disk[version].updates)
        rules = Rules(
            steps=self.steps, shards=self.shards, buckets=len(LAYOUT.buckets), min_workers=self.min_workers,
            max_wait_s=60.0, heartbeat_s=HEARTBEAT_S, heartbeat_timeout_s=2.0, nonfinite=self.nonfinite,
            nonfinite_limit=3, save_every=self.save_every, evaluate_every=0, evaluate=False,
        )  # fmt: skip
        clock = self._clock("ps")
        self.server = Server(
            machine=ServerMachine(rules, session=self.sessions, version=version, now=clock()),
            transport=FaultyServer(
                MemoryServer(self.network), self._faults_of("ps"), partial(self._strike, "ps"), self._now
            ),
            updater=updater,  # type: ignore[arg-type]
            bucket_bytes=BUCKET_BYTES,
            offer=Offer("{}", "tcp://ps:2", "tcp://ps:3"),
            history=History(self.witness, lambda _: 0.1, 0.9),
            recorder=self.witness,
            saver=MemorySaver(self.disk),  # type: ignore[arg-type]
            meta={},
            clock=clock,
        )

    def _now(self) -> float:
        return self.network.now

    def _clock(self, who: str) -> Clock:
        self.clocks[who] = Clock(self._now)
        return self.clocks[who]

    def _faults_of(self, who: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.who == who and fault not in self.spent]

    def _strike(self, who: str, fault: Fault) -> None:
        """Let what befalls a process happen."""
        self.spent.add(fault)
        self.network.log.append(f"{self.network.now:.4f} {fault.text}")
        start = self.start_server if who == "ps" else partial(self.start_worker, who)
        again_at = self.network.now + self.network.random.uniform(*self.restart_s)
        match fault.what:
            case "SIGKILL":
                if who == "ps":
                    self.kill_server()
                else:
                    self.kill_worker(who)
                self.network.at(again_at, start)
                raise Killed
            case "SIGTERM" if who != "ps":
                self.stop_worker(who)
                self.network.at(again_at, start)
            case "SIGSTOP":
                self.frozen.add(who)
                self.network.at(self.network.now + fault.amount, lambda: self.frozen.discard(who))
            case "clock":
                self.clocks[who].offset_s += fault.amount
            case "drop" | "double" | "delay":
                pass  # brought about where the message passes
            case _:
                raise AssertionError(f"the simulation knows no {fault.text}")

    def kill_server(self) -> None:
        self.server = self.network.server = None

    def start_worker(self, name: str) -> None:
        self.kill_worker(name)
        faults = self._faults_of(name)
        clock = self._clock(name)
        machine = WorkerMachine(
            Hello(name, "host", 1, self.network.random.getrandbits(63), {}),
            address="tcp://ps:1", connect_timeout_s=60.0, now=clock(),
        )  # fmt: skip
        transport = MemoryWorker(self.network)
        faulty = FaultyWorker(transport, faults, partial(self._strike, name), self._now)
        client = Client(machine, faulty, note=self.witness.notes.append, clock=clock)
        slower = max((fault.amount for fault in faults if fault.what == "slower"), default=1.0)
        shard_s = partial(self.network.random.uniform, *(slower * each for each in self.shard_s))
        longer_s = sum(fault.amount for fault in faults if fault.what == "prepares")
        client.attach(
            SimExecutor(self.network, client, shard_s, lambda: self.workers.get(name) is client, self.bad, longer_s)
        )
        client.transport, client.faulty = transport, faulty  # type: ignore[attr-defined]
        self.workers[name] = client

    def stop_worker(self, name: str) -> None:
        """Ask it to leave in good order."""
        if name in self.workers:
            self.workers[name].request_stop(143)

    def kill_worker(self, name: str) -> None:
        self.frozen.discard(name)
        client = self.workers.pop(name, None)
        if client is not None:
            client.transport.close()  # type: ignore[attr-defined]

    def run(self, limit_s: float = 600.0) -> list[np.ndarray]:
        """The weights at the end."""
        while not (self.server and self.server.outcome):
            assert self.network.now < limit_s, f"no end after {limit_s} s; seed {self.seed}\n" + self.story()
            self.turn()
        return self.server._updater.weights()

    def turn(self) -> None:
        """Let everyone who has something to do take one turn; then let the clock run on."""
        busy = False
        if self.server and not self.server.outcome and "ps" not in self.frozen:
            server = self.server
            with suppress(Killed):
                server.turn(0.0)
                server.machine.check()
            busy = bool(self.network.server and self.network.server.inbox)
        for name, client in list(self.workers.items()):
            if name in self.frozen:
                continue
            with suppress(Killed):
                client.turn(0.0)
            busy |= bool(client.transport.inbox) or not client._events.empty()  # type: ignore[attr-defined]
            if client.outcome and self.workers.get(name) is client:
                self.kill_worker(name)
        if not busy:
            self.network.advance(self._next_wake())

    def _next_wake(self) -> float:
        here = [(name, client) for name, client in self.workers.items() if name not in self.frozen]
        awake = [client.machine.wake_at - self.clocks[name].offset_s for name, client in here]
        awake += [client.faulty.wake_at for _, client in here]  # type: ignore[attr-defined]
        if self.server and not self.server.outcome and "ps" not in self.frozen:
            awake.append(self.server.machine.wake_at - self.clocks["ps"].offset_s)
        return max(min(awake, default=self.network.now + 1.0), self.network.now + 0.0005)

    def story(self) -> str:
        """The recent events, for whoever has to understand a failure."""
        return "\n".join([*self.witness.notes[-20:], *list(self.network.log)[-60:]])


def stale_gradients(seed: int) -> Cluster:
    """One experiment takes the place of another at the same address, while a worker still computes for the first.

    The worker w0 sleeps through the change. When it wakes, it pushes what it has computed of step 0, the step that is
    open: only the session tells that it was computed from other weights.
    """
    cluster = Cluster(seed=seed, shards=8, steps=4, save_every=0, shard_s=(0.01, 0.03))
    cluster.start_worker("w0")
    for name in ("w1", "w2"):
        cluster.network.at(0.05, lambda name=name: cluster.start_worker(name))

    def replace_server() -> None:
        cluster.kill_server()
        cluster.disk.clear()
        cluster.witness.steps.clear()
        cluster.scale = 7.0
        cluster.start_server()

    cluster.network.at(0.12, lambda: cluster.frozen.add("w0"))
    cluster.network.at(0.16, replace_server)
    cluster.network.at(0.36, lambda: cluster.frozen.discard("w0"))
    return cluster

"""A whole cluster in one process on a virtual clock: the real loops and machines, a toy model, seeded faults."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from bus.layout import Bytes, gradient_layout
from bus.memory import Faults, MemoryServer, MemoryWorker, Network
from bus.messages import Hello, Leaf, Node, Welcome
from ps.actions import MemberChanged, Refused
from ps.checkpoint import Checkpoint
from ps.history import History, StepRecord
from ps.machine import Machine as ServerMachine
from ps.machine import Rules
from ps.server import Offer, Server
from worker.client import Client
from worker.executor import Calculator, ShardSum, Stopped
from worker.machine import Computed, Prepared
from worker.machine import Machine as WorkerMachine

LEAVES = (Leaf("w", "float32", (33,), "trainable"), Leaf("b", "float32", (5,), "trainable"))
BUCKET_BYTES = 64  # so that even this model has several buckets, and a leaf is cut
LAYOUT = gradient_layout(LEAVES, BUCKET_BYTES)
EXAMPLES = 3  # of a shard
HEARTBEAT_S = 0.2


Bad = frozenset[tuple[int, int]]  # (version, shard) whose gradient is not finite


class ToyUpdater:
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

    def shard(self, version: int, shard: int) -> ShardSum:
        if (version, shard) in self.bad:
            return ShardSum(LAYOUT.empty(), 0, {}, (shard,), f"shard {shard}: loss = nan")
        gradient = shard_gradient(self._weights, version, shard)
        return ShardSum(LAYOUT.pack(gradient), EXAMPLES, {"loss": float(EXAMPLES * shard)})

    def prefetch(self, version: int, shards: list[int]) -> None:
        pass


@dataclass
class SimExecutor:
    """Computes at once, and posts the result when the virtual clock says that it took its time."""

    network: Network
    client: Client
    shard_s: Callable[[], float]
    alive: Callable[[], bool]
    bad: Bad
    wanted: tuple[int, int] = (-1, -1)
    calculator: Calculator = field(init=False)

    def prepare(self, welcome: Welcome) -> None:
        self.calculator = Calculator(ToyGradients(self.bad), lambda: self.network.now)
        self._later(0.1, partial(self.client.post, Prepared(welcome.session, "toy")))

    def compute(self, session: int, version: int, buffer: Bytes, nodes: tuple[Node, ...]) -> None:
        self.wanted = (session, version)
        delay_s = 0.0
        for node in nodes:
            try:
                result = self.calculator.compute(session, version, buffer, node, lambda: True)
            except Stopped:
                return
            delay_s += self.shard_s() * (node[1] - node[0])
            self._later(delay_s, partial(self._done, (session, version), node, result))

    def prefetch(self, version: int, nodes: tuple[Node, ...]) -> None:
        self.calculator.prefetch(version, nodes)

    def cancel(self) -> None:
        self.wanted = (-1, -1)

    def _done(self, made_for: tuple[int, int], node: Node, result: object) -> None:
        if self.wanted == made_for:
            self.client.post(Computed(*made_for, node), result)  # type: ignore[arg-type]

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.network.at(self.network.now + delay_s, lambda: act() if self.alive() else None)


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

    Who is ``frozen`` (a worker, or "ps") does nothing and hears nothing, but its mail waits. ``disk`` is where
    checkpoints are; ``scale`` sets one experiment apart from another.
    """

    seed: int
    shards: int = 4
    steps: int = 10
    faults: Faults = field(default_factory=Faults)
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
        self.network = Network(self.seed, self.faults)
        self.start_server()

    def start_server(self) -> None:
        self.sessions += 1
        updater, version = ToyUpdater(self.scale), 0
        if self.disk:
            version = max(self.disk)
            updater.restore(self.disk[version].tensors, self.disk[version].updates)
        rules = Rules(
            steps=self.steps, shards=self.shards, buckets=len(LAYOUT.buckets), min_workers=self.min_workers,
            max_wait_s=60.0, heartbeat_s=HEARTBEAT_S, heartbeat_timeout_s=2.0, nonfinite=self.nonfinite,
            nonfinite_limit=3, save_every=self.save_every, evaluate_every=0, evaluate=False,
        )  # fmt: skip
        self.server = Server(
            machine=ServerMachine(rules, session=self.sessions, version=version, now=self.network.now),
            transport=MemoryServer(self.network),
            updater=updater,  # type: ignore[arg-type]
            bucket_bytes=BUCKET_BYTES,
            offer=Offer("{}", "tcp://ps:2", "tcp://ps:3"),
            history=History(self.witness, lambda _: 0.1, 0.9),
            recorder=self.witness,
            saver=MemorySaver(self.disk),  # type: ignore[arg-type]
            meta={},
            clock=lambda: self.network.now,
        )

    def kill_server(self) -> None:
        self.server = self.network.server = None

    def start_worker(self, name: str) -> None:
        self.kill_worker(name)
        machine = WorkerMachine(
            Hello(name, "host", 1, self.network.chance.getrandbits(63), {}),
            address="tcp://ps:1", connect_timeout_s=60.0, now=self.network.now,
        )  # fmt: skip
        transport = MemoryWorker(self.network)
        client = Client(machine, transport, note=self.witness.notes.append, clock=lambda: self.network.now)
        shard_s = partial(self.network.chance.uniform, *self.shard_s)
        client.attach(SimExecutor(self.network, client, shard_s, lambda: self.workers.get(name) is client, self.bad))
        client.transport = transport  # type: ignore[attr-defined]
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
            self.server.turn(0.0)
            self.server.machine.check()
            busy = bool(self.network.server and self.network.server.inbox)
        for name, client in list(self.workers.items()):
            if name in self.frozen:
                continue
            client.turn(0.0)
            busy |= bool(client.transport.inbox) or not client._events.empty()  # type: ignore[attr-defined]
            if client.outcome:
                self.kill_worker(name)
        if not busy:
            self.network.advance(self._next_wake())

    def _next_wake(self) -> float:
        awake = [client.machine.wake_at for name, client in self.workers.items() if name not in self.frozen]
        if self.server and not self.server.outcome and "ps" not in self.frozen:
            awake.append(self.server.machine.wake_at)
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

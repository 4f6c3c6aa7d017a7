"""Both loops over ZeroMQ in one process: real sockets, clock and threads, and the toy model of the simulation.

The test's own thread is the PS; each worker has a thread, which can be held up, and killed without a goodbye.
"""

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from cluster import BUCKET_BYTES, LAYOUT, MemorySaver, StretchToy, ToyGradients, Witness, reference

from bus.layout import Bytes
from bus.messages import Hello
from bus.settings import BusSettings
from bus.sockets import ServerSockets, WorkerSockets
from bus.transport import Arrival
from ps.checkpoint import Checkpoint
from ps.history import History
from ps.machine import Machine as ServerMachine
from ps.machine import Rules
from ps.server import Offer, Server
from worker.client import Client
from worker.executor import ShardSum, ThreadExecutor
from worker.machine import Exit
from worker.machine import Machine as WorkerMachine

LIMIT_S = 30.0  # of one wait; all of them take a fraction of a second
HEARTBEAT_S, TIMEOUT_S = 0.05, 0.6
NO_LOSS = {"older session", "other version", "duplicate", "no open step"}  # why what is done already is refused
SETTINGS = BusSettings(heartbeat_s=HEARTBEAT_S, heartbeat_timeout_s=TIMEOUT_S)


class Owned:
    """A transport that may be used by one thread only. ``heard`` is what came last."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._owner = inner, threading.get_ident()
        self.heard: Any = None
        self.wake = inner.waker.wake
        self.sent: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        assert threading.get_ident() == self._owner, f"{name} is called by another thread than the socket's own"
        return getattr(self._inner, name)

    def receive(self, timeout_s: float) -> Arrival | None:
        arrival: Arrival | None = self.__getattr__("receive")(timeout_s)
        self.heard = arrival.message if arrival else self.heard
        return arrival

    def send(self, *what: Any) -> None:
        self.sent.append(type(what[-1] if len(what) == 1 else what[1]))
        self.__getattr__("send")(*what)


class Gradients(ToyGradients):
    """``hold`` is called for every shard, in the computing thread."""

    def __init__(self, hold: Callable[[], object]) -> None:
        super().__init__(frozenset())
        self.hold = hold

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        self.hold()
        return super().shard(version, shard, into)


class Worker(threading.Thread):
    """A worker process, but for the process. While ``free`` is not set it is as if stopped."""

    def __init__(self, address: str, name: str, hold: Callable[[], object] = lambda: None) -> None:
        super().__init__(daemon=True, name=name)
        self.address, self.hold = address, hold
        self.free, self.killed = threading.Event(), threading.Event()
        self.free.set()
        self.outcome: Exit | None = None
        self.error: BaseException | None = None
        self.notes: list[str] = []
        self.transport: Owned | None = None
        self.start()

    def run(self) -> None:
        try:
            transport = self.transport = Owned(WorkerSockets(self.address, SETTINGS))
            hello = Hello(self.name, "host", 1, secrets.randbits(63), {})
            machine = WorkerMachine(hello, address=self.address, connect_timeout_s=LIMIT_S, now=time.monotonic())
            client = Client(machine, transport, note=self.notes.append, wake=transport.wake)
            client.attach(ThreadExecutor(lambda welcome: Gradients(self.hold), client.post, repr))
            while client.outcome is None and not self.killed.is_set():
                if self.free.wait(0.05):
                    client.turn(0.02)
            self.outcome = client.outcome
            transport.close(linger=False)
        except BaseException as error:  # noqa: BLE001 - for the test to see
            self.error = error

    def kill(self) -> None:
        self.killed.set()
        self.join(LIMIT_S)

    def ended(self) -> Exit:
        self.join(LIMIT_S)
        assert not self.is_alive() and self.error is None, self.error
        assert self.outcome is not None
        return self.outcome


class Cluster:
    """A PS, and what it leaves to its next life: the addresses and the checkpoints."""

    def __init__(self) -> None:
        self.steps, self.shards = 0, 0
        self.rules: dict[str, Any] = {}
        self.witness, self.disk, self.workers = Witness(), dict[int, Checkpoint](), dict[str, Worker]()
        self.addresses: tuple[str, ...] | None = None
        self.sessions = 0

    def serve(self, steps: int, shards: int = 4, **rules: Any) -> None:
        self.steps, self.shards, self.rules = steps, shards, rules
        self.start_server()

    def start_server(self) -> None:
        self.sessions += 1
        updater, version = StretchToy(), max(self.disk, default=0)
        if version:
            updater.restore(self.disk[version].tensors, self.disk[version].updates)
        fields: dict[str, Any] = dict(
            steps=self.steps, shards=self.shards, buckets=len(LAYOUT.buckets), min_workers=1, max_wait_s=LIMIT_S,
            heartbeat_s=HEARTBEAT_S, heartbeat_timeout_s=TIMEOUT_S, nonfinite="stop", nonfinite_limit=3, save_every=5,
            evaluate_every=0, evaluate=False,
        )  # fmt: skip
        bus = ServerSockets(SETTINGS, bucket_bytes=BUCKET_BYTES, buckets=len(LAYOUT.buckets), addresses=self.addresses)
        self.transport = Owned(bus)
        self.addresses = (bus.control, bus.gradients, bus.weights)
        self.server = Server(
            machine=ServerMachine(
                Rules(**fields | self.rules), session=self.sessions, version=version, now=time.monotonic()
            ),
            transport=self.transport,
            updater=updater,  # type: ignore[arg-type]
            bucket_bytes=BUCKET_BYTES,
            offer=Offer("{}", bus.gradients, bus.weights),
            history=History(self.witness, lambda _: 0.1, 0.9),
            recorder=self.witness,
            saver=MemorySaver(self.disk),  # type: ignore[arg-type]
            meta={},
        )

    def kill_server(self) -> None:
        self.transport.close(linger=False)

    def start_worker(self, name: str, hold: Callable[[], object] = lambda: None) -> Worker:
        assert self.addresses is not None
        self.workers[name] = Worker(self.addresses[0], name, hold)
        return self.workers[name]

    def until(self, look: Callable[[], object], what: str) -> None:
        """Serve until something has happened."""
        give_up_at = time.monotonic() + LIMIT_S
        while not look():
            assert self.server.outcome is None, f"ended before {what}: {self.server.outcome}"
            assert time.monotonic() < give_up_at, f"no {what}; {self.witness.notes[-10:]}"
            self.server.turn(0.02)
            self.server.machine.check()

    def until_version(self, version: int) -> None:
        self.until(lambda: self.server.machine.version >= version, f"version {version}")

    def until_ready(self, *names: str) -> None:
        def ready() -> bool:
            return {m.name for m in self.server.machine.members.members.values() if m.plannable} >= set(names)

        self.until(ready, f"{names} ready")

    def finish(self) -> None:
        """To the end of the run, which has the bits of a plain loop."""
        self.until(lambda: self.server.outcome, "end")
        assert self.server.outcome is not None and self.server.outcome.status == "done", self.server.outcome
        for mine, expected in zip(self.server._updater.weights(), reference(self.steps, self.shards), strict=True):
            assert mine.tobytes() == expected.tobytes()
        made = [record.version for record in self.witness.steps]
        assert sorted(set(made)) == list(range(1, self.steps + 1))

    def events(self, name: str) -> list[str]:
        return [change.event for change in self.witness.changes if change.name == name]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.free.set()
            worker.kill()
        self.kill_server()

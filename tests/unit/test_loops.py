"""Both loops over ZeroMQ, in one process: real sockets, clock and threads, and the toy model of the simulation.

The test's own thread is the PS; each worker has a thread, which can be held up, and killed without a goodbye.
"""

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster import BUCKET_BYTES, LAYOUT, MemorySaver, ToyGradients, ToyUpdater, Witness, reference

from bus import sockets
from bus.layout import Bytes
from bus.messages import Fetch, Hello, Left, Weights
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
        updater, version = ToyUpdater(), max(self.disk, default=0)
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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(sockets, "LINGER_MS", 200)
    made = Cluster()
    yield made
    made.close()
    assert [worker.error for worker in made.workers.values() if worker.error] == []


def pause(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


@pytest.mark.parametrize("attempt", range(5))
def test_workers_may_start_at_any_moment_and_none_misses_the_first_weights(attempt: int, cluster: Cluster) -> None:
    """A run of one step that needs all of them: what is published first is all there is."""
    chance = random.Random(attempt)
    cluster.serve(steps=1, min_workers=4)
    delays = {f"w{number}": chance.uniform(0, 0.2) for number in range(4)}
    for name, delay_s in delays.items():
        threading.Timer(delay_s, cluster.start_worker, [name]).start()
    cluster.finish()
    assert {member for _, _, member in cluster.witness.steps[0].shards} == {1, 2, 3, 4}
    assert cluster.witness.steps[0].seconds < 5
    assert [worker.ended().exit_code for worker in cluster.workers.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("attempt", range(5))
def test_every_contribution_counts_and_every_goodbye_is_answered(attempt: int, cluster: Cluster) -> None:
    cluster.serve(steps=7, shards=3, min_workers=3, balance=False)
    for number in range(3):
        cluster.start_worker(f"w{number}")
    cluster.finish()
    assert sum(len(record.shards) for record in cluster.witness.steps) == 21
    assert all({member for _, _, member in record.shards} == {1, 2, 3} for record in cluster.witness.steps)
    assert cluster.witness.refusals == [] and cluster.server.machine.refused == {}
    for name, worker in cluster.workers.items():
        assert worker.ended() == Exit(0, "the run is over: version 7 is reached")
        assert worker.transport is not None and isinstance(worker.transport.heard, Left), "not by a time limit"
        assert cluster.events(name) == ["joined", "ready", "left"]


def test_no_socket_is_used_by_two_threads_however_busy_they_are(cluster: Cluster) -> None:
    """Heartbeats, gradients, snapshots, and members that come and go, all at once; Owned looks who calls."""
    cluster.serve(steps=400, shards=8)
    for number in range(4):
        cluster.start_worker(f"w{number}", pause(0.0005))
    chance = random.Random(1)
    for version in range(25, 400, 25):
        cluster.until_version(version)
        members = [member for member in cluster.server.machine.members.members.values() if member.plannable]
        member = chance.choice(members)
        for _ in range(5):  # as of a worker that has missed something
            session = cluster.server.machine.session
            cluster.server._do(
                cluster.server.machine.handle(Fetch(session, member.number, -1), now=time.monotonic(), peer=member.peer)
            )
    cluster.finish()
    assert Weights in cluster.transport.sent


def test_a_worker_that_slept_through_many_versions_computes_on_the_newest_at_once(cluster: Cluster) -> None:
    """Its queue overflows meanwhile. Nobody waits for it, it waits for nothing, and what is old is refused."""
    cluster.serve(steps=500, heartbeat_timeout_s=60.0)
    for name in ("w0", "w1"):
        cluster.start_worker(name, pause(0.0002))
    cluster.until_ready("w0", "w1")
    number = next(m.number for m in cluster.server.machine.members.members.values() if m.name == "w1")

    def works(since: int) -> bool:
        return any(number in {member for *_, member in record.shards} for record in cluster.witness.steps[since:])

    cluster.until(lambda: works(0), "work of w1")
    cluster.workers["w1"].free.clear()
    cluster.until_version(cluster.server.machine.version + 200)
    cluster.workers["w1"].free.set()
    woke_at, thawed = cluster.server.machine.version, time.monotonic()
    cluster.until(lambda: works(woke_at), "work of w1")
    assert time.monotonic() - thawed < 5
    cluster.finish()
    assert "lost" not in cluster.events("w1")
    assert {refused.reason.split(":")[0] for refused in cluster.witness.refusals} <= NO_LOSS


def test_a_server_that_is_started_again_on_its_ports_is_found_by_the_same_workers(cluster: Cluster) -> None:
    cluster.serve(steps=60)
    workers = [cluster.start_worker(name, pause(0.001)) for name in ("w0", "w1")]
    for life in range(1, 6):
        cluster.until_version(8 * life)
        cluster.kill_server()
        began = time.monotonic()
        cluster.start_server()
        assert time.monotonic() - began < 5, "its ports are free at once"
        assert cluster.server.machine.version == max(cluster.disk) >= 5
        cluster.until(lambda: cluster.server.machine.members.plannable(), "worker")
    cluster.finish()
    assert [worker.ended().exit_code for worker in workers] == [0, 0]
    restarts = [note for worker in workers for note in worker.notes if "joining again" in note or "join again" in note]
    assert len(restarts) >= 5
    assert {refused.reason.split(":")[0] for refused in cluster.witness.refusals} <= NO_LOSS


def test_of_an_outage_no_more_comes_through_than_one_step_of_each_worker(cluster: Cluster) -> None:
    """A PS that is stopped for longer than anybody waits: workers dial anew, and drop what they had queued."""
    cluster.serve(steps=40)
    workers = [cluster.start_worker(name, pause(0.001)) for name in ("w0", "w1")]
    cluster.until_version(10)
    until_silent = time.monotonic() + 2.5 * TIMEOUT_S
    while not all(any("silent" in note for note in worker.notes) for worker in workers):
        assert time.monotonic() < until_silent + LIMIT_S
        time.sleep(0.01)
    before, stopped_at = len(cluster.witness.refusals), cluster.server.machine.version
    cluster.finish()
    assert "lost" not in cluster.events("w0") + cluster.events("w1"), "the PS did not listen: it blames nobody"
    stale = [one for one in cluster.witness.refusals[before:] if one.contribution.version <= stopped_at]
    assert len(stale) <= 2 * 4 * len(LAYOUT.buckets)
    assert [worker.ended().exit_code for worker in workers] == [0, 0]


def test_a_worker_that_is_killed_and_back_under_its_name_at_once_is_a_new_member_at_once(cluster: Cluster) -> None:
    """Also where the PS was busy meanwhile, and finds the old life's words and the new one's in its queues."""
    cluster.serve(steps=10**6)
    cluster.start_worker("other", pause(0.001))
    cluster.start_worker("same", pause(0.001))
    cluster.until_ready("other", "same")
    for life in range(2, 12):
        cluster.until_version(cluster.server.machine.version + 2)
        cluster.workers["same"].kill()
        worker = cluster.start_worker("same", pause(0.001))
        time.sleep(0.01 * (life % 3))  # the PS is busy
        began = time.monotonic()
        cluster.until(lambda life=life: cluster.events("same").count("ready") == life, "new member")
        assert time.monotonic() - began < 5
        joined = [change for change in cluster.witness.changes if change.name == "same" and change.event == "ready"]
        closed = len(cluster.witness.steps)
        cluster.until_version(cluster.server.machine.version + 2)
        used = {member for record in cluster.witness.steps[closed + 1 :] for _, _, member in record.shards}
        assert not used & {change.member for change in joined[:-1]}, "a gradient of an older life"
        assert worker.error is None
    gone = [event for event in cluster.events("same") if event in ("replaced", "lost")]
    assert gone == ["replaced"] * 10


def test_who_computes_for_longer_than_the_time_limit_is_not_taken_for_dead_but_who_is_dead_is(
    cluster: Cluster,
) -> None:
    """Pure Python in the user's loss, which lets go of the interpreter only when it is asked to."""
    busy: list[float] = []

    def loop() -> None:
        if len(busy) < 2:
            busy.append(time.monotonic())
            while time.monotonic() < busy[-1] + 2 * TIMEOUT_S:
                sum(range(1000))

    cluster.serve(steps=30, balance=False)
    cluster.start_worker("w0", loop)
    cluster.start_worker("w1", pause(0.01))
    cluster.until_ready("w0", "w1")
    cluster.until_version(20)
    assert len(busy) == 2 and "lost" not in cluster.events("w0") + cluster.events("w1")
    cluster.workers["w1"].kill()
    killed = time.monotonic()
    cluster.until(lambda: "lost" in cluster.events("w1"), "loss of w1")
    assert time.monotonic() - killed < TIMEOUT_S + 2
    cluster.finish()
    assert cluster.events("w0") == ["joined", "ready", "left"]

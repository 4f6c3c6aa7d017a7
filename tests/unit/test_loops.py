"""Both loops over ZeroMQ, in one process: who starts, sleeps, dies and comes back at bad moments."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from cluster import LAYOUT
from loops import LIMIT_S, NO_LOSS, TIMEOUT_S, Cluster

from bus import sockets
from bus.messages import Fetch, Left, Weights
from worker.machine import Exit


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

"""Would the simulation notice? Faults that others have made are planted, and each has to show."""

from collections.abc import Callable

import numpy as np
import pytest
from cluster import Cluster, reference, stale_gradients

from bus.layout import Bytes
from bus.memory import Chances
from bus.messages import Contribution, Node
from ps.actions import Accept
from ps.machine import Machine
from ps.reduce import Reducer
from ps.rounds import Part, Round, Taken
from ps.server import Server
from worker.client import Client
from worker.machine import Compute

SEEDS = range(6)


def three_workers(seed: int, *, shared: bool = False) -> Cluster:
    chances = Chances(double=0.2, reorder=0.2)
    cluster = Cluster(seed=seed, shards=4, steps=6, min_workers=3, chances=chances, shared=shared)
    for name in ("w0", "w1", "w2"):
        cluster.start_worker(name)
    return cluster


def shows(schedule: Callable[[int], Cluster]) -> list[int]:
    """Seeds with which the schedule trips an invariant or ends with other bits."""
    seeds = []
    for seed in SEEDS:
        cluster = schedule(seed)
        try:
            found = cluster.run(60.0)
        except (AssertionError, KeyError):
            seeds.append(seed)
            continue
        expected = reference(cluster.steps, cluster.shards, scale=cluster.scale)
        if any(mine.tobytes() != other.tobytes() for mine, other in zip(found, expected, strict=True)):
            seeds.append(seed)
    return seeds


def sharing_memory(seed: int) -> Cluster:
    return three_workers(seed, shared=True)


@pytest.mark.parametrize("schedule", [three_workers, sharing_memory, stale_gradients])
def test_without_a_fault_nothing_shows(schedule: Callable[[int], Cluster]) -> None:
    assert shows(schedule) == []


def test_a_duplicate_that_counts_twice_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    offer, hold = Round.offer, Reducer.hold

    def offer_again(self: Round, contribution: Contribution) -> Taken | str:
        node, held = (contribution.low, contribution.high), self.parts[contribution.bucket]
        if node not in held:
            return offer(self, contribution)
        part = held[node]
        held[node] = Part(part.examples + contribution.examples, part.sums, part.left_out, part.makers, part.waited_s)
        return Taken((), ())

    def hold_again(self: Reducer, bucket: int, node: Node, payload: Bytes, *, stays: bool) -> None:
        if (bucket, node) in self._held:
            payload = (self._held[bucket, node].view(np.float32) + payload.view(np.float32)).view(np.uint8)
        hold(self, bucket, node, payload, stays=stays)

    monkeypatch.setattr(Round, "offer", offer_again)
    monkeypatch.setattr(Reducer, "hold", hold_again)
    assert shows(three_workers)


def test_a_stale_session_that_is_accepted_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    unacceptable = Machine._unacceptable

    def any_session(self: Machine, contribution: Contribution) -> str | None:
        reason = unacceptable(self, contribution)
        return None if reason == "older session" and contribution.version == self.version else reason

    monkeypatch.setattr(Machine, "_unacceptable", any_session)
    assert shows(stale_gradients)


def test_a_sum_in_order_of_arrival_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Reducer.begin

    def begin_at_zero(self: Reducer) -> None:
        begin(self)
        self._total[:] = 0

    def add_at_once(self: Reducer, bucket: int, node: Node, payload: Bytes, *, stays: bool) -> None:
        total = self._layout.bucket(self._total, bucket).view(np.float32)
        np.add(total, payload.view(np.float32), out=total)

    monkeypatch.setattr(Reducer, "begin", begin_at_zero)
    monkeypatch.setattr(Reducer, "hold", add_at_once)
    monkeypatch.setattr(Reducer, "add", lambda *_: None)
    assert shows(three_workers)


def test_a_gradient_that_is_overwritten_before_it_is_summed_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Client._compute

    def into_one_slot(self: Client, action: Compute) -> None:
        self._free = self._slots[:1] * len(action.nodes)
        compute(self, action)

    monkeypatch.setattr(Client, "_compute", into_one_slot)
    assert shows(sharing_memory)


def test_weights_that_are_overwritten_while_they_count_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version is written over the one that workers compute on, before its step is closed."""
    accept = Server._accept

    def write_early(self: Server, action: Accept, payload: Bytes | None) -> None:
        accept(self, action, payload)
        self._current[:8] = 0

    monkeypatch.setattr(Server, "_accept", write_early)
    assert shows(sharing_memory)

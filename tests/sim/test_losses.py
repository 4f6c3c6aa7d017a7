"""Members that are lost in the middle of a step, and buffers that are in other hands while training goes on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import HEARTBEAT_S, Cluster, Killed, reference

from bus.faults import parse
from bus.memory import MemoryServer, MemoryWorker
from bus.messages import Contribution, Weights

TIMEOUT_S = 2.0  # silence after which a member of the simulation is gone


def started(workers: int, **settings: Any) -> Cluster:
    cluster = Cluster(**{"seed": 1, "shards": 8, "steps": 12} | settings)
    for number in range(workers):
        cluster.start_worker(f"w{number}")
    return cluster


def when_version(cluster: Cluster, version: int, act: Callable[[], object]) -> None:
    """Do something as soon as the PS has made ``version``."""
    if cluster.server and cluster.server.machine.version >= version:
        act()
    else:
        cluster.network.at(cluster.network.now + 0.001, lambda: when_version(cluster, version, act))


def assert_as_the_plain_loop(cluster: Cluster) -> None:
    found = cluster.run(60.0)
    for mine, other in zip(found, reference(cluster.steps, cluster.shards), strict=True):
        assert mine.tobytes() == other.tobytes(), cluster.story()


@pytest.mark.parametrize("victims", [("w1",), ("w1", "w2"), ("w0", "w1", "w2")])
def test_a_step_closes_in_time_without_those_who_are_killed_in_it(victims: tuple[str, ...]) -> None:
    """At once, and however many: what counts is every shard, so the divisor and the losses are what they were."""
    cluster = started(workers=4)
    when_version(cluster, 5, lambda: [cluster.kill_worker(victim) for victim in victims])
    assert_as_the_plain_loop(cluster)
    assert {change.name for change in cluster.witness.changes if change.event == "lost"} == set(victims)
    assert max(record.seconds for record in cluster.witness.steps) < TIMEOUT_S + 2
    assert {record.examples for record in cluster.witness.steps} == {3 * 8}
    assert all(record.left_out == () for record in cluster.witness.steps)
    members = {change.member for change in cluster.witness.changes if change.name not in victims}
    assert {member for record in cluster.witness.steps[7:] for *_, member in record.shards} == members


@pytest.mark.parametrize("after", range(1, 4))
def test_a_worker_may_die_between_the_buckets_of_its_gradient(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of it counts for nothing until all of it is there, from whomever."""
    push, pushed = MemoryWorker.push, []

    def dying(self: MemoryWorker, contribution: Contribution, payload: Any) -> bool:
        victim = cluster.workers.get("w1")
        if victim and victim.transport is self and contribution.version == 5:  # type: ignore[attr-defined]
            pushed.append(contribution)
            if len(pushed) > after:
                cluster.kill_worker("w1")
                raise Killed
        return push(self, contribution, payload)

    monkeypatch.setattr(MemoryWorker, "push", dying)
    cluster = started(workers=3)
    assert_as_the_plain_loop(cluster)
    assert len(pushed) == after + 1
    assert [change.name for change in cluster.witness.changes if change.event == "lost"] == ["w1"]


def test_one_who_compiles_for_long_holds_nobody_up() -> None:
    cluster = started(workers=2, steps=60, faults=(parse("worker late: prepares 3 s longer"),))
    when_version(cluster, 10, lambda: cluster.start_worker("late"))
    assert_as_the_plain_loop(cluster)
    assert [change.event for change in cluster.witness.changes if change.name == "late"] == ["joined", "ready", "left"]
    assert max(record.seconds for record in cluster.witness.steps) < 2 * HEARTBEAT_S + 0.1


def test_what_was_handed_to_the_bus_is_not_written_again_while_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ sends from where it lies, at any later time: weights, snapshots for those who join, and gradients. Weights
    may be overwritten once the step after theirs is closed; what is made of them then is too old to count."""
    handed: list[tuple[object, Any, bytes]] = []

    def keeping(send: Callable[..., Any], position: int) -> Callable[..., Any]:
        def keep(self: object, *told: Any) -> Any:
            if isinstance(told[position], Weights):
                for message, payload, before in handed:
                    if isinstance(message, Weights) and message.version == told[position].version - 1:
                        assert payload.tobytes() == before
            if len(told) > position + 1 and told[position + 1] is not None:
                handed.append((told[position], told[position + 1], told[position + 1].tobytes()))
            return send(self, *told)

        return keep

    monkeypatch.setattr(MemoryServer, "publish", keeping(MemoryServer.publish, 0))
    monkeypatch.setattr(MemoryServer, "send", keeping(MemoryServer.send, 1))
    monkeypatch.setattr(MemoryWorker, "push", keeping(MemoryWorker.push, 0))
    cluster = started(workers=3, steps=20)
    for moment in range(1, 6):
        when_version(cluster, 3 * moment, lambda: cluster.start_worker("w2"))
    assert_as_the_plain_loop(cluster)
    kinds = {type(message) for message, *_ in handed}
    assert kinds == {Weights, Contribution}
    made = [one for one in handed if isinstance(one[0], Contribution)]
    assert all(payload.tobytes() == before for _, payload, before in made)
    by_version: dict[tuple[int, int], set[bytes]] = {}
    for message, _, before in handed:
        if isinstance(message, Weights):
            by_version.setdefault((message.version, message.bucket), set()).add(before)
    assert all(len(contents) == 1 for contents in by_version.values()), "one version, one content"
    assert np.ptp([version for version, _ in by_version]) == 19

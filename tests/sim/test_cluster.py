"""Whatever happens to the processes, the bits are those of the plain loop. Each schedule follows from its seed."""

import numpy as np
import pytest
from cluster import Cluster, reference
from schedules import rough, run


def assert_same_bits(found: list[np.ndarray], steps: int, shards: int, cluster: Cluster) -> None:
    for mine, expected in zip(found, reference(steps, shards), strict=True):
        assert mine.tobytes() == expected.tobytes(), f"seed {cluster.seed}\n{cluster.story()}"


@pytest.mark.parametrize("shards", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_any_number_of_workers_gives_the_bits_of_the_plain_loop(workers: int, shards: int) -> None:
    cluster = Cluster(seed=workers, shards=shards, steps=6)
    for number in range(workers):
        cluster.start_worker(f"w{number}")
    assert_same_bits(cluster.run(), 6, shards, cluster)
    assert [record.version for record in cluster.witness.steps] == list(range(1, 7))
    assert all(record.examples == 3 * shards for record in cluster.witness.steps)


def test_everyone_leaves_in_order_and_nothing_is_refused_when_nothing_goes_wrong() -> None:
    cluster = Cluster(seed=1, steps=5)
    for name in ("w0", "w1"):
        cluster.start_worker(name)
    cluster.run()
    assert cluster.witness.refusals == []
    events = [change.event for change in cluster.witness.changes]
    assert events.count("left") == 2 and "lost" not in events
    assert cluster.server and cluster.server.outcome and cluster.server.outcome.status == "done"
    assert cluster.network.now < 3.0  # a goodbye, not a deadline


def test_a_worker_killed_in_the_middle_of_a_step_is_replaced_by_the_others() -> None:
    cluster = Cluster(seed=2, shards=8, steps=6)
    for name in ("w0", "w1", "w2"):
        cluster.start_worker(name)
    cluster.network.at(0.35, lambda: cluster.kill_worker("w1"))
    assert_same_bits(cluster.run(), 6, 8, cluster)
    assert [change.name for change in cluster.witness.changes if change.event == "lost"] == ["w1"]


def test_a_worker_that_joins_late_takes_part() -> None:
    cluster = Cluster(seed=3, shards=8, steps=20)
    cluster.start_worker("w0")
    cluster.network.at(1.0, lambda: cluster.start_worker("w1"))
    assert_same_bits(cluster.run(), 20, 8, cluster)
    members = {member for record in cluster.witness.steps for _, _, member in record.shards}
    assert members == {1, 2}
    assert {member for _, _, member in cluster.witness.steps[0].shards} == {1}


def test_the_ps_killed_and_restored_recomputes_the_same_bits() -> None:
    cluster = Cluster(seed=4, shards=4, steps=12, save_every=5)
    for name in ("w0", "w1"):
        cluster.start_worker(name)
    cluster.network.at(0.6, cluster.kill_server)
    cluster.network.at(0.8, cluster.start_server)
    assert_same_bits(cluster.run(), 12, 4, cluster)
    assert cluster.sessions == 2
    versions = [record.version for record in cluster.witness.steps]
    assert len(versions) > len(set(versions))  # some were made twice


def test_a_frozen_worker_is_replaced_and_welcome_when_it_thaws() -> None:
    cluster = Cluster(seed=5, shards=4, steps=40)
    for name in ("w0", "w1"):
        cluster.start_worker(name)
    cluster.network.at(0.5, lambda: cluster.frozen.add("w1"))
    cluster.network.at(4.0, lambda: cluster.frozen.discard("w1"))
    assert_same_bits(cluster.run(), 40, 4, cluster)
    assert "lost" in [change.event for change in cluster.witness.changes]


@pytest.mark.parametrize("block", range(10))
def test_rough_schedules_end_with_the_same_bits(block: int) -> None:
    """Up to eight workers and up to ten faults each, over a network that misbehaves; `make sim` runs many more."""
    for seed in range(block * 50, block * 50 + 50):
        run(rough(seed))


def test_a_seed_tells_the_whole_story() -> None:
    """Or a failure could not be looked into."""
    stories = []
    for _ in range(2):
        cluster = run(rough(7))
        stories.append((cluster.network.now, list(cluster.network.log), cluster.witness.notes, cluster.witness.steps))
    assert stories[0] == stories[1]


def test_a_sum_in_order_of_arrival_would_be_caught() -> None:
    """The toy model is one where the order of sums shows; otherwise the tests above would prove nothing."""
    from cluster import shard_gradient

    weights = [np.ones(33, np.float32), np.ones(5, np.float32)]
    parts = [shard_gradient(weights, 0, shard)[0] for shard in range(4)]
    tree = (parts[0] + parts[1]) + (parts[2] + parts[3])
    arrival = ((parts[3] + parts[0]) + parts[2]) + parts[1]
    assert tree.tobytes() != arrival.tobytes()

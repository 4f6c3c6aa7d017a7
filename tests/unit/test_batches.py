"""The order of samples: every sample once per epoch, whoever asks, for ever the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batches import Batches, permutation

shapes = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 7))  # samples, shards, examples of a shard
seeds = st.integers(0, 2**64 - 1)


def step(batches: Batches, version: int) -> list[int]:
    return [int(i) for shard in range(batches.shards) for i in batches.indices(version, shard)]


@given(shapes, seeds, st.integers(1, 3))
@settings(deadline=None)
def test_every_sample_is_used_exactly_once_per_epoch(shape: tuple[int, int, int], seed: int, epochs: int) -> None:
    samples, shards, size = shape
    batches = Batches(seed, samples, shards * size, shards)
    steps = -(-epochs * samples // batches.batch_size)
    stream = [i for version in range(steps) for i in step(batches, version)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(shapes, seeds, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5)), max_size=12))
@settings(deadline=None)
def test_a_shard_does_not_depend_on_what_was_asked_before(
    shape: tuple[int, int, int], seed: int, history: list[tuple[int, int]]
) -> None:
    samples, shards, size = shape
    used = Batches(seed, samples, shards * size, shards)
    for version, shard in history:
        used.indices(version, shard % shards)[:] = -1  # the caller may also write into what it got
    fresh = Batches(seed, samples, shards * size, shards)
    for version, shard in [*history, (7, 0)]:
        assert used.indices(version, shard % shards).tolist() == fresh.indices(version, shard % shards).tolist()


def test_shards_of_a_step_are_disjoint_within_an_epoch() -> None:
    batches = Batches(3, 1003, 32, 4)
    for version in range(31):  # the steps that lie wholly in the first epoch
        assert len(set(step(batches, version))) == 32


def test_an_epoch_may_end_inside_a_shard_and_every_shard_is_whole() -> None:
    batches = Batches(3, 1003, 32, 4)
    stream = [i for version in range(95) for i in step(batches, version)]  # 3 epochs and a bit
    assert len(stream) == 95 * 32
    assert np.bincount(stream[: 3 * 1003]).tolist() == [3] * 1003
    assert {len(batches.indices(version, shard)) for version in range(95) for shard in range(4)} == {8}


def test_fewer_samples_than_shards() -> None:
    batches = Batches(0, 5, 16, 8)
    assert np.bincount([i for version in range(5) for i in step(batches, version)]).tolist() == [16] * 5


def test_the_number_of_shards_does_not_change_the_samples_of_a_step() -> None:
    for version in (0, 1, 30, 31, 32):
        assert step(Batches(9, 1003, 32, 1), version) == step(Batches(9, 1003, 32, 8), version)


def test_the_order_never_changes_silently() -> None:
    """Golden numbers: a run must be repeatable by later versions of Gradbus, NumPy and Python."""
    batches = Batches(7, 10, 4, 2)
    found = [batches.indices(version, shard).tolist() for version in range(5) for shard in range(2)]
    assert found == [[8, 4], [1, 6], [3, 2], [7, 5], [9, 0], [3, 9], [1, 6], [2, 5], [4, 8], [0, 7]]
    assert permutation(2**64 - 1, 2**40, 6).tolist() == [4, 1, 5, 2, 0, 3]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_a_far_version_costs_no_more_than_the_first() -> None:
    assert Batches(0, 1003, 32, 4).indices(10**15, 3).shape == (8,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10, 4, 2), "seed"),
        ((2**64, 10, 4, 2), "seed"),
        ((0, 0, 4, 2), "samples"),
        ((0, 10, 4, 0), "shards"),
        ((0, 10, 10, 4), "batch_size: expected a positive multiple of the 4 shards, got 10; the nearest is 8"),
        ((0, 10, 0, 4), "the nearest is 4"),
    ],
)
def test_impossible_settings_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(*arguments)


def test_a_shard_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shard in 0\.\.3"):
        Batches(0, 10, 4, 4).indices(0, 4)
    with pytest.raises(ValueError, match="version >= 0"):
        Batches(0, 10, 4, 4).indices(-1, 0)

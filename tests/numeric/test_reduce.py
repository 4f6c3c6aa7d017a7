"""Sums over the shard tree: the bits of the reference, in full precision, weighted by examples."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import tree
from bus.finite import GRADIENT_LIMIT
from bus.layout import Bytes, gradient_layout
from bus.messages import Contribution, Leaf, Node
from ps.reduce import CHUNK_BYTES, Reducer
from ps.rounds import Round, Taken

LEAVES = [
    Leaf("['a']", "float32", (40,), "trainable"),
    Leaf("['b']", "float32", (), "trainable"),
    Leaf("['d']", "float64", (3, 3), "trainable"),
    Leaf("['empty']", "float32", (0, 4), "trainable"),
    Leaf("['mean']", "float32", (5,), "state"),
]
LAYOUT = gradient_layout(LEAVES, 64)
Arrays = list[np.ndarray[Any, Any]]


def shard_gradient(shard: int) -> Arrays:
    """Sums of these differ in every order that they are taken in."""
    rng = np.random.default_rng(shard)
    return [
        (rng.standard_normal(leaf.shape) * 10.0 ** (shard % 6 - 3)).astype(leaf.dtype).reshape(leaf.shape)
        for leaf in LAYOUT.leaves
    ]


def tree_sum(node: Node) -> Arrays:
    if node[1] - node[0] == 1:
        return shard_gradient(node[0])
    left, right = (tree_sum(child) for child in tree.children(node))
    return [np.asarray(one + other) for one, other in zip(left, right, strict=True)]


class Step:
    """What the server does with contributions: the round decides, the reducer adds."""

    def __init__(self, shards: int, reducer: Reducer | None = None) -> None:
        self.round = Round(0, shards, len(LAYOUT.buckets))
        self.reducer = reducer or Reducer(LAYOUT, shards)
        self.reducer.begin()

    def offer(self, bucket: int, node: Node, buffer: Bytes, examples: int = 1) -> None:
        taken = self.round.offer(Contribution(1, 1, 0, bucket, *node, examples, {}))
        if isinstance(taken, Taken):
            for other in taken.replaced:
                self.reducer.drop(bucket, other)
            self.reducer.hold(bucket, node, LAYOUT.bucket(buffer, bucket).copy())
            for up in taken.sums:
                self.reducer.add(bucket, up)

    def whole(self, node: Node, arrays: Arrays, examples: int = 1) -> None:
        buffer = LAYOUT.pack(arrays)
        for bucket in range(len(LAYOUT.buckets)):
            self.offer(bucket, node, buffer, examples)


def assert_same_bits(found: Any, expected: Arrays) -> None:
    for leaf, mine, other in zip(LAYOUT.leaves, found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape) and mine.tobytes() == other.tobytes(), leaf.name


@settings(max_examples=60)
@given(st.data())
def test_any_order_of_arrival_gives_the_bits_of_the_tree(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 9))
    nodes = [(a, b) for a in range(shards) for b in range(a + 1, shards + 1) if tree.is_node((a, b), shards)]
    anything = data.draw(st.lists(st.tuples(st.integers(0, len(LAYOUT.buckets) - 1), st.sampled_from(nodes))))
    everything = [(bucket, (shard, shard + 1)) for bucket in range(len(LAYOUT.buckets)) for shard in range(shards)]
    step = Step(shards)
    for bucket, node in anything + data.draw(st.permutations(everything)):
        step.offer(bucket, node, LAYOUT.pack(tree_sum(node)))
    assert step.round.complete
    assert_same_bits(step.reducer.sums(), tree_sum((0, shards)))


def test_a_step_leaves_nothing_behind_for_the_next() -> None:
    reducer = Reducer(LAYOUT, 4)
    first = Step(4, reducer)
    first.whole((0, 2), [np.full(leaf.shape, 1e9, leaf.dtype) for leaf in LAYOUT.leaves])
    second = Step(4, reducer)
    for shard in (3, 1, 0, 2):
        second.whole((shard, shard + 1), shard_gradient(shard))
    assert_same_bits(reducer.sums(), tree_sum((0, 4)))


def test_one_worker_may_send_the_whole_step_as_one_sum() -> None:
    step = Step(4)
    step.whole((0, 4), tree_sum((0, 4)))
    assert_same_bits(step.reducer.sums(), tree_sum((0, 4)))


def test_examples_weigh_and_not_workers() -> None:
    """Least squares on 64 samples, by three workers with 1, 7 and 56 of them, against one with all."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 40)), rng.standard_normal(40)
    y = x @ rng.standard_normal(40)

    def gradient(low: int, high: int) -> np.ndarray[Any, Any]:
        return x[low:high].T @ (x[low:high] @ w - y[low:high]) / (high - low)

    step = Step(3)
    zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in LAYOUT.leaves[1:]]
    for shard, (low, high) in enumerate([(0, 1), (1, 8), (8, 64)]):
        total = (high - low) * gradient(low, high)
        step.whole((shard, shard + 1), [total.astype(np.float32), *zeros], examples=high - low)
    result = step.round.result()
    assert result.examples == 64
    np.testing.assert_allclose(step.reducer.sums()[0] / result.examples, gradient(0, 64), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("value", [6e3, 1e-7, 6e4])
def test_half_precision_is_summed_in_full(value: float) -> None:
    """Sixteen of 6000 are more than float16 can hold; a sixteenth of 1e-7 is less."""
    layout = gradient_layout([Leaf("w", "float16", (8,), "trainable")], 64)
    half = np.full(8, value, np.float16)
    reducer = Reducer(layout, 16)
    step = Round(0, 16, 1)
    for shard in range(16):
        taken = step.offer(Contribution(1, 1, 0, 0, shard, shard + 1, 1, {}))
        assert isinstance(taken, Taken)
        reducer.hold(0, (shard, shard + 1), layout.pack([half.astype(np.float32)]))
        for up in taken.sums:
            reducer.add(0, up)
    (total,) = reducer.sums()
    assert total.dtype == np.float32
    np.testing.assert_allclose(total / 16, half.astype(np.float32), rtol=1e-6)


def summed(name: str, value: float, position: int = -1) -> Reducer:
    """A reducer whose sums are zero but for one element of one leaf."""
    step = Step(1)
    arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in LAYOUT.leaves]
    for leaf, array in zip(LAYOUT.leaves, arrays, strict=True):
        if leaf.name == name:
            array.reshape(-1)[position] = value
    step.whole((0, 1), arrays)
    return step.reducer


@pytest.mark.parametrize("name", ["['a']", "['b']", "['d']", "['mean']"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.01e18, -3e38])
def test_a_sum_that_cannot_be_applied_is_named_by_its_leaf(name: str, value: float) -> None:
    assert summed(name, value).trouble() == f"the sum of the gradient of {name} is not finite"


def test_sums_that_can_be_applied_are_no_trouble() -> None:
    assert summed("['a']", 0.99 * GRADIENT_LIMIT).trouble() == ""
    assert summed("['b']", -0.99 * GRADIENT_LIMIT).trouble() == ""


def test_finite_shards_whose_sum_is_not_are_caught() -> None:
    step = Step(2)
    for shard in (0, 1):
        arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in LAYOUT.leaves]
        arrays[0][7] = 0.9 * GRADIENT_LIMIT
        step.whole((shard, shard + 1), arrays)
    assert step.reducer.trouble() == "the sum of the gradient of ['a'] is not finite"


def test_the_norm_is_that_of_the_mean_gradient_without_the_model_state() -> None:
    step = Step(4)
    for shard in range(4):
        step.whole((shard, shard + 1), shard_gradient(shard), examples=8)
    trained = np.concatenate([array.reshape(-1) for array in tree_sum((0, 4))[:-1]]).astype(np.float64)
    assert step.reducer.norm(32) == pytest.approx(np.linalg.norm(trained / 32), rel=1e-6)
    assert step.reducer.norm(0) == 0.0


def test_the_norm_of_large_gradients_that_are_allowed_is_a_number() -> None:
    """A thousand squares of 1e18 are more than float32 can hold."""
    layout = gradient_layout([Leaf("w", "float32", (1000,), "trainable")], 4096)
    reducer = Reducer(layout, 1)
    reducer.hold(0, (0, 1), layout.pack([np.full(1000, 0.9 * GRADIENT_LIMIT, np.float32)]))
    assert reducer.trouble() == ""
    assert reducer.norm(1) == pytest.approx(0.9 * GRADIENT_LIMIT * 1000**0.5, rel=1e-5)


@pytest.mark.parametrize("shards", [2, 5, 8])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_chunks_nor_threads_show_in_the_bits_and_nothing_that_arrived_is_written(
    shards: int, threads: int
) -> None:
    """Enough elements for several chunks for each thread, and a last one that is short."""
    layout = gradient_layout([Leaf("['w']", "float32", (3 * CHUNK_BYTES + 1000,), "trainable")], 1 << 24)
    rng = np.random.default_rng(shards)
    arrived = [
        layout.pack([(rng.standard_normal(layout.leaves[0].shape) * 10.0**shard).astype(np.float32)])
        for shard in range(shards)
    ]
    for payload in arrived:
        payload.setflags(write=False)

    def total(node: Node) -> Any:
        if node[1] - node[0] == 1:
            return arrived[node[0]].view(np.float32)
        left, right = (total(child) for child in tree.children(node))
        return left + right

    reducer, open_step = Reducer(layout, shards, threads), Round(0, shards, 1)
    for shard in rng.permutation(shards):
        node = (int(shard), int(shard) + 1)
        taken = open_step.offer(Contribution(1, 1, 0, 0, *node, 1, {}))
        assert isinstance(taken, Taken)
        reducer.hold(0, node, arrived[shard])
        for up in taken.sums:
            reducer.add(0, up)
    (found,) = reducer.sums()
    assert found.tobytes() == total((0, shards)).tobytes()[: found.nbytes]
    assert reducer.trouble() == ""


def test_what_is_not_finite_is_found_in_the_last_element_of_the_last_chunk() -> None:
    layout = gradient_layout([Leaf("['w']", "float32", (CHUNK_BYTES,), "trainable")], 1 << 24)
    values = np.zeros(CHUNK_BYTES, np.float32)
    reducer = Reducer(layout, 2, 2)
    reducer.hold(0, (0, 1), layout.pack([values]))
    values[-1] = np.nan
    reducer.hold(0, (1, 2), layout.pack([values]))
    reducer.add(0, (0, 2))
    assert "['w'] is not finite" in reducer.trouble()
    reducer.begin()
    assert reducer.trouble() == ""

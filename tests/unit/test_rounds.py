"""One open step: whatever arrives, in whatever order and however often, the sum is that of the tree."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import tree
from bus.messages import Contribution, Node
from ps.rounds import Part, Round, Taken


def contribution(node: Node, *, bucket: int = 0, examples: int = 1, member: int = 1, **more: Any) -> Contribution:
    return Contribution(9, member, 0, bucket, *node, examples, more.pop("sums", {"loss": 1.0}), **more)


def gradient(shard: int) -> np.ndarray[Any, Any]:
    """Sums of these differ in every order that they are taken in."""
    return np.random.default_rng(shard).standard_normal(5).astype(np.float32) * np.float32(10.0 ** (shard % 7))


def tree_sum(node: Node) -> np.ndarray[Any, Any]:
    """The reference: by halves, down to the shards."""
    if node[1] - node[0] == 1:
        return gradient(node[0])
    left, right = tree.children(node)
    return tree_sum(left) + tree_sum(right)


def executed(held: dict[Node, np.ndarray[Any, Any]], node: Node, taken: Taken) -> None:
    """What a reducer does with the answer to an offer."""
    for other in taken.replaced:
        del held[other]
    assert node not in held
    held[node] = tree_sum(node)
    for up in taken.sums:
        left, right = tree.children(up)
        held[up] = held.pop(left) + held.pop(right)


def nodes(shards: int) -> list[Node]:
    every_range = ((low, high) for low in range(shards) for high in range(low + 1, shards + 1))
    return [node for node in every_range if tree.is_node(node, shards)]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, Node]]]:
    """Shards, buckets, and (bucket, node) in any order: at random, and in the end every shard of every bucket."""
    shards, buckets = draw(st.integers(1, 11)), draw(st.integers(1, 3))
    any_one = st.tuples(st.integers(0, buckets - 1), st.sampled_from(nodes(shards)))
    rest = [(bucket, (shard, shard + 1)) for bucket in range(buckets) for shard in range(shards)]
    return shards, buckets, draw(st.lists(any_one, max_size=12)) + draw(st.permutations(rest))


@given(arrivals())
def test_any_order_repetition_and_overlap_gives_the_bits_of_the_tree(
    case: tuple[int, int, list[tuple[int, Node]]],
) -> None:
    shards, buckets, offers = case
    step = Round(0, shards, buckets)
    held: list[dict[Node, np.ndarray[Any, Any]]] = [{} for _ in range(buckets)]
    arrived: list[set[int]] = [set() for _ in range(buckets)]
    for bucket, node in offers:
        known = list(step.parts[bucket])
        taken = step.offer(contribution(node, bucket=bucket, examples=node[1] - node[0]))
        step.check()
        if any(tree.contains(other, node) for other in known):
            assert taken == "duplicate: these shards have arrived before"
        else:
            assert isinstance(taken, Taken)
            executed(held[bucket], node, taken)
            arrived[bucket] |= set(range(*node))
        assert set(step.parts[bucket]) == set(held[bucket])
        lacking = [s for s in range(shards) if any(s not in seen for seen in arrived)]
        missing = step.missing()
        assert [s for low, high in missing for s in range(low, high)] == lacking
        assert missing == tuple(sorted(missing)) and all(tree.is_node(one, shards) for one in missing)
        assert step.complete == (not lacking)
    result = step.result()
    assert result.examples == shards
    assert [s for low, high, _ in result.makers for s in range(low, high)] == list(range(shards))
    for sums in held:
        assert sums[tree.root(shards)].tobytes() == tree_sum(tree.root(shards)).tobytes()


@given(st.integers(1, 12), st.data())
def test_missing_shards_are_named_by_the_fewest_nodes(shards: int, data: st.DataObject) -> None:
    step = Round(0, shards, 1)
    for node in data.draw(st.lists(st.sampled_from(nodes(shards)), max_size=6)):
        step.offer(contribution(node))
    gone = {s for low, high in step.parts[0] for s in range(low, high)}
    inside = [node for node in nodes(shards) if not gone & set(range(*node))]
    largest = [node for node in inside if not any(other != node and tree.contains(other, node) for other in inside)]
    assert step.missing() == tuple(sorted(largest))


def test_sums_and_facts_go_up_the_same_tree() -> None:
    step = Round(0, 3, 1)
    values = [0.1, 0.2, 0.3]
    for shard in (2, 0, 1):
        made = contribution(
            (shard, shard + 1), member=shard + 5, examples=shard + 1, waited_s=0.5 - shard / 10,
            sums={"loss": values[shard], f"only_{shard}": 1.0},
        )  # fmt: skip
        step.offer(made)
    assert step.result() == Part(
        examples=6,
        sums={"loss": (0.1 + 0.2) + 0.3, "only_0": 1.0, "only_1": 1.0, "only_2": 1.0},
        left_out=(),
        makers=((0, 1, 5), (1, 2, 6), (2, 3, 7)),
        waited_s=0.3,
    )


def test_shards_that_were_left_out_are_listed_from_left_to_right() -> None:
    step = Round(0, 4, 1)
    for node, examples, left_out in (((2, 4), 3, (2,)), ((1, 2), 0, (1,)), ((0, 1), 3, ())):
        step.offer(contribution(node, examples=examples, left_out=left_out, waited_s=math.inf))
    assert (step.result().examples, step.result().left_out) == (6, (1, 2))
    assert step.result().waited_s == math.inf


def test_a_range_replaces_the_parts_of_it_that_are_held() -> None:
    step = Round(0, 8, 1)
    for node in ((0, 1), (2, 4), (5, 6)):
        step.offer(contribution(node))
    assert step.offer(contribution((0, 4), member=2)) == Taken(replaced=((0, 1), (2, 4)), sums=())
    assert step.missing() == ((4, 5), (6, 8))
    assert step.parts[0][0, 4].makers == ((0, 4, 2),)
    assert step.offer(contribution((4, 8))) == Taken(replaced=((5, 6),), sums=((0, 8),))
    assert step.complete


def test_buckets_arrive_on_their_own() -> None:
    step = Round(0, 2, 2)
    step.offer(contribution((0, 2), bucket=1))
    assert not step.complete and step.missing() == ((0, 2),)
    step.offer(contribution((0, 1), bucket=0))
    assert step.missing() == ((1, 2),)
    step.offer(contribution((1, 2), bucket=0))
    assert step.complete and step.missing() == ()


@pytest.mark.parametrize(
    "node", [(0, 3), (1, 3), (3, 5), (0, 0), (2, 1), (-1, 1), (4, 6), (0, 9), (-(2**63), 2**63), (4, 4)]
)
def test_what_is_no_node_is_refused_and_changes_nothing(node: Node) -> None:
    step = Round(0, 5, 1)
    reason = step.offer(contribution(node))
    said = f"no such shards: {node[0]}..{node[1] - 1} are no node of the tree over 5 shards"
    assert reason == said
    assert step.parts == [{}]


@pytest.mark.parametrize("bucket", [-1, 2, 2**40])
def test_a_bucket_that_is_not_there_is_refused(bucket: int) -> None:
    step = Round(0, 4, 2)
    reason = step.offer(contribution((0, 4), bucket=bucket))
    assert isinstance(reason, str) and f"bucket {bucket} of 2" in reason
    assert step.parts == [{}, {}]


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-3, 3))
def test_a_reason_to_refuse_is_of_a_few_kinds(low: int, high: int, bucket: int) -> None:
    """What stands before the colon is counted by, so it must not hold numbers that a peer can choose."""
    reason = Round(0, 5, 1).offer(msgspec.structs.replace(contribution((low, high)), bucket=bucket))
    if isinstance(reason, str):
        assert reason.split(":")[0] in {"duplicate", "no such shards", "no such bucket"}


@pytest.mark.parametrize("facts", [{"examples": -1}, {"left_out": (2,)}, {"left_out": (0, 5)}])
def test_facts_that_cannot_be_are_refused_and_change_nothing(facts: dict[str, Any]) -> None:
    """They would be divided by, or name shards of somebody else."""
    step = Round(0, 4, 1)
    said = step.offer(Contribution(1, 1, 0, 0, 0, 2, **{"examples": 6, "sums": {}} | facts))
    assert isinstance(said, str) and said.startswith("impossible facts:")
    assert step.missing() == ((0, 4),)

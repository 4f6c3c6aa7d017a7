"""The shard tree: which ranges are nodes, and that two nodes never overlap by halves."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import tree

Node = tree.Node


def grown(low: int, shards: int, size: int) -> list[Node]:
    """The nodes below the one that starts at ``low`` and has room for ``size`` shards, by halving: the slow version."""
    if low >= shards:
        return []
    here = (low, min(low + size, shards))
    if here[1] - here[0] == 1:
        return [here]
    below = grown(low, shards, size // 2) + grown(low + size // 2, shards, size // 2)
    return below if here in below else [here, *below]


def all_nodes(shards: int) -> set[Node]:
    size = 1
    while size < shards:
        size *= 2
    return set(grown(0, shards, size))


@pytest.mark.parametrize(
    ("shards", "nodes"),
    [
        (1, [(0, 1)]),
        (2, [(0, 1), (0, 2), (1, 2)]),
        (3, [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]),
        (5, [(0, 1), (0, 2), (0, 4), (0, 5), (1, 2), (2, 3), (2, 4), (3, 4), (4, 5)]),
        (6, [(0, 1), (0, 2), (0, 4), (0, 6), (1, 2), (2, 3), (2, 4), (3, 4), (4, 5), (4, 6), (5, 6)]),
    ],
)
def test_the_nodes_of_small_trees(shards: int, nodes: list[Node]) -> None:
    every_range = [(low, high) for low in range(-1, shards + 2) for high in range(-1, shards + 3)]
    assert [node for node in every_range if tree.is_node(node, shards)] == nodes


@pytest.mark.parametrize("shards", range(1, 34))
def test_a_tree_is_what_halving_gives(shards: int) -> None:
    nodes = all_nodes(shards)
    assert len(nodes) == 2 * shards - 1
    every_range = combinations(range(shards + 1), 2)
    assert {node for node in every_range if tree.is_node(node, shards)} == nodes
    assert tree.root(shards) in nodes
    for node in nodes - {tree.root(shards)}:
        up, other = tree.parent(node, shards), tree.sibling(node, shards)
        assert up in nodes and other in nodes
        assert set(tree.children(up)) == {node, other}
    assert tree.parent(tree.root(shards), shards) == tree.root(shards)


@pytest.mark.parametrize("shards", [1, 2, 7, 16, 21])
def test_two_nodes_are_nested_or_disjoint(shards: int) -> None:
    for one, other in combinations(all_nodes(shards), 2):
        disjoint = one[1] <= other[0] or other[1] <= one[0]
        assert disjoint or tree.contains(one, other) or tree.contains(other, one)


@given(st.data())
def test_a_cover_is_exact_and_as_small_as_can_be(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 40))
    low = data.draw(st.integers(0, shards))
    high = data.draw(st.integers(low, shards))
    cover = tree.cover(low, high, shards)
    assert [shard for node in cover for shard in range(*node)] == list(range(low, high))
    inside = [node for node in all_nodes(shards) if low <= node[0] and node[1] <= high]
    largest = [node for node in inside if not any(other != node and tree.contains(other, node) for other in inside)]
    assert cover == sorted(largest)

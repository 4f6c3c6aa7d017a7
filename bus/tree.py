"""The fixed binary tree over shards 0..V-1 along which every sum is taken. Pure arithmetic on ranges.

A node is a half-open range ``(low, high)`` of shards that starts at a multiple of a power of two and ends where that
power of two, or the row of shards, ends. For five shards::

                 (0, 5)
               /        \\
           (0, 4)      (4, 5)
          /      \\
      (0, 2)    (2, 4)
      /   \\     /   \\
    (0,1)(1,2)(2,3)(3,4)

Two nodes are nested or disjoint, so a sum over the tree depends only on what its leaves are, never on who computed
them or in which order they arrived: floating-point addition commutes, and the tree fixes the grouping.
"""

from functools import lru_cache

Node = tuple[int, int]

CACHED = 1 << 12  # answers of each kind: the same few nodes are asked for in every step


def root(shards: int) -> Node:
    return (0, shards)


@lru_cache(CACHED)
def is_node(node: Node, shards: int) -> bool:
    """Whether ``node`` is a node of the tree over ``shards`` shards."""
    low, high = node
    if not 0 <= low < high <= shards:
        return False
    size = _power_of_two(high - low)
    return low % size == 0 and high == min(low + size, shards)


@lru_cache(CACHED)
def parent(node: Node, shards: int) -> Node:
    """The smallest node that is larger than ``node``; the root is its own parent."""
    low, high = node
    size = _power_of_two(high - low)
    while (low, high) == node and node != root(shards):
        size *= 2
        low -= low % size
        high = min(low + size, shards)
    return (low, high)


@lru_cache(CACHED)
def children(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum is ``node``. ``node`` must hold more than one shard."""
    low, high = node
    middle = low + _power_of_two(high - low) // 2
    return (low, middle), (middle, high)


@lru_cache(CACHED)
def sibling(node: Node, shards: int) -> Node:
    """The node that is added to ``node`` to make its parent. ``node`` must not be the root."""
    left, right = children(parent(node, shards))
    return right if node == left else left


def contains(outer: Node, inner: Node) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def cover(low: int, high: int, shards: int) -> list[Node]:
    """The fewest nodes that together are the shards ``low..high-1``, from left to right."""
    nodes: list[Node] = []
    while low < high:
        node = (low, low + 1)
        while (up := parent(node, shards)) != node and up[0] == low and up[1] <= high:
            node = up
        nodes.append(node)
        low = node[1]
    return nodes


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()

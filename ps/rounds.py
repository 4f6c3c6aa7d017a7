"""The shard tree of an open step: what is held, what is missing, what can be added. Pure: it never sees a gradient.

A contribution is taken for what it is (version, shard range, bucket), not for who sent it. The first to arrive wins;
whatever arrives again, in whole or in part, is refused with a reason and changes nothing. Buckets are independent of
each other: each has a tree of its own, and the step is complete when every tree has its root.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from bus import tree
from bus.messages import Contribution, Node


@dataclass(frozen=True, slots=True)
class Part:
    """What is known of the sum at one node."""

    examples: int
    sums: dict[str, float]
    left_out: tuple[int, ...]
    makers: tuple[tuple[int, int, int], ...]  # (low, high, member), from left to right
    waited_s: float  # the least that any of the makers waited for this version


@dataclass(frozen=True, slots=True)
class Taken:
    """Hold the contribution's bucket at its node after forgetting ``replaced``, then make each node of ``sums``, in
    this order, from its two children."""

    replaced: tuple[Node, ...]
    sums: tuple[Node, ...]


@dataclass(slots=True)
class Round:
    """One open step."""

    version: int
    shards: int
    buckets: int
    parts: list[dict[Node, Part]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [{} for _ in range(self.buckets)]

    def offer(self, contribution: Contribution) -> Taken | str:
        """Take ``contribution``, or say in words why not: a kind of fault, and after a colon the details."""
        node = (contribution.low, contribution.high)
        if not tree.is_node(node, self.shards):
            return f"no such shards: {node[0]}..{node[1] - 1} are no node of the tree over {self.shards} shards"
        if not 0 <= contribution.bucket < self.buckets:
            return f"no such bucket: bucket {contribution.bucket} of {self.buckets}"
        if contribution.examples < 0 or not all(node[0] <= shard < node[1] for shard in contribution.left_out):
            return f"impossible facts: {contribution.examples} examples, shards {contribution.left_out} left out"
        held = self.parts[contribution.bucket]
        if any(tree.contains(other, node) for other in held):
            return "duplicate: these shards have arrived before"
        replaced = tuple(sorted(other for other in held if tree.contains(node, other)))
        for other in replaced:
            del held[other]
        held[node] = Part(
            contribution.examples,
            dict(contribution.sums),
            contribution.left_out,
            ((node[0], node[1], contribution.member),),
            contribution.waited_s,
        )
        return Taken(replaced, self._add_up(held, node))

    def _add_up(self, held: dict[Node, Part], node: Node) -> tuple[Node, ...]:
        sums: list[Node] = []
        while node != tree.root(self.shards) and tree.sibling(node, self.shards) in held:
            node = tree.parent(node, self.shards)
            left, right = tree.children(node)
            held[node] = _sum(held.pop(left), held.pop(right))
            sums.append(node)
        return tuple(sums)

    @property
    def complete(self) -> bool:
        return all(tree.root(self.shards) in held for held in self.parts)

    def missing(self) -> tuple[Node, ...]:
        """Shards that at least one bucket lacks, as the fewest nodes, from left to right."""
        arrived = [
            min(sum(low <= shard < high for low, high in held) for held in self.parts) for shard in range(self.shards)
        ]
        nodes: list[Node] = []
        shard = 0
        while shard < self.shards:
            start = shard
            while shard < self.shards and not arrived[shard]:
                shard += 1
            nodes += tree.cover(start, shard, self.shards)
            shard += 1
        return tuple(nodes)

    def result(self) -> Part:
        """The facts of a complete step; members as they stand for the first bucket."""
        return self.parts[0][tree.root(self.shards)]

    def check(self) -> None:
        """The invariants: held nodes are nodes, disjoint, and no two of them could be added."""
        for held in self.parts:
            shards = sorted(held)
            assert all(tree.is_node(node, self.shards) for node in shards), shards
            assert all(left[1] <= right[0] for left, right in pairwise(shards)), shards
            assert not any(
                node != tree.root(self.shards) and tree.sibling(node, self.shards) in held for node in shards
            ), shards


def _sum(left: Part, right: Part) -> Part:
    return Part(
        left.examples + right.examples,
        {name: left.sums.get(name, 0.0) + right.sums.get(name, 0.0) for name in left.sums | right.sums},
        left.left_out + right.left_out,
        left.makers + right.makers,
        min(left.waited_s, right.waited_s),
    )

"""Sums over the shard tree, in place, where the bytes arrived. The last sum of each bucket lands in one aligned buffer.

Knows nothing of who sent what: ``ps.rounds`` says which nodes to add, and in which order.
"""

import math

import numpy as np
import numpy.typing as npt

from bus import tree
from bus.finite import within_limit
from bus.layout import Bytes, Layout
from bus.messages import Node


class Reducer:
    """Holds what has arrived of one step at a time. ``layout`` is that of the gradient."""

    def __init__(self, layout: Layout, shards: int) -> None:
        self._layout, self._root = layout, tree.root(shards)
        self._held: dict[tuple[int, Node], Bytes] = {}
        self._total = layout.empty()

    def begin(self) -> None:
        """Forget the step before."""
        self._held.clear()

    def hold(self, bucket: int, node: Node, payload: Bytes) -> None:
        """Take ``payload``, which is changed from now on, as the sum at ``node``."""
        self._held[bucket, node] = payload
        if node == self._root:
            self._layout.bucket(self._total, bucket)[:] = payload

    def drop(self, bucket: int, node: Node) -> None:
        del self._held[bucket, node]

    def add(self, bucket: int, node: Node) -> None:
        """Make the sum at ``node`` from those at its children, which are used up."""
        dtype = np.dtype(self._layout.buckets[bucket].dtype)
        left, right = (self._held.pop((bucket, child)) for child in tree.children(node))
        target = self._layout.bucket(self._total, bucket) if node == self._root else left
        np.add(left.view(dtype), right.view(dtype), out=target.view(dtype))
        self._held[bucket, node] = target

    def sums(self) -> list[npt.NDArray[np.generic]]:
        """The sums at the root, one array per leaf of the layout: views, valid until the next step's root is added."""
        return self._layout.views(self._total)

    def trouble(self) -> str:
        """Names the first leaf whose sum is not finite or beyond GRADIENT_LIMIT; empty if all is well."""
        for leaf, values in zip(self._layout.leaves, self.sums(), strict=True):
            if not within_limit(values):
                return f"the sum of the gradient of {leaf.name} is not finite"
        return ""

    def norm(self, examples: int) -> float:
        """The Euclidean norm of the mean gradient over the trainable leaves."""
        squares = (
            squared_norm(values)
            for leaf, values in zip(self._layout.leaves, self.sums(), strict=True)
            if leaf.kind == "trainable"
        )
        return math.sqrt(sum(squares)) / examples if examples else 0.0


def squared_norm(values: npt.NDArray[np.generic]) -> float:
    """The sum of squares, in the precision of ``values``; in float64 where that overflows."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(flat, flat))
        if math.isfinite(square):
            return square
        wide = flat.astype(np.float64)
        return float(np.dot(wide, wide))

"""Sums over the shard tree, read where the bytes arrived. Knows nothing of who sent what: ``ps.rounds`` says which
nodes to add.

Nothing is computed before a bucket has its root: then the whole tree is summed chunk by chunk, so that what is added
stays in the cache and each contribution is read once. Several threads take chunks of their own; NumPy lets go of the
interpreter meanwhile. Each element is summed in the order of the tree, so neither chunks nor threads show in the bits.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from bus import tree
from bus.finite import within_limit
from bus.layout import Bytes, Layout
from bus.messages import Node

CHUNK_BYTES = 1 << 17  # with its operands well within a core's second-level cache
SHARED_BYTES = 1 << 20  # to be read at least for a second thread to be worth its waking
MOST_THREADS = 4

Array = npt.NDArray[np.generic]


class Reducer:
    """Holds what has arrived of one step at a time. ``layout`` is that of the gradient.

    ``threads`` sum; by default as many as there are cores to be had, up to four.
    """

    def __init__(self, layout: Layout, shards: int, threads: int | None = None) -> None:
        self._layout, self._root = layout, tree.root(shards)
        self._held: dict[tuple[int, Node], object] = {}  # bytes, or a pair of such
        self._total = layout.empty()
        self._sound = True  # every sum is within the limit
        self._threads = threads or min(_cores(), MOST_THREADS)
        self._pool = ThreadPoolExecutor(self._threads - 1, "sum") if self._threads > 1 else None

    def begin(self) -> None:
        """Forget the step before."""
        self._held.clear()
        self._sound = True

    def hold(self, bucket: int, node: Node, payload: Bytes) -> None:
        """Take ``payload`` as the sum at ``node``; it is read when the bucket has its root, and never written."""
        self._held[bucket, node] = payload
        if node == self._root:
            self._sum(bucket)

    def drop(self, bucket: int, node: Node) -> None:
        del self._held[bucket, node]

    def add(self, bucket: int, node: Node) -> None:
        """Make the sum at ``node`` from those at its children, which are used up."""
        left, right = (self._held.pop((bucket, child)) for child in tree.children(node))
        self._held[bucket, node] = (left, right)
        if node == self._root:
            self._sum(bucket)

    def _sum(self, bucket: int) -> None:
        dtype = np.dtype(self._layout.buckets[bucket].dtype)
        terms = _typed(self._held[bucket, self._root], dtype)
        total = self._layout.bucket(self._total, bucket).view(dtype)
        shares = 1
        if self._pool is not None and total.nbytes * _count(terms) >= SHARED_BYTES:
            shares = self._threads
        step = -(-len(total) // shares)
        ranges = [(low, min(low + step, len(total))) for low in range(0, len(total), step)]
        others = [self._pool.submit(_sum_range, terms, total, *each) for each in ranges[1:]] if self._pool else []
        sound = _sum_range(terms, total, *ranges[0]) if ranges else True
        self._sound &= sound & all([other.result() for other in others])
        self._held[bucket, self._root] = total  # what arrived is let go of

    def sums(self) -> list[Array]:
        """The sums at the root, one array per leaf of the layout: views, valid until the next step's root is added."""
        return self._layout.views(self._total)

    def trouble(self) -> str:
        """Names the first leaf whose sum is not finite or beyond GRADIENT_LIMIT; empty if all is well."""
        if self._sound:
            return ""
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


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _typed(held: object, dtype: np.dtype[np.generic]) -> object:
    """The same tree of arrays of ``dtype``."""
    if isinstance(held, tuple):
        return _typed(held[0], dtype), _typed(held[1], dtype)
    assert isinstance(held, np.ndarray)
    return held.view(dtype)


def _count(terms: object) -> int:
    return _count(terms[0]) + _count(terms[1]) if isinstance(terms, tuple) else 1


def _depth(terms: object) -> int:
    return 1 + max(_depth(terms[0]), _depth(terms[1])) if isinstance(terms, tuple) else 0


def _sum_range(terms: object, total: Array, low: int, high: int) -> bool:
    """Sum elements ``low..high-1`` into ``total``; whether all came out within the limit."""
    chunk = CHUNK_BYTES // total.itemsize
    scratch = [np.empty(chunk, total.dtype) for _ in range(_depth(terms))]
    sound = True
    for start in range(low, high, chunk):
        out = total[start : min(start + chunk, high)]
        made = _sum_chunk(terms, start, out, scratch)
        if made is not out:
            out[...] = made
        sound &= within_limit(out)
    return sound


def _sum_chunk(terms: object, start: int, out: Array, scratch: list[Array]) -> Array:
    """One stretch of the sum: in ``out``, or where it lies already."""
    if not isinstance(terms, tuple):
        assert isinstance(terms, np.ndarray)
        return terms[start : start + len(out)]
    left = _sum_chunk(terms[0], start, out, scratch[1:])
    right = _sum_chunk(terms[1], start, scratch[0][: len(out)], scratch[1:])
    np.add(left, right, out=out)
    return out


def squared_norm(values: Array) -> float:
    """The sum of squares, in the precision of ``values``; in float64 where that overflows."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(flat, flat))
        if math.isfinite(square):
            return square
        wide = flat.astype(np.float64)
        return float(np.dot(wide, wide))

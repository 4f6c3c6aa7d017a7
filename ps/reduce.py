"""Sums over the shard tree, read where the bytes arrived. Knows nothing of who sent what: ``ps.rounds`` says which
nodes to add.

Nothing is computed before a bucket has its root: then the whole tree is summed chunk by chunk, so that what is added
stays in the cache and each contribution is read once. Several threads take chunks of their own; NumPy lets go of the
interpreter meanwhile. Each element is summed in the order of the tree, so neither chunks nor threads show in the bits.

What lies in shared memory, and so stays as it is until its version has passed, may wait longer: ``stretch`` sums any
part of it for an update that is made in stretches too.
"""

import math
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from bus import tree
from bus.finite import within_limit
from bus.layout import Bytes, Layout
from bus.messages import Node
from ps.norms import squared_norm

CHUNK_BYTES = 1 << 17  # with its operands well within a core's second-level cache
SHARED_BYTES = 1 << 20  # to be read at least for a second thread to be worth its waking
MOST_THREADS = 4

Array = npt.NDArray[np.generic]


class Reducer:
    """Holds what has arrived of one step at a time. ``layout`` is that of the gradient.

    ``threads`` sum; by default as ``usual_threads`` says. ``late``: what stays is not summed
    before someone asks for it.
    """

    def __init__(self, layout: Layout, shards: int, threads: int | None = None, *, late: bool = False) -> None:
        self._layout, self._root, self._late = layout, tree.root(shards), late
        self._held: dict[tuple[int, Node], object] = {}  # bytes, or a pair of such
        self._fleeting: set[int] = set()  # buckets with something that does not stay
        self._unsummed: set[int] = set()  # buckets that have their root, and wait
        self._starts = [bucket.offset_bytes for bucket in layout.buckets]
        self._total = layout.empty()  # pages that nobody touches take no memory
        self._sound = True  # every sum in it is within the limit
        self._threads = threads or usual_threads()
        self._pool = ThreadPoolExecutor(self._threads - 1, "sum") if self._threads > 1 else None

    def begin(self) -> None:
        """Forget the step before."""
        self._held.clear()
        self._fleeting.clear()
        self._unsummed.clear()
        self._sound = True

    def hold(self, bucket: int, node: Node, payload: Bytes, *, stays: bool = False) -> None:
        """Take ``payload`` as the sum at ``node``; it is read when the bucket has its root, or later if it ``stays``,
        and never written."""
        self._held[bucket, node] = payload
        if not stays:
            self._fleeting.add(bucket)
        if node == self._root:
            self._rooted(bucket)

    def drop(self, bucket: int, node: Node) -> None:
        del self._held[bucket, node]

    def add(self, bucket: int, node: Node) -> None:
        """Make the sum at ``node`` from those at its children, which are used up."""
        left, right = (self._held.pop((bucket, child)) for child in tree.children(node))
        self._held[bucket, node] = (left, right)
        if node == self._root:
            self._rooted(bucket)

    def settle(self) -> None:
        """Sum what waits."""
        for bucket in sorted(self._unsummed):
            self._sum(bucket)
        self._unsummed.clear()

    def stretch(self, start_bytes: int, out: Array) -> Array:
        """The sum of a stretch of the flat gradient, from ``start_bytes`` on, of the size and dtype of ``out``: in
        ``out``, or where it lies already. May be called by several threads."""
        end_bytes = start_bytes + out.nbytes
        bucket = bisect_right(self._starts, start_bytes) - 1
        filled = 0
        while filled < out.size:
            part_end = min(end_bytes, self._starts[bucket] + self._layout.buckets[bucket].size_bytes)
            low = (start_bytes - self._starts[bucket]) // out.itemsize
            part = out[filled : filled + (part_end - start_bytes) // out.itemsize]
            made = self._part(bucket, low, part)
            if made.size == out.size:
                return made
            if made is not part:
                part[...] = made
            filled, start_bytes, bucket = filled + part.size, part_end, bucket + 1
        return out

    def _part(self, bucket: int, low: int, out: Array) -> Array:
        """Elements of one bucket from ``low`` on."""
        terms = _typed(self._held[bucket, self._root], out.dtype)
        if isinstance(terms, np.ndarray):
            found: Array = terms[low : low + out.size]
            return found
        _sum_range(terms, out, low, low + out.size, at=low, check=False)
        return out

    def _rooted(self, bucket: int) -> None:
        if self._late and bucket not in self._fleeting:
            self._unsummed.add(bucket)
        else:
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
        self.settle()
        return self._layout.views(self._total)

    def trouble(self) -> str:
        """Names the first leaf whose sum is not finite or beyond GRADIENT_LIMIT; empty if all is well."""
        self.settle()
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


def usual_threads() -> int:
    """Half as many as there are cores that this process may use, up to four: two often share what reads the memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // 2, MOST_THREADS))


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


def _sum_range(terms: object, total: Array, low: int, high: int, at: int = 0, *, check: bool = True) -> bool:
    """Sum elements ``low..high-1`` into ``total``, which begins with element ``at``. False if what came out was to be
    checked and is not within the limit."""
    chunk = CHUNK_BYTES // total.itemsize
    scratch = [np.empty(chunk, total.dtype) for _ in range(_depth(terms))]
    sound = True
    for start in range(low, high, chunk):
        out = total[start - at : min(start + chunk, high) - at]
        made = _sum_chunk(terms, start, out, scratch)
        if made is not out:
            out[...] = made
        sound = sound and (not check or within_limit(out))
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

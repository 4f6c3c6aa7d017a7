"""The thread that computes, so that the loop beside it always hears and answers: compiling or a long step is no death.

It takes orders from a queue and posts events. An order for a newer version voids the older ones; a shard that is being
computed is finished first, since nothing can interrupt XLA.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bus import tree
from bus.layout import Bytes, Layout
from bus.messages import Node, Welcome
from worker.machine import Computed, Event, Prepared, Unable


@dataclass(slots=True)
class ShardSum:
    """The sum over examples of the gradient of some shards, in a buffer of the gradient layout, and of the metrics."""

    buffer: Bytes
    examples: int
    sums: dict[str, float]
    left_out: tuple[int, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    total: ShardSum
    waited_s: float  # for this version with nothing to do, since the last result; infinite where there was none
    computed_s: float


class Gradients(Protocol):
    """What computes: ``worker.compute`` with a workload, or a stand-in of a test."""

    device: str
    layout: Layout  # of the gradient

    def load(self, buffer: Bytes) -> None:
        """Take the weights in ``buffer``, which will not change any more."""

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        """The sum over one shard, computed on the weights that were loaded last, in ``into`` or in new memory."""

    def prefetch(self, version: int, shards: list[int]) -> None:
        """These shards are likely to be asked for next: make their batches now."""


class Stopped(Exception):
    """A newer version has made this work void."""


class Executor(Protocol):
    def prepare(self, welcome: Welcome) -> None: ...
    def compute(self, session: int, version: int, buffer: Bytes, nodes: dict[Node, Bytes | None]) -> None:
        """Compute on the weights in ``buffer`` the sums over ``nodes``, each into the memory given for it, if any."""

    def prefetch(self, version: int, nodes: tuple[Node, ...]) -> None: ...
    def cancel(self) -> None: ...


class Calculator:
    """Sums shards over the tree. Used by whichever thread computes."""

    def __init__(self, gradients: Gradients, clock: Callable[[], float]) -> None:
        self._gradients, self._clock = gradients, clock
        self._loaded = (-1, -1)  # session, version
        self._done_at: float | None = None
        self._prefetching_s = 0.0  # since then

    def compute(
        self,
        session: int,
        version: int,
        buffer: Bytes,
        node: Node,
        wanted: Callable[[], bool],
        into: Bytes | None = None,
    ) -> Result:
        """The sum over ``node``; raises Stopped as soon as ``wanted`` says no."""
        started = self._clock()
        waited_s = math.inf
        if self._loaded != (session, version):
            if self._done_at is not None and self._loaded == (session, version - 1):
                waited_s = started - self._done_at - self._prefetching_s
            self._gradients.load(buffer)
            self._loaded = (session, version)
        total = self._sum(version, node, wanted, into)
        self._done_at, self._prefetching_s = self._clock(), 0.0
        return Result(total, waited_s, self._done_at - started)

    def prefetch(self, version: int, nodes: tuple[Node, ...]) -> None:
        began = self._clock()
        self._gradients.prefetch(version, [shard for low, high in nodes for shard in range(low, high)])
        self._prefetching_s += self._clock() - began

    def _sum(self, version: int, node: Node, wanted: Callable[[], bool], into: Bytes | None) -> ShardSum:
        if not wanted():
            raise Stopped
        if node[1] - node[0] == 1:
            return self._gradients.shard(version, node[0], into)
        children = tree.children(node)
        left, right = self._sum(version, children[0], wanted, into), self._sum(version, children[1], wanted, None)
        for index, bucket in enumerate(self._gradients.layout.buckets):
            dtype = np.dtype(bucket.dtype)
            target = self._gradients.layout.bucket(left.buffer, index).view(dtype)
            np.add(target, self._gradients.layout.bucket(right.buffer, index).view(dtype), out=target)
        return ShardSum(
            left.buffer,
            left.examples + right.examples,
            {name: left.sums.get(name, 0.0) + right.sums.get(name, 0.0) for name in left.sums | right.sums},
            left.left_out + right.left_out,
            "; ".join(filter(None, (left.trouble, right.trouble))),
        )


class ThreadExecutor:
    """``build`` makes the Gradients for a welcome, in the computing thread; what it raises is reported as Unable.

    ``explain`` makes one line for people of an error, and may log more.
    ``post(event, result)`` hands events to the loop; it must be safe to call from another thread.
    """

    def __init__(
        self,
        build: Callable[[Welcome], Gradients],
        post: Callable[[Event, Result | None], None],
        explain: Callable[[Exception], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build, self._post, self._explain, self._clock = build, post, explain, clock
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wanted = (-1, -1)  # session, version
        self._calculator: Calculator | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def prepare(self, welcome: Welcome) -> None:
        self._orders.put(lambda: self._prepare(welcome))

    def compute(self, session: int, version: int, buffer: Bytes, nodes: dict[Node, Bytes | None]) -> None:
        self._wanted = (session, version)
        self._orders.put(lambda: self._compute(session, version, buffer, nodes))

    def prefetch(self, version: int, nodes: tuple[Node, ...]) -> None:
        self._orders.put(lambda: self._prefetch(version, nodes))

    def cancel(self) -> None:
        self._wanted = (-1, -1)

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                order()
            except Stopped:
                continue
            except Exception as error:  # noqa: BLE001 - a user's code may raise anything; it is told, not swallowed
                self._post(Unable(self._explain(error)), None)

    def _prepare(self, welcome: Welcome) -> None:
        gradients = self._build(welcome)
        self._calculator = Calculator(gradients, self._clock)
        self._post(Prepared(welcome.session, gradients.device), None)

    def _compute(self, session: int, version: int, buffer: Bytes, nodes: dict[Node, Bytes | None]) -> None:
        assert self._calculator is not None
        for node, into in nodes.items():
            result = self._calculator.compute(
                session, version, buffer, node, lambda: self._wanted == (session, version), into
            )
            self._post(Computed(session, version, node), result)

    def _prefetch(self, version: int, nodes: tuple[Node, ...]) -> None:
        if self._calculator is not None and self._orders.empty():
            self._calculator.prefetch(version, nodes)

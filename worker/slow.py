"""A worker that is slow on purpose: see ``bus.faults``. The bits stay the same."""

import time
from collections.abc import Iterable

from bus.faults import Fault
from bus.layout import Bytes, Layout
from worker.executor import Gradients, ShardSum


class SlowGradients:
    """``inner``, but each shard takes as many times longer as ``faults`` say."""

    def __init__(self, inner: Gradients, faults: Iterable[Fault]) -> None:
        self._inner = inner
        self._faults = tuple(fault for fault in faults if fault.what == "slower")
        self.device: str = inner.device
        self.layout: Layout = inner.layout

    def load(self, buffer: Bytes) -> None:
        self._inner.load(buffer)

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        began = time.monotonic()
        total = self._inner.shard(version, shard, into)
        times = max((fault.amount for fault in self._faults if version >= (fault.version or 0)), default=1.0)
        time.sleep(max(times - 1.0, 0.0) * (time.monotonic() - began))
        return total

    def prefetch(self, version: int, shards: list[int]) -> None:
        self._inner.prefetch(version, shards)


def preparing_longer_s(faults: Iterable[Fault]) -> float:
    """Seconds that preparing is to take longer."""
    return sum(fault.amount for fault in faults if fault.what == "prepares")

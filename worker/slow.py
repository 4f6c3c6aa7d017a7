"""A worker that is slow on purpose: see ``bus.faults``. The bits stay the same."""

import time
from collections.abc import Callable, Iterable

from bus.faults import Fault
from bus.layout import Bytes, Layout
from worker.executor import Gradients, ShardSum


class SlowGradients:
    """``inner``, but each shard takes as many times longer as ``faults`` say. ``tell`` hears of each once, when it
    begins."""

    def __init__(self, inner: Gradients, faults: Iterable[Fault], tell: Callable[[Fault], None]) -> None:
        self._inner, self._tell = inner, tell
        self._to_come = [fault for fault in faults if fault.what == "slower"]
        self._times = 1.0
        self.device: str = inner.device
        self.layout: Layout = inner.layout

    def load(self, buffer: Bytes) -> None:
        self._inner.load(buffer)

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        began = time.monotonic()
        total = self._inner.shard(version, shard, into)
        for fault in [fault for fault in self._to_come if version >= (fault.version or 0)]:
            self._to_come.remove(fault)
            self._times = max(self._times, fault.amount)
            self._tell(fault)
        time.sleep((self._times - 1.0) * (time.monotonic() - began))
        return total

    def prefetch(self, version: int, shards: list[int]) -> None:
        self._inner.prefetch(version, shards)


def prepare_longer(faults: Iterable[Fault], tell: Callable[[Fault], None]) -> None:
    """Take the time that ``faults`` add to preparing."""
    for fault in faults:
        if fault.what == "prepares":
            tell(fault)
            time.sleep(fault.amount)

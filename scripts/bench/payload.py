"""The vectors of a round, the same for every contender, and the check that a round did what it says.

Every worker has two gradients, used in turn, so that a result left over from the round before is seen. Both are
views of one buffer, a few elements apart; they are in memory before the clock starts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

SIZES_BYTES = {
    "4KB": 4096,
    "1MB": 1 << 20,
    "4.3MB": 1_068_298 * 4,  # TensorFlow's CIFAR-10 tutorial
    "45MB": 45_000_000 // 64 * 64,  # ResNet-18
    "102MB": 102_000_000 // 64 * 64,  # ResNet-50
}
TABLE = 65521  # random numbers, repeated; a prime, so that repeats never line up with pages
SHIFT = 16  # elements between the two gradients: a cache line
TOLERANCE, DRIFT = 1e-4, 2e-5  # what a result may be off; and more by so much for each unit of ``a`` and ``b``


@dataclass(frozen=True)
class Block:
    """Some rounds of one contender with one payload. ``folder`` is for what members share by path."""

    size_bytes: int
    rounds: int
    workers: int
    folder: str

    @property
    def count(self) -> int:
        """Elements of the vector."""
        return self.size_bytes // 4


def gradients(rank: int, count: int) -> tuple[Vector, Vector]:
    """The two gradients of worker ``rank``."""
    both = np.resize(_table(rank), count + SHIFT)
    return both[:count], both[SHIFT:]


def _table(rank: int) -> Vector:
    return np.random.default_rng(1000 + rank).random(TABLE, dtype=np.float32) - np.float32(0.5)


class Check:
    """Holds a result against ``a`` times the mean of the first gradients plus ``b`` times that of the second."""

    def __init__(self, workers: int, count: int) -> None:
        tables = np.stack([_table(rank) for rank in range(workers)])
        mean: npt.NDArray[np.float64] = np.add.reduce(tables, axis=0, dtype=np.float64) / workers
        self._means = mean, np.roll(mean, -SHIFT)
        places = [0, 1, count // 3, count // 2, count - 2, count - 1]
        self._few = [(at, float(self._means[0][at % TABLE]), float(self._means[1][at % TABLE])) for at in places]

    def few(self, found: Any, a: float, b: float) -> None:
        """Six elements: cheap enough for every round."""
        limit = TOLERANCE + DRIFT * (abs(a) + abs(b))
        for at, first, second in self._few:
            if not abs(float(found[at]) - (a * first + b * second)) < limit:
                raise AssertionError(f"wrong result: element {at} is {found[at]}, not {a * first + b * second}")

    def whole(self, found: Any, a: float, b: float) -> None:
        """Every element: once a block."""
        found, want = np.asarray(found), (a * self._means[0] + b * self._means[1]).astype(np.float32)
        limit = TOLERANCE + DRIFT * (abs(a) + abs(b))
        for start in range(0, found.size, TABLE):
            part = found[start : start + TABLE]
            if not np.abs(part - want[: part.size]).max() < limit:
                raise AssertionError(f"wrong result from element {start} on")


def timed_rounds(block: Block, rank: int, exchange: Callable[[Vector], Any]) -> list[float]:
    """When each round of ``exchange(gradient) -> mean`` was over. The clock is one for all processes of a machine."""
    mine, check = gradients(rank, block.count), Check(block.workers, block.count)
    ends, mean = [], None
    for number in range(block.rounds):
        odd = number & 1
        mean = exchange(mine[odd])
        ends.append(time.monotonic())
        check.few(mean, 1 - odd, odd)
    check.whole(mean, 1 - odd, odd)
    return ends

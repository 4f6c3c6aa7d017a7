"""Euclidean norms of what lies in host memory. For people to look at: no weight depends on them."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

STRETCH = 1 << 15  # elements

Array = npt.NDArray[np.generic]


def squared_norm(values: Array) -> float:
    """The sum of squares, in the precision of ``values``; in float64 where that overflows."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(flat, flat))
        if math.isfinite(square):
            return square
        wide = flat.astype(np.float64)
        return float(np.dot(wide, wide))


def distance(before: Sequence[Array], after: Sequence[Array]) -> float:
    """Between two lists of arrays, in float32 a stretch at a time, which stays in the cache."""
    squares = 0.0
    scratch = np.empty(STRETCH, np.float32)
    for old, new in zip(_flat(before), _flat(after), strict=True):
        for start in range(0, old.size, STRETCH):
            ours = slice(start, min(start + STRETCH, old.size))
            moved = scratch[: ours.stop - start]
            np.subtract(new[ours], old[ours], out=moved, casting="unsafe", dtype=np.float32)
            squares += squared_norm(moved)
    return math.sqrt(squares)


def _flat(arrays: Iterable[Array]) -> Iterable[Array]:
    return (array.reshape(-1) for array in arrays)

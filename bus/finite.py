"""What a gradient may hold. Both sides check it: the worker a shard at a time, the PS the sum."""

import numpy as np
import numpy.typing as npt

# A gradient beyond this is as good as infinite: its square, which Adam and every norm take, overflows float32.
GRADIENT_LIMIT = 1e18


def within_limit(values: npt.NDArray[np.generic], square: float | None = None) -> bool:
    """Whether every element is finite and no larger than GRADIENT_LIMIT; True for an empty array. ``square``: the sum
    of their squares, if it is known."""
    if square is None and values.dtype.kind == "f" and values.flags.c_contiguous:
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(flat, flat))  # one look at each, where min and max are two
    if square is not None and square <= GRADIENT_LIMIT**2:
        return True
    # min and max pass NaN on, and NaN compares false.
    return not values.size or bool(values.min() >= -GRADIENT_LIMIT and values.max() <= GRADIENT_LIMIT)

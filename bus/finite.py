"""What a gradient may hold. Both sides check it: the worker a shard at a time, the PS the sum."""

import numpy as np
import numpy.typing as npt

# A gradient beyond this is as good as infinite: its square, which Adam and every norm take, overflows float32.
GRADIENT_LIMIT = 1e18


def within_limit(values: npt.NDArray[np.generic]) -> bool:
    """Whether every element is finite and no larger than GRADIENT_LIMIT; True for an empty array."""
    # min and max pass NaN on, and NaN compares false.
    return not values.size or bool(values.min() >= -GRADIENT_LIMIT and values.max() <= GRADIENT_LIMIT)

"""Norms for people to look at: the plain formulas, also where float32 overflows."""

import math

import numpy as np
import pytest

from ps.norms import STRETCH, distance, squared_norm


def test_the_square_of_what_overflows_is_taken_in_float64() -> None:
    assert squared_norm(np.full((2, 2), 3.0, np.float32)) == 36.0
    assert squared_norm(np.full(4, 1e30, np.float32)) == pytest.approx(4e60, rel=1e-6)


def test_weights_that_leap_or_are_not_of_a_floating_dtype_have_a_distance() -> None:
    flags, empty = np.array([True, False]), np.zeros((0, 3), np.float32)
    before, after = np.zeros(3 * STRETCH + 1, np.float32), np.full(3 * STRETCH + 1, 3e38, np.float32)
    assert distance([before], [after]) == pytest.approx(3e38 * math.sqrt(3 * STRETCH + 1), rel=1e-6)
    numbers = [np.zeros(2, np.int32), np.full(2, 3, np.int32)]
    assert distance([flags, empty, numbers[0]], [flags, empty, numbers[1]]) == pytest.approx(math.sqrt(18.0))

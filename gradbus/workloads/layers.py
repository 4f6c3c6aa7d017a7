"""The few layers that the shipped networks share, as functions. Pictures are (batch, height, width, channels)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """x (batch, height, width, in), kernel (rows, columns, in, out); padding SAME."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x: jax.Array, size: int) -> jax.Array:
    """Maximum over size x size (2 or 3) with stride 2, padding SAME, of pictures whose sides are even.

    Written as comparisons of slices because the gradient of XLA's own window operation takes 4 to 16 times as long on a
    CPU. The gradient goes to the first of equal values.
    """
    for axis in (1, 2):
        side = x.shape[axis]
        if size == 3:  # SAME for an even side: nothing before the first pixel, one after the last
            x = jnp.pad(x, [(0, int(each == axis)) for each in range(4)], constant_values=-jnp.inf)
        shifted = [lax.slice_in_dim(x, first, first + side - 1, stride=2, axis=axis) for first in range(size)]
        x = functools.reduce(lambda a, b: jnp.where(a >= b, a, b), shifted)
    return x


def dropout(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Zero each value with probability `rate` and scale the others, so that the mean stays."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log of the probability of the label: logits (batch, classes), integer labels (batch,) -> (batch,)."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels.astype(jnp.int32)[:, None], axis=1)
    return -chosen[:, 0]


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """1.0 where the largest logit is the label's, else 0.0: (batch,) float32."""
    return (jnp.argmax(logits, axis=1).astype(jnp.int32) == labels.astype(jnp.int32)).astype(jnp.float32)


def draw(sample: Callable[[tuple[int]], jax.Array], *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Random arrays of the given shapes, cut from one call of `sample`.

    XLA takes about half a second to compile each random draw: one for all layers starts a run seconds earlier.
    """
    sizes = [math.prod(shape) for shape in shapes]
    values = sample((sum(sizes),))
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end].reshape(shape) for size, end, shape in zip(sizes, ends, shapes, strict=True)]


def he_normal(key: jax.Array, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Initial weights of layers before ReLU: normal, variance 2 / (inputs of an output). The last axis is outputs."""
    normal = draw(lambda shape: jax.random.normal(key, shape, jnp.float32), *shapes)
    return [values * (2.0 / math.prod(values.shape[:-1])) ** 0.5 for values in normal]

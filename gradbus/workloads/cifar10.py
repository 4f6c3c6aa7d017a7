"""The first experiment: the CIFAR-10 network of TensorFlow's tutorial with its distortions, 1,068,298 parameters.

`experiments/cifar10.yaml` has the other half of it: batch, learning rate and moving averages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradbus.workloads import datasets
from gradbus.workloads.layers import conv, correct, cross_entropy, draw, max_pool

SIDE = 24  # pixels of the pictures that the network sees, cut out of 32
WEIGHT_DECAY = 0.004  # of half the squared norm, for the two dense layers


class Cifar10:
    """Batches are {"image": (batch, 32, 32, 3) uint8, "label": (batch,) uint8 of 0..9}.

    conv 5x5x64, max-pool, LRN; conv 5x5x64, LRN, max-pool; dense 384, dense 192, linear 10; ReLU between.
    """

    def init(self, key: jax.Array) -> Any:
        """Weights from normal distributions cut at two sigma and not rescaled, as TensorFlow does; constant biases."""
        conv1, conv2, dense1, dense2, output = draw(
            lambda shape: jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32),
            *((5, 5, 3, 64), (5, 5, 64, 64), (6 * 6 * 64, 384), (384, 192), (192, 10)),
        )
        return {
            "conv1": {"w": conv1 * 0.05, "b": jnp.full((64,), 0.0, jnp.float32)},
            "conv2": {"w": conv2 * 0.05, "b": jnp.full((64,), 0.1, jnp.float32)},
            "dense1": {"w": dense1 * 0.04, "b": jnp.full((384,), 0.1, jnp.float32)},
            "dense2": {"w": dense2 * 0.04, "b": jnp.full((192,), 0.1, jnp.float32)},
            "output": {"w": output * (1 / 192), "b": jnp.full((10,), 0.0, jnp.float32)},
        }

    def loss(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy of the distorted pictures plus weight decay; metric `cross_entropy` is the first alone."""
        images = distorted(batch["image"], key)
        entropy = jnp.mean(cross_entropy(_logits(params, images), batch["label"]))
        squares = jnp.sum(params["dense1"]["w"] ** 2) + jnp.sum(params["dense2"]["w"] ** 2)
        return entropy + WEIGHT_DECAY * 0.5 * squares, {"cross_entropy": entropy}

    def train_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return datasets.cifar10(folder, "train")

    def eval_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return datasets.cifar10(folder, "test")

    def score(self, params: Any, batch: Any) -> dict[str, jax.Array]:
        """On the central crop: `precision_at_1` and `loss`, which is the cross-entropy without weight decay."""
        margin = (32 - SIDE) // 2
        centre = batch["image"][:, margin : margin + SIDE, margin : margin + SIDE].astype(jnp.float32)
        logits = _logits(params, standardised(centre))
        return {
            "precision_at_1": correct(logits, batch["label"]),
            "loss": cross_entropy(logits, batch["label"]),
        }


def _logits(params: Any, images: jax.Array) -> jax.Array:
    """Standardised pictures (batch, 24, 24, 3) float32 -> (batch, 10)."""
    x = jax.nn.relu(conv(images, params["conv1"]["w"]) + params["conv1"]["b"])
    x = local_response(max_pool(x, 3))
    x = jax.nn.relu(conv(x, params["conv2"]["w"]) + params["conv2"]["b"])
    x = max_pool(local_response(x), 3).reshape(len(images), -1)
    x = jax.nn.relu(x @ params["dense1"]["w"] + params["dense1"]["b"])
    x = jax.nn.relu(x @ params["dense2"]["w"] + params["dense2"]["b"])
    return x @ params["output"]["w"] + params["output"]["b"]


def local_response(x: jax.Array) -> jax.Array:
    """Local response normalisation over channels: x / (1 + 0.001 / 9 * (sum of squares of 9 neighbours)) ** 0.75.

    The sum over the channels c-4..c+4 is a product with a matrix of ones in a band, and the power is made of square
    roots: both are several times faster on a CPU than the obvious operations.
    """
    channel = np.arange(x.shape[-1])
    band = jnp.asarray(np.abs(channel[:, None] - channel[None, :]) <= 4, x.dtype)
    inverse_root = lax.rsqrt(1.0 + 0.001 / 9.0 * (jnp.square(x) @ band))
    return x * (inverse_root * jnp.sqrt(inverse_root))


def distorted(images: jax.Array, key: jax.Array) -> jax.Array:
    """Pictures (batch, 32, 32, 3) uint8 -> (batch, 24, 24, 3) float32, each distorted in its own way, standardised."""
    return standardised(jax.vmap(_distort)(images, jax.random.split(key, len(images))))


def _distort(image: jax.Array, key: jax.Array) -> jax.Array:
    """A random crop, flipped or not, with random brightness and contrast; values are not clipped to 0..255."""
    crop, flip, brightness, contrast = jax.random.split(key, 4)
    row, column = jax.random.randint(crop, (2,), 0, 32 - SIDE + 1)
    x = lax.dynamic_slice(image, (row, column, 0), (SIDE, SIDE, 3)).astype(jnp.float32)
    x = jnp.where(jax.random.bernoulli(flip), x[:, ::-1], x)
    x = x + jax.random.uniform(brightness, (), jnp.float32, -63.0, 63.0)
    mean = jnp.mean(x, axis=(0, 1))  # of each channel
    return (x - mean) * jax.random.uniform(contrast, (), jnp.float32, 0.2, 1.8) + mean


def standardised(images: jax.Array) -> jax.Array:
    """Each picture less its mean and over its standard deviation, the latter at least 1 / sqrt(number of values)."""
    mean = jnp.mean(images, axis=(1, 2, 3), keepdims=True)
    stddev = jnp.std(images, axis=(1, 2, 3), keepdims=True)
    return (images - mean) / jnp.maximum(stddev, images[0].size ** -0.5)

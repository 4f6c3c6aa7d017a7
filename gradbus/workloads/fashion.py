"""Fashion-MNIST: 28x28 pictures of clothes, and a small convolutional network. Two minutes of one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradbus.workloads import datasets
from gradbus.workloads.layers import conv, correct, cross_entropy, dropout, he_normal, max_pool


class Fashion:
    """conv 3x3x32, max-pool 2x2, conv 3x3x64 with stride 2, dense 128, dense 10: 421,642 parameters.

    Trained with dropout of 0.25 around the dense layer. Batches are {"image": (batch, 28, 28) uint8, "label": (batch,)
    uint8 of 0..9}. What it reaches is in experiments/fashion.yaml.
    """

    def init(self, key: jax.Array) -> Any:
        conv1, conv2, dense, output = he_normal(key, (3, 3, 1, 32), (3, 3, 32, 64), (7 * 7 * 64, 128), (128, 10))
        return {
            "conv1": {"w": conv1, "b": jnp.zeros((32,), jnp.float32)},
            "conv2": {"w": conv2, "b": jnp.zeros((64,), jnp.float32)},
            "dense": {"w": dense, "b": jnp.zeros((128,), jnp.float32)},
            "output": {"w": output, "b": jnp.zeros((10,), jnp.float32)},
        }

    def loss(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = self._logits(params, batch["image"], key)
        return jnp.mean(cross_entropy(logits, batch["label"])), {"accuracy": jnp.mean(correct(logits, batch["label"]))}

    def train_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return datasets.fashion(folder, "train")

    def eval_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return datasets.fashion(folder, "test")

    def score(self, params: Any, batch: Any) -> dict[str, jax.Array]:
        logits = self._logits(params, batch["image"], None)
        return {"accuracy": correct(logits, batch["label"]), "loss": cross_entropy(logits, batch["label"])}

    @staticmethod
    def _logits(params: Any, image: jax.Array, key: jax.Array | None) -> jax.Array:
        """(batch, 10); with dropout, as in training, if there is a key."""
        x = (image.astype(jnp.float32)[..., None] - 73.0) / 90.0  # mean and deviation of the training pictures
        x = jax.nn.relu(max_pool(conv(x, params["conv1"]["w"]), 2) + params["conv1"]["b"])
        x = jax.nn.relu(conv(x, params["conv2"]["w"], stride=2) + params["conv2"]["b"])
        x = x.reshape(x.shape[0], -1)
        if key is not None:
            before, after = jax.random.split(key)
            x = dropout(x, before, 0.25)
        x = jax.nn.relu(x @ params["dense"]["w"] + params["dense"]["b"])
        if key is not None:
            x = dropout(x, after, 0.25)
        return x @ params["output"]["w"] + params["output"]["b"]

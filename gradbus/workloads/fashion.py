"""Fashion-MNIST: 28x28 pictures of clothes, and a small convolutional network. A minute or two of one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradbus.workloads import datasets
from gradbus.workloads.layers import conv, correct, cross_entropy, dropout, he_normal


class Fashion:
    """2x2 pixels to channels, conv 3x3x32, conv 3x3x64 with stride 2, dense 128, dense 10: 422,506 parameters.

    Trained with dropout of 0.25 before the last layer. Batches are {"image": (batch, 28, 28) uint8, "label": (batch,)
    uint8 of 0..9}. What it reaches is in experiments/fashion.yaml.
    """

    def init(self, key: jax.Array) -> Any:
        conv1, conv2, dense, output = he_normal(key, (3, 3, 4, 32), (3, 3, 32, 64), (7 * 7 * 64, 128), (128, 10))
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
        x = image.astype(jnp.float32) / 128.0 - 1.0
        # A convolution of one channel of 28x28 is slow for what it does; four channels of 14x14 hold the same pixels.
        x = x.reshape(-1, 14, 2, 14, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 14, 14, 4)
        x = jax.nn.relu(conv(x, params["conv1"]["w"]) + params["conv1"]["b"])
        x = jax.nn.relu(conv(x, params["conv2"]["w"], stride=2) + params["conv2"]["b"])
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(x @ params["dense"]["w"] + params["dense"]["b"])
        if key is not None:
            x = dropout(x, key, 0.25)
        return x @ params["output"]["w"] + params["output"]["b"]

"""Least squares with a known answer and numbered samples: what tests of the machinery train, and fast to compile.

`Quadratic` has no model state. `QuadraticState` centres the inputs by a running mean, which is model state as in
BatchNorm, and counts in it how often each sample was used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SAMPLES = 1003  # 17 * 59: no batch size that anyone chooses divides it
FEATURES = 4


def _data() -> dict[str, np.ndarray]:
    """x (1003, 4) and y (1003,) float32, sample (1003,) int32 = 0..1002.

    The values are hashed counters in multiples of 1/128, so that they are the same everywhere without a generator and
    exact in float32. y is x @ (1, -2, 3, -4) + 0.5 plus noise in [-1/16, 1/16).
    """
    counters = np.arange(SAMPLES * (FEATURES + 1), dtype=np.uint64)
    mixed = counters * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    table = ((mixed >> np.uint64(56)).astype(np.float32) - 128) / 128
    table = table.reshape(SAMPLES, FEATURES + 1)
    x, noise = np.ascontiguousarray(table[:, :FEATURES]), table[:, FEATURES] / 16
    y = x @ np.array([1, -2, 3, -4], np.float32) + np.float32(0.5) + noise
    return {"sample": np.arange(SAMPLES, dtype=np.int32), "x": x, "y": y}


def _residual(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"] - y


class Quadratic:
    """params {"b": (), "w": (4,)} float32, zeros at first; loss 0.5 * mean((x @ w + b - y)**2).

    Metric `sample` is the mean of the sample numbers of the batch, so a ledger shows which samples a step used.
    """

    def init(self, key: jax.Array) -> Any:
        return {"b": jnp.zeros((), jnp.float32), "w": jnp.zeros((FEATURES,), jnp.float32)}

    def loss(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        residual = _residual(params, batch["x"], batch["y"])
        return 0.5 * jnp.mean(residual * residual), {"sample": jnp.mean(batch["sample"].astype(jnp.float32))}

    def train_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return _data()

    def eval_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return _data()

    def score(self, params: Any, batch: Any) -> dict[str, jax.Array]:
        residual = _residual(params, batch["x"], batch["y"])
        return {"loss": 0.5 * residual * residual}

    @staticmethod
    def solution() -> dict[str, np.ndarray]:
        """The minimum over all samples, in float64: {"b": (), "w": (4,)}."""
        data = _data()
        inputs = np.column_stack([data["x"], np.ones(SAMPLES)]).astype(np.float64)
        answer = np.linalg.lstsq(inputs, data["y"].astype(np.float64), rcond=None)[0]
        return {"b": answer[FEATURES], "w": answer[:FEATURES]}


class QuadraticState:
    """`Quadratic` on inputs less a running mean; its state is averaged over shards as BatchNorm's is.

    state {"mean": (4,), "visits": (1003,)} float32, zeros at first. mean <- 0.9 * mean + 0.1 * (mean of the batch).
    visits[i] grows by (uses of sample i) / (examples of the batch): averaged over the shards of a step by examples, so
    visits * batch_size is how often each sample was used so far.
    """

    def init(self, key: jax.Array) -> Any:
        return Quadratic().init(key)

    def init_state(self, key: jax.Array) -> Any:
        return {"mean": jnp.zeros((FEATURES,), jnp.float32), "visits": jnp.zeros((SAMPLES,), jnp.float32)}

    def loss(
        self, params: Any, state: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        residual = _residual(params, batch["x"] - state["mean"], batch["y"])
        share = 1.0 / batch["x"].shape[0]
        new_state = {
            "mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"], axis=0),
            "visits": state["visits"].at[batch["sample"]].add(share),
        }
        metrics = {"sample": jnp.mean(batch["sample"].astype(jnp.float32))}
        return 0.5 * jnp.mean(residual * residual), (metrics, new_state)

    def train_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return _data()

    def eval_data(self, folder: Path | None) -> dict[str, np.ndarray]:
        return _data()

    def score(self, params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
        residual = _residual(params, batch["x"] - state["mean"], batch["y"])
        return {"loss": 0.5 * residual * residual}

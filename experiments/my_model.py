"""Your own model: copy this file, change what you like, and train it with

    gradbus cluster experiments/my_model.yaml            workload: experiments/my_model.py:MyModel

A workload is five functions; `gradbus.Workload` has the whole contract. This one tells three interleaved spirals apart
with a small dense network. It knows nothing of workers: Gradbus calls it for one shard of a batch at a time.
"""

import jax
import jax.numpy as jnp
import numpy as np

ARMS = 3
HIDDEN = 64


class MyModel:
    def init(self, key):
        """The first weights: any nesting of dicts, lists and tuples of arrays."""
        first, second, third = jax.random.split(key, 3)
        return {
            "hidden1": {"w": jax.random.normal(first, (2, HIDDEN)), "b": jnp.zeros(HIDDEN)},
            "hidden2": {"w": jax.random.normal(second, (HIDDEN, HIDDEN)) * (2 / HIDDEN) ** 0.5, "b": jnp.zeros(HIDDEN)},
            "output": {"w": jax.random.normal(third, (HIDDEN, ARMS)) * HIDDEN**-0.5, "b": jnp.zeros(ARMS)},
        }

    def loss(self, params, batch, key):
        """The mean over the batch, which the optimizer lowers, and any metrics you want to see.

        `key` is another one for every step and shard. Here it shakes the points a little, each in its own way.
        """
        point = batch["point"] + 0.02 * jax.random.normal(key, batch["point"].shape)
        logits = self.logits(params, point)
        accuracy = jnp.mean(jnp.argmax(logits, axis=1) == batch["arm"])
        return jnp.mean(self.cross_entropy(logits, batch["arm"])), {"accuracy": accuracy}

    def train_data(self, folder):
        """NumPy arrays with one entry per example; `folder` is the setting data.dir. Every process calls this, so it
        must give the same arrays everywhere: read a file, or seed what is random."""
        return spirals(3_000, seed=1)

    def eval_data(self, folder):
        return spirals(600, seed=2)

    def score(self, params, batch):
        """What evaluation reports: one value per example under each name. No key: evaluation is not random."""
        logits = self.logits(params, batch["point"])
        return {
            "accuracy": (jnp.argmax(logits, axis=1) == batch["arm"]).astype(jnp.float32),
            "loss": self.cross_entropy(logits, batch["arm"]),
        }

    def logits(self, params, point):
        x = jnp.tanh(point @ params["hidden1"]["w"] + params["hidden1"]["b"])
        x = jnp.tanh(x @ params["hidden2"]["w"] + params["hidden2"]["b"])
        return x @ params["output"]["w"] + params["output"]["b"]

    def cross_entropy(self, logits, arm):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), arm[:, None], axis=1)[:, 0]


def spirals(count, seed):
    """`count` points in the plane, (count, 2) float32, and the arm of the spiral that each lies on, (count,) int32."""
    random = np.random.default_rng(seed)
    arm = random.integers(0, ARMS, count).astype(np.int32)
    radius = random.uniform(0.1, 1.0, count)
    angle = 2 * np.pi * (arm / ARMS + 1.25 * radius) + random.normal(0, 0.1, count)
    point = np.stack([3 * radius * np.cos(angle), 3 * radius * np.sin(angle)], axis=1)
    return {"point": point.astype(np.float32), "arm": arm}

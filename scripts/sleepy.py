"""The quadratic problem in which each shard takes 10 ms of sleep and next to no computing.

So several workers on few cores are as fast as on as many machines, and what is measured is the system, not the cores.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from gradbus.workloads.quadratic import Quadratic

SHARD_S = 0.01


class Sleepy(Quadratic):
    def loss(self, params, batch, key):
        value, metrics = super().loss(params, batch, key)
        slept = jax.pure_callback(_sleep, jax.ShapeDtypeStruct((), jnp.float32), jax.tree.leaves(batch)[0].ravel()[0])
        return value + 0.0 * slept, metrics


def _sleep(_: object) -> np.float32:
    time.sleep(SHARD_S)
    return np.float32(0.0)

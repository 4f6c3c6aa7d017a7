"""The quadratic problem with brakes, for tests that do something in mid-run. The bits are those of `quadratic`.

PACE_S        seconds that a batch takes to be read
HOLD_TRACE_S  seconds that a worker takes to trace the loss, which begins with making the file `tracing`
BALLAST_MB    megabytes that travel with the weights, untrained
OTHER_DATA    the labels of this process differ
OTHER_TREE    the parameters of this process have one array more
"""

import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from gradbus.workloads.quadratic import Quadratic

PACE_S = float(os.environ.get("PACE_S", "0"))
BALLAST_MB = int(os.environ.get("BALLAST_MB", "0"))
HOLD_TRACE_S = float(os.environ.get("HOLD_TRACE_S", "0"))


class Slow(np.ndarray):
    def take(self, indices, axis=None, **more):
        time.sleep(PACE_S)
        return np.asarray(self)[indices]


class Paced(Quadratic):
    def init(self, key):
        params = super().init(key)
        if BALLAST_MB:
            params["ballast"] = jnp.zeros(BALLAST_MB << 18, jnp.int32)
        return {**params, "extra": jnp.zeros(3)} if "OTHER_TREE" in os.environ else params

    def loss(self, params, batch, key):
        if HOLD_TRACE_S and "worker" in sys.argv:
            Path("tracing").touch()
            time.sleep(HOLD_TRACE_S)
        return super().loss(params, batch, key)

    def train_data(self, folder):
        data = super().train_data(folder)
        y = data["y"] + 1 if "OTHER_DATA" in os.environ else data["y"]
        return {**data, "y": y.view(Slow)}

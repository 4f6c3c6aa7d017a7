"""Training without any of Gradbus but the workload and the order of samples: no bus, no tree, no server, no worker.

What the system computes must have the same bits as this. Run alone, it prints the hash:

    NPROC=1 python tests/plain_loop.py digits 60 128 4
"""

import hashlib
import os
import sys
from typing import Any

os.environ.setdefault("NPROC", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

from gradbus.workloads.loading import load
from worker.batches import Batches


def train(
    spec: str, steps: int, batch_size: int, shards: int, tx: optax.GradientTransformation, seed: int = 0,
    folder: Any = None,
) -> Any:  # fmt: skip
    """The parameters after ``steps`` updates."""
    workload = load(spec)
    data = workload.train_data(folder)
    batches = Batches(seed, len(jax.tree.leaves(data)[0]), batch_size, shards)
    key = jax.random.key(seed)
    params = workload.init(key)
    opt_state = tx.init(params)
    gradient = jax.jit(jax.value_and_grad(workload.loss, has_aux=True))

    @jax.jit
    def update(params: Any, opt_state: Any, sums: Any, examples: int) -> Any:
        mean = jax.tree.map(lambda total: total / examples, sums)
        updates, opt_state = tx.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for step in range(steps):
        sums = []
        for shard in range(shards):
            rows = batches.indices(step, shard)
            batch = jax.tree.map(lambda array, rows=rows: array[rows], data)
            shard_key = jax.random.fold_in(jax.random.fold_in(key, step), shard)
            _, shard_gradient = gradient(params, batch, shard_key)
            n = np.float32(len(rows))
            sums.append(jax.tree.map(lambda g, n=n: np.asarray(g) * n, shard_gradient))
        while len(sums) > 1:  # neighbours first, as in a knock-out tournament
            pairs = [sums[i : i + 2] for i in range(0, len(sums), 2)]
            sums = [jax.tree.map(np.add, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        params, opt_state = update(params, opt_state, sums[0], batch_size)
    return params


def sha256(params: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    spec, steps, batch_size, shards = sys.argv[1], *map(int, sys.argv[2:5])
    print(sha256(train(spec, steps, batch_size, shards, optax.adam(1e-3))))

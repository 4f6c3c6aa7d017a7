"""JAX: weights and a batch in, the summed gradient of one shard out.

The gradient of a shard is a pure function of (weights, seed, version, shard), and its bits depend on nothing else: one
jitted function with one shape, whatever a worker is given to do. Sums over shards are taken outside of it, because XLA
may contract a multiplication and an addition that it sees together.
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bus.finite import within_limit
from bus.layout import Bytes, gradient_layout, weights_layout
from bus.messages import Leaf
from worker.batches import Batches
from worker.executor import ShardSum

PyTree = Any


class Workload(Protocol):
    """The part of a workload that a worker calls; gradbus.workloads.base has the whole contract."""

    def init(self, key: jax.Array) -> PyTree: ...
    def loss(self, *arguments: Any) -> tuple[jax.Array, Any]: ...


class ShardGradients:
    """``train``: arrays that share their first axis. ``leaves``: the model's, as the PS laid them out.

    ``init_state`` is the workload's, if it keeps any. ``not_finite``: of which (version, shard) the gradient is to be
    NaN, on purpose.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        init_state: Callable[[jax.Array], PyTree] | None,
        leaves: Sequence[Leaf],
        bucket_bytes: int,
        train: PyTree,
        batches: Batches,
        seed: int,
        not_finite: Container[tuple[int, int]] = (),
    ) -> None:
        self._train, self._batches, self._not_finite = train, batches, not_finite
        self._weights = weights_layout(leaves, bucket_bytes)
        self.layout = gradient_layout(leaves, bucket_bytes)
        self._key = jax.random.key(seed)
        self._device = jax.devices()[0]
        self.device = f"{self._device.platform}:{self._device.device_kind}"
        self._ready: dict[tuple[int, int], PyTree] = {}
        self._loaded: tuple[list[jax.Array], list[jax.Array], list[jax.Array]] = ([], [], [])

        params = jax.tree.structure(jax.eval_shape(workload.init, self._key))
        stateful = init_state is not None
        state = jax.tree.structure(jax.eval_shape(init_state, self._key) if init_state else ())
        kinds = [leaf.kind for leaf in leaves if leaf.kind != "state"]

        def loss(
            trainable: list[jax.Array], frozen: list[jax.Array], kept: list[jax.Array], batch: PyTree, key: jax.Array
        ) -> tuple[jax.Array, tuple[dict[str, jax.Array], list[jax.Array]]]:
            fixed, learnt = iter(frozen), iter(trainable)
            tree = jax.tree.unflatten(params, [next(learnt if kind == "trainable" else fixed) for kind in kinds])
            if not stateful:
                value, metrics = workload.loss(tree, batch, key)
                return value, (metrics, [])
            value, (metrics, new) = workload.loss(tree, jax.tree.unflatten(state, kept), batch, key)
            return value, (metrics, jax.tree.leaves(new))

        def shard(
            trainable: list[jax.Array],
            frozen: list[jax.Array],
            kept: list[jax.Array],
            batch: PyTree,
            key: jax.Array,
            version: jax.Array,
            shard: jax.Array,
        ) -> tuple[list[jax.Array], jax.Array, dict[str, jax.Array]]:
            key = jax.random.fold_in(jax.random.fold_in(key, version), shard)
            (value, (metrics, new)), gradient = jax.value_and_grad(loss, has_aux=True)(
                trainable, frozen, kept, batch, key
            )
            examples = jax.tree.leaves(batch)[0].shape[0]
            scaled = [
                leaf.astype(jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32) * examples
                for leaf in (*gradient, *new)
            ]
            return scaled, value, metrics

        self._shard = jax.jit(shard)

    def compile(self) -> None:
        """Compile for the shapes of this experiment, so that the first step pays nothing. No weights are needed."""
        zeros = self._weights.empty()
        self.load(zeros)
        self.shard(0, 0)

    def load(self, buffer: Bytes) -> None:
        """Take the weights in ``buffer``, which must not change as long as they are used: on the CPU JAX reads them
        where they lie."""
        leaves: dict[str, list[jax.Array]] = {"trainable": [], "frozen": [], "state": []}
        arrays = jax.device_put(self._weights.views(buffer), self._device)  # at once: half the price of one by one
        for leaf, array in zip(self._weights.leaves, arrays, strict=True):
            leaves[leaf.kind].append(array)
        self._loaded = (leaves["trainable"], leaves["frozen"], leaves["state"])

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        """The sum over the examples of one shard of the gradient, the model state, the loss and the metrics."""
        batch = self._ready.pop((version, shard), None)
        if batch is None:
            batch = self._batch(version, shard)
        scaled, value, metrics = self._shard(*self._loaded, batch, self._key, np.uint32(version), np.uint32(shard))
        examples = len(self._batches.indices(version, shard))
        buffer = self.layout.pack([np.asarray(leaf) for leaf in scaled], into)
        if (version, shard) in self._not_finite:
            self.layout.views(buffer)[0][...] = np.nan
        means = {"loss": float(value), **{name: float(metric) for name, metric in sorted(metrics.items())}}
        trouble = self._trouble(buffer, means["loss"])
        if trouble:
            buffer[:] = 0
            ids = self._batches.indices(version, shard)
            listed = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
            return ShardSum(buffer, 0, {}, (shard,), f"shard {shard} (samples {listed}): {trouble}")
        return ShardSum(buffer, examples, {name: mean * examples for name, mean in means.items()})

    def prefetch(self, version: int, shards: list[int]) -> None:
        self._ready = {(version, shard): self._batch(version, shard) for shard in shards}

    def _batch(self, version: int, shard: int) -> PyTree:
        indices = self._batches.indices(version, shard)
        return jax.tree.map(lambda array: jax.device_put(np.take(array, indices, axis=0), self._device), self._train)

    def _trouble(self, buffer: Bytes, loss: float) -> str:
        if not math.isfinite(loss):
            return f"loss = {loss}"
        for leaf, values in zip(self.layout.leaves, self.layout.views(buffer), strict=True):
            if not within_limit(values):
                return f"loss = {loss:.6g}, but the gradient of {leaf.name} is not finite"
        return ""

"""The one place where the weights change: mean gradient -> optax step -> new weights, jitted, in place.

Everything lives on the CPU. The buffers of parameters and optimizer state are donated, so that an update writes over
them: a view from `weights()` that is still alive makes JAX copy instead, silently, at full price.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from bus.layout import Leaf
from ps.advance import WholeTree
from ps.optimizers import CALL_ERRORS, Optimizer, OptimizerError, reason
from ps.settings import AverageSettings

Array = npt.NDArray[Any]
PyTree = Any
Snapshot = dict[str, dict[str, Array]]


class RestoreError(ValueError):
    """A snapshot that is not of these parameters and this optimizer. One line that names the first difference."""


class Updater(WholeTree):
    """The live state of a training: parameters, model state, optimizer state, moving average.

    params     pytree of arrays; those of a floating dtype are trained, others (integers, booleans) stay as they are
    state      pytree of arrays, such as running statistics, or None
    optimizer  from ps.optimizers.build
    average    a moving average of the weights, or None

    `leaves` describes the arrays in layout order: those of params, then those of state, each in tree order. `updates`
    counts the applied updates; `how` says how they are made. Raises OptimizerError for an optimizer that cannot work
    from gradients and parameters alone (lbfgs wants the loss itself), ValueError for parameters of which none can be
    trained.
    """

    def __init__(
        self, params: PyTree, state: PyTree | None, optimizer: Optimizer, average: AverageSettings | None
    ) -> None:
        self.updates, self.how = 0, "of the whole tree at once"
        self.average_settings = average
        self.transform = optimizer.transform
        # As JAX would take them: without its 64-bit mode a float64 array is a float32 one, on all sides.
        params, state = jax.tree.map(lambda x: np.asarray(jnp.asarray(x)), (params, state))
        param_paths = jax.tree_util.tree_leaves_with_path(params)
        state_paths = jax.tree_util.tree_leaves_with_path(state)
        self._param_tree = jax.tree.structure(params)
        arrays = [np.asarray(leaf) for _, leaf in param_paths]
        trained = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]
        if not any(trained):
            raise ValueError("params: expected at least one array of a floating dtype to train, got none")
        self.leaves = leaves_of(params, state)
        self._frozen = [None if is_trained else _constant(a) for a, is_trained in zip(arrays, trained, strict=True)]
        # What is not trained is None here, which is no leaf: optax sees the tree that the gradient has.
        self._params = jax.tree.unflatten(
            self._param_tree,
            [_own(array) if is_trained else None for array, is_trained in zip(arrays, trained, strict=True)],
        )
        self._state = [_own(np.asarray(leaf)) for _, leaf in state_paths]
        self._opt_state = jax.tree.map(_own, self.transform.init(self._params))
        self._average = (
            jax.tree.map(lambda p: _own(p.astype(_average_dtype(p.dtype))), self._params) if average else None
        )
        self._check_optimizer()
        self._step = jax.jit(self._apply, donate_argnums=(0, 1))
        self._blend = jax.jit(_blend_all, donate_argnums=0)
        self._compiled: tuple[Any, Any] | None = None

    def compile(self) -> None:
        """Compile what `apply` runs, so that no step pays for it. The state is not touched."""
        sums = [jax.ShapeDtypeStruct(leaf.shape, _sum_dtype(leaf.dtype)) for leaf in self._summed()]
        step = self._step.lower(self._params, self._opt_state, sums, np.int32(1)).compile()
        blend = (
            self._blend.lower(self._average, self._params, np.float32(0)).compile()
            if self._average is not None
            else None
        )
        self._compiled = (step, blend)

    def apply(self, sums: Sequence[Array], examples: int) -> None:
        """Update the weights by the mean gradient, and take the mean of the model state.

        sums: for the trainable leaves, then those of the state, in layout order: the sum over all examples, float32
        (float64 for float64 leaves), in the leaf's shape. examples: how many, at least 1. Nothing of `sums` is in use
        any more when this returns.
        """
        if examples < 1:
            raise ValueError(f"examples: expected at least 1, got {examples}")
        if self._compiled is None:
            self.compile()
        assert self._compiled is not None
        step, blend = self._compiled
        self._params, self._opt_state, state = step(self._params, self._opt_state, list(sums), np.int32(examples))
        self._state = state
        self.updates += 1
        if blend is not None:
            self._average = blend(self._average, self._params, decay_of(self.average_settings, self.updates))
        jax.block_until_ready((self._params, self._opt_state, self._state, self._average))

    def trainable(self) -> PyTree:
        """Shapes and dtypes of the trainable parameters, None where one is not trained."""
        return jax.eval_shape(lambda: self._params)

    def tried(self, sums: Sequence[Array], examples: int, times: int) -> list[Array]:
        """What the trainable leaves would be after so many updates by these sums. Nothing is changed."""
        params, opt_state, update = self._params, self._opt_state, jax.jit(self._apply)
        for _ in range(times):
            params, opt_state, _ = update(params, opt_state, list(sums), np.int32(examples))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]

    def weights(self) -> list[Array]:
        """Read-only views of all leaves in layout order, without a copy. Copy at once and let go: while a view is alive
        the next update cannot be made in place, and JAX does not say so."""
        return self._with_frozen(self._params)

    def averaged(self) -> list[Array]:
        """As `weights`, with the moving average in the place of the trainable leaves (the weights where it is off)."""
        if self._average is None:
            return self.weights()
        return self._with_frozen(jax.tree.map(lambda a, p: a.astype(p.dtype), self._average, self._params))

    def snapshot(self) -> Snapshot:
        """Everything a resume needs, as read-only copies by name: weights, optimizer, and average if there is one."""
        return {
            part: {name: _constant(view) for name, view in views.items()} for part, views in self._named_views().items()
        }

    def restore(self, snapshot: Mapping[str, Mapping[str, Array]], updates: int) -> None:
        """Take over a snapshot of `updates` updates. Raises RestoreError, and then nothing has changed."""
        for part, views in self._named_views().items():
            if part not in snapshot:
                raise RestoreError(
                    f"{part}: expected {len(views)} arrays, got no such part; the checkpoint is incomplete"
                )
            _compare(part, views, snapshot[part])
        opt_state = _unnamed("optimizer", self._opt_state, snapshot["optimizer"])
        for name, count in _counts(opt_state):
            if count != updates:
                raise RestoreError(f"optimizer, {name}: expected the count {updates} of the checkpoint, got {count}")
        weights = [snapshot["weights"][leaf.name] for leaf in self.leaves]
        in_params = len(self._frozen)
        self._frozen = [
            f if f is None else _constant(w) for f, w in zip(self._frozen, weights[:in_params], strict=True)
        ]
        self._params = jax.tree.unflatten(
            self._param_tree,
            [_own(w) if f is None else None for f, w in zip(self._frozen, weights[:in_params], strict=True)],
        )
        self._state = [_own(array) for array in weights[in_params:]]
        self._opt_state = opt_state
        if self._average is not None:
            self._average = _unnamed("params", self._average, snapshot["average"])
        self.updates = updates

    def _apply(self, params: PyTree, opt_state: PyTree, sums: list[jax.Array], examples: jax.Array) -> Any:
        """Traced. The mean is taken in the dtype of the sums and then rounded to that of the leaf."""
        means = [mean_of(total, examples, leaf.dtype) for total, leaf in zip(sums, self._summed(), strict=True)]
        trained = len(jax.tree.leaves(params))
        grads = jax.tree.unflatten(jax.tree.structure(params), means[:trained])
        updates, opt_state = self.transform.update(grads, opt_state, params)
        # Without weak types, so that what comes out is what goes in again and nothing is compiled twice.
        return *jax.tree.map(strong, (optax.apply_updates(params, updates), opt_state)), means[trained:]

    def _check_optimizer(self) -> None:
        sums = [jax.ShapeDtypeStruct(leaf.shape, _sum_dtype(leaf.dtype)) for leaf in self._summed()]
        before = (self._params, self._opt_state)
        try:
            after = jax.eval_shape(self._apply, *before, sums, np.int32(1))[:2]
        except CALL_ERRORS as error:
            raise OptimizerError(
                f"optimizer: it cannot work with these parameters and their gradients alone: {reason(error)}"
            ) from None
        described = [
            {
                jax.tree_util.keystr(path): (x.shape, str(x.dtype))
                for path, x in jax.tree_util.tree_leaves_with_path(tree)
            }
            for tree in (before, after)
        ]
        if described[0] != described[1]:
            changed = next(key for key in described[0] | described[1] if described[0].get(key) != described[1].get(key))
            raise OptimizerError(
                f"optimizer: expected a state that keeps its shapes and dtypes, got {changed} "
                f"{described[0].get(changed)} before and {described[1].get(changed)} after an update; choose another"
            )

    def _summed(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind != "frozen"]

    def _named_views(self) -> Snapshot:
        names = [leaf.name for leaf in self.leaves]
        parts = {
            "weights": dict(zip(names, self.weights(), strict=True)),
            "optimizer": _named("optimizer", self._opt_state),
        }
        return parts | ({"average": _named("params", self._average)} if self._average is not None else {})

    def _with_frozen(self, params: PyTree) -> list[Array]:
        trained = iter(jax.tree.leaves(params))
        arrays = [np.asarray(next(trained)) if f is None else f for f in self._frozen]
        return arrays + [np.asarray(leaf) for leaf in self._state]


def parameters_sha256(leaves: Iterable[Array]) -> str:
    """SHA-256 (hex) over arrays in layout order, as little-endian bytes."""
    digest = hashlib.sha256()
    for leaf in leaves:
        little = np.ascontiguousarray(leaf if sys.byteorder == "little" else leaf.byteswap())
        digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def decay_of(average: AverageSettings | None, updates: int) -> np.float32:
    """Of a moving average, at the update that makes them so many."""
    if average is None:
        return np.float32(0)
    return np.float32(min(average.decay, (1 + updates) / (10 + updates)) if average.warmup else average.decay)


def mean_of(total: jax.Array, examples: jax.Array, dtype: str) -> jax.Array:
    """Traced. The mean is taken in the dtype of the sum and then rounded to ``dtype``."""
    mean = total / examples.astype(total.dtype)
    return (mean if jnp.issubdtype(dtype, jnp.floating) else jnp.round(mean)).astype(dtype)


def blend(average: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    """Traced. One step of a moving average."""
    return decay.astype(average.dtype) * average + (1 - decay).astype(average.dtype) * new.astype(average.dtype)


def _blend_all(average: PyTree, params: PyTree, decay: jax.Array) -> PyTree:
    return jax.tree.map(lambda a, p: blend(a, p, decay), average, params)


def strong(x: jax.Array) -> jax.Array:
    """Traced. Without a weak type."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)


def _sum_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _average_dtype(dtype: Any) -> Any:
    """A slow average would stand still in half precision."""
    return jnp.promote_types(dtype, jnp.float32)


def _own(x: Any) -> jax.Array:
    """A copy on the CPU that shares memory with nothing, so that it can be donated."""
    cpu = jax.devices("cpu")[0]
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.wrap_key_data(_own(jax.random.key_data(x)), impl=jax.random.key_impl(x)), cpu)
    with jax.default_device(cpu):
        # From NumPy memory jnp.array copies always; device_put would take aligned memory where it lies.
        return jax.device_put(jnp.array(np.asarray(x)), cpu)


def _constant(x: Any) -> Array:
    copy = np.array(x, copy=True)
    copy.setflags(write=False)
    return copy


def _plain(x: jax.Array) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def leaves_of(params: PyTree, state: PyTree | None) -> tuple[Leaf, ...]:
    """The leaves of a model in layout order: those of params, then those of state, each in tree order.

    params, state: pytrees of arrays, or of their shapes and dtypes as jax.eval_shape gives them.
    """

    def leaf(prefix: str, path: Any, array: Any, kind: Any) -> Leaf:
        return Leaf(prefix + jax.tree_util.keystr(path), np.dtype(array.dtype).name, tuple(array.shape), kind)

    params_paths = jax.tree_util.tree_leaves_with_path(params)
    state_paths = jax.tree_util.tree_leaves_with_path(state)
    return tuple(
        leaf("params", path, array, "trainable" if jnp.issubdtype(array.dtype, jnp.floating) else "frozen")
        for path, array in params_paths
    ) + tuple(leaf("state", path, array, "state") for path, array in state_paths)


def _named(prefix: str, tree: PyTree) -> dict[str, Array]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): np.asarray(_plain(leaf)) for path, leaf in paths}


def _unnamed(prefix: str, like: PyTree, arrays: Mapping[str, Array]) -> PyTree:
    def take(path: Any, leaf: jax.Array) -> jax.Array:
        own = _own(arrays[prefix + jax.tree_util.keystr(path)])
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.wrap_key_data(own, impl=jax.random.key_impl(leaf)) if is_key else own

    return jax.tree_util.tree_map_with_path(take, like)


def _compare(part: str, mine: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    for name in {**mine, **other}:
        here, there = (
            f"{side[name].dtype.name}{list(side[name].shape)}" if name in side else "nothing" for side in (mine, other)
        )
        if here != there:
            raise RestoreError(f"{part}, {name}: expected {here}, got {there}; the checkpoint is of another experiment")


def _counts(opt_state: PyTree) -> list[tuple[str, int]]:
    """The counters that rise by one with every update: all that optax calls `count`, but for that of apply_every."""
    paths = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda node: isinstance(node, optax.ApplyEvery))
    return [
        (jax.tree_util.keystr(path), int(leaf))
        for path, leaf in paths
        if path and getattr(path[-1], "name", None) == "count" and not isinstance(leaf, optax.ApplyEvery)
    ]

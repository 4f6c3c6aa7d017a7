"""Whether a workload keeps its contract, found by tracing: nothing is computed. And the hash of a dataset."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gradbus.workloads.base import Arrays, State, Workload, WorkloadError, is_stateful
from gradbus.workloads.loading import describe


def validate(workload: Workload, train: Arrays, *, examples: int = 7) -> None:
    """Check that `workload` keeps the contract on data like `train`, by tracing: nothing is computed.

    `examples` is the number of examples in a shard, if known. Raises `WorkloadError` for the first fault found.
    """
    import jax
    import jax.numpy as jnp

    _check_data(train)
    module = sys.modules.get(type(workload).__module__)

    def trace(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return jax.eval_shape(function, *arguments)
        except Exception as error:
            raise WorkloadError(f"workload: {what} raised {describe(error, module)}") from error

    def batch_leaf(array: Any) -> Any:
        return jax.ShapeDtypeStruct((examples, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype))

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.tree.map(batch_leaf, train)
    params = trace("init", workload.init, key)
    leaves, structure = jax.tree.flatten(params)
    flagged = [(jnp.issubdtype(leaf.dtype, jnp.inexact), leaf) for leaf in leaves]
    if not any(trained for trained, _ in flagged):
        _fail("init returned", _show(params), "at least one array of floating dtype to train")

    loss: Callable[..., Any] = workload.loss
    score: Callable[..., Any] = workload.score
    state: tuple[Any, ...] = ()
    if has_state := is_stateful(workload):
        state = (trace("init_state", workload.init_state, key),)
        _check_state(state[0])
    result = trace("loss", loss, params, *state, batch, key)
    wanted = "(loss, (metrics, new_state))" if has_state else "(loss, metrics)"
    if not isinstance(result, tuple) or len(result) != 2:
        _fail("loss returned", _show(result), f"the pair {wanted}")
    value, metrics = result
    if not _is_array(value) or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        _fail("loss returned", _show(value), "a floating scalar as its first value: the mean over the batch")
    if has_state:
        if not isinstance(metrics, tuple) or len(metrics) != 2:
            _fail("loss returned as its second value", _show(metrics), "the pair (metrics, new_state)")
        metrics, new_state = metrics
        _check_same(state[0], new_state)
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        _fail("loss returned as metrics", _show(metrics), "a dict of names to scalars, {} if there are none")
    for name, metric in metrics.items():
        if not _is_array(metric) or metric.shape != () or not jnp.isrealobj(metric):
            _fail(f"metric {name!r} is", _show(metric), "a real scalar: the mean over the batch")

    def gradient(weights: list[Any], *rest: Any) -> Any:
        merged = iter(weights)
        full = [next(merged) if flag else jnp.zeros(leaf.shape, leaf.dtype) for flag, leaf in flagged]
        return loss(jax.tree.unflatten(structure, full), *rest)

    weights = [leaf for flag, leaf in flagged if flag]
    trace("the gradient of loss", jax.grad(gradient, has_aux=True), weights, *state, batch, key)

    scores = trace("score", score, params, *state, batch)
    if not isinstance(scores, dict) or not scores or not all(isinstance(name, str) for name in scores):
        _fail("score returned", _show(scores), "a dict of names to arrays with one value per example")
    for name, values in scores.items():
        if not _is_array(values) or values.shape != (examples,):
            _fail(
                f"score {name!r} of {examples} examples is", _show(values), f"a value per example, shape ({examples},)"
            )


def describe_data(arrays: Arrays) -> str:
    """The hash of a dataset, in hex: SHA-256 over name, dtype, shape and little-endian bytes of each array in order."""
    import jax
    import numpy as np

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        array = np.asanyarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}\n".encode())
        row_bytes = max(1, array.nbytes // max(1, len(array)))
        rows = max(1, (16 << 20) // row_bytes)  # so that a memory-mapped file is never held whole
        for first in range(0, len(array), rows):
            part = array[first : first + rows]
            little = part.astype(part.dtype.newbyteorder("<"), order="C", copy=False)
            digest.update(little.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _check_data(train: Arrays) -> None:
    import jax
    import jax.numpy as jnp

    leaves = jax.tree_util.tree_leaves_with_path(train)
    if not leaves:
        _fail("train_data returned", repr(train), "a pytree with at least one NumPy array")
    first = ""
    count = 0
    for path, leaf in leaves:
        name = f"train_data{jax.tree_util.keystr(path)}"
        if not _is_array(leaf) or not leaf.shape:
            _fail(f"{name} is", _show(leaf), "an array whose first axis is the examples")
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            _fail(f"{name} is", _show(leaf), "a numeric or boolean dtype")
        if not first:
            first, count = name, leaf.shape[0]
        if leaf.shape[0] != count:
            _fail(f"{name} has {leaf.shape[0]} examples", f"while {first} has {count}", "one shared leading axis")
    if count < 1:
        _fail(f"{first} is", _show(leaves[0][1]), "at least 1 example")


def _check_state(state: State) -> None:
    import jax
    import jax.numpy as jnp

    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            _fail(
                f"init_state(){jax.tree_util.keystr(path)} is", _show(leaf), "a floating dtype, to average over shards"
            )


def _check_same(old: State, new: State) -> None:
    import jax

    if str(jax.tree.structure(old)) != str(jax.tree.structure(new)):
        _fail("loss returned as new_state", _show(new), f"the structure of init_state: {_show(old)}")
    for (path, before), after in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            _fail(f"new_state{jax.tree_util.keystr(path)} is", _show(after), f"{_show(before)}, as init_state returned")


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _show(tree: Any) -> str:
    """A pytree with each array as dtype[shape], cut to a readable length."""
    import jax

    def leaf(value: Any) -> str:
        return f"{value.dtype}[{','.join(map(str, value.shape))}]" if _is_array(value) else repr(value)

    text = str(jax.tree.map(leaf, tree)).replace("'", "")
    return text if len(text) <= 200 else text[:200] + "..."


def _fail(found: str, value: str, expected: str) -> NoReturn:
    raise WorkloadError(f"workload: {found} {value}; expected {expected}")

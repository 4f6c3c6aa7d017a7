"""Does an update change each element by that element alone? Read off the optimizer itself, as JAX traces it.

If so, a version can be made a stretch at a time, while the stretch is in the cache (``ps.stretches``). Clipping by the
global norm, norms of a layer, factored moments and noise need more than one element; their update is made of the whole
tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ps.optimizers import CALL_ERRORS, reason

PyTree = Any
Deps = frozenset[int]  # leaves of the parameters that a value depends on

NOTHING: Deps = frozenset()
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos",
    "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip
_NESTED = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "cond"})


class NotElementwise(Exception):
    """The text says what an update needs beside the element itself."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """How the state of an optimizer is kept as flat vectors, in the order of the parameters, and single numbers.

    structure  of the state for one vector of parameters; `vectors` and `dtypes` tell of its leaves
    places     for each leaf of the state of the whole tree: (leaf of `structure`, parameter), or (leaf, None) for a
               number
    """

    structure: Any
    vectors: tuple[bool, ...]
    dtypes: tuple[np.dtype[Any], ...]
    places: tuple[tuple[int, int | None], ...]

    def join(self, vectors: Sequence[Any], numbers: Sequence[Any]) -> PyTree:
        """The state for a part of its vectors, which may be a pytree each, such as a list of arrays."""
        of_both = (iter(numbers), iter(vectors))
        return jax.tree.unflatten(self.structure, [next(of_both[is_vector]) for is_vector in self.vectors])

    def part(self, state: PyTree) -> tuple[list[Any], list[Any]]:
        """Vectors and numbers of such a state."""
        leaves = list(zip(self.structure.flatten_up_to(state), self.vectors, strict=True))
        return [leaf for leaf, is_vector in leaves if is_vector], [leaf for leaf, is_vector in leaves if not is_vector]


def flat_state(transform: optax.GradientTransformation, params: PyTree) -> FlatState:
    """`params`: the trainable parameters, or their shapes and dtypes, None where one is not trained.

    Raises NotElementwise, with what stands in the way.
    """
    if any(leaf.dtype != np.float32 for leaf in jax.tree.leaves(params)):
        raise NotElementwise("not all parameters are float32, which gradients are summed in")
    vector = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (sum(leaf.size for leaf in jax.tree.leaves(params)),), np.float32
    )
    try:
        state, flat = jax.eval_shape(transform.init, params), jax.eval_shape(transform.init, vector)
        form = _form(transform, params, state, flat)
        _check(transform, params, state, [param for _, param in form.places])
        _check(transform, vector, flat, [0 if is_vector else None for is_vector in form.vectors])
    except CALL_ERRORS as error:
        raise NotElementwise(f"its state cannot be told apart: {reason(error)}") from None
    return form


def _form(transform: optax.GradientTransformation, params: PyTree, state: PyTree, flat: PyTree) -> FlatState:
    count = len(jax.tree.leaves(params))
    numbered = jax.tree.unflatten(jax.tree.structure(params), range(count))
    owners = jax.tree.leaves(
        optax.tree_utils.tree_map_params(
            transform, lambda _, index: index, state, numbered, transform_non_params=lambda _: -1
        )
    )
    leaves, flat_leaves = jax.tree.leaves(state), jax.tree.leaves(flat)
    places: list[tuple[int, int | None]] = []
    slot = at = 0
    while at < len(leaves):
        width = count if owners[at] == 0 else 1
        if slot >= len(flat_leaves) or owners[at : at + width] not in ([-1], list(range(count))):
            raise NotElementwise("its state is neither of the shape of the parameters nor single numbers")
        places += [(slot, owner if owner >= 0 else None) for owner in owners[at : at + width]]
        if {leaf.dtype for leaf in leaves[at : at + width]} != {flat_leaves[slot].dtype} or (
            owners[at] == -1 and leaves[at].shape != ()
        ):
            raise NotElementwise("its state is of several dtypes, or an array that belongs to no parameter")
        slot, at = slot + 1, at + width
    if slot != len(flat_leaves):
        raise NotElementwise("its state depends on how the parameters are arranged")
    vectors = tuple(any(place == (index, 0) for place in places) for index in range(slot))
    dtypes = tuple(np.dtype(leaf.dtype) for leaf in flat_leaves)
    return FlatState(jax.tree.structure(flat), vectors, dtypes, tuple(places))


def _check(
    transform: optax.GradientTransformation, params: PyTree, state: PyTree, owners: Sequence[int | None]
) -> None:
    def update(grads: PyTree, params: PyTree, state: PyTree) -> Any:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    own = [frozenset({index}) for index in range(len(jax.tree.leaves(params)))]
    of_state = [NOTHING if owner is None else frozenset({owner}) for owner in owners]
    traced = jax.make_jaxpr(update)(params, params, state)
    found = _follow(traced.jaxpr, [*own, *own, *of_state])
    for deps, expected in zip(found, [*own, *of_state], strict=True):
        if not deps <= expected:
            raise NotElementwise("it mixes parameters")


def _follow(jaxpr: Jaxpr, inputs: Sequence[Deps]) -> list[Deps]:
    """What each output depends on. Raises NotElementwise at the first operation that is of more than one element."""
    known: dict[Any, Deps] = dict(zip(jaxpr.invars, inputs, strict=True))

    def deps(value: Any) -> Deps:
        return NOTHING if isinstance(value, Literal) else known.get(value, NOTHING)

    for eqn in jaxpr.eqns:
        name, of = eqn.primitive.name, [deps(value) for value in eqn.invars]
        everything = NOTHING.union(*of)
        outputs = [everything] * len(eqn.outvars)
        if name in _NESTED:
            for inner in _inner(eqn.params):
                given = of[len(of) - len(inner.invars) :]  # the first of `cond` is the predicate
                predicate = NOTHING.union(*of[: len(of) - len(inner.invars)])
                found = _follow(inner, given)
                outputs = [one | other for one, other in zip(found, [predicate] * len(found), strict=True)]
        elif name in ("broadcast_in_dim", "reshape", "squeeze"):
            if _size(eqn.invars[0]) != 1:
                raise NotElementwise(f"it needs {name} of a whole array")
        elif name not in _ELEMENTWISE and any(_size(value) != 1 for value in (*eqn.invars, *eqn.outvars)):
            raise NotElementwise(f"it needs {name} of a whole array")
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [deps(value) for value in jaxpr.outvars]


def _inner(params: Any) -> list[Jaxpr]:
    found = []
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append(each.jaxpr)
            elif isinstance(each, Jaxpr):
                found.append(each)
    return found


def _size(value: Any) -> int:
    return int(value.aval.size)

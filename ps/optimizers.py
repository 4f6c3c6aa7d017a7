"""Optimizer settings to an optax chain, in one place.

    {name: adam, learning_rate: 1e-3}                                       any optax optimizer or transformation
    {name: sgd, learning_rate: {schedule: linear_schedule, ...}}            a schedule in the place of a number
    {chain: [{name: clip_by_global_norm, max_norm: 1}, {name: sgd, ...}]}   several in a row
    {name: lookahead, fast_optimizer: {name: sgd, ...}, ...}                one inside another
    {name: contrib.muon, ...}                                               what is in optax.contrib

Schedules count applied updates: the first update is made at count 0, whatever the number of workers, and after a resume
the count goes on.
"""

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

LearningRate = Callable[[int], float]

# What optax raises for arguments that it does not like, when it is called and when it is traced.
ABBREVIATIONS = {"lr": "learning_rate", "beta1": "b1", "beta2": "b2", "epsilon": "eps"}
CALL_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, NotImplementedError)


class OptimizerError(ValueError):
    """The optimizer section names something that optax does not have, or will not take. One line, with the path."""


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation, and the rate that it applies at update count n (0 for the first update).

    learning_rate is None where there is no single one: two in a chain, or none at all.
    """

    transform: optax.GradientTransformation
    learning_rate: LearningRate | None


def build(spec: Mapping[str, Any]) -> Optimizer:
    """The optimizer that the settings describe. Raises OptimizerError."""
    builder = _Builder()
    transform = builder.transform(spec, "optimizer")
    return Optimizer(transform, builder.rates[0] if len(builder.rates) == 1 else None)


def reason(error: Exception) -> str:
    """The first line of an error of optax or JAX, which are often long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Builder:
    def __init__(self) -> None:
        self.rates: list[LearningRate] = []

    def transform(self, spec: Any, path: str) -> optax.GradientTransformation:
        if not isinstance(spec, Mapping) or ("name" in spec) == ("chain" in spec):
            _fail(path, "a mapping with either a name or a chain", spec, "write, for example, {name: sgd, ...}")
        if "chain" in spec:
            parts = spec["chain"]
            if not isinstance(parts, list) or not parts or len(spec) > 1:
                _fail(
                    path, "nothing but a chain, which is a list of mappings", spec, "write {chain: [{name: ...}, ...]}"
                )
            return optax.chain(*(self.transform(part, f"{path}.chain[{i}]") for i, part in enumerate(parts)))
        factory = _named(spec["name"], _transforms(), f"{path}.name", "optimizer or transformation")
        arguments, learning_rate = self._arguments(spec, factory, path)
        result = _call(factory, arguments, path, spec["name"])
        if not isinstance(result, optax.GradientTransformation):
            _fail(f"{path}.name", "an optimizer or transformation", spec["name"], "see the optax documentation")
        if learning_rate is not None:
            self.rates.append(_rate(learning_rate))
        return result

    def schedule(self, spec: Mapping[str, Any], path: str) -> optax.Schedule:
        factory = _named(spec["schedule"], _schedules(), f"{path}.schedule", "schedule")
        arguments, _ = self._arguments(spec, factory, path)
        result: optax.Schedule = _call(factory, arguments, path, spec["schedule"])
        try:
            result(jnp.zeros((), jnp.int32))  # some faults show at the first call only
        except CALL_ERRORS as error:
            raise OptimizerError(f"{path}: {spec['schedule']} cannot be evaluated: {reason(error)}") from None
        return result

    def _arguments(self, spec: Mapping[str, Any], factory: Callable[..., Any], path: str) -> tuple[dict[str, Any], Any]:
        """The arguments of a call, built and checked, and its learning rate (given or by default), if it has one."""
        name = spec.get("name", spec.get("schedule"))
        parameters = _signature(factory).parameters
        result: dict[str, Any] = {}
        for key, value in spec.items():
            if key in ("name", "schedule"):
                continue
            if key not in parameters:
                known = ", ".join(parameters) or "it has none"
                near = difflib.get_close_matches(ABBREVIATIONS.get(key, key), list(parameters), n=1)
                hint = f"did you mean {near[0]}?" if near else "leave it out"
                _fail(f"{path}.{key}", f"an argument of {name} ({known})", key, hint)
            result[key] = self._argument(value, parameters[key].annotation, f"{path}.{key}")
        for key, parameter in parameters.items():
            if key not in result and parameter.default is inspect.Parameter.empty:
                _fail(f"{path}.{key}", f"a value, which {name} needs", Ellipsis, f"add {key}")
        rate = parameters.get("learning_rate")
        return result, result.get("learning_rate", rate.default) if rate else None

    def _argument(self, value: Any, annotation: Any, path: str) -> Any:
        kinds = _kinds(annotation)
        match value:
            case Mapping() if "schedule" in value:
                if not kinds & {Callable, Any}:
                    _fail(path, "a plain value (it takes no schedule)", value, "write a number")
                return self.schedule(value, path)
            case Mapping() if "name" in value or "chain" in value:
                return self.transform(value, path)
            case Mapping() | list() if kinds & {int, float}:
                _fail(path, "a number", value, "write one number")
            case Mapping():
                return {_key(key): self._argument(item, Any, f"{path}.{key}") for key, item in value.items()}
            case list():
                return [self._argument(item, Any, f"{path}[{i}]") for i, item in enumerate(value)]
            case str() if path.endswith("dtype"):
                try:
                    return jnp.dtype(value)
                except TypeError:
                    _fail(path, "the name of a dtype", value, "write, for example, bfloat16")
            case _:
                return _scalar(value, kinds, path)


def _scalar(value: Any, kinds: set[Any], path: str) -> Any:
    numeric = bool(kinds & {int, float})
    if Any in kinds:
        pass
    elif value is None:
        if type(None) not in kinds:
            _fail(path, "a value", value, "leave the key out to have the default")
    elif isinstance(value, str):
        if str not in kinds:
            _fail(path, "a number" if numeric else "another kind of value", value, "see the optax documentation")
    elif isinstance(value, bool) != (bool in kinds and not numeric):
        _fail(path, "a number" if numeric else "true or false" if bool in kinds else "a schedule", value, "change it")
    elif int in kinds and float not in kinds and isinstance(value, float):
        if not value.is_integer():
            _fail(path, "a whole number", value, f"write {round(value)}")
        return int(value)
    if isinstance(value, float) and not np.isfinite(value):
        _fail(path, "a finite number", value, "change it")
    return value


def _kinds(annotation: Any) -> set[Any]:
    """The alternatives of an annotation; {Any} when it says nothing that can be checked."""
    if annotation in (inspect.Parameter.empty, Any) or isinstance(annotation, str):
        return {Any}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds: set[Any] = set().union(*(_kinds(part) for part in typing.get_args(annotation)))
        return kinds if kinds - {type(None), Any} else {Any}
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return {str}
    if origin is not None:
        return {Callable if isinstance(origin, type) and issubclass(origin, Callable) else origin}  # type: ignore[arg-type]
    return {annotation}


def _key(key: Any) -> Any:
    """Boundaries of a schedule are counts; YAML keys are text."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _rate(learning_rate: Any) -> LearningRate:
    if not callable(learning_rate):
        constant = float(learning_rate)
        return lambda count: constant
    cpu = jax.devices("cpu")[0]
    evaluate = jax.jit(learning_rate)

    def rate(count: int) -> float:
        value = np.float32(evaluate(jax.device_put(np.int32(count), cpu)))
        return float(str(value))  # the shortest decimal that names this float32: 0.1, not 0.10000000149011612

    rate(0)  # compiled here rather than at the first step
    return rate


def _transforms() -> dict[str, Callable[..., Any]]:
    contrib = _returning(optax.contrib, optax.GradientTransformation)
    return _returning(optax, optax.GradientTransformation) | {f"contrib.{name}": f for name, f in contrib.items()}


def _schedules() -> dict[str, Callable[..., Any]]:
    return _returning(optax, optax.Schedule)


def _returning(module: types.ModuleType, wanted: Any) -> dict[str, Callable[..., Any]]:
    """The public functions that return this, or do not say. What takes any number of things is written as a chain."""
    found: dict[str, Callable[..., Any]] = {}
    for name, item in vars(module).items():
        if name.startswith("_") or not (inspect.isfunction(item) or isinstance(item, functools.partial)):
            continue
        signature = _signature(item)
        returned = signature.return_annotation
        if returned not in (wanted, inspect.Signature.empty) and not (
            inspect.isclass(wanted) and inspect.isclass(returned) and issubclass(returned, wanted)
        ):
            continue
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
            found[name] = item
    return found


def _signature(item: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(item, eval_str=True)
    except NameError:  # an annotation that means something to type checkers only
        return inspect.signature(item)


def _named(name: Any, known: Mapping[str, Callable[..., Any]], path: str, what: str) -> Callable[..., Any]:
    if isinstance(name, str) and name in known:
        return known[name]
    near = difflib.get_close_matches(str(name), list(known), n=1) or [key for key in known if key.endswith(f".{name}")]
    _fail(path, f"an optax {what}", name, f"did you mean {near[0]}?" if near else "see the optax documentation")


def _call(factory: Callable[..., Any], arguments: dict[str, Any], path: str, name: str) -> Any:
    try:
        return factory(**arguments)
    except CALL_ERRORS as error:
        raise OptimizerError(f"{path}: {name} refuses these arguments: {reason(error)}") from None


def _fail(path: str, expected: str, got: Any, hint: str) -> NoReturn:
    found = "nothing" if got is Ellipsis else f"the text {got!r}" if isinstance(got, str) else repr(got)[:80]
    raise OptimizerError(f"{path}: expected {expected}, got {found}; {hint}")

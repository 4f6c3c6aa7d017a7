"""Layers of plain data (defaults, a file, the command line) to one typed Struct, or one line that says why not.

Knows no particular setting: the Structs say what may stand where. A value is converted by its declared type, so that a
number in quotes is a number where a number is wanted, and nothing else changes its type. A part of free form
(`dict[str, Any]`) holds calls such as `{name: adam, learning_rate: 1e-3}`, whose arguments ps.optimizers checks.
"""

import difflib
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from gradbus.wording import TRUTH_WORDS, Shown, describe, kinds, near_number, show
from gradbus.yaml_text import SettingsError, number

T = TypeVar("T", bound=msgspec.Struct)
Path = tuple[str | int, ...]

NAMES_A_CALL = frozenset({"name", "chain", "schedule"})
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Layer:
    """Values and where they came from: a file's name, or the command line."""

    source: str
    values: dict[str, Any]


def merge(base: Any, over: Any, *, calls: Sequence[str] = (), _call: bool = False) -> Any:
    """`over` laid over `base`. Mappings merge key by key; `{0: ...}` over a list changes its item 0.

    Below the top-level keys in `calls` a mapping that names its call replaces the other whole: sgd must not inherit the
    arguments of adam.
    """
    if isinstance(base, list) and isinstance(over, dict) and over and all(key.isdecimal() for key in over):
        items = list(base)
        for key, value in over.items():
            if int(key) < len(items):
                items[int(key)] = merge(items[int(key)], value, _call=_call)
                continue
            return over  # no such item: left for the types to refuse, with its path
        return items
    if not isinstance(base, dict) or not isinstance(over, dict) or (_call and names_a_call(over)):
        return over
    return base | {
        key: merge(base[key], value, _call=_call or key in calls) if key in base else value
        for key, value in over.items()
    }


def names_a_call(values: Mapping[str, Any]) -> bool:
    """Whether the mapping says which function it is about; `chain: {0: ...}` changes a chain, and names none."""
    return any(key in values and not isinstance(values[key], dict) for key in NAMES_A_CALL)


def spell(path: Path) -> str:
    """`("optimizer", "chain", 0, "name")` as `optimizer.chain[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def source_of(layers: Sequence[Layer], *paths: Path) -> str:
    """The last layer that says anything at or above one of the paths."""
    for layer in reversed(layers):
        if any(_says(layer.values, path) for path in paths):
            return layer.source
    return layers[-1].source if layers else "settings"


def _says(values: Any, path: Path) -> bool:
    for part in path:
        if isinstance(values, dict) and str(part) in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return not isinstance(values, (dict, list))  # it put something else in the place of a part above
    return True


class Converter:
    """Plain data to a Struct. `layers` only serve to name the source of a fault; all faults are SettingsErrors."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def struct(self, values: Any, schema: type[T], path: Path = (), root: type[msgspec.Struct] | None = None) -> T:
        """An instance of `schema`; `root` is the outermost schema, in which a misplaced key is looked for."""
        root = root or schema
        fields = {field.name: field for field in msgspec.structs.fields(schema)}
        if not isinstance(values, dict):
            keys = ", ".join(fields)
            self.fail(path, f"a mapping ({keys})", values, "write its keys below it, or leave it out")
        for key in values:
            if key not in fields:
                self._fail_unknown(path, key, fields, root)
        return schema(**{name: self._value(value, fields[name], (*path, name), root) for name, value in values.items()})

    def fail(self, path: Path, expected: str, got: Any, hint: str, *, also: Path = ()) -> NoReturn:
        """Raise the one line that says what is wrong at `path`, perhaps in the light of what is at `also`."""
        source = source_of(self._layers, path, *([also] if also else []))
        raise SettingsError(f"{source}, {spell(path)}: expected {expected}, got {show(got)}; {hint}")

    def _value(self, value: Any, field: msgspec.structs.FieldInfo, path: Path, root: type[msgspec.Struct]) -> Any:
        nested = [kind for kind in _alternatives(field.type) if isinstance(kind, type) and _is_struct(kind)]
        if nested and not (value is None and type(None) in _alternatives(field.type)):
            return self.struct(value, nested[0], path, root)
        if field.type == dict[str, Any]:
            return self._call(value, path)
        wanted = inspect.type_info(field.type)
        converted = _as_number(value, wanted)
        try:
            return msgspec.convert(converted, field.type)
        except msgspec.ValidationError:
            expected = f"seconds as {describe(wanted)}" if field.name.endswith("_s") else describe(wanted)
            self.fail(path, expected, value, self._hint(value, wanted, field, path))

    def _hint(self, value: Any, wanted: inspect.Type, field: msgspec.structs.FieldInfo, path: Path) -> str:
        for kind in kinds(wanted):
            if isinstance(kind, inspect.Metadata) and kind.extra_json_schema:
                description = kind.extra_json_schema.get("description")
                if description:
                    return str(description)
            if isinstance(kind, inspect.LiteralType) and isinstance(value, str):
                near = difflib.get_close_matches(value, [str(item) for item in kind.values], n=1)
                if near:
                    return f"did you mean {near[0]}?"
            if isinstance(kind, inspect.StrType) and isinstance(value, (bool, int, float)):
                text = json.dumps(show(value))
                on_command_line = source_of(self._layers, path) == COMMAND_LINE
                return f"quote it: '{spell(path)}={text}'" if on_command_line else f"quote it: {path[-1]}: {text}"
            if isinstance(kind, inspect.BoolType) and isinstance(value, str) and value.lower() in TRUTH_WORDS:
                return f"write {TRUTH_WORDS[value.lower()]}"
            if isinstance(kind, (inspect.IntType, inspect.FloatType)) and isinstance(value, str):
                start = near_number(value)
                if start:
                    return f"write {start}"
        default = field.default_factory() if field.default is msgspec.NODEFAULT else msgspec.to_builtins(field.default)
        return f"the default is {'null' if default is None else json.dumps(default)}"

    def _fail_unknown(self, path: Path, key: str, fields: Mapping[str, Any], root: type[msgspec.Struct]) -> NoReturn:
        here = spell(path)
        near = difflib.get_close_matches(key, list(fields), n=1)
        elsewhere = [full for full in _all_keys(root) if full.rpartition(".")[2] == key]
        if near:
            hint = f"did you mean {spell((*path, near[0]))}?"
        elif elsewhere:
            hint = f"did you mean {elsewhere[0]}?"
        else:
            hint = f"the keys {f'of {here}' if here else 'at the top'} are {', '.join(fields)}"
        source = source_of(self._layers, (*path, key))
        raise SettingsError(f"{source}, {spell((*path, key))}: expected a known key, got {key!r}; {hint}")

    def _call(self, value: Any, path: Path) -> dict[str, Any]:
        """A call: {name: ..., arguments...} or {chain: [call, ...]}. Which names there are is not known here."""
        if not isinstance(value, dict):
            self.fail(path, "a mapping with name and arguments", value, "write, for example, {name: sgd, ...}")
        if "chain" in value:
            if "name" in value or not isinstance(value["chain"], list) or not value["chain"]:
                got = "name and chain" if "name" in value else show(value["chain"])
                self.fail(
                    path, "either a name or a chain, which is a list of mappings", Shown(got), "write one of them"
                )
            for key in value.keys() - {"chain"}:
                self.fail((*path, key), "nothing beside chain", value[key], "move it into an item of chain")
            return {"chain": [self._call(item, (*path, "chain", i)) for i, item in enumerate(value["chain"])]}
        if "name" not in value:
            self.fail(path, "a name (or a chain)", value, "write, for example, name: sgd")
        return {key: self._argument(item, (*path, key)) for key, item in value.items()}

    def _argument(self, value: Any, path: Path) -> Any:
        key = path[-1]
        if key in ("name", "schedule") and not isinstance(value, str):
            self.fail(path, "a name", value, "write one of optax's, such as sgd or cosine_decay_schedule")
        if key in ("name", "schedule"):
            return value
        if isinstance(value, str):
            value = self._argument_text(value, path)
        if key == "learning_rate" and not (
            (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0)
            or (isinstance(value, dict) and "schedule" in value)
        ):
            near = near_number(value) if isinstance(value, str) else None
            hint = f"write {near}" if near else "write, for example, 0.001"
            self.fail(path, "a number of at least 0 or a mapping that names a schedule", value, hint)
        if isinstance(value, dict):
            return {name: self._argument(item, (*path, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [self._argument(item, (*path, i)) for i, item in enumerate(value)]
        return value

    def _argument_text(self, value: str, path: Path) -> str | int | float:
        exact = number(value)
        if exact is not None:
            return exact
        if value.lower() in TRUTH_WORDS:
            self.fail(path, "true or false", value, f"write {TRUTH_WORDS[value.lower()]}")
        if value.lower().lstrip("+-.") in ("nan", "inf", "infinity"):
            self.fail(path, "a finite number", value, "write a finite number, or leave the key out")
        near = near_number(value)
        if near:
            self.fail(path, "a number", value, f"write {near}")
        return value


def _as_number(value: Any, wanted: inspect.Type) -> Any:
    """A number in the spelling that the type asks for; anything else as it is."""
    types = {type(kind) for kind in kinds(wanted)}
    if inspect.StrType in types or not types & {inspect.IntType, inspect.FloatType}:
        return value
    if isinstance(value, str):
        exact = number(value)
        value = value if exact is None else exact
    if inspect.IntType in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) or (annotation,)


def _is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


def _all_keys(schema: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(schema):
        yield prefix + field.name
        for kind in _alternatives(field.type):
            if isinstance(kind, type) and _is_struct(kind):
                yield from _all_keys(kind, f"{prefix}{field.name}.")

"""Values, counts and declared types in words, for the lines that people read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import inspect

from gradbus.yaml_text import number

TRUTH_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_LEADING_NUMBER = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)")


@dataclass(frozen=True)
class Shown:
    """A description of what was found, to be printed as it is."""

    text: str


def show(value: Any) -> str:
    """A value as it would stand in YAML, short, with its kind where that matters."""
    match value:
        case Shown():
            return value.text
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {value[:60]!r}"
        case dict():
            return f"a mapping ({', '.join(map(str, value))[:60]})"
        case list():
            return f"a list of {len(value)}"
        case _:
            return str(value)[:60]


def describe(wanted: inspect.Type) -> str:
    """A declared type in words: `a whole number of at least 1`."""
    match wanted:
        case inspect.Metadata() if wanted.extra_json_schema and "title" in wanted.extra_json_schema:
            return str(wanted.extra_json_schema["title"])
        case inspect.Metadata():
            return describe(wanted.type)
        case inspect.IntType() | inspect.FloatType():
            return _describe_number(wanted)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType() if len(wanted.values) == 1:
            return str(wanted.values[0])
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, wanted.values))
        case inspect.UnionType():
            return " or ".join(describe(kind) for kind in wanted.types)
        case inspect.NoneType():
            return "null"
        case inspect.ListType() | inspect.VarTupleType():
            return "a list"
        case _:
            return "text"


def _describe_number(wanted: inspect.IntType | inspect.FloatType) -> str:
    limits = [
        f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}"
        for words, limit in (
            ("above", wanted.gt),
            ("of at least", wanted.ge),
            ("below", wanted.lt),
            ("at most", wanted.le),
            ("a multiple of", wanted.multiple_of),
        )
        if limit is not None
    ]
    kind = "a whole number" if isinstance(wanted, inspect.IntType) else "a number"
    return f"{kind} {', '.join(limits[:-1])}{' and ' if limits[1:] else ''}{limits[-1]}" if limits else kind


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def near_number(text: str) -> str | None:
    """`0.001` for `0.001s`: what the text starts with, if that is a number."""
    if text.count(":"):
        return None  # a time of day, not a number with a unit
    match = _LEADING_NUMBER.match(text)
    value = number(match[1].lstrip("0") or "0") if match else None
    return None if value is None else str(value)


def kinds(wanted: inspect.Type) -> Iterator[inspect.Type]:
    """A declared type and all that it is put together from."""
    yield wanted
    if isinstance(wanted, inspect.Metadata):
        yield from kinds(wanted.type)
    if isinstance(wanted, inspect.UnionType):
        for kind in wanted.types:
            yield from kinds(kind)

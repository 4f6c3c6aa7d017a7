"""YAML text to plain data in which nothing has silently become something else.

PyYAML reads `no` as false, `12:30` as 750, `010` as 8, `1e-3` as text, and lets the second of two equal keys win. So
only its parser is used, which also knows the lines, and scalars are resolved here: null, true, false, decimal numbers
(`1e-3`, `.001`, `1_000`); everything else is text, as is whatever stands in quotes. Keys are always text.
"""

import math
import re

import yaml  # type: ignore[import-untyped]

_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)?(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


class SettingsError(ValueError):
    """Settings that cannot be used. The message is one line: source, place, what was expected, what was found."""


def number(text: str) -> int | float | None:
    """The decimal number that `text` spells, or None. Never NaN, and infinite neither: 1e999 is not a number here."""
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        value = float(text) if _NUMBER.fullmatch(text) else math.inf
        return value if math.isfinite(value) else None
    except ValueError:  # what the pattern lets through but is no number: ".", "1__0", "e5"
        return None


def parse(text: str, source: str) -> Plain:
    """The data in `text`; `source` names it in errors. Raises SettingsError with line and column."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if root is None else _plain(root, source, "", frozenset())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = " ".join(", ".join(part for part in (error.context, error.problem) if part).split())
        raise SettingsError(f"{place}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        raise SettingsError(
            f"{source}, character {error.position + 1}: expected printable text, got {error.character!r}; remove it"
        ) from None
    except RecursionError:
        raise SettingsError(f"{source}: expected settings, got YAML nested too deeply") from None


def _plain(node: yaml.Node, source: str, path: str, above: frozenset[int]) -> Plain:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise SettingsError(f"{source}, line {line}: expected a value for {path}, got an alias to a part that holds it")
    if node.tag not in _PLAIN_TAGS:
        raise SettingsError(f"{source}, line {line}: expected a plain value, got the tag {node.tag}; remove the tag")
    above |= {id(node)}
    match node:
        case yaml.ScalarNode():
            return _scalar(node.value) if node.style is None else str(node.value)
        case yaml.SequenceNode():
            return [_plain(item, source, f"{path}[{i}]", above) for i, item in enumerate(node.value)]
        case _:
            return _mapping(node, source, path, above)


def _mapping(node: yaml.MappingNode, source: str, path: str, above: frozenset[int]) -> Plain:
    result: dict[str, Plain] = {}
    first: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise SettingsError(f"{source}, line {line}: expected a name as the key, got a list or a mapping")
        name = str(key.value)
        inner = f"{path}.{name}" if path else name
        if name in result:
            raise SettingsError(
                f"{source}, line {line}: expected each key once, got {inner} again (line {first[name]}); remove one"
            )
        first[name] = line
        result[name] = _plain(value, source, inner, above)
    return result


def _scalar(text: str) -> Plain:
    if text in _WORDS:
        return _WORDS[text]
    value = number(text)
    return text if value is None else value

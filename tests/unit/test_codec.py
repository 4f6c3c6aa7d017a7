"""Frames to messages and back. Whatever bytes come in, a message or a WireError comes out."""

import builtins
import math
import pickle
import struct
import typing
import zlib
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bus import codec
from bus.errors import ProtocolError, WireError
from bus.messages import ALL, PROTOCOL, Alive, Assignment, Contribution, Hello, Leaf, Message, Ready, Refusal, Weights

BASIC: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),  # what msgpack carries; a session is any 64-bit number
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec="utf-8"), max_size=20),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
}


def built(kind: Any) -> st.SearchStrategy[Any]:
    """Instances of a message, or of what a message is made of."""
    arguments = get_args(kind)
    match get_origin(kind):
        case typing.Literal:
            return st.sampled_from(arguments)
        case builtins.tuple if arguments[-1] is Ellipsis:
            return st.lists(built(arguments[0]), max_size=3).map(tuple)
        case builtins.tuple:
            return st.tuples(*map(built, arguments))
        case builtins.dict:
            return st.dictionaries(*map(built, arguments), max_size=3)
        case None if kind in BASIC:
            return BASIC[kind]
        case None:
            fields = msgspec.structs.fields(kind)
            return st.builds(kind, **{field.name: built(field.type) for field in fields})
        case _:
            return st.one_of(*map(built, arguments))


MESSAGES = st.sampled_from(ALL).flatmap(built)


def frames(message: Message, payload: bytes | None = None) -> list[memoryview]:
    parts = [*codec.encode(message), *([] if payload is None else [payload])]
    return [memoryview(part) for part in parts]


def decoded(*parts: bytes) -> Message | None:
    """The message in ``parts``, or None for a WireError; anything else that is raised is a fault."""
    try:
        return codec.decode([memoryview(part) for part in parts])[0]
    except WireError as error:
        assert str(error) and "\n" not in str(error)
        return None


@given(MESSAGES, st.binary(max_size=200))
def test_what_was_encoded_is_decoded(message: Message, payload: bytes) -> None:
    found, raw = codec.decode(frames(message, payload if message.has_payload else None))
    assert found == message and type(found) is type(message)
    assert (None if raw is None else raw.tobytes()) == (payload if message.has_payload else None)


def test_every_kind_is_eight_bytes_and_its_own() -> None:
    kinds = [message.kind for message in ALL]
    assert {len(kind) for kind in kinds} == {codec.KIND_BYTES} and len(set(kinds)) == len(ALL)


def test_a_payload_is_a_view_of_the_bytes_where_they_lie() -> None:
    buffer = bytearray(range(64))
    message = Weights(1, 2, 0, 0, (Assignment(1, 0, 4),))
    _, payload = codec.decode([*frames(message), memoryview(buffer)])
    assert payload is not None
    buffer[5] = 99
    assert payload[5] == 99


def test_a_sum_that_is_not_finite_survives_the_journey() -> None:
    sums = {"loss": math.inf, "accuracy": math.nan}
    found, _ = codec.decode(frames(Contribution(1, 2, 3, 0, 0, 1, 8, sums), b""))
    assert isinstance(found, Contribution)
    assert found.sums["loss"] == math.inf and math.isnan(found.sums["accuracy"])


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_frames_are_a_message_or_refused(parts: list[bytes]) -> None:
    decoded(*parts)


@given(st.sampled_from(ALL), st.binary(max_size=60), st.binary(max_size=8))
@example(Ready, b"\x81\x80\x01", b"")  # a mapping with a mapping for a key
@example(Ready, b"\x92\x01\x81\x80\x01", b"")
@example(Ready, b"\x92\x01\x81\x81\x01\x01\x01", b"")
@example(Ready, b"\x94\x01\xd6\xff\xff\xff\xff\xff\x01\xa1d", b"")  # a timestamp where a number is due
@example(Ready, b"\xc7\x0c\xff" + b"\xff" * 12, b"")  # a timestamp that no calendar holds
@example(Ready, b"\x91" * 5000 + b"\x01", b"")  # lists in lists, deeper than the stack
@example(Ready, b"\x94\x01\x01\x01\xa2\xff\xfe", b"")  # a text that is no UTF-8
@example(Ready, b"\xdd\xff\xff\xff\xff", b"")  # a list that claims four billion elements
@example(Ready, b"\xdb\xff\xff\xff\xff", b"")  # a text that claims four gigabytes
@example(Ready, b"", b"")
def test_any_header_is_a_message_or_refused(kind: type[Message], header: bytes, payload: bytes) -> None:
    decoded(kind.kind, header, *([payload] if kind.has_payload else []))


@given(MESSAGES, st.data())
def test_a_header_with_damage_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    kind, header = codec.encode(message)
    start = data.draw(st.integers(0, len(header)))
    end = data.draw(st.integers(start, min(len(header), start + 4)))
    damaged = header[:start] + data.draw(st.binary(max_size=4)) + header[end:]
    decoded(kind, damaged, *([b""] if message.has_payload else []))


HELLO = Hello("w0", "host", 7, 1, {"jax": "0.10.2"})
KIND, HEADER = codec.encode(HELLO)
GRADIENT = Contribution(1, 2, 3, 0, 0, 1, 8, {"loss": 1.0})


def fields(message: Message) -> list[Any]:
    return list(msgspec.msgpack.decode(codec.encode(message)[1]))


def packed(*values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


MALFORMED: list[tuple[list[bytes], str]] = [
    ([], "found 0 frames, expected 2 or 3"),
    ([KIND], "found 1 frames, expected 2 or 3"),
    ([KIND, HEADER, b"", b""], "found 4 frames, expected 2 or 3"),
    ([KIND, HEADER, b""], "hello: found 3 frames, expected 2"),
    ([GRADIENT.kind, codec.encode(GRADIENT)[1]], "gradient: found 2 frames, expected 3"),
    ([b"", HEADER], "found a message of kind b''"),
    ([b"hello", HEADER], "found a message of kind b'hello', expected one of protocol 1"),
    ([KIND + b"\0", HEADER], "found a message of kind"),
    ([b"GET / HT", b"TP/1.1"], "found a message of kind b'GET / HT'"),
    ([b"x" * 10_000_000, HEADER], "found a message of kind b'xxxxxxxxx'"),
    ([KIND, b""], "hello: "),
    ([KIND, b"\xc1"], "hello: "),
    ([KIND, HEADER + b"\0"], "hello: "),
    ([KIND, HEADER[:-1]], "hello: "),
    ([KIND, packed(*fields(HELLO)[:-1])], "hello: "),
    ([KIND, packed(*fields(HELLO), "more")], "hello: "),
    ([KIND, packed(PROTOCOL, "w0", "host", "7", 1, {})], r"hello: Expected `int`, got `str` - at `\$\[3\]`"),
    ([KIND, packed(PROTOCOL, "w0", "host", 7, 1, {"jax": 1})], "hello: Expected `str`, got `int`"),
    ([KIND, packed(PROTOCOL, "w0", "host", 7.5, 1, {})], "hello: Expected `int`, got `float`"),
    ([KIND, packed(True, "w0", "host", 7, 1, {})], "hello: "),
    ([KIND, msgspec.msgpack.encode({"name": "w0"})], "hello: "),
    ([KIND, b"x" * ((1 << 20) + 1)], "hello: found a header of 1048577 bytes, expected at most 1 MiB"),
]


@pytest.mark.parametrize(("parts", "said"), MALFORMED)
def test_what_is_wrong_is_said(parts: list[bytes], said: str) -> None:
    with pytest.raises(WireError, match=f"^{said}"):
        codec.decode([memoryview(part) for part in parts])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("other", [0, PROTOCOL + 1, 999, -1])
def test_another_protocol_version_is_named_with_ours(kind: type[Message], other: int) -> None:
    header = packed(other, "whatever", 3, {"that": ["release", "says"]})
    said = f"found protocol {other}, expected {PROTOCOL}; install the same release on both sides"
    with pytest.raises(ProtocolError, match=said):
        codec.decode([memoryview(part) for part in (kind.kind, header, *([b""] if kind.has_payload else []))])


@pytest.mark.parametrize("other", [0, PROTOCOL + 1])
def test_a_refusal_of_another_protocol_version_is_understood(other: int) -> None:
    assert decoded(Refusal.kind, packed(other, False, "too old")) == Refusal(False, "too old")
    assert decoded(Refusal.kind, packed(other, "too old")) is None


def test_only_a_header_that_is_too_large_is_refused_for_its_size() -> None:
    largest = Alive(1, 2, 3, "x" * (codec.HEADER_LIMIT_BYTES - 64))
    assert decoded(*codec.encode(largest)) == largest


class Canary:
    """What an attacker sends: unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", ALL)
def test_a_pickle_is_never_opened(kind: type[Message], protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Canary(canary), protocol)
    for parts in ([kind.kind, bomb], [bomb, bomb], [bomb, bomb, bomb], [kind.kind, bomb, bomb]):
        assert decoded(*parts) is None
    decoded(*codec.encode(GRADIENT), bomb)  # a payload may be any bytes
    assert not canary.exists()


def test_the_checksum_is_the_common_one_and_a_flipped_bit_is_seen() -> None:
    payload = np.arange(4096, dtype=np.uint8)
    stamped = codec.with_checksum(GRADIENT, payload)
    assert stamped.checksum == zlib.crc32(payload.tobytes())
    codec.check_payload(payload, 4096, stamped.checksum)
    payload[1000] ^= 1
    with pytest.raises(WireError, match="the payload changed on its way"):
        codec.check_payload(payload, 4096, stamped.checksum)
    codec.check_payload(payload, 4096, None)


@pytest.mark.parametrize("size", [0, 4095, 4097])
def test_a_payload_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"found a payload of {size} bytes, expected 4096"):
        codec.check_payload(np.zeros(size, np.uint8), 4096, None)


def test_a_large_tree_fits_into_a_welcome() -> None:
    """Ten thousand leaves with long names: the layout table travels in a header."""
    table = [Leaf(f"['encoder']['layer_{n}']['attention']['kernel']", "float32", (768, 768), "trainable")
             for n in range(10_000)]  # fmt: skip
    assert len(msgspec.msgpack.encode(table)) < codec.HEADER_LIMIT_BYTES


def test_an_empty_payload_is_an_empty_array() -> None:
    _, payload = codec.decode(frames(GRADIENT, b""))
    assert payload is not None and payload.shape == (0,) and payload.dtype == np.uint8


def test_numbers_are_little_endian_on_the_wire() -> None:
    payload = np.array([1.0], np.float32).view(np.uint8)
    _, raw = codec.decode(frames(GRADIENT, payload.tobytes()))
    assert raw is not None and raw.tobytes() == struct.pack("<f", 1.0)

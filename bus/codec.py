"""Message <-> frames. Raises only WireError; whatever bytes come in, a message or a WireError comes out.

frame 0   kind     8 bytes, which also serve as the topic of PUB/SUB
frame 1   header   msgpack array: protocol version, then the fields of the message in order
frame 2   payload  raw little-endian bytes of one bucket; only for messages that have a payload. Where the kind ends in
                   "@", it is where they lie in memory that both sides share (bus.shm)

Checked in this order: frame count, kind, header size, protocol version, field types; then, by who knows the layout,
payload size and checksum. Nothing is allocated from a number in a header.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import msgspec.structs
import numpy as np
import numpy.typing as npt

from bus.errors import ProtocolError, WireError
from bus.messages import ALL, PROTOCOL, Contribution, Evaluate, Message, Refusal, Weights

KIND_BYTES = 8
HEADER_LIMIT_BYTES = 1 << 20

Bytes = npt.NDArray[np.uint8]


class Place(NamedTuple):
    """Where a payload lies in shared memory."""

    offset_bytes: int
    size_bytes: int


_encoder = msgspec.msgpack.Encoder()
_decoders = {message.kind: (message, msgspec.msgpack.Decoder(message)) for message in ALL}
PLACED_WEIGHTS, PLACED_GRADIENT = b"weights@", b"gradien@"
_decoders |= {PLACED_WEIGHTS: _decoders[Weights.kind], PLACED_GRADIENT: _decoders[Contribution.kind]}
_places = msgspec.msgpack.Decoder(Place)


def encode(message: Message) -> tuple[bytes, bytes]:
    """The kind and header frames of ``message``; its payload, if any, follows as it is."""
    return message.kind, _encoder.encode(message)


def encode_placed(message: Contribution | Weights, place: Place) -> tuple[bytes, bytes, bytes]:
    """All frames of ``message``, whose payload lies at ``place``."""
    kind = PLACED_WEIGHTS if isinstance(message, Weights) else PLACED_GRADIENT
    return kind, _encoder.encode(message), _encoder.encode(place)


def decode(frames: Sequence[memoryview]) -> tuple[Message, Bytes | Place | None]:
    """The message in ``frames`` and its payload as a flat view of the bytes where they lie, or its place."""
    if not 2 <= len(frames) <= 3:
        raise WireError(f"found {len(frames)} frames, expected 2 or 3")
    kind = bytes(frames[0][: KIND_BYTES + 1])
    if kind not in _decoders:
        raise WireError(f"found a message of kind {kind!r}, expected one of protocol {PROTOCOL}")
    message_type, decoder = _decoders[kind]
    if len(frames) != 2 + message_type.has_payload:
        raise WireError(f"{_word(kind)}: found {len(frames)} frames, expected {2 + message_type.has_payload}")
    if frames[1].nbytes > HEADER_LIMIT_BYTES:
        raise WireError(f"{_word(kind)}: found a header of {frames[1].nbytes} bytes, expected at most 1 MiB")
    try:
        message = decoder.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        other = _other_protocol(frames[1])
        if other is None:
            raise WireError(f"{_word(kind)}: {error}") from None
        if message_type is Refusal and (refusal := _refusal(frames[1])):
            return refusal, None
        raise ProtocolError(
            f"{_word(kind)}: found protocol {other}, expected {PROTOCOL}; install the same release on both sides"
        ) from None
    if not message_type.has_payload:
        return message, None
    if kind[-1:] != b"@":
        return message, np.frombuffer(frames[2], np.uint8)
    try:
        return message, _places.decode(frames[2])
    except msgspec.DecodeError as error:
        raise WireError(f"{_word(kind)}: its place: {error}") from None


def checksum(payload: Bytes) -> int:
    """CRC-32 of a payload (as in RFC 1952), for runs with ``bus.checksum``."""
    return zlib.crc32(payload.data)


def with_checksum(message: Contribution | Weights | Evaluate, payload: Bytes) -> Contribution | Weights | Evaluate:
    return msgspec.structs.replace(message, checksum=checksum(payload))


def check_payload(payload: Bytes, size_bytes: int, expected_checksum: int | None) -> None:
    """Raise WireError unless ``payload`` has the size its layout says and, where one was sent, the checksum."""
    if payload.nbytes != size_bytes:
        raise WireError(f"found a payload of {payload.nbytes} bytes, expected {size_bytes}")
    if expected_checksum is not None and (found := checksum(payload)) != expected_checksum:
        raise WireError(f"found checksum {found:08x}, expected {expected_checksum:08x}: the payload changed on its way")


def _word(kind: bytes) -> str:
    return kind.rstrip(b"\0").decode()


def _refusal(header: memoryview) -> Refusal | None:
    """A refusal is the same in every version, so that peers of different releases learn why they part."""
    try:
        return msgspec.convert([PROTOCOL, *msgspec.msgpack.decode(header)[1:]], Refusal)
    except msgspec.ValidationError:
        return None


def _other_protocol(header: memoryview) -> int | None:
    """The protocol version that a header names, if it is another one."""
    try:
        fields = msgspec.msgpack.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    if isinstance(fields, list) and fields and isinstance(fields[0], int) and fields[0] != PROTOCOL:
        return fields[0]
    return None

"""All that the loops know of a network: two protocols, one for each side. ``bus.sockets`` and ``bus.memory`` fill them.

A transport never raises because of what a peer did: bad frames arrive as ``Malformed``, and a message to a peer that
is gone is dropped, as a network would drop it. Every wait is bounded by the caller.
"""

from typing import Any, NamedTuple, Protocol

from bus.messages import Contribution, Malformed, Message, Segment, Subscribed, Welcome

Payload = Any  # a flat array of bytes; opaque here, because the pure modules import no numpy
Peer = bytes  # names a connection of the control socket, for replies; never an identity


class Arrival(NamedTuple):
    """One message as it came in. ``peer`` is empty where it came by another socket than control. ``stays``: the payload
    lies in shared memory, where nobody touches it before its version has passed."""

    peer: Peer
    message: Message | Malformed | Subscribed
    payload: Payload = None
    stays: bool = False


class ServerTransport(Protocol):
    def receive(self, timeout_s: float) -> Arrival | None:
        """The next arrival, or None after ``timeout_s`` or when the loop was woken."""

    def send(self, peer: Peer, message: Message, payload: Payload = None) -> None:
        """To one worker, over control. ``payload`` is not copied: see ``share``."""

    def publish(self, message: Message, payload: Payload = None) -> None:
        """To all subscribers, over weights. ``payload`` is not copied: see ``share``."""

    def share(self, size_bytes: int) -> Payload:
        """Zeroed memory to publish weights from, called once. Workers that can, read them where they lie. What was
        published may be overwritten once its step is closed: whoever still reads it then can only send what is too
        old to count."""

    def lend(self, member: int, size_bytes: int) -> None:
        """Have memory for the gradients of ``member``, which its Welcome will tell it of."""

    def reclaim(self, member: int) -> None:
        """``member`` is gone; what has arrived from it stays readable."""

    def describe(self, member: int) -> tuple[Segment | None, Segment | None]:
        """What a Welcome says of shared and of lent memory; None where there is none to map."""


class WorkerTransport(Protocol):
    def receive(self, timeout_s: float) -> Arrival | None:
        """The next arrival, or None after ``timeout_s`` or when the loop was woken."""

    def send(self, message: Message) -> None:
        """To the PS, over control. Dropped when the queue of the connection is full."""

    def push(self, contribution: Contribution, payload: Payload) -> bool:
        """To the PS, over gradients; False, at once, when the queue is full. ``payload`` is not copied."""

    def follow(self, welcome: Welcome, gradients: str, weights: str, bucket_bytes: int) -> None:
        """Connect the data sockets after a welcome, to these addresses, map its memory where that works, and
        subscribe."""

    def lent(self) -> Payload:
        """Memory to make gradients in, which the PS reads where they lie; None where it has to be sent. What was pushed
        may be overwritten once its version has passed."""

    def around(self, payload: Payload, before_bytes: int, size_bytes: int) -> Payload:
        """The memory around a payload of weights, read-only, if it lies in what the PS shares; else None."""

    def forsake(self) -> None:
        """Disconnect the data sockets and drop what is queued: the session is over."""

    def redial(self) -> None:
        """Drop the control connection with what is queued on it, and dial anew."""

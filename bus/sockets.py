"""The transports over ZeroMQ; the only module that imports zmq. docs/protocol.md says who speaks when.

Each object is owned by the thread that made it: sockets are not thread-safe, and only ``Waker.wake`` may be called from
elsewhere. Every queue has a bound in messages, derived from the number of buckets, and every message a bound in bytes.
"""

import contextlib
import errno
import math
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq

from bus import codec
from bus.codec import Bytes, Place
from bus.endpoints import Endpoint, bind_address, parse, port_holder
from bus.errors import EndpointError, ProtocolError, WireError
from bus.layout import zeros
from bus.messages import (
    Contribution,
    Evaluate,
    Malformed,
    Message,
    Plan,
    Segment,
    Stop,
    Subscribed,
    Weights,
    Welcome,
)
from bus.settings import BusSettings
from bus.shm import SharedMemory, attach, create
from bus.transport import Arrival, Payload, Peer

FREE_PORTS = (20_000, 32_000)  # below what Linux, macOS and Windows give to outgoing connections
IN_A_ROW = 8
WAKES_BYTES = 4096
# What zmq.Socket adds to these, such as enums made of numbers, costs more than they do: 18 us for three small frames
# instead of 3.
_Socket = zmq.backend.Socket
_DONTWAIT, _SNDMORE, _RCVMORE = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.RCVMORE)
_BULK = frozenset({Weights.kind, Contribution.kind, Evaluate.kind})
BIND_RETRY_S = 5.0  # a port of a process that was just killed is free again within this time
LINGER_MS = 1000
CONTROL_LIMIT_BYTES = 2 << 20  # nothing a worker says over control is larger
SUBSCRIBER_QUEUE_BYTES = 64 << 20  # what a stuck subscriber may hold; beyond it TCP pushes back, and the PS drops
VERSIONS_QUEUED = 3  # per subscriber; a slower one loses weights, notices the gap and fetches
# A subscriber's last topic, which tells the PS that all of them are there. ZeroMQ sends subscriptions in the order of
# their bytes, not in that of the calls, and "~" comes after all letters.
_MEMBER_TOPIC = b"~%07d"


class Waker:
    """Ends a wait in another thread, or from a signal handler, through ``signal.set_wakeup_fd(waker.fileno())``."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._write.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wake-ups: awake already; or closed, and nobody waits any more
            self._write.send(b"\0")

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._read, zmq.POLLIN)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._read.recv(WAKES_BYTES)) == WAKES_BYTES:
                pass

    def close(self) -> None:
        self._read.close()
        self._write.close()


class _Sockets:
    """What both sides share: a context, a poller, and taking messages from several sockets in turn."""

    def __init__(self, io_threads: int, settings: BusSettings) -> None:
        self._context = zmq.Context(io_threads)
        self._settings = settings
        self._poller = zmq.Poller()
        self._open: list[zmq.Socket[bytes]] = []
        self._names: dict[zmq.Socket[bytes], str] = {}  # of the sockets that are received from
        self._ready: deque[zmq.Socket[bytes]] = deque()  # those that may have something since the last poll
        self._in_a_row = 0  # messages that may be taken before the next
        self.waker = Waker()
        self.waker.watch(self._poller)

    def receive(self, timeout_s: float) -> Arrival | None:
        if self._in_a_row and (arrival := self._next()) is not None:
            return arrival
        self._ready.clear()
        self._in_a_row = IN_A_ROW
        for each, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            if each in self._names:
                self._ready.append(each)
            else:
                self.waker.drain()
        return self._next()

    def _next(self) -> Arrival | None:
        """A message of the sockets that had any, in turn; after a few a new look at all: no socket starves another."""
        while self._ready:
            inbox = self._ready.popleft()
            try:
                frames = _receive(inbox)
            except zmq.Again:
                continue
            self._ready.append(inbox)
            self._in_a_row -= 1
            return self._arrival(self._names[inbox], frames)
        return None

    def _arrival(self, name: str, frames: list[memoryview]) -> Arrival | None:
        return self._decoded(name, b"", frames)

    def _decoded(self, name: str, peer: Peer, frames: list[memoryview]) -> Arrival:
        try:
            message, payload = codec.decode(frames)
            if isinstance(payload, Place):
                return Arrival(peer, message, self._at(message, payload), stays=True)
            return Arrival(peer, message, payload)
        except WireError as error:
            return Arrival(peer, Malformed(name, str(error), isinstance(error, ProtocolError)))

    def _at(self, message: Message, place: Place) -> Bytes:
        """What a peer says lies in shared memory. Raises WireError."""
        memory = self._memory_of(message)
        found = memory.at(place) if memory else None
        if found is None:
            raise WireError(f"{type(message).__name__.lower()}: found a payload at {place}, where no shared memory is")
        return found

    def _memory_of(self, message: Message) -> SharedMemory | None:
        """Where the payload of a message of this kind may lie."""
        return None

    def _socket(self, kind: int, **options: int | bytes) -> "zmq.Socket[bytes]":
        """A socket with the options that all have, and those given by name; they only work before connect or bind."""
        made = self._context.socket(kind)
        self._open.append(made)
        made.set(zmq.LINGER, LINGER_MS)
        # Connections to a machine that is gone are noticed by TCP. ZeroMQ's own heartbeats (HEARTBEAT_IVL) would end
        # this process if a peer dies while its queue here is full: libzmq 4.3.5, issue 4841.
        beat_s, timeout_s = max(1, round(self._settings.heartbeat_s)), self._settings.heartbeat_timeout_s
        made.set(zmq.TCP_KEEPALIVE, 1)
        made.set(zmq.TCP_KEEPALIVE_IDLE, beat_s)
        made.set(zmq.TCP_KEEPALIVE_INTVL, beat_s)
        made.set(zmq.TCP_KEEPALIVE_CNT, max(1, min(127, round(timeout_s / beat_s))))
        made.set(zmq.TCP_MAXRT, round(timeout_s * 1000))
        made.set(zmq.RECONNECT_IVL, 100)
        made.set(zmq.RECONNECT_IVL_MAX, 500)
        for name, value in options.items():
            made.set(getattr(zmq, name), value)
        return made

    def _listen(self, name: str, inbox: "zmq.Socket[bytes]") -> None:
        self._names[inbox] = name
        self._poller.register(inbox, zmq.POLLIN)

    def _stamped(self, message: Message, payload: Payload) -> Message:
        """With a checksum, where the run wants them."""
        if self._settings.checksum and isinstance(message, Contribution | Weights | Evaluate):
            return codec.with_checksum(message, payload)
        return message

    def _close(self, *sockets: "zmq.Socket[bytes] | None") -> None:
        for each in sockets:
            if each is not None and not each.closed:
                if each in self._poller:
                    self._poller.unregister(each)
                self._names.pop(each, None)
                each.close()
        self._ready = deque(each for each in self._ready if not each.closed)
        self._open = [each for each in self._open if not each.closed]

    def close(self, *, linger: bool = True) -> None:
        """Close everything; what is queued gets ``LINGER_MS`` to leave, if it is to ``linger``."""
        for each in self._open:
            each.set(zmq.LINGER, LINGER_MS if linger else 0)
        self._close(*self._open)
        self._context.term()
        self.waker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ServerSockets(_Sockets):
    """The PS's side. Binds control (ROUTER), gradients (PULL) and weights (XPUB) on one host: on three free ports, or
    on the port given and the two after it; or on the three ``addresses`` of a PS that it replaces. Raises
    EndpointError."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        bucket_bytes: int,
        buckets: int,
        addresses: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(settings.io_threads, settings)
        self._shared: SharedMemory | None = None
        self._lent: dict[int, SharedMemory] = {}
        self._bulk_wanted = False  # somebody subscribes to weights that travel
        queue = VERSIONS_QUEUED * buckets + min(64, _bucket_queue(bucket_bytes))
        self._control = self._socket(
            zmq.ROUTER, ROUTER_HANDOVER=1, SNDHWM=queue, RCVHWM=1000, MAXMSGSIZE=CONTROL_LIMIT_BYTES
        )
        self._gradients = self._socket(zmq.PULL, RCVHWM=buckets + 8, MAXMSGSIZE=bucket_bytes + CONTROL_LIMIT_BYTES)
        # VERBOSE: a subscription is heard though somebody else has the same, such as a worker of an earlier session.
        self._weights = self._socket(zmq.XPUB, XPUB_VERBOSE=1, SNDHWM=queue, RCVHWM=1000, MAXMSGSIZE=4096)
        try:
            endpoints = [parse(address) for address in addresses or ()] or _three(parse(settings.bind))
            self.control, self.gradients, self.weights = (
                self._bind(each, endpoint)
                for each, endpoint in zip((self._control, self._gradients, self._weights), endpoints, strict=True)
            )
        except EndpointError:
            self.close()
            raise
        self._listen("control", self._control)
        self._listen("gradients", self._gradients)
        self._listen("weights", self._weights)

    def _bind(self, each: "zmq.Socket[bytes]", endpoint: Endpoint) -> str:
        address = bind_address(endpoint, "bus.bind")
        each.set(zmq.IPV6, int("[" in address))
        if endpoint.port is None and not endpoint.path:
            # Not of those that the system gives to outgoing connections: while a PS is away, one of them, even that of
            # a worker that dials it, could take its place (a socket can connect to itself).
            with contextlib.suppress(zmq.error.ZMQBaseError):
                each.bind_to_random_port(address.removesuffix(":*"), *FREE_PORTS)
                return each.getsockopt_string(zmq.LAST_ENDPOINT)
        give_up_at = time.monotonic() + BIND_RETRY_S
        while True:
            try:
                each.bind(address)
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < give_up_at:
                    self._poller.poll(100)
                    continue
                raise EndpointError(_cannot_bind(address, endpoint.port, error)) from None
            return each.getsockopt_string(zmq.LAST_ENDPOINT)

    def _arrival(self, name: str, frames: list[memoryview]) -> Arrival | None:
        if name == "weights":
            frame = bytes(frames[0])
            if frame[1:] == Weights.kind:  # VERBOSE or not, the end of the last subscription is told
                self._bulk_wanted = frame[:1] == b"\1"
            return _subscription(frame)
        if name == "gradients":
            return self._decoded(name, b"", frames)
        return self._decoded(name, bytes(frames[0]), frames[1:])

    def send(self, peer: Peer, message: Message, payload: Payload = None) -> None:
        _send(self._control, [peer], self._stamped(message, payload), payload)

    def publish(self, message: Message, payload: Payload = None) -> None:
        message = self._stamped(message, payload)
        place = self._shared.find(payload) if self._shared and isinstance(message, Weights) else None
        if place is not None and isinstance(message, Weights):
            _send_frames(self._weights, codec.encode_placed(message, place))
        if place is None or self._bulk_wanted:
            _send(self._weights, [], message, payload)

    def share(self, size_bytes: int) -> Bytes:
        self._shared = create(size_bytes) if self._settings.shared_memory else None
        return self._shared.data if self._shared else zeros(size_bytes)

    def lend(self, member: int, size_bytes: int) -> None:
        if self._shared and member not in self._lent and (memory := create(size_bytes)):
            self._lent[member] = memory

    def reclaim(self, member: int) -> None:
        if member in self._lent:
            self._lent.pop(member).close()

    def describe(self, member: int) -> tuple[Segment | None, Segment | None]:
        lent = self._lent.get(member)
        return (self._shared.segment, lent.segment) if self._shared and lent else (None, None)

    def _memory_of(self, message: Message) -> SharedMemory | None:
        return self._lent.get(message.member) if isinstance(message, Contribution) else None

    def close(self, *, linger: bool = True) -> None:
        super().close(linger=linger)
        for memory in filter(None, (self._shared, *self._lent.values())):
            memory.close()


class WorkerSockets(_Sockets):
    """A worker's side: dials control (DEALER) at once, gradients (PUSH) and weights (SUB) after a welcome."""

    def __init__(self, address: str, settings: BusSettings) -> None:
        super().__init__(1, settings)
        self._address = address
        self._control: zmq.Socket[bytes] | None = None
        self._gradients: zmq.Socket[bytes] | None = None
        self._weights: zmq.Socket[bytes] | None = None
        self._published: SharedMemory | None = None
        self._lent: SharedMemory | None = None
        self.redial()

    def redial(self) -> None:
        self._close(self._control)
        # A routing id of our own, new for each dial, lets the PS know us again when TCP reconnects by itself. Not
        # IMMEDIATE: with it, what has arrived but is not read yet is lost when the PS closes the connection.
        identity = b"w" + secrets.token_bytes(15)
        self._control = self._socket(zmq.DEALER, ROUTING_ID=identity, SNDHWM=100)
        _connect(self._control, self._address)
        self._listen("control", self._control)

    def follow(self, welcome: Welcome, gradients: str, weights: str, bucket_bytes: int) -> None:
        self.forsake()
        if welcome.published and welcome.lent and self._settings.shared_memory:
            published, lent = attach(welcome.published, writable=False), attach(welcome.lent, writable=True)
            if published and lent:
                self._published, self._lent = published, lent
        # IMMEDIATE: nothing is queued for a connection that is not there, so nothing old arrives when it comes back.
        self._gradients = self._socket(zmq.PUSH, IMMEDIATE=1, SNDHWM=64)
        _connect(self._gradients, gradients)
        self._weights = self._socket(
            zmq.SUB, RCVHWM=_bucket_queue(bucket_bytes), MAXMSGSIZE=bucket_bytes + CONTROL_LIMIT_BYTES
        )
        weights_topic = codec.PLACED_WEIGHTS if self._published else Weights.kind
        for topic in (weights_topic, Plan.kind, Stop.kind, _MEMBER_TOPIC % welcome.member):
            self._weights.subscribe(topic)
        _connect(self._weights, weights)
        self._listen("weights", self._weights)

    def forsake(self) -> None:
        for each in (self._gradients, self._weights):
            if each is not None:
                each.set(zmq.LINGER, 0)
        self._close(self._gradients, self._weights)
        self._gradients = self._weights = None
        self._published = self._lent = None

    def lent(self) -> Bytes | None:
        return self._lent.data if self._lent else None

    def around(self, payload: Bytes, before_bytes: int, size_bytes: int) -> Bytes | None:
        return self._published.around(payload, before_bytes, size_bytes) if self._published else None

    def _memory_of(self, message: Message) -> SharedMemory | None:
        return self._published if isinstance(message, Weights) else None

    def send(self, message: Message) -> None:
        assert self._control is not None
        _send(self._control, [], message, None)

    def push(self, contribution: Contribution, payload: Payload) -> bool:
        if self._gradients is None:
            return False
        message = self._stamped(contribution, payload)
        place = self._lent.find(payload) if self._lent else None
        if place is not None and isinstance(message, Contribution):
            return _send_frames(self._gradients, codec.encode_placed(message, place))
        return _send(self._gradients, [], message, payload)


class ObserverSockets(_Sockets):
    """A peer that only listens: subscribes to ``kinds`` of the weights socket."""

    def __init__(self, weights: str, settings: BusSettings, kinds: tuple[bytes, ...], bucket_bytes: int) -> None:
        super().__init__(1, settings)
        self._weights = self._socket(
            zmq.SUB, RCVHWM=_bucket_queue(bucket_bytes), MAXMSGSIZE=bucket_bytes + CONTROL_LIMIT_BYTES
        )
        for kind in kinds:
            self._weights.subscribe(kind)
        _connect(self._weights, weights)
        self._listen("weights", self._weights)


def _bucket_queue(bucket_bytes: int) -> int:
    """The bound of a subscriber's queue in messages: ZeroMQ does not count bytes."""
    return min(1000, max(4, SUBSCRIBER_QUEUE_BYTES // bucket_bytes))


def _three(first: Endpoint) -> list[Endpoint]:
    """For control, gradients and weights: neighbouring ports, any three free ones, or Unix sockets."""
    if first.path:
        return [first._replace(path=first.path + name) for name in ("", ".gradients", ".weights")]
    return [first._replace(port=None if first.port is None else first.port + offset) for offset in range(3)]


def _connect(each: "zmq.Socket[bytes]", address: str) -> None:
    each.set(zmq.IPV6, int("[" in address))
    each.connect(address)


def _receive(inbox: "zmq.Socket[bytes]") -> list[memoryview]:
    """The frames of one message: small ones copied, which is cheaper, bulk where it lies. Raises zmq.Again if there is
    none."""
    first = _Socket.recv(inbox, _DONTWAIT)
    frames = [memoryview(first)]
    while _Socket.get(inbox, _RCVMORE):
        if len(frames) >= 2 and first in _BULK:
            frames.append(inbox.recv(copy=False).buffer)
        else:
            frames.append(memoryview(_Socket.recv(inbox)))
    return frames


def _send_frames(target: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> bool:
    """Small frames, copied; False where the queue is full or nobody is connected."""
    try:
        for frame in frames[:-1]:
            _Socket.send(target, frame, _DONTWAIT | _SNDMORE)
        _Socket.send(target, frames[-1], _DONTWAIT)
    except zmq.Again:
        return False  # at the first frame: what has begun is finished
    return True


def _send(target: "zmq.Socket[bytes]", route: list[bytes], message: Message, payload: Bytes | None) -> bool:
    """False where the queue is full or nobody is connected; a message is sent whole or not at all."""
    frames = [*route, *codec.encode(message)]
    if payload is None:
        return _send_frames(target, frames)
    try:
        target.send_multipart([*frames, payload.data], zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    return True


def _subscription(frame: bytes) -> Arrival | None:
    """Subscriptions come as frames of their own; only a worker's last one says something."""
    topic = frame[1:]
    if frame[:1] == b"\1" and len(topic) == codec.KIND_BYTES and topic[:1] == _MEMBER_TOPIC[:1] and topic[1:].isdigit():
        return Arrival(b"", Subscribed(int(topic[1:])))
    return None


def _cannot_bind(address: str, port: int | None, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE and port is not None:
        holder = port_holder(port) or "another process"
        return f"bus.bind: port {port} is in use by {holder}; end it, or choose another port"
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return f"bus.bind: {address} is no address of this machine"
    return f"bus.bind: cannot bind {address}: {error.strerror}"

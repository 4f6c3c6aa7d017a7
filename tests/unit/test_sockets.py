"""The ZeroMQ transports over the loopback interface: what arrives, what does not, and that nothing ever blocks."""

import gc
import os
import pickle
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from bus import codec, sockets
from bus.codec import Bytes, Place
from bus.endpoints import parse
from bus.errors import EndpointError
from bus.layout import Layout
from bus.messages import (
    Alive,
    Contribution,
    Evaluate,
    Hello,
    Leaf,
    Malformed,
    Plan,
    Ready,
    Segment,
    Serving,
    Stop,
    Subscribed,
    Weights,
    Welcome,
)
from bus.settings import BusSettings
from bus.sockets import CONTROL_LIMIT_BYTES, FREE_PORTS, IN_A_ROW, ObserverSockets, ServerSockets, WorkerSockets
from bus.transport import Arrival

SETTINGS = BusSettings(heartbeat_s=0.2, heartbeat_timeout_s=2.0)
BUCKET_BYTES, BUCKETS = 1 << 20, 4
HELLO = Hello("w0", "lab", 40, 1, {})
LIMIT_S = 10.0  # for anything to arrive; it takes milliseconds


@pytest.fixture(autouse=True)
def no_long_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LINGER_MS", 200)


@pytest.fixture
def server(no_long_goodbyes: None) -> Iterator[ServerSockets]:
    with ServerSockets(SETTINGS, bucket_bytes=BUCKET_BYTES, buckets=BUCKETS) as made:
        yield made


@pytest.fixture
def worker(server: ServerSockets) -> Iterator[WorkerSockets]:
    with WorkerSockets(server.control, SETTINGS) as made:
        yield made


Raw = Callable[[int], "zmq.Socket[bytes]"]


@pytest.fixture
def raw() -> Iterator[Raw]:
    """Makes sockets for peers that speak ZeroMQ but not our protocol."""
    context, made = zmq.Context(), []

    def make(kind: int) -> "zmq.Socket[bytes]":
        made.append(context.socket(kind))
        return made[-1]

    yield make
    context.destroy(linger=0)


def receive(transport: Any, kind: type[Any]) -> Arrival:
    """The next arrival that is a ``kind``; whatever comes before it is passed over."""
    give_up_at = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_at:
        arrival = transport.receive(1.0)
        if arrival is not None and isinstance(arrival.message, kind):
            return arrival  # type: ignore[no-any-return]
    raise AssertionError(f"no {kind.__name__} within {LIMIT_S} s")


def join(server: ServerSockets, worker: WorkerSockets, member: int = 1) -> None:
    worker.follow(welcome(member), server.gradients, server.weights, BUCKET_BYTES)
    assert receive(server, Subscribed).message == Subscribed(member)


def welcome(member: int, *segments: Segment | None) -> Welcome:
    return Welcome(7, member, 0, "{}", (), BUCKET_BYTES, "", "", 1.0, 10.0, *segments)


def pattern(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def weights(version: int, bucket: int = 0) -> Weights:
    return Weights(9, version, bucket, 1, ())


def gradient(bucket: int = 0) -> Contribution:
    return Contribution(9, 1, 0, bucket, 0, 4, 8, {"loss": 1.0})


def serves(server: ServerSockets) -> bool:
    """Whether a worker that comes now is heard and answered, on all three sockets."""
    with WorkerSockets(server.control, SETTINGS) as worker:
        worker.send(HELLO)
        hello = receive(server, Hello)
        server.send(hello.peer, Serving(9, 0, 0, ()))
        receive(worker, Serving)
        join(server, worker, member=77)
        server.publish(weights(3), pattern(100))
        receive(worker, Weights)
        assert push(worker, gradient(), pattern(100))
        return receive(server, Contribution).message == gradient()


def push(worker: WorkerSockets, contribution: Contribution, payload: Bytes) -> bool:
    """As the loop does: again while nobody is connected yet."""
    give_up_at = time.monotonic() + LIMIT_S
    while not worker.push(contribution, payload):
        assert time.monotonic() < give_up_at
        worker.receive(0.01)
    return True


# What is said arrives


def test_control_goes_both_ways(server: ServerSockets, worker: WorkerSockets) -> None:
    worker.send(HELLO)
    arrival = receive(server, Hello)
    assert arrival.message == HELLO and arrival.payload is None
    server.send(arrival.peer, Serving(9, 4, 1, ((0, 2),)))
    back = receive(worker, Serving)
    assert back == Arrival(b"", Serving(9, 4, 1, ((0, 2),)), None)


@pytest.mark.parametrize("size", [0, 64, 63 << 10, 65 << 10, BUCKET_BYTES])
def test_bulk_arrives_bit_for_bit(server: ServerSockets, worker: WorkerSockets, size: int) -> None:
    """Also around 64 KiB, where ZeroMQ stops copying."""
    worker.send(HELLO)
    peer = receive(server, Hello).peer
    join(server, worker)
    payload = pattern(size)
    server.publish(weights(1), payload)
    assert np.array_equal(receive(worker, Weights).payload, payload)
    server.send(peer, weights(2), payload)
    assert np.array_equal(receive(worker, Weights).payload, payload)
    push(worker, gradient(), payload)
    arrival = receive(server, Contribution)
    assert arrival.message == gradient() and np.array_equal(arrival.payload, payload)


def test_a_gradient_can_be_added_to_where_it_lies(server: ServerSockets, worker: WorkerSockets) -> None:
    join(server, worker)
    ones = np.ones(1000, np.float32)
    for _ in range(2):
        push(worker, gradient(), ones.view(np.uint8))
    one, two = (receive(server, Contribution).payload.view(np.float32) for _ in range(2))
    np.add(one, two, out=one)
    assert (one == 2).all()


def test_an_array_larger_than_any_message_arrives_in_pieces(server: ServerSockets, worker: WorkerSockets) -> None:
    layout = Layout([Leaf("w", "float32", (10_000_001,), "trainable")], BUCKET_BYTES)
    assert len(layout.buckets) == 39
    join(server, worker)
    sent, received = layout.pack([pattern(40_000_004).view(np.float32)]), layout.empty()
    for index in range(39):
        server.publish(weights(1, index), layout.bucket(sent, index))
        arrival = receive(worker, Weights)
        layout.bucket(received, arrival.message.bucket)[:] = arrival.payload  # type: ignore[union-attr]
    assert np.array_equal(received, sent)


def test_what_was_handed_over_is_safe_from_the_garbage_collector(server: ServerSockets, worker: WorkerSockets) -> None:
    join(server, worker)
    for version in range(2 * BUCKETS):
        server.publish(weights(version), pattern(200_000, version))
        gc.collect()
    for version in range(2 * BUCKETS):
        arrival = receive(worker, Weights)
        assert arrival.message == weights(version) and np.array_equal(arrival.payload, pattern(200_000, version))


@pytest.mark.parametrize("attempt", range(5))
def test_nothing_is_lost_that_is_published_once_a_member_has_subscribed(attempt: int, server: ServerSockets) -> None:
    with WorkerSockets(server.control, SETTINGS) as worker:
        join(server, worker, member=attempt)
        server.publish(weights(1), pattern(10))
        server.publish(Plan(9, 1, 2, ()))
        server.publish(Stop(9, 1, "done"))
        arrived = [worker.receive(LIMIT_S) for _ in range(3)]
    assert [type(arrival.message) for arrival in arrived if arrival] == [Weights, Plan, Stop]


def test_the_word_that_all_is_subscribed_arrives_last(raw: Raw) -> None:
    """ZeroMQ sends subscriptions in an order of its own."""
    publisher = raw(zmq.XPUB)
    publisher.bind("tcp://127.0.0.1:*")
    puller = raw(zmq.PULL)
    puller.bind("tcp://127.0.0.1:*")
    addresses = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (puller, publisher)]
    with WorkerSockets(addresses[0], SETTINGS) as worker:
        worker.follow(welcome(12), *addresses, BUCKET_BYTES)
        topics = []
        for _ in range(4):
            assert publisher.poll(int(LIMIT_S * 1000))
            topics.append(publisher.recv()[1:])
    assert set(topics[:3]) == {Weights.kind, Plan.kind, Stop.kind} and topics[3].endswith(b"0000012")


def test_each_word_of_having_subscribed_is_heard_though_someone_has_said_the_same_before(
    server: ServerSockets, worker: WorkerSockets
) -> None:
    """To a PS that was started again come subscriptions of the session before: sockets reconnect by themselves, before
    their workers know. Its own members have the same numbers."""
    join(server, worker, member=1)
    with WorkerSockets(server.control, SETTINGS) as other:
        join(server, other, member=1)


def test_an_observer_hears_what_it_asked_for_and_nothing_else(server: ServerSockets) -> None:
    with ObserverSockets(server.weights, SETTINGS, (Evaluate.kind,), BUCKET_BYTES) as observer:
        arrival = None
        give_up_at = time.monotonic() + LIMIT_S
        while arrival is None and time.monotonic() < give_up_at:  # nobody is told when an observer has subscribed
            server.publish(weights(1), pattern(10))
            server.publish(Evaluate(9, 1, 0), pattern(10))
            arrival = observer.receive(0.05)
        assert arrival is not None and arrival.message == Evaluate(9, 1, 0)
    assert server.receive(0.0) is None, "an observer is no member"


@pytest.mark.parametrize("checksum", [False, True])
def test_bulk_carries_a_checksum_where_the_run_wants_one(checksum: bool) -> None:
    settings = BusSettings(checksum=checksum)
    payload = pattern(1000)
    expected = codec.checksum(payload) if checksum else None
    with (
        ServerSockets(settings, bucket_bytes=BUCKET_BYTES, buckets=1) as server,
        WorkerSockets(server.control, settings) as worker,
    ):
        worker.send(HELLO)
        peer = receive(server, Hello).peer
        join(server, worker)
        server.send(peer, weights(1), payload)
        assert receive(worker, Weights).message.checksum == expected  # type: ignore[union-attr]
        server.publish(weights(2), payload)
        assert receive(worker, Weights).message.checksum == expected  # type: ignore[union-attr]
        push(worker, gradient(), payload)
        assert receive(server, Contribution).message.checksum == expected  # type: ignore[union-attr]


def test_a_flood_of_gradients_does_not_hold_up_heartbeats(server: ServerSockets, worker: WorkerSockets) -> None:
    join(server, worker)

    def flood() -> None:
        while worker.push(gradient(), pattern(1000)):
            pass

    flood()
    worker.send(Alive(9, 1, 0, "idle"))
    assert server._control.poll(LIMIT_S * 1000) and server._gradients.poll(LIMIT_S * 1000)
    seen: list[type] = []
    while Alive not in seen:
        arrival = server.receive(LIMIT_S)
        assert arrival is not None and len(seen) <= IN_A_ROW, seen
        seen.append(type(arrival.message))
        flood()


# Peers that come and go


def test_a_worker_finds_a_server_that_was_started_again(worker: WorkerSockets, server: ServerSockets) -> None:
    worker.send(HELLO)
    receive(server, Hello)
    port = parse(server.control).port
    assert port is not None and port in range(*FREE_PORTS), "so that no outgoing connection takes it meanwhile"
    server.close()
    again = BusSettings(bind=f"tcp://127.0.0.1:{port}", heartbeat_s=0.2, heartbeat_timeout_s=2.0)
    with ServerSockets(again, bucket_bytes=BUCKET_BYTES, buckets=BUCKETS) as reborn:
        worker.send(HELLO)
        assert receive(reborn, Hello).message == HELLO


def test_a_worker_that_dials_anew_is_another_peer(server: ServerSockets, worker: WorkerSockets) -> None:
    worker.send(HELLO)
    first = receive(server, Hello).peer
    worker.redial()
    worker.send(HELLO)
    second = receive(server, Hello).peer
    assert first != second
    server.send(first, Stop(9, 0, "to nobody"))
    server.send(second, Serving(9, 0, 0, ()))
    assert isinstance(receive(worker, Serving).message, Serving)


def test_a_message_to_nobody_is_dropped(server: ServerSockets) -> None:
    server.send(b"no such peer", Stop(9, 0, "done"))
    server.publish(weights(1), pattern(100))
    assert serves(server)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_nothing_blocks_while_there_is_no_server() -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with WorkerSockets(nowhere, SETTINGS) as worker:
        assert worker.push(gradient(), pattern(100)) is False, "not welcome yet"
        for _ in range(300):
            worker.send(HELLO)
        worker.follow(welcome(1), nowhere, nowhere, BUCKET_BYTES)
        assert worker.push(gradient(), pattern(100)) is False
        assert worker.receive(0.0) is None
        worker.forsake()
        assert worker.push(gradient(), pattern(100)) is False
    assert time.monotonic() - began < 2.0


def test_a_server_that_does_not_read_makes_push_say_no(server: ServerSockets, worker: WorkerSockets) -> None:
    join(server, worker)
    push(worker, gradient(), pattern(BUCKET_BYTES))
    pushed = 1
    while worker.push(gradient(), pattern(BUCKET_BYTES)):
        pushed += 1
        assert pushed < 1000
    receive(server, Contribution)
    assert serves(server)


@pytest.mark.parametrize("queued", ["gradients", "weights"])
def test_closing_ends_though_the_other_side_reads_nothing(queued: str) -> None:
    server = ServerSockets(SETTINGS, bucket_bytes=BUCKET_BYTES, buckets=BUCKETS)
    worker = WorkerSockets(server.control, SETTINGS)
    join(server, worker)
    if queued == "gradients":
        push(worker, gradient(), pattern(BUCKET_BYTES))
        while worker.push(gradient(), pattern(BUCKET_BYTES)):
            pass
    for version in range(100):
        server.publish(weights(version), pattern(BUCKET_BYTES))
    first, second = (worker, server) if queued == "gradients" else (server, worker)
    for side in (first, second):
        began = time.monotonic()
        side.close()
        assert time.monotonic() - began < 3.0


def test_a_worker_that_dies_while_the_server_is_full_of_its_gradients_takes_nobody_along(server: ServerSockets) -> None:
    """libzmq ends the process where its own heartbeats meet such a connection (its issue 4841)."""
    worker = WorkerSockets(server.control, SETTINGS)
    join(server, worker)
    while worker.push(gradient(), pattern(BUCKET_BYTES)):
        pass
    worker.close(linger=False)
    server._control.poll(5 * SETTINGS.heartbeat_s * 1000)  # nothing is read, and nothing comes
    assert serves(server)


def test_a_subscriber_that_does_not_read_costs_the_server_neither_time_nor_order(
    server: ServerSockets, worker: WorkerSockets
) -> None:
    join(server, worker)
    payload = pattern(BUCKET_BYTES)
    began = time.monotonic()
    for version in range(200):
        server.publish(weights(version), payload)
    assert time.monotonic() - began < 5.0
    versions = []
    while arrival := worker.receive(0.3):
        versions.append(arrival.message.version)  # type: ignore[union-attr]
    assert versions == sorted(set(versions)) and versions[0] == 0
    assert serves(server)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 4 << 20])
def test_what_a_subscriber_that_does_not_read_holds_back_is_bounded_in_bytes(bucket_bytes: int, raw: Raw) -> None:
    """ZeroMQ counts messages. A model of 13 buckets."""
    patient = BusSettings(heartbeat_s=1.0, heartbeat_timeout_s=60.0)  # or it is soon cut off
    with ServerSockets(patient, bucket_bytes=bucket_bytes, buckets=13) as server:
        subscriber = raw(zmq.SUB)
        subscriber.set(zmq.RCVHWM, 1)
        subscriber.connect(server.weights)
        subscriber.subscribe(Weights.kind)
        subscriber.subscribe(b"~0000001")
        assert receive(server, Subscribed)
        held: list[weakref.ref[Bytes]] = []
        for version in range(200):
            payload = np.zeros(bucket_bytes, np.uint8)  # memory that is never touched costs nothing
            held.append(weakref.ref(payload))
            server.publish(weights(version), payload)
        del payload
        limit_bytes = sockets.SUBSCRIBER_QUEUE_BYTES + sockets.VERSIONS_QUEUED * 13 * bucket_bytes
        limit_bytes += 8 << 20  # in the hands of the kernel
        give_up_at = time.monotonic() + LIMIT_S  # what was dropped is let go by a thread of pyzmq
        while sum(each() is not None for each in held) * bucket_bytes > limit_bytes:
            assert time.monotonic() < give_up_at
            server.receive(0.01)


def test_closing_ends_at_once_though_the_other_side_was_killed_with_gradients_on_their_way() -> None:
    server = ServerSockets(SETTINGS, bucket_bytes=BUCKET_BYTES, buckets=BUCKETS)
    worker = WorkerSockets(server.control, SETTINGS)
    join(server, worker)
    push(worker, gradient(), pattern(BUCKET_BYTES))
    queued = 1
    while worker.push(gradient(), pattern(BUCKET_BYTES)):
        queued += 1
    server.close(linger=False)
    began = time.monotonic()
    worker.close(linger=False)
    assert queued > BUCKETS and time.monotonic() - began < 2.0


# Waking


def test_a_wait_is_ended_from_another_thread(server: ServerSockets) -> None:
    began = time.monotonic()
    thread = threading.Thread(target=server.waker.wake)
    thread.start()
    assert server.receive(30.0) is None
    thread.join()
    assert time.monotonic() - began < 10.0


def test_a_wait_is_ended_by_a_signal(server: ServerSockets) -> None:
    """The handler only sets a flag: Python would go on waiting after it, were it not for the wake-up descriptor."""
    flags: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: flags.append(number))
    descriptor = signal.set_wakeup_fd(server.waker.fileno())
    try:
        began = time.monotonic()
        thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        thread.start()
        assert server.receive(30.0) is None
        thread.join()
        assert flags == [signal.SIGUSR1] and time.monotonic() - began < 10.0
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGUSR1, before)


def test_waking_more_often_than_anyone_listens_does_not_block_and_hides_no_message(
    server: ServerSockets, worker: WorkerSockets
) -> None:
    for _ in range(5000):
        server.waker.wake()
    worker.send(HELLO)
    assert receive(server, Hello)
    assert server.receive(0.0) is None


def test_to_wake_who_has_closed_is_harmless() -> None:
    """A shard may be finished after the worker has left."""
    worker = WorkerSockets(f"tcp://127.0.0.1:{free_port()}", SETTINGS)
    worker.close()
    worker.waker.wake()


# Binding


def at(port: int) -> BusSettings:
    return BusSettings(bind=f"tcp://127.0.0.1:{port}")


def three_free_ports() -> int:
    """The first of three neighbours that are free now."""
    for _ in range(100):
        first = free_port()
        try:
            for port in (first, first + 1, first + 2):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no three ports in a row")


def test_a_port_and_the_two_after_it_are_bound() -> None:
    port = three_free_ports()
    with ServerSockets(at(port), bucket_bytes=64, buckets=1) as server:
        found = [server.control, server.gradients, server.weights]
    assert found == [f"tcp://127.0.0.1:{port + offset}" for offset in range(3)]


def test_the_same_ports_are_bound_again_at_once() -> None:
    port = three_free_ports()
    for _ in range(5):
        with (
            ServerSockets(at(port), bucket_bytes=64, buckets=1) as server,
            WorkerSockets(server.control, SETTINGS) as worker,
        ):
            worker.send(HELLO)
            receive(server, Hello)
            join(server, worker)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_who_holds_a_port_is_named(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "BIND_RETRY_S", 0.05)
    port = three_free_ports()
    with socket.create_server(("127.0.0.1", port + offset)):
        said = rf"^bus\.bind: port {port + offset} is in use by process {os.getpid()} \(.*; end it, or choose another"
        with pytest.raises(EndpointError, match=said):
            ServerSockets(at(port), bucket_bytes=64, buckets=1)
    ServerSockets(at(port), bucket_bytes=64, buckets=1).close()  # nothing of the failure is left


def test_a_port_that_becomes_free_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    port = three_free_ports()
    holder = socket.create_server(("127.0.0.1", port))
    monkeypatch.setattr(zmq.Poller, "poll", lambda self, timeout=None: holder.close() or [])
    with ServerSockets(at(port), bucket_bytes=64, buckets=1) as server:
        assert server.control == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("bind", "said"),
    [
        ("tcp://127.0.0.1:99999", "found port '99999', expected a number from 1 to 65535"),
        ("tcp://203.0.113.7:*", r"^bus\.bind: tcp://203\.0\.113\.7:\* is no address of this machine"),
        ("tcp://127.0.0.1:65534", r"^bus\.bind: cannot bind tcp://127\.0\.0\.1:65536"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named_and_nothing_stays_open(bind: str, said: str) -> None:
    with pytest.raises(EndpointError, match=said):
        ServerSockets(BusSettings(bind=bind), bucket_bytes=64, buckets=1)
    gc.collect()  # a context that was left open warns, and warnings are errors


@pytest.mark.parametrize("bind", ["tcp://localhost:*", "tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::1]:*"])
def test_names_and_wildcards_can_be_bound_and_reached(bind: str) -> None:
    with ServerSockets(BusSettings(bind=bind), bucket_bytes=64, buckets=1) as server:
        host = "[::1]" if "::1" in bind else "127.0.0.1"
        with WorkerSockets(f"tcp://{host}:{parse(server.control).port}", SETTINGS) as worker:
            worker.send(HELLO)
            assert receive(server, Hello).message == HELLO


# Nonsense


NONSENSE = {
    "a request of the web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "64 times FF": b"\xff" * 64,
    "a frame of 2**63 bytes": b"\xff" + struct.pack(">Q", 2**63 - 1) + b"\x7f",
    "half a greeting": b"\xff\0\0\0\0\0\0\0\1\x7f\3",
    "a greeting and no more": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0"),
    "a greeting and a giant": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0") + b"\2" + b"\x7f" * 8,
    "ten bytes": bytes(range(10)),
    "nothing": b"",
}


@pytest.mark.parametrize("name", ["control", "gradients", "weights"])
def test_a_port_scan_does_no_harm(name: str, server: ServerSockets) -> None:
    port = parse(getattr(server, name)).port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for nonsense in NONSENSE.values():
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(nonsense)
        arrival = server.receive(0.02)
        assert arrival is None or isinstance(arrival.message, Malformed)
    assert serves(server)
    for connection in silent:
        connection.close()


BOMB = pickle.dumps(threading.Event)
KIND, HEADER = codec.encode(gradient())
CRAFTED: dict[str, list[bytes]] = {
    "one empty frame": [b""],
    "one frame": [b"hello"],
    "only a kind": [KIND],
    "no payload": [KIND, HEADER],
    "half a header": [KIND, HEADER[:-3], b"payload"],
    "another release": [KIND, b"\x92\x63\x01", b"payload"],
    "too many frames": [KIND, HEADER, b"", b""],
    "hundreds of frames": [b"x"] * 300,
    "a pickle": [BOMB, BOMB, BOMB],
    "a kind and a pickle": [KIND, BOMB, BOMB],
    "a header of two megabytes": [KIND, b"x" * ((1 << 20) + 5), b""],
}


@pytest.mark.parametrize("frames", CRAFTED.values(), ids=CRAFTED.keys())
@pytest.mark.parametrize(("name", "kind"), [("control", zmq.DEALER), ("gradients", zmq.PUSH)])
def test_crafted_messages_are_refused_with_the_socket_they_came_by(
    name: str, kind: int, frames: list[bytes], server: ServerSockets, raw: Raw
) -> None:
    peer = raw(kind)
    peer.connect(getattr(server, name))
    peer.send_multipart(frames)
    malformed = receive(server, Malformed).message
    assert isinstance(malformed, Malformed)
    assert malformed.socket == name and "\n" not in malformed.reason and len(malformed.reason) < 300
    peer.send_multipart(codec.encode(Ready(9, 1, "cpu")))
    assert receive(server, Ready), "the next message of the same peer is heard"


@pytest.mark.parametrize("name", ["control", "gradients"])
def test_a_message_beyond_the_limit_never_gets_in(name: str, server: ServerSockets, raw: Raw) -> None:
    peer = raw(zmq.DEALER if name == "control" else zmq.PUSH)
    peer.connect(getattr(server, name))
    peer.send_multipart([KIND, HEADER, b"x" * (BUCKET_BYTES + CONTROL_LIMIT_BYTES + 1)])
    assert server.receive(0.2) is None
    assert serves(server)


def test_subscriptions_are_no_words(server: ServerSockets, raw: Raw) -> None:
    peer = raw(zmq.XSUB)
    peer.connect(server.weights)
    for nonsense in (b"\1", b"\1~00000x1", b"\1~001", b"\1~00000001", b"\0~0000001", b"hello", b"\1" + b"x" * 3000):
        peer.send(nonsense)
    peer.send_multipart([b"\1~", b"0000001"])
    peer.send(b"\1~0000005")
    assert receive(server, Subscribed).message == Subscribed(5)
    assert server.receive(0.0) is None


def test_a_worker_survives_nonsense_too(raw: Raw) -> None:
    """From something at the PS's address that is no PS, or one of another release."""
    fakes: dict[str, zmq.Socket[bytes]] = {}
    for name, kind in (("control", zmq.ROUTER), ("gradients", zmq.PULL), ("weights", zmq.XPUB)):
        fakes[name] = raw(kind)
        fakes[name].bind("tcp://127.0.0.1:*")
    address = {name: fake.getsockopt_string(zmq.LAST_ENDPOINT) for name, fake in fakes.items()}
    with WorkerSockets(address["control"], SETTINGS) as worker:
        worker.send(HELLO)
        assert fakes["control"].poll(int(LIMIT_S * 1000))
        peer = fakes["control"].recv_multipart()[0]
        for frames in CRAFTED.values():
            fakes["control"].send_multipart([peer, *frames])
            malformed = receive(worker, Malformed).message
            assert isinstance(malformed, Malformed) and malformed.socket == "control"
        worker.follow(welcome(1), address["gradients"], address["weights"], BUCKET_BYTES)
        for _ in range(4):
            assert fakes["weights"].poll(int(LIMIT_S * 1000))
            fakes["weights"].recv()
        for frames in ([Weights.kind], [Weights.kind, BOMB, b""], [Plan.kind, b"\xc1"], [Stop.kind + b"!", HEADER]):
            fakes["weights"].send_multipart(frames)
            malformed = receive(worker, Malformed).message
            assert isinstance(malformed, Malformed) and malformed.socket == "weights"


# Shared memory


def sharing(server: ServerSockets, worker: WorkerSockets, member: int = 1) -> tuple[Bytes, Bytes]:
    """Memory of the server, and what it lends to the worker, who has joined."""
    shared = server.share(2 * BUCKET_BYTES)
    server.lend(member, 2 * BUCKET_BYTES)
    worker.follow(welcome(member, *server.describe(member)), server.gradients, server.weights, BUCKET_BYTES)
    receive(server, Subscribed)
    lent = worker.lent()
    assert lent is not None
    return shared, lent


def test_on_one_host_only_notices_travel(server: ServerSockets, worker: WorkerSockets) -> None:
    shared, lent = sharing(server, worker)
    shared[64:128] = 7
    server.publish(weights(1), shared[64:128])
    arrival = receive(worker, Weights)
    assert (arrival.payload == 7).all() and not arrival.payload.flags.writeable
    shared[64:128] = 8
    assert (arrival.payload == 8).all(), "it is the same memory"
    around = worker.around(arrival.payload, 64, 256)
    assert around is not None and (around[64:128] == 8).all() and not around[:64].any()

    lent[:64] = 5
    push(worker, gradient(1), lent[:64])
    arrival = receive(server, Contribution)
    lent[:64] = 6
    assert (arrival.payload == 6).all()


def test_what_is_not_in_shared_memory_travels(server: ServerSockets, worker: WorkerSockets) -> None:
    sharing(server, worker)
    assert worker.push(gradient(1), pattern(64))
    assert receive(server, Contribution).payload.tobytes() == pattern(64).tobytes()


def test_who_cannot_share_gets_weights_all_the_same(server: ServerSockets, worker: WorkerSockets) -> None:
    shared, _ = sharing(server, worker)
    with WorkerSockets(server.control, SETTINGS) as other:
        other.follow(welcome(2, None, None), server.gradients, server.weights, BUCKET_BYTES)
        receive(server, Subscribed)
        shared[:64] = 3
        server.publish(weights(1), shared[:64])
        for each in (worker, other):
            assert (receive(each, Weights).payload == 3).all()
        assert other.lent() is None and worker.lent() is not None


@pytest.mark.parametrize("side", ["server", "worker"])
def test_shared_memory_can_be_switched_off_on_either_side(side: str) -> None:
    off = msgspec.structs.replace(SETTINGS, shared_memory=False)
    with (
        ServerSockets(off if side == "server" else SETTINGS, bucket_bytes=BUCKET_BYTES, buckets=BUCKETS) as server,
        WorkerSockets(server.control, off if side == "worker" else SETTINGS) as worker,
    ):
        shared = server.share(BUCKET_BYTES)
        server.lend(1, BUCKET_BYTES)
        worker.follow(welcome(1, *server.describe(1)), server.gradients, server.weights, BUCKET_BYTES)
        receive(server, Subscribed)
        assert worker.lent() is None
        server.publish(weights(1), shared[:64])
        assert receive(worker, Weights).payload.nbytes == 64


def test_a_place_where_no_memory_is_is_refused_on_every_socket(
    server: ServerSockets, worker: WorkerSockets, raw: Raw
) -> None:
    sharing(server, worker)
    for address, kind, route in ((server.gradients, zmq.PUSH, []), (server.control, zmq.DEALER, [])):
        for member, place in ((1, (0, 1 << 40)), (1, (-64, 64)), (9, (0, 64))):
            peer = raw(kind)
            peer.connect(address)
            message = msgspec.structs.replace(gradient(1), member=member)
            peer.send_multipart([*route, *codec.encode_placed(message, Place(*place))])
            assert "where no shared memory is" in receive(server, Malformed).message.reason
    peer = raw(zmq.PUSH)
    peer.connect(server.gradients)
    peer.send_multipart([codec.PLACED_GRADIENT, codec.encode(gradient(1))[1], b"nonsense"])
    assert "its place" in receive(server, Malformed).message.reason


def test_what_a_member_wrote_stays_readable_when_it_is_gone(server: ServerSockets, worker: WorkerSockets) -> None:
    _, lent = sharing(server, worker)
    lent[:64] = 5
    worker.push(gradient(1), lent[:64])
    payload = receive(server, Contribution).payload
    server.reclaim(1)
    worker.forsake()
    del lent
    gc.collect()
    assert (payload == 5).all()
    assert server.describe(1) == (None, None)

"""The edge of a worker, over a transport that can be full: what is kept, what is sent, and what is let go."""

from typing import Any

import numpy as np

from bus.layout import Layout
from bus.messages import Assignment, Contribution, Hello, Leaf, Message, Node, Plan, Serving, Stop, Weights, Welcome
from bus.transport import Arrival
from worker.client import Client
from worker.executor import Result, ShardSum
from worker.machine import Computed, Machine, Prepared

LEAVES = (Leaf("w", "float32", (40,), "trainable"),)
LAYOUT = Layout(LEAVES, 64)  # three buckets
WELCOME = Welcome(7, 1, 0, "{}", LEAVES, 64, "tcp://0.0.0.0:2", "tcp://0.0.0.0:3", 1.0, 5.0)


class Wire:
    """A WorkerTransport that takes ``room`` more pushes."""

    def __init__(self) -> None:
        self.inbox: list[Arrival] = []
        self.sent: list[Message] = []
        self.pushed: list[tuple[Contribution, bytes]] = []
        self.followed: list[tuple[Any, ...]] = []
        self.did: list[str] = []
        self.room = 10**9
        self.memory: Any = None
        self.published: Any = None

    def receive(self, timeout_s: float) -> Arrival | None:
        return self.inbox.pop(0) if self.inbox else None

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def push(self, contribution: Contribution, payload: Any) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.pushed.append((contribution, payload.tobytes()))
        return True

    def follow(self, welcome: Welcome, *told: Any) -> None:
        self.followed.append((welcome.member, *told))

    def lent(self) -> Any:
        return self.memory

    def around(self, payload: Any, before_bytes: int, size_bytes: int) -> Any:
        return self.published

    def forsake(self) -> None:
        self.did.append("forsake")

    def redial(self) -> None:
        self.did.append("redial")


class Orders:
    """An Executor that only writes down what it is asked for."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, int, tuple[Node, ...]]] = []
        self.buffers: list[Any] = []
        self.places: dict[Node, Any] = {}
        self.did: list[str] = []
        self.prefetched: list[tuple[int, tuple[Node, ...]]] = []

    def prepare(self, welcome: Welcome) -> None:
        self.did.append("prepare")

    def compute(self, session: int, version: int, buffer: Any, nodes: dict[Node, Any]) -> None:
        self.computed.append((session, version, tuple(nodes)))
        self.places.update(nodes)
        self.buffers.append(buffer)

    def prefetch(self, version: int, nodes: tuple[Node, ...]) -> None:
        self.prefetched.append((version, nodes))

    def cancel(self) -> None:
        self.did.append("cancel")


class Worker:
    def __init__(self, memory: Any = None) -> None:
        self.wire, self.orders, self.notes, self.now = Wire(), Orders(), [], 0.0  # type: ignore[var-annotated]
        self.wire.memory = memory
        machine = Machine(Hello("w0", "lab", 1, 1, {}), address="tcp://ps:1", connect_timeout_s=60.0, now=0.0)
        self.client = Client(machine, self.wire, note=self.notes.append, clock=lambda: self.now)
        self.client.attach(self.orders)
        self.hear(WELCOME)
        self.post(Prepared(7, "cpu"))

    def hear(self, message: Message, payload: Any = None) -> None:
        self.wire.inbox.append(Arrival(b"", message, payload))
        self.client.turn(0.0)

    def post(self, event: Any, result: Result | None = None) -> None:
        self.client.post(event, result)
        self.client.turn(0.0)

    def weights(self, version: int, *nodes: Node, value: float = 0.0) -> list[Any]:
        """All buckets of a version, in memory that is written over as soon as they were heard."""
        plan = tuple(Assignment(1, *node) for node in nodes)
        buffer = LAYOUT.pack([np.full(40, value, np.float32)])
        for bucket in range(3):
            payload = LAYOUT.bucket(buffer, bucket)
            self.hear(Weights(7, version, bucket, 1, plan), payload)
            payload[:] = 255
        return self.orders.buffers

    def computed(self, version: int, node: Node, value: float = 1.0) -> None:
        total = ShardSum(LAYOUT.pack([np.full(40, value, np.float32)]), 8, {"loss": 2.0})
        self.post(Computed(7, version, node), Result(total, 0.25, 0.5))

    def pushed(self) -> list[tuple[int, Node, int]]:
        made = [(one.version, (one.low, one.high), one.bucket) for one, _ in self.wire.pushed]
        self.wire.pushed.clear()
        return made


def test_data_sockets_are_dialled_at_the_host_that_was_reached() -> None:
    assert Worker().wire.followed == [(1, "tcp://ps:2", "tcp://ps:3", 64)]


def test_weights_in_memory_of_the_server_are_used_where_they_lie_and_never_written() -> None:
    worker = Worker()
    published = LAYOUT.pack([np.full(40, 5.0, np.float32)])
    published.setflags(write=False)
    worker.wire.published = published
    worker.weights(0, (0, 4), value=5.0)
    (buffer,) = worker.orders.buffers
    assert buffer is published and (LAYOUT.views(buffer)[0] == 5).all()


def test_gradients_are_made_in_lent_memory_as_far_as_it_goes_and_again_in_the_next_version() -> None:
    memory = np.zeros(2 * LAYOUT.size_bytes, np.uint8)
    worker = Worker(memory)
    worker.weights(0, (0, 1), (1, 2), (2, 4))
    places = [place for place in worker.orders.places.values() if place is not None]
    assert len(places) == 2 and not np.shares_memory(*places)
    assert all(np.shares_memory(place, memory) and place.nbytes == LAYOUT.size_bytes for place in places)
    worker.weights(1, (0, 4))
    assert np.shares_memory(worker.orders.places[0, 4], memory)


def test_weights_are_copied_once_into_memory_that_no_later_version_uses() -> None:
    worker = Worker()
    worker.weights(0, (0, 4), value=1.0)
    worker.weights(1, (0, 4), value=2.0)
    assert worker.orders.computed == [(7, 0, ((0, 4),)), (7, 1, ((0, 4),))]
    older, newer = (LAYOUT.views(buffer)[0] for buffer in worker.orders.buffers)
    assert (older == 1).all() and (newer == 2).all()


def test_a_sum_goes_out_bucket_by_bucket() -> None:
    worker = Worker()
    worker.weights(0, (0, 4))
    worker.computed(0, (0, 4), value=3.0)
    contributions = [one for one, _ in worker.wire.pushed]
    assert [one.bucket for one in contributions] == [0, 1, 2]
    assert all((one.examples, one.sums, one.waited_s, one.computed_s) == (8, {"loss": 2.0}, 0.25, 0.5)
               for one in contributions)  # fmt: skip
    joined = np.frombuffer(b"".join(payload for _, payload in worker.wire.pushed), np.float32)
    assert (joined[:40] == 3).all()


def test_what_finds_no_room_is_sent_as_soon_as_there_is_some() -> None:
    worker = Worker()
    worker.weights(0, (0, 4))
    worker.wire.room = 1
    worker.computed(0, (0, 4))
    assert worker.pushed() == [(0, (0, 4), 0)]
    assert worker.orders.prefetched == []  # making batches would hold up what is still to be sent
    worker.wire.room = 10
    worker.client.turn(0.0)
    assert worker.pushed() == [(0, (0, 4), 1), (0, (0, 4), 2)]
    worker.client.turn(0.0)
    assert worker.orders.prefetched == [(1, ((0, 4),))]


def test_what_found_no_room_is_let_go_when_a_newer_version_comes() -> None:
    worker = Worker()
    worker.weights(0, (0, 4))
    worker.wire.room = 0
    worker.computed(0, (0, 4))
    worker.weights(1, (0, 4))
    worker.wire.room = 10
    worker.client.turn(0.0)
    assert worker.pushed() == []


def test_what_found_no_room_is_kept_when_the_same_step_brings_more_work() -> None:
    worker = Worker()
    worker.weights(0, (0, 2))
    worker.wire.room = 1
    worker.computed(0, (0, 2))
    worker.hear(Plan(7, 0, 2, (Assignment(1, 0, 2), Assignment(1, 2, 4))))
    assert worker.orders.computed[-1] == (7, 0, ((2, 4),))
    worker.wire.room = 10
    worker.client.turn(0.0)
    assert worker.pushed() == [(0, (0, 2), 0), (0, (0, 2), 1), (0, (0, 2), 2)]


def test_what_was_pushed_is_kept_and_pushed_again_when_it_is_missing() -> None:
    worker = Worker()
    worker.weights(0, (0, 2), (2, 3))
    worker.computed(0, (0, 2)), worker.computed(0, (2, 3))
    worker.pushed()
    for _ in range(2):
        worker.hear(Serving(7, 0, 1, ((0, 1),)))
    assert worker.pushed() == [(0, (0, 2), bucket) for bucket in range(3)]


def test_a_result_of_older_weights_goes_nowhere() -> None:
    worker = Worker()
    worker.weights(0, (0, 4))
    worker.weights(1, (0, 4))
    worker.computed(0, (0, 4))
    assert worker.pushed() == []
    worker.computed(1, (0, 4), value=5.0)
    assert worker.pushed() == [(1, (0, 4), bucket) for bucket in range(3)]


def test_a_new_session_voids_everything_of_the_old_one() -> None:
    worker = Worker()
    worker.weights(0, (0, 4))
    worker.wire.room = 0
    worker.computed(0, (0, 4))
    worker.hear(Serving(8, 0, 1, ()))
    assert worker.wire.did == ["forsake", "redial"] and worker.orders.did == ["prepare", "cancel"]
    worker.wire.room = 10
    worker.client.turn(0.0)
    assert worker.pushed() == []


def test_what_does_not_fit_the_welcome_is_not_believed() -> None:
    worker = Worker()
    plan = (Assignment(1, 0, 4),)
    good = np.zeros(64, np.uint8)
    for bucket, payload, checksum in ((0, good[:60], None), (3, good, None), (-1, good, None), (1, good, 12345)):
        worker.hear(Weights(7, 0, bucket, 1, plan, checksum), payload)
    assert len(worker.notes) == 4 and worker.orders.computed == []
    assert "expected 64" in worker.notes[0] and "the payload changed on its way" in worker.notes[3]


def test_events_of_the_computing_thread_are_taken_before_messages() -> None:
    """Or a busy inbox could hold up a gradient that is ready."""
    worker = Worker()
    worker.weights(0, (0, 4))
    worker.wire.inbox += [Arrival(b"", Serving(7, 0, 1, ((0, 4),)))] * 5
    worker.computed(0, (0, 4))
    assert len(worker.pushed()) == 3 and len(worker.wire.inbox) == 4


def test_it_wakes_the_loop_for_what_the_computing_thread_posts() -> None:
    woken: list[bool] = []
    machine = Machine(Hello("w0", "lab", 1, 1, {}), address="tcp://ps:1", connect_timeout_s=60.0, now=0.0)
    client = Client(machine, Wire(), note=print, wake=lambda: woken.append(True), clock=lambda: 0.0)
    client.post(Prepared(7, "cpu"))
    assert woken == [True]


def test_it_leaves_when_asked_and_ends_when_the_server_has_heard() -> None:
    worker = Worker()
    worker.client.request_stop(143)
    worker.client.turn(0.0)
    assert type(worker.wire.sent[-1]).__name__ == "Leave" and worker.client.outcome is None
    worker.hear(Stop(7, 0, "done"))
    assert worker.client.outcome is None
    worker.now += 10
    worker.client.turn(0.0)
    assert worker.client.outcome is not None and worker.client.outcome.exit_code == 143

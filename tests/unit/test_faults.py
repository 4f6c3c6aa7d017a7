"""Faults on purpose: the forms in which they are written, and that they happen where and when they say."""

from typing import Any

import pytest

from bus.faults import Clock, Fault, FaultyServer, FaultyWorker, parse, poisoned
from bus.layout import Bytes, Layout
from bus.messages import Contribution, Serving, Weights
from bus.transport import Arrival
from worker.executor import ShardSum
from worker.slow import SlowGradients, prepare_longer

FORMS = [
    ("worker 2: SIGKILL at version 7", "w2", "SIGKILL", {"version": 7}),
    ("ps: SIGKILL at 3.5 s", "ps", "SIGKILL", {"at_s": 3.5}),
    ("worker 1: SIGSTOP for 2 s at version 30", "w1", "SIGSTOP", {"amount": 2.0, "version": 30}),
    ("worker alpha-7: SIGTERM at version 12", "alpha-7", "SIGTERM", {"version": 12}),
    ("worker 3: 5 times slower at version 0", "w3", "slower", {"amount": 5.0, "version": 0}),
    ("worker 3: prepares 20 s longer", "w3", "prepares", {"amount": 20.0}),
    ("ps: clock jumps 600 s at version 5", "ps", "clock", {"amount": 600.0, "version": 5}),
    ("NaN in shard 0 at version 10", "", "NaN", {"shard": 0, "version": 10}),
    ("drop weights 12 to worker 1", "w1", "drop", {"kind": "weights", "version": 12}),
    ("double gradient 12 from worker 1", "w1", "double", {"kind": "gradient", "version": 12}),
    ("delay  weights 12 to worker 1 by 0.5 s", "w1", "delay", {"kind": "weights", "version": 12, "amount": 0.5}),
]


@pytest.mark.parametrize(("text", "who", "what", "more"), FORMS, ids=[form[0] for form in FORMS])
def test_every_form_is_understood(text: str, who: str, what: Any, more: dict[str, Any]) -> None:
    assert parse(text) == Fault(text, who, what, **more)


@pytest.mark.parametrize(
    "text",
    ["", "worker 2: SIGKILL", ": SIGKILL at version 7", "ps: SIGFOO at 3 s", "drop weights to worker 1",
     "worker 2: SIGKILL at version 7 or so", "worker 2: SIGKILL at version -1", "drop gradient 3 to worker 1"],
)  # fmt: skip
def test_what_is_no_fault_is_refused_with_an_example_that_is_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"a fault such as '.*'") as caught:
        parse(text)
    parse(str(caught.value).split("'")[1])


@pytest.mark.parametrize(
    ("text", "near"),
    [("worker 2: SIGKIL at version 7", "worker 2: SIGKILL at version 7"),
     ("worker 1: 5x slower at version 0", "worker 3: 5 times slower at version 0"),
     ("NaN in shard 3 in version 10", "NaN in shard 3 at version 10")],
)  # fmt: skip
def test_the_example_is_the_nearest_form(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=near):
        parse(text)


def test_a_worker_goes_by_the_name_that_the_console_gives_it() -> None:
    assert parse("w1: SIGKILL at version 3").who == "w1" == parse("drop weights 3 to w1").who


def test_poisoned_shards() -> None:
    assert poisoned([parse("NaN in shard 3 at version 1"), parse("ps: SIGKILL at 1 s")]) == {(1, 3)}


class Instant:
    """Gradients that take no time."""

    device, layout = "none", Layout((), 64)

    def load(self, buffer: Bytes) -> None: ...
    def prefetch(self, version: int, shards: list[int]) -> None: ...

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        return ShardSum(self.layout.empty(), 0, {})


class Wire:
    """Both transports, with what came and went, and a clock."""

    def __init__(self, *texts: str, who: str = "w1") -> None:
        self.now, self.inbox, self.sent, self.struck = 100.0, [], [], []  # type: ignore[var-annotated]
        faults = [fault for fault in map(parse, texts) if fault.who == who]
        arguments: Any = (self, faults, lambda fault: self.struck.append(fault.text), lambda: self.now)
        self.worker, self.server = FaultyWorker(*arguments), FaultyServer(*arguments)

    def receive(self, timeout_s: float) -> Arrival | None:
        self.waited_s = timeout_s
        return self.inbox.pop(0) if self.inbox else None

    def push(self, contribution: Contribution, payload: Any) -> bool:
        self.sent.append(contribution)
        return True

    def publish(self, message: Any, payload: Any = None) -> None:
        self.sent.append(message)

    def arrive(self, *messages: Any) -> list[Any]:
        """What the worker gets to see of them."""
        self.inbox += [Arrival(b"", message) for message in messages]
        seen = [self.worker.receive(1.0) for _ in range(len(messages) + 2)]
        return [arrival.message for arrival in seen if arrival]


def weights(version: int, bucket: int = 0) -> Weights:
    return Weights(1, version, bucket, 1, ())


def gradient(version: int) -> Contribution:
    return Contribution(1, 1, version, 0, 0, 4, 8, {})


def test_a_version_is_dropped_once_bucket_by_bucket_and_arrives_when_it_is_sent_again() -> None:
    wire = Wire("drop weights 5 to worker 1", "drop weights 5 to worker 2")
    first = [weights(4), weights(5, 0), weights(5, 1), Serving(1, 5, 1, ())]
    assert wire.arrive(*first) == [first[0], first[3]]
    assert wire.arrive(weights(5, 0), weights(5, 1)) == [weights(5, 0), weights(5, 1)]
    assert wire.struck == ["drop weights 5 to worker 1"], "told once"


def test_weights_are_doubled_and_delayed() -> None:
    wire = Wire("double weights 5 to worker 1", "delay weights 6 to worker 1 by 0.5 s")
    assert wire.arrive(weights(5)) == [weights(5), weights(5)]
    assert wire.arrive(weights(6)) == []
    wire.now += 0.2
    assert wire.worker.receive(1.0) is None and wire.waited_s == pytest.approx(0.3), "it wakes in time"
    wire.now += 0.3
    assert wire.arrive() == [weights(6)]


def test_gradients_are_dropped_doubled_and_delayed_once() -> None:
    wire = Wire("drop gradient 1 from worker 1", "double gradient 2 from worker 1",
                "delay gradient 3 from worker 1 by 1 s")  # fmt: skip
    for version in (1, 2, 3, 4):
        assert wire.worker.push(gradient(version), None)
    assert [sent.version for sent in wire.sent] == [2, 2, 4]
    assert [text.split()[0] for text in wire.struck] == ["drop", "double", "delay"], "each is told"
    wire.now += 1.0
    wire.arrive()
    wire.worker.push(gradient(1), None)
    assert [sent.version for sent in wire.sent] == [2, 2, 4, 3, 1]


def test_what_befalls_a_worker_comes_with_the_weights_or_with_time_once() -> None:
    wire = Wire("worker 1: SIGSTOP for 1 s at version 5", "worker 1: SIGKILL at 3 s")
    wire.arrive(weights(4))
    assert wire.struck == []
    wire.arrive(weights(6)), wire.arrive(weights(7))
    assert wire.struck == ["worker 1: SIGSTOP for 1 s at version 5"], "a version may be missed"
    wire.now += 2.9
    wire.arrive()
    assert len(wire.struck) == 1 and wire.waited_s == pytest.approx(0.1)
    wire.now += 0.2
    wire.arrive(), wire.arrive()
    assert wire.struck[1:] == ["worker 1: SIGKILL at 3 s"]


def test_what_befalls_the_server_comes_after_the_first_bucket_is_out() -> None:
    wire = Wire("ps: SIGKILL at version 5", who="ps")
    wire.server.publish(weights(4))
    assert wire.struck == []
    wire.server.publish(weights(5))
    assert wire.struck == ["ps: SIGKILL at version 5"] and wire.sent == [weights(4), weights(5)]


def test_the_server_tells_of_a_nan_that_reaches_it_once() -> None:
    wire = Wire("NaN in shard 3 at version 5", who="")
    wire.inbox = [Arrival(b"", gradient(4)), Arrival(b"", gradient(5)), Arrival(b"", gradient(5))]
    struck = [(wire.server.receive(0.0), len(wire.struck))[1] for _ in range(3)]
    assert struck == [0, 1, 1]


def test_a_slow_worker_and_a_slow_preparation_are_told_when_they_begin() -> None:
    told: list[str] = []
    faults = [parse("w1: 1.5 times slower at version 2"), parse("w1: prepares 0.01 s longer")]
    slow = SlowGradients(Instant(), faults, lambda fault: told.append(fault.text))
    prepare_longer(faults, lambda fault: told.append(fault.text))
    assert told == ["w1: prepares 0.01 s longer"]
    for version in (1, 2, 3):
        slow.shard(version, 0)
        assert (faults[0].text in told) == (version >= 2)
    assert len(told) == 2


def test_a_clock_jumps() -> None:
    clock = Clock(lambda: 5.0)
    clock.offset_s += 600.0
    assert clock() == 605.0

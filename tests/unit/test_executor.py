"""The thread that computes: orders in, events out, and newer work voids older. No JAX: a stand-in computes."""

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bus.layout import Bytes, Layout
from bus.messages import Leaf, Welcome
from worker.executor import Calculator, Result, ShardSum, ThreadExecutor
from worker.machine import Computed, Event, Prepared, Unable

LAYOUT = Layout([Leaf("w", "float32", (3,), "trainable")], 64)
WELCOME = Welcome(7, 1, 0, "{}", LAYOUT.leaves, 64, "tcp://ps:2", "tcp://ps:3", 1.0, 5.0)
LIMIT_S = 10.0


class Gradients:
    """Shard s of version v counts s + 1 examples. It can be made to wait, and remembers what it did."""

    device, layout = "stand-in", LAYOUT

    def __init__(self) -> None:
        self.did: list[str] = []
        self.go, self.started, self.prefetched = threading.Event(), threading.Event(), threading.Event()
        self.go.set()

    def load(self, buffer: Bytes) -> None:
        self.did.append(f"load {LAYOUT.views(buffer)[0][0]:g}")

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        self.started.set()
        assert self.go.wait(LIMIT_S)
        self.did.append(f"shard {shard} of {version}")
        if shard == 13:
            raise ZeroDivisionError("unlucky")
        buffer = LAYOUT.pack([np.full(3, shard, np.float32)], into)
        return ShardSum(buffer, shard + 1, {"loss": float(shard)})

    def prefetch(self, version: int, shards: list[int]) -> None:
        self.did.append(f"prefetch {shards} of {version}")
        self.prefetched.set()


class Loop:
    """The other side: what was posted, in order."""

    def __init__(self, build: Callable[[Welcome], Any]) -> None:
        self.posted: queue.Queue[tuple[Event, Result | None]] = queue.Queue()
        self.executor = ThreadExecutor(
            build, lambda event, result: self.posted.put((event, result)), lambda error: f"told: {error}"
        )

    def next(self) -> tuple[Event, Result | None]:
        return self.posted.get(timeout=LIMIT_S)


@pytest.fixture
def gradients() -> Gradients:
    return Gradients()


@pytest.fixture
def loop(gradients: Gradients) -> Loop:
    made = Loop(lambda welcome: gradients)
    made.executor.prepare(WELCOME)
    assert made.next() == (Prepared(7, "stand-in"), None)
    return made


def weights(value: float) -> Bytes:
    return LAYOUT.pack([np.full(3, value, np.float32)])


def test_each_node_is_reported_as_soon_as_it_is_summed(loop: Loop, gradients: Gradients) -> None:
    loop.executor.compute(7, 4, weights(0.5), dict.fromkeys(((0, 4), (6, 7))))
    (first, four), (second, one) = loop.next(), loop.next()
    assert (first, second) == (Computed(7, 4, (0, 4)), Computed(7, 4, (6, 7)))
    assert four is not None and one is not None
    assert (four.total.examples, four.total.sums) == (1 + 2 + 3 + 4, {"loss": 6.0})
    assert (LAYOUT.views(four.total.buffer)[0] == 6).all() and one.total.examples == 7
    assert gradients.did[0] == "load 0.5" and gradients.did.count("load 0.5") == 1


def test_the_batches_of_the_next_step_are_made_only_when_there_is_nothing_else_to_do(
    loop: Loop, gradients: Gradients
) -> None:
    gradients.go.clear()
    buffer = weights(0)
    loop.executor.compute(7, 4, buffer, dict.fromkeys(((0, 1),)))
    assert gradients.started.wait(LIMIT_S)
    loop.executor.prefetch(5, ((0, 1),))
    loop.executor.compute(7, 4, buffer, dict.fromkeys(((1, 2), (3, 4))))
    gradients.go.set()
    loop.executor.prepare(WELCOME)
    assert [type(loop.next()[0]) for _ in range(4)] == [Computed, Computed, Computed, Prepared]
    assert [did for did in gradients.did if did.startswith("prefetch")] == []
    loop.executor.compute(7, 5, buffer, dict.fromkeys(((0, 2), (3, 4))))
    loop.executor.prefetch(6, ((0, 2), (3, 4)))
    assert gradients.prefetched.wait(LIMIT_S)
    assert gradients.did[-1] == "prefetch [0, 1, 3] of 6"


def test_newer_weights_void_older_work_after_the_shard_that_is_being_computed(loop: Loop, gradients: Gradients) -> None:
    gradients.go.clear()
    loop.executor.compute(7, 0, weights(0), dict.fromkeys(((0, 4),)))
    assert gradients.started.wait(LIMIT_S)
    loop.executor.compute(7, 1, weights(1), dict.fromkeys(((2, 3),)))
    gradients.go.set()
    assert loop.next()[0] == Computed(7, 1, (2, 3))
    assert [did for did in gradients.did if did.startswith("shard")] == ["shard 0 of 0", "shard 2 of 1"]


def test_more_of_the_same_version_voids_nothing(loop: Loop, gradients: Gradients) -> None:
    gradients.go.clear()
    buffer = weights(0)
    loop.executor.compute(7, 0, buffer, dict.fromkeys(((0, 2),)))
    loop.executor.compute(7, 0, buffer, dict.fromkeys(((2, 3),)))
    gradients.go.set()
    assert [loop.next()[0] for _ in range(2)] == [Computed(7, 0, (0, 2)), Computed(7, 0, (2, 3))]
    assert gradients.did.count("load 0") == 1


def test_what_is_cancelled_is_not_reported(loop: Loop, gradients: Gradients) -> None:
    gradients.go.clear()
    loop.executor.compute(7, 0, weights(0), dict.fromkeys(((0, 2), (2, 4))))
    assert gradients.started.wait(LIMIT_S)
    loop.executor.cancel()
    gradients.go.set()
    loop.executor.prepare(WELCOME)
    assert loop.next() == (Prepared(7, "stand-in"), None)


def test_the_same_version_of_another_session_is_loaded_anew(loop: Loop, gradients: Gradients) -> None:
    loop.executor.compute(7, 0, weights(1), dict.fromkeys(((0, 1),)))
    loop.next()
    loop.executor.compute(8, 0, weights(2), dict.fromkeys(((0, 1),)))
    loop.next()
    assert [did for did in gradients.did if did.startswith("load")] == ["load 1", "load 2"]


def test_an_error_in_the_users_code_is_told(loop: Loop) -> None:
    loop.executor.compute(7, 0, weights(0), dict.fromkeys(((13, 14),)))
    assert loop.next() == (Unable("told: unlucky"), None)


def test_a_workload_that_cannot_be_built_is_told() -> None:
    def build(welcome: Welcome) -> Any:
        raise FileNotFoundError("no such file: model.py")

    loop = Loop(build)
    loop.executor.prepare(WELCOME)
    assert loop.next() == (Unable("told: no such file: model.py"), None)


def test_waiting_is_the_time_between_a_result_and_the_next_version() -> None:
    clock = iter([10.0, 11.0, 11.5, 13.0, 20.0, 21.0])
    calculator = Calculator(Gradients(), lambda: next(clock))
    first, second, third = (calculator.compute(7, version, weights(0), (0, 1), lambda: True) for version in (0, 1, 5))
    assert (first.waited_s, first.computed_s) == (math.inf, 1.0), "there was nothing before"
    assert (second.waited_s, second.computed_s) == (0.5, 1.5)
    assert third.waited_s == math.inf, "versions were skipped in between"


def test_a_sum_is_made_in_the_memory_that_was_given_for_its_node(loop: Loop) -> None:
    places = {(0, 4): LAYOUT.empty(), (6, 7): LAYOUT.empty()}
    loop.executor.compute(7, 4, weights(0.5), dict(places))
    for place in places.values():
        _, result = loop.next()
        assert result is not None and result.total.buffer is place
    assert [LAYOUT.views(place)[0][0] for place in places.values()] == [0 + 1 + 2 + 3, 6]

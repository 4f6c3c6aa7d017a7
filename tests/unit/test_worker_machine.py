"""A worker's decisions, event by event."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from bus import messages
from bus.messages import (
    Alive,
    Assignment,
    Failure,
    Fetch,
    Hello,
    Leave,
    Left,
    Malformed,
    Ready,
    Refusal,
    Serving,
    Stop,
    Weights,
    Welcome,
)
from worker.machine import (
    ASKED_LEAVING_S,
    COMPLAIN_EVERY_S,
    LAST_HELLO_S,
    LEAVING_S,
    Action,
    Compute,
    Computed,
    Exit,
    Forget,
    Keep,
    Machine,
    Note,
    Phase,
    Prepare,
    Prepared,
    Push,
    Send,
    StopRequested,
    Tick,
    Unable,
)

SESSION, ME = 77, 3
HELLO = Hello("w0", "lab", 40, 123, {})
WELCOME = Welcome(SESSION, ME, 0, "{}", (), 4096, "tcp://ps:2", "tcp://ps:3", 1.0, 5.0)


class Worker:
    """A machine with a clock that only moves when told. ``mine`` is the plan in which it computes everything."""

    def __init__(self, buckets: int = 1, connect_timeout_s: float = 60.0) -> None:
        self.now = 1000.0
        self.machine = Machine(HELLO, address="tcp://ps:1", connect_timeout_s=connect_timeout_s, now=self.now)
        self.machine.buckets = buckets

    def tell(self, event: Any) -> list[Action]:
        return self.machine.handle(event, now=self.now)

    def wait(self, seconds: float, step_s: float = 0.5) -> list[Action]:
        """Let time pass as the loop does."""
        actions: list[Action] = []
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            actions += self.tell(Tick())
        return actions

    def join(self) -> None:
        self.tell(Tick())
        self.tell(WELCOME)
        assert self.tell(Prepared(SESSION, "cpu")) == [Send(Ready(SESSION, ME, "cpu"))]

    def weights(self, version: int, *plan: tuple[int, int, int], bucket: int = 0, revision: int = 1) -> list[Action]:
        return self.tell(Weights(SESSION, version, bucket, revision, assigned(*plan)))

    def step(self, version: int, *nodes: tuple[int, int]) -> None:
        """Weights with a plan arrive, and are computed on."""
        self.weights(version, *[(ME, *node) for node in nodes])
        for node in nodes:
            assert self.tell(Computed(SESSION, version, node)) == [Push(version, node)]

    def serving(self, version: int, *missing: tuple[int, int], revision: int = 1) -> list[Action]:
        """A heartbeat of the PS, a second after the one before."""
        self.now += 1.0
        return self.tell(Serving(SESSION, version, revision, missing))


def assigned(*plan: tuple[int, int, int]) -> tuple[Assignment, ...]:
    return tuple(Assignment(*row) for row in plan)


def served(buckets: int = 1) -> Worker:
    worker = Worker(buckets)
    worker.join()
    return worker


def only(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


FETCH = Send(Fetch(SESSION, ME, -1))


# Dialling


def test_it_says_hello_less_and_less_often() -> None:
    worker, times = Worker(), []
    for _ in range(600):
        if Send(HELLO) in worker.tell(Tick()):
            times.append(worker.now - 1000.0)
        worker.now = max(worker.machine.wake_at, worker.now + 0.001)
        if worker.now > 1012.0:
            break
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0 and gaps[0] == pytest.approx(0.05)
    assert all(later <= 2 * earlier + 1e-6 for earlier, later in pairwise(gaps))
    assert gaps == sorted(gaps) and gaps[-1] == pytest.approx(LAST_HELLO_S)


def test_it_complains_with_the_address_and_gives_up_with_a_code_of_its_own() -> None:
    worker = Worker(connect_timeout_s=15.0)
    actions = worker.wait(14.5)
    notes = [note.text for note in only(Note, actions)]
    assert notes[0] == "no answer from tcp://ps:1 yet; trying for another 13 s"
    assert len(notes) == 1 + int((14.5 - 2.0) // COMPLAIN_EVERY_S) and not only(Exit, actions)
    (exit,) = worker.wait(0.5)
    assert isinstance(exit, Exit) and exit.exit_code == 3
    assert exit.reason.startswith("no answer from tcp://ps:1 for 15 s: is the parameter server running there")
    assert worker.machine.finished and worker.tell(Tick()) == []


def test_a_first_complaint_comes_within_three_seconds() -> None:
    worker = Worker()
    worker.now += 3.0
    assert worker.machine.wake_at <= worker.now
    assert only(Note, worker.tell(Tick()))


def test_asked_to_stop_while_dialling_it_ends_at_once() -> None:
    assert Worker().tell(StopRequested(143)) == [Exit(143, "asked to stop")]


def test_a_refusal_ends_it_with_the_reason() -> None:
    worker = Worker()
    reason = "hello: found protocol 2, expected 1; install the same release on both sides"
    assert worker.tell(Refusal(False, reason)) == [Exit(2, f"refused by tcp://ps:1: {reason}")]


def test_who_comes_after_the_end_of_the_run_goes_home_content() -> None:
    (exit,) = Worker().tell(Stop(SESSION, 9, "version 9 is reached"))
    assert exit == Exit(0, "the run is over: version 9 is reached")


# Preparing


def test_a_welcome_is_prepared_once() -> None:
    worker = Worker()
    worker.tell(Tick())
    assert worker.tell(WELCOME) == [Prepare(WELCOME)]
    assert worker.tell(WELCOME) == [], "the answer to a repeated hello"
    assert worker.tell(Prepared(SESSION, "cpu")) == [Send(Ready(SESSION, ME, "cpu"))]
    assert worker.tell(WELCOME) == []


def test_heartbeats_go_out_while_it_compiles() -> None:
    worker = Worker()
    worker.tell(WELCOME)
    beats = []
    for _ in range(4):
        beats += worker.wait(1)
        worker.tell(Serving(SESSION, 0, 0, ()))
    assert beats == [Send(Alive(SESSION, ME, -1, "loading and compiling"))] * 4


def test_it_says_that_it_is_ready_until_it_is_given_work() -> None:
    """The first time may have been lost, and nobody would ever plan it."""
    worker = served()
    ready, alive = Send(Ready(SESSION, ME, "cpu")), Send(Alive(SESSION, ME, -1, "waiting for version 0"))
    assert worker.wait(2) == [ready, alive, ready, alive]
    worker.weights(0, (9, 0, 4))
    assert ready in worker.wait(1)
    worker.weights(0, (9, 0, 2), (ME, 2, 4), revision=2)
    assert worker.wait(1) == [Send(Alive(SESSION, ME, 0, "computing shards 2-3 of step 0"))]


def test_weights_that_come_before_it_is_prepared_are_let_go() -> None:
    worker = Worker()
    worker.tell(WELCOME)
    assert worker.weights(0, (ME, 0, 4)) == []
    worker.tell(Prepared(SESSION, "cpu"))
    assert worker.serving(0) == [FETCH]


def test_a_workload_that_cannot_be_loaded_is_told_to_both_sides() -> None:
    worker = Worker()
    worker.tell(WELCOME)
    assert worker.tell(Unable("no such file: data")) == [
        Send(Failure(SESSION, ME, "no such file: data")),
        Exit(2, "no such file: data"),
    ]


def test_a_server_that_restarts_while_it_compiles_is_joined_without_compiling_twice() -> None:
    worker = Worker()
    worker.tell(WELCOME)
    assert Forget() in worker.tell(Serving(SESSION + 1, 0, 0, ()))
    other = msgspec.structs.replace(WELCOME, session=SESSION + 1)
    assert worker.tell(other) == [Prepare(other)]
    assert worker.tell(Prepared(SESSION, "cpu")) == [], "that was for the session before"
    assert worker.tell(Prepared(SESSION + 1, "cpu")) == [Send(Ready(SESSION + 1, ME, "cpu"))]


# Weights, plans and gradients


def test_it_computes_when_every_bucket_is_there_and_pushes_each_sum() -> None:
    worker = served(buckets=3)
    plan = ((9, 0, 4), (ME, 4, 6), (ME, 6, 7))
    for bucket in (2, 0):
        (keep,) = worker.weights(0, *plan, bucket=bucket)
        assert isinstance(keep, Keep) and keep.weights.bucket == bucket
    assert worker.weights(0, *plan, bucket=2) == [], "doubled"
    keep, compute = worker.weights(0, *plan, bucket=1)
    assert compute == Compute(0, ((4, 6), (6, 7)))
    assert worker.tell(Computed(SESSION, 0, (4, 6))) == [Push(0, (4, 6))]
    assert worker.tell(Computed(SESSION, 0, (6, 7))) == [Push(0, (6, 7))]


def test_weights_of_a_step_without_work_for_it_are_not_copied() -> None:
    assert served().weights(0, (9, 0, 4)) == []


@pytest.mark.parametrize("version", [4, 3])
def test_older_weights_change_nothing(version: int) -> None:
    worker = served()
    worker.step(5, (0, 4))
    assert worker.weights(version, (ME, 0, 4)) == []
    assert worker.machine.held == 5


def test_what_was_computed_on_older_weights_is_not_pushed() -> None:
    worker = served(buckets=2)
    worker.weights(0, (ME, 0, 4)), worker.weights(0, (ME, 0, 4), bucket=1)
    worker.weights(1, (ME, 0, 4))
    assert worker.tell(Computed(SESSION, 0, (0, 4))) == [], "version 1 exists: this gradient is of no use"
    assert only(Compute, worker.weights(1, (ME, 0, 4), bucket=1)) == [Compute(1, ((0, 4),))]
    assert worker.tell(Computed(SESSION, 0, (0, 4))) == []
    assert worker.tell(Computed(SESSION - 1, 1, (0, 4))) == []
    assert worker.tell(Computed(SESSION, 1, (0, 2))) == []


def test_a_version_that_was_skipped_is_no_matter() -> None:
    worker = served()
    worker.step(0, (0, 4))
    assert only(Compute, worker.weights(7, (ME, 0, 2))) == [Compute(7, ((0, 2),))]


def test_a_heartbeat_that_names_a_newer_version_makes_it_fetch() -> None:
    worker = served()
    worker.step(0, (0, 4))
    assert worker.serving(0) == []
    assert worker.serving(1) == [Send(Fetch(SESSION, ME, 0))]
    assert only(Compute, worker.weights(1, (ME, 0, 4))) == [Compute(1, ((0, 4),))]


def test_it_fetches_once_per_heartbeat_at_most() -> None:
    worker = served()
    assert worker.serving(1) == [FETCH]
    for _ in range(3):
        assert worker.tell(Serving(SESSION, 1, 1, ())) == []
    assert worker.serving(1) == [FETCH], "the snapshot was lost, too"


def test_a_version_of_which_a_part_was_lost_is_fetched_at_the_second_heartbeat() -> None:
    worker = served(buckets=2)
    worker.weights(4, (ME, 0, 4))
    assert worker.serving(4, (0, 4)) == [], "the rest may still be on its way"
    assert worker.serving(4, (0, 4)) == [FETCH]
    assert worker.weights(4, (ME, 0, 4), bucket=0) == [], "it is here already"
    assert only(Compute, worker.weights(4, (ME, 0, 4), bucket=1)) == [Compute(4, ((0, 4),))]


def test_the_buckets_of_two_versions_are_not_mixed() -> None:
    worker = served(buckets=2)
    worker.weights(4, (ME, 0, 4), bucket=0)
    assert not only(Compute, worker.weights(5, (ME, 0, 4), bucket=1))
    assert only(Compute, worker.weights(5, (ME, 0, 4), bucket=0))


def test_a_plan_that_comes_before_the_weights_of_its_version_starts_them_anew() -> None:
    worker = served(buckets=2)
    worker.weights(4, (ME, 0, 4), bucket=0)
    worker.tell(messages.Plan(SESSION, 5, 2, assigned((ME, 0, 4))))
    assert not only(Compute, worker.weights(5, (ME, 0, 4), bucket=1, revision=2))
    assert only(Compute, worker.weights(5, (ME, 0, 4), bucket=0, revision=2)) == [Compute(5, ((0, 4),))]


def test_a_revised_plan_keeps_what_has_arrived_of_its_version() -> None:
    worker = served(buckets=2)
    worker.weights(4, (ME, 0, 2), bucket=0)
    worker.tell(messages.Plan(SESSION, 4, 2, assigned((ME, 0, 2), (ME, 2, 4))))
    assert only(Compute, worker.weights(4, (ME, 0, 2), bucket=1)) == [Compute(4, ((0, 2), (2, 4)))]


def test_a_revised_plan_gives_it_more_to_do() -> None:
    worker = served()
    worker.weights(0, (ME, 0, 2), (9, 2, 4))
    revised = messages.Plan(SESSION, 0, 2, assigned((ME, 0, 2), (ME, 2, 4)))
    assert worker.tell(revised) == [Compute(0, ((2, 4),))]
    assert worker.tell(revised) == []


def test_a_revised_plan_for_weights_that_were_not_kept_makes_it_fetch_them() -> None:
    worker = served()
    worker.weights(0, (9, 0, 4))
    assert worker.tell(messages.Plan(SESSION, 0, 2, assigned((ME, 0, 4)))) == [FETCH]
    assert only(Compute, worker.weights(0, (ME, 0, 4), revision=2)) == [Compute(0, ((0, 4),))]


def test_a_plan_for_a_version_that_it_has_not_seen_makes_it_fetch() -> None:
    worker = served()
    worker.step(0, (0, 4))
    assert worker.tell(messages.Plan(SESSION, 1, 2, assigned((ME, 0, 4)))) == [Send(Fetch(SESSION, ME, 0))]


def test_older_plans_change_nothing() -> None:
    worker = served()
    worker.weights(3, (9, 0, 4), revision=5)
    for version, revision in ((3, 5), (3, 4), (2, 9)):
        assert worker.tell(messages.Plan(SESSION, version, revision, assigned((ME, 0, 4)))) == []
    assert worker.weights(3, (ME, 0, 4), revision=4) == []


def test_a_revision_that_was_lost_is_seen_in_the_heartbeat_and_fetched() -> None:
    worker = served()
    worker.step(0, (0, 2))
    assert worker.serving(0, (2, 4), revision=2) == [Send(Fetch(SESSION, ME, 0))]
    assert worker.weights(0, (ME, 0, 2), (ME, 2, 4), revision=2) == [Compute(0, ((2, 4),))]


def test_the_first_plan_of_a_step_is_news_after_a_snapshot_of_before_it() -> None:
    worker = served()
    assert worker.serving(0, revision=0) == [FETCH]
    assert worker.weights(0, revision=0) == []
    assert only(Compute, worker.weights(0, (ME, 0, 4), revision=1)) == [Compute(0, ((0, 4),))]


def test_a_gradient_that_is_listed_as_missing_twice_is_pushed_again() -> None:
    worker = served()
    worker.step(0, (0, 2), (2, 3))
    assert worker.serving(0, (0, 2), (2, 4)) == [], "it may still be on its way"
    assert worker.serving(0, (1, 2)) == [Push(0, (0, 2))]
    assert worker.serving(0, (0, 4)) == [Push(0, (2, 3))]
    assert worker.serving(0, (0, 4)) == [Push(0, (0, 2))]


def test_only_what_is_missing_of_this_step_is_pushed_again() -> None:
    worker = served()
    worker.step(5, (0, 2))
    for _ in range(4):
        assert worker.serving(5, (2, 4)) == [], "a neighbour's"
        assert worker.serving(4, (0, 4)) == [], "a heartbeat that was overtaken"


def test_what_is_still_being_computed_is_not_pushed_again() -> None:
    worker = served()
    worker.weights(0, (ME, 0, 4))
    assert [worker.serving(0, (0, 4)) for _ in range(3)] == [[]] * 3
    assert worker.tell(Computed(SESSION, 0, (0, 4))) == [Push(0, (0, 4))]


def test_heartbeats_say_what_it_is_doing() -> None:
    worker = served()
    worker.weights(6, (ME, 0, 2), (ME, 2, 3))
    assert worker.machine.doing == "computing shards 0-1 of step 6"
    worker.wait(0.5)
    assert worker.machine.wake_at == worker.now + 1.0, "one has just gone out"
    worker.wait(0.5)
    worker.tell(Computed(SESSION, 6, (0, 2)))
    assert worker.wait(1) == [Send(Alive(SESSION, ME, 6, "computing shard 2 of step 6"))]
    worker.tell(Computed(SESSION, 6, (2, 3)))
    worker.serving(6)
    assert worker.wait(1) == [Send(Alive(SESSION, ME, 6, "waiting for version 7"))]


def test_a_silence_of_the_server_is_told_once_and_before_it_is_dialled_anew() -> None:
    worker = served()
    worker.weights(6, (ME, 0, 2))
    assert [action.text for action in worker.wait(4) if isinstance(action, Note)] == [
        "nothing heard from tcp://ps:1 for 3.0 s, while computing shards 0-1 of step 6; after 5 s it is dialled anew"
    ]
    worker.serving(6)
    assert not [action for action in worker.wait(2) if isinstance(action, Note)]
    assert len([action for action in worker.wait(1) if isinstance(action, Note)]) == 1


def test_a_clock_that_jumps_while_dialling_is_no_waiting() -> None:
    worker = Worker()
    worker.tell(Tick())
    worker.now += 3600.0
    assert not [action for action in worker.tell(Tick()) if isinstance(action, Exit)]


def test_nonsense_is_said_and_changes_nothing() -> None:
    worker = served()
    worker.step(0, (0, 4))
    (note,) = worker.tell(Malformed("weights", "found 9 frames, expected 2 or 3"))
    assert note == Note("not understood, on weights: found 9 frames, expected 2 or 3")
    assert worker.machine.phase is Phase.SERVING


# The server goes away


@pytest.mark.parametrize(
    "message",
    [Serving(SESSION + 1, 0, 0, ()), Weights(SESSION + 1, 9, 0, 0, assigned((ME, 0, 4))),
     messages.Plan(SESSION + 1, 0, 0, ()), Stop(SESSION + 1, 0, "done")],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_another_session_means_joining_again_with_nothing_of_the_old_one(message: Any) -> None:
    worker = served()
    worker.step(5, (0, 4))
    assert worker.tell(message) == [Note("the parameter server was restarted; joining again"), Forget()]
    assert Send(HELLO) in worker.tell(Tick())
    other = msgspec.structs.replace(WELCOME, session=SESSION + 1, member=1)
    worker.tell(other), worker.tell(Prepared(SESSION + 1, "cpu"))
    assert worker.machine.held == -1
    worker.now += 1
    assert worker.tell(Serving(SESSION + 1, 2, 1, ())) == [Send(Fetch(SESSION + 1, 1, -1))]


def test_who_is_not_a_member_any_more_joins_again() -> None:
    worker = served()
    note, forget = worker.tell(Refusal(True, "not a member (any more); join again"))
    assert note == Note("the parameter server: not a member (any more); join again") and forget == Forget()
    assert Send(HELLO) in worker.tell(Tick())


def test_a_silent_server_is_dialled_anew() -> None:
    worker = served()
    assert not only(Forget, worker.wait(5))
    actions = worker.wait(0.5)
    assert actions[:2] == [Note("tcp://ps:1 has been silent for 5.5 s; joining again"), Forget()]
    assert Send(HELLO) in worker.wait(0.5)


def test_any_word_of_the_server_is_a_sign_of_life() -> None:
    worker = served()
    for version in range(20):
        assert not only(Forget, worker.wait(4))
        worker.weights(version, (9, 0, 4))


def test_a_worker_that_was_stopped_for_100_seconds_does_not_blame_the_server() -> None:
    worker = served()
    worker.now += 100.0
    assert not only(Forget, worker.tell(Tick()))
    worker.tell(Serving(SESSION, 0, 0, ()))
    assert not only(Forget, worker.wait(5))


def test_a_server_that_does_not_come_back_ends_the_worker() -> None:
    worker = Worker(connect_timeout_s=15.0)
    worker.join()
    actions = worker.wait(5.5 + 15.5)
    assert only(Exit, actions)[0].exit_code == 3


# Leaving


@pytest.mark.parametrize("prepared", [False, True])
def test_the_end_of_the_run_is_a_goodbye_that_is_answered(prepared: bool) -> None:
    worker = Worker()
    worker.tell(WELCOME)
    if prepared:
        worker.tell(Prepared(SESSION, "cpu"))
    assert worker.tell(Stop(SESSION, 4, "version 4 is reached")) == [Send(Leave(SESSION, ME))]
    assert worker.tell(Stop(SESSION, 4, "version 4 is reached")) == [], "it comes by two sockets"
    assert worker.tell(Left(SESSION, ME)) == [Exit(0, "the run is over: version 4 is reached")]


def test_asked_to_stop_it_says_goodbye_and_keeps_its_exit_code() -> None:
    worker = served()
    worker.step(0, (0, 4))
    assert worker.tell(StopRequested(143)) == [Send(Leave(SESSION, ME))]
    assert worker.tell(Serving(SESSION, 1, 1, ())) == []
    assert worker.tell(Weights(SESSION, 1, 0, 1, assigned((ME, 0, 4)))) == []
    assert worker.tell(Computed(SESSION, 0, (0, 4))) == []
    assert worker.tell(Left(SESSION, ME)) == [Exit(143, "asked to stop")]


@pytest.mark.parametrize(
    ("event", "limit_s", "ended"),
    [
        (Stop(SESSION, 4, "done"), LEAVING_S, Exit(0, "the run is over: done")),
        (StopRequested(143), ASKED_LEAVING_S, Exit(143, "asked to stop")),
    ],
)
def test_nobody_waits_long_for_the_answer_to_a_goodbye(event: Any, limit_s: float, ended: Exit) -> None:
    worker = served()
    worker.tell(event)
    assert worker.machine.wake_at == worker.now + limit_s
    assert worker.wait(limit_s - 0.5) == []
    assert worker.wait(0.5) == [ended]


@pytest.mark.parametrize(
    ("event", "exit_code"), [(StopRequested(130), 130), (Refusal(True, "older session; join again"), 143)]
)
def test_a_second_request_or_a_server_that_knows_it_no_more_ends_the_wait(event: Any, exit_code: int) -> None:
    worker = served()
    worker.tell(StopRequested(143))
    assert worker.tell(event)[-1] == Exit(exit_code, "asked to stop")


def test_a_goodbye_is_only_waited_for_when_it_was_said() -> None:
    assert served().tell(Left(SESSION, ME)) == []


def test_an_error_in_the_users_code_ends_it_also_in_a_step() -> None:
    worker = served()
    worker.weights(0, (ME, 0, 4))
    failure, exit = worker.tell(Unable("ZeroDivisionError (model.py:7)"))
    assert failure == Send(Failure(SESSION, ME, "ZeroDivisionError (model.py:7)"))
    assert exit == Exit(2, "ZeroDivisionError (model.py:7)")

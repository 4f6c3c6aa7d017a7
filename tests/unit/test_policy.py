"""What the launcher decides, event by event, without a process."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbus.incidents import (
    Ask,
    Blame,
    Ended,
    Evaluated,
    Failed,
    Finished,
    Kill,
    Left,
    Listening,
    Members,
    Note,
    Signalled,
    Start,
    Terminate,
    Tick,
)
from gradbus.policy import Limits, Policy, describe_exit

LIMITS = Limits(
    start_s=100,
    grace_s=10,
    kill_s=5,
    leave_s=15,
    evaluator_s=120,
    evaluation_s=300,
    alone_s=30,
    backoff_s=1,
    backoff_limit_s=3,
)
DONE = Finished("done", "", 40, 0)


def begun(workers=2, restarts=3, evaluator=True, listening=True) -> Policy:
    policy = Policy(workers=workers, evaluator=evaluator, restarts=restarts, now=0.0, limits=LIMITS)
    assert policy.begin() == [Start("ps")]
    if listening:
        expected = ["evaluator"] * evaluator + [f"w{index}" for index in range(workers)]
        assert policy.handle(Listening(), 1.0) == [Start(name) for name in expected]
    return policy


def feed(policy: Policy, *events, now: float = 2.0) -> list:
    return [action for event in events for action in policy.handle(event, now)]


def without_notes(actions) -> list:
    return [action for action in actions if not isinstance(action, Note)]


def summary(policy: Policy) -> tuple[str, int]:
    assert policy.outcome is not None
    return policy.outcome.status, policy.outcome.exit_code


def test_workers_wait_for_the_ps_to_listen():
    policy = begun(listening=False)
    assert feed(policy, Tick(), now=99.0) == []
    assert feed(policy, Listening(), now=99.5) == [Start("evaluator"), Start("w0"), Start("w1")]
    assert feed(policy, Listening()) == []


def test_a_run_that_goes_well():
    policy = begun()
    assert feed(policy, Evaluated(40), DONE, Ended("w0", 0)) == []
    assert feed(policy, Ended("ps", 0)) == [Ask("evaluator"), Ask("w1")], "they may not have heard of the end"
    assert feed(policy, Ended("w1", 0)) == []
    assert policy.outcome is None, "the evaluator is still there"
    assert feed(policy, Ended("evaluator", 0)) == []
    assert summary(policy) == ("done", 0)


def test_the_missing_last_evaluation_is_made_up_for():
    policy = begun(workers=0)
    assert Start("eval") in feed(policy, Evaluated(30), DONE, Ended("ps", 0), Ended("evaluator", 0))
    assert policy.outcome is None
    feed(policy, Evaluated(40), Ended("eval", 0))
    assert summary(policy) == ("done", 0)


def test_a_failing_last_evaluation_is_told_and_not_repeated():
    policy = begun(workers=0)
    feed(policy, DONE, Ended("ps", 0), Ended("evaluator", 1))
    (blame,) = feed(policy, Ended("eval", 1))
    assert isinstance(blame, Blame) and "gradbus eval" in blame.answer
    assert summary(policy) == ("done", 0)


def test_without_an_evaluator_nothing_is_evaluated():
    policy = begun(evaluator=False, workers=0)
    feed(policy, DONE, Ended("ps", 0))
    assert summary(policy) == ("done", 0)


def test_after_a_life_that_was_long_enough_the_delays_begin_anew():
    policy = begun(workers=1, restarts=9)
    now, delays = 10.0, []
    for lived_s in (2, 2, 7, 2):
        (blame,) = feed(policy, Ended("w0", -9), now=now)
        delays.append(int(blame.answer.split()[3]))
        now += delays[-1]
        feed(policy, Tick(), now=now)
        now += lived_s
    assert delays == [1, 2, 3, 1]


@pytest.mark.parametrize("code", [1, 3, -9, -11, 0])
def test_a_dead_worker_is_started_again_later_and_later(code):
    policy = begun(workers=1, restarts=3)
    now = 10.0
    for delay_s in (1, 2, 3):  # doubled, up to the limit
        (blame,) = feed(policy, Ended("w0", code), now=now)
        assert isinstance(blame, Blame) and f"starts again in {delay_s} s" in blame.answer
        assert feed(policy, Tick(), now=now + delay_s - 0.1) == []
        assert policy.wake_at == now + delay_s
        assert feed(policy, Tick(), now=now + delay_s) == [Start("w0")]
        now += delay_s + 2
    blame, ask = feed(policy, Ended("w0", code), now=now)
    assert "left out after 3 restarts" in blame.answer
    assert ask == Ask("ps")
    assert policy.restarts == 3


@pytest.mark.parametrize("kind", ["workload", "data", "refused"])
def test_a_worker_that_would_fail_again_is_not_restarted(kind):
    policy = begun(workers=2)
    blame, *rest = feed(policy, Failed("w0", kind, "loss() raised"), Ended("w0", 2))
    assert "loss() raised" in blame.reason and "left out" in blame.answer and rest == []
    actions = feed(policy, Failed("w1", kind, "loss() raised too"), Ended("w1", 2))
    assert Ask("ps") in actions
    feed(policy, Finished("interrupted", "", 3, 143), Ended("ps", 143), Ended("evaluator", 0))
    assert summary(policy) == ("failed", 2)
    assert policy.outcome.reason == "loss() raised" and policy.outcome.explained


def test_code_2_alone_is_enough():
    policy = begun(workers=1)
    assert Ask("ps") in feed(policy, Ended("w0", 2))
    feed(policy, Ended("ps", 143), Ended("evaluator", 0))
    assert summary(policy) == ("failed", 2)


def test_crashes_until_no_worker_is_left():
    policy = begun(workers=2, restarts=0)
    feed(policy, Ended("w0", -9))
    assert Ask("ps") in feed(policy, Ended("w1", 1))
    feed(policy, Finished("interrupted", "asked to stop", 3, 143), Ended("ps", 143), Ended("evaluator", 0))
    assert summary(policy) == ("failed", 1)
    assert policy.outcome.reason.startswith("w0: killed by SIGKILL") and not policy.outcome.explained


def test_workers_of_other_machines_go_on():
    policy = begun(workers=1, restarts=0)
    feed(policy, Members(frozenset({"w0", "lab-3"})))
    assert without_notes(feed(policy, Ended("w0", 2)))[1:] == []
    feed(policy, DONE, Evaluated(40), Ended("ps", 0), Ended("evaluator", 0))
    assert summary(policy) == ("done", 0)


def test_workers_sent_home_before_the_ps_says_so():
    policy = begun(workers=2)
    actions = feed(policy, Left("w0"), Ended("w0", 0), Left("w1"), Ended("w1", 0))
    assert without_notes(actions) == []
    feed(policy, DONE, Evaluated(40), Ended("ps", 0), Ended("evaluator", 0))
    assert summary(policy) == ("done", 0)


def test_every_worker_left_and_the_ps_has_nobody():
    policy = begun(workers=1)
    feed(policy, Left("w0"), Ended("w0", 143), now=5.0)
    assert policy.wake_at == 35.0
    assert feed(policy, Tick(), now=35.0) == [Ask("ps")]
    feed(policy, Finished("interrupted", "", 3, 143), Ended("ps", 143), Ended("evaluator", 0), now=36.0)
    assert summary(policy) == ("failed", 3)


def test_no_local_worker_is_needed():
    policy = begun(workers=0)
    assert feed(policy, Tick(), now=1e6) == []
    assert policy.wake_at == float("inf")


def test_the_evaluator_never_ends_a_run():
    policy = begun(workers=1)
    (blame,) = feed(policy, Ended("evaluator", -11))
    assert "killed by SIGSEGV" in blame.reason and "training goes on" in blame.answer
    assert Start("eval") in feed(policy, DONE, Ended("w0", 0), Ended("ps", 0))


@pytest.mark.parametrize("code", [-11, -9, 1, 0])
def test_the_death_of_the_ps_ends_the_run_when_it_may_not_be_started_again(code):
    policy = begun(restarts=0)
    blame, *asked = feed(policy, Ended("ps", code), now=50.0)
    assert describe_exit(code) in blame.reason and blame.answer == "the run was ended"
    assert asked == [Ask("evaluator"), Ask("w0"), Ask("w1")]
    assert feed(policy, Tick(), now=50.0) == [Terminate("evaluator"), Terminate("w0"), Terminate("w1")]
    feed(policy, Ended("evaluator", -15), Ended("w0", -15), Ended("w1", -15))
    assert summary(policy) == ("failed", 1)
    assert not policy.outcome.explained


@pytest.mark.parametrize("code", [-11, -9, 1])
def test_a_ps_that_dies_is_started_again_and_the_others_stay(code):
    policy = begun(restarts=1)
    (blame,) = feed(policy, Ended("ps", code), now=50.0)
    assert describe_exit(code) in blame.reason and "restart 1 of 1" in blame.answer
    assert feed(policy, Tick(), now=50.0) == [Start("ps")]
    assert feed(policy, Listening(), now=52.0) == [], "workers and evaluator are still there"
    assert policy.outcome is None and policy.restarts == 1
    blame, *asked = feed(policy, Ended("ps", code), now=60.0)
    assert blame.answer == "the run was ended" and asked == [Ask("evaluator"), Ask("w0"), Ask("w1")]
    feed(policy, Ended("evaluator", -15), Ended("w0", -15), Ended("w1", -15), now=61.0)
    assert summary(policy) == ("failed", 1)


def test_a_ps_that_dies_before_it_serves_again_is_given_more_time_each_time():
    policy = begun(restarts=2)
    feed(policy, Ended("ps", -9), now=50.0)
    assert feed(policy, Tick(), now=50.0) == [Start("ps")]
    feed(policy, Ended("ps", -9), now=51.0)
    assert feed(policy, Tick(), now=51.5) == []
    assert feed(policy, Tick(), now=53.0) == [Start("ps")]
    feed(policy, Listening(), DONE, Ended("ps", 0), Ended("w0", 0), Ended("w1", 0), now=55.0)
    feed(policy, Evaluated(40), Ended("evaluator", 0), now=56.0)
    assert summary(policy) == ("done", 0)


def test_an_evaluator_that_died_comes_back_with_the_ps():
    policy = begun()
    feed(policy, Ended("evaluator", 1), Ended("ps", -9), now=50.0)
    feed(policy, Tick(), now=50.0)
    assert feed(policy, Listening(), now=52.0) == [Start("evaluator")]


def test_a_signal_while_the_ps_is_down_ends_everything():
    policy = begun()
    feed(policy, Ended("ps", -9), now=50.0)
    assert feed(policy, Signalled(signal.SIGINT), now=50.1) == [Ask("evaluator"), Ask("w0"), Ask("w1")]
    feed(policy, Ended("evaluator", 0), Ended("w0", 130), Ended("w1", 130), Tick(), now=51.0)
    assert summary(policy) == ("interrupted", 130)


@pytest.mark.parametrize("kind", ["settings", "data", "workload", "bind"])
def test_a_ps_that_cannot_start_gives_one_line(kind):
    policy = begun(listening=False)
    assert feed(policy, Failed("ps", kind, "port 5555 is taken by pid 12"), Ended("ps", 2)) == []
    assert summary(policy) == ("failed", 2)
    assert policy.outcome.reason == "port 5555 is taken by pid 12" and policy.outcome.explained


def test_a_checkpoint_that_does_not_fit_is_one_line_too():
    policy = begun(listening=False)
    feed(policy, Failed("ps", "checkpoint", "of another experiment"), Ended("ps", 1))
    assert summary(policy) == ("failed", 1) and policy.outcome.explained


def test_an_internal_error_of_the_ps_comes_with_a_table():
    policy = begun(listening=False)
    (blame,) = feed(policy, Failed("ps", "internal", "KeyError: 3"), Ended("ps", 1))
    assert blame.reason == "KeyError: 3 (exit code 1)"
    assert summary(policy) == ("failed", 1) and not policy.outcome.explained


def test_a_ps_that_never_listens():
    policy = begun(listening=False)
    assert feed(policy, Tick(), now=100.0) == [Terminate("ps")]
    feed(policy, Ended("ps", -15), now=101.0)
    assert summary(policy) == ("failed", 3)


def test_a_training_failure_keeps_its_reason_and_code():
    policy = begun(workers=1)
    feed(policy, Finished("failed", "step 12, shard 3: loss is NaN", 12, 1), Ended("ps", 1), Ended("w0", 0))
    feed(policy, Ended("evaluator", 0))
    assert summary(policy) == ("failed", 1)
    assert policy.outcome.reason == "step 12, shard 3: loss is NaN"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)], ids=str
)
def test_the_first_signal_asks_the_ps_alone(number, code):
    policy = begun()
    assert without_notes(feed(policy, Signalled(number), now=20.0)) == [Ask("ps")]
    assert feed(policy, Tick(), now=29.9) == []
    feed(policy, Finished("interrupted", "stopped by a signal", 17, 143), Ended("ps", 143), now=21.0)
    feed(policy, Ended("w0", 0), Ended("w1", 0), Ended("evaluator", 0), now=22.0)
    assert summary(policy) == ("interrupted", code)
    assert policy.outcome.reason == "stopped by a signal"


def test_the_ladder_after_the_first_signal():
    policy = begun(workers=1)
    feed(policy, Signalled(signal.SIGINT), now=20.0)
    names = ["ps", "evaluator", "w0"]
    assert sorted(map(repr, feed(policy, Tick(), now=30.0))) == sorted(repr(Terminate(name)) for name in names)
    assert feed(policy, Tick(), now=34.9) == []
    assert sorted(map(repr, feed(policy, Tick(), now=35.0))) == sorted(repr(Kill(name)) for name in names)
    feed(policy, *(Ended(name, -9) for name in names), now=35.1)
    assert summary(policy) == ("interrupted", 130)


def test_the_second_signal_kills_at_once():
    policy = begun(workers=1)
    feed(policy, Signalled(signal.SIGINT), now=20.0)
    assert feed(policy, Signalled(signal.SIGINT), now=20.5) == [Kill("evaluator"), Kill("ps"), Kill("w0")]
    feed(policy, Ended("ps", -9), Ended("evaluator", -9), Ended("w0", -9), now=20.6)
    assert summary(policy) == ("interrupted", 130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_echo_of_a_signal_is_no_second_signal(number):
    policy = begun(workers=0, evaluator=False)
    feed(policy, Signalled(number), now=20.0)
    assert feed(policy, Signalled(number), now=20.1) == []
    assert feed(policy, Signalled(number), now=21.5) == [Kill("ps")]


@pytest.mark.parametrize("code", [-2, -15, 143])
def test_a_signal_before_the_ps_listens(code):
    policy = begun(listening=False)
    assert without_notes(feed(policy, Signalled(signal.SIGINT))) == [Ask("ps")]
    assert feed(policy, Listening()) == [], "nobody is started any more"
    feed(policy, Ended("ps", code))
    assert summary(policy) == ("interrupted", 130)


def test_a_signal_cancels_restarts():
    policy = begun(workers=1)
    feed(policy, Ended("w0", -9), now=5.0)
    feed(policy, Signalled(signal.SIGINT), now=5.5)
    assert feed(policy, Tick(), now=7.0) == []


def test_a_signal_in_the_last_evaluation():
    policy = begun(workers=0)
    feed(policy, DONE, Ended("ps", 0), now=30.0)
    assert feed(policy, Signalled(signal.SIGINT), now=31.0) == [Ask("evaluator")]
    assert feed(policy, Tick(), now=36.0) == [Terminate("evaluator")]
    feed(policy, Ended("evaluator", -15), now=36.5)
    assert summary(policy) == ("interrupted", 130)


def test_finished_just_before_the_signal_and_evaluated():
    policy = begun(workers=0)
    feed(policy, DONE, Evaluated(40), Ended("ps", 0), Signalled(signal.SIGINT), Ended("evaluator", 0))
    assert summary(policy) == ("done", 0)


def test_those_who_stay_after_the_end_are_ended():
    policy = begun(workers=1)
    feed(policy, DONE, Ended("ps", 0), now=50.0)
    assert feed(policy, Tick(), now=65.0) == [Terminate("w0")]
    assert feed(policy, Tick(), now=70.0) == [Kill("w0")]
    feed(policy, Ended("w0", -9), now=70.1)
    assert feed(policy, Tick(), now=169.9) == []
    assert feed(policy, Tick(), now=170.0) == [Terminate("evaluator")]


def test_who_cannot_be_killed_is_named_and_not_waited_for():
    policy = begun(workers=0, evaluator=False)
    feed(policy, Signalled(signal.SIGINT), Signalled(signal.SIGINT), now=1.0)
    (note,) = feed(policy, Tick(), now=6.0)
    assert isinstance(note, Note) and "ps does not end" in note.text
    assert policy.outcome is not None and policy.outcome.exit_code != 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0, without a word"),
        (1, "exit code 1"),
        (-9, "killed by SIGKILL: likely out of memory, or killed by hand"),
        (-11, "killed by SIGSEGV"),
        (137, "exit code 137, as after SIGKILL: likely out of memory, or killed by hand"),
        (255, "exit code 255"),
    ],
)
def test_exit_codes_in_words(code, text):
    assert describe_exit(code) == text


EVENTS = st.one_of(
    st.just(Listening()),
    st.just(DONE),
    st.builds(Ended, st.sampled_from(["ps", "evaluator", "eval", "w0", "w1"]), st.sampled_from([0, 1, 2, 143, -9])),
    st.builds(Left, st.sampled_from(["w0", "w1"])),
    st.builds(Failed, st.sampled_from(["ps", "w0"]), st.sampled_from(["data", "internal"]), st.just("why")),
    st.builds(Signalled, st.sampled_from([signal.SIGINT, signal.SIGTERM])),
    st.builds(Evaluated, st.sampled_from([30, 40])),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 50)), max_size=25))
def test_whatever_happens_it_ends(story):
    """Once the PS is gone everybody ends in bounded time, and a process is only touched while it lives."""
    policy, now, alive = begun(listening=False), 0.0, {"ps"}

    def follow(actions) -> None:
        for action in actions:
            match action:
                case Start(name):
                    assert name not in alive
                    alive.add(name)
                case Ask(name) | Terminate(name) | Kill(name):
                    assert name in alive

    for event, pause_s in story:
        now += pause_s
        if isinstance(event, Ended):
            if event.name not in alive:
                continue
            alive.discard(event.name)
        follow(policy.handle(event, now))
        follow(policy.handle(Tick(), now))
    if "ps" in alive:
        alive.discard("ps")
        follow(policy.handle(Ended("ps", 1), now))
    for _ in range(100):
        if policy.outcome is not None:
            break
        now = max(now, policy.wake_at)
        assert now < float("inf"), "waits for ever"
        for action in policy.handle(Tick(), now):
            follow([action])
            if isinstance(action, Kill):
                alive.discard(action.name)
                follow(policy.handle(Ended(action.name, -9), now))
    assert policy.outcome is not None
    assert (policy.outcome.exit_code == 0) == (policy.outcome.status == "done")


def test_an_evaluator_that_goes_in_good_order_before_the_ps_has_said_goodbye_is_no_failure():
    """The PS may still be waiting for a member that was killed."""
    policy = begun()
    assert feed(policy, Ended("evaluator", 0)) == []
    (blame,) = feed(begun(), Ended("evaluator", 1))
    assert isinstance(blame, Blame)

"""The parameter server's decisions, event by event. The invariants are checked after each of them."""

from typing import Any

import pytest

from bus import messages
from bus.messages import (
    Alive,
    Assignment,
    Contribution,
    Evaluate,
    Failure,
    Fetch,
    Hello,
    Leave,
    Left,
    Malformed,
    Message,
    Ready,
    Refusal,
    Serving,
    Stop,
    Subscribed,
    Weights,
)
from ps.actions import (
    Accept,
    Action,
    Admit,
    Broadcast,
    CloseStep,
    Finish,
    MemberChanged,
    Note,
    Publish,
    PublishEvaluation,
    Refused,
    Reply,
    Save,
    SendSnapshot,
    StopRequested,
    Tick,
    Updated,
)
from ps.machine import LEAVING_S, Machine, Phase, Rules

SESSION = 77


class Ps:
    """A machine with a clock that only moves when told, and workers whose words are one call each."""

    def __init__(self, *, version: int = 0, **rules: Any) -> None:
        defaults: dict[str, Any] = dict(
            steps=3, shards=4, buckets=1, min_workers=1, max_wait_s=60.0, heartbeat_s=1.0, heartbeat_timeout_s=5.0,
            nonfinite="stop", nonfinite_limit=3, save_every=0, evaluate_every=0, evaluate=False,
        )  # fmt: skip
        self.now = 1000.0
        self.machine = Machine(Rules(**defaults | rules), session=SESSION, version=version, now=self.now)

    def tell(self, event: Any, peer: bytes = b"") -> list[Action]:
        actions = self.machine.handle(event, now=self.now, peer=peer)
        self.machine.check()
        return actions

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass as the loop does: half a second at a time."""
        actions: list[Action] = []
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            actions += self.tell(Tick())
        return actions

    def hello(self, name: str, instance: int = 1, peer: bytes = b"") -> list[Action]:
        return self.tell(Hello(name, "lab", 40, instance, {}), peer or name.encode())

    def ready(self, name: str) -> list[Action]:
        """All that a worker says until it can be planned."""
        (admit,) = only(Admit, self.hello(name))
        actions = self.tell(Ready(SESSION, admit.member, "cpu"), name.encode())
        return actions + self.tell(Subscribed(admit.member))

    def push(self, *node: int, bucket: int = 0, version: int | None = None, member: int = 1, **more: Any) -> list[Any]:
        version = self.machine.version if version is None else version
        fields: dict[str, Any] = {"session": SESSION, "examples": 8 * (node[1] - node[0]), "sums": {"loss": 1.0}}
        made = dict(member=member, version=version, bucket=bucket, low=node[0], high=node[1])
        return self.tell(Contribution(**fields | made | more))

    def step(self, **updated: Any) -> list[Action]:
        """The open step from its first contribution to what follows the update."""
        (close,) = only(CloseStep, self.push(0, 4))
        return self.tell(Updated(**{"applied": not close.skip} | updated))


def only(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def said(kind: type[Message], actions: list[Action]) -> list[Any]:
    """The messages of one kind among ``actions``, to whomever."""
    return [a.message for a in actions if isinstance(a, Reply | Broadcast) and isinstance(a.message, kind)]


def plan(*rows: tuple[int, int, int]) -> tuple[Assignment, ...]:
    return tuple(Assignment(*row) for row in rows)


# Joining


def test_a_worker_joins_and_the_first_step_opens_when_it_is_ready() -> None:
    ps = Ps()
    assert ps.hello("w0") == [Admit(b"w0", 1), MemberChanged("joined", 1, "w0", "lab", 40)]
    assert ps.tell(Ready(SESSION, 1, "cpu"), b"w0") == []
    opened = ps.tell(Subscribed(1))
    assert opened[0] == MemberChanged("ready", 1, "w0", "lab", 40)
    (publish,) = only(Publish, opened)
    assert (publish.version, publish.plan) == (0, plan((1, 0, 4)))


def test_subscriptions_may_arrive_before_the_worker_is_ready() -> None:
    ps = Ps()
    ps.hello("w0")
    assert ps.tell(Subscribed(1)) == []
    assert only(Publish, ps.tell(Ready(SESSION, 1, "cpu"), b"w0"))


def test_a_repeated_hello_is_admitted_again_as_the_same_member() -> None:
    ps = Ps()
    ps.hello("w0")
    assert ps.hello("w0") == [Admit(b"w0", 1)]


def test_training_waits_for_min_workers_once() -> None:
    ps = Ps(min_workers=2, heartbeat_timeout_s=600.0)
    assert not only(Publish, ps.ready("w0"))
    assert ps.machine.phase is Phase.WAITING
    (publish,) = only(Publish, ps.ready("w1"))
    assert publish.plan == plan((1, 0, 2), (2, 2, 4))
    ps.tell(Leave(SESSION, 2), b"w1")
    assert only(Publish, ps.step()), "one worker goes on alone"
    assert not only(Finish, ps.wait(100)), "for as long as it takes"


def test_a_snapshot_of_before_the_first_step_has_an_older_plan_than_the_step() -> None:
    """A worker that fetched while the server waited for others must not take the plan of the step for known."""
    ps = Ps(min_workers=2)
    ps.ready("w0")
    (early,) = only(SendSnapshot, ps.tell(Fetch(SESSION, 1, -1), b"w0"))
    (serving,) = said(Serving, ps.wait(1))
    (publish,) = only(Publish, ps.ready("w1"))
    assert early.plan == () and early.revision == serving.revision < publish.revision


def test_a_worker_that_joins_during_a_step_is_planned_from_the_next_one_on() -> None:
    ps = Ps()
    ps.ready("w0")
    late = ps.ready("w1")
    assert not only(Publish, late) and not said(messages.Plan, late)
    (publish,) = only(Publish, ps.step())
    assert publish.plan == plan((1, 0, 2), (2, 2, 4))


def test_a_new_life_of_a_worker_replaces_the_old_one_and_gets_its_shards() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    ps.step()
    actions = ps.hello("w1", instance=2, peer=b"w1 again")
    assert actions[0] == MemberChanged("replaced", 2, "w1", "lab", 40, "joined again as member 3")
    (revised,) = said(messages.Plan, actions)
    assert revised.plan == plan((1, 0, 2), (1, 2, 4))
    assert ps.tell(Alive(SESSION, 2, 0, "computing"), b"w1") == [
        Reply(b"w1", Refusal(True, "not a member (any more); join again"))
    ]
    ps.tell(Ready(SESSION, 3, "cpu"), b"w1 again"), ps.tell(Subscribed(3))
    (publish,) = only(Publish, ps.step())
    assert publish.plan == plan((1, 0, 2), (3, 2, 4))


FROM_MEMBER: list[Message] = [
    Ready(0, 1, "cpu"), Alive(0, 1, 3, "idle"), Fetch(0, 1, -1), Failure(0, 1, "no data"),
]  # fmt: skip


@pytest.mark.parametrize("message", FROM_MEMBER, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize(
    ("session", "member", "peer", "reason"),
    [
        (SESSION - 1, 1, b"w0", "older session"),
        (SESSION, 2, b"w0", "not a member (any more)"),
        (SESSION, 1, b"someone else", "not a member (any more)"),
    ],
)
def test_who_is_not_that_member_of_this_session_is_asked_to_join_again(
    message: Any, session: int, member: int, peer: bytes, reason: str
) -> None:
    ps = Ps()
    ps.hello("w0"), ps.tell(Subscribed(1))
    foreign = type(message)(session, member, *[getattr(message, f) for f in message.__struct_fields__[2:]])
    assert ps.tell(foreign, peer) == [Reply(peer, Refusal(True, f"{reason}; join again"))]
    assert ps.machine.refused == {reason: 1}
    assert not ps.machine.members.members[1].ready and ps.machine.members.members[1].version == -1


def test_words_in_the_name_of_another_keep_nobody_alive() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    for _ in range(12):
        ps.wait(0.5)
        ps.tell(Alive(SESSION, 2, 0, "idle"), b"w1")
        ps.tell(Alive(SESSION, 1, 0, "idle"), b"w1")
    assert list(ps.machine.members.members) == [2]


@pytest.mark.parametrize(
    "message",
    [Weights(SESSION, 0, 0, 9, ()), Serving(SESSION, 5, 0, ()), Stop(SESSION, 0, "now"), Left(SESSION, 1),
     messages.Plan(SESSION, 0, 9, plan((9, 0, 4))), Refusal(False, "go"), Evaluate(SESSION, 0, 0)],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_what_is_not_for_a_server_is_counted_and_changes_nothing(message: Message) -> None:
    ps = Ps()
    ps.ready("w0")
    assert ps.tell(message, b"w0") == [Note(f"refused: {type(message).__name__} is not for the PS")]
    assert ps.machine.refused == {"unexpected message": 1}
    assert ps.machine.plan == plan((1, 0, 4)) and ps.machine.phase is Phase.OPEN


def test_a_flood_of_garbage_is_counted_under_one_name_and_told_a_few_times() -> None:
    """A peer chooses the bytes; it must not choose how many counters there are, nor how many lines people read."""
    ps = Ps()
    told = [ps.tell(Malformed("control", f"found a message of kind b'kind{number}'")) for number in range(1, 101)]
    assert [number for number, actions in enumerate(told, start=1) if actions] == [1, 10, 100]
    assert told[0] == [Note("refused on control: found a message of kind b'kind1'")]
    assert told[99] == [Note("refused on control: found a message of kind b'kind100' (100 so far)")]
    assert list(ps.machine.refused.values()) == [100]


def test_a_peer_of_another_protocol_version_is_told_so_each_time_it_asks() -> None:
    ps = Ps()
    reason = "hello: found protocol 2, expected 1; install the same release on both sides"
    other = Malformed("control", reason, other_protocol=True)
    assert ps.tell(other, b"w9") == [Note(f"refused on control: {reason}"), Reply(b"w9", Refusal(False, reason))]
    assert ps.tell(other, b"w9") == [Reply(b"w9", Refusal(False, reason))]
    assert ps.tell(Malformed("gradients", reason, other_protocol=True)) == []  # there is nobody to answer


# Steps


def test_a_step_closes_when_the_last_bucket_of_the_last_shard_is_in() -> None:
    ps = Ps(buckets=2)
    ps.ready("w0")
    for node, bucket in (((0, 2), 0), ((0, 2), 1), ((3, 4), 0), ((2, 3), 0), ((3, 4), 1)):
        actions = ps.push(*node, bucket=bucket)
        assert [type(action) for action in actions] == [Accept]
    accept, close = ps.push(2, 3, bucket=1)
    assert isinstance(accept, Accept) and accept.taken.sums == ((2, 4), (0, 4))
    assert (close.version, close.result.examples, close.skip) == (0, 32, False)
    assert close.result.makers == ((0, 2, 1), (2, 3, 1), (3, 4, 1))


def test_each_update_makes_one_version_and_opens_the_next_step() -> None:
    ps = Ps()
    ps.ready("w0")
    for version in (1, 2):
        (publish,) = only(Publish, ps.step())
        assert publish.version == ps.machine.version == version


@pytest.mark.parametrize(
    ("offer", "kind"),
    [
        ({"version": 1}, "other version"),
        ({"version": -1}, "other version"),
        ({"session": SESSION - 1}, "older session"),
        ({"high": 1}, "duplicate"),
        ({"high": 3}, "no such shards"),
        ({"high": 9}, "no such shards"),
        ({"bucket": 1}, "no such bucket"),
    ],
)
def test_a_contribution_that_cannot_be_used_is_refused_with_the_reason(offer: dict[str, int], kind: str) -> None:
    ps = Ps()
    ps.ready("w0")
    ps.push(0, 2)
    fields: dict[str, Any] = dict(session=SESSION, member=1, version=0, bucket=0, low=0, high=4, examples=8, sums={})
    made = Contribution(**fields | offer)
    (refused,) = ps.tell(made)
    assert isinstance(refused, Refused) and refused.contribution == made and refused.open_version == 0
    assert refused.reason.split(":")[0] == kind and ps.machine.refused == {kind: 1}
    assert ps.machine.round.missing() == ((2, 4),)


def test_nothing_is_taken_while_no_step_is_open() -> None:
    ps = Ps(min_workers=2)
    ps.ready("w0")
    (refused,) = ps.push(0, 4)
    assert refused.reason == "no open step: the server is waiting"


def test_a_contribution_counts_for_what_it_is_and_not_for_who_sent_it() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    ps.step()
    ps.tell(Leave(SESSION, 2), b"w1")
    assert only(Accept, ps.push(2, 4, member=2)), "it left, but its last gradient is as good as any"
    assert only(Accept, ps.push(0, 2, member=99))


def test_a_refused_contribution_of_an_older_session_does_not_name_a_member_of_this_one() -> None:
    ps = Ps()
    ps.ready("w0")
    (refused,) = ps.push(0, 4, session=SESSION - 1, member=1)
    assert refused.name == "member 1"
    (refused,) = ps.push(0, 4, version=5, member=1)
    assert refused.name == "w0"


def test_a_contribution_of_an_older_session_is_no_sign_of_life() -> None:
    ps = Ps()
    ps.ready("w0")
    for _ in range(12):
        ps.wait(0.5)
        ps.push(0, 4, session=SESSION - 1)
    assert not ps.machine.members.members


def test_the_speed_of_a_member_follows_its_contributions() -> None:
    ps = Ps(buckets=2)
    ps.ready("w0")
    for node, computed_s in (((0, 2), 0.5), ((2, 4), 0.25)):
        for bucket in (0, 1):
            ps.push(*node, bucket=bucket, computed_s=computed_s)
    member = ps.machine.members.members[1]
    assert member.contributions == 2 and 32.0 < member.examples_per_second < 64.0


def finish(ps: Ps, actions: list[Action]) -> None:
    """Answer a CloseStep among ``actions``, if there is one."""
    for _ in only(CloseStep, actions):
        ps.tell(Updated(True))


def test_a_slow_member_gets_fewer_shards_and_is_tried_again() -> None:
    ps = Ps(steps=1000)
    ps.ready("w0"), ps.ready("w1")
    speeds = {1: 100.0, 2: 10.0}
    finish(ps, ps.push(0, 4))  # before the second was ready
    given = []
    for _ in range(80):
        given.append(sum(each.high - each.low for each in ps.machine.plan if each.member == 2))
        for each in ps.machine.plan:
            examples = 8 * (each.high - each.low)
            pushed = ps.push(each.low, each.high, member=each.member, computed_s=examples / speeds[each.member])
            finish(ps, pushed)
    assert given[0] == 2 and given[10] == 0
    assert 0 < sum(given[10:]) < 20


def test_what_is_late_is_given_to_a_member_that_has_nothing_to_do() -> None:
    ps = Ps(steps=1000, heartbeat_timeout_s=100.0)
    ps.ready("w0"), ps.ready("w1")
    finish(ps, ps.push(0, 4))
    for _ in range(10):
        ps.now += 1.0
        ps.push(0, 2, member=1)
        finish(ps, ps.push(2, 4, member=2))
    version = ps.machine.version
    ps.push(0, 2, member=1)
    ps.now += 1.0
    assert not only(Broadcast, ps.tell(Tick()))  # within the usual time
    ps.now += 1.0
    (told,) = [each.message for each in only(Broadcast, ps.tell(Tick()))]
    assert told.plan == (Assignment(1, 0, 2), Assignment(2, 2, 4), Assignment(1, 2, 4))
    finish(ps, ps.push(2, 4, member=1))
    assert ps.machine.version == version + 1
    (refused,) = only(Refused, ps.push(2, 4, member=2, version=version))
    assert refused.reason.startswith("other version")


@pytest.mark.parametrize("known", [True, False], ids=["after a while", "from the start"])
def test_one_who_hangs_costs_a_few_late_steps_and_then_next_to_nothing(known: bool) -> None:
    """It is still a member, and says nothing: nobody can measure how slow it is."""
    ps = Ps(steps=1000, heartbeat_timeout_s=1e6)
    ps.ready("w0")
    seconds, given = [], []
    for step in range(100):
        if step == 1:
            ps.ready("w1")
        began, done, version = ps.now, set(), ps.machine.version
        given.append(sum(each.high - each.low for each in ps.machine.plan if each.member == 2))
        while ps.machine.version == version:
            ps.now += 0.01
            actions = ps.tell(Tick())
            for each in ps.machine.plan:
                if (each.member == 1 and each not in done) or (each.member == 2 and known and step == 2):
                    ps.now += 0.01 * (each.high - each.low)
                    done.add(each)
                    actions += ps.push(each.low, each.high, member=each.member, computed_s=0.01)
            finish(ps, actions)
        seconds.append(ps.now - began)
    assert max(seconds) < 4 * seconds[0], "help does not come later and later"
    assert given[2] == 2 and 0 < sum(given[20:]) < 80, "it is tried again now and then"
    assert sum(seconds) < 100 * 1.5 * seconds[0]


def late_in_step_1(*, balance: bool = True, **rules: Any) -> Ps:
    """Two workers, steps of a tenth of a second; w1 owes shards 2 and 3, and was seen computing."""
    ps = Ps(steps=1000, heartbeat_timeout_s=100.0, balance=balance, **rules)
    ps.ready("w0"), ps.ready("w1")
    ps.now += 0.1
    finish(ps, ps.push(0, 4))
    ps.tell(Alive(SESSION, 2, 1, "computing shard 2 of step 1"), b"w1")
    ps.push(0, 2, member=1)
    return ps


def test_who_is_late_is_told_once_with_what_was_done() -> None:
    ps = late_in_step_1()
    (note,) = only(Note, ps.wait(5))
    assert note.text == (
        "step 1 waits for shards 2-3 of w1 (member 2, lab pid 40), heard 1.5 s ago, 1.5 s ago it was computing shard "
        "2 of step 1: 1.5 s so far, usual are 0.1 s; given to w0 as well"
    )


def test_where_nobody_may_help_the_line_says_so() -> None:
    (note,) = only(Note, late_in_step_1(balance=False).wait(5))
    assert note.text.endswith("usual are 0.1 s; nobody is idle to help")


def test_a_server_that_was_stopped_calls_nobody_late() -> None:
    ps = late_in_step_1()
    ps.now += 600.0
    assert not only(Note, ps.tell(Tick())), "at most one heartbeat of that was spent listening"


def test_what_takes_long_becomes_usual_and_is_told_no_more() -> None:
    ps = Ps(steps=1000, heartbeat_timeout_s=100.0)
    ps.ready("w0")
    ps.now += 0.1
    finish(ps, ps.push(0, 4))
    notes = []
    for _ in range(20):
        notes += only(Note, ps.wait(8))
        finish(ps, ps.push(0, 4))
    assert 0 < len(notes) < 10 and not only(Note, ps.wait(8))


def test_waiting_for_workers_is_told_every_few_seconds() -> None:
    ps = Ps(min_workers=2, max_wait_s=60.0, heartbeat_timeout_s=100.0)
    ps.ready("w0"), ps.hello("w1")
    notes = [note.text for note in only(Note, ps.wait(30))]
    assert notes[0] == (
        "1 of 2 workers ready after 5 s: w1 (member 2, lab pid 40) is preparing; waiting for another 55 s"
    )
    assert len(notes) == 3


# Too few are left


def few(too_few: str) -> tuple[Ps, list[Action]]:
    """Two are wanted, and one of them goes."""
    ps = Ps(min_workers=2, steps=100, too_few=too_few, max_wait_s=30.0)
    ps.ready("w0"), ps.ready("w1")
    finish(ps, ps.push(0, 4))
    return ps, ps.tell(Leave(SESSION, 2), b"w1")


def test_by_default_training_goes_on_with_who_is_left() -> None:
    _, actions = few("go_on")
    (told,) = said(messages.Plan, actions)
    assert {each.member for each in told.plan} == {1}


def test_too_few_may_wait_for_others() -> None:
    ps, actions = few("wait")
    assert not said(messages.Plan, actions), "what the other owed waits, too"
    finish(ps, ps.push(0, 4))  # w0 had it all, or someone did it late
    assert ps.machine.phase is Phase.OPEN and ps.machine.plan == ()
    (told,) = said(messages.Plan, ps.ready("w2"))
    assert {each.member for each in told.plan} == {1, 3}


def test_too_few_may_not_wait_for_ever() -> None:
    ps, _ = few("wait")
    ps.tell(Alive(SESSION, 1, 1, "waiting"), b"w0")
    stopped = []
    for _ in range(40):
        ps.tell(Alive(SESSION, 1, 1, "waiting"), b"w0")
        stopped += ps.wait(1)
    (stop,) = {each.reason for each in said(Stop, stopped)}
    assert stop.startswith("1 of 2 workers were ready after 30 s") and only(Save, stopped)


def test_too_few_may_stop_the_run_with_a_checkpoint() -> None:
    ps, actions = few("stop")
    assert only(Save, actions) == [Save(1, True)]
    ps.tell(Leave(SESSION, 1), b"w0")
    assert ps.machine.finished


def test_without_balance_everyone_gets_the_same_and_nobody_helps() -> None:
    ps = Ps(steps=1000, balance=False, heartbeat_timeout_s=100.0)
    ps.ready("w0"), ps.ready("w1")
    finish(ps, ps.push(0, 4, computed_s=0.1))
    for _ in range(5):
        ps.now += 1.0
        ps.push(0, 2, member=1, computed_s=0.1)
        finish(ps, ps.push(2, 4, member=2, computed_s=10.0))
        assert ps.machine.plan == (Assignment(1, 0, 2), Assignment(2, 2, 4))
    ps.push(0, 2, member=1)
    ps.now += 30.0
    assert not only(Broadcast, ps.tell(Tick()))


def test_a_snapshot_carries_the_plan_of_the_open_step() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    ps.step()
    ps.tell(Leave(SESSION, 1), b"w0")
    (snapshot,) = ps.tell(Fetch(SESSION, 2, 0), b"w1")
    assert snapshot == SendSnapshot(b"w1", ps.machine.revision, plan((2, 2, 4), (2, 0, 2)))


# Losses


@pytest.mark.parametrize("goodbye", [Leave(SESSION, 2), Failure(SESSION, 2, "out of memory"), None])
def test_open_shards_of_one_who_goes_are_planned_again_at_once(goodbye: Message | None) -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    ps.step()
    ps.push(2, 3, member=2)
    if goodbye:
        actions = ps.tell(goodbye, b"w1")
    else:
        actions = []
        for _ in range(12):
            actions += ps.tell(Alive(SESSION, 1, 1, "idle"), b"w0") + ps.wait(0.5)
    (revised,) = said(messages.Plan, actions)
    assert (revised.version, revised.plan) == (1, plan((1, 0, 2), (1, 3, 4)))
    (change,) = only(MemberChanged, actions)
    expected = {Leave: ("left", ""), Failure: ("failed", "out of memory")}.get(type(goodbye))  # type: ignore[arg-type]
    if expected:
        assert (change.event, change.reason) == expected
    else:
        assert change.event == "lost" and change.reason.startswith("not heard for 5.")


def test_revisions_of_a_plan_rise() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1"), ps.ready("w2")
    (publish,) = only(Publish, ps.step())
    first = said(messages.Plan, ps.tell(Leave(SESSION, 2), b"w1"))
    second = said(messages.Plan, ps.tell(Leave(SESSION, 3), b"w2"))
    revisions = [publish.revision, first[0].revision, second[0].revision]
    assert revisions == sorted(set(revisions))


def test_one_who_owes_nothing_leaves_without_a_new_plan() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    ps.step()
    ps.push(2, 4, member=2)
    actions = ps.tell(Leave(SESSION, 2), b"w1")
    assert actions == [Reply(b"w1", Left(SESSION, 2)), MemberChanged("left", 2, "w1", "lab", 40)]


def test_a_leave_is_answered_also_when_it_comes_again_or_of_an_older_session() -> None:
    ps = Ps()
    ps.ready("w0")
    ps.tell(Leave(SESSION, 1), b"w0")
    assert ps.tell(Leave(SESSION, 1), b"w0") == [Reply(b"w0", Left(SESSION, 1))]
    assert ps.tell(Leave(5, 1), b"w0") == [Reply(b"w0", Left(5, 1))]


def test_a_step_without_anyone_left_waits_and_is_given_to_the_next_who_comes() -> None:
    ps = Ps()
    ps.ready("w0")
    ps.push(0, 2)
    ps.tell(Leave(SESSION, 1), b"w0")
    assert ps.machine.phase is Phase.OPEN
    (revised,) = said(messages.Plan, ps.ready("w1"))
    assert revised.plan == plan((2, 2, 4))
    assert only(CloseStep, ps.push(2, 4, member=2)), "what had arrived counts"


def test_the_run_is_given_up_when_nobody_is_there_for_max_wait_s() -> None:
    ps = Ps(max_wait_s=10.0)
    ps.ready("w0"), ps.step()
    ps.tell(Leave(SESSION, 1), b"w0")
    assert not only(Finish, ps.wait(9.5))
    actions = ps.wait(0.5)
    assert only(Save, actions) == [Save(1, True)]
    assert only(Finish, actions) == [Finish("failed", "no worker was ready for 10 s (nobody is here)", 3)]


def test_the_clock_of_max_wait_s_starts_anew_with_each_worker() -> None:
    ps = Ps(max_wait_s=10.0)
    ps.wait(9)
    ps.ready("w0"), ps.tell(Leave(SESSION, 1), b"w0")
    assert not only(Finish, ps.wait(9.5))


def test_too_few_workers_are_not_waited_for_without_end() -> None:
    ps = Ps(min_workers=3, max_wait_s=10.0, heartbeat_timeout_s=60.0)
    ps.ready("w0"), ps.ready("w1")
    actions = ps.wait(10)
    (stop,) = said(Stop, only(Broadcast, actions))
    assert stop.reason.startswith("2 of 3 workers were ready after 10 s (w0 ")
    ps.tell(Leave(SESSION, 1), b"w0")
    assert only(Finish, ps.tell(Leave(SESSION, 2), b"w1"))[0].exit_code == 3


def test_who_hangs_while_joining_cannot_hold_up_the_end() -> None:
    ps = Ps(max_wait_s=10.0, heartbeat_timeout_s=600.0)
    ps.hello("w0")  # and then not a word
    actions = ps.wait(10 + LEAVING_S + 1)
    assert len(said(Stop, only(Broadcast, actions))) == 1
    assert len(only(Finish, actions)) == 1


# Heartbeats and silence


def test_heartbeats_name_the_version_and_what_is_missing() -> None:
    ps = Ps()
    ps.ready("w0"), ps.hello("w1")
    ps.push(0, 1)
    actions = ps.wait(1)
    serving = Serving(SESSION, 0, ps.machine.revision, ((1, 2), (2, 4)))
    assert actions == [Reply(b"w0", serving), Reply(b"w1", serving)]


def test_the_server_wants_to_be_woken_for_its_next_heartbeat() -> None:
    ps = Ps(heartbeat_s=2.0)
    assert ps.machine.wake_at == 1002.0
    ps.ready("w0")
    wake_at = ps.machine.wake_at
    assert wake_at == 1002.0
    ps.now = wake_at
    assert len(said(Serving, ps.tell(Tick()))) == 1
    assert ps.machine.wake_at == 1004.0


def test_a_server_that_was_stopped_for_100_seconds_evicts_nobody() -> None:
    ps = Ps()
    ps.ready("w0"), ps.ready("w1")
    for _ in range(3):
        ps.now += 100.0
        assert not only(MemberChanged, ps.tell(Tick()))
        ps.tell(Alive(SESSION, 1, 0, "computing"), b"w0"), ps.tell(Alive(SESSION, 2, 0, "computing"), b"w1")


def test_a_worker_that_is_really_gone_is_noticed_in_heartbeat_timeout_s() -> None:
    ps = Ps()
    ps.ready("w0")
    assert not only(MemberChanged, ps.wait(5))
    (change,) = only(MemberChanged, ps.wait(0.5))
    assert (change.event, change.name) == ("lost", "w0")


# Gradients that are not finite


TROUBLE = {"left_out": (1,), "examples": 24, "trouble": "shard 1 (samples 4, 7): loss = nan"}


def test_stop_ends_the_run_before_the_weights_are_touched() -> None:
    ps = Ps(nonfinite="stop")
    ps.ready("w0"), ps.step()
    actions = ps.push(0, 4, **TROUBLE)
    assert not only(CloseStep, actions)
    assert only(Save, actions) == [Save(1, True)]
    finished = only(Finish, ps.tell(Leave(SESSION, 1), b"w0"))
    assert finished == [Finish("failed", "step 1, w0: shard 1 (samples 4, 7): loss = nan", 1)]


@pytest.mark.parametrize(("policy", "skip"), [("skip_step", True), ("skip_shard", False)])
def test_the_step_goes_on_without_what_was_not_finite(policy: str, skip: bool) -> None:
    ps = Ps(nonfinite=policy, buckets=2)
    ps.ready("w0")
    ps.push(0, 4, bucket=1, **TROUBLE)
    actions = ps.push(0, 4, **TROUBLE)
    (close,) = only(CloseStep, actions)
    assert (close.skip, close.result.examples, close.result.left_out) == (skip, 24, (1,))
    follows = "skipped: version 1 has the weights of version 0" if skip else "left out of version 1"
    assert only(Note, actions) == [Note(f"step 0, w0: shard 1 (samples 4, 7): loss = nan; {follows}")]
    (publish,) = only(Publish, ps.tell(Updated(applied=not skip)))
    assert publish.version == 1


def test_a_step_of_which_nothing_is_left_is_skipped() -> None:
    ps = Ps(nonfinite="skip_shard")
    ps.ready("w0")
    (close,) = only(CloseStep, ps.push(0, 4, left_out=(0, 1, 2, 3), examples=0, sums={}))
    assert close.skip


@pytest.mark.parametrize("policy", ["skip_step", "skip_shard"])
def test_a_sum_that_overflows_is_skipped_and_said(policy: str) -> None:
    ps = Ps(nonfinite=policy)
    ps.ready("w0")
    actions = ps.step(applied=False, trouble="the sum of the gradient of ['w'] is not finite")
    sum_of = "the sum of the gradient of ['w'] is not finite"
    assert actions[0] == Note(f"step 0: {sum_of}; skipped: version 1 has the weights of version 0")
    assert only(Publish, actions)[0].version == 1


def test_a_sum_that_overflows_ends_the_run_under_stop_with_the_version_it_had() -> None:
    ps = Ps(nonfinite="stop")
    ps.ready("w0")
    actions = ps.step(applied=False, trouble="the sum of the gradient of ['w'] is not finite")
    (stop,) = said(Stop, only(Broadcast, actions))
    assert (stop.version, stop.reason) == (0, "step 0: the sum of the gradient of ['w'] is not finite")


def test_so_many_skipped_steps_in_a_row_end_the_run() -> None:
    ps = Ps(nonfinite="skip_step", nonfinite_limit=3, steps=100)
    ps.ready("w0")
    for applied in (False, False, True, False, False):
        assert only(Publish, ps.step(applied=applied))
    actions = ps.step(applied=False)
    (stop,) = said(Stop, only(Broadcast, actions))
    assert stop.reason == "3 steps in a row were skipped, the last being step 5"
    assert only(Finish, ps.tell(Leave(SESSION, 1), b"w0"))[0].exit_code == 1


# The end


def test_the_last_version_is_saved_and_everyone_says_goodbye() -> None:
    ps = Ps(steps=1)
    ps.ready("w0"), ps.ready("w1")
    actions = ps.step()
    stop = Stop(SESSION, 1, "version 1 is reached")
    assert actions == [Broadcast(stop), Reply(b"w0", stop), Reply(b"w1", stop), Save(1, True)]
    assert not only(Finish, ps.tell(Leave(SESSION, 1), b"w0"))
    assert ps.tell(Leave(SESSION, 2), b"w1") == [
        Reply(b"w1", Left(SESSION, 2)),
        MemberChanged("left", 2, "w1", "lab", 40),
        Finish("done", "version 1 is reached", 0),
    ]
    assert ps.tell(Tick()) == [] and ps.machine.finished


def test_who_says_no_goodbye_is_named_and_not_waited_for() -> None:
    ps = Ps(steps=1, heartbeat_timeout_s=60.0)
    ps.ready("w0"), ps.step()
    assert not only(Finish, ps.wait(LEAVING_S - 0.5))
    note, finish = ps.wait(0.5)
    assert note == Note("ended without a goodbye from w0 (member 1, lab pid 40)")
    assert finish == Finish("done", "version 1 is reached", 0)


def test_everyone_lost_during_the_end_is_an_end() -> None:
    ps = Ps(steps=1, heartbeat_timeout_s=2.0)
    ps.ready("w0"), ps.ready("w1"), ps.step()
    actions = ps.wait(3)
    assert len(only(MemberChanged, actions)) == 2 and len(only(Finish, actions)) == 1


def test_who_comes_after_the_end_is_told_so() -> None:
    ps = Ps(steps=1)
    ps.ready("w0"), ps.step()
    assert ps.hello("w1") == [Reply(b"w1", Stop(SESSION, 1, "version 1 is reached"))]


def test_gradients_after_the_end_are_refused() -> None:
    ps = Ps(steps=1)
    ps.ready("w0"), ps.step()
    assert ps.push(0, 4)[0].reason == "no open step: the server is leaving"


@pytest.mark.parametrize("version", [3, 4])
def test_a_run_that_is_resumed_at_its_end_has_nothing_to_do(version: int) -> None:
    machine = Machine(Ps(steps=3).machine.rules, session=SESSION, version=version, now=0.0)
    actions = machine.handle(Tick(), now=0.0)
    (finish,) = only(Finish, actions)
    assert (finish.status, finish.exit_code) == ("done", 0)
    assert finish.reason == f"nothing to train: it is at version {version} already, and train.steps is 3"
    assert not only(Save, actions), "it is on the disk already"


def test_checkpoints_and_evaluations_follow_the_publication_and_none_is_made_twice() -> None:
    ps = Ps(steps=4, save_every=2, evaluate_every=2, evaluate=True)
    ps.ready("w0")
    kinds = (Publish, Save, PublishEvaluation)
    made = [[action for action in ps.step() if isinstance(action, kinds)] for _ in range(4)]
    assert [[type(action) for action in step] for step in made[:3]] == [[Publish], [Publish, Save, PublishEvaluation],
                                                                        [Publish]]  # fmt: skip
    assert made[1][1:] == [Save(2, False), PublishEvaluation(2)]
    assert sorted(map(str, made[3])) == sorted(map(str, [Save(4, True), PublishEvaluation(4)]))


def test_a_version_that_was_saved_is_not_saved_again_at_the_end() -> None:
    ps = Ps(save_every=1)
    ps.ready("w0")
    assert only(Save, ps.step()) == [Save(1, False)]
    ps.tell(Leave(SESSION, 1), b"w0")
    actions = ps.tell(StopRequested(5.0))
    assert only(Finish, actions) and not only(Save, actions)


# Being asked to stop


def test_asked_while_waiting_it_ends_at_once() -> None:
    ps = Ps()
    actions = ps.tell(StopRequested(5.0))
    assert only(Save, actions) == [Save(0, True)]
    assert only(Finish, actions) == [Finish("interrupted", "asked to stop at version 0", 130)]


def test_asked_during_a_step_it_ends_after_it() -> None:
    ps = Ps()
    ps.ready("w0")
    assert ps.tell(StopRequested(5.0)) == []
    actions = ps.step()
    assert not only(Publish, actions) and only(Save, actions) == [Save(1, True)]
    assert only(Finish, ps.tell(Leave(SESSION, 1), b"w0")) == [Finish("interrupted", "asked to stop at version 1", 130)]


def test_asked_during_an_update_it_ends_after_it() -> None:
    ps = Ps()
    ps.ready("w0"), ps.push(0, 4)
    assert ps.push(0, 4)[0].reason == "no open step: the server is updating"
    assert ps.tell(StopRequested(5.0)) == []
    assert said(Stop, ps.tell(Updated(True)))[0].reason == "asked to stop at version 1"


def test_a_step_that_takes_too_long_is_given_up() -> None:
    ps = Ps()
    ps.ready("w0"), ps.step()
    ps.tell(StopRequested(2.0))
    assert not said(Stop, ps.wait(1.5))
    actions = ps.wait(0.5)
    (stop,) = said(Stop, only(Broadcast, actions))
    assert stop.reason == "asked to stop at version 1; its step could not be finished in time"
    assert only(Save, actions) == [Save(1, True)]


def test_the_server_wants_to_be_woken_when_the_time_for_a_step_is_up() -> None:
    ps = Ps(heartbeat_s=1.0)
    ps.ready("w0")
    ps.tell(StopRequested(0.25))
    assert ps.machine.wake_at == ps.now + 0.25


def test_to_ask_again_gives_no_more_time() -> None:
    ps = Ps()
    ps.ready("w0")
    for _ in range(3):
        ps.tell(StopRequested(2.0))
        ps.wait(1)
    assert ps.machine.phase is Phase.LEAVING


def test_asked_with_nobody_left_in_the_step_it_ends_at_once() -> None:
    ps = Ps()
    ps.ready("w0"), ps.tell(Leave(SESSION, 1), b"w0")
    assert only(Finish, ps.tell(StopRequested(5.0)))[0].exit_code == 130


def test_asked_at_the_end_the_end_is_what_it_was() -> None:
    ps = Ps(steps=1)
    ps.ready("w0"), ps.step()
    assert ps.tell(StopRequested(5.0)) == []
    assert only(Finish, ps.tell(Leave(SESSION, 1), b"w0"))[0].status == "done"
    assert ps.tell(StopRequested(5.0)) == []


def test_an_interrupted_run_stays_one_while_its_workers_leave() -> None:
    ps = Ps(max_wait_s=10.0, heartbeat_timeout_s=60.0)
    ps.hello("w0")
    ps.wait(9)
    ps.tell(StopRequested(5.0))
    assert only(Finish, ps.wait(LEAVING_S + 1)) == [Finish("interrupted", "asked to stop at version 0", 130)]

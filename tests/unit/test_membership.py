"""Who is a member, and for how long silence is borne."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import Hello
from ps.membership import Member, Membership


def hello(name: str = "w0", *, host: str = "lab", instance: int = 1) -> Hello:
    return Hello(name, host, 40, instance, {"jax": "0.10.2"})


def membership(timeout_s: float = 3.0, hearing_s: float = 1.0) -> Membership:
    return Membership(timeout_s, hearing_s, now=100.0)


def joined(members: Membership, name: str) -> Member:
    member, _ = members.join(hello(name), name.encode())
    return member


def test_a_new_member_has_done_nothing_yet() -> None:
    member, _ = membership().join(hello(), b"peer")
    assert not member.ready and not member.subscribed and not member.plannable
    assert (member.contributions, member.examples_per_second, member.version) == (0, 0.0, -1)
    assert str(member) == "w0 (member 1, lab pid 40)"


def test_a_repeated_hello_is_the_same_member() -> None:
    members = membership()
    first, _ = members.join(hello(), b"peer")
    again, older = members.join(hello(), b"peer")
    assert again is first and older is None and members.joined == 1


@pytest.mark.parametrize(
    ("second", "peer"),
    [(hello(instance=2), b"peer"), (hello(instance=2), b"other"), (hello(instance=1), b"other")],
    ids=["another life", "another life by another connection", "dialled anew"],
)
def test_a_new_life_is_a_new_member_and_the_old_one_is_gone_at_once(second: Hello, peer: bytes) -> None:
    members = membership()
    first, _ = members.join(hello(), b"peer")
    reborn, older = members.join(second, peer)
    assert older is first and reborn.number == 2
    assert list(members.members) == [2] and members.heard(1) is None


def test_the_same_name_on_another_host_is_another_worker() -> None:
    members = membership()
    members.join(hello(host="lab"), b"a")
    _, older = members.join(hello(host="attic"), b"b")
    assert older is None and len(members.members) == 2


def test_numbers_are_never_given_twice() -> None:
    members = membership()
    for number in (1, 2, 3):
        assert joined(members, "w0").number == number
        members.remove(number)


def test_only_who_is_ready_and_subscribed_can_be_planned() -> None:
    members = membership()
    for number, (ready, subscribed) in enumerate([(False, False), (True, False), (False, True), (True, True)]):
        member = joined(members, f"w{number}")
        member.ready, member.subscribed = ready, subscribed
    assert members.plannable() == [4]


def passed(members: Membership, now: float) -> list[Member]:
    members.listen(now)
    return members.lose_silent()


def test_silence_is_the_time_since_a_member_was_heard() -> None:
    members = membership(timeout_s=3.0)
    joined(members, "w0"), joined(members, "w1")
    for now in (101.0, 102.0, 103.0):
        assert passed(members, now) == []
        members.heard(1)
    assert [member.name for member in passed(members, 103.5)] == ["w1"]
    assert list(members.members) == [1] and members.heard(2) is None


def test_a_repeated_hello_is_a_sign_of_life() -> None:
    members = membership(timeout_s=3.0)
    joined(members, "w0")
    for now in range(101, 120):
        joined(members, "w0")
        assert passed(members, float(now)) == []


def test_a_server_that_did_not_listen_for_100_seconds_blames_nobody() -> None:
    members = membership(timeout_s=3.0, hearing_s=1.0)
    joined(members, "w0")
    for now in (200.0, 300.0):
        assert passed(members, now) == []
        members.heard(1)
    assert passed(members, 400.0) == []


def test_a_clock_that_steps_back_makes_nobody_older_or_younger() -> None:
    members = membership(timeout_s=1.0)
    joined(members, "w0")
    passed(members, 100.8)
    assert passed(members, 50.0) == [] and members.silent_s(members.members[1]) == pytest.approx(0.8)
    assert [member.name for member in passed(members, 50.3)] == ["w0"]


@given(st.lists(st.tuples(st.floats(0, 5), st.sets(st.integers(1, 3))), max_size=30))
def test_who_is_lost_is_who_was_silent_for_too_long(story: list[tuple[float, set[int]]]) -> None:
    """Against a slow version that keeps, for each member, the list of time steps since it was heard."""
    members = membership(timeout_s=3.0, hearing_s=1.0)
    for name in ("w0", "w1", "w2"):
        joined(members, name)
    silences: dict[int, list[float]] = {1: [], 2: [], 3: []}
    now = 100.0
    for passed_s, heard in story:
        now += passed_s
        for steps in silences.values():
            steps.append(passed_s if passed_s < 1.0 else 1.0)
        lost = {number for number, steps in silences.items() if sum(steps) > 3.0 + 1e-6}
        kept = {number for number, steps in silences.items() if sum(steps) < 3.0 - 1e-6}
        found = {member.number for member in passed(members, now)}
        assert lost <= found and not found & kept
        for number in found:
            del silences[number]
        assert set(members.members) == set(silences)
        for number in heard & set(silences):
            members.heard(number)
            silences[number] = []

"""Who computes what: every shard exactly once, by someone who is here."""

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import tree
from bus.messages import Assignment, Node
from ps.plan import Plan, assist, divide, of_member, revise

MEMBERS = st.lists(st.integers(1, 50), min_size=1, max_size=9, unique=True)


def shards_of(plan: Plan, member: int) -> list[int]:
    return [shard for low, high in of_member(plan, member) for shard in range(low, high)]


def all_shards(plan: Plan) -> list[int]:
    return [shard for assignment in plan for shard in range(assignment.low, assignment.high)]


@given(st.integers(1, 40), MEMBERS)
def test_a_step_is_divided_evenly_and_whole(shards: int, members: list[int]) -> None:
    plan = divide(shards, dict.fromkeys(members, 0.0))
    assert sorted(all_shards(plan)) == list(range(shards))
    counts = [len(shards_of(plan, member)) for member in members]
    assert max(counts) - min(counts) <= 1
    assert all(tree.is_node((assignment.low, assignment.high), shards) for assignment in plan)


@pytest.mark.parametrize(
    ("shards", "members", "plan"),
    [
        (4, [7], [(7, 0, 4)]),
        (4, [7, 3], [(7, 0, 2), (3, 2, 4)]),
        (5, [1, 2], [(1, 0, 2), (1, 2, 3), (2, 3, 4), (2, 4, 5)]),
        (8, [1, 2, 3], [(1, 0, 2), (1, 2, 3), (2, 3, 4), (2, 4, 6), (3, 6, 8)]),
        (2, [1, 2, 3], [(1, 0, 1), (2, 1, 2)]),
    ],
)
def test_neighbouring_shards_go_together(shards: int, members: list[int], plan: list[tuple[int, int, int]]) -> None:
    assert divide(shards, dict.fromkeys(members, 0.0)) == tuple(Assignment(*row) for row in plan)


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, Plan, list[Node], list[int]]:
    """A plan, what is missing of its step, and who is still, or newly, here."""
    shards, members = draw(st.integers(1, 20)), draw(MEMBERS)
    plan = divide(shards, dict.fromkeys(members, 0.0))
    gone = draw(st.sets(st.integers(0, shards - 1)))
    missing = [(shard, shard + 1) for shard in range(shards) if shard not in gone]
    here = draw(st.lists(st.sampled_from([*members, 97, 98, 99]), unique=True, max_size=8))
    return shards, plan, missing, here


@given(losses())
def test_what_is_missing_is_planned_once_among_those_who_are_here(
    case: tuple[int, Plan, list[Node], list[int]],
) -> None:
    shards, plan, missing, here = case
    revised = revise(plan, missing, here, shards)
    assert {assignment.member for assignment in revised} <= set(here)
    planned = all_shards(revised)
    assert len(planned) == len(set(planned))
    if here:
        assert {low for low, _ in missing} <= set(planned)
    for member in here:  # what they are computing stays theirs
        assert of_member(revised, member)[: len(of_member(plan, member))] == of_member(plan, member)
    assert revise(revised, missing, here, shards) == revised
    assert all(tree.is_node((assignment.low, assignment.high), shards) for assignment in revised)


def test_shards_of_one_who_is_gone_are_shared_by_the_others() -> None:
    plan = divide(8, dict.fromkeys([1, 2, 3, 4], 0.0))
    revised = revise(plan, [(0, 8)], [1, 2, 4], 8)
    assert revised == (*[a for a in plan if a.member != 3], Assignment(1, 4, 5), Assignment(2, 5, 6))


def test_what_has_arrived_is_not_planned_again() -> None:
    plan = divide(4, dict.fromkeys([1, 2], 0.0))
    assert revise(plan, [(0, 2), (3, 4)], [1], 4) == (Assignment(1, 0, 2), Assignment(1, 3, 4))


@pytest.mark.parametrize(
    ("shards", "speeds", "counts"),
    [
        (8, {1: 100.0, 2: 100.0}, [4, 4]),
        (8, {1: 300.0, 2: 100.0}, [6, 2]),
        (8, {1: 100.0, 2: 95.0}, [4, 4]),  # noise moves nothing
        (4, {1: 100.0, 2: 20.0}, [4, 0]),  # waiting for the slow one would take longer
        (16, {1: 100.0, 2: 100.0, 3: 100.0, 4: 20.0}, [5, 5, 5, 1]),
        (6, {1: 0.0, 2: 100.0, 3: 50.0}, [2, 3, 1]),  # nobody knows 1 yet: it counts as the mean of the others
    ],
)
def test_faster_members_get_more_shards(shards: int, speeds: dict[int, float], counts: list[int]) -> None:
    plan = divide(shards, speeds)
    assert [sum(each.high - each.low for each in plan if each.member == member) for member in speeds] == counts


@given(st.integers(1, 12), st.lists(st.floats(1.0, 100.0), min_size=1, max_size=3))
def test_no_other_division_would_be_done_sooner(shards: int, speeds: list[float]) -> None:
    def done_s(counts: Iterable[int]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    plan = divide(shards, dict(enumerate(speeds, start=1)))
    counts = [sum(a.high - a.low for a in plan if a.member == member) for member in range(1, len(speeds) + 1)]
    every = (each for each in product(range(shards + 1), repeat=len(speeds)) if sum(each) == shards)
    assert done_s(counts) <= min(map(done_s, every)) * (1 + 1e-9)


def test_idle_members_are_given_what_is_late_as_well_and_nothing_twice() -> None:
    plan = divide(4, dict.fromkeys([1, 2], 0.0))
    helped = assist(plan, [(2, 4)], [1], 4)
    assert helped == (*plan, Assignment(1, 2, 4))
    assert assist(helped, [(2, 4)], [1], 4) == helped
    assert assist(plan, [(2, 4)], [], 4) == plan

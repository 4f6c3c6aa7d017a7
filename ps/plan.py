"""Which member computes which shards of a step. Pure; the same arguments give the same plan."""

from collections.abc import Iterable, Sequence

from bus import tree
from bus.messages import Assignment, Node

Plan = tuple[Assignment, ...]


def divide(shards: int, members: Sequence[int]) -> Plan:
    """A whole step over ``members`` (at least one), as evenly as it goes, in neighbouring shards so that few, large
    sums travel. Members beyond the number of shards get nothing."""
    return _assign(range(shards), members, shards)


def revise(plan: Plan, missing: Iterable[Node], members: Sequence[int], shards: int) -> Plan:
    """``plan`` without those who are gone: shards of ``missing`` that no one of ``members`` holds are divided anew;
    what the others are computing stays theirs."""
    kept = tuple(assignment for assignment in plan if assignment.member in set(members))
    held = {shard for assignment in kept for shard in range(assignment.low, assignment.high)}
    orphans = [shard for low, high in missing for shard in range(low, high) if shard not in held]
    return kept + _assign(sorted(orphans), members, shards)


def of_member(plan: Plan, member: int) -> tuple[Node, ...]:
    """The nodes of the shard tree that ``member`` computes."""
    return tuple((assignment.low, assignment.high) for assignment in plan if assignment.member == member)


def _assign(shards: Sequence[int], members: Sequence[int], total: int) -> Plan:
    assignments: list[Assignment] = []
    share, extra = divmod(len(shards), len(members)) if members else (0, 0)
    start = 0
    for position, member in enumerate(members):
        end = start + share + (position < extra)
        for low, high in _runs(shards[start:end]):
            assignments += (Assignment(member, *node) for node in tree.cover(low, high, total))
        start = end
    return tuple(assignments)


def _runs(shards: Sequence[int]) -> list[Node]:
    """Neighbouring shards, as ranges."""
    runs: list[Node] = []
    for shard in shards:
        if runs and runs[-1][1] == shard:
            runs[-1] = (runs[-1][0], shard + 1)
        else:
            runs.append((shard, shard + 1))
    return runs

"""Which member computes which shards of a step. Pure; the same arguments give the same plan."""

from collections.abc import Iterable, Mapping, Sequence

from bus import tree
from bus.messages import Assignment, Node

Plan = tuple[Assignment, ...]


def divide(shards: int, speeds: Mapping[int, float]) -> Plan:
    """A whole step over the members in ``speeds`` (at least one), so that all are done as soon as possible.

    ``speeds``: examples per second of each, or 0 where it is not known, which counts as the mean of the others. Each
    shard goes to whoever would be done first with it, which is the best that can be done with equal shards (list
    scheduling on uniform machines). Shards of a member are neighbours, so that few, large sums travel.
    """
    known = [speed for speed in speeds.values() if speed > 0]
    usual = sum(known) / len(known) if known else 1.0
    counts = dict.fromkeys(speeds, 0)
    for _ in range(shards):
        first = min(counts, key=lambda member: (counts[member] + 1) / (speeds[member] or usual))
        counts[first] += 1
    return _blocks(range(shards), counts, shards)


def revise(plan: Plan, missing: Iterable[Node], members: Sequence[int], shards: int) -> Plan:
    """``plan`` without those who are gone: shards of ``missing`` that no one of ``members`` holds are divided anew;
    what the others are computing stays theirs."""
    kept = tuple(assignment for assignment in plan if assignment.member in set(members))
    held = {shard for assignment in kept for shard in range(assignment.low, assignment.high)}
    orphans = [shard for low, high in missing for shard in range(low, high) if shard not in held]
    return kept + _assign(sorted(orphans), members, shards)


def assist(plan: Plan, missing: Iterable[Node], idle: Sequence[int], shards: int) -> Plan:
    """``plan``, and the shards of ``missing`` for members of ``idle`` too. Whoever is first wins; the bits are the
    same."""
    late = [shard for low, high in missing for shard in range(low, high)]
    return plan + tuple(extra for extra in _assign(late, idle, shards) if extra not in plan)


def of_member(plan: Plan, member: int) -> tuple[Node, ...]:
    """The nodes of the shard tree that ``member`` computes."""
    return tuple((assignment.low, assignment.high) for assignment in plan if assignment.member == member)


def _assign(shards: Sequence[int], members: Sequence[int], total: int) -> Plan:
    """``shards`` over ``members``, as evenly as it goes."""
    share, extra = divmod(len(shards), len(members)) if members else (0, 0)
    return _blocks(shards, {m: share + (position < extra) for position, m in enumerate(members)}, total)


def _blocks(shards: Sequence[int], counts: Mapping[int, int], total: int) -> Plan:
    """The next ``counts[member]`` of ``shards`` for each member in turn, as nodes of the tree."""
    assignments: list[Assignment] = []
    start = 0
    for member, count in counts.items():
        for low, high in _runs(shards[start : start + count]):
            assignments += (Assignment(member, *node) for node in tree.cover(low, high, total))
        start += count
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

"""How long is too long, by what steps have taken so far, and the line that says who is missing. Pure.

Time here is what the PS has spent listening (``ps.membership``): a PS that was stopped calls nobody late.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bus.messages import Node
from ps.membership import Member
from ps.plan import Plan

STEP_WEIGHT = 0.3  # of the newest step in the usual time of a step
HELP_FACTOR = 1.5  # of the usual time of a step: what is missing then is given to idle members as well
TELL_FACTOR = 4.0  # after so many usual times a person is told, if not yet after TELL_BEATS heartbeats
TELL_BEATS = 1.5  # more than one, which is what a PS that was stopped itself may seem to have listened
WAITING_FIRST_S, WAITING_EVERY_S = 5.0, 10.0  # between two lines about workers that training waits for


@dataclass(slots=True)
class Patience:
    """Of one PS with its open step. ``help_at`` and ``tell_at`` are None where nothing is due by itself."""

    heartbeat_s: float
    opened_at: float = 0.0
    usual_s: float | None = None  # of a step
    help_at: float | None = None
    tell_at: float | None = None

    def opened(self, now: float) -> None:
        self.opened_at = now
        self.help_at = now + HELP_FACTOR * self.usual_s if self.usual_s else None
        self.tell_at = (
            now + max(TELL_FACTOR * (self.usual_s or 0.0), TELL_BEATS * self.heartbeat_s) if self.usual_s else None
        )

    def closed(self, now: float, helped: bool) -> None:
        """Learn from the step. One that took very long, or a clock that jumped, does not make waiting usual; nor does
        one for which others had to help: help would come later each time."""
        took_s = max(now - self.opened_at, 0.0)
        usual_s = took_s if self.usual_s is None else self.usual_s
        if helped:
            took_s = min(took_s, usual_s)
        self.usual_s = usual_s + STEP_WEIGHT * (min(took_s, TELL_FACTOR * usual_s + self.heartbeat_s) - usual_s)
        self.help_at = self.tell_at = None

    def help_is_due(self, now: float) -> bool:
        """Whether to look for members who can help; the next look is as far away again."""
        if self.help_at is None or self.usual_s is None or now < self.help_at:
            return False
        self.help_at = now + HELP_FACTOR * self.usual_s
        return True

    def telling_is_due(self, now: float) -> bool:
        """Once in a step."""
        if self.tell_at is None or now < self.tell_at:
            return False
        self.tell_at = None
        return True


def missing_from(plan: Plan, missing: Iterable[Node]) -> dict[int, list[Node]]:
    """By member: the nodes of its part of ``plan`` that are not all there."""
    nodes = tuple(missing)
    found: dict[int, list[Node]] = {}
    for each in plan:
        if any(low < each.high and each.low < high for low, high in nodes):
            found.setdefault(each.member, []).append((each.low, each.high))
    return found


def late_line(
    version: int, waited_s: float, usual_s: float, late: Iterable[tuple[Member, list[Node], float, str]], answer: str
) -> str:
    """Who is missing, since when, last seen doing what, and what is done about it.

    ``late``: members with what they owe, for how many seconds they have not been heard, and ``last_seen``.
    """
    whose = "; ".join(
        f"{_shards(nodes)} of {member}, heard {silent_s:.1f} s ago, {last_seen}"
        for member, nodes, silent_s, last_seen in late
    )
    return f"step {version} waits for {whose}: {waited_s:.1f} s so far, usual are {usual_s:.2g} s; {answer}"


def waiting_line(ready: int, wanted: int, members: Collection[Member], waited_s: float, left_s: float) -> str:
    """Who keeps training from going on."""
    others = ", ".join(f"{member} is {member.doing}" for member in members if not member.plannable)
    here = others or ("nobody else is here" if ready else "nobody is here")
    return f"{ready} of {wanted} workers ready after {waited_s:.0f} s: {here}; waiting for another {left_s:.0f} s"


def _shards(nodes: Iterable[Node]) -> str:
    parts = [str(low) if high - low == 1 else f"{low}-{high - 1}" for low, high in nodes]
    return ("shard " if len(parts) == 1 and "-" not in parts[0] else "shards ") + ", ".join(parts)

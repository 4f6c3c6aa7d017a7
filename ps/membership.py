"""Who has joined, who can be planned, who is gone. Pure: no clock, time is an argument.

Silence is counted only while the PS was itself listening: a PS that was stopped, or busy with a long update, must not
blame its members for what it did not read.
"""

import math
from dataclasses import dataclass, field

from bus.messages import Hello


@dataclass(slots=True, eq=False)
class Member:
    """One joined worker process. ``number`` is its identity; ``name`` is only a label for people."""

    number: int
    name: str
    host: str
    pid: int
    instance: int
    peer: bytes
    versions: dict[str, str]
    ready: bool = False
    subscribed: bool = False
    device: str = ""
    doing: str = "joining"
    said_at: float = 0.0  # when it said what it is doing; as heard_at
    version: int = -1
    heard_at: float = 0.0  # by the time that the PS has spent listening
    examples_per_second: float = 0.0
    contributions: int = 0

    @property
    def plannable(self) -> bool:
        return self.ready and self.subscribed

    def __str__(self) -> str:
        return f"{self.name} (member {self.number}, {self.host} pid {self.pid})"


@dataclass(slots=True)
class Membership:
    """``timeout_s``: silence after which a member is gone. ``hearing_s``: the most that one look at the clock may add
    to the time spent listening."""

    timeout_s: float
    hearing_s: float
    now: float
    members: dict[int, Member] = field(default_factory=dict)
    joined: int = 0  # ever; numbers are never given twice
    listened_s: float = 0.0  # so far: a clock on which the PS has never slept

    def join(self, hello: Hello, peer: bytes) -> tuple[Member, Member | None]:
        """The member for this hello, and the older life of the same worker that it replaces, if there is one.

        A repeated hello of a process that has joined already gets the same member again.
        """
        older = next((m for m in self.members.values() if (m.name, m.host) == (hello.name, hello.host)), None)
        if older and (older.instance, older.peer) == (hello.instance, peer):
            older.heard_at = self.listened_s
            return older, None
        if older:
            del self.members[older.number]
        self.joined += 1
        member = Member(self.joined, hello.name, hello.host, hello.pid, hello.instance, peer, dict(hello.versions))
        member.heard_at = member.said_at = self.listened_s
        self.members[member.number] = member
        return member, older

    def heard(self, number: int) -> Member | None:
        """Note that ``number`` gave a sign of life; None if it is no member."""
        member = self.members.get(number)
        if member:
            member.heard_at = self.listened_s
        return member

    def remove(self, number: int) -> Member | None:
        return self.members.pop(number, None)

    def listen(self, now: float) -> None:
        """Let time pass."""
        self.listened_s += min(max(now - self.now, 0.0), self.hearing_s)
        self.now = now

    def says(self, member: Member, doing: str) -> None:
        """Note what a member says that it is doing."""
        member.doing, member.said_at = doing, self.listened_s

    def last_seen(self, member: Member) -> str:
        """What it was doing when it last said so, which may be long ago."""
        return f"{self.listened_s - member.said_at:.1f} s ago it was {member.doing}"

    def silent_s(self, member: Member) -> float:
        """How long nothing was heard of it, while the PS was listening."""
        return self.listened_s - member.heard_at

    def lose_silent(self) -> list[Member]:
        """Remove and return those who have been silent for too long."""
        lost = [member for member in self.members.values() if self.silent_s(member) > self.timeout_s]
        for member in lost:
            del self.members[member.number]
        return lost

    def patience_s(self) -> float:
        """After so many seconds of listening the first of them will have been silent for too long."""
        longest_s = max((self.silent_s(member) for member in self.members.values()), default=-math.inf)
        return self.timeout_s - longest_s

    def plannable(self) -> list[int]:
        """Numbers of those who can compute, in order of joining."""
        return [number for number, member in sorted(self.members.items()) if member.plannable]

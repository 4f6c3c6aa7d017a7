"""The parameter server's decisions, without sockets, clock or arrays: an event and the time in, actions out.

              min_workers are ready                every shard is in              Updated
    WAITING ───────────────────────► OPEN(step v) ───────────────────► UPDATING ─────────► OPEN(step v+1)
       ▲                               │                                   │
       └──── (a resumed or new run)    │ stop asked for, nobody left,      │ version = steps, or not finite
                                       ▼ not finite                        ▼
                                    LEAVING: Stop is sent; members leave, or their time is up ──► FINISHED

A step is a bag of shards. Members are planned from the step after they are ready; when one goes, what it still owed
is planned again among the others. Nothing here depends on who computes a shard, or when: that is what makes the bits
repeat.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, assert_never

from bus import messages
from bus.messages import (
    Alive,
    Contribution,
    Failure,
    Fetch,
    Hello,
    Leave,
    Left,
    Malformed,
    Message,
    Node,
    Ready,
    Refusal,
    Serving,
    Stop,
    Subscribed,
)
from ps import plan as planning
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
    Status,
    StopRequested,
    Tick,
    Updated,
)
from ps.membership import Member, Membership
from ps.patience import WAITING_EVERY_S, WAITING_FIRST_S, Patience, late_line, missing_from, waiting_line
from ps.rounds import Round

EXIT_DONE, EXIT_FAILED, EXIT_TOO_FEW, EXIT_INTERRUPTED = 0, 1, 3, 130
SPEED_WEIGHT = 0.3  # of the newest measurement in a member's speed
LEAVING_S = 5.0  # how long members have to say goodbye once the run is over


@dataclass(frozen=True, slots=True)
class Rules:
    """What the machine needs to know of the settings."""

    steps: int
    shards: int
    buckets: int
    min_workers: int
    max_wait_s: float  # without a member to compute, before the run is given up
    heartbeat_s: float
    heartbeat_timeout_s: float
    nonfinite: Literal["stop", "skip_step", "skip_shard"]
    nonfinite_limit: int  # skipped steps in a row that end the run
    save_every: int  # versions; 0: only at the end
    evaluate_every: int  # versions; 0: only at the end
    evaluate: bool
    balance: bool = True  # plan by measured speed, and let idle members help with what is late
    too_few: Literal["go_on", "wait", "stop"] = "go_on"  # when fewer than min_workers are left


class Phase(Enum):
    WAITING = "waiting"
    OPEN = "open"
    UPDATING = "updating"
    LEAVING = "leaving"
    FINISHED = "finished"


class Machine:
    """Synchronous training over the members there are.

    ``session`` names this life of the PS; ``version`` is where it starts, above 0 after a restore.
    """

    def __init__(self, rules: Rules, *, session: int, version: int, now: float) -> None:
        self.rules, self.session, self.version = rules, session, version
        self.phase = Phase.WAITING
        self.members = Membership(rules.heartbeat_timeout_s, rules.heartbeat_s, now)
        self.round = Round(version, rules.shards, rules.buckets)
        self.plan: planning.Plan = ()
        self.revision = 0  # of the plan: from 1 on while a step is open, so that its first plan is news to all
        self.refused: dict[str, int] = {}
        self.deadline: float | None = None  # of the phase LEAVING, or of a stop that waits for the open step
        self.idle_since: float | None = 0.0  # by the time spent listening, while too few are there to compute
        self.wake_at = now + rules.heartbeat_s
        self._heartbeat_at = now + rules.heartbeat_s
        self._lost_at = math.inf  # when the first member will have been silent for too long, as of the last tick
        self._skipped_in_a_row = 0
        self._patience = Patience(rules.heartbeat_s)
        self._helping: set[int] = set()  # in the open step
        self._tell_waiting_s = WAITING_FIRST_S  # of waiting for workers, before the next line about it
        self._ending: tuple[Status, str, int] | None = None
        self._saved = -1 if version == 0 else version
        self._troubles: list[str] = []
        self._began = False

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    def handle(
        self, event: Message | Malformed | Subscribed | Tick | StopRequested | Updated, *, now: float, peer: bytes = b""
    ) -> list[Action]:
        """The actions that ``event`` calls for. ``peer`` is the control connection it came by, if it did."""
        if self.finished:
            return []
        self.members.listen(now)
        actions = self._react(event, peer, now)
        actions += self._open_if_possible(now)
        self._set_wake(now)
        return actions

    def _react(
        self, event: Message | Malformed | Subscribed | Tick | StopRequested | Updated, peer: bytes, now: float
    ) -> list[Action]:
        match event:
            case Contribution():
                return self._contribution(event, now)
            case Tick():
                return self._tick(now)
            case Updated():
                return self._updated(event, now)
            case StopRequested():
                return self._stop_requested(event, now)
            case Hello():
                return self._hello(event, peer)
            case Malformed():
                noted = self._count("malformed", Note(f"refused on {event.socket}: {event.reason}"))
                return [*noted, Reply(peer, Refusal(False, event.reason))] if event.other_protocol and peer else noted
            case Subscribed():
                return self._set_ready(self.members.members.get(event.member), subscribed=True)
            case Ready() | Alive() | Fetch() | Leave() | Failure():
                return self._from_member(event, peer, now)
            case _:
                return self._count("unexpected message", Note(f"refused: {type(event).__name__} is not for the PS"))

    # Members

    def _hello(self, hello: Hello, peer: bytes) -> list[Action]:
        if self.phase is Phase.LEAVING:
            return [Reply(peer, Stop(self.session, self.version, self._reason()))]
        member, older = self.members.join(hello, peer)
        actions: list[Action] = [Admit(peer, member.number)]
        if older:
            actions.insert(0, _changed("replaced", older, f"joined again as member {member.number}"))
            actions += self._replan()
        if member.version < 0 and not member.ready and member.doing == "joining":
            self.members.says(member, "preparing")
            actions.append(_changed("joined", member))
        return actions

    def _from_member(self, message: Ready | Alive | Fetch | Leave | Failure, peer: bytes, now: float) -> list[Action]:
        member = self.members.members.get(message.member)
        if message.session != self.session or member is None or member.peer != peer:
            if isinstance(message, Leave):
                return [Reply(peer, Left(message.session, message.member))]  # it is gone already: let it go
            reason = "older session" if message.session != self.session else "not a member (any more)"
            return self._count(reason, Reply(peer, Refusal(True, f"{reason}; join again")))
        self.members.heard(message.member)
        match message:
            case Ready():
                member.device = message.device
                self.members.says(member, "ready")
                return self._set_ready(member, ready=True)
            case Alive():
                member.version = message.version
                self.members.says(member, message.doing)
                return []
            case Fetch():
                return [SendSnapshot(peer, self.revision, self.plan)]
            case Leave():
                self.members.remove(member.number)
                left: list[Action] = [Reply(peer, Left(self.session, member.number)), _changed("left", member)]
                return left + self._after_loss(now)
            case Failure():
                self.members.remove(member.number)
                return [_changed("failed", member, message.reason), *self._after_loss(now)]
            case _:
                assert_never(message)

    def _set_ready(self, member: Member | None, *, ready: bool = False, subscribed: bool = False) -> list[Action]:
        if member is None:
            return []
        before = member.plannable
        member.ready |= ready
        member.subscribed |= subscribed
        if before or not member.plannable:
            return []
        return [_changed("ready", member), *self._replan()]

    def _after_loss(self, now: float) -> list[Action]:
        if self.phase is Phase.LEAVING:
            return self._finish() if not self.members.members else []
        if self._began and self.rules.too_few == "stop" and not self._enough():
            left = len(self.members.plannable())
            reason = f"{left} of {self.rules.min_workers} workers are left (cluster.too_few is stop)"
            return self._leave("failed", reason, EXIT_TOO_FEW, now)
        return self._replan()

    def _replan(self) -> list[Action]:
        """Give the shards that nobody computes any more to those who are here."""
        if self.phase is not Phase.OPEN or not self._enough():
            return []
        return self._broadcast(
            planning.revise(self.plan, self.round.missing(), self.members.plannable(), self.rules.shards)
        )

    # Steps

    def _wanted(self) -> int:
        """How many must be here for anyone to compute."""
        return 1 if self._began and self.rules.too_few == "go_on" else self.rules.min_workers

    def _enough(self) -> bool:
        return len(self.members.plannable()) >= self._wanted()

    def _open_if_possible(self, now: float) -> list[Action]:
        enough = self._enough()
        if self.phase in (Phase.WAITING, Phase.OPEN):
            idle_since = self.members.listened_s if self.idle_since is None else self.idle_since
            self.idle_since = None if enough else idle_since
            self._tell_waiting_s = WAITING_FIRST_S if enough else self._tell_waiting_s
        if self.phase is not Phase.WAITING:
            return []
        if self.version >= self.rules.steps:
            reason = f"nothing to train: it is at version {self.version} already, and train.steps is {self.rules.steps}"
            return self._leave("done", reason, EXIT_DONE, now)
        if not enough:
            return []
        self._began = True
        return self._open(now)

    def _open(self, now: float) -> list[Action]:
        self.phase = Phase.OPEN
        self._patience.opened(self.members.listened_s)
        self._helping.clear()
        self.round = Round(self.version, self.rules.shards, self.rules.buckets)
        self.revision, self._troubles = 1, []
        speeds = self._speeds()
        self.plan = planning.divide(self.rules.shards, speeds) if self._enough() else ()
        return [Publish(self.version, self.revision, self.plan)]

    def _speeds(self) -> dict[int, float]:
        """Of everyone who can be planned. Who had nothing to do is thought a little faster each time, so that someone
        who was slow once is tried again."""
        members = [self.members.members[number] for number in self.members.plannable()]
        if not self.rules.balance:
            return {member.number: 0.0 for member in members}
        fastest = max((member.examples_per_second for member in members), default=0.0)
        for member in members:
            if not planning.of_member(self.plan, member.number):
                member.examples_per_second = min(fastest, member.examples_per_second * 1.05)
        return {member.number: member.examples_per_second for member in members}

    def _help_the_late(self) -> list[Action]:
        """Give what is missing to members that have nothing left to do; whoever is first with it wins. Who is late is
        thought slower each time, as it may never say how slow it is, and so soon gets nothing to do."""
        if not self.rules.balance or not self._patience.help_is_due(self.members.listened_s):
            return []
        missing = self.round.missing()
        waited_for = missing_from(self.plan, missing)
        idle = [number for number in self.members.plannable() if number not in waited_for]
        if idle:
            self._helping.update(idle)
            here = self.members.members
            fastest = max(member.examples_per_second for member in here.values()) or 1.0
            for number in waited_for.keys() & here.keys() - self._helping:
                here[number].examples_per_second = (1 - SPEED_WEIGHT) * (here[number].examples_per_second or fastest)
        return self._broadcast(planning.assist(self.plan, missing, idle, self.rules.shards))

    def _tell_who_is_late(self) -> list[Action]:
        now = self.members.listened_s
        if not self._patience.telling_is_due(now) or self._patience.usual_s is None:
            return []
        waited_for = missing_from(self.plan, self.round.missing()).items()
        here = self.members.members
        late = [
            (here[number], nodes, self.members.silent_s(here[number]), self.members.last_seen(here[number]))
            for number, nodes in waited_for
            if number in here and number not in self._helping
        ]
        if not late:
            return []  # nobody is here to compute, which is told elsewhere
        helpers = ", ".join(here[number].name for number in sorted(self._helping) if number in here)
        answer = f"given to {helpers} as well" if helpers else "nobody is idle to help"
        return [Note(late_line(self.version, now - self._patience.opened_at, self._patience.usual_s, late, answer))]

    def _broadcast(self, plan: planning.Plan) -> list[Action]:
        """Make ``plan`` that of the open step, and tell everyone if anyone has more to do by it."""
        added = set(plan) - set(self.plan)
        self.plan = plan
        if not added:
            return []
        self.revision += 1
        return [Broadcast(messages.Plan(self.session, self.version, self.revision, self.plan))]

    def _contribution(self, contribution: Contribution, now: float) -> list[Action]:
        member = self.members.heard(contribution.member) if contribution.session == self.session else None
        name = member.name if member else f"member {contribution.member}"
        reason = self._unacceptable(contribution)
        if not reason:
            taken = self.round.offer(contribution)
            if not isinstance(taken, str):
                return self._accepted(Accept(contribution, taken), contribution, member, name, now)
            reason = taken
        return self._count(reason.split(":")[0], Refused(contribution, name, reason, self.version))

    def _unacceptable(self, contribution: Contribution) -> str | None:
        if contribution.session != self.session:
            return "older session"
        if contribution.version != self.version:
            return f"other version: computed from version {contribution.version}, current is {self.version}"
        if self.phase is not Phase.OPEN:
            return f"no open step: the server is {self.phase.value}"
        return None

    def _accepted(
        self, accept: Accept, contribution: Contribution, member: Member | None, name: str, now: float
    ) -> list[Action]:
        if member and contribution.bucket == 0:
            member.contributions += 1
            if contribution.computed_s > 0 and contribution.examples:
                speed = contribution.examples / contribution.computed_s
                older = member.examples_per_second or speed
                member.examples_per_second = older + SPEED_WEIGHT * (speed - older)
        if contribution.left_out and contribution.bucket == 0:
            where = f"step {self.version}, {name}: {contribution.trouble or 'gradient not finite'}"
            if self.rules.nonfinite == "stop":
                return [accept, *self._leave("failed", where, EXIT_FAILED, now)]
            self._troubles.append(where)
        return [accept, *self._close_if_complete()]

    def _close_if_complete(self) -> list[Action]:
        if self.phase is not Phase.OPEN or not self.round.complete:
            return []
        self.phase = Phase.UPDATING
        result = self.round.result()
        skip = result.examples == 0 or (bool(result.left_out) and self.rules.nonfinite == "skip_step")
        answer = self._skipped() if skip else f"left out of version {self.version + 1}"
        notes: list[Action] = [Note(f"{trouble}; {answer}") for trouble in self._troubles]
        return [*notes, CloseStep(self.version, result, skip)]

    def _updated(self, updated: Updated, now: float) -> list[Action]:
        where = f"step {self.version}: {updated.trouble}"
        if updated.trouble and self.rules.nonfinite == "stop":
            return self._leave("failed", where, EXIT_FAILED, now)
        self._patience.closed(self.members.listened_s, bool(self._helping))
        self._skipped_in_a_row = 0 if updated.applied else self._skipped_in_a_row + 1
        notes: list[Action] = [Note(f"{where}; {self._skipped()}")] if updated.trouble else []
        self.version += 1
        version = self.version
        if self._skipped_in_a_row >= self.rules.nonfinite_limit:
            reason = f"{self._skipped_in_a_row} steps in a row were skipped, the last being step {version - 1}"
            return [*notes, *self._leave("failed", reason, EXIT_FAILED, now)]
        if version >= self.rules.steps:
            return [*notes, *self._leave("done", f"version {version} is reached", EXIT_DONE, now)]
        if self.deadline is not None:  # a stop was asked for while this step was open
            return [*notes, *self._leave("interrupted", f"asked to stop at version {version}", EXIT_INTERRUPTED, now)]
        actions = [*notes, *self._open(now)]
        if self.rules.save_every and version % self.rules.save_every == 0:
            self._saved = version
            actions.append(Save(version, False))
        if self.rules.evaluate and self.rules.evaluate_every and version % self.rules.evaluate_every == 0:
            actions.append(PublishEvaluation(version))
        return actions

    def _skipped(self) -> str:
        return f"skipped: version {self.version + 1} has the weights of version {self.version}"

    # The end

    def _stop_requested(self, request: StopRequested, now: float) -> list[Action]:
        if self.phase is Phase.LEAVING:
            return []
        if self.phase is Phase.WAITING or not self.members.plannable():
            return self._leave("interrupted", f"asked to stop at version {self.version}", EXIT_INTERRUPTED, now)
        if self.deadline is None:  # to ask again gives no more time
            self.deadline = now + request.grace_s
        return []

    def _leave(self, status: Status, reason: str, exit_code: int, now: float) -> list[Action]:
        """Save what is there, tell everyone, and give them time to go."""
        self.phase, self._ending, self.deadline = Phase.LEAVING, (status, reason, exit_code), now + LEAVING_S
        stop = Stop(self.session, self.version, reason)
        actions: list[Action] = [PublishEvaluation(self.version)] if self.rules.evaluate else []
        actions.append(Broadcast(stop))
        actions += (Reply(member.peer, stop) for member in self.members.members.values())
        if self._saved != self.version:
            self._saved = self.version
            actions.append(Save(self.version, True))
        return actions if self.members.members else actions + self._finish()

    def _finish(self) -> list[Action]:
        assert self._ending is not None
        self.phase = Phase.FINISHED
        return [Finish(*self._ending)]

    def _reason(self) -> str:
        return self._ending[1] if self._ending else ""

    # Time

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for member in self.members.lose_silent():
            reason = f"not heard for {self.members.silent_s(member):.1f} s; {self.members.last_seen(member)}"
            actions.append(_changed("lost", member, reason))
            actions += self._after_loss(now)
        self._lost_at = now + self.members.patience_s()
        if self.phase is Phase.LEAVING and self.deadline is not None and now >= self.deadline:
            names = ", ".join(str(member) for member in self.members.members.values())
            return [*actions, Note(f"ended without a goodbye from {names}"), *self._finish()]
        if self.phase is Phase.FINISHED:
            return actions
        if self.phase is Phase.OPEN and self.deadline is not None and now >= self.deadline:
            reason = f"asked to stop at version {self.version}; its step could not be finished in time"
            return actions + self._leave("interrupted", reason, EXIT_INTERRUPTED, now)
        waited_s = 0.0 if self.idle_since is None else self.members.listened_s - self.idle_since
        if self.phase in (Phase.WAITING, Phase.OPEN) and waited_s >= self.rules.max_wait_s:
            return actions + self._leave("failed", self._too_few(), EXIT_TOO_FEW, now)
        if self.phase in (Phase.WAITING, Phase.OPEN) and waited_s >= self._tell_waiting_s:
            self._tell_waiting_s = waited_s + WAITING_EVERY_S
            actions.append(self._waiting(waited_s))
        if self.phase is Phase.OPEN:
            actions += self._help_the_late()
            actions += self._tell_who_is_late()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self.rules.heartbeat_s
            missing: Sequence[Node] = self.round.missing() if self.phase is Phase.OPEN else ()
            serving = Serving(self.session, self.version, self.revision, tuple(missing))
            actions += (Reply(member.peer, serving) for member in self.members.members.values())
        return actions

    def _too_few(self) -> str:
        here = ", ".join(f"{member} {member.doing}" for member in self.members.members.values()) or "nobody is here"
        ready, wanted = len(self.members.plannable()), self._wanted()
        found = f"{ready} of {wanted} workers were ready after" if ready else "no worker was ready for"
        return f"{found} {self.rules.max_wait_s:g} s ({here})"

    def _waiting(self, waited_s: float) -> Note:
        ready, wanted = len(self.members.plannable()), self._wanted()
        left_s = self.rules.max_wait_s - waited_s
        return Note(waiting_line(ready, wanted, self.members.members.values(), waited_s, left_s))

    def _set_wake(self, now: float) -> None:
        wakes = [self._heartbeat_at, self._lost_at, self.deadline]
        if self.phase is Phase.OPEN:
            due = [self._patience.help_at if self.rules.balance else None, self._patience.tell_at]
            wakes += [now + at - self.members.listened_s for at in due if at is not None]
        self.wake_at = min(wake for wake in wakes if wake is not None)

    def _count(self, reason: str, action: Action) -> list[Action]:
        count = self.refused[reason] = self.refused.get(reason, 0) + 1
        if isinstance(action, Note):
            if str(count).strip("0") != "1":
                return []  # a flood of them is told at 1, 10, 100, ..., and counted in the summary
            action = Note(f"{action.text} ({count} so far)") if count > 1 else action
        return [action]

    def check(self) -> None:
        """The invariants, for tests: versions in range, a plan that covers what is missing by members who are here."""
        self.round.check()
        assert 0 <= self.version <= self.rules.steps
        if self.phase is Phase.OPEN:
            assert self.round.version == self.version
            here = set(self.members.plannable())
            planned = {s for a in self.plan if a.member in here for s in range(a.low, a.high)}
            wanted = {s for low, high in self.round.missing() for s in range(low, high)}
            assert not self._enough() or wanted <= planned, (
                f"shards {wanted - planned} of step {self.version} are nobody's"
            )


def _changed(
    event: Literal["joined", "ready", "left", "lost", "replaced", "failed"], member: Member, reason: str = ""
) -> MemberChanged:
    return MemberChanged(event, member.number, member.name, member.host, member.pid, reason)

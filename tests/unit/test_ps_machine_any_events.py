"""Any events in any order: the server's machine keeps its invariants, and good workers always bring it to an end."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus import messages
from bus.messages import Alive, Contribution, Failure, Fetch, Hello, Leave, Malformed, Ready, Stop, Subscribed
from ps.actions import (
    Accept,
    Action,
    Admit,
    Broadcast,
    CloseStep,
    Finish,
    MemberChanged,
    Publish,
    Reply,
    StopRequested,
    Tick,
    Updated,
)
from ps.machine import Machine, Phase, Rules

SESSION, SHARDS, BUCKETS, STEPS = 5, 5, 2, 4
NODES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 2), (2, 4), (0, 4), (0, 5), (1, 3), (3, 2), (-1, 6)]
NAMES = st.sampled_from(["w0", "w1", "w2"])
NUMBERS = st.integers(0, 6)
SESSIONS = st.sampled_from([SESSION, SESSION, SESSION, SESSION - 1])


class AnyEvents(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["stop", "skip_step", "skip_shard"]),
        min_workers=st.integers(1, 3),
        version=st.integers(0, STEPS),
        every=st.integers(0, 3),
    )
    def start(self, policy: Any, min_workers: int, version: int, every: int) -> None:
        rules = Rules(
            steps=STEPS, shards=SHARDS, buckets=BUCKETS, min_workers=min_workers, max_wait_s=20.0, heartbeat_s=1.0,
            heartbeat_timeout_s=5.0, nonfinite=policy, nonfinite_limit=2, save_every=every, evaluate_every=every,
            evaluate=bool(every),
        )  # fmt: skip
        self.now = 0.0
        self.machine = Machine(rules, session=SESSION, version=version, now=0.0)
        self.published = version - 1
        self.closed = version - 1
        self.finished: list[Finish] = []
        self.ended = False
        self.peers: dict[int, bytes] = {}
        self.events: dict[int, list[str]] = {}

    def tell(self, event: Any, peer: bytes = b"", updated: Updated | None = None) -> list[Action]:
        before, was_finished = self.machine.version, self.machine.finished
        actions = self.machine.handle(event, now=self.now, peer=peer)
        assert not (was_finished and actions), "nothing happens after the end"
        assert self.machine.version == before + (isinstance(event, Updated) and self.machine.version > before)
        for action in actions:
            self.see(action)
        if any(isinstance(action, CloseStep) for action in actions):
            answer = updated or Updated(applied=True)
            assert self.machine.phase is Phase.UPDATING
            actions += self.tell(answer)
        return actions

    def see(self, action: Action) -> None:
        match action:
            case Admit():
                self.peers[action.member] = action.peer
            case MemberChanged():
                self.events.setdefault(action.member, []).append(action.event)
            case Publish():
                assert action.version == self.machine.version == self.published + 1, "versions rise by one"
                self.published = action.version
                planned = [shard for one in action.plan for shard in range(one.low, one.high)]
                assert len(planned) == len(set(planned)), "no shard is planned twice before anyone is late"
            case Accept(contribution):
                assert (contribution.session, contribution.version) == (SESSION, self.published), "not of this step"
            case CloseStep():
                assert action.version == self.published == self.closed + 1
                self.closed = action.version
                for parts in self.machine.round.parts:
                    (part,) = parts.values()
                    made = [shard for low, high, _ in part.makers for shard in range(low, high)]
                    assert made == list(range(SHARDS)), "a closed step holds every shard once"
            case Broadcast(Stop()):
                assert not self.ended, "the end is told once"
                self.ended = True
            case Finish():
                self.finished.append(action)
            case Broadcast(messages.Plan() as plan):
                planned = [(one.member, shard) for one in plan.plan for shard in range(one.low, one.high)]
                assert len(planned) == len(set(planned)), "nobody is to compute a shard twice"
                assert {member for member, _ in planned} <= set(self.machine.members.plannable())

    @invariant()
    def holds(self) -> None:
        self.machine.check()
        assert self.machine.finished == bool(self.finished) and len(self.finished) <= 1
        assert self.ended or not self.finished
        assert self.machine.finished or self.machine.wake_at <= self.now + 2.0, "heartbeats go on"
        for story in self.events.values():
            ends = [event for event in story if event in ("left", "lost", "replaced", "failed")]
            assert story[0] == "joined" and len(ends) <= 1 and (not ends or story[-1] == ends[0])

    @rule(name=NAMES)
    def joins(self, name: str) -> None:
        self.do_all_it_should(name, contribute=False)

    @rule(position=st.integers(0, 2), goodbye=st.sampled_from([Leave, Failure]))
    def goes(self, position: int, goodbye: Any) -> None:
        for member in list(self.machine.members.members.values())[position:][:1]:
            self.tell(goodbye(SESSION, member.number, *["no data"][: goodbye is Failure]), member.peer)

    @rule(name=NAMES, instance=st.integers(1, 2), connection=st.integers(1, 2))
    def hello(self, name: str, instance: int, connection: int) -> None:
        self.tell(Hello(name, "lab", 1, instance, {}), f"{name} {connection}".encode())

    @rule(member=NUMBERS)
    def subscribed(self, member: int) -> None:
        self.tell(Subscribed(member))

    @rule(
        session=SESSIONS, member=NUMBERS, as_itself=st.booleans(), kind=st.sampled_from([Ready, Alive, Fetch, Failure])
    )
    def from_member(self, session: int, member: int, as_itself: bool, kind: Any) -> None:
        rest: dict[Any, tuple[Any, ...]] = {Ready: ("cpu",), Alive: (3, "idle"), Fetch: (-1,), Failure: ("no data",)}
        peer = self.peers.get(member, b"?") if as_itself else b"?"
        self.tell(kind(session, member, *rest[kind]), peer)

    @rule(session=SESSIONS, member=NUMBERS)
    def leave(self, session: int, member: int) -> None:
        peer = self.peers.get(member, b"?")
        assert any(isinstance(a, Reply) for a in self.tell(Leave(session, member), peer)) or self.finished

    @rule(
        session=SESSIONS, member=NUMBERS, late=st.sampled_from([0, 0, 0, 0, -1, 1]), bucket=st.integers(-1, BUCKETS),
        node=st.sampled_from(NODES), finite=st.sampled_from([True, True, True, False]), applied=st.booleans(),
    )  # fmt: skip
    def contribution(
        self, session: int, member: int, late: int, bucket: int, node: tuple[int, int], finite: bool, applied: bool
    ) -> None:
        low, high = node
        made = Contribution(
            session, member, self.machine.version + late, bucket, low, high, max(high - low - (not finite), 0), {},
            () if finite else (low,),
        )  # fmt: skip
        self.tell(made, updated=Updated(applied, "" if applied else "not finite"))

    @rule(applied=st.booleans())
    def everything_planned_arrives(self, applied: bool) -> None:
        for one in self.machine.plan:
            for bucket in range(BUCKETS):
                made = Contribution(
                    SESSION, one.member, self.machine.version, bucket, one.low, one.high, one.high - one.low, {}
                )
                self.tell(made, updated=Updated(applied, "" if applied else "not finite"))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 30.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    @precondition(lambda self: not self.ended)
    @rule(grace_s=st.sampled_from([0.0, 3.0]))
    def stop_requested(self, grace_s: float) -> None:
        self.tell(StopRequested(grace_s))

    @rule()
    def nonsense(self) -> None:
        self.tell(Malformed("gradients", "found 9 frames, expected 2 or 3"))
        self.tell(Stop(SESSION, 0, "no"))

    def teardown(self) -> None:
        """Everyone falls silent. Three workers that do all they should bring the run to its end."""
        for _ in range(60):
            for name in ("good 1", "good 2", "good 3"):
                if hasattr(self, "machine") and not self.machine.finished:
                    self.do_all_it_should(name)
        assert not hasattr(self, "machine") or self.machine.finished, f"{self.machine.phase} at {self.now} s"

    def do_all_it_should(self, name: str, *, contribute: bool = True) -> None:
        self.now += 0.2
        admits = [a for a in self.tell(Hello(name, "lab", 1, 1, {}), name.encode()) if isinstance(a, Admit)]
        for admit in admits:
            self.tell(Ready(SESSION, admit.member, "cpu"), name.encode())
            self.tell(Subscribed(admit.member))
            if contribute:
                self.everything_planned_arrives(applied=True)
        self.tell(Tick())
        self.holds()


AnyEvents.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyEvents = AnyEvents.TestCase

"""The edge of the parameter server: poll, decode, ask the machine, carry out its actions.

Everything that decides is in ``ps.machine``; everything that computes is in ``ps.reduce`` and ``ps.update``. The loop
runs unchanged over ``bus.sockets`` and ``bus.memory``.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bus import codec
from bus.errors import WireError
from bus.layout import Bytes, gradient_layout, weights_layout
from bus.messages import Contribution, Evaluate, Malformed, Weights, Welcome
from bus.transport import Arrival, ServerTransport
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
from ps.advance import Advanced
from ps.checkpoint import Checkpoint, Failed, Saver
from ps.history import History, Recorder
from ps.machine import Machine
from ps.plan import Plan
from ps.reduce import Reducer
from ps.stretches import StretchUpdater
from ps.update import Updater, parameters_sha256

STOP_GRACE_S = 5.0  # how long an open step may still take once a stop is asked for
LONGEST_WAIT_S = 1.0  # of one poll, so that what wakes nobody is seen too
PAGE_BYTES = 4096
LENT_SLOTS = 4  # gradients that a worker can keep where the PS reads them; memory that is not used costs nothing
SAVE_LIMIT_S = 60.0  # for a checkpoint that is still being written when everything else is over


@dataclass(frozen=True, slots=True)
class Offer:
    """What a Welcome hands to workers, beside what the server knows itself: the experiment as JSON, and addresses."""

    experiment: str
    gradients: str
    weights: str


class Server:
    """``meta(version)`` is what a checkpoint keeps beside arrays. ``machine.version`` and ``updater`` must agree."""

    def __init__(
        self,
        *,
        machine: Machine,
        transport: ServerTransport,
        updater: Updater | StretchUpdater,
        bucket_bytes: int,
        offer: Offer,
        history: History,
        recorder: Recorder,
        saver: Saver,
        meta: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine, self.outcome = machine, None
        self._transport, self._updater, self._clock = transport, updater, clock
        self._offer, self._history, self._recorder = offer, history, recorder
        self._saver, self._meta = saver, meta
        self._bucket_bytes = bucket_bytes
        self._layout = weights_layout(updater.leaves, bucket_bytes)
        self._gradient_layout = gradient_layout(updater.leaves, bucket_bytes)
        self._reducer = Reducer(self._gradient_layout, machine.rules.shards, late=updater.by_stretch)
        # Two versions: what is being published, and the one before, whose step is closed (bus.transport, `share`).
        self._slot_bytes = -(-self._layout.size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._memory: Bytes = transport.share(2 * self._slot_bytes)
        self._slot = 0
        for slot in (1, 0):  # both, for what is not trained is never written again
            self._current = self._layout.pack(updater.weights(), self._place(slot))
        updater.lie_in(self._current)
        self._looked_at = 0.0  # at the clock
        self._stop_requested = False
        self._unsaved = ""  # why the newest checkpoint is not on disk

    outcome: Finish | None

    def request_stop(self) -> None:
        """Ask for an orderly end. May be called from a signal handler; wake the transport afterwards."""
        self._stop_requested = True

    def run(self) -> Finish:
        """Serve until the run is over."""
        while self.outcome is None:
            wait_s = self.machine.wake_at - self._clock()
            self.turn(min(max(wait_s, 0.0), LONGEST_WAIT_S))
        return self.outcome

    def turn(self, timeout_s: float) -> None:
        """Take at most one arrival, then look at the clock: a full inbox must not starve deadlines."""
        arrival = self._transport.receive(timeout_s)
        if self._stop_requested:
            self._stop_requested = False
            self._do(self.machine.handle(StopRequested(STOP_GRACE_S), now=self._clock()))
        if arrival is not None:
            arrival = self._checked(arrival)
            actions = self.machine.handle(arrival.message, now=self._clock(), peer=arrival.peer)
            self._do(actions, arrival)
        now = self._clock()
        if now >= self.machine.wake_at or now < self._looked_at:
            self._do(self.machine.handle(Tick(), now=now))
        self._looked_at = now
        self._hear_saver()

    @property
    def loss(self) -> float | None:
        """Of the last step that had examples."""
        return self._history.loss

    def parameters_sha256(self) -> str:
        """Of the current weights, as the summary states it."""
        return parameters_sha256(self._layout.views(self._current))

    def _checked(self, arrival: Arrival) -> Arrival:
        """Sizes are held against the layout before anything is believed."""
        message, buckets = arrival.message, self._gradient_layout.buckets
        if not isinstance(message, Contribution):
            return arrival
        try:
            if not 0 <= message.bucket < len(buckets):
                raise WireError(f"found bucket {message.bucket}, expected 0 to {len(buckets) - 1}")
            codec.check_payload(arrival.payload, buckets[message.bucket].size_bytes, message.checksum)
        except WireError as error:
            return Arrival(arrival.peer, Malformed("gradients", f"gradient: {error}"))
        return arrival

    def _do(self, actions: list[Action], arrival: Arrival | None = None) -> None:
        """Carry out ``actions``, and what they lead to, in order."""
        waiting = deque(actions)
        while waiting:
            waiting.extend(self._perform(waiting.popleft(), arrival))
        self._history.flush()

    def _perform(self, action: Action, arrival: Arrival | None) -> list[Action]:
        match action:
            case Accept() if arrival is not None:
                self._accept(action, arrival)
            case CloseStep():
                return self._close(action)
            case Publish():
                self._history.opened(self._clock())
                for message, bucket in self._weights(action.revision, action.plan):
                    self._transport.publish(message, bucket)
            case SendSnapshot():
                for message, bucket in self._weights(action.revision, action.plan):
                    self._transport.send(action.peer, message, bucket)
            case Reply():
                self._transport.send(action.peer, action.message)
            case Broadcast():
                self._transport.publish(action.message)
            case Admit():
                self._transport.send(action.peer, self._welcome(action.member))
            case Save():
                self._save(action)
            case PublishEvaluation():
                self._publish_evaluation(action)
            case Refused():
                self._recorder.refused(action)
            case MemberChanged():
                if action.event in ("left", "lost", "replaced", "failed"):
                    self._transport.reclaim(action.member)
                self._recorder.member(action)
            case Note():
                self._recorder.note(action.text)
            case Finish():
                self.outcome = action
        return []

    def _accept(self, action: Accept, arrival: Arrival) -> None:
        contribution, taken = action.contribution, action.taken
        for node in taken.replaced:
            self._reducer.drop(contribution.bucket, node)
        self._reducer.hold(
            contribution.bucket, (contribution.low, contribution.high), arrival.payload, stays=arrival.stays
        )
        for node in taken.sums:
            self._reducer.add(contribution.bucket, node)

    def _close(self, action: CloseStep) -> list[Action]:
        began, examples = self._clock(), action.result.examples
        if action.skip:
            self._reducer.settle()
            advanced = Advanced("", lambda: (self._reducer.norm(examples), 0.0))
        else:
            after = self._place(1 - self._slot)
            advanced = self._updater.advance(self._reducer, examples, self._current, after)
        applied = not action.skip and not advanced.trouble
        if applied:
            self._slot, self._current = 1 - self._slot, after
        self._history.closed(
            action.version,
            action.result,
            applied=applied,
            updates=self._updater.updates,
            norms=advanced.norms,
            began=began,
            now=self._clock(),
        )
        self._reducer.begin()
        return self.machine.handle(Updated(applied, advanced.trouble), now=self._clock())

    def _place(self, slot: int) -> Bytes:
        start = slot * self._slot_bytes
        return self._memory[start : start + self._layout.size_bytes]

    def _weights(self, revision: int, plan: Plan) -> Iterator[tuple[Weights, Bytes]]:
        for index in range(len(self._layout.buckets)):
            message = Weights(self.machine.session, self.machine.version, index, revision, plan)
            yield message, self._layout.bucket(self._current, index)

    def _welcome(self, member: int) -> Welcome:
        rules = self.machine.rules
        self._transport.lend(member, LENT_SLOTS * self._gradient_layout.size_bytes)
        published, lent = self._transport.describe(member)
        return Welcome(
            session=self.machine.session,
            member=member,
            version=self.machine.version,
            experiment=self._offer.experiment,
            leaves=self._updater.leaves,
            bucket_bytes=self._bucket_bytes,
            gradients=self._offer.gradients,
            weights=self._offer.weights,
            heartbeat_s=rules.heartbeat_s,
            heartbeat_timeout_s=rules.heartbeat_timeout_s,
            published=published,
            lent=lent,
        )

    def _publish_evaluation(self, action: PublishEvaluation) -> None:
        buffer = self._layout.pack(self._updater.averaged())
        for index in range(len(self._layout.buckets)):
            message = Evaluate(self.machine.session, action.version, index)
            self._transport.publish(message, self._layout.bucket(buffer, index))

    def _save(self, action: Save) -> None:
        meta = self._meta | {"loss_average": self._history.loss_average}
        self._saver.submit(Checkpoint(action.version, self._updater.updates, self._updater.snapshot(), meta))

    def _hear_saver(self) -> None:
        for result in self._saver.poll():
            self._unsaved = result.reason if isinstance(result, Failed) else ""
            if self._unsaved:
                self._recorder.note(f"checkpoint of version {result.version} not saved: {self._unsaved}")

    def close(self) -> str:
        """Wait for the last checkpoint, after ``run``. Why it is not on disk; empty if it is."""
        in_time = self._saver.close(SAVE_LIMIT_S)
        self._hear_saver()
        return self._unsaved if in_time else f"it was still being written after {SAVE_LIMIT_S:g} s"

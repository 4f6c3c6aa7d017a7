"""The edge of a worker: poll, decode, ask the machine, carry out its actions: the server's loop from the other side."""

import queue
import time
from collections import deque
from collections.abc import Callable

from bus import codec
from bus.endpoints import reachable
from bus.errors import WireError
from bus.layout import Bytes, Layout, gradient_layout, weights_layout
from bus.messages import Contribution, Malformed, Node, Ready, Weights, Welcome
from bus.transport import Arrival, WorkerTransport
from worker.executor import Executor, Result
from worker.machine import (
    Action,
    Compute,
    Computed,
    Event,
    Exit,
    Forget,
    Keep,
    Machine,
    Note,
    Prepare,
    Push,
    Send,
    StopRequested,
    Tick,
)

LONGEST_WAIT_S = 1.0  # of one poll
LOG_EVERY_S = 10.0
RETRY_PUSH_S = 0.005  # while the queue of the gradients socket is full


class Client:
    """``executor`` is told with ``attach``, because it posts its events here. ``note`` says a line to people, ``log``
    one to the worker's own log."""

    def __init__(
        self,
        machine: Machine,
        transport: WorkerTransport,
        *,
        note: Callable[[str], None],
        log: Callable[[str], None] = lambda text: None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = machine
        self.outcome: Exit | None = None
        self._transport, self._note, self._log, self._wake, self._clock = transport, note, log, wake, clock
        self._contributions = 0
        self._looked_at = clock()
        self._log_at = clock() + LOG_EVERY_S
        self._executor: Executor | None = None
        self._events: queue.SimpleQueue[tuple[Event, Result | None]] = queue.SimpleQueue()
        self._welcome: Welcome | None = None
        self._layout: Layout | None = None
        self._gradient_layout: Layout | None = None
        self._buffer: Bytes | None = None  # of the version that is arriving, or has arrived
        self._buffer_version = -1
        self._shared: Bytes | None = None  # the same, where it is memory of the PS: all buckets of a version are there
        self._slots: list[Bytes] = []  # of memory that the PS reads gradients from
        self._free: list[Bytes] = []  # those that this version does not use yet; the PS has read the others
        self._checksums = False  # the run wants them: its weights carry them
        self._results: dict[Node, Result] = {}  # of the version that is computed on; kept until it has passed
        self._outgoing: deque[tuple[Contribution, Bytes]] = deque()
        self._computing: set[Node] = set()  # ordered for that version, and not pushed yet
        self._prefetched = -1  # the version after whose work the next batches were ordered
        self._stop_exit_code: int | None = None

    def attach(self, executor: Executor) -> None:
        self._executor = executor

    def post(self, event: Event, result: Result | None = None) -> None:
        """Hand an event to the loop, from any thread."""
        self._events.put((event, result))
        self._wake()

    def request_stop(self, exit_code: int) -> None:
        """Ask for an orderly leave. May be called from a signal handler; wake the transport afterwards."""
        self._stop_exit_code = exit_code

    def run(self) -> Exit:
        """Work until the run is over, or this worker cannot go on."""
        while self.outcome is None:
            wait_s = RETRY_PUSH_S if self._outgoing else self.machine.wake_at - self._clock()
            self.turn(min(max(wait_s, 0.0), LONGEST_WAIT_S))
        return self.outcome

    def turn(self, timeout_s: float) -> None:
        """Take what the executor has posted, then at most one arrival, then look at the clock."""
        if self._stop_exit_code is not None:
            code, self._stop_exit_code = self._stop_exit_code, None
            self._do(StopRequested(code))
            timeout_s = 0.0
        while not self._events.empty():
            self._take(*self._events.get())
            timeout_s = 0.0
        arrival = self._transport.receive(timeout_s)
        if arrival is not None:
            arrival = self._checked(arrival)
            self._do(arrival.message, arrival.payload)
        now = self._clock()
        if now >= self.machine.wake_at or now < self._looked_at:
            self._do(Tick())
        self._looked_at = now
        self._flush()
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            made = f"; {self._contributions} contributions so far" if self._contributions else ""
            self._log(f"{self.machine.doing}{made}")

    def _take(self, event: Event, result: Result | None) -> None:
        if isinstance(event, Computed) and result is not None and event.version == self._buffer_version:
            self._results[event.node] = result
        self._do(event)

    def _checked(self, arrival: Arrival) -> Arrival:
        """Sizes are held against the layout before anything is believed."""
        message = arrival.message
        if not isinstance(message, Weights):
            return arrival
        try:
            if self._layout is None or not 0 <= message.bucket < len(self._layout.buckets):
                raise WireError(f"found bucket {message.bucket}, which the welcome did not announce")
            codec.check_payload(arrival.payload, self._layout.buckets[message.bucket].size_bytes, message.checksum)
        except WireError as error:
            return Arrival(arrival.peer, Malformed("weights", f"weights: {error}"))
        return arrival

    def _do(self, event: Event, payload: Bytes | None = None) -> None:
        for action in self.machine.handle(event, now=self._clock()):
            self._perform(action, payload)

    def _perform(self, action: Action, payload: Bytes | None) -> None:
        match action:
            case Keep():
                self._keep(action.weights, payload)
            case Compute():
                self._compute(action)
            case Push():
                self._push(action.node)
            case Send():
                self._transport.send(action.message)
                if isinstance(action.message, Ready):
                    self._log(f"ready, on {action.message.device}")
            case Prepare():
                self._prepare(action.welcome)
            case Forget():
                self._forget()
            case Note():
                self._note(action.text)
            case Exit():
                self.outcome = action

    def _prepare(self, welcome: Welcome) -> None:
        assert self._executor is not None
        member, version = welcome.member, welcome.version
        self._log(f"joined {self.machine.address} as member {member} at version {version}; loading and compiling")
        self._welcome = welcome
        self._layout = weights_layout(welcome.leaves, welcome.bucket_bytes)
        self._gradient_layout = gradient_layout(welcome.leaves, welcome.bucket_bytes)
        self.machine.buckets = len(self._layout.buckets)
        largest = max(bucket.size_bytes for bucket in self._layout.buckets)
        gradients, weights = (reachable(each, self.machine.address) for each in (welcome.gradients, welcome.weights))
        self._transport.follow(welcome, gradients, weights, largest)
        lent = self._transport.lent()
        size = self._gradient_layout.size_bytes
        self._slots = (
            [lent[at : at + size] for at in range(0, len(lent) - size + 1, size)] if lent is not None and size else []
        )
        self._log(
            "memory is shared with the parameter server" if self._slots else "gradients and weights travel as messages"
        )
        self._executor.prepare(welcome)

    def _keep(self, weights: Weights, payload: Bytes | None) -> None:
        """Where they lie, if that is memory of the PS. Otherwise one copy, into a buffer that no later version reuses:
        JAX goes on reading it there."""
        assert self._layout is not None and payload is not None
        if weights.version != self._buffer_version or self._buffer is None:
            before, size = self._layout.buckets[weights.bucket].offset_bytes, self._layout.size_bytes
            self._shared = self._transport.around(payload, before, size)
            self._buffer, self._buffer_version = self._shared, weights.version
            if self._buffer is None:
                self._buffer = self._layout.empty()
            self._results.clear()
            self._computing.clear()
            self._free = list(self._slots)
        if self._shared is None:
            self._layout.bucket(self._buffer, weights.bucket)[:] = payload
        self._checksums = weights.checksum is not None

    def _compute(self, action: Compute) -> None:
        assert self._executor is not None and self._welcome is not None and self._buffer is not None
        # What was not sent for an older version is no use any more; a revised plan of the same one takes nothing back.
        self._outgoing = deque(one for one in self._outgoing if one[0].version == action.version)
        nodes = {node: self._free.pop() if self._free else None for node in action.nodes}
        self._executor.compute(self._welcome.session, action.version, self._buffer, nodes)
        self._computing.update(action.nodes)

    def _push(self, node: Node) -> None:
        assert self._welcome is not None and self._gradient_layout is not None
        result = self._results[node]
        self._contributions += 1
        for index in range(len(self._gradient_layout.buckets)):
            payload = self._gradient_layout.bucket(result.total.buffer, index)
            contribution = Contribution(
                session=self._welcome.session,
                member=self._welcome.member,
                version=self._buffer_version,
                bucket=index,
                low=node[0],
                high=node[1],
                examples=result.total.examples,
                sums=result.total.sums,
                left_out=result.total.left_out,
                trouble=result.total.trouble,
                waited_s=result.waited_s,
                computed_s=result.computed_s,
                checksum=codec.checksum(payload) if self._checksums else None,
            )
            self._outgoing.append((contribution, payload))
        self._computing.discard(node)
        self._flush()

    def _flush(self) -> None:
        while self._outgoing and self._transport.push(*self._outgoing[0]):
            self._outgoing.popleft()
        # The next batches are made once everything is on its way: making them holds up this thread.
        if self._results and not self._computing and not self._outgoing and self._prefetched != self._buffer_version:
            assert self._executor is not None
            self._prefetched = self._buffer_version
            self._executor.prefetch(self._buffer_version + 1, tuple(self._results))

    def _forget(self) -> None:
        self._outgoing.clear()
        self._results.clear()
        self._computing.clear()
        self._buffer, self._shared, self._buffer_version, self._welcome = None, None, -1, None
        self._slots, self._free = [], []
        if self._executor is not None:
            self._executor.cancel()
        self._transport.forsake()
        self._transport.redial()

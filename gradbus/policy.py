"""What the launcher does when something happens to its processes. Pure: processes are names, the time is an argument.

    event                                    answer
    the PS listens                           start the evaluator and the workers
    a worker dies                            start it again, later each time, `restarts` times; then go on without it
    a worker ends with code 2 or is refused  it is not started again: the same would happen
    the last worker is out                   ask the PS to stop; the run has failed
    the evaluator dies                       training goes on; the last version is evaluated at the end
    the PS dies while it serves              start it again, `restarts` times, from its newest checkpoint; the workers
                                             join again by themselves
    the PS dies once too often, or before    end everything; the run has failed and can be resumed
    it could serve
    the PS has finished and is gone          the evaluator is asked to end with the last version, workers that are
                                             still there to leave, each within a bounded time
    first signal                             ask the PS to finish its step, to checkpoint and to send everyone home
    second signal                            kill everything

Whoever has been given a time and is still there climbs a ladder: SIGTERM to its process group, then SIGKILL.
"""

import math
import signal
from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from gradbus.incidents import (
    EVAL,
    EVALUATOR,
    PS,
    Action,
    Ask,
    Blame,
    Ended,
    Evaluated,
    Event,
    Failed,
    Finished,
    Kill,
    Left,
    Listening,
    Members,
    Note,
    OnPurpose,
    Signalled,
    Start,
    Terminate,
    Tick,
)

USER_FAULTS = frozenset({"settings", "data", "workload", "bind", "refused"})
"""Kinds of failure that one line explains and that a restart would only repeat."""

STOPPED = frozenset({0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT})
"""How a process ends that was stopped. By SIGINT: it was not in a process group of its own yet when Ctrl-C came."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds.

    start_s       from the start of the PS until it listens
    grace_s       after the first signal, until SIGTERM goes to every process group
    kill_s        from SIGTERM to SIGKILL
    leave_s       for the workers to leave after the PS has finished, and for the PS to end after it said so
    evaluator_s   for the evaluator to finish with the last version
    evaluation_s  for the evaluation that the launcher starts where the evaluator's is missing
    alone_s       for the PS to finish after the last worker left in good order
    echo_s        in which SIGTERM or SIGHUP again is no second wish: make and shells pass on what the group got, too
    backoff_s     before the first restart of a worker; doubled at each further one, up to backoff_limit_s
    settled_s     a life that lasted so long was a good one: after it the delays begin anew
    """

    start_s: float = 600.0
    grace_s: float = 10.0
    kill_s: float = 5.0
    leave_s: float = 15.0
    evaluator_s: float = 120.0
    evaluation_s: float = 600.0
    alone_s: float = 30.0
    echo_s: float = 1.0
    backoff_s: float = 1.0
    backoff_limit_s: float = 15.0
    settled_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended. reason: one line, empty when there is nothing to explain.

    explained: the reason says all there is to say, so that no failure table is needed.
    """

    status: str
    reason: str
    exit_code: int
    explained: bool = True


class _Rung(IntEnum):
    TERMINATE = 0
    KILL = 1
    GIVE_UP = 2


class Policy:
    """One life of a run on this machine. `outcome` is None until it is over; `wake_at` is when it next wants a Tick."""

    def __init__(
        self, *, workers: int, evaluator: bool, restarts: int, now: float, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.workers = tuple(f"w{index}" for index in range(workers))
        self.restarts = 0
        self.outcome: Outcome | None = None
        self.on_purpose: set[str] = set()  # processes with a fault on purpose in this life
        self._evaluator = evaluator
        self._budget = restarts
        self._listen_by: float | None = now + self.limits.start_s
        self._served = False
        self._running: set[str] = set()
        self._ladder: dict[str, tuple[float, _Rung]] = {}
        self._due: dict[str, float] = {}
        self._restarts_of: dict[str, int] = {}
        self._short_lives: dict[str, int] = {}  # in a row
        self._started_at: dict[str, float] = {}
        self._failed: dict[str, Failed] = {}
        self._left: set[str] = set()
        self._lost: list[str] = []  # why each worker that will not come back is out
        self._user_fault = True  # of all of those
        self._strangers = False
        self._alone_until: float | None = None
        self._evaluated: set[int] = set()
        self._evaluation_tried = False
        self._finished: Finished | None = None
        self._signal: int | None = None
        self._signalled_at = 0.0
        self._verdict: Outcome | None = None

    def begin(self) -> list[Action]:
        """The first actions."""
        return [self._start(PS)]

    @property
    def wake_at(self) -> float:
        times = [time for time, _ in self._ladder.values()] + list(self._due.values())
        times += [time for time in (self._listen_by, self._alone_until) if time is not None]
        return min(times, default=float("inf"))

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, in this order."""
        actions: list[Action] = []
        match event:
            case Listening():
                actions = self._listening()
            case Members(names):
                self._strangers = bool(names - set(self.workers))
            case Evaluated(version):
                self._evaluated.add(version)
            case Left(name):
                self._left.add(name)
            case OnPurpose(name):
                self.on_purpose.add(name)
            case Failed(name):
                self._failed[name] = event
            case Finished():
                self._finished, self._alone_until = event, None
                self._due.clear()
                self._give(PS, self.limits.leave_s, now)
            case Signalled(number):
                actions = self._signalled(number, now)
            case Ended(name, code):
                actions = self._ended(name, code, now)
            case Tick():
                actions = self._tick(now)
            case _:
                assert_never(event)
        return actions + self._conclude(now)

    @property
    def _ending(self) -> bool:
        """True once no process is worth restarting."""
        known = self._finished or self._verdict or self._signal
        return known is not None or not (PS in self._running or PS in self._due)

    def _start(self, name: str) -> Start:
        self._running.add(name)
        self._left.discard(name)
        self.on_purpose.discard(name)
        self._failed.pop(name, None)
        return Start(name)

    def _give(self, name: str, seconds: float, now: float) -> None:
        """Let `name` end by itself for so long at most."""
        limit = (now + seconds, _Rung.TERMINATE)
        if name in self._running:
            time, rung = self._ladder.get(name, limit)
            self._ladder[name] = (min(time, limit[0]), rung)

    def _listening(self) -> list[Action]:
        if self._listen_by is None or self._ending:
            return []
        self._listen_by = None
        wanted = ([EVALUATOR] if self._evaluator else []) + list(self.workers)
        if self._served:  # a PS that was started again: the others are here, or out for good, or due
            wanted = [EVALUATOR] if self._evaluator and EVALUATOR not in self._running else []
        self._served = True
        return [self._start(name) for name in wanted]

    def _signalled(self, number: int, now: float) -> list[Action]:
        down = PS in self._due
        self._due.clear()
        if self._signal is not None:
            echo = number == self._signal != signal.SIGINT and now - self._signalled_at < self.limits.echo_s
            if echo:
                return []
            for name in sorted(self._running):
                self._ladder[name] = (now + self.limits.kill_s, _Rung.GIVE_UP)
            return [Kill(name) for name in sorted(self._running)]
        self._signal, self._signalled_at = number, now
        if PS in self._running:
            return [Note("stopping after this step; once more to kill everything now"), *self._stop_ps(now)]
        if down:
            reason = "stopped while the parameter server was to be started again"
            self._verdict = self._verdict or Outcome("interrupted", reason, 0)
        for name in sorted(self._running):
            self._give(name, self.limits.kill_s, now)
        return [Ask(name) for name in sorted(self._running)]

    def _stop_ps(self, now: float) -> list[Action]:
        """The PS tells everyone else."""
        self._alone_until = None
        for name in sorted(self._running):
            self._give(name, self.limits.grace_s, now)
        return [Ask(PS)]

    def _ended(self, name: str, code: int, now: float) -> list[Action]:
        self._running.discard(name)
        self._ladder.pop(name, None)
        if name == PS:
            return self._ps_ended(code, now)
        if name in self.workers:
            return [] if self._ending else self._worker_ended(name, code, now)
        if name == EVAL and self._finished is not None and self._finished.version not in self._evaluated:
            return [Blame(name, code, self._reason(name, code), "the run has no final evaluation; try: gradbus eval")]
        if name == EVALUATOR and not self._ending and code != 0:  # 0: the PS has told it that the run is over
            answer = "training goes on; the last version is evaluated at the end"
            return [Blame(name, code, self._reason(name, code), answer)]
        return []

    def _ps_ended(self, code: int, now: float) -> list[Action]:
        self._listen_by = self._alone_until = None
        actions: list[Action] = []
        failed = self._failed.get(PS)
        used = self._restarts_of.get(PS, 0)
        by_itself = not (self._finished or self._verdict or self._signal)
        if by_itself and self._served and used < self._budget and (failed is None or failed.kind == "internal"):
            self._restarts_of[PS] = used + 1
            short = self._count_short_lives(PS, now)
            self._due[PS] = now if short == 0 else now + self._backoff_s(short)
            answer = f"started again (restart {used + 1} of {self._budget})"
            return [Blame(PS, code, self._reason(PS, code), answer)]
        self._due.clear()
        patience_s = 0.0  # without a PS there is nothing to wait for
        if self._finished is not None:
            done = self._finished.status == "done" and self._signal is None
            patience_s = self.limits.evaluator_s if done else self.limits.leave_s
            verdict = Outcome(self._finished.status, self._finished.reason, self._finished.exit_code)
        elif failed is not None and failed.kind != "internal":
            exit_code = 2 if failed.kind in USER_FAULTS else max(code, 1)
            verdict = Outcome("failed", failed.reason, exit_code)
        elif self._signal is not None and code in STOPPED:
            how = "killed" if code == -signal.SIGKILL else "stopped"
            verdict = Outcome("interrupted", f"{how} before the parameter server could write a checkpoint", 0)
        else:
            reason = self._reason(PS, code)
            actions = [Blame(PS, code, reason, "the run was ended")]
            verdict = Outcome("failed", f"the parameter server ended: {reason}", 1, explained=False)
        self._verdict = self._verdict or verdict
        for name in sorted(self._running):
            # The evaluator ends when it has evaluated what has reached it; a worker that never joined would dial on.
            actions.append(Ask(name))
            self._give(name, patience_s if name == EVALUATOR else min(patience_s, self.limits.leave_s), now)
        return actions

    def _worker_ended(self, name: str, code: int, now: float) -> list[Action]:
        failed = self._failed.get(name)
        if name in self._left:
            return self._check_workers(now)  # the PS has told that it left
        reason = self._reason(name, code)
        if code == 2 or (failed is not None and failed.kind in USER_FAULTS):
            self._lost.append(failed.reason if failed else f"{name}: {reason}")
            answer = "left out; starting it again would end in the same way"
            return [Blame(name, code, reason, answer), *self._check_workers(now)]
        used = self._restarts_of.get(name, 0)
        if used >= self._budget:
            self._lost.append(f"{name}: {reason}")
            self._user_fault = False
            answer = f"left out after {used} restarts" if used else "left out (cluster.restarts is 0)"
            return [Blame(name, code, reason, answer), *self._check_workers(now)]
        delay_s = self._backoff_s(self._count_short_lives(name, now))
        self._restarts_of[name] = used + 1
        self._due[name] = now + delay_s
        return [Blame(name, code, reason, f"starts again in {delay_s:g} s (restart {used + 1} of {self._budget})")]

    def _count_short_lives(self, name: str, now: float) -> int:
        """How many lives in a row before the one that has just ended were short, or 0 if that one was not. The first
        life of all counts as a good one."""
        settled = now - self._started_at.get(name, -math.inf) >= self.limits.settled_s
        self._short_lives[name] = 0 if settled else self._short_lives.get(name, -1) + 1
        return self._short_lives[name]

    def _backoff_s(self, short_lives: int) -> float:
        return min(self.limits.backoff_s * 2.0**short_lives, self.limits.backoff_limit_s)

    def _check_workers(self, now: float) -> list[Action]:
        """What follows when a worker is out for good: nothing, unless it was the last."""
        if any(name in self._running or name in self._due for name in self.workers):
            return []
        if self._strangers:
            return [Note("no worker of this machine is left; the others go on")]
        if not self._lost:  # most likely the PS has sent them home and is about to say so
            self._alone_until = now + self.limits.alone_s
            return []
        exit_code = 2 if self._user_fault else 1
        self._verdict = Outcome("failed", self._lost[0], exit_code, explained=self._user_fault)
        return self._stop_ps(now)

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self._listen_by is not None and now >= self._listen_by:
            self._listen_by = None
            reason = f"the parameter server did not get ready within {self.limits.start_s:g} s"
            self._verdict = Outcome("failed", reason, 3, explained=False)
            self._give(PS, 0.0, now)
        if self._alone_until is not None and now >= self._alone_until:
            self._verdict = Outcome("failed", "every worker has left", 3)
            actions += self._stop_ps(now)
        for name in [name for name, time in self._due.items() if now >= time]:
            del self._due[name]
            self.restarts += 1
            self._started_at[name] = now
            if name == PS:
                self._listen_by = now + self.limits.start_s
            actions.append(self._start(name))
        for name, (time, rung) in list(self._ladder.items()):
            if now >= time:
                actions.append(self._climb(name, rung, now))
        return actions

    def _climb(self, name: str, rung: _Rung, now: float) -> Action:
        if rung is _Rung.GIVE_UP:
            del self._ladder[name]
            self._running.discard(name)
            return Note(f"{name} does not end, even by SIGKILL; look for it with ps")
        self._ladder[name] = (now + self.limits.kill_s, _Rung(rung + 1))
        return Terminate(name) if rung is _Rung.TERMINATE else Kill(name)

    def _conclude(self, now: float) -> list[Action]:
        """The outcome, once everyone is gone and the last version is evaluated."""
        if self._running or self._due or self.outcome is not None:
            return []
        verdict = self._verdict or Outcome("failed", "the parameter server does not end", 1, explained=False)
        version = self._finished.version if self._finished else None
        evaluated = not self._evaluator or version in self._evaluated
        if verdict.status == "done" and not evaluated and self._signal is None and not self._evaluation_tried:
            self._evaluation_tried = True
            start = self._start(EVAL)
            self._give(EVAL, self.limits.evaluation_s, now)
            return [Note(f"evaluating version {version}"), start]
        if self._signal is not None and verdict.status != "failed" and not (verdict.status == "done" and evaluated):
            number = signal.SIGINT if self._signal == signal.SIGINT else signal.SIGTERM  # SIGHUP counts as SIGTERM
            reason = verdict.reason if verdict.status == "interrupted" else "interrupted in the final evaluation"
            verdict = Outcome("interrupted", reason, 128 + number)
        if verdict.status == "failed" and verdict.exit_code == 0:
            verdict = Outcome("failed", verdict.reason, 1, verdict.explained)
        if verdict.status == "interrupted" and verdict.exit_code == 0:
            verdict = Outcome("interrupted", verdict.reason, 128 + signal.SIGTERM)
        self.outcome = verdict
        return []

    def _reason(self, name: str, code: int) -> str:
        failed, how = self._failed.get(name), describe_exit(code, on_purpose=name in self.on_purpose)
        return f"{failed.reason} ({how})" if failed else how


def describe_exit(code: int, *, on_purpose: bool = False) -> str:
    """An exit code in words; signals by name, SIGKILL with its likely cause.

    >>> describe_exit(-11)
    'killed by SIGSEGV'
    """
    number = -code if code < 0 else code - 128
    if code >= 0 and number <= 0:
        return f"exit code {code}" + (", without a word" if code == 0 else "")
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    likely = ": likely out of memory, or killed by hand" if number == signal.SIGKILL else ""
    cause = ", on purpose" if on_purpose else likely
    return f"killed by {name}{cause}" if code < 0 else f"exit code {code}, as after {name}{cause}"

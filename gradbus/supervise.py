"""Local processes: start, watch, restart, stop. Each is a fresh interpreter in a session and process group of its own.

This is the edge: it turns reports, exits and signals into events for gradbus.policy, and carries out what that decides.
A child ends with its launcher (the lifeline), and what a child leaves behind in its process group is ended with it.
Neither JAX nor ZeroMQ is imported here, and nothing is ever forked without exec.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradbus import incidents
from gradbus.policy import Limits, Outcome, Policy
from gradbus.process import Process, start, tail
from gradbus.records import RunFolder, now_utc
from gradbus.report import LIFELINE_FD, REPORT_FD, Event, Events

CHILD = (sys.executable, "-m", "gradbus.child")
POLL_S = 0.5  # the longest time without a look at the processes; signals, reports and exits end it sooner
LEFTOVERS_S = 0.05  # the same while grandchildren are left: nothing announces their end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """A process that ended badly. reason: in words, with exit code or signal; answer: what the run did about it."""

    time: str
    name: str
    host: str
    pid: int
    reason: str
    answer: str
    log: Path
    tail: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What came out: the outcome, the PS's last words, evaluations by version, and what went wrong.

    finished: the fields of the PS's `finished`, empty if it died without; progress: those of its last `progress`.
    faults: positions of the faults on purpose that have happened.
    """

    outcome: Outcome
    finished: dict[str, Any]
    progress: dict[str, Any]
    evaluations: dict[int, dict[str, Any]]
    failures: tuple[Failure, ...]
    restarts: int
    faults: frozenset[int] = frozenset()


class Watcher(Protocol):
    """Who is told while the run goes on. What it raises ends the run."""

    def reported(self, source: str, event: str, fields: dict[str, Any]) -> None:
        """A process reported `event`."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def failed(self, failure: Failure) -> None:
        """A process ended badly."""

    def tick(self) -> None:
        """Called at least every POLL_S."""


class Supervisor:
    """Runs the processes of one run until its end.

    workers, evaluator, restarts: see the settings `cluster` and `eval`. threads: XLA threads of each process.
    resume: a checkpoint folder for the PS, or None to begin at version 0.
    faults: positions, in the settings, of faults on purpose that have happened already.
    child: the command of a child, to which the role and its arguments are added.
    """

    def __init__(
        self,
        run: RunFolder,
        watcher: Watcher,
        *,
        workers: int,
        evaluator: bool,
        restarts: int,
        threads: int,
        resume: Path | None = None,
        faults: Collection[int] = (),
        child: Sequence[str] = CHILD,
        limits: Limits | None = None,
    ) -> None:
        self._run = run
        self._watcher = watcher
        self._threads = threads
        self._resume = resume
        self._child = tuple(child)
        self._policy = Policy(
            workers=workers, evaluator=evaluator, restarts=restarts, now=time.monotonic(), limits=limits
        )
        self._address = ""
        self._processes: dict[str, Process] = {}
        self._leftovers: list[Process] = []
        self._unstarted: deque[str] = deque()
        self._signals: deque[int] = deque()
        self._finished: dict[str, Any] = {}
        self._progress: dict[str, Any] = {}
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._failures: list[Failure] = []
        self._faults = set(faults)

    def run(self) -> Result:
        """Start everything, and return once nothing that was started is left.

        From the main thread it also takes SIGINT, SIGTERM and SIGHUP. An exception kills all processes on its way out.
        """
        self._lifeline, lifeline_kept = os.pipe()
        with self._wake_up() as wake_fd:
            self._events = Events(wake_fd)
            try:
                self._perform(self._policy.begin())
                while self._policy.outcome is None or self._leftovers:
                    self._turn()
            finally:
                self._kill_all()
                self._events.close()
                os.close(self._lifeline)
                os.close(lifeline_kept)
        return Result(
            outcome=self._policy.outcome,
            finished=self._finished,
            progress=self._progress,
            evaluations=self._evaluations,
            failures=tuple(self._failures),
            restarts=self._policy.restarts,
            faults=frozenset(self._faults),
        )

    def _turn(self) -> None:
        now = time.monotonic()
        longest_s = LEFTOVERS_S if self._leftovers else POLL_S
        for event in self._events.wait(min(longest_s, self._policy.wake_at - now)):
            self._hear(event)
        while self._signals:
            self._decide(incidents.Signalled(self._signals.popleft()))
        while self._unstarted:
            self._decide(incidents.Ended(self._unstarted.popleft(), 127))
        for process in list(self._processes.values()):  # the PS is first: its end explains that of the others
            code = process.popen.poll()
            if code is not None:
                for event in self._events.drain(process.name):
                    self._hear(event)
                self._decide(incidents.Ended(process.name, code))
                self._processes.pop(process.name, None)
                self._end_leftovers(process)
            elif (change := process.stopped_or_continued()) is not None:
                self._watcher.note(self._paused(process, change))
        self._leftovers = [process for process in self._leftovers if self._still_there(process)]
        self._decide(incidents.Tick())
        self._watcher.tick()

    def _decide(self, event: incidents.Event) -> None:
        self._perform(self._policy.handle(event, time.monotonic()))

    def _perform(self, actions: list[incidents.Action]) -> None:
        for action in actions:
            match action:
                case incidents.Start(name):
                    self._start(name)
                case incidents.Ask(name) if name in self._processes:
                    self._processes[name].ask()
                case incidents.Terminate(name) if name in self._processes:
                    self._processes[name].signal_group(signal.SIGTERM)
                case incidents.Kill(name) if name in self._processes:
                    self._processes[name].signal_group(signal.SIGKILL)
                case incidents.Blame(name, _, reason, answer):
                    self._blame(name, reason, answer)
                case incidents.Note(text):
                    self._watcher.note(text)

    def _hear(self, event: Event) -> None:
        """Pass a report on to the watcher, and to the policy what it needs to know of it."""
        if not event.name:
            return
        source, fields = event.source, event.fields
        match event.name:
            case "listening":
                self._address = str(fields.get("local") or fields.get("control", ""))
                self._run.make_latest()  # now that it has begun: a start that failed is not what people look for
            case "finished":
                self._finished = fields
            case "progress":
                self._progress = fields
            case "fault" if isinstance(index := fields.get("index"), int):
                self._faults.add(index)
            case "evaluated" if isinstance(version := fields.get("version"), int):
                self._evaluations[version] = fields
        self._watcher.reported(source, event.name, fields)
        known = _understand(source, event.name, fields)
        if known is not None:
            self._decide(known)

    def _arguments(self, name: str) -> list[str]:
        folder = str(self._run.path)
        spent = ["--spent", *map(str, sorted(self._faults))] if self._faults else []
        match name:
            case incidents.PS:
                if self._address:
                    return ["ps", folder, "--again", *spent]
                return ["ps", folder, *(["--resume", str(self._resume)] if self._resume else []), *spent]
            case incidents.EVALUATOR:
                return ["evaluator", folder]
            case incidents.EVAL:
                return ["eval", folder]
            case _:
                return ["worker", "--ps", self._address, "--name", name, "--run", folder, *spent]

    def _start(self, name: str) -> None:
        read, write = os.pipe()
        environment = {
            **os.environ,
            "NPROC": str(self._threads),  # the only thing that limits XLA's threads on the CPU
            "OPENBLAS_NUM_THREADS": str(self._threads),  # NumPy's
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            REPORT_FD: str(write),
            LIFELINE_FD: str(self._lifeline),
        }
        if name in (incidents.PS, incidents.EVALUATOR, incidents.EVAL):
            environment.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator's memory is for the workers
        else:
            environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers may share a card
        command = [*self._child, *self._arguments(name)]
        try:
            process = start(name, command, self._run.log(name), environment, (write, self._lifeline))
        except OSError as error:
            os.close(read)
            self._watcher.note(f"{name} could not be started: {error}")
            self._unstarted.append(name)
            return
        finally:
            os.close(write)
        self._events.add(name, read)
        self._processes[name] = process

    def _blame(self, name: str, reason: str, answer: str) -> None:
        process = self._processes.get(name)
        failure = Failure(
            time=now_utc(),
            name=name,
            host=socket.gethostname(),
            pid=process.popen.pid if process else 0,
            reason=reason,
            answer=answer,
            log=self._run.log(name),
            tail=tail(self._run.log(name), process.log_start if process else 0),
        )
        self._failures.append(failure)
        self._watcher.failed(failure)

    def _paused(self, process: Process, change: str) -> str:
        who = f"{process.name} (pid {process.popen.pid})"
        if change == "":
            return f"{who} goes on"
        if process.name in self._policy.on_purpose:
            return f"{who} was stopped by {change}, on purpose"
        return f"{who} was stopped by {change}; it goes on after: kill -CONT {process.popen.pid}"

    def _end_leftovers(self, process: Process) -> None:
        if process.group_alive():
            process.signal_group(signal.SIGTERM)
            process.kill_at = time.monotonic() + self._policy.limits.kill_s
            self._leftovers.append(process)

    def _still_there(self, process: Process) -> bool:
        if not process.group_alive():
            return False
        now = time.monotonic()
        if process.kill_at is None or now < process.kill_at:
            return True
        process.signal_group(signal.SIGKILL)
        if now < process.kill_at + self._policy.limits.kill_s:
            return True
        self._watcher.note(f"a process that {process.name} started does not end (process group {process.popen.pid})")
        return False

    def _kill_all(self) -> None:
        """Nothing is left here after a normal end; this is for exceptions."""
        for process in [*self._processes.values(), *self._leftovers]:
            process.kill(self._policy.limits.kill_s)

    @contextmanager
    def _wake_up(self) -> Iterator[int | None]:
        """Signals only set a flag, and write to the descriptor that ends a wait. A child's end does so, too."""
        if threading.current_thread() is not threading.main_thread():
            yield None
            return
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        previous = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None)}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the terminal may go
            previous[number] = signal.signal(number, lambda caught, _: self._signals.append(caught))
        try:
            yield receiver.fileno()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            receiver.close()
            sender.close()


def _understand(source: str, name: str, fields: dict[str, Any]) -> incidents.Event | None:
    """The policy's event for a report, or None. Fields that are missing or of another type get harmless values."""
    version = fields.get("version")
    match source, name:
        case incidents.PS, "listening":
            return incidents.Listening()
        case incidents.PS, "progress":
            members = fields.get("members")
            rows = members if isinstance(members, list) else []
            return incidents.Members(frozenset(str(row.get("name", "")) for row in rows if isinstance(row, dict)))
        case incidents.PS, "finished":
            status, code = str(fields.get("status")), fields.get("exit_code")
            known = status in ("done", "interrupted", "failed")
            return incidents.Finished(
                status if known else "failed",
                str(fields.get("reason") or ""),
                version if isinstance(version, int) else None,
                code if isinstance(code, int) else int(status != "done"),
            )
        case _, "evaluated" if isinstance(version, int):
            return incidents.Evaluated(version)
        case _, "left":
            return incidents.Left(source)
        case _, "fault" if fields.get("what") in ("SIGKILL", "SIGTERM", "SIGSTOP"):
            return incidents.OnPurpose(source)
        case _, "failed":
            return incidents.Failed(
                source, str(fields.get("kind", "internal")), str(fields.get("reason", "no reason given"))
            )
        case _:
            return None

"""One child process: a fresh interpreter that leads a session and a process group of its own; never a fork.

The group is what counts: a wrapper script, or a child with children of its own, is ended as a whole.
"""

import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradbus.records import now_utc

TAIL_LINES, TAIL_BYTES = 20, 1 << 16

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Process:
    """One child, the leader of its process group."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int = 0  # in bytes: what earlier lives have left in it
    kill_at: float | None = None  # when what it left behind is killed; None while it lives

    def ask(self) -> None:
        """SIGTERM to the child alone."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all of its process group."""
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            log.debug("%s: its process group is empty already", self.name)

    def kill(self, wait_s: float) -> None:
        """SIGKILL to all of its process group, and wait for the child."""
        self.signal_group(signal.SIGKILL)
        try:
            self.popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            log.warning("%s (pid %d) does not end", self.name, self.popen.pid)

    def stopped_or_continued(self) -> str | None:
        """The name of the signal that has stopped the child since the last look, "" if it goes on; None: neither."""
        if not hasattr(os, "waitid"):
            return None  # macOS
        try:
            found = os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return None  # it has ended
        if found is None:
            return None
        return signal.Signals(found.si_status).name if found.si_code == os.CLD_STOPPED else ""

    def group_alive(self) -> bool:
        """Whether anyone of its process group still runs; zombies that nobody has collected do not count."""
        try:
            os.killpg(self.popen.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return _group_runs(self.popen.pid)


def start(
    name: str, command: Sequence[str], path: Path, environment: Mapping[str, str], pass_fds: tuple[int, ...]
) -> Process:
    """Start `command`; its output is appended to the log at `path`. Raises OSError when it cannot be started."""
    with path.open("ab") as output:
        log_start = output.tell()
        output.write(f"--- {now_utc()} {' '.join(command)}\n".encode())
        output.flush()
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            close_fds=True,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    return Process(name, popen, path, log_start)


def tail(path: Path, start: int = 0) -> tuple[str, ...]:
    """The last lines of a log, of those that begin at byte `start` or later."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return (f"(the log cannot be read: {error.strerror})",)
    return tuple(lines[-TAIL_LINES:])


def _group_runs(group: int) -> bool:
    """Whether a process group has a member that is no zombie, where /proc can tell; otherwise True."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return True
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                # pid (command) state parent group ...; the command may hold anything, also spaces and brackets
                state, _, its_group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue  # ended while we looked
            if int(its_group) == group and state not in "ZX":
                return True
    return False

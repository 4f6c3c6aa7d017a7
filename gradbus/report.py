"""What a child process tells its launcher, over a pipe: one JSON object per line, named by its key `event`.

Two file descriptors come through the environment. GRADBUS_REPORT_FD is the write end of the report pipe.
GRADBUS_LIFELINE_FD is the read end of a pipe whose other end only the launcher holds: end of file there means that
the launcher is gone, however it died. A process started by hand has neither, and everything here does nothing.

Reporting must never disturb training: a full pipe drops progress, delays other events by a bounded time at most, and a
closed pipe is remembered. Nothing here raises into the caller.
"""

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

REPORT_FD = "GRADBUS_REPORT_FD"
LIFELINE_FD = "GRADBUS_LIFELINE_FD"
LINE_LIMIT_BYTES = 1 << 20

log = logging.getLogger(__name__)


class Reporter:
    """The child's end of the report pipe; safe to use from several threads.

    fd: the write end of a pipe, or None to take it from GRADBUS_REPORT_FD. Without either, events go to the log.
    wait_s: the longest that an event which must not be lost may wait for a launcher that is slow to read.
    """

    def __init__(self, fd: int | None = None, *, wait_s: float = 2.0) -> None:
        self._fd = _inherited(REPORT_FD) if fd is None else fd
        self._wait_s = wait_s
        self._unsent = b""  # the rest of a line that the pipe took only in part; it must go out before anything else
        self._lock = threading.Lock()
        self.dropped = 0
        if self._fd is not None:
            os.set_blocking(self._fd, False)

    @property
    def connected(self) -> bool:
        """False when nobody listens: started by hand, or the launcher has closed the pipe."""
        return self._fd is not None

    def progress(self, **fields: Any) -> None:
        """Report `progress`; dropped when the pipe is full, because a newer one is coming."""
        self._send("progress", fields, wait_s=0.0)

    def event(self, event: str, **fields: Any) -> None:
        """Report any other event; waits for room in the pipe for `wait_s` at most, then drops it."""
        self._send(event, fields, wait_s=self._wait_s)

    def close(self) -> None:
        """Close the pipe; the launcher sees end of file."""
        with self._lock:
            self._close()

    def _send(self, event: str, fields: dict[str, Any], wait_s: float) -> None:
        line = encode_line({"event": event, **fields})
        with self._lock:
            if self._fd is None:
                log.debug("report: %s", line.decode().rstrip())
                return
            deadline = time.monotonic() + wait_s
            if not self._flush(deadline):
                self.dropped += 1
                return
            self._unsent = line
            # A line that was begun is finished later: half of it is already in the pipe.
            if not self._flush(deadline) and len(self._unsent) == len(line):
                self._unsent = b""
                self.dropped += 1

    def _flush(self, deadline: float) -> bool:
        """Write `_unsent` until the deadline; True when all of it is gone."""
        while self._unsent and self._fd is not None:
            try:
                self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not _writable(self._fd, left_s):
                    return False
            except OSError as error:
                log.warning("the launcher no longer listens (%s); training goes on without reports", error.strerror)
                self._close()
        return True

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._unsent = None, b""


def lifeline(on_loss: Callable[[], None]) -> threading.Thread | None:
    """Call `on_loss` from a daemon thread once the launcher is gone; None when there is no launcher to watch."""
    fd = _inherited(LIFELINE_FD)
    if fd is None:
        return None

    def watch() -> None:
        while os.read(fd, 512):
            pass
        on_loss()

    thread = threading.Thread(target=watch, name="lifeline", daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True, slots=True)
class Event:
    """One report: `source` sent `name` with `fields`. The name is empty when the source closed its pipe."""

    source: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


class Events:
    """The launcher's end: reads the pipes of several children without ever blocking on one of them.

    wake_fd: a readable end that may interrupt `wait`, such as a signal wake-up socket; what arrives there is discarded.
    """

    def __init__(self, wake_fd: int | None = None, *, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._selector = selectors.DefaultSelector()
        self._limit_bytes = limit_bytes
        self._wake_fd = wake_fd
        self._partial: dict[int, bytearray] = {}
        if wake_fd is not None:
            os.set_blocking(wake_fd, False)
            self._selector.register(wake_fd, selectors.EVENT_READ, data="")

    def add(self, source: str, fd: int) -> None:
        """Read reports of `source` from `fd`, and close it at its end."""
        os.set_blocking(fd, False)
        self._partial[fd] = bytearray()
        self._selector.register(fd, selectors.EVENT_READ, data=source)

    def wait(self, timeout_s: float) -> list[Event]:
        """What arrived within `timeout_s`; returns as soon as there is anything, also for a wake-up."""
        found: list[Event] = []
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.fd == self._wake_fd:
                _read(key.fd)
            else:
                found += self._receive(key.fd, key.data)
        return found

    def drain(self, source: str) -> list[Event]:
        """All that `source` has left in its pipe; for a child that has ended. Its pipe is closed."""
        found: list[Event] = []
        for key in list(self._selector.get_map().values()):
            if key.data != source or key.fd == self._wake_fd:
                continue
            while chunk := _read(key.fd):
                found += self._split(key.fd, source, chunk)
            self._forget(key.fd)
        return found

    def close(self) -> None:
        """Close every pipe that was added."""
        for fd in list(self._partial):
            self._forget(fd)
        self._selector.close()

    def _receive(self, fd: int, source: str) -> list[Event]:
        chunk = _read(fd)
        if chunk is None:
            return []
        if not chunk:
            self._forget(fd)
            return [Event(source, "")]
        return self._split(fd, source, chunk)

    def _split(self, fd: int, source: str, chunk: bytes) -> list[Event]:
        partial = self._partial[fd]
        partial += chunk
        *lines, rest = bytes(partial).split(b"\n")
        if len(rest) > self._limit_bytes:
            # Keep one byte over the limit: whatever ends this line, it is still recognised as too long.
            rest = rest[: self._limit_bytes + 1]
        self._partial[fd] = bytearray(rest)
        return [self._parse(source, line) for line in lines if line]

    def _parse(self, source: str, line: bytes) -> Event:
        try:
            row = msgspec.json.decode(line) if len(line) <= self._limit_bytes else None
        except msgspec.DecodeError:
            row = None
        if isinstance(row, dict) and isinstance(name := row.pop("event", None), str) and name:
            return Event(source, name, row)
        return Event(source, "note", {"text": f"an unreadable report of {len(line)} bytes was dropped"})

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._partial[fd]
        os.close(fd)


def encode_line(row: dict[str, Any]) -> bytes:
    """One JSON line. NaN and infinity become null, array scalars numbers, and anything unknown its text."""
    return msgspec.json.encode(row, enc_hook=_plain) + b"\n"


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # array scalars of NumPy and JAX, without importing either
    return item() if callable(item) and getattr(value, "size", 1) == 1 else str(value)


def _inherited(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        fd = int(text)
        os.set_inheritable(fd, False)  # a grandchild must not keep the pipe open
    except (ValueError, OSError) as error:
        log.warning("%s=%r is not an open file descriptor (%s); ignored", variable, text, error)
        return None
    return fd


def _writable(fd: int, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        return bool(selector.select(timeout_s))


def _read(fd: int) -> bytes | None:
    """A chunk, b"" at the end, None when there is nothing now."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None

"""How the driver and the members of a contender talk: one JSON object a line over a Unix socket, nothing while a round
is being measured."""

import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any


class LinkError(Exception):
    """The other side is gone, or silent for too long."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._text = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LinkError(f"the other side is gone ({error.strerror})") from None

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """The next message; raises LinkError where there is none in time, or none any more."""
        self._connection.settimeout(limit_s)
        while b"\n" not in self._text:
            try:
                data = self._connection.recv(1 << 20)
            except OSError as error:
                raise LinkError(f"no answer ({error})") from None
            if not data:
                raise LinkError("a member has ended")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._connection.close()


def gather(links: Sequence[Link], limit_s: float) -> list[dict[str, Any]]:
    """One message from each, in the order of ``links``; at the first that says "error", LinkError with its text."""
    answers: dict[Link, dict[str, Any]] = {}
    deadline = time.monotonic() + limit_s
    while len(answers) < len(links):
        waiting = [link for link in links if link not in answers]
        ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LinkError(f"no answer within {limit_s:.0f} s")
        for link in ready:
            answers[link] = link.receive(limit_s)
            if "error" in answers[link]:
                raise LinkError(str(answers[link]["error"]))
    return [answers[link] for link in links]

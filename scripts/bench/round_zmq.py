"""The floor of ZeroMQ: PUSH/PULL and PUB/SUB with bare chunks, tuned by hand. No optimizer, no checks, no faults.

The hub adds each chunk as it lands and publishes it as soon as all workers gave theirs, so that receiving, adding and
publishing overlap. `tcp` is the loopback, `ipc` Unix sockets.
"""

from itertools import count
from typing import Any

import numpy as np
import zmq

from bench.member import HUB, Member
from bench.payload import Block, Vector, timed_rounds

CHUNK = (1 << 20) // 4  # elements of a message
SOCKET_BUFFER_BYTES = 4 << 20
LINGER_MS = 5000


def _socket(context: zmq.Context[Any], kind: int) -> Any:
    """Without bounds: PUB drops what goes beyond its own."""
    made = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.SNDBUF, SOCKET_BUFFER_BYTES),
        (zmq.RCVBUF, SOCKET_BUFFER_BYTES),
    ):
        made.set(option, value)
    return made


def bound(listening: Any) -> str:
    """Where a socket listens."""
    return str(listening.getsockopt_string(zmq.LAST_ENDPOINT))


def _chunks(size: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]


def _receive(source: Any) -> tuple[int, Vector]:
    index = int.from_bytes(source.recv(), "little")
    return index, np.frombuffer(source.recv(copy=False).buffer, np.float32)


def _send(target: Any, index: int, values: Vector) -> None:
    target.send(index.to_bytes(4, "little"), zmq.SNDMORE)
    target.send(values, copy=False)


class Hub:
    def __init__(self, path: str) -> None:
        self._path, self._numbers = path, count()

    def offer(self, block: Block) -> dict[str, Any]:
        self._context = zmq.Context(io_threads=2)
        self._inbox, self._outbox = _socket(self._context, zmq.PULL), _socket(self._context, zmq.XPUB)
        self._outbox.set(zmq.XPUB_VERBOSE, 1)
        for each in (self._inbox, self._outbox):
            each.bind("tcp://127.0.0.1:*" if self._path == "tcp" else f"ipc://{block.folder}/{next(self._numbers)}")
        return {"push": bound(self._inbox), "subscribe": bound(self._outbox)}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        for _ in range(block.workers):
            self._outbox.recv()  # a subscription each: from here on nothing is lost
        sums = np.zeros(block.count, np.float32), np.zeros(block.count, np.float32)
        for number in range(block.rounds):
            self._round(block, sums[number & 1])  # the other one may still be on its way
        self._context.destroy(LINGER_MS)
        return []

    def _round(self, block: Block, total: Vector) -> None:
        chunks, share = _chunks(block.count), np.float32(1 / block.workers)
        arrived, first = [0] * len(chunks), [np.empty(0, np.float32)] * len(chunks)
        for _ in range(block.workers * len(chunks)):
            index, values = _receive(self._inbox)
            target = total[chunks[index]]
            arrived[index] += 1
            if arrived[index] == 1:
                first[index] = values
            else:
                np.add(first[index] if arrived[index] == 2 else target, values, out=target)
            if arrived[index] == block.workers:
                np.multiply(target, share, out=target)
                _send(self._outbox, index, target)


class Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def offer(self, block: Block) -> dict[str, Any]:
        raise NotImplementedError

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        context = zmq.Context()
        outbox, inbox = _socket(context, zmq.PUSH), _socket(context, zmq.SUB)
        inbox.subscribe(b"")
        inbox.connect(offer["subscribe"])
        outbox.connect(offer["push"])
        chunks, mean = _chunks(block.count), np.zeros(block.count, np.float32)

        def exchange(gradient: Vector) -> Vector:
            for index, chunk in enumerate(chunks):
                _send(outbox, index, gradient[chunk])
            for _ in chunks:
                index, values = _receive(inbox)
                mean[chunks[index]] = values
            return mean

        ends = timed_rounds(block, self._rank, exchange)
        context.destroy(0)  # all that was sent has been answered
        return [ends]


def member(path: str, rank: int) -> Member:
    return Hub(path) if rank == HUB else Worker(rank)

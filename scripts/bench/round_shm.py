"""The floor of one host: vectors in shared memory, and ZeroMQ for the notices only.

A worker copies its gradient in, the hub adds on one core straight from there, and the mean is used where it lies.
"""

import mmap
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from bench.member import HUB, Member
from bench.payload import Block, Vector, timed_rounds
from bench.round_zmq import bound

SLICE = 1 << 16  # elements that are added at a time, so that the sum stays in the cache
LINGER_MS = 5000


def _shared(path: str, block: Block) -> list[Vector]:
    """The gradient of each worker, then the mean, twice: the last one may be in use while the next is made."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return np.split(np.frombuffer(memory, np.float32), block.workers + 2)


class Hub:
    def __init__(self) -> None:
        self._numbers = count()

    def offer(self, block: Block) -> dict[str, Any]:
        self._context = zmq.Context()
        self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.XPUB)
        self._outbox.set(zmq.XPUB_VERBOSE, 1)
        for each in (self._inbox, self._outbox):
            each.bind(f"ipc://{block.folder}/{next(self._numbers)}")
        self._path = Path(block.folder, str(next(self._numbers)))
        with self._path.open("wb") as file:
            file.truncate((block.workers + 2) * block.count * 4)
        addresses = {"push": bound(self._inbox), "subscribe": bound(self._outbox)}
        return {"memory": str(self._path), **addresses}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        for _ in range(block.workers):
            self._outbox.recv()  # a subscription each, which comes after the memory is mapped
        *gradients, even, odd = _shared(offer["memory"], block)
        self._path.unlink()
        for number in range(block.rounds):
            for _ in range(block.workers):
                self._inbox.recv()
            _mean(gradients, odd if number & 1 else even)
            self._outbox.send(b"done")
        self._context.destroy(LINGER_MS)
        return []


def _mean(gradients: list[Vector], out: Vector) -> None:
    share = np.float32(1 / len(gradients))
    for start in range(0, out.size, SLICE):
        part = slice(start, start + SLICE)
        target = out[part]
        np.add(gradients[0][part], gradients[1][part], out=target)
        for gradient in gradients[2:]:
            np.add(target, gradient[part], out=target)
        np.multiply(target, share, out=target)


class Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def offer(self, block: Block) -> dict[str, Any]:
        raise NotImplementedError

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        vectors = _shared(offer["memory"], block)
        mine, means, rounds = vectors[self._rank], vectors[-2:], count()
        context = zmq.Context()
        outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.SUB)
        inbox.subscribe(b"")
        inbox.connect(offer["subscribe"])
        outbox.connect(offer["push"])

        def exchange(gradient: Vector) -> Vector:
            np.copyto(mine, gradient)
            outbox.send(b"here")
            inbox.recv()
            return means[next(rounds) & 1]

        ends = timed_rounds(block, self._rank, exchange)
        context.destroy(0)  # all that was sent has been answered
        return [ends]


def member(path: str, rank: int) -> Member:
    return Hub() if rank == HUB else Worker(rank)

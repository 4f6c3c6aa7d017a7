"""A round of Gradbus: the real loops of the PS and of the workers, each in a process of its own, with a toy model.

The gradient is there already, so that a round is the bus and the update, plain gradient descent by optax. A round is
over for a worker when its computing thread is handed the new weights.
"""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.member import HUB, Member
from bench.payload import Block, Check, Vector, gradients
from bus.layout import Bytes, Layout, gradient_layout
from bus.messages import Hello, Leaf, Welcome
from bus.settings import BusSettings
from bus.sockets import ServerSockets, WorkerSockets
from ps import optimizers
from ps.history import History
from ps.machine import Machine as ServerMachine
from ps.machine import Rules
from ps.server import Offer, Server
from ps.stretches import in_stretches
from ps.update import Updater
from worker.client import Client
from worker.executor import Gradients, ShardSum, ThreadExecutor
from worker.machine import Exit
from worker.machine import Machine as WorkerMachine

RATE = 1 / 64  # a power of two: the check multiplies exactly
SWITCH_INTERVAL_S = 0.0002  # as a worker's process has it

# The settings of the bus for each path that there is; the rest follows from them.
PATHS: dict[str, Callable[[], BusSettings]] = {
    "shm": lambda: BusSettings(),
    "tcp": lambda: BusSettings(shared_memory=False),
}


def leaves(block: Block) -> tuple[Leaf, ...]:
    return (Leaf("params['w']", "float32", (block.count,), "trainable"),)


class Silence:
    """A recorder that records nothing, and a saver that saves nothing: neither is part of a round."""

    def ignore(self, *_: object) -> None: ...

    step = refused = member = note = submit = ignore

    def poll(self) -> list[object]:
        return []

    def close(self, timeout_s: float) -> bool:
        return True


class ParameterServer:
    def __init__(self, path: str) -> None:
        self._settings = PATHS[path]()
        self._sockets: ServerSockets | None = None

    def offer(self, block: Block) -> dict[str, Any]:
        layout = gradient_layout(leaves(block), self._settings.bucket_bytes)
        largest = max(bucket.size_bytes for bucket in layout.buckets)
        self._sockets = ServerSockets(self._settings, bucket_bytes=largest, buckets=len(layout.buckets))
        return {"address": self._sockets.control}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        assert self._sockets is not None
        with self._sockets as sockets:
            outcome = self._server(block, sockets).run()
        if outcome.status != "done":
            raise RuntimeError(outcome.reason)
        return []

    def _server(self, block: Block, sockets: ServerSockets) -> Server:
        silence: Any = Silence()
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
        weights = {"w": np.zeros(block.count, np.float32)}
        updater = in_stretches(Updater(weights, None, optimizers.build({"name": "sgd", "learning_rate": RATE}), None))
        updater.compile()
        return Server(
            machine=ServerMachine(self._rules(block), session=secrets.randbits(64), version=0, now=time.monotonic()),
            transport=sockets,
            updater=updater,
            bucket_bytes=self._settings.bucket_bytes,
            offer=Offer("{}", sockets.gradients, sockets.weights),
            history=History(silence, None, 0.9),
            recorder=silence,
            saver=silence,
            meta={},
        )

    def _rules(self, block: Block) -> Rules:
        """One shard for each worker, whatever its measured speed: gradients that are there already take no time."""
        return Rules(
            steps=block.rounds, shards=block.workers, min_workers=block.workers, balance=False, max_wait_s=30.0,
            buckets=len(gradient_layout(leaves(block), self._settings.bucket_bytes).buckets),
            heartbeat_s=self._settings.heartbeat_s, heartbeat_timeout_s=self._settings.heartbeat_timeout_s,
            nonfinite="stop", nonfinite_limit=1, save_every=0, evaluate_every=0, evaluate=False,
        )  # fmt: skip


@dataclass
class Given:
    """The gradients of a worker: two vectors that were there before. Notes when weights arrive, and checks them."""

    block: Block
    layout: Layout
    mine: tuple[Vector, Vector]
    check: Check
    ends: list[float]
    device = "memory"

    def load(self, buffer: Bytes) -> None:
        self.ends.append(time.monotonic())
        version = len(self.ends) - 1
        odd = version // 2
        compare = self.check.whole if len(self.ends) == self.block.rounds else self.check.few
        compare(self.layout.views(buffer)[0], -RATE * (version - odd), -RATE * odd)

    def shard(self, version: int, shard: int, into: Bytes | None = None) -> ShardSum:
        """Into memory that is shared it is copied, once, as a real gradient is from where JAX leaves it."""
        gradient = self.mine[version & 1].view(np.uint8)
        if into is not None:
            into[...] = gradient
        return ShardSum(gradient if into is None else into, 1, {"loss": 0.0})

    def prefetch(self, version: int, shards: list[int]) -> None: ...


class Worker:
    """One computing thread serves all blocks, because a ThreadExecutor's never ends."""

    def __init__(self, path: str, rank: int) -> None:
        self._settings, self._rank = PATHS[path](), rank
        self._client: Client | None = None
        self._given: Given | None = None
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._executor = ThreadExecutor(self._build, self._post, repr)

    def _build(self, welcome: Welcome) -> Gradients:
        assert self._given is not None
        return self._given

    def _post(self, *event: Any) -> None:
        if self._client is not None:
            self._client.post(*event)

    def offer(self, block: Block) -> dict[str, Any]:
        raise NotImplementedError

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        layout = gradient_layout(leaves(block), self._settings.bucket_bytes)
        mine = gradients(self._rank, layout.size_bytes // 4)  # with the padding at the end, which nobody looks at
        self._given = given = Given(block, layout, mine, Check(block.workers, block.count), [])
        sockets = WorkerSockets(offer["address"], self._settings)
        try:
            outcome = self._serve(offer["address"], sockets)
        finally:
            sockets.close(linger=False)
            given.mine = (np.empty(0, np.float32),) * 2  # the executor keeps the rest until the next block
        if outcome.exit_code or len(given.ends) != block.rounds:
            raise RuntimeError(f"{len(given.ends)} of {block.rounds} versions seen; {outcome.reason}")
        return [given.ends]

    def _serve(self, address: str, sockets: WorkerSockets) -> Exit:
        hello = Hello(f"w{self._rank}", socket.gethostname(), os.getpid(), secrets.randbits(63), {})
        machine = WorkerMachine(hello, address=address, connect_timeout_s=30.0, now=time.monotonic())
        self._client = Client(machine, sockets, note=_complain, wake=sockets.waker.wake)
        self._client.attach(self._executor)
        try:
            return self._client.run()
        finally:
            self._client = None


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def member(path: str, rank: int) -> Member:
    return ParameterServer(path) if rank == HUB else Worker(path, rank)

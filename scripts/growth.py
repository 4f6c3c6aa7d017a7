"""How the time and the memory of the PS grow with workers and with parameters: `make growth`.

    python scripts/growth.py [--workers 1,4,16,64] [--parameters 1e3,1e6,1e8] [--optimizer adam] [--json FILE]

The real loop of the PS, fed by contributors that are simulated in the same process: they join, and answer each version
at once, with headers that have to be decoded and gradients that lie in memory the PS has lent them. So a step is what
the PS does, and nothing else. Each point is a process of its own. Memory: the most that was resident, less what was
there before the model; of the gradients of all workers, which the PS lends, too.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.round_gradbus import Silence
from bus import codec
from bus.layout import Bytes, gradient_layout, zeros
from bus.messages import Contribution, Hello, Leave, Message, Ready, Stop, Subscribed, Weights, Welcome
from bus.settings import BusSettings
from bus.transport import Arrival
from ps import optimizers
from ps.history import History
from ps.machine import Machine, Rules
from ps.server import Offer, Server
from ps.stretches import StretchUpdater, in_stretches
from ps.update import Updater

STEPS, WARM_UP = 24, 4
WORKERS, PARAMETERS = [1, 2, 4, 8, 16, 32, 64], [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
AT_PARAMETERS, AT_WORKERS = 1_000_000, 4
BUCKET_BYTES = BusSettings().bucket_bytes
ONE_THREAD = {"NPROC": "1", "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}


def main() -> int:
    def numbers(text: str) -> list[float]:
        return [float(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=numbers, default=WORKERS, metavar="N,...", help="with 1e6 parameters")
    parser.add_argument("--parameters", type=numbers, default=PARAMETERS, metavar="N,...", help="with 4 workers")
    parser.add_argument("--optimizer", default="sgd", metavar="NAME", help="of optax (default: sgd)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every step")
    parser.add_argument("--point", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(*options.point, options.optimizer)))
        return 0
    points = [(int(workers), AT_PARAMETERS) for workers in options.workers]
    points += [(AT_WORKERS, int(parameters)) for parameters in options.parameters]
    found = []
    print(f"{'workers':>8} {'parameters':>12} {'ms a step':>10} {'quartiles':>18} {'GB/s':>6} {'memory / model':>15}")
    for point in points:
        found.append(in_a_process(*point, options.optimizer))
        print(row(found[-1]), flush=True)
    print(
        f"a copy of 100 MB: {copy_gb_s():.1f} GB/s, read and written; optimizer {options.optimizer}, {found[0]['how']}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def row(found: dict[str, Any]) -> str:
    """A line of the table. GB/s: of all gradients, the old version and the new one, once each."""
    first, median, third = statistics.quantiles(found["steps_s"], n=4)
    model_bytes = 4 * found["parameters"]
    touched = model_bytes * (found["workers"] + 2)
    return (
        f"{found['workers']:>8} {found['parameters']:>12,} {1e3 * median:>10.3f} {1e3 * first:>8.3f} to "
        f"{1e3 * third:<6.3f} {touched / median / 1e9:>6.1f} {found['peak_bytes'] / model_bytes:>15.1f}"
    )


def in_a_process(workers: int, parameters: int, optimizer: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", str(workers), str(parameters), "--optimizer", optimizer]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{workers} workers, {parameters} parameters: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(workers: int, parameters: int, optimizer: str) -> dict[str, Any]:
    """One point, in this process."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    made(8, optimizer)  # what is there whatever the size
    before = peak_bytes()
    updater = made(parameters, optimizer)
    crowd = Crowd(workers, updater)
    server = Server(
        machine=Machine(crowd.rules(), session=1, version=0, now=time.monotonic()),
        transport=crowd,
        updater=updater,
        bucket_bytes=BUCKET_BYTES,
        offer=Offer("", "", ""),
        history=History(crowd.silence, None, 0.9),
        recorder=crowd.silence,
        saver=crowd.silence,
        meta={},
    )
    while server.outcome is None:
        server.turn(0.0)
    if server.outcome.status != "done":
        raise RuntimeError(server.outcome.reason)
    return {
        "workers": workers, "parameters": parameters, "how": updater.how, "steps_s": crowd.steps_s[WARM_UP:],
        "peak_bytes": peak_bytes() - before,
    }  # fmt: skip


def made(parameters: int, optimizer: str) -> StretchUpdater | Updater:
    transform = optimizers.build({"name": optimizer, "learning_rate": 1e-3})
    updater = in_stretches(Updater({"w": np.zeros(parameters, np.float32)}, None, transform, None))
    updater.compile()
    gc.collect()
    return updater


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def copy_gb_s() -> float:
    source, target = np.ones(25_000_000, np.float32), np.zeros(25_000_000, np.float32)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target[...] = source
        times.append(time.perf_counter() - began)
    return 2 * source.nbytes / statistics.median(times) / 1e9


class Crowd:
    """A ServerTransport whose other end are ``workers`` that answer each version at once, one shard each."""

    def __init__(self, workers: int, updater: StretchUpdater | Updater) -> None:
        self.steps_s: list[float] = []
        self.silence: Any = Silence()
        self._workers, self._layout = workers, gradient_layout(updater.leaves, BUCKET_BYTES)
        self._lent: dict[int, Bytes] = {}
        self._inbox: deque[tuple[bytes, list[memoryview] | Subscribed, Bytes | None]] = deque()
        self._opened_at = self._answering_s = 0.0
        for number in range(workers):
            self._say(b"%d" % number, Hello(f"w{number}", "here", number + 1, number + 1, {}))

    def rules(self) -> Rules:
        return Rules(
            steps=STEPS, shards=self._workers, buckets=len(self._layout.buckets), min_workers=self._workers,
            max_wait_s=60.0, heartbeat_s=1.0, heartbeat_timeout_s=300.0, nonfinite="stop", nonfinite_limit=1,
            save_every=0, evaluate_every=0, evaluate=False, balance=False,
        )  # fmt: skip

    def receive(self, timeout_s: float) -> Arrival | None:
        if not self._inbox:
            return None
        peer, frames, payload = self._inbox.popleft()
        if isinstance(frames, Subscribed):
            return Arrival(b"", frames)
        message, _ = codec.decode(frames if payload is None else [*frames, memoryview(b"")])
        return Arrival(peer, message, payload, stays=payload is not None)

    def send(self, peer: bytes, message: Message, payload: Any = None) -> None:
        match message:
            case Welcome():
                self._inbox.append((b"", Subscribed(message.member), None))
                self._say(peer, Ready(message.session, message.member, "cpu"))
            case Stop():
                self._say(peer, Leave(message.session, int(peer) + 1))

    def publish(self, message: Message, payload: Any = None) -> None:
        """The last bucket of a version ends a step, and is answered by everyone."""
        if not isinstance(message, Weights) or message.bucket + 1 < len(self._layout.buckets):
            return
        now = time.perf_counter()
        if self._opened_at:
            self.steps_s.append(now - self._opened_at)
        for bucket in range(len(self._layout.buckets)):
            for shard, (member, memory) in enumerate(self._lent.items()):
                head = Contribution(
                    message.session, member, message.version, bucket, shard, shard + 1, 1, {"loss": 1.0}
                )
                self._say(b"", head, self._layout.bucket(memory, bucket))
        self._opened_at = time.perf_counter()  # what the crowd does is no part of a step

    def share(self, size_bytes: int) -> Bytes:
        return zeros(size_bytes)

    def lend(self, member: int, size_bytes: int) -> None:
        """One gradient each, and not again: the crowd writes nothing new."""
        memory = self._lent[member] = zeros(self._layout.size_bytes)
        memory.view(np.float32)[...] = member

    def reclaim(self, member: int) -> None: ...

    def describe(self, member: int) -> tuple[None, None]:
        return None, None

    def _say(self, peer: bytes, message: Message, payload: Bytes | None = None) -> None:
        self._inbox.append((peer, [memoryview(frame) for frame in codec.encode(message)], payload))


if __name__ == "__main__":
    sys.exit(main())

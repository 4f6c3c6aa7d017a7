"""Whole steps of the shipped experiments: how much of one is the bus, and what a second worker adds: `make steps`.

    python scripts/steps.py [--experiments digits,fashion,cifar10] [--trials 3] [--seconds 10] [key=value ...]

Side by side, trial by trial: two processes that compute shards and know nothing of each other, one worker, two workers.
The bus's share: from the last gradient being ready to the next computation, the update in between, of the whole step,
as the workers measured it. Scaling: examples/s of two workers to those of the two unconnected processes together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gradbus.records import RunFolder, read_rows
from gradbus.settings import Settings, SettingsError, load
from gradbus.workloads.base import DataError

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
QUIET = ["eval.enabled=false", "checkpoint.every=0", "train.steps=1000000"]
PROBED_STEPS = 3
WARM_UP = 0.3  # of the versions of a run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experiments", default="digits,fashion,cifar10", metavar="NAME,...")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every trial")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if options.alone:
        try:
            print(alone(load(_config(options.alone), options.overrides), options.seconds), flush=True)
        except (SettingsError, DataError) as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    every = {}
    for name in options.experiments.split(","):
        trials = [trial(name, options) for _ in range(options.trials)]
        every[name] = trials
        middle = {key: statistics.median(trial[key] for trial in trials) for key in trials[0]}
        spread = {key: max(t[key] for t in trials) / min(t[key] for t in trials) - 1 for key in trials[0]}
        print(
            f"{name}: unconnected {middle['unconnected']:,.0f} examples/s, 1 worker {middle['one']:,.0f}, 2 workers "
            f"{middle['two']:,.0f} (up to {max(spread['unconnected'], spread['one'], spread['two']):.0%} apart); step "
            f"{1e3 * middle['step_s']:.2f} ms, of it bus and update {middle['bus_share']:.2%}; scaling from 1 to 2 "
            f"{middle['two'] / middle['one']:.2f}; to the unconnected "
            f"{statistics.median(t['two'] / t['unconnected'] for t in trials):.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(every, indent=1) + "\n")
    return 0


def trial(name: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--alone", name, "--seconds", str(options.seconds), *options.overrides]
    environment = {**os.environ, "NPROC": "1", "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    spoken = [process.communicate(timeout=600)[0] for process in both]
    if any(process.returncode for process in both):
        raise SystemExit(f"{name} cannot be measured")  # it has said why
    unconnected = sum(map(float, spoken))
    one, two = (cluster(name, workers, options) for workers in (1, 2))
    return {
        "unconnected": unconnected, "one": one["examples_per_second"], "two": two["examples_per_second"],
        "step_s": two["step_s"], "bus_share": two["bus_share"],
    }  # fmt: skip


def alone(settings: Settings, seconds: float) -> float:
    """Examples/s of shards that are computed one after the other, as a worker does it."""
    import jax
    import numpy as np

    from bus.layout import gradient_layout, weights_layout
    from gradbus.build import initial, workload_and_data
    from gradbus.workloads.base import is_stateful
    from ps.update import leaves_of
    from worker.batches import Batches
    from worker.compute import ShardGradients

    workload, train = workload_and_data(settings.workload, settings.data.dir)
    params, state = initial(workload, settings.seed)
    leaves = leaves_of(params, state)
    samples, shards = int(jax.tree.leaves(train)[0].shape[0]), settings.train.shards
    gradients = ShardGradients(
        workload, init_state=workload.init_state if is_stateful(workload) else None, leaves=leaves,
        bucket_bytes=settings.bus.bucket_bytes, train=train,
        batches=Batches(settings.seed, samples, settings.train.batch_size, shards), seed=settings.seed,
    )  # fmt: skip
    gradients.compile()
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
    gradients.load(weights_layout(leaves, settings.bus.bucket_bytes).pack(arrays))
    into = gradient_layout(leaves, settings.bus.bucket_bytes).empty()
    times: list[float] = []
    began = time.monotonic()
    while (now := time.monotonic()) - began < seconds or len(times) < PROBED_STEPS:
        gradients.shard(len(times), len(times) % shards, into)
        times.append(time.monotonic() - now)
    return settings.train.batch_size / shards / statistics.median(times[int(WARM_UP * len(times)) :])


def cluster(name: str, workers: int, options: argparse.Namespace) -> dict[str, float]:
    """A run of so many workers, from its ledger."""
    with tempfile.TemporaryDirectory(prefix="gradbus-steps-") as folder:
        counted = [f"run.dir={folder}", f"cluster.min_workers={workers}"]
        config = [str(path)] if (path := _config(name)) else []
        command = [sys.executable, "-m", "gradbus", "cluster", *config, *QUIET, *counted, *options.overrides]
        launcher = subprocess.Popen([*command, "-n", str(workers)], stdout=subprocess.DEVNULL)
        try:
            run = RunFolder(Path(folder) / "latest")
            while launcher.poll() is None and not _updates(run):
                time.sleep(0.2)  # a look now and then: nobody waits for this
            time.sleep(options.seconds)
        finally:
            launcher.terminate()
            launcher.wait(60)
        rows = _updates(run)
    rows = rows[int(WARM_UP * len(rows)) :]
    step_s = statistics.median(row["seconds"] for row in rows)
    return {
        "examples_per_second": rows[0]["examples"] / step_s,
        "step_s": step_s,
        "bus_share": statistics.median(row["bus_seconds"] for row in rows if row["bus_seconds"] is not None) / step_s,
    }


def _updates(run: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.ledger) if row.get("kind") == "update"]


def _config(name: str) -> Path | None:
    """`digits` is what the defaults are."""
    return None if name == "digits" else EXPERIMENTS / f"{name}.yaml"


if __name__ == "__main__":
    sys.exit(main())

"""A long run in which something is killed every few seconds: does the memory of PS and launcher grow? `make soak`.

    python scripts/soak.py [key=value ...] [--minutes 60] [--every 15] [--seed 0]

Workers and the evaluator are killed, so that the PS has one long life. Tells resident memory and open files of PS and
launcher, after a first minute and in the end, and whether the run ever stood still.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from runs import Run, left_behind

SLEEPY = [f"workload={Path(__file__).parent / 'sleepy.py'}:Sleepy", "train.shards=4", "train.batch_size=64"]
WARM_UP_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradbus-soak-"))
    endless = ["train.steps=100000000", "cluster.workers=3", "cluster.restarts=1000000"]
    run = Run(folder, [*SLEEPY, *endless, *options.arguments])
    try:
        soak(run, options)
    finally:
        run.launcher.terminate()
        run.launcher.wait(60)
    print("left behind:", left_behind(folder) or "nothing")
    return 0


def soak(run: Run, options: argparse.Namespace) -> None:
    chance, began, seen, stood_still = random.Random(options.seed), time.monotonic(), -1, 0
    samples: list[dict[str, tuple[float, int]]] = []
    kills = 0
    while (passed_s := time.monotonic() - began) < 60 * options.minutes and run.going_on():
        time.sleep(options.every)
        here = run.processes()
        stood_still += run.version() == seen
        seen = run.version()
        if passed_s > WARM_UP_S and "ps" in here:
            samples.append({"ps": _use(here["ps"]), "launcher": _use(psutil.Process(run.launcher.pid))})
        others = sorted(name for name in here if name != "ps")
        if others:
            here[chance.choice(others)].kill()
            kills += 1
    print(f"{passed_s / 60:.0f} minutes, {kills} kills, version {seen}, stood still {stood_still} times")
    for name in ("ps", "launcher"):
        few = max(1, min(5, len(samples) // 2))
        ends = samples[:few], samples[-few:]
        memory = [statistics.median(sample[name][0] for sample in end) for end in ends]
        files = [statistics.median(sample[name][1] for sample in end) for end in ends]
        print(
            f"{name}: {memory[0]:.1f} MB at first, {memory[1]:.1f} MB in the end; {files[0]} and {files[1]} open files"
        )


def _use(process: psutil.Process) -> tuple[float, int]:
    """Resident memory in MB, and open files."""
    return process.memory_info().rss / 1e6, process.num_fds()


if __name__ == "__main__":
    sys.exit(main())

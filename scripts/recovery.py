"""How long a run takes to get over what happens to its processes: `make recovery`.

    python scripts/recovery.py [--trials 10] [--only worker ps launcher stop late-join slow] [--json FILE]

Real processes, medians of the trials with the least and the most. Digits with 3 workers for what is killed or stopped;
scripts/sleepy.py, whose steps take sleep and not cores, for what is about speed.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from runs import Run, left_behind

from bus.settings import BusSettings

LIMIT_S = 120.0  # of one wait
ENDLESS = ["train.steps=1000000", "cluster.workers=3", "cluster.restarts=1000"]
SLEEPY = [f"workload={Path(__file__).parent / 'sleepy.py'}:Sleepy", "train.shards=64", "train.batch_size=64"]
Rows = list[dict[str, Any]]


def main() -> int:
    measures: dict[str, Callable[[int], Rows]] = {
        "worker": killed_worker, "ps": killed_ps, "launcher": killed_launcher, "stop": stopped,
        "late-join": late_join, "slow": slow_worker,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(measures), default=list(measures))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: Rows = []
    for name in options.only:
        for row in measures[name](options.trials):
            rows.append({"measure": name, **row})
            print(
                "  ".join(f"{key}: {_shown(value)}" for key, value in rows[-1].items() if key != "values"), flush=True
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


@contextmanager
def running(*arguments: str) -> Iterator[Run]:
    """A cluster that is making versions; killed in the end, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="gradbus-recovery-"))
    run = Run(folder, list(arguments))
    try:
        wait(lambda: run.version() > 10, run)
        yield run
    finally:
        run.launcher.kill()
        run.launcher.wait()
        wait(lambda: not left_behind(folder))


def wait(look: Callable[[], Any], run: Run | None = None, limit_s: float = LIMIT_S) -> Any:
    """The first true answer of ``look``."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline or (run and not run.going_on()):
            raise SystemExit(f"no answer within {limit_s:g} s" + (f"; see {run.folder}" if run else ""))
        time.sleep(0.002)
    return found


def spread(what: str, values: list[float], **more: Any) -> dict[str, Any]:
    return {
        "what": what, "median_s": statistics.median(values), "min_s": min(values), "max_s": max(values),
        "trials": len(values), **more, "values": values,
    }  # fmt: skip


def updates(run: Run) -> Rows:
    text = (run.latest / "ledger.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if '"kind":"update"' in line and "\n" in line]


def complete(run: Run, members: int = 3) -> bool:
    """Whether the newest version was made by so many."""
    rows = updates(run)[-1:]
    return bool(rows) and len({member for *_, member in rows[0]["shards"]}) == members


def killed_worker(trials: int) -> Rows:
    """The longest step from the kill until the worker is back: the one that it left open is among them."""
    chance, values = random.Random(0), []
    with running(*ENDLESS) as run:
        for _ in range(trials):
            wait(lambda: complete(run), run)
            time.sleep(chance.uniform(0.0, 0.5))  # any moment of a step
            before = run.version()
            kill(run, chance.choice(["w0", "w1", "w2"]))
            wait(lambda before=before: run.version() > before + 20 and complete(run), run)
            values.append(max(row["seconds"] for row in updates(run) if row["version"] > before))
        usual_s = statistics.median(row["seconds"] for row in updates(run))
    promised_s = BusSettings().heartbeat_timeout_s + usual_s
    return [spread("SIGKILL of a worker to the next version", values, promised_s=promised_s)]


def killed_ps(trials: int) -> Rows:
    chance, values, again = random.Random(0), [], []
    with running(*ENDLESS) as run:
        for _ in range(trials):
            start = run.version()
            wait(lambda start=start: run.version() > start + 150, run)
            time.sleep(chance.uniform(0.0, 1.0))
            kill(run, "ps")
            killed_at, before = time.monotonic(), run.version()
            wait(lambda before=before: run.version() > before, run)
            values.append(time.monotonic() - killed_at)
            again.append(before % 100)
    recomputed = f"{statistics.median(again):.0f} versions (median)"
    return [spread("SIGKILL of the PS to the next new version", values, recomputed=recomputed)]


def killed_launcher(trials: int) -> Rows:
    values = []
    for _ in range(trials):
        with running(*ENDLESS) as run:
            run.launcher.kill()
            killed_at = time.monotonic()
            wait(lambda run=run: not left_behind(run.folder))
            values.append(time.monotonic() - killed_at)
    return [spread("SIGKILL of the launcher to no process left", values)]


def stopped(trials: int) -> Rows:
    """From SIGSTOP to the line on the console that names the process."""
    found = []
    with running(*ENDLESS) as run:
        console = run.folder / "console.txt"
        for name in ("w1", "ps", "evaluator"):
            values = []
            for _ in range(trials):
                process = run.processes()[name]
                known = len(console.read_text())
                process.send_signal(signal.SIGSTOP)
                stopped_at = time.monotonic()
                wait(
                    lambda known=known, pid=process.pid: f"(pid {pid}) was stopped" in console.read_text()[known:], run
                )
                values.append(time.monotonic() - stopped_at)
                process.send_signal(signal.SIGCONT)
                before = run.version()
                wait(lambda before=before: run.version() > before + 5, run)
            found.append(spread(f"SIGSTOP of {name} to the line that names it", values))
    return found


def late_join(trials: int) -> Rows:
    """Steps of the others while one more prepares for 20 s, against the median step."""
    values, medians = [], []
    for _ in range(min(trials, 3)):
        with running(
            *SLEEPY, "train.steps=1000000", "cluster.workers=3", 'faults=["worker 2: prepares 20 s longer"]'
        ) as run:
            wait(lambda run=run: complete(run), run)
            seconds = [row["seconds"] for row in updates(run)][10:]
            medians.append(statistics.median(seconds))
            values.append(max(seconds))
    ratio = max(most / median for most, median in zip(values, medians, strict=True))
    return [spread("longest step while a worker prepares for 20 s", values, usual_s=medians[0], worst_ratio=ratio)]


def slow_worker(trials: int) -> Rows:
    """4 workers of which one takes 5 times as long, against the sum of the speeds of each alone."""
    slow = 'faults=["worker {}: 5 times slower at version 0"]'
    fast_alone = speed("cluster.workers=1")
    slow_alone = speed("cluster.workers=1", slow.format(0))
    wanted = 3 * fast_alone + slow_alone
    rows = []
    for balance in ("true", "false"):
        found = speed("cluster.workers=4", "cluster.min_workers=4", slow.format(3), f"cluster.balance={balance}")
        rows.append({
            "what": f"4 workers, one 5 times slower, balance {balance}", "examples_per_second": found,
            "sum_of_single_speeds": wanted, "ratio": found / wanted,
        })  # fmt: skip
    return rows


def speed(*arguments: str) -> float:
    """Examples per second once everyone has found their pace."""
    with running(*SLEEPY, "train.steps=1000000", *arguments) as run:
        wait(lambda: run.version() > 30, run, 300.0)
        seconds = [row["seconds"] for row in updates(run)[15:30]]
    return 64 / statistics.fmean(seconds)


def kill(run: Run, name: str) -> psutil.Process:
    process: psutil.Process = wait(lambda: run.processes().get(name), run)
    process.kill()
    return process


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

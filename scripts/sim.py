"""Many seeded simulations of a whole cluster with kills, freezes, leaves and a network that misbehaves: `make sim`.

    python scripts/sim.py [--schedules 10000] [--first 0] [--jobs 2] [--replay SEED]

Each schedule must end with the bits of the plain loop, every version made once and every shard counted once. A schedule
that does not is told with its seed and its last events, and repeats with --replay.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

SIM = Path(__file__).parents[1] / "tests" / "sim"
sys.path.insert(0, str(SIM))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=10_000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes to share the work")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one schedule, with its story")
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay)
    if options.jobs > 1:
        return shared(options)
    return many(range(options.first, options.first + options.schedules))


def many(seeds: range) -> int:
    """Run the schedules of ``seeds`` one after the other; 1 if any went wrong."""
    from schedules import rough, run

    began, wrong, faults, sessions = time.monotonic(), 0, 0, 0
    for seed in seeds:
        schedule = rough(seed)
        faults += len(schedule.faults)
        try:
            sessions += run(schedule).sessions
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{len(seeds)} schedules, {faults} faults, {sessions} lives of the PS, {wrong} divergences; "
        f"{len(seeds) / minutes:.0f} schedules a minute",
        flush=True,
    )
    return int(wrong > 0)


def shared(options: argparse.Namespace) -> int:
    """The same over several processes; the worst of their exit codes."""
    share, extra = divmod(options.schedules, options.jobs)
    first, children = options.first, []
    for job in range(options.jobs):
        count = share + (job < extra)
        command = [sys.executable, __file__, "--jobs=1", f"--first={first}", f"--schedules={count}"]
        children.append(subprocess.Popen(command))
        first += count
    worst = max(child.wait() for child in children)
    verdict = "some schedules diverged, see above" if worst else "every one ended with the bits of the plain loop"
    print(f"{options.schedules} schedules in all: {verdict}")
    return worst


def replay(seed: int) -> int:
    from schedules import rough, run

    schedule = rough(seed)
    print(schedule)
    try:
        cluster = run(schedule)
    except AssertionError as error:
        print(error)
        return 1
    print(cluster.story())
    print(
        f"the bits are right, after {cluster.network.now:.2f} s of virtual time and {cluster.sessions} lives of the PS"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

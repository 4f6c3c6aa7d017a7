"""Options, and the order of things.

For each number of workers all contenders are started, and then stay. A trial is one block of rounds of each contender
in turn, payload by payload, so that whatever else the machine does meets all of them. What a round took says how many
fit into the next block; at first, a few are done to know. No trial is begun that would end after the limit.
"""

import argparse
import contextlib
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.contenders import CONTENDERS, Contender
from bench.link import LinkError
from bench.payload import SIZES_BYTES
from bench.plot import plot
from bench.profiling import profile
from bench.report import Results, rounds_of
from bench.team import Team

BLOCK_S = 0.35  # the rounds of a block, by estimate
FEWEST, MOST = 3, 400  # rounds of a block
PROBE_ROUNDS, LARGE_BYTES = 5, 10_000_000  # of a large payload one round is enough to know


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that everything is ended
    chosen = {name: CONTENDERS[name] for name in options.contenders}
    if options.profile:
        try:
            profile(options.profile, chosen, options.workers, options.sizes)
        except LinkError as error:
            _say(f"failed: {error}")
            return 1
        return 0
    results = Results(options.sizes, {name: contender.what for name, contender in chosen.items()})
    began = time.monotonic()
    for place, workers in enumerate(options.workers):
        left_s = options.limit - (time.monotonic() - began)
        share_s = left_s * workers / sum(options.workers[place:])  # rounds take longer with more workers
        _measure(options, chosen, workers, share_s, results)
    results.seconds = time.monotonic() - began
    print(results.markdown())
    if options.plot:
        plot(results, options.plot)
    if options.json:
        options.json.write_text(json.dumps(results.json(), indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    def some(known: list[str]) -> Callable[[str], list[str]]:
        def choose(text: str) -> list[str]:
            for name in text.split(","):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"found {name!r}, expected some of {','.join(known)}")
            return text.split(",")

        return choose

    def numbers(text: str) -> list[int]:
        found = [int(number) for number in text.split(",")]
        if min(found) < 2:
            raise argparse.ArgumentTypeError("expected at least 2 workers")
        return found

    parser = argparse.ArgumentParser(prog="bench.py", description="The measure of a synchronous round.")
    add = parser.add_argument
    add("--workers", type=numbers, default=[2, 4, 8], metavar="N,...", help="default: 2,4,8")
    add("--sizes", type=some(list(SIZES_BYTES)), default=list(SIZES_BYTES), metavar="S,...", help=",".join(SIZES_BYTES))
    add("--contenders", type=some(list(CONTENDERS)), default=list(CONTENDERS), metavar="C,...",
        help=",".join(CONTENDERS))  # fmt: skip
    add("--rounds", default="auto", metavar="N", help="of a block; default: what fits into its time")
    add("--trials", type=int, default=5, metavar="N", help="at most; fewer where the limit is met (default: 5)")
    add(
        "--limit",
        type=float,
        default=480,
        metavar="SECONDS",
        help="for all but what has begun (default: 480)",
    )
    add("--json", type=Path, metavar="FILE", help="every round, and the statistics")
    add("--plot", type=Path, metavar="FILE", help="a picture of the table; needs matplotlib")
    add("--profile", type=Path, metavar="FOLDER", help="profile the hub and a worker instead; stacks go to FOLDER")
    return parser.parse_args()


class Field:
    """The contenders that are running, with ``workers`` workers each. Who fails is out, and the table says why."""

    def __init__(self, results: Results, workers: int) -> None:
        self.teams: dict[str, Team] = {}
        self._results, self._workers = results, workers

    def start(self, name: str, contender: Contender, teams: contextlib.ExitStack) -> None:
        lacking = contender.lacks()
        if lacking:
            return self._out(name, f"missing: {lacking}")
        self.teams[name] = teams.enter_context(Team(contender, self._workers))
        try:
            self.teams[name].start()
        except LinkError as error:
            self._out(name, f"failed: {error}")

    def block(self, name: str, size: str, rounds: int, warm_up: int) -> list[float]:
        """How long each of ``rounds`` rounds took; nothing where the contender is out."""
        if name not in self.teams:
            return []
        try:
            return rounds_of(self.teams[name].block(SIZES_BYTES[size], rounds + warm_up), warm_up)
        except LinkError as error:
            self._out(name, f"failed: {error}; {self.teams[name].last_words()}")
            return []

    def _out(self, name: str, why: str) -> None:
        _say(f"{name}: {why}")
        team = self.teams.pop(name, None)
        if team:
            team.end()  # at once: what is left of it may be busy
        for size in self._results.sizes:
            self._results.cell(self._workers, size, name).trouble = why


def _measure(
    options: argparse.Namespace, chosen: dict[str, Contender], workers: int, share_s: float, results: Results
) -> None:
    deadline = time.monotonic() + share_s
    with contextlib.ExitStack() as teams:
        field = Field(results, workers)
        for name, contender in chosen.items():
            field.start(name, contender, teams)
        rounds: dict[tuple[str, str], int] = {}
        trial_s = 0.0
        for trial in range(options.trials):
            began = time.monotonic()
            if trial and began + trial_s > deadline:
                return
            for size in options.sizes:
                if time.monotonic() > deadline:
                    return
                if not trial:
                    probe = 1 if SIZES_BYTES[size] > LARGE_BYTES else PROBE_ROUNDS
                    rounds |= {
                        (size, name): _fitting(options.rounds, field.block(name, size, probe, 1)) for name in chosen
                    }
                for name in chosen:
                    count = rounds[size, name]
                    measured = field.block(name, size, count, 1 + count // 10)
                    if measured:
                        results.cell(workers, size, name).trials.append(measured)
                        rounds[size, name] = _fitting(options.rounds, measured)
            trial_s = time.monotonic() - began
            _say(f"{workers} workers, trial {trial + 1}: {trial_s:.0f} s")


def _fitting(rounds: str, before: list[float]) -> int:
    """How many rounds to do in a block, by what those of the block before took."""
    if rounds != "auto":
        return max(int(rounds), FEWEST)
    return max(FEWEST, min(MOST, int(BLOCK_S / statistics.median(before)))) if before else FEWEST


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""Seeded schedules: who is there, what goes wrong and when, as data. A seed tells the whole story."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cluster import Cluster, reference

from bus.faults import Fault, parse, poisoned
from bus.memory import Chances

ROUGH = Chances(
    delay_s=(0.0001, 0.02), lose_weights=0.05, lose_gradients=0.05, lose_control=0.05, double=0.1, reorder=0.1
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """An experiment, the workers with the times at which they start, and the faults."""

    seed: int
    shards: int
    steps: int
    save_every: int
    nonfinite: Literal["stop", "skip_step", "skip_shard"]
    starts_s: tuple[float, ...]
    faults: tuple[Fault, ...]
    shared: bool  # memory, as on one host

    def cluster(self) -> Cluster:
        """Set up to run, over a network that loses, doubles, delays and reorders."""
        cluster = Cluster(
            self.seed, self.shards, self.steps, ROUGH, self.faults, save_every=self.save_every,
            nonfinite=self.nonfinite, shared=self.shared,
        )  # fmt: skip
        for number, at_s in enumerate(self.starts_s):
            cluster.network.at(at_s, lambda name=f"w{number}": cluster.start_worker(name))
        return cluster


def rough(seed: int) -> Schedule:
    """Up to eight workers and up to ten faults."""
    chance = np.random.default_rng([seed, 2])
    workers, shards, steps = int(chance.integers(1, 9)), int(chance.choice([1, 2, 3, 4, 5, 6, 8, 16])), _steps(chance)
    faults = tuple(parse(_fault(chance, workers, shards, steps)) for _ in range(int(chance.integers(0, 11))))
    skips = any(fault.what == "NaN" for fault in faults)
    return Schedule(
        seed,
        shards,
        steps,
        save_every=int(chance.integers(1, 5)),
        nonfinite=("skip_step", "skip_shard")[int(chance.integers(2))] if skips else "stop",
        starts_s=tuple(float(each) for each in chance.uniform(0, 1, workers)),
        faults=faults,
        shared=bool(seed % 2),
    )


def _steps(chance: np.random.Generator) -> int:
    return int(chance.integers(3, 11))


def _fault(chance: np.random.Generator, workers: int, shards: int, steps: int) -> str:
    """One of any kind, more often of those that end or stop a process."""
    number, version, shard = (int(chance.integers(below)) for below in (workers, steps, shards))
    who = f"worker {number}" if chance.random() < 0.7 else "ps"
    when = f"version {version}" if chance.random() < 0.5 else f"{chance.uniform(0, 3):.3f} s"
    seconds = chance.uniform(0.01, 6)
    kind = str(chance.choice(["weights {} to", "gradient {} from"])).format(version) + f" worker {number}"
    forms: list[tuple[float, Callable[[], str]]] = [
        (4, lambda: f"{who}: SIGKILL at {when}"),
        (2, lambda: f"{who}: SIGSTOP for {seconds:.3f} s at {when}"),
        (2, lambda: f"worker {number}: SIGTERM at {when}"),
        (1, lambda: f"{who}: clock jumps {10 ** chance.uniform(-1, 4):.3f} s at {when}"),
        (1, lambda: f"worker {number}: {chance.uniform(1, 20):.3f} times slower at version 0"),
        (1, lambda: f"worker {number}: prepares {seconds:.3f} s longer"),
        (0.3, lambda: f"NaN in shard {shard} at version {version}"),
        (1, lambda: f"drop {kind}"),
        (1, lambda: f"double {kind}"),
        (1, lambda: f"delay {kind} by {seconds:.3f} s"),
    ]
    weights = np.array([weight for weight, _ in forms])
    return forms[int(chance.choice(len(forms), p=weights / weights.sum()))][1]()


def run(schedule: Schedule) -> Cluster:
    """Run to the end, and hold everything against what must be true of it. An AssertionError tells the story."""
    cluster = schedule.cluster()
    try:
        found = cluster.run()
        expected = reference(
            schedule.steps, schedule.shards, bad=poisoned(schedule.faults), nonfinite=schedule.nonfinite
        )
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)), "other bits"
        final: dict[int, object] = {}
        for record in cluster.witness.steps:
            covered = [shard for low, high, _ in record.shards for shard in range(low, high)]
            assert covered == list(range(schedule.shards)), f"version {record.version} is of shards {covered}"
            assert record.from_version == record.version - 1
            final[record.version] = record
        assert sorted(final) == list(range(1, schedule.steps + 1)), f"versions {sorted(final)}"
    except (AssertionError, KeyError, IndexError) as error:
        raise AssertionError(f"{error}\nseed {schedule.seed}: {schedule}\n{cluster.story()}") from error
    return cluster

"""Seeded schedules: who is there, what goes wrong and when, as data. A seed tells the whole story."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from cluster import Cluster, reference

from bus.memory import Faults

ROUGH = Faults(
    delay_s=(0.0001, 0.02), lose_weights=0.05, lose_gradients=0.05, lose_control=0.05, double=0.1, reorder=0.1
)
What = Literal["kill", "restart", "freeze", "leave"]


@dataclass(frozen=True, slots=True)
class Fault:
    """At ``at_s``, ``what`` happens to ``who`` (a worker, or "ps"); where it is undone, that is after ``for_s``."""

    at_s: float
    what: What
    who: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """An experiment, the workers with the times at which they start, and the faults."""

    seed: int
    shards: int
    steps: int
    save_every: int
    starts_s: tuple[float, ...]
    faults: tuple[Fault, ...]

    def cluster(self) -> Cluster:
        """Set up to run, over a network that loses, doubles, delays and reorders."""
        cluster = Cluster(self.seed, self.shards, self.steps, ROUGH, self.save_every)
        for number, at_s in enumerate(self.starts_s):
            cluster.network.at(at_s, lambda name=f"w{number}": cluster.start_worker(name))
        for fault in self.faults:
            self._plan(cluster, fault)
        return cluster

    def _plan(self, cluster: Cluster, fault: Fault) -> None:
        def at(at_s: float, act: object, *what: str) -> None:
            cluster.network.at(at_s, lambda: act(*what))  # type: ignore[operator]

        ps = fault.who == "ps"
        match fault.what:
            case "freeze":
                at(fault.at_s, cluster.frozen.add, fault.who)
                at(fault.at_s + fault.for_s, cluster.frozen.discard, fault.who)
            case "restart" if not ps:
                at(fault.at_s, cluster.start_worker, fault.who)
            case "leave" if not ps:
                at(fault.at_s, cluster.stop_worker, fault.who)
                at(fault.at_s + fault.for_s, cluster.start_worker, fault.who)
            case _ if ps:
                at(fault.at_s, cluster.kill_server)
                at(fault.at_s + fault.for_s, cluster.start_server)
            case _:
                at(fault.at_s, cluster.kill_worker, fault.who)
                at(fault.at_s + fault.for_s, cluster.start_worker, fault.who)


def rough(seed: int) -> Schedule:
    """Up to eight workers and up to ten faults."""
    chance = np.random.default_rng([seed, 2])
    workers = int(chance.integers(1, 9))
    names = ["ps", *(f"w{number}" for number in range(workers))]
    kinds: list[What] = ["kill", "restart", "freeze", "leave"]
    faults = [
        Fault(
            float(chance.uniform(0, 3)),
            kinds[int(chance.integers(len(kinds)))],
            names[int(chance.integers(len(names)))],
            float(chance.uniform(0.01, 6)),
        )
        for _ in range(int(chance.integers(0, 11)))
    ]
    return Schedule(
        seed,
        shards=int(chance.choice([1, 2, 3, 4, 5, 6, 8, 16])),
        steps=int(chance.integers(3, 11)),
        save_every=int(chance.integers(1, 5)),
        starts_s=tuple(float(each) for each in chance.uniform(0, 1, workers)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def run(schedule: Schedule) -> Cluster:
    """Run to the end, and hold everything against what must be true of it. An AssertionError tells the story."""
    cluster = schedule.cluster()
    try:
        found = cluster.run()
        expected = reference(schedule.steps, schedule.shards)
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

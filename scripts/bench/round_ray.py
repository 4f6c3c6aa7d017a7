"""A round of Ray, by the pattern its documentation gives for a parameter server: actors and the object store.

On one host arrays go by shared memory, as they would not between hosts.
"""

import time
from typing import Any

import numpy as np

from bench.member import Member
from bench.payload import Block, Check, Vector, gradients

STORE_BYTES = 4 << 30


class Averager:
    """The parameter server, as an actor."""

    def mean(self, *vectors: Vector) -> Vector:
        total = vectors[0] + vectors[1]
        for vector in vectors[2:]:
            total += vector
        total *= np.float32(1 / len(vectors))
        return total


class Computer:
    """A worker, as an actor."""

    def begin(self, block: Block, rank: int) -> None:
        self._mine, self._check = gradients(rank, block.count), Check(block.workers, block.count)

    def compute(self, number: int) -> Vector:
        return self._mine[number & 1]

    def take(self, number: int, mean: Vector, last: bool) -> float:
        end, odd = time.monotonic(), number & 1
        (self._check.whole if last else self._check.few)(mean, 1 - odd, odd)
        return end


class Driver:
    """The only member that this script starts; Ray starts the rest."""

    def __init__(self) -> None:
        self._averager: Any = None
        self._computers: list[Any] = []

    def offer(self, block: Block) -> dict[str, Any]:
        return {}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        import ray

        if self._averager is None:
            self._start(block)
        ray.get([each.begin.remote(block, rank) for rank, each in enumerate(self._computers)])
        ends = []
        for number in range(block.rounds):
            mean = self._averager.mean.remote(*(each.compute.remote(number) for each in self._computers))
            last = number == block.rounds - 1
            ends.append(ray.get([each.take.remote(number, mean, last) for each in self._computers]))
        return [list(of_worker) for of_worker in zip(*ends, strict=True)]

    def _start(self, block: Block) -> None:
        import ray

        ray.init(
            num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, _node_ip_address="127.0.0.1",
            logging_level="ERROR", log_to_driver=False, _temp_dir=f"{block.folder}/ray",
        )  # fmt: skip
        self._averager = ray.remote(num_cpus=0)(Averager).remote()
        self._computers = [ray.remote(num_cpus=0)(Computer).remote() for _ in range(block.workers)]


def member(path: str, rank: int) -> Member:
    return Driver()

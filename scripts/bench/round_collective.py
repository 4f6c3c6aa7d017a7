"""Rounds without a hub: the all-reduce of torch.distributed (gloo), of MPI and of JAX (gloo), at their defaults."""

import os
import socket
from typing import Any

import numpy as np

from bench.member import Member
from bench.payload import Block, Vector, timed_rounds


class Torch:
    """As DistributedDataParallel does it: the gradient is copied into the buffer that is reduced in place."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def offer(self, block: Block) -> dict[str, Any]:
        return {"file": f"{block.folder}/rendezvous"}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        import torch
        from torch import distributed

        if not distributed.is_initialized():
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            method = f"file://{offer['file']}"
            distributed.init_process_group("gloo", init_method=method, rank=self._rank, world_size=block.workers)
        buffer = torch.empty(block.count)

        def exchange(gradient: Vector) -> Vector:
            buffer.copy_(torch.from_numpy(gradient))
            distributed.all_reduce(buffer)
            buffer.mul_(1 / block.workers)
            mean: Vector = buffer.numpy()
            return mean

        return [timed_rounds(block, self._rank, exchange)]


class Mpi:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def offer(self, block: Block) -> dict[str, Any]:
        return {}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        from mpi4py import MPI

        total, share = np.zeros(block.count, np.float32), np.float32(1 / block.workers)

        def exchange(gradient: Vector) -> Vector:
            MPI.COMM_WORLD.Allreduce(gradient, total, MPI.SUM)
            np.multiply(total, share, out=total)
            return total

        return [timed_rounds(block, self._rank, exchange)]


class Jax:
    """One CPU device for each process; the gradient begins on it, as ``jax.grad`` leaves it."""

    def __init__(self, rank: int) -> None:
        self._rank, self._address = rank, ""
        self._mesh: Any = None

    def offer(self, block: Block) -> dict[str, Any]:
        if not self._address:
            with socket.create_server(("127.0.0.1", 0)) as listener:  # JAX takes no port of its own choice
                self._address = f"127.0.0.1:{listener.getsockname()[1]}"
        return {"address": self._address}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        if self._mesh is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(offer["address"], block.workers, self._rank)
            self._mesh = Mesh(np.array(jax.devices()), ("worker",))
        share, spread = np.float32(1 / block.workers), PartitionSpec("worker")

        def mean(one: Any) -> Any:
            return jax.lax.psum(one[0], "worker") * share

        compiled = jax.jit(jax.shard_map(mean, mesh=self._mesh, in_specs=spread, out_specs=PartitionSpec()))
        sharding, device = NamedSharding(self._mesh, spread), jax.local_devices()[0]
        ready: dict[int, Any] = {}  # by address of the gradient: on the device before it is reduced again and again

        def exchange(gradient: Vector) -> Vector:
            place = gradient.ctypes.data
            if place not in ready:
                ready[place] = jax.device_put(gradient[None], device)
            shape = (block.workers, block.count)
            result = compiled(jax.make_array_from_single_device_arrays(shape, sharding, [ready[place]]))
            return np.asarray(result.block_until_ready().addressable_data(0))

        return [timed_rounds(block, self._rank, exchange)]


def member(path: str, rank: int) -> Member:
    kinds: dict[str, type[Torch] | type[Mpi] | type[Jax]] = {"torch": Torch, "mpi": Mpi, "jax": Jax}
    return kinds[path](rank)

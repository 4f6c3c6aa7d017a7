"""One process of a contender: `python -m bench.member MODULE PATH RANK SOCKET`. The hub, if there is one, has rank -1.

It does one block after the other as the driver asks, and ends with the driver, or when a block takes too long.
"""

import importlib
import os
import signal
import socket
import sys
from typing import Any, Protocol

from bench.link import Link, LinkError
from bench.payload import Block
from bench.profile import sampled

BLOCK_LIMIT_S = 60
HUB = -1
LEADS = "leads"  # the key of what the leader offers


class Member(Protocol):
    def offer(self, block: Block) -> dict[str, Any]:
        """Asked of the leader, the hub or else rank 0: what the others need to find it."""

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        """Take part in a block: when each of its rounds was over, once for each worker that this process is."""


def main() -> int:
    module, path, rank, address = sys.argv[1:]
    number = _mpi_rank() if rank == "mpi" else int(rank)
    member: Member = importlib.import_module(f"bench.{module}").member(path, number)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    link = Link(connection)
    link.send({"rank": number, "pid": os.getpid()})
    try:
        while True:
            link.send(_answer(member, link.receive()))
    except LinkError:
        return 0  # the driver has all it wants


def _answer(member: Member, order: dict[str, Any]) -> dict[str, Any]:
    signal.alarm(BLOCK_LIMIT_S)  # ends the process, whatever it hangs in
    block = Block(**order["block"])
    try:
        if LEADS not in order:
            return {LEADS: member.offer(block)}
        with sampled(order["profile"]) as cost:
            ends = member.run(block, order[LEADS])
        return {"ends": ends, "cost": cost}
    except Exception as error:  # noqa: BLE001 - whatever a contender raises is its result
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        signal.alarm(0)


def _mpi_rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    sys.exit(main())

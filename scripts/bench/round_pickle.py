"""The approach that this project replaces: raw sockets and pickle, one connection and one thread for each worker.

The only place with pickle. Only this script's own processes are connected, over the loopback.
"""

import pickle
import socket
import threading
from typing import Any

import numpy as np

from bench.member import HUB, Member
from bench.payload import Block, Vector, timed_rounds

SIZE_BYTES = 8  # of the length before a message


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(SIZE_BYTES, "little"))
    connection.sendall(data)


def _receive(connection: socket.socket) -> Any:
    size = int.from_bytes(_exactly(connection, SIZE_BYTES), "little")
    return pickle.loads(_exactly(connection, size))  # noqa: S301 - what is measured here


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed too early")
        data.extend(part)
    return bytes(data)


def _without_delay(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Hub:
    def offer(self, block: Block) -> dict[str, Any]:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=block.workers)
        return {"port": self._listener.getsockname()[1]}

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        connections = [_without_delay(self._listener.accept()[0]) for _ in range(block.workers)]
        self._listener.close()
        inbox: list[Vector] = [np.empty(0, np.float32)] * block.workers
        answer = [b""]
        turn = threading.Barrier(block.workers + 1)

        def serve(rank: int) -> None:
            for _ in range(block.rounds):
                inbox[rank] = _receive(connections[rank])
                turn.wait()
                turn.wait()
                _send(connections[rank], answer[0])

        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(block.workers)]
        for thread in threads:
            thread.start()
        for _ in range(block.rounds):
            turn.wait()
            answer[0] = pickle.dumps(np.mean(inbox, axis=0), pickle.HIGHEST_PROTOCOL)
            turn.wait()
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()
        return []


class Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def offer(self, block: Block) -> dict[str, Any]:
        raise NotImplementedError

    def run(self, block: Block, offer: dict[str, Any]) -> list[list[float]]:
        with _without_delay(socket.create_connection(("127.0.0.1", offer["port"]))) as connection:

            def exchange(gradient: Vector) -> Vector:
                _send(connection, pickle.dumps(gradient, pickle.HIGHEST_PROTOCOL))
                mean: Vector = _receive(connection)
                return mean

            return [timed_rounds(block, self._rank, exchange)]


def member(path: str, rank: int) -> Member:
    return Hub() if rank == HUB else Worker(rank)

"""The processes of one contender, as the driver sees them: start, do a block, end. All waits have a limit."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.contenders import Contender, mpirun
from bench.link import Link, LinkError, gather
from bench.member import BLOCK_LIMIT_S, HUB
from bench.payload import Block

START_LIMIT_S = 60.0
END_LIMIT_S = 5.0
SCRIPTS = Path(__file__).parents[1]


class Team:
    """Processes that wait for blocks. Raises LinkError where one of them fails."""

    def __init__(self, contender: Contender, workers: int) -> None:
        self._contender, self._workers = contender, workers
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", dir=shared, ignore_cleanup_errors=True)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self.costs: dict[int, dict[str, float]] = {}  # of the last block, in seconds, by rank

    def start(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            address = f"{self._folder.name}/link"
            listener.bind(address)
            listener.listen(64)
            listener.settimeout(0.2)
            for command in self._commands(address):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=self._environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=self._said,
                        stderr=self._said,
                        start_new_session=True,
                    )
                )
            self._welcome(listener)

    def _commands(self, address: str) -> list[list[str]]:
        def command(rank: int | str) -> list[str]:
            return [
                sys.executable, "-m", "bench.member", self._contender.module, self._contender.path, str(rank), address
            ]  # fmt: skip

        if self._contender.mpi:
            return [[str(mpirun()), "-n", str(self._workers), *command("mpi")]]
        ranks = range(HUB if self._contender.hub else 0, self._workers if self._contender.ranks else 0)
        return [command(rank) for rank in ranks]

    def _environment(self) -> dict[str, str]:
        """One thread for each worker, and the project beside this folder to import from."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = [str(SCRIPTS), str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths), **self._contender.environment}

    def _welcome(self, listener: socket.socket) -> None:
        expected = self._workers * self._contender.ranks + self._contender.hub
        deadline = time.monotonic() + START_LIMIT_S
        while len(self._links) < expected:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise LinkError(f"it did not start: {self.last_words()}")
            with contextlib.suppress(TimeoutError):
                link = Link(listener.accept()[0])
                hello = link.receive(START_LIMIT_S)
                self._links[hello["rank"]], self._pids[hello["rank"]] = link, hello["pid"]

    def block(self, size_bytes: int, rounds: int, profiles: dict[int, str] | None = None) -> list[list[float]]:
        """When each round was over, for each worker. ``profiles``: where members of these ranks write theirs."""
        order: dict[str, Any] = {"block": vars(Block(size_bytes, rounds, self._workers, self._folder.name))}
        leader = self._links[min(self._links)]
        leader.send(order)
        order |= gather([leader], BLOCK_LIMIT_S)[0]  # what it offers
        for rank, link in self._links.items():
            link.send({**order, "profile": (profiles or {}).get(rank)})
        answers = gather(list(self._links.values()), BLOCK_LIMIT_S + 5)
        self.costs = {rank: answer["cost"] for rank, answer in zip(self._links, answers, strict=True)}
        return [ends for answer in answers for ends in answer["ends"]]

    def last_words(self) -> str:
        """The last line that a member wrote."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no word")

    def end(self) -> None:
        """Members end with their link; who does not is killed."""
        for link in self._links.values():
            link.close()
        deadline = time.monotonic() + END_LIMIT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                self._kill(process)
        self._said.close()
        self._folder.cleanup()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """With the ranks, if it is mpirun: they are not in its process group, and alive as long as it is."""
        for pid in self._pids.values() if self._contender.mpi else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait(END_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

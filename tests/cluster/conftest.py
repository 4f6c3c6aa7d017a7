"""`python -m gradbus ...` in a folder of its own, watched from outside: its files, its output, its processes, its exit.

Every wait ends as soon as what it waits for is there, or fails at a limit. Whatever a test starts carries the folder's
name in its environment, which grandchildren inherit, so nothing that is left over can hide; it fails the test.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from gradbus.records import now_utc

HERE = Path(__file__).parent
MARK = "GRADBUS_TEST_FOLDER"
POLL_S = 0.002
LIMIT_S = 60.0  # of one wait: generous, since the machines that test are busy; what has a promised time is held to it
# A terminal: what is written to its stdin is typed, so that \x03 is Ctrl-C for the whole foreground group.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
T = TypeVar("T")


def until(
    look: Callable[[], T], what: str, limit_s: float = LIMIT_S, ended: Callable[[], str | None] | None = None
) -> T:
    """The first true answer of `look`. Fails at the limit, or when `ended` says that it will never come."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        end = ended() if ended else None
        if end is not None and not (found := look()):
            pytest.fail(f"ended before {what}:\n{end}")
        if found:
            break
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {limit_s:g} s")
        time.sleep(POLL_S)
    return found


class Started:
    """One `gradbus` command, the leader of a process group as on a terminal of its own."""

    def __init__(
        self,
        place: "Place",
        folder: Path,
        command: list[str],
        output: Path,
        environment: dict[str, str],
        stdin: int,
    ) -> None:
        self._place, self._output = place, output
        self._began = now_utc()
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=stdin, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def _ended(self) -> str | None:
        return self.output if self.popen.poll() is not None else None

    def until(self, look: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
        return until(look, what, limit_s, self._ended)

    def until_line(self, text: str, limit_s: float = LIMIT_S) -> str:
        """The first line of output with `text`."""
        return self.until(
            lambda: next((line for line in self.output.splitlines() if text in line), ""),
            f"line with {text!r}",
            limit_s,
        )

    def address(self) -> str:
        """Where the parameter server listens, from the line that tells it."""
        return self.until_line("  address ").split()[1]

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """What has been written to the ledger of the newest run since this was started."""
        return [row for row in self._place.ledger(kind) if row["time"] >= self._began]

    def until_version(self, version: int) -> None:
        """A moment in mid-run: `version` was made after this was started."""
        self.until(lambda: any(row["version"] >= version for row in self.rows("update")), f"version {version}")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code, within the limit."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {limit_s:g} s:\n{self.output}")

    def interrupt_group(self) -> None:
        """SIGINT to the whole foreground group, as a terminal sends it."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def child(self, role: str) -> psutil.Process:
        """The child process of this role: `ps`, `evaluator`, or the name of a worker."""

        def look() -> psutil.Process | None:
            for process in psutil.Process(self.popen.pid).children():
                try:
                    words = process.cmdline()
                except psutil.NoSuchProcess:
                    continue  # such as git, which is asked for the commit
                name = words[words.index("--name") + 1] if "--name" in words else words[3] if len(words) > 3 else ""
                if name == role:
                    return process
            return None

        return self.until(look, f"process {role}")


class Place:
    """A working directory, the runs in it, and everything that was started there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: list[Started] = []

    def start(
        self, *arguments: object, terminal: bool = False, folder: Path | None = None, **environment: object
    ) -> Started:
        """`python -m gradbus` with these arguments, on a terminal or with its output in a file."""
        command = [sys.executable, "-m", "gradbus", *map(str, arguments)]
        if terminal:
            command = [sys.executable, "-c", TERMINAL, *command]
        inherited = {k: v for k, v in os.environ.items() if k not in ("NPROC", "COLUMNS", "JAX_PLATFORMS")}
        values = {"JAX_PLATFORMS": "cpu", MARK: str(self.path), **{k: str(v) for k, v in environment.items()}}
        output = self.path / f"output-{len(self._started)}.txt"
        stdin = subprocess.PIPE if terminal else subprocess.DEVNULL
        started = Started(self, folder or self.path, command, output, {**inherited, **values}, stdin)
        self._started.append(started)
        return started

    def run(self, *arguments: object, limit_s: float = LIMIT_S, **environment: object) -> Started:
        """The same, waited for."""
        started = self.start(*arguments, **environment)
        started.wait(limit_s)
        return started

    def add(self, name: str, text: str | None = None) -> Path:
        """A file in this folder: one of tests/cluster, or `text`."""
        path = self.path / name
        path.write_text((HERE / name).read_text() if text is None else text)
        return path

    @property
    def latest(self) -> Path:
        return (self.path / "runs" / "latest").resolve()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.latest / "summary.json").read_text())

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.latest / "manifest.json").read_text())

    def ledger(self, kind: str) -> list[dict[str, Any]]:
        """The rows of this kind; a row that is being written is not there yet."""
        file = self.latest / "ledger.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.is_file() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name[8:]) for path in (self.latest / "checkpoints").glob("version_*"))

    def log(self, name: str) -> str:
        return (self.latest / "logs" / f"{name}.log").read_text(errors="replace")

    def left_over(self) -> list[str]:
        """Processes that were started from here and still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.path) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def nothing_left(self, limit_s: float = 2.0) -> None:
        """No process of this folder runs, and nobody listens on the addresses of its newest run."""
        deadline = time.monotonic() + limit_s
        while (left := self.left_over()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert not left
        for address in self.manifest().get("addresses", {}).values() if self.latest.is_dir() else ():
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, f"{address} is still listened on"

    def clean_up(self) -> None:
        for started in self._started:
            if started.popen.poll() is None:
                started.popen.kill()
            started.popen.wait(10)
            if started.popen.stdin:
                started.popen.stdin.close()
        for line in self.left_over():
            try:
                psutil.Process(int(line.split(":")[0])).kill()
            except psutil.NoSuchProcess:
                continue


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty working directory; what is left running when the test has passed is an error."""
    place = Place(tmp_path)
    try:
        yield place
        place.nothing_left()
    finally:
        place.clean_up()


@pytest.fixture
def evidence(place: Place) -> Callable[[str, str, str], None]:
    """Notes (what was typed, what came back, exit code and time) as a row of the Markdown table GRADBUS_TEST_TABLE."""

    def note(typed: str, came: str, ended: str) -> None:
        file = os.environ.get("GRADBUS_TEST_TABLE")
        if file is not None:
            cells = [text.replace(str(place.path), "...").replace("|", "\\|") for text in (typed, came, ended)]
            with Path(file).open("a") as table:
                table.write(f"| `{cells[0]}` | `{cells[1]}` | {cells[2]} |\n")

    return note


@pytest.fixture(scope="session")
def plain_loop() -> Callable[..., str]:
    """params_sha256 by the plain loop: (workload, steps, batch_size, shards)."""
    known: dict[tuple[object, ...], str] = {}

    def sha256(*arguments: object) -> str:
        if arguments not in known:
            command = [sys.executable, str(HERE.parent / "plain_loop.py"), *map(str, arguments)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
            known[arguments] = result.stdout.strip()
        return known[arguments]

    return sha256

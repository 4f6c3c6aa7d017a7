"""What a run leaves behind: `runs/<time>-<name>/`, and the link `runs/latest`.

    config.yaml      the resolved settings              ledger.jsonl    what made each version, and what was refused
    overrides.txt    what was typed                     metrics.jsonl   loss, speed, evaluations; also as event files
    manifest.json    versions, machine, seed, threads   summary.json    the outcome, written last
    logs/            one file by process                checkpoints/    version_000100/, ...

Lines are appended with one write each, so that a kill loses at most the last line, and readers skip what is torn. A
fault of the disk is remembered and told, never raised into training. A writer belongs to one thread. Nothing here
imports JAX, NumPy or ZeroMQ.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gradbus.manifest import describe
from gradbus.report import encode_line

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

    from gradbus.settings import Settings

BACKLOG_LINES = 10_000

log = logging.getLogger(__name__)

Row = dict[str, Any]


class RunFolderError(Exception):
    """A run folder cannot be made, found or read; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the parts of one run lie."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, name: str) -> Path:
        """The log file of one process: `ps`, `evaluator`, `w0`, ..."""
        return self.path / "logs" / f"{name}.log"

    def write_config(self, text: str, overrides: Sequence[str]) -> None:
        """Store the resolved settings, and the overrides as they were typed, one a line."""
        replace(self.config, text.encode())
        replace(self.path / "overrides.txt", "".join(f"{override}\n" for override in overrides).encode())

    def make_latest(self) -> None:
        """Let the link `latest` beside the folder point to it."""
        _point_latest(self.path.parent, self.path.name)

    def read_manifest(self) -> Row:
        """The manifest; empty when there is none yet."""
        return _read_object(self.path / "manifest.json")

    def update_manifest(self, **fields: Any) -> None:
        """Merge fields into manifest.json. One process at a time: the PS while it lives, otherwise the launcher."""
        try:
            _write_object(self.path / "manifest.json", {**self.read_manifest(), **fields})
        except OSError as error:
            log.warning("manifest.json was not updated: %s", error)

    def read_summary(self) -> Row:
        """The outcome; empty while the run goes on."""
        return _read_object(self.summary)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all. Raises OSError when the disk does not take it."""
        _write_object(self.summary, dict(summary))

    def updates(self) -> dict[int, Row]:
        """The ledger's row of each version of the weights as they are now.

        A session which began at version v took the place of what earlier ones had made after v.
        """
        made: dict[int, Row] = {}
        for row in read_rows(self.ledger):
            match row:
                case {"kind": "session", "version": int(start)}:
                    made = {version: kept for version, kept in made.items() if version <= start}
                case {"kind": "update", "version": int(version)}:
                    made[version] = row
        return made


def create(settings: "Settings", overrides: Sequence[str]) -> RunFolder:
    """Make the folder of a new run, and write config.yaml and manifest.json.

    Two starts in the same second get two folders. Raises RunFolderError when it cannot be written.
    """
    from gradbus.settings import dump

    runs = Path(settings.run.dir)
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{settings.name}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        run = RunFolder(_new_folder(runs, stem).resolve())
        (run.path / "logs").mkdir()
        run.checkpoints.mkdir()
        run.write_config(dump(settings), overrides)
        facts = describe(name=settings.name, seed=settings.seed, threads=settings.train.threads)
        _write_object(run.path / "manifest.json", {"created": now_utc(), **facts})
    except OSError as error:
        raise RunFolderError(
            f"run.dir: cannot write a run folder in {runs.absolute()}: {error.strerror or error}; "
            "choose another place with run.dir=PATH"
        ) from error
    return run


def find(where: str, runs_dir: Path) -> RunFolder:
    """The run folder that `where` names: `latest`, a path, or a folder's name in `runs_dir`. Raises RunFolderError."""
    candidates = [runs_dir / "latest"] if where == "latest" else [Path(where), runs_dir / where]
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return RunFolder(candidate.resolve())
    if where == "latest":
        raise RunFolderError(f"there is no latest run in {runs_dir.absolute()}; start one with: gradbus cluster")
    raise RunFolderError(f"{where} is not a run folder: there is no {candidates[0] / 'config.yaml'}")


class Rows:
    """Appends JSON lines to a file; a fault is kept in `fault` and told once, and the rows wait for a better time.

    on_fault: called with one line when writing starts to fail, and when rows had to be given up.
    """

    def __init__(self, path: Path, on_fault: Callable[[str], None] | None = None) -> None:
        self.path = path
        self.fault: str | None = None
        self._on_fault = on_fault
        self._waiting: deque[bytes] = deque(maxlen=BACKLOG_LINES)
        self._fd: int | None = None
        self._torn = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row. Never raises for the sake of the disk."""
        self._waiting.append(encode_line(dict(row)))
        try:
            fd = self._open()
            while self._waiting:
                self._write(fd, self._waiting[0])
                self._waiting.popleft()
            self.fault = None
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        return self._fd

    def _write(self, fd: int, line: bytes) -> None:
        # After half a line, from this process or a killed one, a newline keeps the next row whole.
        data = b"\n" + line if self._torn else line
        written = os.write(fd, data)
        if written != len(data):
            self._torn = True
            raise OSError(0, f"only {written} of {len(data)} bytes were taken; the disk is full or a quota is reached")
        self._torn = False

    def _failed(self, error: OSError) -> None:
        fault = f"{self.path.name} cannot be written: {error.strerror or error}; training goes on"
        if fault != self.fault:
            log.warning("%s", fault)
            if self._on_fault is not None:
                self._on_fault(fault)
        self.fault = fault


class Ledger(Rows):
    """ledger.jsonl: where and when the weights changed. The rows are described in docs/protocol.md."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; `time` is filled in when it is missing."""
        super().append(row if "time" in row else {**row, "time": now_utc()})


class Metrics(Rows):
    """metrics.jsonl, and the same numbers as TensorBoard event files if tensorboardX is installed.

    events: the folder of the event files; None: that of the metrics. TensorBoard follows one live file by folder, so a
    second process that writes at the same time, such as the evaluator, needs a folder of its own.
    """

    def __init__(
        self, path: Path, on_fault: Callable[[str], None] | None = None, *, events: Path | None = None
    ) -> None:
        super().__init__(path, on_fault)
        self._events: Path | None = events or path.parent
        self._board: EventsWriter | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row: `version`, and any of loss, loss_average, examples_per_second, learning_rate, metrics, eval."""
        super().append(row if "time" in row else {**row, "time": now_utc()})
        if self._events is not None:
            self._draw(row, self._events)

    def close(self) -> None:
        super().close()
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                self._failed(error)
            self._board = None

    def _draw(self, row: Mapping[str, Any], folder: Path) -> None:
        # tensorboardX's SummaryWriter would block training on a full disk (a bounded queue behind a dead thread); its
        # EventsWriter writes in this thread and raises.
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar
        except ImportError:
            self._events = None
            return
        try:
            if self._board is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._board = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            for name, value in _scalars(row):
                event = Event(wall_time=time.time(), step=int(row["version"]), summary=scalar(name, value))
                self._board.write_event(event)
            self._board.flush()
        except OSError as error:
            self._events = None  # the truth is in metrics.jsonl
            self._failed(error)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON-lines file. What is not a whole JSON object, such as a line cut by a kill, is skipped."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(row, dict):
                yield row


def now_utc() -> str:
    """ISO 8601 in UTC with milliseconds, as every file of a run has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def replace(path: Path, data: bytes) -> None:
    """Put `data` at `path`, whole or not at all: temporary file, fsync, rename. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_object(path: Path, value: Row) -> None:
    # Through the line encoder first: it knows array scalars, and turns NaN into null.
    replace(path, json.dumps(msgspec.json.decode(encode_line(value)), indent=2).encode() + b"\n")


def _read_object(path: Path) -> Row:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _new_folder(runs: Path, stem: str) -> Path:
    for attempt in range(1, 1000):
        path = runs / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(0, f"1000 runs are called {stem}")


def _point_latest(runs: Path, name: str) -> None:
    link = runs / f".latest-{name}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(name, target_is_directory=True)
        link.replace(runs / "latest")
    except OSError as error:  # no links here, or somebody's folder has that name: only a convenience is lost
        link.unlink(missing_ok=True)
        log.warning("the link %s was not set: %s", runs / "latest", error)


def _scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name in ("loss", "loss_average", "examples_per_second", "learning_rate"):
        if row.get(name) is not None:
            yield name, float(row[name])
    for group in ("metrics", "eval"):
        for name, value in (row.get(group) or {}).items():
            if value is not None:
                yield f"{group}/{name}", float(value)

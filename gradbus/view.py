"""What a person sees while a run goes on: a live view in a terminal, otherwise one plain line every few seconds.

Only the launcher draws, and only what it is told; a console that has gone away silences the view, never the run.
"""

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradbus.records import RunFolder
from gradbus.settings import Settings
from gradbus.supervise import Failure
from gradbus.wording import plural

PLAIN_EVERY_S = 5.0
DRAW_EVERY_S = 0.25
MEMBERS_SHOWN = 12
PACE_REPORTS = 40
WIDE_ENOUGH = 70  # columns for the whole table of members


class View:
    """A `gradbus.supervise.Watcher` for the console. Use it as a context: it owns the live region meanwhile."""

    def __init__(
        self,
        run: RunFolder,
        settings: Settings,
        *,
        version: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        terminal = sys.stdout.isatty()
        self._console = console or Console(highlight=False, width=None if terminal else 120)
        self._run, self._settings, self._gradbus = run, settings, version
        self._clock = clock
        self._progress: dict[str, Any] = {}
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_REPORTS)  # when which version was reported
        self._phase = "starting the parameter server"
        self._shown_at = float("-inf")
        self._line_of = -1
        self._live: Live | None = None
        self._gone = False

    def __enter__(self) -> Self:
        self._say(*_header(self._run, self._settings, self._gradbus))
        if self._console.is_terminal:
            self._live = Live(self._draw(), console=self._console, auto_refresh=False, transient=True)
            self._guard(self._live.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._guard(self._live.stop)
            self._live = None

    def reported(self, source: str, event: str, fields: dict[str, Any]) -> None:
        """Show what a process reported, if it is for people."""
        match event:
            case "listening":
                self._phase = "waiting for workers"
                address = str(fields.get("control", ""))
                self._say(_row("address", address), _row("add a worker", f"{command_name()} worker --ps {address}"))
            case "progress":
                self._progress = fields
                self._pace.append((self._clock(), _count(fields, "version")))
            case "note":
                self.note(str(fields.get("text", "")) if source == "ps" else f"{source}: {fields.get('text', '')}")
            case "fault":
                self.note(f"on purpose: {fields.get('text', '')}")
            case "evaluated" if isinstance(fields.get("eval"), dict):
                self.note(f"version {fields.get('version')}: {numbers(fields['eval'])} (evaluation)")
            case "finished":
                self._phase = "finished; the others are leaving"

    def note(self, text: str) -> None:
        """One line that stays."""
        self._say(Text(f"  {text}", style="dim"))

    def failed(self, failure: Failure) -> None:
        """One line at once; the table comes at the end."""
        who = f"{failure.name} ({failure.host}, pid {failure.pid})"
        self._say(Text(f"  {who}: {failure.reason}; {failure.answer}; log: {shown(failure.log)}", style="yellow"))

    def tick(self) -> None:
        """Draw again, or write the next plain line, when it is time to."""
        now = self._clock()
        if self._live is not None:
            if now - self._shown_at >= DRAW_EVERY_S:
                self._shown_at = now
                self._live.update(self._draw())
                self._guard(self._live.refresh)
        elif (
            self._progress.get("version") != self._line_of and now - self._shown_at >= PLAIN_EVERY_S and self._progress
        ):
            self._shown_at, self._line_of = now, self._progress.get("version", -1)
            self._say(Text(plain_line(self._progress, self._left_s())))

    def end(self, lines: list[RenderableType]) -> None:
        """The last lines, below everything."""
        self._say(*lines)

    def _draw(self) -> RenderableType:
        if not self._progress:
            return Text(f"{self._phase} ...", style="bold")
        version, steps = _count(self._progress, "version"), max(1, _count(self._progress, "steps"))
        bar = ProgressBar(total=steps, completed=version)
        return Group(
            Text(status_line(self._progress, self._left_s()), style="bold", overflow="fold"),
            bar,
            _members(self._progress, self._console.width),
        )

    def _left_s(self) -> float | None:
        """Time to the last step at the pace of late; None as long as that is a guess."""
        if len(self._pace) < 2:
            return None
        (begun, first), (now, last) = self._pace[0], self._pace[-1]
        left = max(0, _count(self._progress, "steps") - last)
        return (now - begun) / (last - first) * left if last > first else None

    def _say(self, *lines: RenderableType) -> None:
        for line in lines:  # text is broken by the terminal, not by us, so that a long command can be copied whole
            self._guard(partial(self._console.print, line, soft_wrap=isinstance(line, Text)))

    def _guard(self, act: Callable[[], object]) -> None:
        """A closed terminal or pipe: be silent from then on."""
        if self._gone:
            return
        try:
            act()
        except OSError:
            self._gone = True
            self._live = None
            if self._console.file is sys.stdout:  # its last flush, at exit, must not fail either
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def status_line(progress: Mapping[str, Any], left_s: float | None = None) -> str:
    """Where the run is: `step 120/400  loss 0.4321  5123 examples/s  0:07 left`."""
    parts = [f"step {_count(progress, 'version')}/{_count(progress, 'steps')}"]
    if (loss := _number(progress, "loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (average := _number(progress, "loss_average")) is not None:
        parts.append(f"average {average:.4f}")
    if (speed := _number(progress, "examples_per_second")) is not None:
        parts.append(f"{speed:,.0f} examples/s")
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def plain_line(progress: Mapping[str, Any], left_s: float | None = None) -> str:
    """The same where there is no terminal, with the step in the format of the logs."""
    loss, speed = _number(progress, "loss"), _number(progress, "examples_per_second")
    seconds = _number(progress, "seconds_per_step")
    line = f"step {_count(progress, 'version')}, loss = {'?' if loss is None else f'{loss:.4f}'}"
    if speed is not None and seconds is not None:
        line += f" ({speed:.1f} examples/sec; {seconds:.3f} sec/batch)"
    ready = sum(bool(row.get("ready")) for row in _rows(progress))
    line += f", of {_count(progress, 'steps')}, {plural(ready, 'worker')}"
    return line + (f", {duration(left_s)} left" if left_s is not None else "")


def command_name() -> str:
    """How `gradbus` is called here, so that a printed line can be copied."""
    script = Path(sys.executable).parent / "gradbus"
    found = shutil.which("gradbus")
    if found and script.exists() and os.path.samefile(found, script):
        return "gradbus"
    return shown(script) if script.exists() else f"{shown(Path(sys.executable))} -m gradbus"


def shown(path: Path) -> str:
    """A path as short as it can be from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def numbers(values: Mapping[str, Any]) -> str:
    """`accuracy 0.9731, loss 0.0912`."""
    pairs = [f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()]
    return ", ".join(pairs)


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `3:02:01`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _header(run: RunFolder, settings: Settings, version: str) -> list[RenderableType]:
    train = settings.train
    what = f"{plural(train.steps, 'step')} of {train.batch_size} examples in {plural(train.shards, 'shard')}"
    return [
        Text(f"gradbus {version}: {settings.name}, {what}", style="bold"),
        _row("run folder", shown(run.path)),
        _row("repeats with", f"seed {settings.seed}, {plural(train.threads, 'thread')} per process"),
        _row("stop", "Ctrl-C: finishes the step and writes a checkpoint; twice: at once"),
    ]


def _row(label: str, text: str) -> Text:
    return Text.assemble((f"  {label:<14}", "dim"), text)


def _members(progress: Mapping[str, Any], width: int) -> RenderableType:
    names = ["worker", "host", "doing", "shards", "examples/s"] if width >= WIDE_ENOUGH else ["worker", "doing"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        numeric = name in ("shards", "examples/s")
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if numeric else "left")
    rows = _rows(progress)
    for row in rows[:MEMBERS_SHOWN]:
        speed = _number(row, "examples_per_second")
        cells = {
            "worker": str(row.get("name", "?")),
            "host": str(row.get("host", "")),
            "doing": str(row.get("doing") or ("ready" if row.get("ready") else "getting ready")),
            "shards": str(row.get("shards", "")),
            "examples/s": "" if speed is None else f"{speed:,.0f}",
        }
        table.add_row(*(Text(cells[name]) for name in names))
    more = len(rows) - MEMBERS_SHOWN
    return Group(table, Text(f"... and {more} more", style="dim")) if more > 0 else table


def _rows(progress: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    members = progress.get("members")
    return [row for row in members if isinstance(row, Mapping)] if isinstance(members, list) else []


def _number(fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    return float(value) if isinstance(value, int | float) else None


def _count(fields: Mapping[str, Any], key: str) -> int:
    return int(_number(fields, key) or 0)

"""The console: plain lines where there is no terminal, a live view that fits where there is one."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gradbus.records import RunFolder
from gradbus.settings import load
from gradbus.supervise import Failure
from gradbus.view import View, duration, plain_line, status_line

PROGRESS = {
    "version": 120,
    "steps": 400,
    "loss": 0.43214,
    "loss_average": 0.5,
    "examples_per_second": 5123.4,
    "seconds_per_step": 0.025,
    "members": [
        {"member": 1, "name": "w0", "host": "vm", "doing": "shards 0-1", "ready": True, "shards": 2},
        {"member": 2, "name": "a-long-name-of-a-worker", "host": "lab-7.example.org", "doing": "", "ready": False},
    ],
}
FAILURE = Failure("t", "w0", "vm", 71, "killed by SIGKILL", "starts again in 1 s", Path("/r/logs/w0.log"), ("x",))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def view(width=100, terminal=False, file=None, clock=None):
    console = Console(
        file=file or io.StringIO(),
        width=width,
        force_terminal=terminal,
        color_system="truecolor" if terminal else None,
        highlight=False,
        legacy_windows=False,
    )
    made = View(RunFolder(Path("/r")), load(None, []), version="1.0", console=console, clock=clock or Clock())
    return made, console.file


def test_lines_without_a_terminal_come_every_few_seconds():
    clock = Clock()
    shown, file = view(clock=clock)
    with shown:
        shown.reported("ps", "progress", PROGRESS)
        shown.tick()
        for _ in range(10):
            clock.now += 0.4
            shown.reported("ps", "progress", PROGRESS | {"version": PROGRESS["version"] + 1})
            shown.tick()
        clock.now += 2
        shown.tick()
        clock.now += 20
        shown.tick()  # nothing new
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step")]
    assert [line.split(",")[0] for line in lines] == ["step 120", "step 121"]
    assert "\x1b" not in file.getvalue()


def test_the_plain_line_has_the_format_of_the_logs():
    assert plain_line(PROGRESS, 7.2) == (
        "step 120, loss = 0.4321 (5123.4 examples/sec; 0.025 sec/batch), of 400, 1 worker, 0:07 left"
    )


@pytest.mark.parametrize("progress", [{}, {"version": 3}, {"version": 3, "steps": 9, "loss": None, "members": None}])
def test_missing_numbers_are_left_out(progress):
    assert plain_line(progress).startswith("step ")
    assert status_line(progress).startswith("step ")


def test_the_time_left_follows_the_pace():
    clock = Clock()
    shown, file = view(clock=clock)
    for version in (100, 110, 120):  # 5 versions a second
        shown.reported("ps", "progress", PROGRESS | {"version": version, "seconds_per_step": 99.0})
        clock.now += 2
    shown.tick()
    assert file.getvalue().endswith("0:56 left\n")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_live_view_fits_the_terminal(width):
    clock = Clock()
    shown, file = view(width=width, terminal=True, clock=clock)
    with shown:
        shown.reported("ps", "listening", {"control": "tcp://127.0.0.1:4711"})
        shown.reported("ps", "progress", PROGRESS)
        clock.now += 1
        shown.tick()
        drawn = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)
        drawn.print(shown._draw())
    assert all(len(line) <= width for line in drawn.file.getvalue().splitlines())
    assert "120/400" in drawn.file.getvalue().replace("\n", "") and "w0" in drawn.file.getvalue()
    assert "\x1b[" in file.getvalue()


def test_many_members_do_not_fill_the_screen():
    shown, _ = view(terminal=True)
    members = [{"name": f"w{index}", "ready": True} for index in range(100)]
    shown.reported("ps", "progress", PROGRESS | {"members": members})
    drawn = Console(width=80, file=io.StringIO(), color_system=None)
    drawn.print(shown._draw())
    assert len(drawn.file.getvalue().splitlines()) < 20 and "and 88 more" in drawn.file.getvalue()


def test_notes_and_failures_are_told_at_once():
    shown, file = view()
    shown.reported("ps", "note", {"text": "w1 joined [bold]not markup[/bold]"})
    shown.reported("w1", "note", {"text": "waiting for the PS"})
    shown.reported("evaluator", "evaluated", {"version": 100, "eval": {"accuracy": 0.95}})
    shown.failed(FAILURE)
    assert file.getvalue().splitlines() == [
        "  w1 joined [bold]not markup[/bold]",
        "  w1: waiting for the PS",
        "  version 100: accuracy 0.9500 (evaluation)",
        "  w0 (vm, pid 71): killed by SIGKILL; starts again in 1 s; log: /r/logs/w0.log",
    ]


def test_the_line_to_copy_is_never_broken():
    shown, file = view(width=30)
    shown.reported("ps", "listening", {"control": "tcp://192.168.100.200:47110"})
    assert any(line.endswith(" worker --ps tcp://192.168.100.200:47110") for line in file.getvalue().splitlines())


class Closed(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_terminal_is_silence_not_an_error(terminal):
    clock = Clock()
    shown, _ = view(file=Closed(), terminal=terminal, clock=clock)
    with shown:
        shown.reported("ps", "progress", PROGRESS)
        clock.now += 10
        shown.tick()
        shown.note("nobody reads this")
    shown.end(["nor this"])


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (750, "12:30"), (10921, "3:02:01")])
def test_durations(seconds, text):
    assert duration(seconds) == text

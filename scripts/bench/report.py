"""What was measured: rounds by contender, payload and number of workers; statistics, a Markdown table, and JSON."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "pyzmq", "jax", "torch", "mpi4py", "openmpi", "ray")


@dataclass
class Cell:
    """The rounds of one contender with one payload and one number of workers: seconds, a list for each trial."""

    trials: list[list[float]] = field(default_factory=list)
    trouble: str = ""

    @property
    def rounds(self) -> list[float]:
        return [seconds for trial in self.trials for seconds in trial]

    def quartiles(self) -> tuple[float, float, float]:
        """Of all rounds, in seconds; at least two are there."""
        first, median, third = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return first, median, third


def rounds_of(ends: Sequence[Sequence[float]], warm_up: int) -> list[float]:
    """How long each round took: from when the slowest worker had one until the slowest had the next."""
    over = [max(each) for each in zip(*ends, strict=True)]
    return [end - begin for begin, end in pairwise(over)][max(warm_up - 1, 0) :]


@dataclass
class Results:
    """``cells`` by workers, size and contender. ``load`` is that of the machine before anything was started."""

    sizes: list[str]
    contenders: dict[str, str]
    seconds: float = 0.0
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    cells: dict[tuple[int, str, str], Cell] = field(default_factory=dict)

    def cell(self, workers: int, size: str, contender: str) -> Cell:
        return self.cells.setdefault((workers, size, contender), Cell())

    def markdown(self) -> str:
        parts = [
            "# A synchronous round: median in ms (quartiles)",
            f"{machine()}; {', '.join(f'{name} {found}' for name, found in versions().items())}; "
            f"load {self.load:.1f} before; {self.seconds:.0f} s in all.",
        ]
        for workers in sorted({key[0] for key in self.cells}):
            rows = [self._row(workers, name) for name in self.contenders]
            head = ["contender", *self.sizes, "trials", "rounds"]
            parts += [f"## {workers} workers", _table([head, ["---"] * len(head), *rows])]
        parts.append("\n".join(f"- {name}: {what}" for name, what in self.contenders.items()))
        return "\n\n".join(parts) + "\n"

    def _row(self, workers: int, contender: str) -> list[str]:
        cells = [self.cell(workers, size, contender) for size in self.sizes]
        if not any(cell.trials for cell in cells) and cells[0].trouble:
            return [contender, cells[0].trouble, *[""] * (len(self.sizes) + 1)]
        trials, rounds = [len(cell.trials) for cell in cells], [len(cell.rounds) for cell in cells]
        return [contender, *map(_shown, cells), _span(trials), _span(rounds)]

    def json(self) -> dict[str, Any]:
        rows = []
        for (workers, size, contender), cell in self.cells.items():
            row: dict[str, Any] = {"workers": workers, "size": size, "contender": contender, "trials_s": cell.trials}
            if cell.trouble:
                row["trouble"] = cell.trouble
            if len(cell.rounds) > 1:
                row |= dict(zip(("first_quartile_s", "median_s", "third_quartile_s"), cell.quartiles(), strict=True))
            rows.append(row)
        facts = {"machine": machine(), "versions": versions(), "load_before": self.load, "seconds": self.seconds}
        return {**facts, "cells": rows}


def _shown(cell: Cell) -> str:
    if len(cell.rounds) < 2:
        return cell.trouble or "not measured"
    first, median, third = (_digits(1000 * seconds) for seconds in cell.quartiles())
    return f"**{median}** ({first}–{third})" + (f"; then {cell.trouble}" if cell.trouble else "")  # noqa: RUF001


def _digits(value: float) -> str:
    """Three of them."""
    return (
        f"{value:.3f}"
        if value < 1
        else f"{value:.2f}"
        if value < 10
        else f"{value:.1f}"
        if value < 100
        else f"{value:.0f}"
    )


def _span(counts: list[int]) -> str:
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

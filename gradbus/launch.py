"""One run from start to end: folder, processes, view, summary. What `gradbus cluster` and `gradbus ps` do."""

import fcntl
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gradbus import __version__
from gradbus.policy import Limits
from gradbus.records import RunFolder, RunFolderError, create, find, now_utc
from gradbus.settings import Settings, SettingsError, difference, dump, experiment, load
from gradbus.supervise import CHILD, Failure, Result, Supervisor
from gradbus.view import View, command_name, duration, numbers, shown
from gradbus.wording import plural

TABLE_LINES = 20


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run to be continued. checkpoint: one checkpoint's folder, or that of all of them."""

    run: RunFolder
    checkpoint: Path
    settings: Settings


def resume(where: str, config: Path | None, overrides: Sequence[str]) -> Resumption:
    """What `--resume where` continues: `latest`, a run folder, or one checkpoint in a run folder.

    The settings are those of the run, or of `config` if given, with the overrides on top. Raises, with one line,
    RunFolderError if there is nothing to resume and SettingsError if it would be another experiment.
    """
    runs_dir = Path(load(config, [text for text in overrides if text.startswith("run.")]).run.dir)
    path = Path(where).resolve()
    if path.parent.name == "checkpoints" and path.is_dir():
        run, checkpoint = find(str(path.parents[1]), runs_dir), path
    else:
        run = find(where, runs_dir)
        checkpoint = run.checkpoints
        if not any(checkpoint.glob("version_*")):
            raise RunFolderError(f"{shown(run.path)} has no checkpoint to resume from; start it again without --resume")
    before, now = load(run.config), load(config or run.config, overrides)
    changed = difference(experiment(now), experiment(before))
    if changed is not None:
        raise SettingsError(
            f"--resume {where}: {changed}, in {shown(run.config)}; that is another experiment: run it without --resume"
        )
    return Resumption(run, checkpoint, now)


def launch(
    settings: Settings,
    overrides: Sequence[str],
    *,
    resumption: Resumption | None = None,
    child: Sequence[str] = CHILD,
    limits: Limits | None = None,
) -> int:
    """Run the PS, the evaluator and `cluster.workers` workers to the end; returns the exit code.

    Raises RunFolderError, before any process is started, if the run folder cannot be written or is in use.
    """
    run = resumption.run if resumption else create(settings, overrides)
    begun = time.monotonic()
    with _sole_use(run), View(run, settings, version=__version__) as view:
        if resumption is not None:
            _reopen(run, settings, overrides)
        result = Supervisor(
            run,
            view,
            workers=settings.cluster.workers,
            evaluator=settings.eval.enabled,
            restarts=settings.cluster.restarts,
            threads=settings.train.threads,
            resume=resumption.checkpoint if resumption else None,
            faults=_happened(run, settings, overrides) if resumption else (),
            child=child,
            limits=limits,
        ).run()
        if settings.faults:
            run.update_manifest(faults_happened=[settings.faults[index] for index in sorted(result.faults)])
        summary = summarize(run, settings, result, time.monotonic() - begun)
        try:
            run.write_summary(summary)
        except OSError as error:
            view.note(f"summary.json was not written: {error}")
    view.end(last_lines(run, summary, result))
    return result.outcome.exit_code


def summarize(run: RunFolder, settings: Settings, result: Result, wall_seconds: float) -> dict[str, Any]:
    """The content of summary.json. `eval` is of the last version that was evaluated, `eval_version`; `wall_seconds`
    and `restarts` are of this launch, `examples_per_second` of the last life of the PS."""
    known = {**result.progress, **result.finished}
    if not result.finished and (made := run.updates()):  # reports are now and then, the ledger knows
        known["version"] = max(made)
    evaluated = max(result.evaluations, default=None)
    return {
        "name": settings.name,
        "status": result.outcome.status,
        "reason": result.outcome.reason,
        "exit_code": result.outcome.exit_code,
        "version": known.get("version"),
        "loss": known.get("loss"),
        "eval": result.evaluations[evaluated].get("eval") if evaluated is not None else None,
        "eval_version": evaluated,
        "params_sha256": known.get("params_sha256"),
        "examples_per_second": known.get("examples_per_second"),
        "wall_seconds": wall_seconds,
        "workers": known.get("workers", settings.cluster.workers),
        "restarts": result.restarts,
        "refused": known.get("refused", {}),
        "faults_never_happened": [text for index, text in enumerate(settings.faults) if index not in result.faults],
        "failures": [{"name": f.name, "time": f.time, "reason": f.reason, "answer": f.answer} for f in result.failures],
    }


def last_lines(run: RunFolder, summary: dict[str, Any], result: Result) -> list[RenderableType]:
    """What is left on the screen: how it ended, the numbers, where things are, what to type next."""
    status, reason = summary["status"], summary["reason"]
    style = {"done": "bold green", "interrupted": "bold yellow"}.get(status, "bold red")
    lines: list[RenderableType] = [Text(f"{status}: {reason}" if reason else status, style=style)]
    if status == "failed" and not result.outcome.explained and result.failures:
        lines.append(failure_table(result.failures))
    if summary["exit_code"] == 2 and not summary["version"]:
        return lines  # nothing was trained: the line says all
    lines += [Text(line) for line in _numbers(summary)]
    lines += [
        Text(f"run folder: {shown(run.path)}"),
        Text("next:"),
        *(Text(f"  {line}") for line in _next(run, status)),
    ]
    return lines


def failure_table(failures: Sequence[Failure]) -> RenderableType:
    """Root cause first: who, where, how it ended, its last words, and what the run did about it."""
    table = Table(title="what went wrong, first failure first", title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for failure in failures:
        facts = {
            "process": f"{failure.name} on {failure.host}, pid {failure.pid}, at {failure.time}",
            "ended": failure.reason,
            "so": failure.answer,
            "last lines": "\n".join(failure.tail[-TABLE_LINES:]),
            "log": shown(failure.log),
        }
        for label, text in facts.items():
            table.add_row(label, Text(text))
        table.add_section()
    return table


def _numbers(summary: dict[str, Any]) -> list[str]:
    lines = []
    if summary["version"] is not None:
        parts = [f"version {summary['version']}", f"in {duration(summary['wall_seconds'])}"]
        if isinstance(summary["loss"], float):
            parts.append(f"loss {summary['loss']:.4f}")
        if summary["examples_per_second"] is not None:
            parts.append(f"{summary['examples_per_second']:,.0f} examples/s")
        lines.append(", ".join([*parts, plural(summary["workers"], "worker")]))
    if summary["eval"]:
        old = "" if summary["eval_version"] == summary["version"] else f" (of version {summary['eval_version']})"
        lines.append(f"evaluation: {numbers(summary['eval'])}{old}")
    elif summary["status"] == "done":
        lines.append("evaluation: none")
    refused = summary["refused"] or {}
    if refused:
        reasons = ", ".join(f"{count} x {why}" for why, count in refused.items())
        lines.append(f"refused, and so without effect on the weights: {reasons}")
    if summary["params_sha256"]:
        lines.append(f"params_sha256: {summary['params_sha256']}")
    lines += [f"on purpose, but never happened: {text}" for text in summary["faults_never_happened"]]
    return lines


def _next(run: RunFolder, status: str) -> list[str]:
    command, folder = command_name(), shown(run.path)
    lines = [f"{command} explain {folder}", f"{command} audit {folder}"]
    if status == "done":
        lines += [f"{command} eval {folder}", f"{command} cluster --resume {folder} train.steps=N   (train on)"]
    elif any(run.checkpoints.glob("version_*")):
        lines.append(f"{command} cluster --resume {folder}")
    if importlib.util.find_spec("tensorboard") is not None:
        lines.append(f"tensorboard --logdir {folder}")
    return lines


def _happened(run: RunFolder, settings: Settings, overrides: Sequence[str]) -> set[int]:
    """Positions of the faults that an earlier launch has seen happen; none if they are asked for anew."""
    if any(override.startswith("faults") for override in overrides):
        return set()
    seen = run.read_manifest().get("faults_happened", [])
    return {index for index, text in enumerate(settings.faults) if text in seen}


def _reopen(run: RunFolder, settings: Settings, overrides: Sequence[str]) -> None:
    try:
        run.write_config(dump(settings), overrides)
        run.summary.unlink(missing_ok=True)  # of the life before; this one writes its own at its end
    except OSError as error:
        raise RunFolderError(f"cannot write into {shown(run.path)}: {error.strerror or error}") from error
    earlier = run.read_manifest().get("resumed", [])
    run.update_manifest(resumed=[*earlier, {"time": now_utc(), "argv": sys.argv, "host": socket.gethostname()}])


@contextmanager
def _sole_use(run: RunFolder) -> Iterator[None]:
    """Keep a second launcher, such as a hasty --resume, out of the folder. The lock ends with this process."""
    try:
        fd = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(f"cannot write into {shown(run.path)}: {error.strerror or error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(f"{shown(run.path)} is in use by a run that is still going on") from None
    else:
        yield
    finally:
        os.close(fd)

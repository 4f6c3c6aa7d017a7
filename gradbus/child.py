"""The processes of a run: `python -m gradbus.child ROLE ...`, started by the launcher, and what `gradbus worker` runs.

Threads are set before JAX is imported: NPROC is the one thing that XLA on the CPU obeys, and it changes bits, so it
comes from the experiment and from nowhere else.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gradbus.records import RunFolder
from gradbus.report import Reporter, lifeline

if TYPE_CHECKING:
    from bus.settings import BusSettings
    from gradbus.injection import Injection
    from gradbus.settings import Settings

EXIT_FAILED, EXIT_USAGE, EXIT_NO_SERVER, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 3, 130, 143
SWITCH_INTERVAL_S = 0.0002  # a loop must not wait for the thread that computes, or saves, to let go of the interpreter
ORPHAN_GRACE_S = 10.0  # once the launcher is gone

log = logging.getLogger("gradbus")


def main(arguments: list[str] | None = None) -> int:
    """Run the role that ``arguments`` name; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gradbus.child")
    roles = parser.add_subparsers(dest="role", required=True)
    for role in ("ps", "evaluator", "eval"):
        each = roles.add_parser(role)
        each.add_argument("run", type=Path)
        if role == "ps":
            each.add_argument("--resume", type=Path)
            each.add_argument("--spent", type=int, nargs="*", default=(), help="positions of faults that are over")
            each.add_argument(
                "--again", action="store_true", help="as before a crash: same addresses, newest checkpoint"
            )
    each = roles.add_parser("worker")
    each.add_argument("--ps", required=True)
    each.add_argument("--name")
    each.add_argument("--run", type=Path)
    each.add_argument("--spent", type=int, nargs="*", default=())
    options = parser.parse_args(arguments)
    _log_to_stderr()
    _end_with_launcher()
    # Until there is something to end in order, a signal ends the process.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_TERMINATED))
    match options.role:
        case "ps":
            return _told(lambda reporter: _run_ps(options, reporter))
        case "evaluator":
            return _told(lambda reporter: _run_evaluator(options.run, reporter))
        case "eval":
            return run_eval(options.run, None)
        case _:
            settings = _settings(options.run)
            bus, faults = (settings.bus, settings.faults) if settings else (None, [])
            return run_worker(options.ps, options.name, None, bus, faults, options.spent)


def _run_ps(options: argparse.Namespace, reporter: Reporter) -> int:
    from gradbus.settings import load

    run = RunFolder(options.run)
    settings = load(run.config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _set_threads(settings.train.threads, cpu=True)
    from gradbus.build import service
    from gradbus.injection import Injection
    from ps.actions import Finish

    injection = Injection("ps", settings.faults, options.spent, reporter)
    built = service(run, settings, reporter, options.resume, injection, again=options.again)
    server, recorder = built.server, built.recorder
    with _on_signal(lambda code: server.request_stop(), built.sockets.waker.fileno()):
        outcome = server.run()
        unsaved = server.close()  # a signal must not end this
    built.sockets.close()
    recorder.close()
    if unsaved and outcome.status == "done":
        outcome = Finish("failed", f"{outcome.reason}, but not saved: {unsaved}", EXIT_FAILED)
    reporter.event(
        "finished",
        status=outcome.status,
        reason=outcome.reason,
        version=server.machine.version,
        loss=server.loss,
        params_sha256=server.parameters_sha256(),
        examples_per_second=recorder.examples_per_second,
        workers=recorder.workers,
        refused=server.machine.refused,
        exit_code=outcome.exit_code,
    )
    return outcome.exit_code


def run_worker(
    address: str,
    name: str | None,
    data_dir: str | None,
    bus: "BusSettings | None" = None,
    faults: Sequence[str] = (),
    spent: Sequence[int] = (),
) -> int:
    """Join the PS at ``address`` and work until the run is over. The exit code; 0 when the PS said that it is over.

    ``faults``: see gradbus.injection.
    """
    _log_to_stderr()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy only adds and copies here
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def run(reporter: Reporter) -> int:
        from gradbus.injection import Injection

        injection = Injection(name or "", faults, spent, reporter)
        return _run_worker(address, name, data_dir, bus, injection, reporter)

    code = _told(run)
    _leave_at_once(code)
    return code


def _run_worker(
    address: str,
    name: str | None,
    data_dir: str | None,
    bus: "BusSettings | None",
    injection: "Injection",
    reporter: Reporter,
) -> int:
    def note(text: str) -> None:
        log.info("%s", text)
        reporter.event("note", text=text)

    from gradbus.build import worker

    client, sockets = worker(address, name, data_dir, bus, note, injection)
    with _on_signal(client.request_stop, sockets.waker.fileno()):
        outcome = client.run()
    sockets.close(linger=outcome.exit_code == EXIT_USAGE)  # for the reason to arrive; a goodbye is acknowledged
    if outcome.exit_code in (0, EXIT_INTERRUPTED, EXIT_TERMINATED):
        log.info("%s", outcome.reason)
        reporter.event("left")
    else:
        log.error("%s", outcome.reason)
        kind = "connect" if outcome.exit_code == EXIT_NO_SERVER else "workload"
        reporter.event("failed", kind=kind, reason=outcome.reason)
    return outcome.exit_code


def _run_evaluator(folder: Path, reporter: Reporter) -> int:
    from gradbus.settings import load

    run = RunFolder(folder)
    settings = load(run.config)
    _set_threads(settings.train.threads, cpu=True)
    with contextlib.suppress(OSError):  # evaluation takes what training leaves
        os.nice(10)
    from bus.messages import Evaluate, Stop
    from bus.sockets import ObserverSockets

    address = run.read_manifest()["addresses"]["weights"]
    sockets = ObserverSockets(address, settings.bus, (Evaluate.kind, Stop.kind), settings.bus.bucket_bytes)
    from gradbus.build import observer  # JAX, after the subscription: nothing is missed meanwhile

    watcher = observer(run, settings, reporter, sockets)
    with _on_signal(lambda code: watcher.request_stop(), sockets.waker.fileno()):
        watcher.run()
    sockets.close()
    return 0


def run_eval(folder: Path, version: int | None) -> int:
    """Evaluate a checkpoint of the run in ``folder``, the newest by default; print the result, and report it."""
    return _told(lambda reporter: _run_eval(folder, version, reporter))


def _run_eval(folder: Path, version: int | None, reporter: Reporter) -> int:
    from gradbus.records import Metrics
    from gradbus.settings import load

    run = RunFolder(folder)
    settings = load(run.config)
    _set_threads(settings.train.threads, cpu=True)
    from gradbus.build import evaluate_checkpoint
    from ps import checkpoint as checkpoints

    path = run.checkpoints / f"version_{version:06d}" if version is not None else None
    if path is None:
        path, passed_over = checkpoints.newest(run.checkpoints)
        for line in passed_over:
            log.warning("%s", line)
    if path is None or not path.is_dir():
        there = ", ".join(sorted(each.name for each in run.checkpoints.glob("version_*"))) or "none"
        raise checkpoints.CheckpointError(f"{run.checkpoints}: no such checkpoint; there are: {there}")
    saved = checkpoints.load(path)
    result = evaluate_checkpoint(settings, saved)
    metrics = Metrics(run.metrics, events=run.path / "eval")
    metrics.append({"version": saved.version, "eval": result})
    metrics.close()
    print(f"version {saved.version}: " + ", ".join(f"{name} = {value:.4f}" for name, value in result.items()))
    reporter.event("evaluated", version=saved.version, eval=result, seconds=None)
    return 0


def _told(run: Callable[[Reporter], int]) -> int:
    """The exit code of ``run``. What ends it before its time is told in one line, to the launcher and in the log."""
    reporter = Reporter()
    try:
        return run(reporter)
    except Exception as error:
        from gradbus.build import kind_of, one_line

        kind = kind_of(error)
        log.error("%s", one_line(error), exc_info=kind == "internal")
        reporter.event("failed", kind=kind, reason=one_line(error))
        return EXIT_FAILED if kind == "internal" else EXIT_USAGE
    finally:
        reporter.close()


def _settings(folder: Path | None) -> "Settings | None":
    """Of the run in ``folder``, as a worker on the same machine may have them."""
    from gradbus.settings import load

    return load(RunFolder(folder).config) if folder else None


def _set_threads(threads: int, *, cpu: bool) -> None:
    os.environ["NPROC"] = str(threads)
    if cpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("jax").setLevel(logging.WARNING)


@contextlib.contextmanager
def _on_signal(stop: Callable[[int], None], wakeup_fd: int) -> Iterator[None]:
    """SIGINT and SIGTERM ask for an orderly end, and wake whatever waits; before and after they end the process."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop(128 + number)

    older = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        signal.set_wakeup_fd(older)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_launcher() -> None:
    """Once the launcher is gone: an orderly end if it can be had in time, an end in any case."""

    def end() -> None:
        log.error("the launcher is gone; ending")
        threading.Timer(ORPHAN_GRACE_S, os._exit, (EXIT_FAILED,)).start()
        os.kill(os.getpid(), signal.SIGTERM)

    lifeline(end)


def _leave_at_once(exit_code: int) -> None:
    """The computing thread may be deep in XLA: the interpreter must not wait for it, nor tear JAX down under it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main())

"""The command line. Thin: arguments in, one call, an exit code out; what is heavy is imported inside the commands.

Exit codes: 0 done; 1 training failed; 2 usage, settings, data or workload; 3 too few workers, no PS, a time limit;
130 Ctrl-C; 143 SIGTERM.
"""

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import gradbus

if TYPE_CHECKING:
    from gradbus.records import RunFolder

app = typer.Typer(
    name="gradbus",
    help="Data-parallel training over a ZeroMQ parameter server.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file that says what differs from the defaults, and settings that differ from both.",
        show_default=False,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="latest|PATH", help="Continue this run, or one checkpoint of it.", show_default=False
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or `latest`.")]


class UsageError(Exception):
    """The command line makes no sense; the text is one line."""


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error comes from (or GRADBUS_TRACEBACK=1).")
    ] = False,
) -> None:
    if show_traceback:
        os.environ["GRADBUS_TRACEBACK"] = "1"
    if version:
        print(f"gradbus {gradbus.__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def cluster(
    arguments: Arguments = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-n", metavar="N", help="Workers on this machine, for cluster.workers=N.", show_default=False
        ),
    ] = None,
    resume: Resume = None,
) -> int:
    """Train on this machine: a parameter server, its workers, an evaluator."""
    return _launch(arguments, resume, [] if workers is None else [f"cluster.workers={workers}"])


@app.command()
def ps(arguments: Arguments = None, resume: Resume = None) -> int:
    """Start the parameter server alone; workers come by themselves."""
    return _launch(arguments, resume, ["cluster.workers=0"])


@app.command()
def worker(
    ps: Annotated[str, typer.Option("--ps", metavar="HOST[:PORT]", help="Address of the parameter server.")],
    name: Annotated[str | None, typer.Option(help="How this worker is called in logs.", show_default=False)] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Where the dataset lies on this machine.", show_default=False)
    ] = None,
    connect_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to look for the parameter server.")
    ] = 60.0,
) -> int:
    """Join a run: the experiment comes from the parameter server."""
    from bus.settings import BusSettings
    from gradbus.child import run_worker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("jax").setLevel(logging.WARNING)
    return run_worker(ps, name, data_dir, BusSettings(connect_timeout_s=connect_timeout))


@app.command("eval")
def evaluate(
    run: Run,
    version: Annotated[
        int | None, typer.Option(metavar="N", help="The newest checkpoint if not given.", show_default=False)
    ] = None,
) -> int:
    """Evaluate a checkpoint of a run."""
    folder = _find(run)
    from gradbus.child import run_eval

    return run_eval(folder.path, version)


@app.command()
def explain(
    run: Run,
    version: Annotated[int | None, typer.Argument(help="One version of the weights.", show_default=False)] = None,
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="What became of this worker's work.", show_default=False)
    ] = None,
) -> int:
    """Tell where and when the weights were updated."""
    folder = _find(run)
    from gradbus.explain import explain_run, explain_version

    with _one_line():
        print(explain_run(folder, worker) if version is None else explain_version(folder, version, worker))
    return 0


@app.command()
def audit(run: Run) -> int:
    """Prove from the ledger that every sample was used exactly once."""
    folder = _find(run)
    from gradbus.audit import Violation
    from gradbus.audit import audit as prove

    with _one_line():
        try:
            print(prove(folder))
        except Violation as violation:
            print(f"violation: {violation}")
            return 1
    return 0


def main() -> NoReturn:
    """The `gradbus` command."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # such as `gradbus explain RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        code = 1
    finally:
        sys.excepthook = _unexpected  # now, because typer sets one of its own
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Carry out a command line. What the user can mend is one line on stderr, and the exit code 2."""
    try:
        code = app(arguments, prog_name="gradbus", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(_usage(error), error.exit_code)
    except UsageError as error:
        return _complain(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def split(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """CONFIG and the overrides. Raises UsageError for a first argument that is neither."""
    if not arguments or "=" in arguments[0]:
        return None, list(arguments or [])
    config = Path(arguments[0])
    if config.suffix not in (".yaml", ".yml") and not config.is_file():
        raise UsageError(f"expected a settings file (.yaml) or key=value, got {arguments[0]!r}")
    return config, arguments[1:]


def _launch(arguments: list[str] | None, where: str | None, implied: list[str]) -> int:
    config, overrides = split(arguments)
    overrides += implied
    with _one_line():
        from gradbus.launch import launch, resume
        from gradbus.settings import load

        resumption = resume(where, config, overrides) if where is not None else None
        settings = resumption.settings if resumption else load(config, overrides)
        return launch(settings, overrides, resumption=resumption)


@contextmanager
def _one_line() -> Iterator[None]:
    """Faults of settings and folders are the user's to mend."""
    from gradbus.records import RunFolderError
    from gradbus.settings import SettingsError

    try:
        yield
    except (RunFolderError, SettingsError) as error:
        raise UsageError(str(error)) from error


def _find(where: str) -> "RunFolder":
    from gradbus.records import find
    from gradbus.settings import SettingsError, load

    try:
        runs = Path(load(None).run.dir)
    except SettingsError:
        runs = Path("runs")  # a broken config.yaml must not hide a run
    with _one_line():
        return find(where, runs)


def _usage(error: typer.TyperException) -> str:
    command = getattr(getattr(error, "ctx", None), "command_path", "gradbus")
    text = " ".join(error.format_message().split()).rstrip(".")
    return f"{text}; see: {command} --help"


def _complain(text: str, exit_code: int) -> int:
    print(f"gradbus: {text}", file=sys.stderr)
    return exit_code


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A line for people; the traceback on request, otherwise in a file. Python then exits with 1."""
    lines = traceback.format_exception(kind, error, trace)
    if os.environ.get("GRADBUS_TRACEBACK", "0") not in ("", "0"):
        print("".join(lines), file=sys.stderr)
        return
    with tempfile.NamedTemporaryFile("w", prefix="gradbus-", suffix=".txt", delete=False) as file:
        file.writelines(lines)
    reason = " ".join(f"{kind.__name__}: {error}".split())
    _complain(f"unexpected error, {reason}; the traceback is in {file.name}, or again with: gradbus --traceback ...", 1)

"""The command line: quick help, and one line with an exit code for everything a person may mistype."""

import os
import subprocess
import sys
import time

import pytest

from gradbus import cli
from gradbus.records import create
from gradbus.settings import load


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory: no config.yaml, no runs."""
    monkeypatch.chdir(tmp_path)


def gradbus(*arguments, **environment):
    command = [sys.executable, "-m", "gradbus", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, env={**os.environ, **environment}, check=False
    )


def test_help_is_quick():
    """Half a second is the promise; the best of five, since the machine may be busy."""

    def once() -> float:
        begun = time.monotonic()
        result = gradbus("--help")
        assert result.returncode == 0 and "explain" in result.stdout
        return time.monotonic() - begun

    assert min(once() for _ in range(5)) < 0.5


@pytest.mark.parametrize("module", ["gradbus", "gradbus.cli", "gradbus.supervise", "gradbus.launch", "gradbus.explain"])
def test_the_launcher_loads_neither_jax_nor_zeromq(module):
    code = f"import {module}, sys; print(*sorted({{'jax', 'zmq', 'numpy', 'optax'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == ""


def test_the_command_line_alone_loads_nothing_heavy():
    code = "import gradbus.cli, sys; print(*sorted({'omegaconf', 'msgspec', 'rich', 'yaml'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "No such command 'nonsense'; see: gradbus --help"),
        ("worker", "Missing option '--ps'; see: gradbus worker --help"),
        (
            "cluster --sesume latest",
            "No such option: --sesume (Possible options: --resume); see: gradbus cluster --help",
        ),
        ("cluster stpes", "expected a settings file (.yaml) or key=value, got 'stpes'"),
        ("cluster mine.yaml", "mine.yaml: expected a settings file, got nothing there; write the path of a YAML file"),
        (
            "cluster train.stpes=3",
            "command line, train.stpes: expected a known key, got 'stpes'; did you mean train.steps?",
        ),
        (
            "cluster train.steps=ten",
            "command line, train.steps: expected a whole number of at least 1 and at most 1000000000000, "
            "got the text 'ten'; the default is 400",
        ),
        (
            "cluster seed=1 train.steps",
            "command line: expected key=value, got 'train.steps'; write, for example, train.steps=100",
        ),
        ("cluster --resume latest", "there is no latest run in {here}/runs; start one with: gradbus cluster"),
        ("ps --resume nowhere", "nowhere is not a run folder: there is no nowhere/config.yaml"),
        ("eval latest", "there is no latest run in {here}/runs; start one with: gradbus cluster"),
        ("explain nowhere 3", "nowhere is not a run folder: there is no nowhere/config.yaml"),
    ],
)
def test_what_is_mistyped_is_told_in_one_line(line, message, tmp_path, capsys):
    assert cli.run(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"gradbus: {message.format(here=tmp_path)}\n"
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file")
    assert cli.run(["cluster"]) == 2
    assert capsys.readouterr().err == (
        f"gradbus: run.dir: cannot write a run folder in {tmp_path}/runs: File exists; "
        "choose another place with run.dir=PATH\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (None, [])),
        (["a.yaml"], ("a.yaml", [])),
        (["a.yml", "seed=1"], ("a.yml", ["seed=1"])),
        (["seed=1", "name=x"], (None, ["seed=1", "name=x"])),
        (["present", "seed=1"], ("present", ["seed=1"])),
    ],
)
def test_the_settings_file_is_the_first_argument(tmp_path, arguments, expected):
    (tmp_path / "present").write_text("")
    config, overrides = cli.split(arguments)
    assert (str(config) if config else None, overrides) == expected


def test_the_version():
    result = gradbus("--version")
    assert result.returncode == 0 and result.stdout.startswith("gradbus ")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["cluster", "-h"], ["worker", "--help"]])
def test_help(arguments, capsys):
    assert cli.run(arguments) == 0
    assert "Usage: gradbus" in capsys.readouterr().out


def test_explain_reads_a_run_folder(tmp_path, capsys):
    run = create(load(None), [])
    run.make_latest()
    assert cli.run(["explain", "latest"]) == 0
    assert "No update has been made yet" in capsys.readouterr().out
    assert cli.run(["explain", str(run.path), "7"]) == 2
    assert (
        capsys.readouterr().err
        == f"gradbus: version 7 is not in the ledger of {run.path.name}, which has no update yet\n"
    )


@pytest.fixture
def broken(tmp_path):
    """A run folder with a fault that nobody expects."""
    run = create(load(None), [])
    run.summary.mkdir()
    return run


def test_an_unexpected_error_is_one_line_and_a_file(broken):
    result = gradbus("explain", str(broken.path), TMPDIR=str(broken.path))
    assert result.returncode == 1
    (file,) = broken.path.glob("gradbus-*.txt")
    assert result.stderr == (
        f"gradbus: unexpected error, IsADirectoryError: [Errno 21] Is a directory: '{broken.summary}'; "
        f"the traceback is in {file}, or again with: gradbus --traceback ...\n"
    )
    assert "Traceback" in file.read_text()


@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_traceback_on_request(broken, how):
    option, environment = (["--traceback"], {}) if how == "option" else ([], {"GRADBUS_TRACEBACK": "1"})
    result = gradbus(*option, "explain", str(broken.path), **environment)
    assert result.returncode == 1 and "Traceback" in result.stderr


def test_ctrl_c_shows_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_launch", interrupted)
    assert cli.run(["cluster"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(tmp_path):
    create(load(None), []).make_latest()
    command = f"{sys.executable} -m gradbus explain latest | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    assert result.stderr == ""

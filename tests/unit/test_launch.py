"""A run from start to end with stand-ins for the processes: what is printed, what lies in the folder, resuming."""

import fcntl
import json
import sys
from pathlib import Path

import pytest

from gradbus.launch import Resumption, launch, resume
from gradbus.policy import Limits
from gradbus.records import RunFolder, RunFolderError, find
from gradbus.settings import SettingsError, load

FAKE = (sys.executable, "-S", "-E", str(Path(__file__).with_name("fake_child.py")))
LIMITS = Limits(kill_s=0.3, leave_s=5, evaluator_s=5, backoff_s=0.05)
FINISHED = {
    "status": "done",
    "reason": "",
    "version": 40,
    "loss": 0.125,
    "params_sha256": "ab" * 32,
    "examples_per_second": 5123.4,
    "workers": 1,
    "refused": {"late": 2},
    "exit_code": 0,
}
PROGRESS = {
    "version": 1,
    "steps": 40,
    "loss": 2.5,
    "loss_average": 2.5,
    "examples_per_second": 1000.0,
    "seconds_per_step": 0.128,
    "members": [{"member": 1, "name": "w0", "host": "vm", "doing": "computing", "ready": True, "shards": 4}],
}
LISTENING = ["report", "listening", {"control": "tcp://127.0.0.1:4711", "session": "00ab"}]
GOOD = {
    "ps": [
        [
            LISTENING,
            ["until", "enough"],
            ["until", "watched"],
            ["report", "progress", PROGRESS],
            ["report", "finished", FINISHED],
            ["touch", "over"],
        ]
    ],
    "w0": [[["touch", "enough"], ["until", "over"], ["report", "left", {}]]],
    "evaluator": [
        [["touch", "watched"], ["until", "over"], ["report", "evaluated", {"version": 40, "eval": {"accuracy": 0.973}}]]
    ],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def scenario(**lives) -> None:
    Path("runs").mkdir(exist_ok=True)
    Path("runs/scenario.json").write_text(json.dumps(GOOD | lives))


def start(*overrides, resumption=None) -> int:
    settings = resumption.settings if resumption else load(None, ["cluster.workers=1", *overrides])
    return launch(settings, overrides, resumption=resumption, child=FAKE, limits=LIMITS)


def latest() -> RunFolder:
    return find("latest", Path("runs"))


def test_what_a_good_run_leaves_and_says(capsys):
    scenario()
    assert start("seed=3") == 0
    run = latest()
    summary = run.read_summary()
    assert 0 < summary.pop("wall_seconds") < 60
    assert summary == {
        "name": "digits",
        "status": "done",
        "reason": "",
        "exit_code": 0,
        "version": 40,
        "loss": 0.125,
        "eval": {"accuracy": 0.973},
        "eval_version": 40,
        "params_sha256": "ab" * 32,
        "examples_per_second": 5123.4,
        "workers": 1,
        "restarts": 0,
        "refused": {"late": 2},
        "faults_never_happened": [],
        "failures": [],
    }
    lines = capsys.readouterr().out.splitlines()
    folder = f"runs/{run.path.name}"
    assert lines[0].endswith("digits, 400 steps of 128 examples in 4 shards")
    assert f"  run folder    {folder}" in lines
    assert "  repeats with  seed 3, 1 thread per process" in lines
    assert any(line.endswith("gradbus worker --ps tcp://127.0.0.1:4711") for line in lines)
    assert "step 1, loss = 2.5000 (1000.0 examples/sec; 0.128 sec/batch), of 40, 1 worker" in lines
    end = lines[lines.index("done") :]
    assert end[1:4] == [
        "version 40, in 0:00, loss 0.1250, 5,123 examples/s, 1 worker",
        "evaluation: accuracy 0.9730",
        "refused, and so without effect on the weights: 2 x late",
    ]
    assert end[4] == f"params_sha256: {'ab' * 32}"
    assert f"run folder: {folder}" in end and "next:" in end
    for command in (
        f"explain {folder}",
        f"audit {folder}",
        f"eval {folder}",
        f"cluster --resume {folder} train.steps=N",
    ):
        assert any(f"gradbus {command}" in line for line in end)


def test_a_failed_run_shows_the_root_cause(capsys):
    crash = [LISTENING, ["report", "progress", PROGRESS], ["print", "what it said last"], ["die", 11]]
    scenario(ps=[crash])
    assert start() == 1
    summary = latest().read_summary()
    assert summary["status"] == "failed" and summary["version"] == 1 and summary["eval"] is None
    assert summary["failures"][0]["name"] == "ps"
    out = capsys.readouterr().out
    assert "cluster --resume" not in out, "there is no checkpoint"
    for text in ("killed by SIGSEGV", "what it said last", "logs/ps.log", "pid ", "the run was ended"):
        assert text in out


@pytest.mark.parametrize("kind", ["settings", "data", "workload", "bind"])
def test_what_the_user_can_mend_is_one_line(capsys, kind):
    scenario(
        ps=[[["print", "Traceback"], ["report", "failed", {"kind": kind, "reason": "no such file: x"}], ["exit", 2]]]
    )
    assert start() == 2
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "failed: no such file: x"
    assert "Traceback" not in out and "next:" not in out
    (folder,) = Path("runs").glob("*-digits")
    assert RunFolder(folder).read_summary()["status"] == "failed"
    assert not Path("runs/latest").exists(), "it never began"


def test_a_run_is_resumed_in_its_folder(capsys):
    scenario()
    assert start("seed=3", "train.steps=40") == 0
    run = latest()
    (run.checkpoints / "version_000040").mkdir(parents=True)
    resumption = resume("latest", None, ["train.steps=80", "cluster.workers=1"])
    assert resumption == Resumption(run, run.checkpoints, resumption.settings)
    assert (resumption.settings.train.steps, resumption.settings.seed) == (80, 3)
    assert start("train.steps=80", resumption=resumption) == 0
    assert latest() == run, "no new folder"
    again = json.loads((run.path / "started-ps-1").read_text())
    assert again["argv"] == ["ps", str(run.path), "--resume", str(run.checkpoints)]
    assert load(run.config).train.steps == 80
    assert len(run.read_manifest()["resumed"]) == 1
    assert run.read_summary()["status"] == "done"


def test_the_summary_of_a_resumed_run_is_that_of_its_last_life():
    scenario()
    start()
    run = latest()
    (run.checkpoints / "version_000040").mkdir(parents=True)
    failing = [LISTENING, ["report", "failed", {"kind": "data", "reason": "gone"}], ["exit", 2]]
    scenario(ps=[failing])
    assert run.read_summary()["status"] == "done"
    assert start(resumption=resume("latest", None, [])) == 2
    assert run.read_summary()["reason"] == "gone"


def test_faults_that_happened_are_over_when_the_run_goes_on_and_others_are_told(capsys):
    happens = [LISTENING, ["report", "fault", {"index": 1, "text": "ps: SIGTERM at 1 s"}], *GOOD["ps"][0][1:]]
    scenario(ps=[happens])
    assert start('faults=["w0: SIGKILL at version 30", "ps: SIGTERM at 1 s"]') == 0
    assert "on purpose, but never happened: w0: SIGKILL at version 30" in capsys.readouterr().out.splitlines()
    run = latest()
    assert run.read_summary()["faults_never_happened"] == ["w0: SIGKILL at version 30"]
    (run.checkpoints / "version_000040").mkdir(parents=True)
    assert start(resumption=resume("latest", None, [])) == 0
    assert json.loads((run.path / "started-ps-1").read_text())["argv"][-2:] == ["--spent", "1"]


def test_one_checkpoint_can_be_named():
    scenario()
    start()
    checkpoint = latest().checkpoints / "version_000040"
    checkpoint.mkdir()
    assert resume(str(checkpoint), None, []).checkpoint == checkpoint
    assert resume(str(checkpoint), None, []).run == latest()


def test_another_experiment_is_not_resumed():
    scenario()
    start("seed=3")
    (latest().checkpoints / "version_000040").mkdir()
    with pytest.raises(SettingsError) as caught:
        resume("latest", None, ["seed=4"])
    assert str(caught.value) == (
        f"--resume latest: seed is 4 here and 3 there, in runs/{latest().path.name}/config.yaml; "
        "that is another experiment: run it without --resume"
    )


def test_nothing_to_resume():
    scenario()
    start()
    with pytest.raises(RunFolderError) as caught:
        resume("latest", None, [])
    assert str(caught.value) == (
        f"runs/{latest().path.name} has no checkpoint to resume from; start it again without --resume"
    )


def test_the_same_command_again_with_resume():
    Path("mine.yaml").write_text("name: mine\nseed: 5\n")
    scenario()
    settings = load(Path("mine.yaml"), ["cluster.workers=1"])
    launch(settings, [], child=FAKE, limits=LIMITS)
    (latest().checkpoints / "version_000040").mkdir()
    assert resume("latest", Path("mine.yaml"), ["train.steps=50"]).settings.train.steps == 50


def test_a_run_that_still_goes_on_is_left_alone():
    scenario()
    start()
    run = latest()
    (run.checkpoints / "version_000040").mkdir()
    before = run.config.read_bytes()
    with (run.path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="is in use by a run that is still going on"):
            start(resumption=resume("latest", None, ["train.steps=999"]))
    assert run.config.read_bytes() == before and run.read_summary()["status"] == "done"

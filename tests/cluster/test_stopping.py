"""Ctrl-C, SIGTERM and SIGKILL to each process: the exit code, what is left, and the bits of what goes on from there."""

import os
import re

import pytest

from gradbus.records import RunFolder
from ps import checkpoint as checkpoints

pytestmark = pytest.mark.cluster

EXPERIMENT = ("workload=paced.py:Paced", "name=paced", "train.steps=60", "eval.enabled=false")
PACE_S = 0.03  # with 4 shards and 2 workers about 0.06 s a step


@pytest.fixture(autouse=True)
def workload(place):
    place.add("paced.py")


def newest_checkpoint(place) -> int:
    """The version of the newest one, which must be whole, as all others."""
    path, passed_over = checkpoints.newest(RunFolder(place.latest).checkpoints)
    assert path is not None and passed_over == []
    return checkpoints.load(path).version


@pytest.mark.timeout(120)
def test_stopped_and_killed_at_every_moment_and_resumed_each_time_it_has_the_bits_of_the_plain_loop(place, plain_loop):
    # Ctrl-C on a terminal, while the workers are compiling for longer than anybody wants to wait.
    run = place.start("cluster", *EXPERIMENT, "checkpoint.every=10", terminal=True, HOLD_TRACE_S=60)
    run.until((place.path / "tracing").exists, "compilation")
    run.popen.stdin.write(b"\x03")
    run.popen.stdin.flush()
    assert run.wait(15) == 130, run.output
    assert "interrupted: asked to stop at version 0" in run.output
    assert place.summary()["status"] == "interrupted" and newest_checkpoint(place) == 0
    place.nothing_left()

    # SIGINT to the whole foreground group in the middle of a step: the step is finished, and kept.
    run = place.start("cluster", "--resume", "latest", PACE_S=PACE_S)
    run.until_version(5)
    run.interrupt_group()
    assert run.wait(15) == 130, run.output
    stopped_at = place.summary()["version"]
    assert place.ledger("update")[-1]["version"] == stopped_at == newest_checkpoint(place) >= 5
    assert f"interrupted: asked to stop at version {stopped_at}" in run.output
    assert f"cluster --resume runs/{place.latest.name}" in run.output.splitlines()[-1]
    place.nothing_left()

    # SIGINT while a checkpoint is being written.
    run = place.start("cluster", "--resume", "latest", "checkpoint.every=1", PACE_S=PACE_S)
    run.until_version(stopped_at + 3)
    run.until(lambda: any((place.latest / "checkpoints").glob(".saving-*")), "checkpoint that is being written")
    run.interrupt_group()
    assert run.wait(15) == 130, run.output
    assert f"resumed at version {stopped_at}" in run.output
    assert newest_checkpoint(place) == place.summary()["version"] >= stopped_at + 3
    stopped_at = place.summary()["version"]
    place.nothing_left()

    # SIGKILL to the parameter server while it writes one, where it is not to be started again.
    run = place.start("cluster", "--resume", "latest", "checkpoint.every=1", "cluster.restarts=0", PACE_S=PACE_S)
    run.until_version(stopped_at + 3)
    server = run.child("ps")
    run.until(lambda: any((place.latest / "checkpoints").glob(".saving-*")), "checkpoint that is being written")
    server.kill()
    assert run.wait(15) == 1, run.output
    assert (
        "failed: the parameter server ended: killed by SIGKILL: likely out of memory, or killed by hand" in run.output
    )
    assert re.search(rf"ps on \S+, pid {server.pid}, at ", run.output)
    assert [failure["name"] for failure in place.summary()["failures"]] == ["ps"]
    place.nothing_left()
    stopped_at = newest_checkpoint(place)

    # SIGKILL to a worker: started again, and the run is none the worse for it.
    run = place.start("cluster", "--resume", "latest", "checkpoint.every=10", "cluster.restarts=3", PACE_S=PACE_S)
    run.until(lambda: {"w0", "w1"} <= {row["name"] for row in run.rows("member") if row["event"] == "ready"}, "w1")
    run.until_version(stopped_at + 2)
    worker = run.child("w1")
    worker.kill()
    assert run.wait(60) == 0, run.output
    assert f"w1 ({os.uname().nodename}, pid {worker.pid}): killed by SIGKILL" in run.output
    summary = place.summary()
    assert summary["restarts"] == 1 and [failure["name"] for failure in summary["failures"]] == ["w1"]
    events = [row["event"] for row in place.ledger("member") if row["pid"] == worker.pid]
    assert events[-1] in ("lost", "replaced")

    assert summary["status"] == "done" and summary["version"] == 60
    assert summary["params_sha256"] == plain_loop("quadratic", 60, 128, 4)


@pytest.mark.timeout(90)
def test_a_killed_parameter_server_is_started_again_and_the_bits_are_the_same(place, plain_loop):
    run = place.start("cluster", *EXPERIMENT, "checkpoint.every=5", PACE_S=PACE_S)
    run.until_version(12)
    address, server = run.address(), run.child("ps")
    server.kill()
    run.until(lambda: len(run.rows("session")) == 2, "second life of the parameter server")
    run.until_line("resumed at version 10")
    assert run.wait(60) == 0, run.output
    assert run.output.count(f"address       {address}") == 2  # where it was: nobody has to look for it
    summary = place.summary()
    assert summary["restarts"] == 1 and [failure["name"] for failure in summary["failures"]] == ["ps"]
    assert {row["name"] for row in place.ledger("member")} == {"w0", "w1"}
    assert place.run("audit", "latest").output.startswith("audit clean: 60 versions")
    assert summary["params_sha256"] == plain_loop("quadratic", 60, 128, 4)
    place.nothing_left()


@pytest.mark.timeout(60)
def test_ctrl_c_while_it_starts(place):
    run = place.start("cluster", *EXPERIMENT)
    run.until(lambda: (place.latest / "logs" / "ps.log").exists(), "parameter server")
    run.interrupt_group()
    assert run.wait(10) == 130, run.output
    assert "interrupted: stopped before the parameter server could write a checkpoint" in run.output
    assert place.summary()["status"] == "interrupted" and place.checkpoints() == []


@pytest.mark.timeout(60)
def test_ctrl_c_before_the_workers_have_joined(place):
    run = place.start("cluster", *EXPERIMENT)
    run.address()
    run.interrupt_group()
    assert run.wait(8) == 130, run.output  # who never joined is not waited for
    assert place.summary()["status"] == "interrupted"


@pytest.mark.timeout(60)
def test_ctrl_c_while_the_last_checkpoint_is_written(place):
    run = place.start("cluster", *EXPERIMENT, "train.steps=3", "-n", 1, BALLAST_MB=128)
    saving = place.path / "runs" / "latest" / "checkpoints" / ".saving-version_000003"
    run.until(saving.exists, "last checkpoint")
    run.until_line("w0 left")  # there is nothing else left to do
    run.interrupt_group()
    assert run.wait(20) == 0, run.output
    assert newest_checkpoint(place) == 3 and place.summary()["status"] == "done"


@pytest.mark.timeout(60)
def test_a_second_ctrl_c_ends_everything_at_once(place):
    run = place.start("cluster", *EXPERIMENT, "checkpoint.every=2", PACE_S=0.5)  # a step takes a second, or more
    run.until_version(1)
    run.interrupt_group()
    run.until_line("stopping after this step; once more to kill everything now")
    run.interrupt_group()
    assert run.wait(2) == 130, run.output
    place.nothing_left(1)
    assert place.summary()["status"] == "interrupted"


@pytest.mark.timeout(60)
def test_sigterm_is_as_orderly_as_the_first_ctrl_c(place):
    run = place.start("cluster", *EXPERIMENT, PACE_S=PACE_S)
    run.until_version(2)
    run.popen.terminate()
    assert run.wait(15) == 143, run.output
    assert newest_checkpoint(place) == place.summary()["version"] >= 2


@pytest.mark.timeout(60)
def test_what_a_killed_launcher_leaves_ends_by_itself(place):
    run = place.start("cluster", *EXPERIMENT, "checkpoint.every=1", PACE_S=PACE_S)
    run.until_version(2)
    assert len(place.left_over()) == 4  # the launcher, ps, w0, w1
    run.popen.kill()
    run.popen.wait(5)
    place.nothing_left(12)
    assert newest_checkpoint(place) >= 2

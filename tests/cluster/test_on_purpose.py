"""Faults on purpose in a real run: all of them, and the bits of a run without."""

import pytest

pytestmark = pytest.mark.cluster

FAULTS = (
    "worker 1: 2 times slower at version 1",
    "delay gradient 2 from worker 1 by 0.2 s",
    "drop weights 3 to worker 1",
    "worker 0: SIGKILL at version 5",
    "ps: SIGKILL at version 12",
    "worker 1: SIGSTOP for 1 s at version 20",
    "ps: clock jumps 600 s at version 30",
    "NaN in shard 1 at version 33",
)


@pytest.mark.timeout(90)
def test_what_befalls_a_run_on_purpose_is_told_happens_once_and_changes_no_bit(place, plain_loop):
    place.add("paced.py")
    written = "[" + ", ".join(f'"{fault}"' for fault in FAULTS[:-1]) + "]"
    experiment = ("workload=paced.py:Paced", "train.steps=40", "eval.enabled=false", "checkpoint.every=5")
    both_in_each_step = ("cluster.min_workers=2", "cluster.balance=false")
    run = place.run("cluster", *experiment, *both_in_each_step, f"faults={written}", PACE_S=0.02)
    assert run.popen.returncode == 0, run.output
    for fault in FAULTS[:-1]:
        assert run.output.count(f"on purpose: {fault}") == 1, run.output
    assert "likely out of memory" not in run.output and "never happened" not in run.output
    assert "(pid " in run.until_line("was stopped by SIGSTOP") and "goes on" in run.output
    assert place.summary()["restarts"] == 2
    assert place.summary()["params_sha256"] == plain_loop("quadratic", 40, 128, 4)
    assert place.run("audit", "latest").output.startswith("audit clean: 40 versions")


@pytest.mark.timeout(60)
def test_a_nan_on_purpose_is_found_where_it_was_put(place):
    experiment = ("workload=quadratic", "train.steps=40", "eval.enabled=false", "train.nonfinite=skip_shard")
    run = place.run("cluster", *experiment, f'faults=["{FAULTS[-1]}"]')
    assert run.popen.returncode == 0, run.output
    left_out = {row["from_version"]: row["left_out"] for row in place.ledger("update") if row["left_out"]}
    assert left_out == {33: [1]}
    assert "step 33, w" in run.output and "shard 1 (samples" in run.output
    assert "left out of version 34" in run.output and run.output.count(f"on purpose: {FAULTS[-1]}") == 1
    other = place.run("cluster", "--resume", "latest", "train.steps=50", "faults=[]")
    assert other.popen.returncode == 2 and "not_finite is" in other.output, "with it, it is another experiment"


def test_a_fault_that_is_none_is_refused_before_any_process_starts(place):
    run = place.run("cluster", 'faults=["worker 1: explodes at version 3"]')
    assert run.popen.returncode == 2
    assert "a fault such as 'worker " in run.output and "docs/faults.md" in run.output

"""The same bits for any number of workers, for a plain loop and after a resume; and a ledger that adds up."""

import os
import re

import numpy as np
import pytest

from gradbus.workloads.quadratic import SAMPLES
from ps import checkpoint as checkpoints

pytestmark = pytest.mark.cluster


@pytest.mark.timeout(240)
def test_any_number_of_workers_has_the_bits_of_the_plain_loop_and_so_has_a_resumed_run(place, plain_loop):
    expected = plain_loop("digits", 60, 128, 4)
    experiment = ("workload=digits", "optimizer.learning_rate=1e-3", "eval.enabled=false")
    tcp = "tcp://127.0.0.1:*"
    unix = f"ipc://@{place.path.name}-{os.getpid()}"  # of no file
    for workers, shared, bind in ((1, True, tcp), (2, True, unix), (3, True, tcp), (4, True, tcp), (3, False, tcp),
                                  (2, False, unix)):  # fmt: skip
        # All take part, so that the sums are really put together from so many processes.
        path = (f"bus.shared_memory={str(shared).lower()}", f"bus.bind={bind}")
        run = place.run(
            "cluster", *experiment, *path, "train.steps=60", f"cluster.min_workers={workers}", "-n", workers
        )
        said = "memory is shared with the parameter server" if shared else "gradients and weights travel as messages"
        assert all(said in place.log(f"w{number}") for number in range(workers))
        assert run.popen.returncode == 0, run.output
        assert place.summary()["params_sha256"] == expected, f"{workers} workers"
        assert {member for row in run.rows("update") for *_, member in row["shards"]} == set(range(1, workers + 1))
        late = {"duplicate", "other version"}  # of two that did the same, where the machine was busy
        assert place.summary()["workers"] == workers and place.summary()["refused"].keys() <= late

    first = place.run("cluster", *experiment, "train.steps=30")
    assert first.popen.returncode == 0 and place.checkpoints() == [30], first.output
    assert place.summary()["params_sha256"] != expected
    second = place.run("cluster", "--resume", "latest", "train.steps=60", "cluster.min_workers=3", "-n", 3)
    assert second.popen.returncode == 0, second.output
    assert place.summary()["workers"] == 3 and place.run("audit", "latest").output.startswith(
        "audit clean: 60 versions"
    )
    assert place.summary()["params_sha256"] == expected
    assert [row["version"] for row in second.rows("update")] == list(range(31, 61))


@pytest.mark.timeout(60)
def test_each_version_is_made_once_of_all_shards_and_each_sample_is_used_once_per_epoch(place):
    """1003 samples are 17 steps of 59. Three workers share the shards of a step, however they come out."""
    steps, batch, epochs = 34, 59, 2
    run = place.run(
        "cluster", "workload=quadratic_state", f"train.steps={steps}", f"train.batch_size={batch}",
        f"train.shards={batch}", "cluster.min_workers=3", "-n", 3, JAX_LOG_COMPILES=1,
    )  # fmt: skip
    assert run.popen.returncode == 0, run.output

    updates = place.ledger("update")
    assert [row["version"] for row in updates] == list(range(1, steps + 1))
    assert all(row["from_version"] == row["version"] - 1 and row["applied"] for row in updates)
    assert all(row["examples"] == batch and row["left_out"] == [] for row in updates)
    for row in updates:
        covered = [shard for low, high, _ in row["shards"] for shard in range(low, high)]
        assert sorted(covered) == list(range(batch))
    assert {member for row in updates for *_, member in row["shards"]} == {1, 2, 3}

    numbers = [sum(row["metrics"]["sample"] * batch for row in updates[i : i + 17]) for i in (0, 17)]
    assert np.round(numbers).tolist() == [SAMPLES * (SAMPLES - 1) / 2] * epochs
    weights = checkpoints.load(place.latest / "checkpoints" / f"version_{steps:06d}").tensors["weights"]
    visits = next(array for name, array in weights.items() if "visits" in name)
    assert np.allclose(visits * batch, epochs, atol=1e-4)

    for worker in ("w0", "w1", "w2"):  # nothing is compiled again, at the end of an epoch or anywhere
        assert len(set(re.findall(r"XLA compilation of jit\(shard\) in (\S+)", place.log(worker)))) == 1
    assert place.summary()["eval_version"] == steps and place.summary()["eval"]["loss"] > 0

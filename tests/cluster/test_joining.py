"""The parameter server on one terminal, workers on others: joining early, late, in vain, and with the wrong things."""

import shutil
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
EXPERIMENT = ("workload=paced.py:Paced", "train.steps=60", "eval.enabled=false")


@pytest.fixture(autouse=True)
def workload(place):
    place.add("paced.py")


@pytest.mark.timeout(120)
def test_workers_come_by_themselves_and_outlive_the_parameter_server(place, plain_loop):
    """A first and a second worker, one of them in mid-run; the server is killed and resumed where it was; same bits."""
    settings = ("name=apart", "checkpoint.every=5", "bus.heartbeat_timeout_s=3", "cluster.restarts=0")
    server = place.start("ps", *EXPERIMENT, *settings)
    address = server.address()
    assert server.until_line("add a worker").endswith(f"worker --ps {address}")
    first = place.start("worker", "--ps", address, "--name", "first", PACE_S=0.03)
    server.until_version(3)
    second = place.start("worker", "--ps", address, "--name", "second", PACE_S=0.03)
    numbers = {row["name"]: row["member"] for row in server.rows("member") if row["event"] == "joined"}
    assert numbers == {"first": 1}

    def shared() -> bool:
        return any({member for *_, member in row["shards"]} == {1, 2} for row in server.rows("update"))

    server.until(shared, "step that both have computed")
    joined = next(row["version"] for row in server.rows("update") if 2 in {m for *_, m in row["shards"]})
    assert joined > 3 and {member for *_, member in server.rows("update")[0]["shards"]} == {1}

    server.until(lambda: len(place.checkpoints()) > 0, "checkpoint")
    server.child("ps").kill()
    assert server.wait(15) == 1
    again = place.start("ps", "--resume", "latest", f"bus.bind={address}")
    for each in (again, first, second):
        assert each.wait(60) == 0, each.output
    assert again.address() == address
    assert {row["name"] for row in again.rows("member") if row["event"] == "joined"} == {"first", "second"}
    for each in (first, second):
        assert each.output.count(f"joined {address}") == 2
        assert "the run is over: version 60 is reached" in each.output
    assert place.summary()["params_sha256"] == plain_loop("quadratic", 60, 128, 4)


@pytest.mark.timeout(120)
def test_a_worker_with_other_code_data_or_model_is_sent_away_and_the_run_goes_on(place, evidence):
    server = place.start("ps", *EXPERIMENT, "name=strict")
    address = server.address()
    good = place.start("worker", "--ps", address, "--name", "good", PACE_S=0.1)
    server.until_version(1)

    elsewhere = place.path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "paced.py").write_text((place.path / "paced.py").read_text() + "# edited\n")
    nowhere = place.path / "nowhere"
    nowhere.mkdir()
    release = place.path / "another-release"
    for package in ("bus", "ps", "worker", "gradbus"):
        shutil.copytree(REPOSITORY / package, release / package)
    messages = release / "bus" / "messages.py"
    messages.write_text(messages.read_text().replace("PROTOCOL = 1\n", "PROTOCOL = 2\n"))

    wrong = {
        "workload paced.py:Paced: the file here (sha256 ": place.start("worker", "--ps", address, folder=elsewhere),
        "workload paced.py:Paced: cannot read paced.py": place.start("worker", "--ps", address, folder=nowhere),
        f"refused by {address}: hello: found protocol 2, expected 1; install the same release on both sides": (
            place.start("worker", "--ps", address, PYTHONPATH=release)
        ),
        "the dataset here (1003 samples, sha256 ": place.start("worker", "--ps", address, OTHER_DATA=1),
        "workload paced.py:Paced: another parameter tree: ": place.start("worker", "--ps", address, OTHER_TREE=1),
    }
    for text, worker in wrong.items():
        assert worker.wait(30) == 2, worker.output
        assert text in worker.output and "Traceback" not in worker.output
        evidence(f"gradbus worker --ps {address}", worker.output.splitlines()[-1], "2")
        if "refused by" in text:
            continue  # it never was a member
        pid = worker.popen.pid
        server.until(
            lambda pid=pid: any(r["pid"] == pid and r["event"] == "failed" for r in place.ledger("member")), "x"
        )
        assert server.popen.poll() is None and good.popen.poll() is None
    assert "extra" in worker.output
    good.popen.terminate()
    assert good.wait(5) == 143
    server.popen.terminate()
    assert server.wait(5) == 143


@pytest.mark.timeout(60)
def test_a_worker_without_a_parameter_server_says_so_and_gives_up(place, evidence):
    nobody = "127.0.0.1:9"  # discard: nothing listens there
    worker = place.start("worker", "--ps", nobody, "--connect-timeout", 5)
    other = place.start("worker", "--ps", nobody)
    began = time.monotonic()
    worker.until_line(f"no answer from tcp://{nobody} yet; trying for another 3 s", limit_s=6)
    assert worker.wait(10) == 3, worker.output
    assert 5 <= time.monotonic() - began < 9
    last = worker.output.splitlines()[-1]
    evidence(f"gradbus worker --ps {nobody} --connect-timeout 5", last, f"3, {time.monotonic() - began:.1f} s")
    assert f"no answer from tcp://{nobody} for 5 s: is the parameter server running there" in last
    other.popen.terminate()
    assert other.wait(2) == 143, other.output


@pytest.mark.timeout(60)
def test_a_parameter_server_without_workers_gives_up(place, evidence):
    server = place.start("ps", *EXPERIMENT, "cluster.max_wait_s=2")
    server.address()
    began = time.monotonic()
    assert server.wait(15) == 3, server.output
    assert time.monotonic() - began < 8
    last = server.until_line("failed: no worker was ready for 2 s (nobody is here)")
    evidence("gradbus ps cluster.max_wait_s=2", last, f"3, {time.monotonic() - began:.1f} s after it listens")


@pytest.mark.timeout(60)
def test_two_runs_at_once_do_not_meet(place, plain_loop):
    runs = [place.start("cluster", "workload=quadratic", "train.steps=60", f"name={name}") for name in ("one", "two")]
    for run in runs:
        assert run.wait() == 0, run.output
    assert runs[0].address() != runs[1].address()
    for folder in (place.path / "runs").glob("2*"):
        text = (folder / "summary.json").read_text()
        assert plain_loop("quadratic", 60, 128, 4) in text and '"workers": 2' in text

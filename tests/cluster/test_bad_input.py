"""Whatever is wrong with what is given: one clear line within seconds, a non-zero exit, nothing lost, nothing left."""

import os
import shutil
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from bus import codec
from bus.messages import Alive, Contribution, Failure, Leave, Ready, Stop
from ps import checkpoint as checkpoints
from worker.batches import Batches

pytestmark = pytest.mark.cluster

SECONDS = 20.0  # on a busy machine; most take one or two
QUICK = ("workload=quadratic", "train.steps=20", "eval.enabled=false", "-n", 1)


@pytest.fixture
def told(place, evidence):
    """Run a command line and check how it is refused; returns what was printed."""

    def check(
        *arguments: object,
        says: str,
        exit_code: int = 2,
        limit_s: float = SECONDS,
        about: str = "",
        **environment: object,
    ) -> str:
        began = time.monotonic()
        run = place.run(*arguments, limit_s=limit_s, **environment)
        seconds = time.monotonic() - began
        lines = [line for line in run.output.splitlines() if says in line]
        typed = f"gradbus {' '.join(map(str, arguments))}" + (f" ({about})" if about else "")
        evidence(typed, (lines or run.output.splitlines())[-1].strip(), f"{run.popen.returncode}, {seconds:.1f} s")
        assert run.popen.returncode == exit_code, run.output
        assert lines, run.output
        assert "Traceback" not in run.output
        return run.output

    return check


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("train.stpes=3", "command line, train.stpes: expected a known key, got 'stpes'; did you mean train.steps?"),
        ("train.steps=ten", "command line, train.steps: expected a whole number of at least 1"),
        ("train.steps=0", "command line, train.steps: expected a whole number of at least 1"),
        (
            "train.nonfinite=ignore",
            "train.nonfinite: expected one of skip_shard, skip_step, stop, got the text 'ignore'",
        ),
        ("eval.enabled=no", "eval.enabled: expected true or false, got the text 'no'"),
        ("name=12:30", "name: expected up to 64 letters, digits and . _ - (it names a folder), got the text '12:30'"),
        (
            "train.batch_size=130",
            "train.batch_size: expected a multiple of train.shards (4), got 130; write 128 or 132",
        ),
        ("cluster.min_workers=3", "cluster.min_workers: expected at most cluster.workers (2), got 3"),
        ("bus.heartbeat_timeout_s=2", "bus.heartbeat_timeout_s: expected at least 3 times bus.heartbeat_s (1)"),
        (
            "bus.bind=localhost",
            "bus.bind: expected an address such as tcp://127.0.0.1:* or, on one machine, "
            "ipc://@name, got the text 'localhost'",
        ),
        ("malformed.yaml", "malformed.yaml, line 3, column 5: not valid YAML: while parsing a flow sequence"),
        ("twice.yaml", "twice.yaml, line 3: expected each key once, got train.steps again (line 2); remove one"),
        ("binary.yaml", "binary.yaml, byte 0: expected UTF-8 text, got something else"),
        ("folder.yaml", "folder.yaml: expected a settings file, got: Is a directory"),
        ("malfromed.yaml", "malfromed.yaml: expected a settings file, got nothing there; did you mean malformed.yaml?"),
        ("run.dir=twice.yaml/runs", "run.dir: cannot write a run folder in "),
        ("run.dir=/proc/runs", "run.dir: cannot write a run folder in /proc/runs: "),
        ("--resume latest", "there is no latest run in "),
    ],
)
def test_what_is_wrong_with_settings_is_told_before_any_process_starts(place, told, typed, says):
    place.add("malformed.yaml", "train:\n  steps: [1, 2\nname: x\n")
    place.add("twice.yaml", "train:\n  steps: 1\n  steps: 2\n")
    (place.path / "binary.yaml").write_bytes(b"\xff\xfe\0")
    (place.path / "folder.yaml").mkdir()
    assert len(told("cluster", *typed.split(), says=says, limit_s=10).splitlines()) == 1
    assert not (place.path / "runs").exists()


WORKLOADS = {
    "raises at import": (
        "raise OSError('no licence')",
        "workload mine.py:Mine: importing it raised OSError: no licence (",
    ),
    "raises in init": ("    def init(self, key): return {}['w']", "workload: init raised KeyError: 'w' ("),
    "raises in loss": (
        "    def loss(self, params, batch, key): raise ValueError('7 classes, 8 labels')",
        "workload: loss raised ValueError: 7 classes, 8 labels (",
    ),
    "raises in train_data": (
        "    def train_data(self, folder): raise OSError('disk on fire')",
        "workload mine.py:Mine: train_data raised OSError: disk on fire (",
    ),
    "loss is no scalar": (
        "    def loss(self, params, batch, key): return batch['y'] * params['b'], {}",
        "workload: loss returned float32[32]; expected a floating scalar as its first value",
    ),
    "uneven data": (
        "    def train_data(self, folder): return {'x': np.zeros((5, 4)), 'y': np.zeros(6)}",
        "workload: train_data['y'] has 6 examples while train_data['x'] has 5; expected one shared leading axis",
    ),
    "nothing to train": (
        "    def init(self, key): return {'w': jnp.arange(4), 'b': jnp.int32(0)}",
        "expected at least one array of floating dtype to train",
    ),
    "not there": ("del Mine\nclass Mind: pass", "workload mine.py:Mine: mine.py defines no 'Mine'; did you mean Mind?"),
}


@pytest.mark.parametrize("fault", WORKLOADS)
def test_a_workload_that_breaks_the_contract(place, told, fault):
    code, says = WORKLOADS[fault]
    head = "import jax.numpy as jnp, numpy as np\nfrom gradbus.workloads.quadratic import Quadratic\n"
    place.add("mine.py", f"{head}class Mine(Quadratic):\n    pass\n{code}\n")
    output = told("cluster", "workload=mine.py:Mine", "train.steps=5", says=says, about=fault)
    assert output.count("\n") == 5 and says in output.splitlines()[-1]  # the header, and the line


def cifar10(place, size_bytes: int, label: int = 0) -> Path:
    folder = place.path / "cifar" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]:
        (folder / name).write_bytes(bytes([label]) + bytes(3072))
    (folder / "data_batch_4.bin").write_bytes(bytes(size_bytes))
    return folder


def test_a_dataset_that_is_missing_cut_short_or_another(place, told):
    (place.path / "empty").mkdir()
    told(
        "cluster",
        "workload=cifar10",
        "data.dir=empty",
        says="failed: CIFAR-10 is not in empty; put there cifar-10-binary",
    )
    folder = cifar10(place, 3000)
    text = "data_batch_4.bin has 3000 bytes; expected a multiple of 3073"
    told("cluster", "workload=cifar10", "data.dir=cifar", says=text)
    shutil.rmtree(folder)
    cifar10(place, 3073, label=99)
    text = "data_batch_1.bin: record 0 has the label 99; expected 0..9"
    told("cluster", "workload=cifar10", "data.dir=cifar", says=text)


MID_RUN = """
import os, sys
import numpy as np
from gradbus.workloads.quadratic import Quadratic
from worker.batches import Batches

BAD = Batches(0, 1003, 128, 4).indices(5, 2)[0]  # first used in shard 2 of step 5


class Data(np.ndarray):
    def take(self, indices, axis=None, **more):
        if BAD in indices and "FAULT" in os.environ:
            fault()
        return np.asarray(self)[indices]


def fault():
    if os.environ["FAULT"] == "raise":
        raise OSError("the disk is gone")
    os._exit(int(os.environ["FAULT"]))


class Mine(Quadratic):
    def train_data(self, folder):
        data = super().train_data(folder)
        x = data["x"].copy()
        if "NAN" in os.environ:
            x[BAD, 3] = np.nan
        return {**data, "x": x.view(Data)}
"""
IMPATIENT = ("cluster.restarts=0", "bus.heartbeat_s=0.3", "bus.heartbeat_timeout_s=1")
MINE = (*QUICK, "workload=mine.py:Mine", "checkpoint.every=2")


def newest(place) -> checkpoints.Checkpoint:
    path, passed_over = checkpoints.newest(place.latest / "checkpoints")
    assert path is not None and passed_over == []
    checkpoint = checkpoints.load(path)
    assert all(np.isfinite(array).all() for part in checkpoint.tensors.values() for array in part.values())
    return checkpoint


@pytest.mark.timeout(90)
def test_a_workload_that_raises_or_ends_its_process_in_mid_run_and_is_mended(place, told, plain_loop):
    place.add("mine.py", MID_RUN)
    says = "failed: OSError: the disk is gone ("
    output = told("cluster", *MINE, says=says, about="the data raises in step 5", FAULT="raise")
    assert "starting it again would end in the same way" in output
    assert newest(place).version == 5  # not one step is lost
    assert f"cluster --resume runs/{place.latest.name}" in output

    typed = ("cluster", "--resume", "latest", *IMPATIENT)
    output = told(*typed, says="failed: w0: exit code 0", exit_code=1, about="and then calls os._exit(0)", FAULT=0)
    assert ": exit code 0, without a word; left out (cluster.restarts is 0); log: " in output
    assert newest(place).version == 5

    assert place.run("cluster", "--resume", "latest").popen.returncode == 0
    assert place.summary()["params_sha256"] == plain_loop("quadratic", 20, 128, 4)


@pytest.mark.timeout(90)
def test_a_loss_that_is_nan_stops_the_run_by_default_and_names_step_and_shard(place, told):
    place.add("mine.py", MID_RUN)
    ids = Batches(0, 1003, 128, 4).indices(5, 2)
    says = f"shard 2 (samples {', '.join(map(str, ids[:8]))}, ...): loss = nan"
    output = told("cluster", *MINE, says=says, exit_code=1, about="a NaN in one sample", NAN=1)
    assert "failed: step 5, w" in output
    assert newest(place).version == 5 and place.summary()["version"] == 5

    for policy, expected in (("skip_step", (False, 128 - 32)), ("skip_shard", (True, 128 - 32))):
        run = place.run("cluster", *MINE, "train.steps=7", f"train.nonfinite={policy}", NAN=1)
        assert run.popen.returncode == 0 and says in run.output, run.output
        row = next(row for row in place.ledger("update") if row["from_version"] == 5)
        assert (row["applied"], row["examples"]) == expected and row["left_out"] == [2]
        assert row["updates"] == 5 + expected[0] and newest(place).version == 7


@pytest.mark.timeout(60)
def test_a_port_that_is_in_use(place, told):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        says = f"failed: bus.bind: port {port} is in use by process {os.getpid()} ("
        told("ps", "workload=quadratic", f"bus.bind=tcp://127.0.0.1:{port}", says=says)
    told(
        "ps",
        "workload=quadratic",
        "bus.bind=tcp://192.0.2.1:*",
        says="failed: bus.bind: tcp://192.0.2.1:* is no address of this machine",
    )


@pytest.mark.timeout(120)
def test_a_checkpoint_that_is_cut_short_or_of_another_experiment(place, told, plain_loop):
    first = place.run("cluster", *QUICK, "checkpoint.every=10", "name=first")
    assert first.popen.returncode == 0 and place.checkpoints() == [10, 20], first.output
    folder = place.latest / "checkpoints"
    weights = folder / "version_000020" / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    arguments = ("cluster", "--resume", "latest", "train.steps=30")
    says = f"weights.safetensors: expected {len(content)} bytes, got {len(content) - 10}; it was damaged after it was"
    told("cluster", "--resume", weights.parent, "train.steps=30", says=says, about="the newest is cut short")
    output = told(*arguments, says=says, exit_code=0, about="and version_000010 is whole")
    assert "resumed at version 10" in output and place.summary()["params_sha256"] == plain_loop("quadratic", 30, 128, 4)

    says = "--resume latest: seed is 1 here and 0 there, in runs/"
    told("cluster", "--resume", "latest", "seed=1", says=says)
    for path in folder.iterdir():
        (path / "optimizer.safetensors").unlink()
    told(*arguments, says="no whole checkpoint to resume from", about="no optimizer.safetensors in any")
    assert place.summary()["status"] == "failed"

    other = place.run("cluster", *QUICK, "train.steps=1", "seed=7", "name=other")
    assert other.popen.returncode == 0
    shutil.copytree(place.latest / "checkpoints" / "version_000001", folder / "version_000040")
    says = "the checkpoint is of another experiment: seed is 0 here and 7 there"
    told("cluster", "--resume", folder.parent, "train.steps=50", says=says, about="a copy from another run")


@pytest.mark.timeout(60)
def test_a_checkpoint_folder_that_cannot_be_written_is_told_and_training_goes_on(place, plain_loop, evidence):
    place.add("paced.py")
    run = place.start("cluster", *QUICK, "workload=paced.py:Paced", "checkpoint.every=2", PACE_S=0.04)
    run.until(lambda: 2 in place.checkpoints(), "checkpoint")
    folder = place.latest / "checkpoints"
    folder.rename(place.latest / "moved")
    folder.touch()
    says = ": cannot be written: File exists; older checkpoints are untouched; make room or mend the folder"
    evidence("(checkpoints/ replaced by a file in mid-run)", run.until_line(says).strip(), "training goes on")
    assert run.wait() == 1, run.output
    last = run.until_line("failed: version 20 is reached, but not saved: ")
    evidence("(and it stays like that)", last, "1")
    assert place.summary()["version"] == 20

    folder.unlink()
    (place.latest / "moved").rename(folder)
    assert place.run("cluster", "--resume", "latest").popen.returncode == 0
    assert newest(place).version == 20
    assert place.summary()["params_sha256"] == plain_loop("quadratic", 20, 128, 4)


# --- garbage on the sockets ----------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0


def ready(kind: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), 5)


def throw(address: str, content: bytes) -> None:
    with connect(address) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)


def send(context: zmq.Context, kind: int, address: str, *messages: list[bytes]) -> None:
    with context.socket(kind) as speaker:
        speaker.set(zmq.LINGER, 2000)
        speaker.connect(address)
        for message in messages:
            speaker.send_multipart(message)


@pytest.mark.timeout(90)
def test_garbage_oversize_and_half_messages_on_every_socket_change_nothing(place, plain_loop, evidence):
    place.add("paced.py")
    run = place.start("cluster", *QUICK, "workload=paced.py:Paced", "train.steps=40", "-n", 2, PACE_S=0.03)
    run.until_version(3)
    session, addresses = int(place.manifest()["session"], 16), place.manifest()["addresses"]
    before = run.child("ps").memory_info().rss

    for name, kind in (("control", b"DEALER"), ("gradients", b"PUSH"), ("weights", b"SUB")):
        hello = GREETING + ready(kind)
        for content in (
            b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\xff\x7f" + b"\xff" * 7 + b"\x7f", os.urandom(10), GREETING,
            hello + b"\0\x64half a message", hello + b"\2" + struct.pack(">Q", 1 << 62) + bytes(1000),
            hello + b"\3" + struct.pack(">Q", 1 << 20) + bytes(1000),
        ):  # fmt: skip
            throw(addresses[name], content)

    def contribution(payload: bytes, **fields: object) -> list[bytes]:
        usual = {"session": session, "member": 1, "version": 10**9, "bucket": 0, "low": 0, "high": 1, "examples": 32}
        return [*codec.encode(Contribution(**{**usual, "sums": {"loss": 0.0}, **fields})), payload]

    control = [
        [b""], [b"x"], [b"x"] * 50, [b"hello\0\0\0"], [b"hello\0\0\0", b"\xc1"], [b"hello\0\0\0", b"\x91" * 100_000],
        [b"hello\0\0\0", msgspec.msgpack.encode([1, 2, 3])], [b"gradient", b"", b""],
    ]  # fmt: skip
    lies = [
        Alive(session, 99, 1, "lurking"),
        Leave(session, 1),
        Failure(session, 1, "die"),
        Ready(session, 1, "x"),
        Stop(session, 1, "x"),
    ]
    gradients = [
        [b""], [b"gradient"], [b"gradient", b"", b""], [b"gradient", msgspec.msgpack.encode([1] * 15), b""],
        contribution(b"short"), contribution(bytes(128), bucket=7), contribution(bytes(128)),
        contribution(bytes(128), version=-1), contribution(bytes(128), session=1), contribution(bytes(128), low=3),
    ]  # fmt: skip
    with ExitStack() as idle, zmq.Context() as context:
        for address in list(addresses.values()) * 30:  # connections on which nothing is ever said
            idle.enter_context(connect(address))
        send(context, zmq.DEALER, addresses["control"], *control, *(list(codec.encode(lie)) for lie in lies))
        send(context, zmq.DEALER, addresses["control"], [bytes(3 << 20)])
        send(context, zmq.PUSH, addresses["gradients"], *gradients)
        send(context, zmq.PUSH, addresses["gradients"], [b"gradient", b"", bytes(8 << 20)])
        topics = [b"\1", b"junk", b"\1m9999999", b"\1m0000001", b"\0m0000001", b"\1" + bytes(100_000)]
        send(context, zmq.XSUB, addresses["weights"], *([topic] for topic in topics))
        assert run.child("ps").memory_info().rss < before + (50 << 20)
        assert run.wait() == 0, run.output
    summary = place.summary()
    counted = next(line for line in run.output.splitlines() if line.startswith("refused, "))
    evidence("(garbage, half and oversize messages on all sockets in mid-run)", counted, "0, same bits")
    assert summary["params_sha256"] == plain_loop("quadratic", 40, 128, 4)
    assert summary["restarts"] == 0 and summary["failures"] == []
    refused = summary["refused"]
    assert refused.pop("malformed") == len(control) + 6
    assert refused == {"other version": 3, "older session": 1, "not a member (any more)": 3, "unexpected message": 1}
    assert "refused: " in run.output and run.output.count("refused on ") < 5  # told now and then, counted always

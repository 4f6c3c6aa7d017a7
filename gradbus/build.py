"""Settings -> a server, a worker or an evaluator, with everything handed in. The only place that knows all packages.

Imported by child processes only: it brings in JAX and ZeroMQ.
"""

import gc
import logging
import os
import platform
import secrets
import socket
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import msgspec

from bus.endpoints import DEFAULT_PORT, advertised, local, parse, resolve
from bus.errors import BusError, EndpointError, LayoutError
from bus.faults import parse as parse_fault
from bus.faults import poisoned
from bus.layout import first_difference, gradient_layout, weights_layout
from bus.messages import Hello, Welcome
from bus.settings import BusSettings
from bus.sockets import ObserverSockets, ServerSockets, WorkerSockets
from gradbus import settings as settings_module
from gradbus.evaluate import Evaluation, Observer
from gradbus.injection import Injection
from gradbus.recorder import RunRecorder
from gradbus.records import Metrics, RunFolder
from gradbus.report import Reporter
from gradbus.settings import Settings
from gradbus.workloads.base import DataError, StatefulWorkload, Workload, WorkloadError, is_stateful
from gradbus.workloads.loading import load, read_data, source_sha256
from gradbus.workloads.validation import describe_data, validate
from ps import checkpoint as checkpoints
from ps import optimizers
from ps.history import History
from ps.machine import Machine, Rules
from ps.server import Offer, Server
from ps.stretches import in_stretches
from ps.update import Updater, leaves_of
from worker.batches import Batches
from worker.client import Client
from worker.compute import ShardGradients
from worker.executor import Gradients, ThreadExecutor
from worker.machine import Machine as WorkerMachine
from worker.slow import SlowGradients, prepare_longer

# Errors whose text is made for people already.
PLAIN_ERRORS = (
    WorkloadError,
    DataError,
    BusError,
    optimizers.OptimizerError,
    checkpoints.CheckpointError,
    settings_module.SettingsError,
)

log = logging.getLogger("gradbus")


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """What a Welcome tells a worker, as JSON. The hashes are there to tell other code and other data."""

    name: str
    seed: int
    workload: str
    batch_size: int
    shards: int
    threads: int
    data_dir: str | None
    samples: int
    data_sha256: str
    source_sha256: str | None
    not_finite: frozenset[tuple[int, int]] = frozenset()  # (version, shard), on purpose


def one_line(error: BaseException) -> str:
    """What went wrong, for a person. Faults of ours and a user's own code get a type and a place."""
    if isinstance(error, PLAIN_ERRORS):
        return str(error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"


def kind_of(error: BaseException) -> str:
    """What a failure is about, as the launcher sorts them: ``internal`` is a fault of ours."""
    kinds: dict[type[Exception], str] = {
        WorkloadError: "workload",
        DataError: "data",
        optimizers.OptimizerError: "settings",
        settings_module.SettingsError: "settings",
        checkpoints.CheckpointError: "checkpoint",
        BusError: "bind",
    }
    return next((kind for known, kind in kinds.items() if isinstance(error, known)), "internal")


def versions() -> dict[str, str]:
    """Of what may make a difference between two machines."""
    found = {"python": platform.python_version()}
    for package in ("gradbus", "jax", "jaxlib", "numpy", "pyzmq"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


class Service:
    """A PS that is ready to run: bound, compiled, restored."""

    def __init__(self, server: Server, sockets: ServerSockets, recorder: RunRecorder) -> None:
        self.server, self.sockets, self.recorder = server, sockets, recorder


def service(
    run: RunFolder,
    settings: Settings,
    reporter: Reporter,
    resume: Path | None,
    injection: Injection,
    *,
    again: bool = False,
) -> Service:
    """Build the PS of ``run``. ``resume``: a checkpoint, or a folder of them of which the newest whole one is taken.
    ``again``: after a crash, on the addresses it had, from the newest checkpoint or else from the start.

    Raises WorkloadError, DataError, OptimizerError, CheckpointError or BusError: one line each.
    """
    # Else each stretch of an update is handed to a thread of XLA and waited for.
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    workload, train = workload_and_data(settings.workload, settings.data.dir)
    validate(workload, train, examples=settings.train.batch_size // settings.train.shards)
    samples = int(jax.tree.leaves(train)[0].shape[0])
    data_sha256 = describe_data(train)
    optimizer = optimizers.build(settings.optimizer)
    whole = _updater(workload, settings, optimizer)
    if again and any(run.checkpoints.glob("version_*")):
        resume = run.checkpoints
    restored = _restore(whole, settings, resume, reporter)

    bucket_bytes = settings.bus.bucket_bytes
    gradient = gradient_layout(whole.leaves, bucket_bytes)
    weights = weights_layout(whole.leaves, bucket_bytes)
    largest = max(bucket.size_bytes for bucket in (*gradient.buckets, *weights.buckets))
    sockets = ServerSockets(
        settings.bus,
        bucket_bytes=largest,
        buckets=max(len(gradient.buckets), len(weights.buckets)),
        addresses=tuple(run.read_manifest()["bound"]) if again else None,
    )
    session = secrets.randbits(64)
    machine = Machine(
        Rules(
            steps=settings.train.steps,
            shards=settings.train.shards,
            buckets=len(gradient.buckets),
            min_workers=settings.cluster.min_workers,
            max_wait_s=settings.cluster.max_wait_s,
            heartbeat_s=settings.bus.heartbeat_s,
            heartbeat_timeout_s=settings.bus.heartbeat_timeout_s,
            nonfinite=settings.train.nonfinite,
            nonfinite_limit=settings.train.nonfinite_limit,
            save_every=settings.checkpoint.every,
            evaluate_every=settings.eval.every,
            evaluate=settings.eval.enabled,
            balance=settings.cluster.balance,
            too_few=settings.cluster.too_few,
        ),
        session=session,
        version=restored.version if restored else 0,
        now=injection.clock(),
    )
    run.update_manifest(
        bound=[sockets.control, sockets.gradients, sockets.weights],
        session=f"{session:016x}",
        addresses={"control": sockets.control, "gradients": sockets.gradients, "weights": local(sockets.weights)},
        parameters=sum(leaf.size for leaf in whole.leaves if leaf.kind != "state"),
        buckets=len(gradient.buckets),
        dataset={"samples": samples, "sha256": data_sha256},
        experiment_sha256=settings_module.experiment_hash(settings),
    )
    reporter.event(
        "listening",
        control=advertised(sockets.control, settings.bus.advertise),
        local=local(sockets.control),
        session=f"{session:016x}",
    )
    # After the address is known, so that workers prepare themselves meanwhile.
    updater = in_stretches(whole)
    del whole
    gc.collect()  # its arrays, which are twice there
    updater.compile()
    log.info("updates are made %s", updater.how)
    run.update_manifest(updates=updater.how)
    recorder = RunRecorder(
        run,
        reporter,
        steps=settings.train.steps,
        session=session,
        log_every=settings.log.every,
        members=lambda: machine.members.members,
        versions=versions(),
        workers=run.read_manifest().get("workers", {}) if again else {},
    )
    recorder.begin(machine.version, str(resume) if restored else None)
    if restored:
        recorder.note(f"resumed at version {restored.version}")
    elif again:
        recorder.note("there is no checkpoint yet: training begins again at version 0")
    experiment = Experiment(
        name=settings.name,
        seed=settings.seed,
        workload=settings.workload,
        batch_size=settings.train.batch_size,
        shards=settings.train.shards,
        threads=settings.train.threads,
        data_dir=settings.data.dir,
        samples=samples,
        data_sha256=data_sha256,
        source_sha256=source_sha256(settings.workload),
        not_finite=poisoned(map(parse_fault, settings.faults)),
    )
    history = History(recorder, optimizer.learning_rate, settings.train.loss_average)
    history.loss_average = restored.meta.get("loss_average") if restored else None
    server = Server(
        machine=machine,
        transport=injection.server(sockets),
        updater=updater,
        bucket_bytes=bucket_bytes,
        offer=Offer(msgspec.json.encode(experiment).decode(), sockets.gradients, sockets.weights),
        history=history,
        recorder=recorder,
        saver=checkpoints.Saver(run.checkpoints, settings.checkpoint.keep),
        meta={
            "experiment": settings_module.experiment(settings),
            "experiment_sha256": settings_module.experiment_hash(settings),
            "data_sha256": data_sha256,
            "session": f"{session:016x}",
            "versions": versions(),
        },
        clock=injection.clock,
    )
    return Service(server, sockets, recorder)


def worker(
    address: str,
    name: str | None,
    data_dir: str | None,
    bus: BusSettings | None,
    note: Callable[[str], None],
    injection: Injection,
) -> tuple[Client, WorkerSockets]:
    """A worker that dials ``address``; it learns everything else from there. Raises EndpointError."""
    endpoint = parse(address, DEFAULT_PORT)
    try:
        if not endpoint.path:
            resolve(endpoint.host, "--ps")
    except EndpointError as error:  # it may be known in a moment, as where containers start
        note(f"{error}; trying on for {(bus or BusSettings()).connect_timeout_s:g} s")
    host, bus = socket.gethostname(), bus or BusSettings()
    hello = Hello(name or f"{host}-{os.getpid()}", host, os.getpid(), secrets.randbits(63), versions())
    sockets = WorkerSockets(str(endpoint), bus)
    machine = WorkerMachine(
        hello, address=str(endpoint), connect_timeout_s=bus.connect_timeout_s, now=injection.clock()
    )
    client = Client(
        machine,
        injection.worker(sockets),
        note=note,
        log=lambda text: log.info("%s", text),
        wake=sockets.waker.wake,
        clock=injection.clock,
    )
    client.attach(ThreadExecutor(_Workshop(data_dir, injection), client.post, _explained))
    return client, sockets


def _explained(error: Exception) -> str:
    """One line, and in the log where it comes from, unless it says all there is to say."""
    if not isinstance(error, PLAIN_ERRORS):
        traceback.print_exception(error)
    return one_line(error)


def observer(run: RunFolder, settings: Settings, reporter: Reporter, sockets: ObserverSockets) -> Observer:
    """The evaluator of ``run``."""
    evaluation, leaves = _evaluation(settings)
    metrics = Metrics(run.metrics, events=run.path / "eval")
    layout = weights_layout(leaves, settings.bus.bucket_bytes)
    return Observer(sockets, layout, evaluation, metrics, reporter)


def evaluate_checkpoint(settings: Settings, checkpoint: checkpoints.Checkpoint) -> dict[str, float]:
    """The evaluation of a saved version, by the moving average where the experiment keeps one."""
    evaluation, leaves = _evaluation(settings)
    arrays = {**checkpoint.tensors["weights"], **checkpoint.tensors.get("average", {})}
    missing = [leaf.name for leaf in leaves if leaf.name not in arrays]
    if missing:
        raise checkpoints.CheckpointError(f"the checkpoint has no {missing[0]}: it is of another model")
    return evaluation.run([arrays[leaf.name].astype(leaf.dtype) for leaf in leaves])


def workload_and_data(spec: str, folder: str | None) -> tuple[Any, Any]:
    """The workload that ``spec`` names, and its training data. Raises WorkloadError or DataError."""
    workload = load(spec)
    return workload, read_data(workload, spec, "train_data", Path(folder).expanduser() if folder else None)


def initial(workload: Workload | StatefulWorkload, seed: int) -> tuple[Any, Any]:
    """Version 0: parameters, and the state of the model (None if it keeps none)."""
    key = jax.random.key(seed)
    return workload.init(key), workload.init_state(key) if is_stateful(workload) else None


def _updater(workload: Any, settings: Settings, optimizer: optimizers.Optimizer) -> Updater:
    params, state = initial(workload, settings.seed)
    return Updater(params, state, optimizer, settings.train.average)


def _restore(
    updater: Updater, settings: Settings, resume: Path | None, reporter: Reporter
) -> checkpoints.Checkpoint | None:
    if resume is None:
        return None
    if (resume / "manifest.json").is_file():
        found = checkpoints.load(resume)
    else:
        path, passed_over = checkpoints.newest(resume)
        for line in passed_over:
            log.warning("%s", line)
            reporter.event("note", text=line)
        if path is None:
            raise checkpoints.CheckpointError(f"{resume}: no whole checkpoint to resume from")
        found = checkpoints.load(path)
    there = found.meta.get("experiment", {})
    different = settings_module.difference(settings_module.experiment(settings), there)
    if different:
        raise checkpoints.CheckpointError(f"{resume}: the checkpoint is of another experiment: {different}")
    try:
        updater.restore(found.tensors, found.updates)
    except ValueError as error:
        raise checkpoints.CheckpointError(f"{resume}: {error}") from None
    return found


def _evaluation(settings: Settings) -> tuple[Evaluation, tuple[Any, ...]]:
    workload = load(settings.workload)
    folder = Path(settings.data.dir).expanduser() if settings.data.dir else None
    leaves = _leaves(workload, settings.seed)
    data = read_data(workload, settings.workload, "eval_data", folder)
    return (
        Evaluation(workload, data, batch_size=settings.eval.batch_size, leaves=leaves, seed=settings.seed),
        leaves,
    )


def _leaves(workload: Any, seed: int) -> tuple[Any, ...]:
    return leaves_of(*jax.eval_shape(lambda: initial(workload, seed)))


class _Workshop:
    """Makes what a worker computes with. After a PS was restarted the same is asked for again: nothing is compiled
    twice."""

    def __init__(self, data_dir: str | None, injection: Injection) -> None:
        self._data_dir, self._injection = data_dir, injection
        self._made: tuple[tuple[Any, ...], Gradients] | None = None

    def __call__(self, welcome: Welcome) -> Gradients:
        wanted = (welcome.experiment, welcome.leaves, welcome.bucket_bytes)
        if self._made is None or self._made[0] != wanted:
            gradients: Gradients = _gradients(welcome, self._data_dir)
            if faults := self._injection.faults:
                gradients = SlowGradients(gradients, faults, self._injection.tell)
                prepare_longer(faults, self._injection.tell)
            self._made = (wanted, gradients)
        return self._made[1]


def _gradients(welcome: Welcome, data_dir: str | None) -> ShardGradients:
    experiment = msgspec.json.decode(welcome.experiment, type=Experiment)
    os.environ["NPROC"] = str(experiment.threads)  # before the first use of JAX, which reads it once
    source = source_sha256(experiment.workload)
    if source != experiment.source_sha256:
        raise WorkloadError(
            f"workload {experiment.workload}: the file here (sha256 {(source or 'none')[:12]}) is not the one at the "
            f"parameter server ({(experiment.source_sha256 or 'none')[:12]}); copy that one here"
        )
    folder = data_dir or experiment.data_dir
    workload, train = workload_and_data(experiment.workload, folder)
    found = describe_data(train)
    if found != experiment.data_sha256:
        samples = jax.tree.leaves(train)[0].shape[0]
        raise DataError(
            f"the dataset here ({samples} samples, sha256 {found[:12]}) is not the one at the parameter server "
            f"({experiment.samples} samples, sha256 {experiment.data_sha256[:12]}); give the same with --data-dir"
        )
    leaves = _leaves(workload, experiment.seed)
    different = first_difference(leaves, welcome.leaves)
    if different:
        raise LayoutError(f"workload {experiment.workload}: another parameter tree: {different}")
    gradients = ShardGradients(
        workload,
        init_state=workload.init_state if is_stateful(workload) else None,
        leaves=welcome.leaves,
        bucket_bytes=welcome.bucket_bytes,
        train=train,
        batches=Batches(experiment.seed, experiment.samples, experiment.batch_size, experiment.shards),
        seed=experiment.seed,
        not_finite=experiment.not_finite,
    )
    gradients.compile()
    return gradients

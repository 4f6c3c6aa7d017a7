"""All settings: the sections composed, read from YAML and `key=value`, checked before any process starts.

Defaults, then one file, then the command line; each later one says only what differs. `${a.b}` stands for another
setting and `${oc.env:NAME}` for an environment variable (OmegaConf); `\\${` is a plain `${`.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bus import faults as injected
from bus.settings import BusSettings
from gradbus.layers import COMMAND_LINE, Converter, Layer, merge, names_a_call, source_of, spell
from gradbus.wording import show
from gradbus.yaml_text import SettingsError, parse
from ps.settings import CheckpointSettings, SyncSettings, TrainSettings

__all__ = [
    "ClusterSettings",
    "DataSettings",
    "EvalSettings",
    "LogSettings",
    "RunSettings",
    "Settings",
    "SettingsError",
    "difference",
    "dump",
    "experiment",
    "experiment_hash",
    "load",
]

DEFAULT_FILE = Path("config.yaml")
_NOT_IN_WEIGHTS = ("steps", "nonfinite_limit", "loss_average")  # of `train`
_NOT_SET = object()


class DataSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """dir  folder where the dataset lies; null: the places documented for it"""

    dir: Annotated[str, Meta(min_length=1)] | None = None


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation, by an observer that never delays a step.

    enabled     whether there is an evaluator at all
    every       versions between two evaluations; 0: only at the end
    batch_size  examples per call; only speed and memory depend on it
    """

    enabled: bool = True
    every: Annotated[int, Meta(ge=0)] = 100
    batch_size: Annotated[int, Meta(ge=1, le=2**31)] = 500


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """every  steps between two log lines and rows of metrics"""

    every: Annotated[int, Meta(ge=1)] = 10


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who takes part.

    workers      worker processes started on this machine; 0: only the parameter server, workers come by themselves
    min_workers  training waits for this many
    max_wait_s   how long it waits for them before the run ends, with a checkpoint
    too_few      when fewer than that are left: go on with them, wait for others, or stop with a checkpoint
    restarts     how often each process that died is started again, the parameter server included
    balance      plan by measured speed, and let idle workers help with what is late
    hosts        other machines to start workers on: none can be started yet
    """

    workers: Annotated[int, Meta(ge=0, le=4096)] = 2
    min_workers: Annotated[int, Meta(ge=1, le=4096)] = 1
    max_wait_s: Annotated[float, Meta(ge=0.1, le=604800)] = 120.0
    too_few: Literal["go_on", "wait", "stop"] = "go_on"
    restarts: Annotated[int, Meta(ge=0)] = 3
    balance: bool = True
    hosts: list[str] = []


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """dir  folder that gets one folder per run"""

    dir: Annotated[str, Meta(min_length=1)] = "runs"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a run is told. `optimizer` names optax's functions with their arguments (see ps.optimizers)."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", title="up to 64 letters, digits and . _ - (it names a folder)"
        ),
    ] = "digits"
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    workload: Annotated[str, Meta(min_length=1)] = "digits"
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optimizer: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "adam", "learning_rate": 1e-3})
    sync: SyncSettings = SyncSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    log: LogSettings = LogSettings()
    cluster: ClusterSettings = ClusterSettings()
    bus: BusSettings = BusSettings()
    run: RunSettings = RunSettings()
    faults: list[str] = []  # on purpose, for tests and to see what happens: the forms are those of bus.faults


def load(config: Path | None, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a run: the defaults, a YAML file over them, then `key=value` overrides.

    config: the file; None: ./config.yaml where there is one. Raises SettingsError, one line.
    """
    layers = [Layer("defaults", msgspec.to_builtins(Settings()))]
    if config is None and DEFAULT_FILE.is_file():
        config = DEFAULT_FILE
    if config is not None:
        layers.append(Layer(str(config), _read(config)))
    if overrides:
        layers.append(Layer(COMMAND_LINE, _command_line(overrides)))
    merged: Any = {}
    for layer in layers:
        merged = merge(merged, layer.values, calls=("optimizer",))
    convert = Converter(layers)
    settings = convert.struct(_sentences(_resolve(merged, layers)), Settings)
    _check(settings, convert)
    return settings


def dump(settings: Settings) -> str:
    """YAML of all values, which `load` reads back to equal Settings."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(msgspec.to_builtins(settings))))


def experiment(settings: Settings) -> dict[str, Any]:
    """What determines the weights: nothing of where, how long, or with how many workers."""
    train = {key: value for key, value in msgspec.to_builtins(settings.train).items() if key not in _NOT_IN_WEIGHTS}
    not_finite = sorted(injected.poisoned(map(injected.parse, settings.faults)))
    return {
        "seed": settings.seed,
        "workload": settings.workload,
        "train": train,
        "optimizer": msgspec.to_builtins(settings.optimizer),
        "sync": msgspec.to_builtins(settings.sync),
        **({"not_finite": not_finite} if not_finite else {}),
    }


def experiment_hash(settings: Settings) -> str:
    """SHA-256 (hex) of the experiment as canonical JSON. Equal hashes: equal weights at equal versions."""
    return hashlib.sha256(_canonical(experiment(settings)).encode()).hexdigest()


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The first key in which two experiments differ, with both values; None when they are the same."""
    return _difference(here, there, ())


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}, byte {error.start}: expected UTF-8 text, got something else") from None
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "write the path of a YAML file"
        raise SettingsError(f"{path}: expected a settings file, got nothing there; {hint}") from None
    except OSError as error:
        raise SettingsError(f"{path}: expected a settings file, got: {error.strerror}") from None
    values = parse(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected settings as `key: value`, got {show(values)}")
    return values


def _command_line(overrides: Sequence[str]) -> dict[str, Any]:
    values: Any = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
        if not equals or not all(parts):
            raise SettingsError(
                f"{COMMAND_LINE}: expected key=value, got {override!r}; write, for example, train.steps=100"
            )
        values = _set(values, parts, parse(text, f"{COMMAND_LINE}, {key.strip()}"))
    return dict(values)


def _set(values: Any, parts: Sequence[str], value: Any) -> Any:
    """`values` with `value` at the place; what is written as a mapping with its name replaces, all else is merged."""
    if not parts:
        return value if isinstance(value, dict) and names_a_call(value) else merge(values, value)
    if isinstance(values, list):
        return merge(values, {parts[0]: _set(None, parts[1:], value)})
    here = values if isinstance(values, dict) else {}
    return {**here, parts[0]: _set(here.get(parts[0]), parts[1:], value)}


def _resolve(values: Any, layers: Sequence[Layer]) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        where = str(error.full_key or "")
        source = source_of(layers, tuple(where.split(".")))
        raise SettingsError(
            f"{source}, {where}: expected ${{...}} to name a setting, got: {str(error).splitlines()[0]}; "
            "write \\${ for a plain ${"
        ) from None


def _sentences(values: Any) -> Any:
    """`- worker 1: SIGKILL at version 50` without quotes is a mapping in YAML; it is meant as a sentence."""
    match values.get("faults"):
        case list(faults):
            return {**values, "faults": [_sentence(fault) for fault in faults]}
        case _:
            return values


def _sentence(fault: Any) -> Any:
    match fault:
        case dict() if len(fault) == 1:
            ((who, what),) = fault.items()
            return f"{who}: {what}"
        case _:
            return fault


def _escape(value: Any) -> Any:
    """Text in which `${` is no reference. Backslashes before it are doubled, as OmegaConf halves them."""
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        case dict():
            return {key: _escape(item) for key, item in value.items()}
        case list():
            return [_escape(item) for item in value]
        case _:
            return value


def _check(settings: Settings, convert: Converter) -> None:
    """What no single value can say. Raises SettingsError."""
    train, bus, cluster = settings.train, settings.bus, settings.cluster
    if train.batch_size % train.shards:
        below = train.batch_size - train.batch_size % train.shards
        near = [str(size) for size in (below, below + train.shards) if size]
        convert.fail(
            ("train", "batch_size"),
            f"a multiple of train.shards ({train.shards})",
            train.batch_size,
            f"write {' or '.join(near)}, or change train.shards",
            also=("train", "shards"),
        )
    if cluster.hosts:
        convert.fail(
            ("cluster", "hosts"),
            "an empty list",
            cluster.hosts,
            "start workers on other machines with `gradbus worker`",
        )
    _check_faults(settings, convert)
    if 0 < cluster.workers < cluster.min_workers:
        convert.fail(
            ("cluster", "min_workers"),
            f"at most cluster.workers ({cluster.workers})",
            cluster.min_workers,
            "start more workers, or 0 when they come by themselves",
            also=("cluster", "workers"),
        )
    if bus.heartbeat_timeout_s < 3 * bus.heartbeat_s:
        convert.fail(
            ("bus", "heartbeat_timeout_s"),
            f"at least 3 times bus.heartbeat_s ({bus.heartbeat_s:g})",
            bus.heartbeat_timeout_s,
            f"write {3 * bus.heartbeat_s:g} or more, or lower bus.heartbeat_s",
            also=("bus", "heartbeat_s"),
        )


def _check_faults(settings: Settings, convert: Converter) -> None:
    """Whether they can happen. Raises SettingsError."""
    train, names = settings.train, [f"w{index}" for index in range(settings.cluster.workers)]
    here = f"{names[0]} to {names[-1]}" if names[1:] else "".join(names) or "none"
    for index, text in enumerate(settings.faults):
        try:
            fault = injected.parse(text)
        except ValueError as error:
            convert.fail(("faults", index), str(error), text, "all forms are in docs/faults.md")
        if fault.who not in (injected.PS, injected.ANYONE, *names):
            wanted = f"the ps, or a worker that is started here ({here})"
        elif fault.shard >= train.shards:
            wanted = f"a shard below train.shards ({train.shards})"
        elif fault.version is not None and fault.version >= train.steps:
            wanted = f"a version below train.steps ({train.steps})"
        else:
            continue
        convert.fail(("faults", index), wanted, text, "as it is, it can never happen")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _difference(here: Any, there: Any, path: tuple[str | int, ...]) -> str | None:
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        keys: list[Any] = list({**here, **there})
        pairs = [(key, here.get(key, _NOT_SET), there.get(key, _NOT_SET)) for key in keys]
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = [(i, *pair) for i, pair in enumerate(zip(here, there, strict=True))]
    else:
        texts = ["not set" if value is _NOT_SET else _canonical(value) for value in (here, there)]
        return None if texts[0] == texts[1] else f"{spell(path)} is {texts[0]} here and {texts[1]} there"
    return next(filter(None, (_difference(one, other, (*path, key)) for key, one, other in pairs)), None)

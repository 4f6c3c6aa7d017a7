"""Settings: what is read is what was written, and whatever is wrong is refused in one line that says where."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.settings import BusSettings
from gradbus.settings import (
    ClusterSettings,
    DataSettings,
    EvalSettings,
    LogSettings,
    RunSettings,
    Settings,
    SettingsError,
    difference,
    dump,
    experiment,
    experiment_hash,
    load,
)
from ps.settings import AverageSettings, CheckpointSettings, TrainSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no config.yaml here: the defaults of the Structs are the base


def refused(text: str) -> str:
    """The line with which a file with this text is refused."""
    Path("exp.yaml").write_text(text)
    with pytest.raises(SettingsError) as error:
        load(Path("exp.yaml"))
    line = str(error.value)
    assert "\n" not in line
    return line


def loaded(text: str, *overrides: str) -> Settings:
    Path("exp.yaml").write_text(text)
    return load(Path("exp.yaml"), overrides)


def test_config_yaml_states_every_default() -> None:
    shipped = ROOT / "config.yaml"
    assert load(shipped) == Settings()
    keys = {line.split(":")[0].strip() for line in shipped.read_text().splitlines() if not line.startswith("#")}
    for section, values in msgspec.to_builtins(Settings()).items():
        assert {section, *(values if isinstance(values, dict) else ())} <= keys


def test_the_file_of_this_folder_is_read_when_none_is_named() -> None:
    assert load(None) == Settings()
    Path("config.yaml").write_text("seed: 5")
    assert load(None).seed == 5
    assert load(None, ["seed=6"]).seed == 6


def test_an_overlay_does_not_depend_on_the_folder_it_is_used_in() -> None:
    Path("config.yaml").write_text("seed: 5")
    assert loaded("train: {steps: 7}") == Settings(train=TrainSettings(steps=7))


def test_layers_say_only_what_differs() -> None:
    settings = loaded("train: {steps: 7, shards: 2}\nname: a", "train.steps=8", "train={threads: 2}")
    assert settings == Settings(name="a", train=TrainSettings(steps=8, shards=2, threads=2))


def test_an_empty_file_changes_nothing() -> None:
    assert loaded("# nothing yet\n") == Settings()


# Another optimizer starts from nothing; one argument is just changed.


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer.learning_rate=0.01"], {"name": "adam", "learning_rate": 0.01}),
        (["optimizer.b1=.5"], {"name": "adam", "learning_rate": 1e-3, "b1": 0.5}),
        (["optimizer.name=sgd", "optimizer.learning_rate=1"], {"name": "sgd", "learning_rate": 1}),
        (["optimizer.learning_rate=1", "optimizer.name=sgd"], {"name": "sgd", "learning_rate": 1}),
        (["optimizer={name: sgd, learning_rate: 1}"], {"name": "sgd", "learning_rate": 1}),
        (["optimizer.chain=[{name: a, x: 1}, {name: b}]", "optimizer.chain[0].x=2"],
         {"chain": [{"name": "a", "x": 2}, {"name": "b"}]}),
        (["optimizer.learning_rate={schedule: a, x: 1}", "optimizer.learning_rate={schedule: b, y: 1}"],
         {"name": "adam", "learning_rate": {"schedule": "b", "y": 1}}),
        (["optimizer.learning_rate={schedule: a, x: 1}", "optimizer.learning_rate.x=2"],
         {"name": "adam", "learning_rate": {"schedule": "a", "x": 2}}),
    ],
)  # fmt: skip
def test_optimizer_overlays(overrides: list[str], expected: dict[str, Any]) -> None:
    assert load(None, overrides).optimizer == expected


def test_an_overlay_that_names_an_optimizer_inherits_no_argument() -> None:
    assert loaded("optimizer: {name: sgd, learning_rate: 0.1}\n").optimizer == {"name": "sgd", "learning_rate": 0.1}
    assert loaded("optimizer: {chain: [{name: sgd, learning_rate: 1}]}").optimizer.keys() == {"chain"}
    assert loaded("optimizer: {learning_rate: 0.1}").optimizer == {"name": "adam", "learning_rate": 0.1}


# Numbers: what looks like one is one, what does not is refused.


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E-3", 1e-3), ("1e+3", 1000.0), (".001", 1e-3), ('"0.001"', 1e-3), ("1_000", 1000), ("5", 5)],
)
def test_spellings_of_numbers(text: str, value: float) -> None:
    assert loaded(f"optimizer: {{learning_rate: {text}}}").optimizer["learning_rate"] == value
    assert load(None, [f"optimizer.learning_rate={text}"]).optimizer["learning_rate"] == value


def test_a_whole_number_may_be_spelled_with_an_exponent() -> None:
    steps = loaded("train: {steps: 1e3}").train.steps
    assert (steps, type(steps)) == (1000, int)
    assert loaded('train: {steps: "250"}').train.steps == 250
    seconds = loaded("cluster: {max_wait_s: 5}").cluster.max_wait_s
    assert (seconds, type(seconds)) == (5.0, float)


LEARNING_RATE = "exp.yaml, optimizer.learning_rate: expected "
OR_A_SCHEDULE = LEARNING_RATE + "a number of at least 0 or a mapping that names a schedule, got "
FINITE = "; write a finite number, or leave the key out"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0.001s", LEARNING_RATE + "a number, got the text '0.001s'; write 0.001"),
        ("nan", LEARNING_RATE + "a finite number, got the text 'nan'" + FINITE),
        (".nan", LEARNING_RATE + "a finite number, got the text '.nan'" + FINITE),
        ("-.inf", LEARNING_RATE + "a finite number, got the text '-.inf'" + FINITE),
        ("-1", OR_A_SCHEDULE + "-1; write, for example, 0.001"),
        ("null", OR_A_SCHEDULE + "null; write, for example, 0.001"),
        ("no", LEARNING_RATE + "true or false, got the text 'no'; write false"),
        ("true", OR_A_SCHEDULE + "true; write, for example, 0.001"),
    ],
)  # fmt: skip
def test_learning_rates_that_are_none(text: str, line: str) -> None:
    assert refused(f"optimizer:\n  learning_rate: {text}") == line


# Words of YAML 1.1 stay what was written.


def test_words_stay_text() -> None:
    settings = loaded("name: no\nworkload: off\ndata: {dir: 12:30}")
    assert (settings.name, settings.workload, settings.data.dir) == ("no", "off", "12:30")


STEPS = "exp.yaml, train.steps: expected a whole number of at least 1 and at most 1000000000000, got "
NAME = "exp.yaml, name: expected up to 64 letters, digits and . _ - (it names a folder), got "


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: 12:30}", STEPS + "the text '12:30'; the default is 400"),
        ("train: {steps: 010}", STEPS + "the text '010'; write 10"),
        ("train: {steps: 1.5}", STEPS + "1.5; the default is 400"),
        ("train: {steps: yes}", STEPS + "the text 'yes'; the default is 400"),
        ("train: {steps: true}", STEPS + "true; the default is 400"),
        ("train: {steps: }", STEPS + "null; the default is 400"),
        ("train: {steps: [1, 2]}", STEPS + "a list of 2; the default is 400"),
        ("name: 12", NAME + '12; quote it: name: "12"'),
        ("name: true", NAME + 'true; quote it: name: "true"'),
        ("name: null", NAME + 'null; the default is "digits"'),
        ("name: ../x", NAME + "the text '../x'; the default is \"digits\""),
        ("workload: 1e-3", 'exp.yaml, workload: expected text, got 0.001; quote it: workload: "0.001"'),
        ("eval: {enabled: off}", "exp.yaml, eval.enabled: expected true or false, got the text 'off'; write false"),
        ("eval: {enabled: 1}", "exp.yaml, eval.enabled: expected true or false, got 1; the default is true"),
        ("bus: {checksum: yes}", "exp.yaml, bus.checksum: expected true or false, got the text 'yes'; write true"),
        ("sync: {mode: no}", "exp.yaml, sync.mode: expected bsp, got the text 'no'; the default is \"bsp\""),
        ("optimizer: {nesterov: on}",
         "exp.yaml, optimizer.nesterov: expected true or false, got the text 'on'; write true"),
        ("on: {a: 1}", "exp.yaml, on: expected a known key, got 'on'; the keys at the top are name, seed, workload, "
                       "data, train, optimizer, sync, checkpoint, eval, log, cluster, bus, run, faults"),
    ],
)  # fmt: skip
def test_nothing_turns_into_something_else(text: str, line: str) -> None:
    assert refused(text) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {stpes: 3}", "exp.yaml, train.stpes: expected a known key, got 'stpes'; did you mean train.steps?"),
        ("steps: 3", "exp.yaml, steps: expected a known key, got 'steps'; did you mean train.steps?"),
        ("log: {zzz: 3}", "exp.yaml, log.zzz: expected a known key, got 'zzz'; the keys of log are every"),
        ("train: {average: {decya: 1}}",
         "exp.yaml, train.average.decya: expected a known key, got 'decya'; did you mean train.average.decay?"),
        ("train: 5", "exp.yaml, train: expected a mapping (steps, batch_size, shards, threads, nonfinite, "
                     "nonfinite_limit, average, loss_average), got 5; write its keys below it, or leave it out"),
        ("log:\n  # every: 5",
         "exp.yaml, log: expected a mapping (every), got null; write its keys below it, or leave it out"),
        ("train: {average: true}", "exp.yaml, train.average: expected a mapping (decay, warmup), got true; "
                                   "write its keys below it, or leave it out"),
        ("train: {average: {decay: 2}}",
         "exp.yaml, train.average.decay: expected a number of at least 0 and at most 1, got 2; the default is 0.999"),
        ("train: {nonfinite: skip-step}", "exp.yaml, train.nonfinite: expected one of skip_shard, skip_step, stop, "
                                          "got the text 'skip-step'; did you mean skip_step?"),
        ("checkpoint: {keep: 0}", "exp.yaml, checkpoint.keep: expected a whole number of at least 1, got 0; "
                                  "0 and negative numbers have no meaning here: write a number >= 1"),
        ("checkpoint: {keep: -1}", "exp.yaml, checkpoint.keep: expected a whole number of at least 1, got -1; "
                                   "0 and negative numbers have no meaning here: write a number >= 1"),
        ("checkpoint: {every: -1}",
         "exp.yaml, checkpoint.every: expected a whole number of at least 0, got -1; the default is 100"),
        ("seed: 4294967296", "exp.yaml, seed: expected a whole number of at least 0 and below 4294967296, "
                             "got 4294967296; the default is 0"),
        ("bus: {bucket_bytes: 5000}", "exp.yaml, bus.bucket_bytes: expected a whole number of at least 4096, at most "
                                      "1073741824 and a multiple of 64, got 5000; the default is 4194304"),
        ("bus: {heartbeat_s: 1s}", "exp.yaml, bus.heartbeat_s: expected seconds as a number of at least 0.01 and at "
                                   "most 3600, got the text '1s'; write 1"),
        ("bus: {bind: localhost}", "exp.yaml, bus.bind: expected an address such as tcp://127.0.0.1:* or, on one "
                                   "machine, ipc://@name, got the text 'localhost'; the default is \"tcp://127.0.0.1:*\""),
        ("cluster: {hosts: 5}", "exp.yaml, cluster.hosts: expected a list, got 5; the default is []"),
        ("cluster: {hosts: [a, b]}", "exp.yaml, cluster.hosts: expected an empty list, got a list of 2; "
                                     "start workers on other machines with `gradbus worker`"),
        ("optimizer: sgd", "exp.yaml, optimizer: expected a mapping with name and arguments, got the text 'sgd'; "
                           "write, for example, {name: sgd, ...}"),
        ("optimizer: {chain: []}", "exp.yaml, optimizer: expected either a name or a chain, which is a list of "
                                   "mappings, got a list of 0; write one of them"),
        ("optimizer: {chain: [sgd]}", "exp.yaml, optimizer.chain[0]: expected a mapping with name and arguments, "
                                      "got the text 'sgd'; write, for example, {name: sgd, ...}"),
        ("optimizer: {chain: [{name: sgd}], momentum: 1}",
         "exp.yaml, optimizer.momentum: expected nothing beside chain, got 1; move it into an item of chain"),
        ("optimizer: {name: 5}", "exp.yaml, optimizer.name: expected a name, got 5; "
                                 "write one of optax's, such as sgd or cosine_decay_schedule"),
        ("data: {dir: '${no.such}'}", "exp.yaml, data.dir: expected ${...} to name a setting, "
                                      "got: Interpolation key 'no.such' not found; write \\${ for a plain ${"),
    ],
)  # fmt: skip
def test_wrong_values(text: str, line: str) -> None:
    assert refused(text) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {shards: 3}", "exp.yaml, train.batch_size: expected a multiple of train.shards (3), got 128; "
                               "write 126 or 129, or change train.shards"),
        ("train: {shards: 200}", "exp.yaml, train.batch_size: expected a multiple of train.shards (200), got 128; "
                                 "write 200, or change train.shards"),
        ("cluster: {min_workers: 3}", "exp.yaml, cluster.min_workers: expected at most cluster.workers (2), got 3; "
                                      "start more workers, or 0 when they come by themselves"),
        ("faults: ['worker 2: SIGKILL at version 7']", "exp.yaml, faults[0]: expected the ps, or a worker that is "
         "started here (w0 to w1), got the text 'worker 2: SIGKILL at version 7'; as it is, it can never happen"),
        ("{faults: ['w0: SIGKILL at 3 s'], cluster: {workers: 0}}", "exp.yaml, faults[0]: expected the ps, or a worker "
         "that is started here (none), got the text 'w0: SIGKILL at 3 s'; as it is, it can never happen"),
        ("faults: [NaN in shard 4 at version 7]", "exp.yaml, faults[0]: expected a shard below train.shards (4), "
         "got the text 'NaN in shard 4 at version 7'; as it is, it can never happen"),
        ("faults: ['ps: SIGKILL at version 400']", "exp.yaml, faults[0]: expected a version below train.steps (400), "
         "got the text 'ps: SIGKILL at version 400'; as it is, it can never happen"),
        ("bus: {heartbeat_s: 5}", "exp.yaml, bus.heartbeat_timeout_s: expected at least 3 times bus.heartbeat_s (5), "
                                  "got 10.0; write 15 or more, or lower bus.heartbeat_s"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_each_other(text: str, line: str) -> None:
    assert refused(text) == line


def test_a_fault_may_stand_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("faults:\n- worker 1: SIGKILL at version 50\n- NaN in shard 3 at version 10\n")
    wanted = ["worker 1: SIGKILL at version 50", "NaN in shard 3 at version 10"]
    assert (
        load(path).faults
        == wanted
        == load(None, ["faults=[worker 1: SIGKILL at version 50, " + wanted[1] + "]"]).faults
    )


def test_workers_that_come_by_themselves_may_be_waited_for() -> None:
    assert loaded("cluster: {workers: 0, min_workers: 3}").cluster.min_workers == 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\ntrain:\n  steps: 1\n  steps: 2",
         "exp.yaml, line 4: expected each key once, got train.steps again (line 3); remove one"),
        ("train: {steps: 1", "exp.yaml, line 1, column 17: not valid YAML: while parsing a flow mapping, "
                             "expected ',' or '}', but got '<stream end>'"),
        ("seed: 1\n\tname: x", "exp.yaml, line 2, column 1: not valid YAML: while scanning for the next token, "
                               "found character '\\t' that cannot start any token"),
        ("a: b: c", "exp.yaml, line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("seed: 1\n---\nseed: 2", "exp.yaml, line 2, column 1: not valid YAML: expected a single document in the "
                                  "stream, but found another document"),
        ("seed: !!python/none 1", "exp.yaml, line 1: expected a plain value, got the tag "
                                  "tag:yaml.org,2002:python/none; remove the tag"),
        ("data: &x {dir: *x}", "exp.yaml, line 1: expected a value for data.dir, got an alias to a part that holds it"),
        ("seed: \x01", "exp.yaml, character 7: expected printable text, got 1; remove it"),
        ("- seed", "exp.yaml: expected settings as `key: value`, got a list of 1"),
        ("[" * 1200, "exp.yaml: expected settings, got YAML nested too deeply"),
    ],
)  # fmt: skip
def test_text_that_is_no_yaml(text: str, line: str) -> None:
    assert refused(text) == line


def test_files_that_cannot_be_read() -> None:
    Path("exp.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(SettingsError, match=r"^exp.yaml, byte 6: expected UTF-8 text, got something else$"):
        load(Path("exp.yaml"))
    with pytest.raises(SettingsError, match=r"^ex.yaml: .*nothing there; did you mean exp.yaml\?$"):
        load(Path("ex.yaml"))
    with pytest.raises(SettingsError, match=r"^\.: expected a settings file, got: Is a directory$"):
        load(Path("."))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps", "command line: expected key=value, got 'train.steps'; write, for example, train.steps=100"),
        ("=3", "command line: expected key=value, got '=3'; write, for example, train.steps=100"),
        ("train..steps=3",
         "command line: expected key=value, got 'train..steps=3'; write, for example, train.steps=100"),
        ("train.stpes=3", "command line, train.stpes: expected a known key, got 'stpes'; did you mean train.steps?"),
        ("workload=12", "command line, workload: expected text, got 12; quote it: 'workload=\"12\"'"),
        ("train.shards=3", "command line, train.batch_size: expected a multiple of train.shards (3), got 128; "
                           "write 126 or 129, or change train.shards"),
        ("data.dir=[1", "command line, data.dir, line 1, column 3: not valid YAML: while parsing a flow sequence, "
                        "expected ',' or ']', but got '<stream end>'"),
    ],
)  # fmt: skip
def test_wrong_overrides(override: str, line: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, [override])
    assert str(error.value) == line


def test_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_DATA", "/data")
    settings = loaded("data: {dir: '${oc.env:SOME_DATA}/x'}\ncheckpoint: {every: '${train.steps}'}", "workload=\\${x}")
    assert (settings.data.dir, settings.checkpoint.every, settings.workload) == ("/data/x", 400, "${x}")


# Resolved settings read back to the same.

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ["no", "1e-3", "12:30", "null", "~", "???", "${x}", "\\${x}", "a\\\\${b", "0x1", "1_0",
     "on", "=", "<<", "- a", "a: b", "{}"]
)  # fmt: skip
PLACE = st.from_regex(r"[A-Za-z][A-Za-z_]{0,8}", fullmatch=True).filter(
    lambda word: (
        word.lower() not in ("yes", "no", "on", "off", "y", "n", "nan", "inf", "infinity", "null", "true", "false")
    )
)
FLOATS = st.floats(0, allow_nan=False, allow_infinity=False)
CALLS = st.recursive(
    st.fixed_dictionaries(
        {"name": PLACE},
        optional={"learning_rate": FLOATS | st.fixed_dictionaries({"schedule": PLACE, "x": st.lists(FLOATS)}),
                  "nesterov": st.booleans(), "n": st.integers() | st.none(), "dtype": PLACE},
    ),
    lambda calls: st.fixed_dictionaries({"chain": st.lists(calls, min_size=1, max_size=3)}),
    max_leaves=3,
)  # fmt: skip
SETTINGS = st.builds(
    Settings,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    seed=st.integers(0, 2**32 - 1),
    workload=TEXT,
    data=st.builds(DataSettings, dir=st.none() | TEXT),
    train=st.builds(
        TrainSettings,
        steps=st.integers(1, 10**12),
        batch_size=st.integers(1, 1000).map(lambda n: 8 * n),
        shards=st.sampled_from([1, 2, 4, 8]),
        average=st.none() | st.builds(AverageSettings, decay=st.floats(0, 1), warmup=st.booleans()),
    ),
    optimizer=CALLS,
    checkpoint=st.builds(CheckpointSettings, every=st.integers(0), keep=st.integers(1)),
    eval=st.builds(EvalSettings, every=st.integers(0, 9), enabled=st.booleans()),
    log=st.builds(LogSettings, every=st.integers(1)),
    cluster=st.builds(ClusterSettings, workers=st.integers(1, 9), max_wait_s=st.floats(0.1, 604800)),
    bus=st.builds(BusSettings, heartbeat_s=st.floats(0.01, 1.0), checksum=st.booleans()),
    run=st.builds(RunSettings, dir=TEXT),
)


@given(SETTINGS)
@hypothesis.settings(max_examples=50, deadline=None)
def test_dump_reads_back(settings: Settings) -> None:
    Path("dumped.yaml").write_text(dump(settings))
    assert load(Path("dumped.yaml")) == settings


# What determines the weights.


@pytest.mark.parametrize(
    "override",
    ["name=x", "train.steps=9", "train.loss_average=0.5", "train.nonfinite_limit=2", "cluster.workers=5",
     "bus.checksum=true", "run.dir=x", "eval.every=3", "checkpoint.keep=9", "log.every=2", "data.dir=x"],
)  # fmt: skip
def test_where_and_how_are_no_part_of_the_experiment(override: str) -> None:
    a, b = Settings(), load(None, [override])
    assert a != b
    assert difference(experiment(a), experiment(b)) is None
    assert experiment_hash(a) == experiment_hash(b)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=1", "seed is 0 here and 1 there"),
        ("workload=cifar10", 'workload is "digits" here and "cifar10" there'),
        ("train.threads=2", "train.threads is 1 here and 2 there"),
        ("train.shards=8", "train.shards is 4 here and 8 there"),
        ("train.average={decay: 0.5}", 'train.average is null here and {"decay":0.5,"warmup":true} there'),
        ("optimizer.b1=0.5", "optimizer.b1 is not set here and 0.5 there"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate is 0.001 here and 1 there"),
    ],
)
def test_what_determines_the_weights_is_named(override: str, line: str) -> None:
    a, b = Settings(), load(None, [override])
    assert difference(experiment(a), experiment(b)) == line
    assert experiment_hash(a) != experiment_hash(b)


@given(SETTINGS, SETTINGS)
@hypothesis.settings(max_examples=50, deadline=None)
def test_hashes_differ_exactly_when_a_difference_can_be_named(a: Settings, b: Settings) -> None:
    assert (experiment_hash(a) == experiment_hash(b)) == (difference(experiment(a), experiment(b)) is None)


def test_reading_settings_loads_no_jax_and_no_sockets() -> None:
    code = "import sys, gradbus.settings as s; s.load(None); print(sorted({'jax', 'zmq', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"

"""The update: the bits of a plain loop, in place, restored exactly."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from ps.checkpoint import Checkpoint, Saved, Saver, load, save
from ps.optimizers import OptimizerError, build
from ps.settings import AverageSettings
from ps.update import RestoreError, Snapshot, Updater, leaves_of, parameters_sha256

ADAM = {"name": "adam", "learning_rate": 1e-2}
SGD = {"name": "sgd", "learning_rate": 0.1}
DECAYING = {"schedule": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 200}
CLIPPED = {"chain": [{"name": "clip_by_global_norm", "max_norm": 0.5}, {"name": "adamw", "learning_rate": DECAYING}]}


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return {"dense": {"w": normal(37, 19), "b": normal(19)}, "scale": normal(), "empty": np.zeros((0, 3), np.float32)}


def gradients(step: int, tree: Any) -> list[np.ndarray]:
    """Sums over 12 examples for the leaves of a tree, made up."""
    rng = np.random.default_rng(step)
    dtypes = [np.float64 if leaf.dtype == np.float64 else np.float32 for leaf in jax.tree.leaves(tree)]
    return [
        12 * rng.standard_normal(np.shape(leaf), np.float32).astype(dtype)
        for leaf, dtype in zip(jax.tree.leaves(tree), dtypes, strict=True)
    ]


def updater(
    spec: dict[str, Any], average: AverageSettings | None = None, params: Any = None, state: Any = None
) -> Updater:
    return Updater(parameters() if params is None else params, state, build(spec), average)


def bits(leaves: list[np.ndarray]) -> str:
    return parameters_sha256(leaves)


def same(a: Snapshot, b: Snapshot) -> bool:
    return a.keys() == b.keys() and all(
        a[part].keys() == b[part].keys() and all(a[part][name].tobytes() == b[part][name].tobytes() for name in a[part])
        for part in a
    )


@pytest.mark.parametrize(
    ("spec", "tx"),
    [
        (SGD, lambda: optax.sgd(0.1)),
        (SGD | {"momentum": 0.9, "nesterov": True}, lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
        (ADAM, lambda: optax.adam(1e-2)),
        (CLIPPED,
         lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 200)))),
    ],
    ids=["sgd", "momentum", "adam", "clip+adamw"],
)  # fmt: skip
def test_bits_of_a_plain_loop(spec: dict[str, Any], tx: Callable[[], optax.GradientTransformation]) -> None:
    plain = tx()

    @jax.jit
    def step(params: Any, opt_state: Any, sums: Any, n: int) -> Any:
        grads = jax.tree.map(lambda total: total / n, sums)
        updates, opt_state = plain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.array, parameters())
    opt_state = plain.init(params)
    ours = updater(spec, AverageSettings(decay=0.9), state={"mean": np.zeros(19, np.float32)})
    for i in range(20):
        sums = gradients(i, params)
        params, opt_state = step(params, opt_state, jax.tree.unflatten(jax.tree.structure(params), sums), 12)
        ours.apply([*sums, np.ones(19, np.float32)], 12)
        expected = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        assert bits(ours.weights()[:-1]) == bits(expected), f"after update {i + 1}"


def test_the_mean_is_over_examples() -> None:
    ours = Updater({"w": np.zeros(2, np.float32)}, None, build(SGD | {"learning_rate": 1}), None)
    ours.apply([np.array([3 * 1 + 1 * 5, 8], np.float32)], 4)  # 3 examples with gradient 1, one with 5
    assert ours.weights()[0].tolist() == [-2, -2]
    with pytest.raises(ValueError, match="examples: expected at least 1, got 0"):
        ours.apply([np.ones(2, np.float32)], 0)


def test_model_state_is_averaged_and_not_optimised() -> None:
    state = {"mean": np.zeros(2, np.float32), "visits": np.array(0, np.int32)}
    ours = updater(SGD, params={"w": np.zeros(2, np.float32)}, state=state)
    assert [(leaf.name, leaf.dtype, leaf.kind) for leaf in ours.leaves] == [
        ("params['w']", "float32", "trainable"),
        ("state['mean']", "float32", "state"),
        ("state['visits']", "int32", "state"),
    ]
    sums = [np.zeros(2, np.float32), np.array([3 * 2 + 5, 4], np.float32), np.array(4 * 7, np.float32)]
    ours.apply(sums, 4)
    _, mean, visits = ours.weights()
    assert (mean.tolist(), visits.tolist(), visits.dtype) == ([2.75, 1], 7, np.int32)


def test_leaves_that_cannot_be_trained_stay_as_they_are() -> None:
    params = {
        "a": np.ones(2, np.float32),
        "ids": np.array([3, 4], np.int8),
        "m": np.array(True),
        "z": np.array(1, np.float32),
    }
    ours = updater(ADAM, params=params)
    assert [leaf.kind for leaf in ours.leaves] == ["trainable", "frozen", "frozen", "trainable"]
    ours.apply([np.ones(2, np.float32), np.array(1, np.float32)], 1)
    a, ids, m, z = ours.weights()
    assert (ids.tolist(), ids.dtype, m.tolist(), m.dtype) == ([3, 4], params["ids"].dtype, True, np.bool_)
    assert (a < 1).all() and z < 1
    with pytest.raises(
        ValueError, match=r"^params: expected at least one array of a floating dtype to train, got none$"
    ):
        Updater({"ids": np.array([1])}, None, build(ADAM), None)


def test_arrays_are_taken_as_jax_takes_them() -> None:
    params = {"double": np.zeros(2), "number": 1.5, "ids": np.array([2**31 - 1])}
    ours = updater(SGD, params=params)
    assert ours.leaves == leaves_of(*jax.eval_shape(lambda: (jax.tree.map(jnp.asarray, params), None)))
    assert [(leaf.dtype, leaf.kind) for leaf in ours.leaves] == [
        ("float32", "trainable"), ("int32", "frozen"), ("float32", "trainable")]  # fmt: skip
    ours.apply([np.ones(2, np.float32), np.array(1, np.float32)], 1)
    assert [view.dtype.name for view in ours.weights()] == [leaf.dtype for leaf in ours.leaves]


def test_half_precision_is_summed_and_averaged_in_single() -> None:
    params = {"w": np.ones(3, ml_dtypes.bfloat16)}
    ours = updater(SGD | {"learning_rate": 1e-2}, AverageSettings(decay=0.9999, warmup=False), params)
    ours.apply([np.full(3, 768.0, np.float32)], 256)
    assert ours.weights()[0].dtype == ml_dtypes.bfloat16
    assert ours.weights()[0].astype(np.float32) == pytest.approx(0.97, abs=2**-8)
    assert ours.averaged()[0].dtype == ml_dtypes.bfloat16
    average = ours.snapshot()["average"]["params['w']"]
    assert average.dtype == np.float32  # in bfloat16 the next number below 1 is 0.996
    moved = 1 - ours.weights()[0].astype(np.float32)
    assert 1 - average == pytest.approx(1e-4 * moved, rel=0.01)


def test_the_update_is_made_in_place() -> None:
    ours = updater(ADAM, AverageSettings())
    ours.apply(gradients(0, parameters()), 12)
    before = [x for x in jax.tree.leaves((ours._params, ours._opt_state, ours._average)) if x.size]
    where = {x.unsafe_buffer_pointer() for x in before}
    copies = [view.copy() for view in ours.weights()]  # looked at and let go: must not turn donation off
    ours.apply(gradients(1, parameters()), 12)
    after = [x for x in jax.tree.leaves((ours._params, ours._opt_state, ours._average)) if x.size]
    assert all(x.is_deleted() for x in before)
    assert {x.unsafe_buffer_pointer() for x in after} == where
    assert bits(copies) != bits(ours.weights())


def test_sums_are_free_for_reuse_once_applied() -> None:
    ours, reference = updater(ADAM), updater(ADAM)
    raw = np.zeros(37 * 19 + 64, np.float32)
    aligned = raw[(-raw.ctypes.data % 64) // 4 :][: 37 * 19].reshape(37, 19)  # memory that XLA uses where it lies
    for i in range(20):
        sums = gradients(i, parameters())
        reference.apply(sums, 12)
        where = next(k for k, s in enumerate(sums) if s.shape == aligned.shape)
        aligned[...] = sums[where]
        ours.apply([*sums[:where], aligned, *sums[where + 1 :]], 12)
        aligned[...] = np.nan
    assert bits(ours.weights()) == bits(reference.weights())


def test_nothing_is_compiled_after_compile(caplog: pytest.LogCaptureFixture) -> None:
    ours = updater(CLIPPED, AverageSettings(), state={"m": np.ones(2, np.float32)})
    ours.compile()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for i in range(3):
            ours.apply([*gradients(i, parameters()), np.ones(2, np.float32)], 12 + i)
            ours.weights()
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
        jax.jit(lambda x: x * 3)(1.0)  # the log does see what compiles
        assert [record for record in caplog.records if "ompil" in record.getMessage()]


def test_compile_changes_nothing() -> None:
    ours = updater(ADAM, AverageSettings())
    before = ours.snapshot()
    ours.compile()
    assert same(before, ours.snapshot()) and ours.updates == 0


@pytest.mark.parametrize("warmup", [True, False])
def test_moving_average_in_closed_form(warmup: bool) -> None:
    ours = updater(
        SGD | {"learning_rate": 1}, AverageSettings(decay=0.5, warmup=warmup), {"w": np.zeros(1, np.float32)}
    )
    expected = 0.0
    for n in range(1, 30):
        ours.apply([np.ones(1, np.float32)], 1)
        decay = min(0.5, (1 + n) / (10 + n)) if warmup else 0.5
        expected = decay * expected + (1 - decay) * -n
        assert ours.averaged()[0][0] == pytest.approx(expected, rel=1e-5)
        assert ours.weights()[0][0] == -n


def test_the_average_does_not_touch_the_weights() -> None:
    plain, averaged = updater(ADAM), updater(ADAM, AverageSettings())
    assert bits(plain.averaged()) == bits(plain.weights())
    for i in range(10):
        plain.apply(gradients(i, parameters()), 12)
        averaged.apply(gradients(i, parameters()), 12)
    assert bits(plain.weights()) == bits(averaged.weights()) != bits(averaged.averaged())


@pytest.mark.parametrize(
    "spec",
    [CLIPPED, SGD | {"momentum": 0.9}, {"chain": [{"name": "add_noise", "eta": 0.1, "gamma": 0.5, "key": 1}, SGD]}],
    ids=["clip+adamw+cosine", "momentum", "noise"],
)  # fmt: skip
def test_a_restored_run_has_the_bits_of_one_that_never_stopped(spec: dict[str, Any]) -> None:
    state = {"m": np.ones(2, np.float32)}
    params = parameters() if spec is CLIPPED else {"w": np.ones((2, 3), np.float32)}
    half = 100 if spec is CLIPPED else 10

    def feed(target: Updater, steps: range) -> Updater:
        for i in steps:
            target.apply([*gradients(i, params), np.full(2, i, np.float32)], 12)
        return target

    straight = feed(updater(spec, AverageSettings(), params, state), range(2 * half))
    first = feed(updater(spec, AverageSettings(), params, state), range(half))
    second = updater(spec, AverageSettings(), jax.tree.map(np.zeros_like, params), state)
    second.restore(first.snapshot(), half)
    assert second.updates == half and same(second.snapshot(), first.snapshot())
    feed(second, range(half, 2 * half))
    assert same(second.snapshot(), straight.snapshot())
    assert bits(second.averaged()) == bits(straight.averaged())


def test_a_run_restored_from_disk_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    params = {"half": np.ones(3, ml_dtypes.bfloat16), "ids": np.arange(3), "empty": np.zeros((0, 2), np.float32)}
    noisy = {"chain": [{"name": "add_noise", "eta": 0.1, "gamma": 0.5, "key": 1}, ADAM]}
    first, second = (updater(noisy, AverageSettings(), params) for _ in range(2))
    sums = [np.ones(leaf.shape, np.float32) for leaf in first.leaves if leaf.kind == "trainable"]
    first.apply(sums, 2)
    path = save(tmp_path, Checkpoint(1, first.updates, first.snapshot(), {}))
    second.restore(load(path).tensors, load(path).updates)
    for each in (first, second):
        each.apply(sums, 2)
    assert same(first.snapshot(), second.snapshot())


def test_a_snapshot_is_a_copy() -> None:
    ours = updater(ADAM)
    snapshot = ours.snapshot()
    before = bits(list(snapshot["weights"].values()))
    ours.apply(gradients(0, parameters()), 12)
    assert bits(list(snapshot["weights"].values())) == before != bits(ours.weights())
    assert list(snapshot["weights"]) == [leaf.name for leaf in ours.leaves]
    with pytest.raises(ValueError, match="read-only"):
        snapshot["weights"]["params['scale']"][...] = 0


def test_every_checkpoint_that_is_written_while_training_goes_on_is_of_one_version(tmp_path: Path) -> None:
    """With a gradient of -1 and all the weight of the past, after n updates each momentum is -n and each parameter
    n * (n + 1) / 2. Updates are made in place, and a thread writes meanwhile."""
    ours = updater(
        {"name": "sgd", "learning_rate": 1.0, "momentum": 1.0}, params={"a": np.zeros((300, 50)), "b": np.zeros(7)}
    )
    sums = [np.full((300, 50), -1, np.float32), np.full(7, -1, np.float32)]
    saver, saved = Saver(tmp_path, keep=1000), []
    for n in range(1, 201):
        ours.apply(sums, 1)
        saver.submit(Checkpoint(n, ours.updates, ours.snapshot(), {}))
        saved += saver.poll(10.0 if n % 50 == 0 else 0.0)  # a busy machine must not save the last one only
    assert saver.close(10)
    saved += saver.poll()
    assert len(saved) > 1 and saved[-1].version == 200
    for event in saved:
        assert isinstance(event, Saved)
        found, n = load(event.path), event.version
        weights = found.tensors["weights"].values()
        momenta = [array for name, array in found.tensors["optimizer"].items() if "trace" in name]
        assert len(momenta) == 2 and found.updates == n
        assert {float(x) for array in weights for x in np.unique(array)} == {n * (n + 1) / 2}
        assert {float(x) for array in momenta for x in np.unique(array)} == {-float(n)}


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda s: s.pop("optimizer"), "optimizer: expected 9 arrays, got no such part; the checkpoint is incomplete"),
        (lambda s: s["weights"].pop("params['scale']"),
         "weights, params['scale']: expected float32[], got nothing; the checkpoint is of another experiment"),
        (lambda s: s["weights"].update(x=np.zeros(1)),
         "weights, x: expected nothing, got float64[1]; the checkpoint is of another experiment"),
        (lambda s: s["weights"].update({"params['scale']": np.zeros((2, 1), np.float16)}),
         "weights, params['scale']: expected float32[], got float16[2, 1]; the checkpoint is of another experiment"),
        (lambda s: s["optimizer"].update({"optimizer[0].count": np.array(7, np.int32)}),
         "optimizer, [0].count: expected the count 3 of the checkpoint, got 7"),
    ],
)  # fmt: skip
def test_snapshots_that_do_not_fit(spoil: Callable[[Snapshot], Any], line: str) -> None:
    ours = updater(ADAM)
    for i in range(3):
        ours.apply(gradients(i, parameters()), 12)
    snapshot, other = ours.snapshot(), updater(ADAM)
    spoil(snapshot)
    before = other.snapshot()
    with pytest.raises(RestoreError) as error:
        other.restore(snapshot, 3)
    assert str(error.value) == line
    assert same(before, other.snapshot()) and other.updates == 0


def test_a_snapshot_without_the_average_does_not_fit() -> None:
    with pytest.raises(RestoreError, match=r"^average: expected 4 arrays, got no such part"):
        updater(ADAM, AverageSettings()).restore(updater(ADAM).snapshot(), 0)


def test_optimizers_that_need_more_than_gradients_are_refused() -> None:
    with pytest.raises(
        OptimizerError, match=r"^optimizer: it cannot work with these parameters and their gradients alone: .*value"
    ):
        updater({"name": "lbfgs"})


def test_every_optimizer_keeps_its_state_in_place() -> None:
    """No weak type, dtype or alias that would compile again, or keep a buffer from being donated."""
    names = "adafactor lamb nadam rprop sm3 contrib.dog contrib.prodigy"
    for name in names.split():
        ours = updater({"name": name, "learning_rate": 0.01}, params={"w": np.ones((3, 2), np.float32)})
        for _ in range(2):
            ours.apply([np.ones((3, 2), np.float32)], 1)
        assert np.isfinite(ours.weights()[0]).all(), name


def test_sha256_is_over_little_endian_bytes_in_order() -> None:
    leaves = [np.array(1.5, np.float32), np.arange(4, dtype=np.int32).reshape(2, 2).T, np.zeros((0,), np.float32)]
    expected = hashlib.sha256(b"\x00\x00\xc0\x3f" + bytes([0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]))
    assert parameters_sha256(leaves) == expected.hexdigest()
    half = np.array([1.0], ml_dtypes.bfloat16)
    assert parameters_sha256([half]) == hashlib.sha256(b"\x80\x3f").hexdigest()

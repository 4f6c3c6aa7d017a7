"""The shipped workloads against closed forms and slow, obvious versions in NumPy; and the check of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradbus.workloads import cifar10, layers
from gradbus.workloads.base import WorkloadError
from gradbus.workloads.cifar10 import Cifar10
from gradbus.workloads.digits import Digits, shifted
from gradbus.workloads.fashion import Fashion
from gradbus.workloads.loading import load
from gradbus.workloads.quadratic import Quadratic, QuadraticState
from gradbus.workloads.validation import describe_data, validate

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("allow"):
        yield


def parameters(workload: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(workload.init, KEY)))


def pictures(count: int, *shape: int, highest: int = 255) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    image = random.integers(0, highest + 1, (count, *shape)).astype(np.uint8)
    return {"image": image, "label": random.integers(0, 10, count).astype(np.uint8)}


SHIPPED = [
    ("digits", 151_306, pictures(2, 8, 8, highest=16)),
    ("fashion", 421_642, pictures(2, 28, 28)),
    ("cifar10", 1_068_298, pictures(2, 32, 32, 3)),
    ("quadratic", 5, Quadratic().train_data(None)),
    ("quadratic_state", 5, QuadraticState().train_data(None)),
]


@pytest.mark.parametrize(("name", "count", "data"), SHIPPED, ids=[name for name, _, _ in SHIPPED])
def test_shipped_workloads_keep_the_contract(name: str, count: int, data: Any) -> None:
    workload = load(name)
    validate(workload, data)
    validate(workload, data, examples=1)
    assert parameters(workload) == count


# --- the first experiment ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar_params() -> Any:
    return jax.jit(Cifar10().init)(KEY)


def test_cifar_initial_values(cifar_params: Any) -> None:
    expected = {  # the standard deviation given, and the bias
        "conv1": ((5, 5, 3, 64), 0.05, 0.0),
        "conv2": ((5, 5, 64, 64), 0.05, 0.1),
        "dense1": ((2304, 384), 0.04, 0.1),
        "dense2": ((384, 192), 0.04, 0.1),
        "output": ((192, 10), 1 / 192, 0.0),
    }
    assert set(cifar_params) == set(expected)
    for name, (shape, stddev, bias) in expected.items():
        weights = np.asarray(cifar_params[name]["w"], np.float64)
        assert weights.shape == shape and weights.dtype == np.float64
        assert np.abs(weights).max() <= 2 * stddev * (1 + 1e-6)
        # A normal distribution cut at two sigma has 0.87963 of its deviation, here estimated to 0.6 / sqrt(size).
        assert abs(weights.std() / stddev - 0.87963) < 4 * 0.6 / weights.size**0.5
        assert abs(weights.mean() / stddev) < 4 * 0.88 / weights.size**0.5
        assert np.unique(np.asarray(cifar_params[name]["b"])).tolist() == [np.float32(bias)]


def test_local_response_normalisation_is_the_sum_over_nine_channels() -> None:
    x = np.random.default_rng(1).normal(0, 30, (2, 3, 2, 64)).astype(np.float32)
    slow = np.empty(x.shape, np.float64)
    for channel in range(64):
        window = x[..., max(0, channel - 4) : channel + 5].astype(np.float64)
        slow[..., channel] = x[..., channel] / (1.0 + 0.001 / 9.0 * np.sum(window**2, axis=-1)) ** 0.75
    np.testing.assert_allclose(jax.jit(cifar10.local_response)(x), slow, rtol=2e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_max_pool_is_the_padded_window_and_its_gradient_goes_to_the_maximum(size: int) -> None:
    x = np.random.default_rng(2).normal(size=(2, 6, 4, 3)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-np.inf)
    slow = np.empty((2, 3, 2, 3), np.float32)
    gradient = np.zeros_like(padded)
    for n, i, j, c in np.ndindex(slow.shape):
        window = padded[n, 2 * i : 2 * i + size, 2 * j : 2 * j + size, c]
        slow[n, i, j, c] = window.max()
        row, column = np.unravel_index(window.argmax(), (size, size))
        gradient[n, 2 * i + row, 2 * j + column, c] += 1 + n + i + j + c
    weights = jnp.asarray(np.indices(slow.shape).sum(axis=0).astype(np.float32) + 1)

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, back = jax.vjp(lambda x: layers.max_pool(x, size), x)
        return found, back(weights)[0]

    found, back = jax.jit(both)(x)
    np.testing.assert_array_equal(found, slow)
    np.testing.assert_array_equal(back, gradient[:, :6, :4])


def test_standardisation_has_a_floor_for_flat_pictures() -> None:
    x = np.random.default_rng(3).normal(100, 50, (3, 24, 24, 3)).astype(np.float32)
    x[1:] = 7.0
    x[1, 0, 0, 0] = 7.5  # the deviation, 0.012, is below 1 / sqrt(1728) = 0.024
    found = np.asarray(jax.jit(cifar10.standardised)(x))
    assert abs(found[0].mean()) < 1e-5 and abs(found[0].std() - 1) < 1e-5
    np.testing.assert_allclose(found[1, 0, 0, 0], (0.5 - 0.5 / 1728) * 1728**0.5, rtol=1e-4)
    np.testing.assert_array_equal(found[2], 0.0)


def test_distortions_are_those_of_the_tutorial() -> None:
    """Each result is contrast * (crop, flipped or not) + a constant by channel: the crop is searched."""
    image = pictures(1, 32, 32, 3)["image"][0]
    results = np.asarray(jax.jit(jax.vmap(cifar10._distort, (None, 0)))(jnp.asarray(image), jax.random.split(KEY, 64)))
    crops = {
        (row, column, flip): image[row : row + 24, column : column + 24][:, :: -1 if flip else 1].astype(np.float64)
        for row in range(9)
        for column in range(9)
        for flip in (False, True)
    }
    centred = {where: crop - crop.mean(axis=(0, 1)) for where, crop in crops.items()}
    found = []
    for result in results:
        moved = result - result.mean(axis=(0, 1))
        scores = {where: np.vdot(moved, crop) / np.linalg.norm(crop) for where, crop in centred.items()}
        where = max(scores, key=lambda each: scores[each])
        contrast = np.vdot(moved, centred[where]) / np.vdot(centred[where], centred[where])
        brightness = result.mean(axis=(0, 1)) - crops[where].mean(axis=(0, 1))
        # Contrast is about the mean of each channel, so the means differ by the brightness alone, the same in all.
        np.testing.assert_allclose(moved, contrast * centred[where], atol=1e-3)
        np.testing.assert_allclose(brightness, brightness[0], atol=1e-3)
        found.append((*where, contrast, brightness[0]))
    rows, columns, flips, contrasts, brightnesses = (np.array(values) for values in zip(*found, strict=True))
    assert set(rows) == set(columns) == set(range(9))
    assert 16 < flips.sum() < 48
    assert 0.2 <= contrasts.min() < 0.4 and 1.6 < contrasts.max() <= 1.8
    assert -63 <= brightnesses.min() < -50 and 50 < brightnesses.max() <= 63
    assert len(set(contrasts.round(5))) == 64


def test_distortions_depend_on_the_key_and_on_the_place_in_the_batch() -> None:
    same = jnp.broadcast_to(pictures(1, 32, 32, 3)["image"], (4, 32, 32, 3))
    distort = jax.jit(cifar10.distorted)
    first, again, other = distort(same, KEY), distort(same, KEY), distort(same, jax.random.key(1))
    assert first.shape == (4, 24, 24, 3) and first.dtype == jnp.float32
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert all(not np.array_equal(first[0], first[i]) for i in range(1, 4))


def test_cifar_loss_is_cross_entropy_plus_weight_decay_of_the_dense_layers(cifar_params: Any) -> None:
    batch = pictures(2, 32, 32, 3)
    loss = jax.jit(Cifar10().loss)
    squares = {name: np.sum(np.asarray(layer["w"], np.float64) ** 2) for name, layer in cifar_params.items()}
    decay = 0.004 * (squares["dense1"] + squares["dense2"]) / 2
    value, metrics = loss(cifar_params, batch, KEY)
    assert set(metrics) == {"cross_entropy"}
    np.testing.assert_allclose(value - metrics["cross_entropy"], decay, rtol=1e-4)
    # At the start all ten classes are nearly equally likely.
    assert abs(metrics["cross_entropy"] - np.log(10)) < 0.1
    for name in ("conv1", "conv2", "dense1", "dense2", "output"):
        doubled = cifar_params | {name: jax.tree.map(lambda leaf: 2 * leaf, cifar_params[name])}
        more = 3 * 0.004 * squares[name] / 2 if name in ("dense1", "dense2") else 0.0
        value, metrics = loss(doubled, batch, KEY)
        np.testing.assert_allclose(value - metrics["cross_entropy"], decay + more, rtol=1e-4)


def test_cifar_network_against_a_slow_one(cifar_params: Any) -> None:
    """The order of layers and the padding, written out in NumPy."""
    image = np.random.default_rng(5).normal(size=(24, 24, 3)).astype(np.float32)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), cifar_params)

    def conv(x: np.ndarray, layer: Any) -> np.ndarray:
        patches = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((2, 2), (2, 2), (0, 0))), (5, 5), axis=(0, 1))
        return np.maximum(np.einsum("hwcij,ijco->hwo", patches, layer["w"], optimize=True) + layer["b"], 0)

    def pool(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 1), (0, 1), (0, 0)), constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(0, 1))[::2, ::2].max(axis=(3, 4))

    def lrn(x: np.ndarray) -> np.ndarray:
        band = np.abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 4
        return x / (1 + 0.001 / 9 * (x**2 @ band)) ** 0.75

    x = lrn(pool(conv(image.astype(np.float64), p["conv1"])))
    x = pool(lrn(conv(x, p["conv2"]))).reshape(-1)
    for name in ("dense1", "dense2"):
        x = np.maximum(x @ p[name]["w"] + p[name]["b"], 0)
    slow = x @ p["output"]["w"] + p["output"]["b"]
    found = jax.jit(cifar10._logits)(cifar_params, image[None])
    np.testing.assert_allclose(found[0], slow, rtol=1e-4, atol=1e-5)


def test_cifar_score_uses_the_central_crop(cifar_params: Any) -> None:
    batch = pictures(5, 32, 32, 3)
    score = jax.jit(Cifar10().score)
    found = score(cifar_params, batch)
    assert set(found) == {"precision_at_1", "loss"} and set(np.unique(found["precision_at_1"])) <= {0.0, 1.0}
    frame = batch["image"].copy()
    frame[:, :4], frame[:, -4:], frame[:, :, :4], frame[:, :, -4:] = 0, 255, 0, 255
    np.testing.assert_array_equal(score(cifar_params, batch | {"image": frame})["loss"], found["loss"])
    frame[:, 4, 4] ^= 255
    assert not np.array_equal(score(cifar_params, batch | {"image": frame})["loss"], found["loss"])


# --- digits, fashion and what they share ---------------------------------------------------------------------------


def test_digits_learn_in_a_few_steps() -> None:
    workload = Digits()
    train = workload.train_data(None)

    @jax.jit
    def step(params: Any, start: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        batch = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(jnp.asarray(array), start, 64), train)
        (loss, _), gradient = jax.value_and_grad(workload.loss, has_aux=True)(params, batch, key)
        return jax.tree.map(lambda weight, change: weight - 0.1 * change, params, gradient), loss

    params = jax.jit(workload.init)(KEY)
    losses = []
    for number in range(60):
        params, loss = step(params, number * 64 % 1344, jax.random.fold_in(KEY, number))
        losses.append(float(loss))
    accuracy = np.mean(jax.jit(workload.score)(params, workload.eval_data(None))["accuracy"])
    assert np.mean(losses[-10:]) < losses[0] / 3 and accuracy > 0.85


@pytest.mark.parametrize(("workload", "shape"), [(Digits(), (8, 8)), (Fashion(), (28, 28))])
def test_training_is_keyed_and_scoring_is_not(workload: Any, shape: tuple[int, ...]) -> None:
    batch = pictures(4, *shape, highest=16)
    params = jax.jit(workload.init)(KEY)
    loss, score = jax.jit(workload.loss), jax.jit(workload.score)
    first, again, other = (float(loss(params, batch, jax.random.key(seed))[0]) for seed in (1, 1, 2))
    assert first == again != other
    np.testing.assert_array_equal(score(params, batch)["loss"], score(params, batch)["loss"])


def test_shifts_of_whole_pixels_and_of_fractions() -> None:
    x = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
    by = np.array([[1, 0], [0, -1], [0.25, 0]], np.float32)
    down, left, quarter = jax.jit(shifted)(np.stack([x, x, x]), by)
    np.testing.assert_array_equal(down, np.vstack([np.zeros((1, 4)), x[:-1]]))
    np.testing.assert_array_equal(left, np.hstack([x[:, 1:], np.zeros((4, 1))]))
    np.testing.assert_allclose(quarter[1:], 0.75 * x[1:] + 0.25 * x[:-1])


def test_cross_entropy_and_correct() -> None:
    logits = jnp.array([[0.0, jnp.log(3.0)], [5.0, 5.0]])
    labels = jnp.array([1, 1], jnp.uint8)
    np.testing.assert_allclose(layers.cross_entropy(logits, labels), [np.log(4 / 3), np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(layers.correct(logits, labels), [1.0, 0.0])  # of equal ones the first counts


def test_one_draw_fills_all_layers() -> None:
    found = layers.draw(lambda shape: jnp.arange(shape[0]), (2, 3), (), (4,))
    assert [values.tolist() for values in found] == [[[0, 1, 2], [3, 4, 5]], 6, [7, 8, 9, 10]]


def test_he_normal_has_the_variance_of_its_inputs() -> None:
    for values, inputs in zip(layers.he_normal(KEY, (3, 3, 8, 64), (100, 50)), (72, 100), strict=True):
        assert abs(np.var(np.asarray(values)) * inputs / 2 - 1) < 4 * (2 / values.size) ** 0.5


def test_dropout_keeps_the_mean() -> None:
    found = np.asarray(layers.dropout(jnp.ones((100, 100)), KEY, 0.25))
    assert set(np.unique(found)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    assert abs((found == 0).mean() - 0.25) < 4 * (0.25 * 0.75) ** 0.5 / 100


# --- quadratic -----------------------------------------------------------------------------------------------------


def test_the_gradient_of_quadratic_vanishes_at_its_solution() -> None:
    workload = Quadratic()
    data = workload.train_data(None)
    solution = jax.tree.map(np.float32, workload.solution())
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(workload.loss, has_aux=True))(solution, data, KEY)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-6
    assert float(loss) < 1e-3 and float(metrics["sample"]) == 501.0
    at_zero = jax.jit(workload.loss)(workload.init(KEY), data, KEY)[0]
    np.testing.assert_allclose(at_zero, 0.5 * np.mean(data["y"].astype(np.float64) ** 2), rtol=1e-6)


def test_quadratic_data_is_the_same_everywhere() -> None:
    assert describe_data(Quadratic().train_data(None))[:16] == "e3a336c2bdd51ed1"


def test_quadratic_state_counts_visits_and_averages_inputs() -> None:
    workload = QuadraticState()
    data = workload.train_data(None)
    params, state = workload.init(KEY), workload.init_state(KEY)
    batch = jax.tree.map(lambda array: array[[3, 3, 8, 1002]], data)
    _, (_, state) = jax.jit(workload.loss)(params, state, batch, KEY)
    visits = np.asarray(state["visits"]) * 4
    assert visits[[3, 8, 1002]].tolist() == [2, 1, 1] and visits.sum() == 4
    np.testing.assert_allclose(state["mean"], 0.1 * batch["x"].mean(axis=0), rtol=1e-6)


# --- the check of the contract -------------------------------------------------------------------------------------


class Linear:
    """Keeps the contract; the tests break one thing at a time."""

    def init(self, key: Any) -> Any:
        return {"w": jnp.zeros((3,)), "steps": jnp.zeros((), jnp.int32)}

    def loss(self, params: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(batch["x"] @ params["w"]), {"count": params["steps"]}

    def train_data(self, folder: Any) -> Any:
        return {"x": np.ones((10, 3), np.float64)}

    eval_data = train_data

    def score(self, params: Any, batch: Any) -> Any:
        return {"value": batch["x"] @ params["w"]}


class Stateful(Linear):
    def init_state(self, key: Any) -> Any:
        return {"m": jnp.zeros((3,))}

    def loss(self, params: Any, state: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(batch["x"] @ params["w"]), ({}, {"m": state["m"] + 1})

    def score(self, params: Any, state: Any, batch: Any) -> Any:
        return {"value": batch["x"] @ params["w"]}


def fault(base: type, method: str, function: Any, data: Any = None) -> str:
    workload = type("Broken", (base,), {method: function})()
    with pytest.raises(WorkloadError) as error:
        validate(workload, workload.train_data(None) if data is None else data)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix("workload: ")


def test_what_keeps_the_contract_passes() -> None:
    for workload in (Linear(), Stateful()):
        validate(workload, workload.train_data(None))


W = jnp.zeros(())
FAULTS: list[tuple[type, str, Any, str]] = [
    (Linear, "init", lambda s, k: {"n": jnp.zeros((2,), jnp.int32)}, "init returned {n: int32[2]}; expected at least"),
    (Linear, "init", lambda s, k: 1 / 0, "init raised ZeroDivisionError: division by zero (" + __file__),
    (Linear, "loss", lambda s, p, b, k: W, "loss returned float32[]; expected the pair (loss, metrics)"),
    (Linear, "loss", lambda s, p, b, k: (b["x"] @ p["w"], {}), "loss returned float32[7]; expected a floating scalar"),
    (Linear, "loss", lambda s, p, b, k: (p["steps"], {}), "loss returned int32[]; expected a floating scalar"),
    (Linear, "loss", lambda s, p, b, k: (W, [W]), "loss returned as metrics [float32[]]; expected a dict"),
    (Linear, "loss", lambda s, p, b, k: (W, {"a": b["x"]}), "metric 'a' is float32[7,3]; expected a real scalar"),
    (Linear, "loss", lambda s, p, b: (W, {}), "loss raised TypeError"),
    (Linear, "loss", lambda s, p, b, k: (W, {"x": float(b["x"][0, 0])}), "loss raised ConcretizationTypeError"),
    (Linear, "score", lambda s, p, b: {"a": W}, "score 'a' of 7 examples is float32[]; expected a value per example"),
    (Linear, "score", lambda s, p, b: b["x"][:, 0], "score returned float32[7]; expected a dict"),
    (Linear, "score", lambda s, p, b: {}, "score returned {}; expected a dict"),
    (
        Stateful,
        "init_state",
        lambda s, k: {"m": jnp.zeros(3, jnp.int32)},
        "init_state()['m'] is int32[3]; expected a flo",
    ),
    (Stateful, "loss", lambda s, p, t, b, k: (W, {}), "loss returned as its second value {}; expected the pair"),
    (
        Stateful,
        "loss",
        lambda s, p, t, b, k: (W, ({}, {"n": W})),
        "loss returned as new_state {n: float32[]}; expected",
    ),
    (Stateful, "loss", lambda s, p, t, b, k: (W, ({}, {"m": W})), "new_state['m'] is float32[]; expected float32[3]"),
]


@pytest.mark.parametrize(("base", "method", "function", "line"), FAULTS, ids=[line[:40] for *_, line in FAULTS])
def test_each_fault_is_one_line(base: type, method: str, function: Any, line: str) -> None:
    assert fault(base, method, function).startswith(line)


def test_a_loss_without_a_gradient() -> None:
    def loss(self: Any, params: Any, batch: Any, key: Any) -> Any:
        end = jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, jnp.sum(params["w"]))
        return end, {}

    assert fault(Linear, "loss", loss).startswith(
        "the gradient of loss raised ValueError: Reverse-mode differentiation"
    )


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"x": np.ones((4, 3)), "y": np.ones(5)}, "train_data['y'] has 5 examples while train_data['x'] has 4"),
        ({"x": np.ones((0, 3))}, "train_data['x'] is float64[0,3]; expected at least 1 example"),
        ({"x": np.float32(3)}, "train_data['x'] is float32[]; expected an array whose first axis"),
        ({"x": "text"}, "train_data['x'] is text; expected an array"),
        ({"x": np.array(["a", "b"])}, "train_data['x'] is <U1[2]; expected a numeric or boolean dtype"),
        ({}, "train_data returned {}; expected a pytree with at least one"),
    ],
)
def test_data_that_cannot_be_batches(data: Any, line: str) -> None:
    assert fault(Linear, "unused", None, data).startswith(line)


def test_the_hash_of_data_sees_names_shapes_dtypes_values_and_order() -> None:
    data = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.ones(2, np.float32)}
    variants: list[Any] = [
        data,
        {"c": data["a"], "b": data["b"]},
        {"a": data["a"].reshape(2, 3, 1), "b": data["b"]},
        {"a": data["a"].view(np.uint32), "b": data["b"]},
        {"a": data["a"][::-1], "b": data["b"]},
        [data["a"], data["b"]],
    ]
    assert len({describe_data(each) for each in variants}) == len(variants)


def test_the_hash_of_data_does_not_see_how_it_lies_in_memory(tmp_path: Any) -> None:
    array = np.random.default_rng(0).normal(size=(3_000, 3, 1_000)).astype(np.float32)  # more than one chunk of 16 MiB
    np.save(tmp_path / "a.npy", array)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert len({describe_data(each) for each in (array, mapped, array.astype(">f4"), np.asfortranarray(array))}) == 1

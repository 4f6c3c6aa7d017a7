"""The gradient of a shard: that of JAX, weighted by examples, and the same bits whatever else was computed."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bus.layout import Bytes, weights_layout
from gradbus.workloads.quadratic import Quadratic, QuadraticState
from ps.update import leaves_of
from worker.batches import Batches
from worker.compute import ShardGradients
from worker.executor import Calculator, ShardSum, Stopped

SEED, BATCH, SHARDS = 5, 24, 4
EXAMPLES = BATCH // SHARDS
BUCKET_BYTES = 64


class Mixed:
    """Leaves of every kind; half precision, whole numbers and truth values among them; noise that the key decides."""

    def init(self, key: Any) -> Any:
        return {
            "count": jnp.array(3, jnp.int32),
            "half": jnp.linspace(-1, 1, 4).astype(jnp.bfloat16),
            "mask": jnp.array([True, False, True, True]),
            "w": jnp.linspace(0.5, 1.5, 4, dtype=jnp.float32),
        }

    def loss(self, params: Any, batch: Any, key: Any) -> Any:
        weights = jnp.where(params["mask"], params["w"], 0) + params["half"].astype(jnp.float32)
        noisy = batch["x"] @ weights * params["count"] + jax.random.normal(key)
        return jnp.mean((noisy - batch["y"]) ** 2), {"noise": jax.random.normal(key)}

    def train_data(self, folder: Any) -> Any:
        return Quadratic().train_data(folder)


class Model:
    """A workload with weights that have moved away from zero, and what a worker computes of it."""

    def __init__(self, workload: Any, train: Any = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        key = jax.random.key(SEED)
        init_state = getattr(workload, "init_state", None)
        self.workload, self.train = workload, workload.train_data(None) if train is None else train
        self.params = jax.tree.map(_moved, workload.init(key))
        self.state = jax.tree.map(_moved, init_state(key)) if init_state else None
        leaves = leaves_of(self.params, self.state)
        self.batches = Batches(SEED, len(self.train["y"]), BATCH, SHARDS)
        self.gradients = ShardGradients(
            workload, init_state=init_state, leaves=leaves, bucket_bytes=bucket_bytes, train=self.train,
            batches=self.batches, seed=SEED,
        )  # fmt: skip
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((self.params, self.state))]
        self.buffer = weights_layout(leaves, bucket_bytes).pack(arrays)
        self.gradients.load(self.buffer)

    def batch(self, version: int, shard: int) -> Any:
        return jax.tree.map(lambda array: array[self.batches.indices(version, shard)], self.train)

    def views(self, total: ShardSum) -> dict[str, np.ndarray[Any, Any]]:
        layout = self.gradients.layout
        return {leaf.name: view for leaf, view in zip(layout.leaves, layout.views(total.buffer), strict=True)}


def _moved(leaf: Any) -> Any:
    moved = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape) / 8 - 0.25
    return leaf + moved.astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@pytest.fixture(scope="module")
def quadratic() -> Model:
    return Model(Quadratic())


@pytest.fixture(scope="module")
def mixed() -> Model:
    return Model(Mixed())


@pytest.fixture(autouse=True)
def as_loaded(quadratic: Model, mixed: Model) -> None:
    for model in (quadratic, mixed):
        model.gradients.load(model.buffer)


@pytest.mark.parametrize(("version", "shard"), [(0, 0), (0, 3), (41, 2), (1000, 1)])
def test_a_shard_is_the_gradient_of_jax_times_its_examples(quadratic: Model, version: int, shard: int) -> None:
    batch = quadratic.batch(version, shard)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), version), shard)
    (loss, metrics), gradient = jax.value_and_grad(Quadratic().loss, has_aux=True)(quadratic.params, batch, key)
    found = quadratic.gradients.shard(version, shard)
    assert (found.examples, found.left_out, found.trouble) == (EXAMPLES, (), "")
    views = quadratic.views(found)
    np.testing.assert_allclose(views["params['w']"], EXAMPLES * gradient["w"], rtol=2e-6)
    np.testing.assert_allclose(views["params['b']"], EXAMPLES * gradient["b"], rtol=2e-6)
    assert found.sums["loss"] == pytest.approx(EXAMPLES * float(loss), rel=1e-6)
    assert found.sums["sample"] == pytest.approx(EXAMPLES * float(metrics["sample"]), rel=1e-6)
    assert set(found.sums) == {"loss", "sample"}


def test_a_shard_is_what_the_formula_says(quadratic: Model) -> None:
    batch = quadratic.batch(7, 1)
    w, b = (np.asarray(quadratic.params[name], np.float64) for name in ("w", "b"))
    residual = batch["x"] @ w + b - batch["y"]
    views = quadratic.views(quadratic.gradients.shard(7, 1))
    np.testing.assert_allclose(views["params['w']"], batch["x"].T @ residual, rtol=1e-5)
    np.testing.assert_allclose(views["params['b']"], residual.sum(), rtol=1e-5)


def test_shards_of_a_step_add_up_to_the_gradient_of_the_whole_batch(quadratic: Model) -> None:
    """One worker, or any number of them, is plain training on the joined batch."""
    whole = {name: np.concatenate([quadratic.batch(3, s)[name] for s in range(SHARDS)]) for name in quadratic.train}
    gradient = jax.grad(lambda params: Quadratic().loss(params, whole, None)[0])(quadratic.params)
    totals = [quadratic.views(quadratic.gradients.shard(3, shard)) for shard in range(SHARDS)]
    for name in ("w", "b"):
        mean = sum(total[f"params['{name}']"] for total in totals) / BATCH
        np.testing.assert_allclose(mean, gradient[name], rtol=1e-5)


def test_model_state_travels_as_its_sum_over_examples() -> None:
    model = Model(QuadraticState())
    batch = model.batch(2, 1)
    _, (_, state) = QuadraticState().loss(model.params, model.state, batch, None)
    views = model.views(model.gradients.shard(2, 1))
    assert model.state is not None
    np.testing.assert_allclose(views["state['mean']"], EXAMPLES * state["mean"], rtol=1e-6)
    np.testing.assert_allclose(views["state['visits']"], EXAMPLES * state["visits"], rtol=1e-6)
    visited = np.flatnonzero(views["state['visits']"] - EXAMPLES * np.asarray(model.state["visits"]) > 0.5)
    assert sorted(visited) == sorted(model.batches.indices(2, 1))


def test_only_what_is_trained_has_a_gradient_and_it_is_in_full_precision(mixed: Model) -> None:
    views = mixed.views(mixed.gradients.shard(0, 1))
    assert {name: view.dtype.name for name, view in views.items()} == {
        "params['half']": "float32",
        "params['w']": "float32",
    }
    assert views["params['w']"][1] == 0 and (views["params['w']"][[0, 2, 3]] != 0).all(), "the mask is in force"
    half, full = views["params['half']"], views["params['w']"]
    np.testing.assert_allclose(half[[0, 2, 3]], full[[0, 2, 3]], rtol=2**-7)  # bfloat16 until it is scaled


def test_noise_depends_on_the_version_and_the_shard_and_on_nothing_else(mixed: Model) -> None:
    noise = {at: mixed.gradients.shard(*at).sums["noise"] for at in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]}
    assert len(set(noise.values())) == len(noise)
    other = Model(Mixed())
    for at in reversed(noise):
        assert other.gradients.shard(*at).sums["noise"] == noise[at]


def bits(total: ShardSum) -> tuple[bytes, dict[str, float], int]:
    return total.buffer.tobytes(), total.sums, total.examples


@pytest.mark.parametrize("model", ["quadratic", "mixed"])
def test_a_shard_has_the_same_bits_whatever_was_computed_before(model: str, request: pytest.FixtureRequest) -> None:
    one: Model = request.getfixturevalue(model)
    alone = {shard: bits(one.gradients.shard(6, shard)) for shard in range(SHARDS)}
    other = Model(one.workload)
    for shard in (3, 1, 0, 2, 1):
        other.gradients.shard(5, shard)
        assert bits(other.gradients.shard(6, shard)) == alone[shard]


def test_prefetched_batches_give_the_same_bits(mixed: Model) -> None:
    plain = [bits(mixed.gradients.shard(9, shard)) for shard in range(SHARDS)]
    mixed.gradients.prefetch(9, [0, 2])
    assert [bits(mixed.gradients.shard(9, shard)) for shard in (2, 0, 1, 3)] == [plain[s] for s in (2, 0, 1, 3)]
    mixed.gradients.prefetch(8, [1])  # the guess was wrong
    assert bits(mixed.gradients.shard(9, 1)) == plain[1]


def tree_sum(buffers: list[Bytes], low: int, high: int) -> np.ndarray[Any, Any]:
    if high - low == 1:
        return buffers[low].view(np.float32)
    middle = low + (1 << (high - low - 1).bit_length()) // 2
    return tree_sum(buffers, low, middle) + tree_sum(buffers, middle, high)


@pytest.mark.parametrize("node", [(0, 1), (0, 2), (2, 4), (0, 4)])
def test_a_range_of_shards_has_the_bits_of_the_tree(mixed: Model, node: tuple[int, int]) -> None:
    shards = [mixed.gradients.shard(2, shard) for shard in range(SHARDS)]
    calculator = Calculator(mixed.gradients, lambda: 0.0)
    total = calculator.compute(1, 2, mixed.buffer, node, lambda: True).total
    assert total.buffer.tobytes() == tree_sum([shard.buffer for shard in shards], *node).tobytes()
    assert total.examples == EXAMPLES * (node[1] - node[0])
    assert total.sums["loss"] == pytest.approx(sum(shards[shard].sums["loss"] for shard in range(*node)))


def test_work_that_is_void_is_given_up_between_two_shards(quadratic: Model) -> None:
    wanted = iter([True, True, True, False])
    with pytest.raises(Stopped):
        Calculator(quadratic.gradients, lambda: 0.0).compute(1, 0, quadratic.buffer, (0, 4), lambda: next(wanted))


def test_other_weights_give_another_gradient(quadratic: Model) -> None:
    before = bits(quadratic.gradients.shard(0, 0))
    other = quadratic.buffer.copy()
    other.view(np.float32)[:] += 1
    quadratic.gradients.load(other)
    assert bits(quadratic.gradients.shard(0, 0)) != before
    quadratic.gradients.load(quadratic.buffer)
    assert bits(quadratic.gradients.shard(0, 0)) == before


def test_buckets_of_another_size_change_no_number(mixed: Model) -> None:
    other = Model(Mixed(), bucket_bytes=4096)
    assert len(other.gradients.layout.buckets) < len(mixed.gradients.layout.buckets)
    mine, theirs = mixed.views(mixed.gradients.shard(1, 1)), other.views(other.gradients.shard(1, 1))
    assert {name: view.tobytes() for name, view in mine.items()} == {n: v.tobytes() for n, v in theirs.items()}


def compilations(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()]


def test_nothing_is_compiled_after_compile(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(QuadraticState())
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        model.gradients.compile()
        assert compilations(caplog), "or this test would see nothing"
        caplog.clear()
        for version in (0, 1, 41, 10**6):  # the last but one spans the end of an epoch of 1003 samples
            model.gradients.load(model.buffer.copy())
            model.gradients.prefetch(version, [0, 1])
            for shard in range(SHARDS):
                model.gradients.shard(version, shard)
        assert compilations(caplog) == []


# What is not finite


def poisoned(value: float, sample: int, column: str = "y") -> Model:
    train = {name: array.copy() for name, array in Quadratic().train_data(None).items()}
    train[column][sample] = value
    return Model(Quadratic(), train)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_loss_that_is_not_finite_leaves_the_shard_out_and_names_its_samples(value: float) -> None:
    sample = int(Batches(SEED, 1003, BATCH, SHARDS).indices(0, 2)[4])
    model = poisoned(value, sample)
    found = model.gradients.shard(0, 2)
    assert (found.examples, found.sums, found.left_out) == (0, {}, (2,))
    assert not found.buffer.any()
    listed = ", ".join(map(str, model.batches.indices(0, 2)))
    assert found.trouble in (f"shard 2 (samples {listed}): loss = nan", f"shard 2 (samples {listed}): loss = inf")
    assert str(sample) in found.trouble
    assert model.gradients.shard(0, 1).examples == EXAMPLES, "the next one is none the worse"


class Steep:
    """A loss that stays small while its gradient does not."""

    def init(self, key: Any) -> Any:
        return {"flat": jnp.zeros(1000), "steep": jnp.zeros(1000)}

    def loss(self, params: Any, batch: Any, key: Any) -> Any:
        slope = jnp.mean(batch["y"])
        return jnp.sum(params["flat"]) + params["steep"][999] * slope, {}


@pytest.mark.parametrize(
    ("slope", "ok"), [(1e18 / EXAMPLES / 1.01, True), (1e18, False), (-1e19, False), (np.inf, False), (np.nan, False)]
)
def test_a_gradient_whose_square_would_overflow_is_as_good_as_infinite(slope: float, ok: bool) -> None:
    """Found also in the last of many elements, and named by its leaf."""
    model = Model(Steep(), {"y": np.full(100, slope, np.float32)})
    model.params = jax.tree.map(jnp.zeros_like, model.params)
    buffer = model.buffer.copy()
    buffer[:] = 0
    model.gradients.load(buffer)
    found = model.gradients.shard(0, 3)
    assert (not found.trouble) == ok and found.examples == (EXAMPLES if ok else 0)
    if np.isfinite(slope) and not ok:
        assert found.trouble.endswith("loss = 0, but the gradient of params['steep'] is not finite")
    assert found.buffer.any() == ok


def test_many_samples_are_named_in_part() -> None:
    train = {name: array.copy() for name, array in Quadratic().train_data(None).items()}
    train["x"][:] = np.nan
    workload = Quadratic()
    leaves = leaves_of(workload.init(jax.random.key(0)), None)
    gradients = ShardGradients(
        workload, init_state=None, leaves=leaves, bucket_bytes=64, train=train, batches=Batches(0, 1003, 64, 1), seed=0
    )
    gradients.load(weights_layout(leaves, 64).empty())
    trouble = gradients.shard(0, 0).trouble
    assert trouble.count(",") == 8 and ", ...): loss = nan" in trouble


def test_a_sum_names_each_shard_that_was_left_out() -> None:
    train = {name: array.copy() for name, array in Quadratic().train_data(None).items()}
    for shard in (1, 2):
        train["y"][Batches(SEED, 1003, BATCH, SHARDS).indices(0, shard)[0]] = np.nan
    model = Model(Quadratic(), train)
    good = [model.gradients.shard(0, shard).buffer.view(np.float32) for shard in (0, 3)]
    total = Calculator(model.gradients, lambda: 0.0).compute(1, 0, model.buffer, (0, 4), lambda: True).total
    assert (total.examples, total.left_out) == (2 * EXAMPLES, (1, 2))
    assert [part.split(" ")[1] for part in total.trouble.split("; ")] == ["1", "2"]
    assert total.buffer.tobytes() == (good[0] + good[1]).tobytes()

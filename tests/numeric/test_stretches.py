"""Updates in stretches: which optimizers can have them, and that they have the bits of the whole tree."""

from typing import Any

import jax
import numpy as np
import pytest

from bus.layout import Bytes, Layout, gradient_layout, weights_layout
from ps import stretches as module
from ps.optimizers import build
from ps.reduce import Reducer
from ps.settings import AverageSettings
from ps.stretches import StretchUpdater, in_stretches
from ps.update import Updater

RATE = {"schedule": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": 0.1, "warmup_steps": 3,
        "decay_steps": 20}  # fmt: skip
ELEMENTWISE: dict[str, Any] = {
    "sgd": {"name": "sgd", "learning_rate": 0.1},
    "nesterov": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    "adam": {"name": "adam", "learning_rate": 1e-2},
    "adamw+schedule": {"name": "adamw", "learning_rate": RATE},
    "half moments": {"name": "adam", "learning_rate": 1e-2, "mu_dtype": "bfloat16"},
    "adagrad": {"name": "adagrad", "learning_rate": 0.1},
    "rmsprop": {"name": "rmsprop", "learning_rate": 0.01, "centered": True, "momentum": 0.9},
    "lion": {"name": "lion", "learning_rate": 1e-3},
    "amsgrad": {"name": "amsgrad", "learning_rate": 1e-2},
    "adan": {"name": "adan", "learning_rate": 1e-2},
    "rprop": {"name": "rprop", "learning_rate": 1e-3},
    "clip+decay": {"chain": [{"name": "clip", "max_delta": 1.0}, {"name": "add_decayed_weights", "weight_decay": 1e-4},
                             {"name": "sgd", "learning_rate": 0.1}]},
    "every third": {"chain": [{"name": "adam", "learning_rate": 1e-2}, {"name": "apply_every", "k": 3}]},
}  # fmt: skip
WHOLE: dict[str, tuple[Any, str]] = {
    "clip by global norm": ({"chain": [{"name": "clip_by_global_norm", "max_norm": 0.5},
                                       {"name": "sgd", "learning_rate": 0.1}]}, "reduce_sum"),
    "lamb": ({"name": "lamb", "learning_rate": 1e-3}, "reduce_sum"),
    "lars": ({"name": "lars", "learning_rate": 1e-3}, "reduce_sum"),
    "adafactor": ({"name": "adafactor", "learning_rate": 1e-3}, "reduce_sum"),
    "block rms": ({"chain": [{"name": "clip_by_block_rms", "threshold": 1.0}, {"name": "sgd", "learning_rate": 0.1}]},
                  "reduce_sum"),
}  # fmt: skip
SHARDS, EXAMPLES = 3, 12
STATE = {"mean": np.zeros(19, np.float32), "seen": np.zeros((), np.int32)}


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return {"dense": {"w": normal(137, 19), "b": normal(19)}, "scale": normal(), "empty": np.zeros((0, 3), np.float32),
            "ids": np.arange(5), "z": normal(700)}  # fmt: skip


def updater(spec: Any, average: AverageSettings | None = None, params: Any = None, state: Any = STATE) -> Updater:
    return Updater(parameters() if params is None else params, state, build(spec), average)


class Ps:
    """The part of a server that is here: two places for weights, and a reducer for what arrives."""

    def __init__(self, ours: Updater | StretchUpdater, bucket_bytes: int = 4096, *, stays: bool = True) -> None:
        self.ours, self.stays = ours, stays
        self.layout = weights_layout(ours.leaves, bucket_bytes)
        self.gradient = gradient_layout(ours.leaves, bucket_bytes)
        self.reducer = Reducer(self.gradient, SHARDS, late=ours.by_stretch)
        self.slots = [self.layout.pack(ours.weights()) for _ in range(2)]

    def step(self, step: int, spoil: float = 0.0) -> tuple[str, tuple[float, float]]:
        self.reducer.begin()
        for bucket in range(len(self.gradient.buckets)):
            for shard in range(SHARDS):
                arrived = self.gradient.bucket(contribution(self.gradient, step, shard, spoil), bucket)
                self.reducer.hold(bucket, (shard, shard + 1), arrived, stays=self.stays)
            self.reducer.add(bucket, (0, 2))
            self.reducer.add(bucket, (0, 3))
        advanced = self.ours.advance(self.reducer, EXAMPLES, *self.slots)
        if not advanced.trouble:
            self.slots.reverse()
        return advanced.trouble, advanced.norms()

    @property
    def bits(self) -> bytes:
        return b"".join(view.tobytes() for view in self.layout.views(self.slots[0]))


def contribution(layout: Layout, step: int, shard: int, spoil: float) -> Bytes:
    rng = np.random.default_rng([step, shard])
    arrays = [
        (EXAMPLES * rng.standard_normal(leaf.shape)).astype(leaf.dtype).reshape(leaf.shape) for leaf in layout.leaves
    ]
    if spoil and shard == 1:
        arrays[-3].reshape(-1)[-1] = spoil
    return layout.pack(arrays)


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRETCH", 512)  # so that a few make these parameters, across leaves and buckets


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_stretches_have_the_bits_of_the_whole_tree(name: str) -> None:
    average = AverageSettings(decay=0.9)
    whole, parts = Ps(updater(ELEMENTWISE[name], average)), in_stretches(updater(ELEMENTWISE[name], average))
    assert isinstance(parts, StretchUpdater) and parts.how == f"in {len(parts._stretches)} stretches"
    parts.compile()
    made = Ps(parts)
    assert len(parts._stretches) > 4
    for step in range(12):
        (_, expected), (trouble, norms) = whole.step(step), made.step(step)
        assert not trouble and made.bits == whole.bits, f"after update {step + 1}"
        assert norms == pytest.approx(expected, rel=1e-5)
    assert [a.tobytes() for a in parts.averaged()] == [a.tobytes() for a in whole.ours.averaged()]
    ours, theirs = parts.snapshot(), whole.ours.snapshot()
    assert {part: list(arrays) for part, arrays in ours.items()} == {part: list(a) for part, a in theirs.items()}
    for part, arrays in theirs.items():
        for key, array in arrays.items():
            assert (ours[part][key].dtype, ours[part][key].shape) == (array.dtype, array.shape), key
            assert ours[part][key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_more_than_the_element_is_updated_as_a_whole_and_says_why(name: str) -> None:
    spec, why = WHOLE[name]
    ours = in_stretches(updater(spec))
    assert isinstance(ours, Updater) and ours.how.startswith("of the whole tree at once: ") and why in ours.how


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"w": np.ones(3, np.float16)}, "not all parameters are float32"),
        ({f"{i:02}{kind}": np.ones(16 * i + 16, kind) for i in range(25) for kind in ("f4", "i4")}, "25 kinds"),
    ],
)
def test_parameters_that_lie_in_other_ways_are_updated_as_a_whole(params: Any, why: str) -> None:
    assert why in in_stretches(updater(ELEMENTWISE["adam"], params=params, state=None)).how


def test_neither_buckets_nor_threads_nor_the_way_of_the_bytes_show() -> None:
    seen = set()
    for bucket_bytes, threads, stays in ((64, 1, True), (4096, 2, True), (1 << 22, 3, True), (640, 2, False)):
        ps = Ps(StretchUpdater(updater(ELEMENTWISE["adam"]), threads), bucket_bytes, stays=stays)
        norms = [ps.step(step) for step in range(4)]
        seen.add((ps.bits, str(norms)))
    assert len(seen) == 1


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 3e38])
def test_a_sum_that_is_not_sound_changes_nothing(spoil: float) -> None:
    ps, other = Ps(StretchUpdater(updater(ELEMENTWISE["adam"]), 2)), Ps(updater(ELEMENTWISE["adam"]))
    for step in range(3):
        ps.step(step), other.step(step)
    before, state = ps.bits, ps.ours.snapshot()
    trouble, _ = ps.step(3, spoil)
    assert trouble == other.step(3, spoil)[0] and "is not finite" in trouble
    assert ps.bits == before and ps.ours.updates == 3
    after = ps.ours.snapshot()
    assert all(after[part][key].tobytes() == array.tobytes() for part in state for key, array in state[part].items())
    ps.step(4), other.step(4)
    assert ps.bits == other.bits


def test_a_snapshot_of_either_goes_on_in_the_other() -> None:
    first = Ps(StretchUpdater(updater(ELEMENTWISE["adam"], AverageSettings(decay=0.9))))
    for step in range(3):
        first.step(step)
    restored = updater(ELEMENTWISE["adam"], AverageSettings(decay=0.9))
    restored.restore(first.ours.snapshot(), first.ours.updates)
    again, whole = Ps(StretchUpdater(restored)), Ps(restored)
    for step in range(3, 6):
        for ps in (first, again, whole):
            ps.step(step)
    assert first.bits == again.bits == whole.bits
    assert first.ours.updates == again.ours.updates == 6


def test_nothing_is_compiled_after_the_warm_up() -> None:
    parts = StretchUpdater(updater(ELEMENTWISE["adamw+schedule"], AverageSettings(decay=0.9)))
    parts.compile()
    ps = Ps(parts)
    ps.step(0)  # the mean of the model's state is compiled with the first
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        for step in range(1, 5):
            ps.step(step)
    finally:
        jax.monitoring.clear_event_listeners()
    assert [name for name in compiled if "compile" in name] == []

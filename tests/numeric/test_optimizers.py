"""Optimizer settings: what is written is what optax does, the logged rate is the applied one, slips are one line."""

from typing import Any

import numpy as np
import optax
import pytest

from ps.optimizers import Optimizer, OptimizerError, build
from ps.update import Updater

ONE = np.ones(1, np.float32)
STEP_DOWN = {
    "schedule": "join_schedules",
    "schedules": [{"schedule": "constant_schedule", "value": 0.1}, {"schedule": "constant_schedule", "value": 0.01}],
    "boundaries": [1],
}


def rate(optimizer: Optimizer, count: int) -> float:
    assert optimizer.learning_rate is not None
    return optimizer.learning_rate(count)


def fresh(optimizer: Optimizer) -> Updater:
    return Updater({"w": np.zeros(1, np.float32)}, None, optimizer, None)


def test_a_schedule_counts_updates_from_zero_and_the_rate_is_the_applied_one() -> None:
    optimizer = build({"name": "sgd", "learning_rate": STEP_DOWN})
    ours = fresh(optimizer)
    seen = []
    for _ in range(2):
        logged, before = rate(optimizer, ours.updates), float(ours.weights()[0][0])
        ours.apply([ONE], 1)
        seen.append((logged, before - float(ours.weights()[0][0]), float(ours.weights()[0][0])))
    assert [logged for logged, _, _ in seen] == [0.1, 0.01]
    assert [moved for _, moved, _ in seen] == pytest.approx([0.1, 0.01])
    assert [weight for _, _, weight in seen] == pytest.approx([-0.1, -0.11])


def test_after_a_resume_the_schedule_goes_on() -> None:
    optimizer = build({"name": "sgd", "learning_rate": STEP_DOWN})
    first, second = fresh(optimizer), fresh(build({"name": "sgd", "learning_rate": STEP_DOWN}))
    first.apply([ONE], 1)
    second.restore(first.snapshot(), first.updates)
    assert rate(optimizer, second.updates) == 0.01
    second.apply([ONE], 1)
    assert second.weights()[0][0] == pytest.approx(-0.11)


@pytest.mark.parametrize(
    ("learning_rate", "schedule"),
    [
        ({"schedule": "exponential_decay", "init_value": 0.1, "transition_steps": 10, "decay_rate": 0.1,
          "staircase": True},
         optax.exponential_decay(0.1, 10, 0.1, staircase=True)),
        ({"schedule": "piecewise_constant_schedule", "init_value": 1, "boundaries_and_scales": {"3": 0.5, "6": 0.1}},
         optax.piecewise_constant_schedule(1, {3: 0.5, 6: 0.1})),
        ({"schedule": "warmup_cosine_decay_schedule", "init_value": 0, "peak_value": 1, "warmup_steps": 3.0,
          "decay_steps": 20},
         optax.warmup_cosine_decay_schedule(0, 1, 3, 20)),
    ],
    ids=["staircase", "piecewise", "warmup"],
)  # fmt: skip
def test_schedules_are_those_of_optax(learning_rate: dict[str, Any], schedule: optax.Schedule) -> None:
    optimizer = build({"name": "adam", "learning_rate": learning_rate})
    for count in (0, 1, 2, 3, 4, 6, 9, 10, 11, 19, 25):
        assert np.float32(rate(optimizer, count)) == pytest.approx(np.float32(schedule(count)), rel=1e-6)


def test_a_chain_is_applied_in_its_order() -> None:
    ours = fresh(build({"chain": [{"name": "clip", "max_delta": 0.5}, {"name": "sgd", "learning_rate": 1}]}))
    ours.apply([8 * ONE], 2)
    assert ours.weights()[0][0] == -0.5
    ours = fresh(build({"chain": [{"name": "sgd", "learning_rate": 1}, {"name": "clip", "max_delta": 0.5},
                                  {"name": "scale", "step_size": 3}]}))  # fmt: skip
    ours.apply([8 * ONE], 2)
    assert ours.weights()[0][0] == -1.5


def test_weight_decay_in_a_chain() -> None:
    decayed = [{"name": "add_decayed_weights", "weight_decay": 0.5}, {"name": "sgd", "learning_rate": 1}]
    ours = Updater({"w": 2 * ONE}, None, build({"chain": decayed}), None)
    ours.apply([3 * ONE], 1)
    assert ours.weights()[0][0] == 2 - (3 + 0.5 * 2)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "adam", "learning_rate": 0.25}, 0.25),
        ({"chain": [{"name": "scale_by_adam"}, {"name": "scale_by_learning_rate", "learning_rate": 0.25}]}, 0.25),
        (
            {"name": "apply_if_finite", "inner": {"name": "sgd", "learning_rate": 0.25}, "max_consecutive_errors": 1},
            0.25,
        ),
        ({"name": "rprop", "learning_rate": 0.25, "eta_plus": 1.3}, 0.25),
        ({"name": "scale", "step_size": 0.5}, None),
        ({"chain": [{"name": "sgd", "learning_rate": 1}, {"name": "sgd", "learning_rate": 2}]}, None),
    ],
)
def test_where_the_rate_is_found(spec: dict[str, Any], expected: float | None) -> None:
    learning_rate = build(spec).learning_rate
    assert (learning_rate and learning_rate(0)) == expected


RATE = "optimizer.learning_rate"
NAME = "optimizer.name: expected an optax optimizer or transformation, got "


def adam(**arguments: Any) -> dict[str, Any]:
    return {"name": "adam", "learning_rate": 0.1} | arguments


def scheduled(**arguments: Any) -> dict[str, Any]:
    return adam(learning_rate={"schedule": "cosine_decay_schedule", "init_value": 1, "decay_steps": 5} | arguments)


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"name": "adm", "learning_rate": 1}, NAME + "the text 'adm'; did you mean adam?"),
        ({"name": "muon"}, NAME + "the text 'muon'; did you mean contrib.muon?"),
        ({"name": "apply_updates"}, NAME + "the text 'apply_updates'; see the optax documentation"),
        ({"name": 5}, NAME + "5; see the optax documentation"),
        ({"chain": [{"name": "clip_by_global_norm", "max_nrom": 1}]},
         "optimizer.chain[0].max_nrom: expected an argument of clip_by_global_norm (max_norm), "
         "got the text 'max_nrom'; did you mean max_norm?"),
        ({"name": "adam"}, RATE + ": expected a value, which adam needs, got nothing; add learning_rate"),
        (adam(learning_rate="x"), RATE + ": expected a number, got the text 'x'; see the optax documentation"),
        (adam(learning_rate=None), RATE + ": expected a value, got None; leave the key out to have the default"),
        (adam(learning_rate=True), RATE + ": expected a number, got True; change it"),
        (adam(learning_rate=float("nan")), RATE + ": expected a finite number, got nan; change it"),
        (adam(learning_rate=[1]), RATE + ": expected a number, got [1]; write one number"),
        (adam(nesterov=1), "optimizer.nesterov: expected true or false, got 1; change it"),
        (adam(mu_dtype="float33"),
         "optimizer.mu_dtype: expected the name of a dtype, got the text 'float33'; write, for example, bfloat16"),
        (adam(b1={"schedule": "constant_schedule"}), "optimizer.b1: expected a plain value (it takes no schedule), "
                                                     "got {'schedule': 'constant_schedule'}; write a number"),
        (scheduled(schedule="cosine_decy_schedule"),
         RATE + ".schedule: expected an optax schedule, got the text 'cosine_decy_schedule'; "
                "did you mean cosine_decay_schedule?"),
        (scheduled(init_vale=2),
         RATE + ".init_vale: expected an argument of cosine_decay_schedule (init_value, decay_steps, alpha, exponent), "
                "got the text 'init_vale'; did you mean init_value?"),
        (scheduled(decay_steps=1.5), RATE + ".decay_steps: expected a whole number, got 1.5; write 2"),
        ([], "optimizer: expected a mapping with either a name or a chain, got []; "
             "write, for example, {name: sgd, ...}"),
        ({"chain": []}, "optimizer: expected nothing but a chain, which is a list of mappings, got {'chain': []}; "
                        "write {chain: [{name: ...}, ...]}"),
    ],
)  # fmt: skip
def test_what_optax_does_not_have_is_one_line(spec: Any, line: str) -> None:
    with pytest.raises(OptimizerError) as error:
        build(spec)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("spec", "start"),
    [
        (scheduled(decay_steps=-1), "optimizer.learning_rate: cosine_decay_schedule refuses these arguments: "),
        (adam(learning_rate={"schedule": "join_schedules", "schedules": [1], "boundaries": []}),
         "optimizer.learning_rate: join_schedules cannot be evaluated: "),
    ],
)  # fmt: skip
def test_what_optax_refuses_is_one_line(spec: Any, start: str) -> None:
    with pytest.raises(OptimizerError) as error:
        build(spec)
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)

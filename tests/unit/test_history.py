"""What the ledger is told of a step: the numbers of the plain formulas, once, and only after the next step is open."""

import math
from typing import Any

from ps.history import History, StepRecord
from ps.rounds import Part


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def refused(self, refused: Any) -> None: ...
    def member(self, change: Any) -> None: ...
    def note(self, text: str) -> None: ...


RATES = [0.1, 0.01, 0.001]


class Story:
    """Steps of a run whose weights are three numbers."""

    def __init__(self, decay: float = 0.9) -> None:
        self.recorder = Recorder()
        self.history = History(self.recorder, lambda update: RATES[update], decay)
        self.updates = self.version = 0

    def step(
        self, sums: dict[str, float], *, examples: int = 4, applied: bool = True, moved: float = 0.0,
        waited_s: float = 0.25, left_out: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        now = 10.0 * self.version
        self.history.opened(now)
        self.updates += applied
        self.history.closed(
            self.version, Part(examples, sums, left_out, ((0, 4, 1),), waited_s), applied=applied,
            updates=self.updates, norms=lambda: (7.0, moved), began=now + 8, now=now + 8.5,
        )  # fmt: skip
        self.version += 1
        self.history.opened(10.0 * self.version)
        self.history.flush()


def test_means_are_over_examples_and_the_loss_is_one_of_them() -> None:
    story = Story()
    story.step({"loss": 8.0, "accuracy": 3.0}, moved=2.0)
    (record,) = story.recorder.steps
    assert (record.version, record.from_version, record.shards) == (1, 0, ((0, 4, 1),))
    assert (record.loss, record.metrics, record.examples) == (2.0, {"accuracy": 0.75}, 4)
    assert record.gradient_norm == 7.0 and record.update_norm == 2.0
    assert (record.seconds, record.apply_seconds, record.bus_seconds) == (10.0, 0.5, 0.25)


def test_the_rate_in_the_ledger_is_the_one_of_this_update() -> None:
    """The first update uses the schedule at 0; a step that was skipped uses up no rate."""
    story = Story()
    for applied in (True, False, True):
        story.step({"loss": 1.0}, applied=applied)
    assert [record.learning_rate for record in story.recorder.steps] == [0.1, None, 0.01]
    assert [record.updates for record in story.recorder.steps] == [1, 1, 2]


def test_the_average_of_the_loss_starts_at_the_first_loss() -> None:
    story = Story(decay=0.75)
    for loss in (4.0, 8.0, 0.0):
        story.step({"loss": 4 * loss})
    assert [record.loss_average for record in story.recorder.steps] == [4.0, 5.0, 3.75]


def test_a_step_without_examples_has_no_loss_and_leaves_the_average_alone() -> None:
    story = Story()
    story.step({"loss": 4.0})
    story.step({}, examples=0, applied=False, left_out=(0, 1, 2, 3), waited_s=math.inf)
    record = story.recorder.steps[1]
    assert (record.loss, record.metrics, record.loss_average, record.bus_seconds) == (None, {}, 1.0, None)
    assert (record.applied, record.left_out, record.update_norm) == (False, (0, 1, 2, 3), 0.0)


def test_a_record_is_handed_on_once() -> None:
    story = Story()
    story.step({"loss": 4.0})
    story.history.flush()
    assert len(story.recorder.steps) == 1

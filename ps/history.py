"""What a step was, put into one record once the next one is under way: promise 1 is that this can be seen.

Norms are asked for after the new version is published, so that being looked at costs no step anything and cannot change
a bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ps.actions import MemberChanged, Refused
from ps.rounds import Part

Norms = Callable[[], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as the ledger keeps it.

    ``shards`` are (low, high, member). ``bus_seconds``: for how long the computing threads had nothing to do between
    the last gradient and this step, the least of all workers; None where nobody could tell. ``update_norm``: how far
    the trainable weights moved.
    """

    version: int
    from_version: int
    shards: tuple[tuple[int, int, int], ...]
    examples: int
    updates: int
    applied: bool
    left_out: tuple[int, ...]
    learning_rate: float | None
    loss: float | None
    loss_average: float | None
    metrics: dict[str, float]
    gradient_norm: float
    update_norm: float
    seconds: float
    bus_seconds: float | None
    apply_seconds: float


class Recorder(Protocol):
    """Where a server tells what happens. Calls must not block for long, nor raise because of a disk."""

    def step(self, record: StepRecord) -> None: ...
    def refused(self, refused: Refused) -> None: ...
    def member(self, change: MemberChanged) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(slots=True)
class History:
    """Turns closed steps into records. ``learning_rate(n)`` is the rate of update n; ``decay`` smooths the loss."""

    recorder: Recorder
    learning_rate: Callable[[int], float] | None
    decay: float
    loss_average: float | None = None
    loss: float | None = None
    _opened_at: float | None = None
    _pending: dict[str, Any] | None = field(default=None)
    _norms: Norms = field(default=lambda: (0.0, 0.0))

    def opened(self, now: float) -> None:
        """A step was opened at ``now``: the one before, if it has just closed, ends here."""
        if self._pending is not None and self._opened_at is not None:
            self._pending["seconds"] = now - self._opened_at
        self._opened_at = now

    def closed(
        self,
        version: int,
        result: Part,
        *,
        applied: bool,
        updates: int,
        norms: Norms,
        began: float,
        now: float,
    ) -> None:
        """Step ``version`` has become version + 1. ``updates`` counts this one, if it was ``applied``;
        ``norms``, of the mean gradient and of the update, are only asked for once the new version is on its way."""
        means = {name: value / result.examples for name, value in result.sums.items()} if result.examples else {}
        self.loss = means.pop("loss", None)
        if self.loss is not None:
            older = self.loss if self.loss_average is None else self.loss_average
            self.loss_average = self.decay * older + (1 - self.decay) * self.loss
        self._norms = norms
        self._pending = {
            "version": version + 1,
            "from_version": version,
            "shards": result.makers,
            "examples": result.examples,
            "updates": updates,
            "applied": applied,
            "left_out": result.left_out,
            "learning_rate": self.learning_rate(updates - 1) if self.learning_rate and applied else None,
            "loss": self.loss,
            "loss_average": self.loss_average,
            "metrics": means,
            "seconds": now - self._opened_at if self._opened_at is not None else 0.0,
            "bus_seconds": result.waited_s if math.isfinite(result.waited_s) else None,
            "apply_seconds": now - began,
        }

    def flush(self) -> None:
        """Hand on the record of the last closed step, if it is not handed on yet."""
        if self._pending is None:
            return
        gradient_norm, update_norm = self._norms()
        record = StepRecord(**self._pending, gradient_norm=gradient_norm, update_norm=update_norm)
        self._pending = None
        self.recorder.step(record)

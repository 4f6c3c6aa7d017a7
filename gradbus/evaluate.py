"""Evaluation: the weights of a version over the whole evaluation set, apart from training.

The evaluator is an observer: it subscribes to the weights that the PS publishes for evaluation, and nothing waits for
it. When it falls behind it skips to the newest.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bus.errors import WireError
from bus.layout import Bytes, Layout
from bus.messages import Evaluate, Leaf, Stop
from bus.sockets import ObserverSockets
from gradbus.records import Metrics
from gradbus.report import Reporter
from gradbus.workloads.base import is_stateful

LONGEST_WAIT_S = 1.0
QUIET_S = 0.2  # after a stop was asked for: what is on its way arrives within this time

log = logging.getLogger("gradbus.eval")


class Evaluation:
    """Scores weights. ``data`` is the workload's evaluation set, ``batch_size`` only a matter of speed and memory."""

    def __init__(self, workload: Any, data: Any, *, batch_size: int, leaves: Sequence[Leaf], seed: int) -> None:
        self._data, self._kinds = data, [leaf.kind for leaf in leaves]
        self._examples = int(jax.tree.leaves(data)[0].shape[0])
        self._batch_size = min(batch_size, self._examples)
        key = jax.random.key(seed)
        params = jax.tree.structure(jax.eval_shape(workload.init, key))
        state = jax.tree.structure(jax.eval_shape(workload.init_state, key) if is_stateful(workload) else ())

        def score(weights: list[jax.Array], kept: list[jax.Array], batch: Any) -> Any:
            tree = jax.tree.unflatten(params, weights)
            if is_stateful(workload):
                return workload.score(tree, jax.tree.unflatten(state, kept), batch)
            return workload.score(tree, batch)

        self._score = jax.jit(score)

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> dict[str, float]:
        """Means over the evaluation set, by name. ``arrays``: one per leaf, in layout order."""
        split = [jax.device_put(array) for array in arrays]
        weights = [array for array, kind in zip(split, self._kinds, strict=True) if kind != "state"]
        state = [array for array, kind in zip(split, self._kinds, strict=True) if kind == "state"]
        totals: dict[str, float] = {}
        for start in range(0, self._examples, self._batch_size):
            # The last batch is filled up with samples seen before, so that nothing is compiled again, and cut after.
            rows = np.arange(start, start + self._batch_size) % self._examples
            batch = jax.tree.map(lambda array, rows=rows: np.take(array, rows, axis=0), self._data)
            count = min(self._batch_size, self._examples - start)
            for name, values in self._score(weights, state, batch).items():
                totals[name] = totals.get(name, 0.0) + float(np.sum(np.asarray(values)[:count], dtype=np.float64))
        return {name: total / self._examples for name, total in sorted(totals.items())}


class Observer:
    """Receives what is to be evaluated, evaluates the newest, writes and reports the result, until told to stop."""

    def __init__(
        self, sockets: ObserverSockets, layout: Layout, evaluation: Evaluation, metrics: Metrics, reporter: Reporter
    ) -> None:
        self._sockets, self._layout, self._evaluation = sockets, layout, evaluation
        self._metrics, self._reporter = metrics, reporter
        self._arriving: tuple[int, int] = (-1, -1)  # session, version
        self._buffer: Bytes = layout.empty()
        self._missing: set[int] = set()
        self._whole: tuple[int, Bytes] | None = None  # the newest that is complete and not evaluated yet
        self._stop_requested = False
        self._over = False

    def request_stop(self) -> None:
        """Finish what has arrived, then end. May be called from a signal handler."""
        self._stop_requested = True

    def run(self) -> None:
        """Until the run is over and the last that arrived is evaluated."""
        while True:
            ending = self._over or self._stop_requested
            wait_s = 0.0 if self._whole else QUIET_S if ending else LONGEST_WAIT_S
            arrival = self._sockets.receive(wait_s)
            if arrival is not None:
                self._take(arrival.message, arrival.payload)
            elif self._whole is not None:
                version, buffer = self._whole
                self._whole = None
                self._evaluate(version, buffer)
            elif ending:
                return

    def _take(self, message: object, payload: Bytes | None) -> None:
        if isinstance(message, Stop):
            self._over = True
        if not isinstance(message, Evaluate) or payload is None:
            return
        if (message.session, message.version) != self._arriving:
            self._arriving = (message.session, message.version)
            self._buffer, self._missing = self._layout.empty(), set(range(len(self._layout.buckets)))
        try:
            if message.bucket not in self._missing:
                raise WireError(f"bucket {message.bucket} again, or beyond the last")
            self._layout.bucket(self._buffer, message.bucket)[:] = payload
        except (WireError, ValueError) as error:
            log.warning("version %d: %s; it will not be evaluated", message.version, error)
            return
        self._missing.discard(message.bucket)
        if not self._missing:
            self._whole = (message.version, self._buffer)

    def _evaluate(self, version: int, buffer: Bytes) -> None:
        began = time.monotonic()
        result = self._evaluation.run(self._layout.views(buffer))
        seconds = time.monotonic() - began
        log.info("version %d: %s (%.2f s)", version, ", ".join(f"{n} = {v:.4f}" for n, v in result.items()), seconds)
        self._metrics.append({"version": version, "eval": result, "seconds": seconds})
        self._reporter.event("evaluated", version=version, eval=result, seconds=seconds)

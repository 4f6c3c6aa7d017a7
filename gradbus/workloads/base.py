"""What a workload is: the one thing a user writes to train a model of their own.

`loading` turns the text of the setting `workload` into one, `validation` checks that it keeps this contract. Importing
this module imports neither JAX nor NumPy, so the launcher may.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    import jax

Params = Any  # a pytree of arrays; the leaves of inexact dtype are trained, the others are carried along unchanged
State = Any  # a pytree of floating arrays
Arrays = Any  # a pytree of arrays that share their leading axis, one entry per example
Metrics = dict[str, Any]  # names to scalars


class WorkloadError(ValueError):
    """The workload cannot be loaded or breaks the contract: one line with what was found and what was expected."""


class DataError(ValueError):
    """A dataset is missing or not what it should be: one line with what was found, where, and what to put there."""


class Workload(Protocol):
    """A model, its loss and its data, as five pure functions. The whole contract:

    * The functions must give the same answer whenever and wherever they are called: no global state, no clock, no
      random numbers but from `key`. `init`, `loss` and `score` are traced by JAX (jit, grad), the data functions are
      plain NumPy.
    * The batch given to `loss` and `score` is `train_data` or `eval_data` with another leading axis: the same pytree of
      JAX arrays, holding the examples of one shard. All shards of all steps have the same number of examples.
    * A workload with model state that is not trained (the statistics of BatchNorm, say) also has
      `init_state(key) -> State`, and then takes and returns it: see `StatefulWorkload`.

    A workload is chosen by the setting `workload`: the name of a shipped one, `path/to/file.py:name` or `module:name`,
    where name is an instance, or a class or function without arguments that returns one.
    """

    def init(self, key: jax.Array) -> Params:
        """The weights of version 0 from a typed key: any pytree of arrays, at least one of them of inexact dtype."""
        ...

    def loss(self, params: Params, batch: Arrays, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """The number to minimise, a floating scalar, and metrics, each a scalar.

        Both are means over the examples of the batch, as the results of shards are averaged by their examples; a
        regulariser that depends on the weights only is simply added. `key` differs for every step and shard: use it for
        dropout and augmentation, split per example where examples shall differ.
        """
        ...

    def train_data(self, folder: Path | None) -> Arrays:
        """The training examples: a pytree of NumPy arrays that share their leading axis. Memory-mapped ones are fine.

        `folder` is the setting `data.dir`. Every process calls this, and all must find the same examples in the same
        order. Raise `DataError` with one line for the user when the data is not there.
        """
        ...

    def eval_data(self, folder: Path | None) -> Arrays:
        """The examples that evaluation runs over, of the same structure as `train_data`."""
        ...

    def score(self, params: Params, batch: Arrays) -> dict[str, jax.Array]:
        """Values per example by name, each of shape (batch,); evaluation reports their means over `eval_data`."""
        ...


class StatefulWorkload(Protocol):
    """A workload with model state: as `Workload`, but for these.

    The state is a pytree of floating arrays. Each shard starts from the state of the current version; the new states of
    the shards are averaged by their examples and become the state of the next version.
    """

    def init(self, key: jax.Array) -> Params: ...

    def init_state(self, key: jax.Array) -> State: ...

    def loss(
        self, params: Params, state: State, batch: Arrays, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, State]]: ...

    def train_data(self, folder: Path | None) -> Arrays: ...

    def eval_data(self, folder: Path | None) -> Arrays: ...

    def score(self, params: Params, state: State, batch: Arrays) -> dict[str, jax.Array]: ...


def is_stateful(workload: object) -> TypeGuard[StatefulWorkload]:
    """Whether `loss` and `score` take a model state: whether the workload has `init_state`."""
    return callable(getattr(workload, "init_state", None))

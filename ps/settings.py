"""The `train`, `sync` and `checkpoint` sections of config.yaml.

The `optimizer` section has no Struct: it names optax's own functions and their arguments, and ps.optimizers checks it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class AverageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A moving average of the weights: average <- d * average + (1 - d) * weights after every update.

    decay   d
    warmup  d is min(decay, (1 + n) / (10 + n)) at update n, so that early weights are soon forgotten
    """

    decay: Annotated[float, Meta(ge=0, le=1)] = 0.999
    warmup: bool = True


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is computed. All of it but `steps`, `nonfinite_limit` and `loss_average` determines the weights.

    steps            versions to train; a resume may raise it
    batch_size       examples of one step over all workers; a multiple of `shards`
    shards           equal slices of a step's batch: the unit of work, whatever the number of workers
    threads          XLA threads of each process; another number sums in another order, so gives other bits
    nonfinite        a NaN or Inf gradient: stop the run, skip the step, or leave that shard out
    nonfinite_limit  this many skipped steps in a row end the run
    average          moving average of the weights, used for evaluation; null: off
    loss_average     decay of the moving average of the loss that is shown
    """

    steps: Annotated[int, Meta(ge=1, le=10**12)] = 400
    batch_size: Annotated[int, Meta(ge=1, le=2**31)] = 128
    shards: Annotated[int, Meta(ge=1, le=65536)] = 4
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    nonfinite: Literal["stop", "skip_step", "skip_shard"] = "stop"
    nonfinite_limit: Annotated[int, Meta(ge=1)] = 10
    average: AverageSettings | None = None
    loss_average: Annotated[float, Meta(ge=0, lt=1)] = 0.9


class SyncSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """mode  bsp: a step closes when all of its shards are in"""

    mode: Literal["bsp"] = "bsp"


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """every  versions between two checkpoints; 0: only at the end
    keep   the newest so many stay on disk
    """

    every: Annotated[int, Meta(ge=0)] = 100
    keep: Annotated[int, Meta(ge=1, description="0 and negative numbers have no meaning here: write a number >= 1")] = 3

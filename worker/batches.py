"""Which samples a shard of a step holds: arithmetic on positions, no data and no state worth saving.

The training data is read as an endless sequence: epoch 0, epoch 1, ..., each a permutation of all N samples of its own.
Step v of global batch B owns the positions [v*B, (v+1)*B) of it, and shard s of V the s-th of V equal slices. So every
sample is used exactly once per epoch, an epoch may end in the middle of a shard, there is no tail, and every shard has
the same number of examples whatever N is. Nothing depends on which shards were asked for before, nor by whom.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_CACHED_EPOCHS = 2  # shards of one step lie in one epoch or across the end of one, unless N is smaller than the batch


def permutation(seed: int, epoch: int, samples: int) -> Indices:
    """The order of `samples` samples in `epoch`: (samples,) int64, each of 0..samples-1 once.

    Sorting raw words of the counter-based generator keyed by (seed, epoch) gives the same order on every platform and
    NumPy version: NumPy promises raw bit streams, and does not promise `Generator.permutation`.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(samples)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class Batches:
    """`indices(version, shard)` for one experiment. Not safe to share between threads: it keeps the last epochs' order.

    seed        0 <= seed < 2**64, the seed of the experiment
    samples     N >= 1, training samples; may be smaller than a batch, which then spans several epochs
    batch_size  B >= 1, examples of a whole step, a multiple of `shards`
    shards      V >= 1, slices of a step
    """

    def __init__(self, seed: int, samples: int, batch_size: int, shards: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed: expected 0 <= seed < 2**64, got {seed}")
        if samples < 1:
            raise ValueError(f"samples: expected at least 1 training sample, got {samples}")
        if shards < 1:
            raise ValueError(f"shards: expected at least 1, got {shards}")
        if batch_size < 1 or batch_size % shards:
            raise ValueError(
                f"batch_size: expected a positive multiple of the {shards} shards, got {batch_size}; "
                f"the nearest is {max(1, round(batch_size / shards)) * shards}"
            )
        self.seed, self.samples, self.batch_size, self.shards = seed, samples, batch_size, shards
        self.shard_size = batch_size // shards
        self._cache: OrderedDict[int, Indices] = OrderedDict()

    def indices(self, version: int, shard: int) -> Indices:
        """Sample numbers of `shard` in step `version`, in order: (batch_size // shards,) int64, the caller's own."""
        if version < 0 or not 0 <= shard < self.shards:
            raise ValueError(f"expected version >= 0 and shard in 0..{self.shards - 1}, got {version} and {shard}")
        position = version * self.batch_size + shard * self.shard_size
        end = position + self.shard_size
        parts = []
        while position < end:
            epoch, first = divmod(position, self.samples)
            last = min(self.samples, first + end - position)
            parts.append(self._order(epoch)[first:last])
            position += last - first
        return np.concatenate(parts)

    def epoch(self, version: int) -> float:
        """Epochs completed when step `version` starts, as a fraction: 2.5 is in the middle of the third."""
        return version * self.batch_size / self.samples

    def _order(self, epoch: int) -> Indices:
        order = self._cache.get(epoch)
        if order is None:
            order = self._cache[epoch] = permutation(self.seed, epoch, self.samples)
            while len(self._cache) > _CACHED_EPOCHS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(epoch)
        return order

"""The update of an optimizer that works on each element alone, made a stretch at a time while it is in the cache.

From the contributions to the new version everything is read once and written once: a stretch is summed, looked at,
given to the jitted optax step, and the new weights are written where they are published from. Nothing of the version
before is overwritten until all is known to be sound: weights and optimizer state have two places each, and change
them.

XLA rounds an element differently where its loop over an array is scalar, as at its end, and where it is vector code;
and where a number such as Adam's bias correction is used by one loop, which computes it along, or by several. So a
stretch is made of whole leaves, or of many rows of one, in their own shapes, and has never fewer than two arrays if
the tree has not. That it has the bits of the whole tree is tried before the first step. Neither the size of a bucket
nor the number of threads has a say in it.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from bus.finite import within_limit
from bus.layout import ALIGNMENT_BYTES, Bytes, Layout, gradient_layout, weights_layout, zeros
from ps.advance import ANY_BUCKET_BYTES, Advanced
from ps.elementwise import NotElementwise, flat_state
from ps.norms import squared_norm
from ps.reduce import Reducer, usual_threads
from ps.update import Array, Snapshot, Updater, blend, decay_of, mean_of, strong

STRETCH = 1 << 17  # elements; malloc keeps results of that size at hand, where larger ones are mapped anew each time
ROWS = ALIGNMENT_BYTES // 4  # a leaf is cut at multiples of so many, where XLA can read it in place
MOST_PROGRAMS = 24  # each kind of stretch is compiled for
TRIED_ELEMENTS = 1 << 22  # of a larger model the bits are not tried: memory for it would be the most that is ever used
TRIED_UPDATES, TRIED_EXAMPLES = 3, 3
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where it begins in the flat gradient and in the flat weights, how many elements it has, with the padding between
    leaves, and its arrays: (first element within it, shape)."""

    gradient_bytes: int
    weights_bytes: int
    count: int
    arrays: tuple[tuple[int, tuple[int, ...]], ...]

    def views(self, flat: Array) -> list[Array]:
        """Its arrays in ``flat``, which is as long as it is."""
        return [flat[at : at + math.prod(shape)].reshape(shape) for at, shape in self.arrays]

    @property
    def in_flat(self) -> slice:
        """Its elements in a vector that is laid out as the gradient is."""
        start = self.gradient_bytes // FLOAT.itemsize
        return slice(start, start + self.count)

    def of_weights(self, buffer: Bytes) -> Array:
        """Its elements in a buffer of weights."""
        end = self.weights_bytes + self.count * FLOAT.itemsize
        found: Array = buffer[self.weights_bytes : end].view(FLOAT)
        return found


def in_stretches(updater: Updater) -> "StretchUpdater | Updater":
    """A StretchUpdater that goes on where ``updater`` is, if it can and has the same bits; ``how`` says which it is."""
    try:
        made = StretchUpdater(updater)
        _try_bits(updater, made)
    except NotElementwise as obstacle:
        updater.how = f"of the whole tree at once: {obstacle}"
        return updater
    return made


class StretchUpdater:
    """As ``ps.update.Updater``, whose state it takes over. Raises NotElementwise."""

    by_stretch = True

    def __init__(self, whole: Updater, threads: int | None = None) -> None:
        self.leaves, self.updates = whole.leaves, whole.updates
        self._form = flat_state(whole.transform, whole.trainable())
        self._transform, self._average = whole.transform, whole.average_settings
        self._gradient = gradient_layout(self.leaves, ANY_BUCKET_BYTES)
        self._layout = weights_layout(self.leaves, ANY_BUCKET_BYTES)
        self._stretches = _stretches(self._gradient, self._layout)
        self._kinds = {stretch.arrays: stretch for stretch in self._stretches}
        if len(self._kinds) > MOST_PROGRAMS:
            raise NotElementwise(f"its parts are of {len(self._kinds)} kinds, each a program to be compiled")
        self.how = f"in {len(self._stretches)} stretches"
        self._weights: Bytes = self._layout.pack(whole.weights())
        snapshot = whole.snapshot()
        self._names = tuple(snapshot["optimizer"])
        self._flat = self._take_over(snapshot["optimizer"])
        owners = zip(snapshot["optimizer"].values(), self._form.places, strict=True)
        self._numbers = [array for array, (_, owner) in owners if owner is None]
        self._average_names = tuple(snapshot.get("average", ()))
        if self._average_names:
            self._flat.append(self._laid_out(snapshot["average"].values(), FLOAT))
        self._spare: list[Array] = [zeros(flat.nbytes).view(flat.dtype) for flat in self._flat]
        beside = ROWS if sum(leaf.kind == "trainable" and leaf.size > 0 for leaf in self.leaves) > 1 else 0
        self._beside = [np.zeros(beside, FLOAT)] if beside else []  # goes along with an array that would be alone
        self._step = jax.jit(self._traced)
        self._mean = jax.jit(mean_of, static_argnums=2)
        self._threads = min(threads or usual_threads(), len(self._stretches))
        share = -(-len(self._stretches) // self._threads)
        self._shares = [self._stretches[at : at + share] for at in range(0, len(self._stretches), share)]
        self._scratch = [_scratch(stretches) for stretches in self._shares]
        self._pool = ThreadPoolExecutor(self._threads - 1, "update") if self._threads > 1 else None

    def compile(self) -> None:
        """Compile what `advance` runs, so that no step pays for it. The state is not touched."""
        for stretch in self._kinds.values():
            self._new(stretch, stretch.of_weights(self._weights), np.zeros(stretch.count, FLOAT), 1)

    def lie_in(self, weights: Bytes) -> None:
        """As ``WholeTree.lie_in``."""
        self._weights = weights

    def weights(self) -> list[Array]:
        """Views of all leaves in layout order."""
        return self._layout.views(self._weights)

    def averaged(self) -> list[Array]:
        """As `weights`, with the moving average in the place of the trainable leaves, if there is one."""
        if not self._average_names:
            return self.weights()
        average = iter(self._views(self._flat[-1]))
        return [
            next(average).astype(leaf.dtype) if leaf.kind == "trainable" else view
            for leaf, view in zip(self.leaves, self.weights(), strict=True)
        ]

    def snapshot(self) -> Snapshot:
        """As ``Updater.snapshot``."""
        numbers = iter(self._numbers)
        views = [self._views(flat) for flat in self._flat]
        vector_of = [sum(self._form.vectors[:slot]) for slot in range(len(self._form.vectors))]
        optimizer = [
            next(numbers) if owner is None else views[vector_of[slot]][owner] for slot, owner in self._form.places
        ]
        parts: Snapshot = {
            "weights": {leaf.name: view for leaf, view in zip(self.leaves, self.weights(), strict=True)},
            "optimizer": dict(zip(self._names, optimizer, strict=True)),
        }
        if self._average_names:
            parts["average"] = dict(zip(self._average_names, views[-1], strict=True))
        return {part: {name: np.array(array) for name, array in arrays.items()} for part, arrays in parts.items()}

    def advance(self, sums: Reducer, examples: int, before: Bytes, after: Bytes) -> Advanced:
        """As ``Updater.advance``."""

        def work(thread: int) -> _Made | None:
            return self._make(sums, examples, before, after, self._shares[thread], *self._scratch[thread])

        others = [self._pool.submit(work, thread) for thread in range(1, len(self._shares))] if self._pool else []
        made = [work(0), *(other.result() for other in others)]
        sound = [each for each in made if each is not None]
        if len(sound) < len(made):
            return Advanced(sums.trouble(), lambda: (sums.norm(examples), 0.0))
        self._mean_state(sums, examples, after)
        self._numbers = sound[0].numbers
        self._flat, self._spare = self._spare, self._flat
        self._weights = after
        self.updates += 1
        gradient = math.fsum(square for each in sound for square in each.of_gradient)
        update = math.fsum(square for each in sound for square in each.of_update)
        return Advanced("", lambda: (math.sqrt(gradient) / examples, math.sqrt(update)))

    def _make(
        self,
        sums: Reducer,
        examples: int,
        before: Bytes,
        after: Bytes,
        stretches: Sequence[Stretch],
        scratch: Array,
        moved: Array,
    ) -> "_Made | None":
        """One thread's part; None as soon as a sum is not within the limit."""
        made = _Made(self._numbers)
        for stretch in stretches:
            total = sums.stretch(stretch.gradient_bytes, scratch[: stretch.count])
            square = squared_norm(total)
            if not within_limit(total, square):
                return None
            old, new = stretch.of_weights(before), stretch.of_weights(after)
            weights, vectors, made.numbers = self._new(stretch, old, total, examples)
            _write(stretch.views(new), weights)
            for spare, vector in zip(self._spare, vectors, strict=True):
                _write(stretch.views(spare[stretch.in_flat]), vector)
            np.subtract(new, old, out=moved[: stretch.count])
            made.of_gradient.append(square)
            made.of_update.append(squared_norm(moved[: stretch.count]))
        return made

    def _new(self, stretch: Stretch, old: Array, total: Array, examples: int) -> Any:
        """New weights, vectors and numbers of a stretch, as JAX arrays."""
        vectors = [stretch.views(flat[stretch.in_flat]) for flat in self._flat]
        decay = decay_of(self._average, self.updates + 1)
        weights, totals, also = stretch.views(old), stretch.views(total), [] if stretch.arrays[1:] else self._beside
        vectors = [[*arrays, *(each.astype(arrays[0].dtype) for each in also)] for arrays in vectors]
        return self._step(weights + also, vectors, self._numbers, totals + also, np.int32(examples), decay)

    def _traced(
        self, weights: Any, vectors: list[Any], numbers: list[Any], totals: Any, examples: Any, decay: Any
    ) -> Any:
        moving = vectors[len(vectors) - bool(self._average_names) :]
        state = self._form.join(vectors[: len(vectors) - len(moving)], numbers)
        means = [mean_of(total, examples, FLOAT.name) for total in totals]
        updates, state = self._transform.update(means, state, weights)
        weights, state = jax.tree.map(strong, (optax.apply_updates(weights, updates), state))
        vectors, numbers = self._form.part(state)
        blended = [[blend(a, w, decay) for a, w in zip(average, weights, strict=True)] for average in moving]
        return weights, vectors + blended, numbers

    def _mean_state(self, sums: Reducer, examples: int, after: Bytes) -> None:
        """The state of the model is the mean of what the workers made of it."""
        new = dict(zip((leaf.name for leaf in self.leaves), self._layout.views(after), strict=True))
        dtypes = {leaf.name: leaf.dtype for leaf in self.leaves}
        for leaf, at in self._gradient.placed():
            if leaf.kind == "state" and leaf.size:
                total = sums.stretch(at, np.empty(leaf.size, leaf.dtype)).reshape(leaf.shape)
                new[leaf.name][...] = np.asarray(self._mean(total, np.int32(examples), dtypes[leaf.name]))

    def _take_over(self, optimizer: dict[str, Array]) -> list[Array]:
        """The flat vectors of an optimizer's state."""
        found: dict[int, list[Array]] = {}
        for array, (slot, owner) in zip(optimizer.values(), self._form.places, strict=True):
            if owner is not None:
                found.setdefault(slot, []).append(array)
        return [self._laid_out(found[slot], self._form.dtypes[slot]) for slot in sorted(found)]

    def _laid_out(self, arrays: Iterable[Array], dtype: np.dtype[Any]) -> Array:
        flat: Array = zeros(self._gradient.size_bytes // FLOAT.itemsize * dtype.itemsize).view(dtype)
        _write(self._views(flat), arrays)
        return flat

    def _views(self, flat: Array) -> list[Array]:
        """One array per trainable leaf; the flat vector has its elements where the gradient has them."""
        starts = [(leaf, at // FLOAT.itemsize) for leaf, at in self._gradient.placed() if leaf.kind == "trainable"]
        return [flat[at : at + leaf.size].reshape(leaf.shape) for leaf, at in starts]


@dataclass(slots=True)
class _Made:
    """What a thread has made beside the stretches: the numbers in the optimizer's state, which are the same for all,
    and by stretch the squared norms of the gradient's sum and of the update."""

    numbers: list[Any]
    of_gradient: list[float] = field(default_factory=list)
    of_update: list[float] = field(default_factory=list)


def _try_bits(whole: Updater, made: StretchUpdater) -> None:
    """Raises NotElementwise if made-up updates have other bits in stretches than ``whole`` would have. ``made`` is what
    is to take its place."""
    trained = [leaf for leaf in whole.leaves if leaf.kind == "trainable"]
    if sum(leaf.size for leaf in trained) > TRIED_ELEMENTS:
        return
    trial = StretchUpdater(whole)
    trial._step = made._step  # compiled once for both: a PS that starts again is waited for
    layout, weights = gradient_layout(whole.leaves, ANY_BUCKET_BYTES), weights_layout(whole.leaves, ANY_BUCKET_BYTES)
    made_up = zeros(layout.size_bytes)
    for view, leaf in zip(layout.views(made_up), layout.leaves, strict=True):
        view[...] = np.linspace(-1.0, 2.0, leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
    sums = Reducer(layout, 1, late=True)
    for bucket in range(len(layout.buckets)):
        sums.hold(bucket, (0, 1), layout.bucket(made_up, bucket), stays=True)
    before, after = weights.pack(whole.weights()), zeros(weights.size_bytes)
    for _ in range(TRIED_UPDATES):
        trial.advance(sums, TRIED_EXAMPLES, before, after)
        before, after = after, before
    expected = whole.tried(layout.views(made_up), TRIED_EXAMPLES, TRIED_UPDATES)
    found = [view for view, leaf in zip(weights.views(before), whole.leaves, strict=True) if leaf.kind == "trainable"]
    for leaf, view, other in zip(trained, found, expected, strict=True):
        if view.tobytes() != other.tobytes():
            raise NotElementwise(f"in stretches {leaf.name} would be rounded differently")


def _scratch(stretches: Sequence[Stretch]) -> tuple[Array, Array]:
    """For a sum, and for what an update moves."""
    size_bytes = FLOAT.itemsize * max(stretch.count for stretch in stretches)
    return zeros(size_bytes).view(FLOAT), zeros(size_bytes).view(FLOAT)


def _write(views: Sequence[Array], arrays: Iterable[Any]) -> None:
    for view, array in zip(views, arrays, strict=False):  # what went along is left out
        view[...] = np.asarray(array)


def _stretches(gradient: Layout, weights: Layout) -> list[Stretch]:
    """The trainable leaves in stretches. Small neighbours, side by side in both layouts, share one."""
    of_weights = {leaf.name: at for leaf, at in weights.placed()}
    ends = [*gradient.offsets_bytes[1:], gradient.size_bytes]
    found: list[Stretch] = []
    for (leaf, at), end in zip(gradient.placed(), ends, strict=True):
        if leaf.kind != "trainable" or not leaf.size:
            continue
        there, padded = of_weights[leaf.name], (end - at) // FLOAT.itemsize
        last = found[-1] if found else None
        beside = last is not None and (
            last.gradient_bytes + last.count * FLOAT.itemsize, last.weights_bytes + last.count * FLOAT.itemsize
        ) == (at, there)  # fmt: skip
        if last is not None and beside and last.count + padded <= STRETCH:
            arrays = (*last.arrays, (last.count, leaf.shape))
            found[-1] = Stretch(last.gradient_bytes, last.weights_bytes, last.count + padded, arrays)
            continue
        done = 0
        for rows in _cut(leaf.shape):
            shape = (rows, *leaf.shape[1:]) if leaf.shape else ()
            size = math.prod(shape)
            count = size if done + size < leaf.size else padded - done
            begins = done * FLOAT.itemsize
            found.append(Stretch(at + begins, there + begins, count, ((0, shape),)))
            done += size
    return found


def _cut(shape: tuple[int, ...]) -> list[int]:
    """How many rows each part of a leaf gets; the last may have up to twice as many as the others."""
    rows, size = shape[0] if shape else 1, math.prod(shape[1:])
    each = max(ROWS, STRETCH // size // ROWS * ROWS)
    parts = max(1, rows // each)
    return [each] * (parts - 1) + [rows - each * (parts - 1)]

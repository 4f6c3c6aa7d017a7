"""From the sums of a step to the next version: what every updater does for the server, and how most do it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bus.layout import Bytes, weights_layout
from bus.messages import Leaf
from ps.norms import distance
from ps.reduce import Reducer

ANY_BUCKET_BYTES = 1 << 22  # where a leaf lies does not depend on it

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Advanced:
    """``trouble``: why nothing was changed; empty if all is well. ``norms()`` are those of the mean gradient and of the
    update, asked for once the new version is on its way."""

    trouble: str
    norms: Callable[[], tuple[float, float]]


class WholeTree:
    """Updates all leaves at once; a subclass has ``leaves``, ``apply`` and ``weights``."""

    leaves: tuple[Leaf, ...]
    by_stretch = False

    def apply(self, sums: Sequence[Array], examples: int) -> None:
        """Update the weights by the mean gradient."""
        raise NotImplementedError

    def weights(self) -> list[Array]:
        """Of all leaves in layout order, read-only."""
        raise NotImplementedError

    def lie_in(self, weights: Bytes) -> None:
        """The buffer ``weights`` holds the current version, so that an updater needs no copy of its own."""

    def advance(self, sums: Reducer, examples: int, before: Bytes, after: Bytes) -> Advanced:
        """Make the next version, and write it to ``after``; ``before`` holds the one that there is. Nothing is changed
        if the sums are not sound."""
        trouble = sums.trouble()
        if trouble:
            return Advanced(trouble, lambda: (sums.norm(examples), 0.0))
        self.apply(sums.sums(), examples)
        layout = weights_layout(self.leaves, ANY_BUCKET_BYTES)
        layout.pack(self.weights(), after)

        def trained(buffer: Bytes) -> list[Array]:
            pairs = zip(self.leaves, layout.views(buffer), strict=True)
            return [view for leaf, view in pairs if leaf.kind == "trainable"]

        return Advanced("", lambda: (sums.norm(examples), distance(trained(before), trained(after))))

"""Where datasets lie on disk, how they are verified and read. NumPy only, and no network but in `fetch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Split:
    """Training and test examples, each {"image": (N, ...) uint8, "label": (N,) uint8}."""

    train: Arrays
    test: Arrays


def digits() -> Split:
    """1,437 training and 360 test pictures of 8x8, values 0..16, from the file shipped beside this module.

    The source is ordered by writer, so it is shuffled once, always in the same way (by sorting raw words of a Philox
    generator of key 0), and the last 360 are the test set. The same writers are in both parts.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    words = np.random.Philox(key=np.zeros(2, np.uint64)).random_raw(len(images))
    order = np.argsort(words, kind="stable")
    train, test = order[:-360], order[-360:]
    return Split({"image": images[train], "label": labels[train]}, {"image": images[test], "label": labels[test]})

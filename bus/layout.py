"""Parameter leaves laid out once: 64-byte aligned, in order, cut into buckets that travel as one message each.

Two layouts describe a model: that of its weights (every leaf in its own dtype) and that of its gradient (trainable
leaves and model state, in the dtype sums are taken in). Both follow from the same list of leaves, so peers compare
the list and know the rest. A leaf larger than a bucket is cut; a bucket holds leaves of one dtype, so a bucket of a
gradient can be summed as one flat array. The padding between leaves is zero and stays zero.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from bus.errors import LayoutError
from bus.messages import Leaf as Leaf

ALIGNMENT_BYTES = 64  # a cache line, and what XLA asks of memory that it is to use where it lies

# Every dtype that may travel, by name; what is not listed is refused. The numbers are item sizes in bytes.
ITEM_SIZES_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


class Bucket(msgspec.Struct, frozen=True):
    """A stretch of the flat buffer that travels as one message."""

    offset_bytes: int
    size_bytes: int
    dtype: str


class Layout:
    """Where each leaf lies in one flat buffer of ``size_bytes``, and how that buffer is cut into ``buckets``."""

    def __init__(self, leaves: Iterable[Leaf], bucket_bytes: int) -> None:
        if bucket_bytes < ALIGNMENT_BYTES or bucket_bytes % ALIGNMENT_BYTES:
            raise LayoutError(f"bucket size: found {bucket_bytes} bytes, expected a multiple of {ALIGNMENT_BYTES}")
        self.leaves = tuple(leaves)
        self.offsets_bytes: tuple[int, ...]
        self.buckets: tuple[Bucket, ...]
        offsets: list[int] = []
        buckets: list[Bucket] = []
        start = end = 0  # of the bucket being filled
        dtype = ""
        for leaf in self.leaves:
            if leaf.dtype not in ITEM_SIZES_BYTES:
                known = ", ".join(ITEM_SIZES_BYTES)
                raise LayoutError(f"{leaf.name}: dtype {leaf.dtype} cannot travel; expected one of {known}")
            size = _aligned(leaf.size * ITEM_SIZES_BYTES[leaf.dtype])
            if end > start and (leaf.dtype != dtype or end - start + size > bucket_bytes):
                buckets.append(Bucket(start, end - start, dtype))
                start = end
            offsets.append(end)
            dtype = leaf.dtype
            end += size
            while end - start > bucket_bytes:  # only ever a leaf that alone is larger than a bucket
                buckets.append(Bucket(start, bucket_bytes, dtype))
                start += bucket_bytes
        if end > start or not buckets:
            buckets.append(Bucket(start, end - start, dtype or "uint8"))
        self.offsets_bytes, self.buckets, self.size_bytes = tuple(offsets), tuple(buckets), end

    def placed(self) -> Iterator[tuple[Leaf, int]]:
        """Each leaf, and where it begins in bytes."""
        return zip(self.leaves, self.offsets_bytes, strict=True)

    def empty(self) -> Bytes:
        """A new aligned buffer, zeroed, of ``size_bytes``."""
        return zeros(self.size_bytes)

    def bucket(self, buffer: Bytes, index: int) -> Bytes:
        """The bytes of one bucket, where they lie."""
        bucket = self.buckets[index]
        return buffer[bucket.offset_bytes : bucket.offset_bytes + bucket.size_bytes]

    def views(self, buffer: Bytes) -> list[npt.NDArray[np.generic]]:
        """One array per leaf, in order, each a view of ``buffer``. Names of dtypes beyond NumPy's own need
        ``ml_dtypes`` imported, which JAX does."""
        return [np.ndarray(shape, dtype, buffer.data, offset) for shape, dtype, offset in self._places]

    @cached_property
    def _places(self) -> list[tuple[tuple[int, ...], np.dtype[np.generic], int]]:
        """Shape, dtype and offset of each leaf, looked up once."""
        return [
            (leaf.shape, np.dtype(leaf.dtype), offset)
            for leaf, offset in zip(self.leaves, self.offsets_bytes, strict=True)
        ]

    def pack(self, arrays: Sequence[npt.ArrayLike], buffer: Bytes | None = None) -> Bytes:
        """Copy one array per leaf into ``buffer`` (a new one by default) and return it."""
        target = self.empty() if buffer is None else buffer
        for view, leaf, array in zip(self.views(target), self.leaves, arrays, strict=True):
            found = np.asarray(array)
            if found.shape != view.shape or found.dtype.newbyteorder("=") != view.dtype:
                raise LayoutError(
                    f"{leaf.name}: found {found.dtype.name}{list(found.shape)}, expected {leaf.dtype}{list(leaf.shape)}"
                )
            view[...] = found
        return target


def zeros(size_bytes: int) -> Bytes:
    """New aligned memory."""
    raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + size_bytes]


def weights_layout(leaves: Sequence[Leaf], bucket_bytes: int) -> Layout:
    """How versions travel: every leaf, in its own dtype."""
    return Layout(leaves, bucket_bytes)


def gradient_layout(leaves: Sequence[Leaf], bucket_bytes: int) -> Layout:
    """How contributions travel: trainable leaves and state, in the dtype they are summed in (float32, or float64 for
    float64 leaves; half precision would overflow or vanish in the sum)."""
    summed = (
        Leaf(leaf.name, "float64" if leaf.dtype == "float64" else "float32", leaf.shape, leaf.kind)
        for leaf in leaves
        if leaf.kind != "frozen"
    )
    return Layout(summed, bucket_bytes)


def fingerprint(leaves: Sequence[Leaf]) -> str:
    """Names the parameter tree: 16 hex digits over the leaves' names, dtypes, shapes and kinds."""
    return hashlib.sha256(msgspec.msgpack.encode(list(leaves))).hexdigest()[:16]


def first_difference(ours: Sequence[Leaf], theirs: Sequence[Leaf]) -> str | None:
    """Where two parameter trees first differ, in words (``theirs`` is the parameter server's); None if nowhere."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"{_describe(mine)} here, {_describe(other)} at the parameter server"
    if len(ours) > len(theirs):
        return f"{_describe(ours[len(theirs)])} here, nothing at the parameter server"
    if len(theirs) > len(ours):
        return f"nothing here, {_describe(theirs[len(ours)])} at the parameter server"
    return None


def _describe(leaf: Leaf) -> str:
    return f"{leaf.kind} {leaf.name} {leaf.dtype}{list(leaf.shape)}"


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

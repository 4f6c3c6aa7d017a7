"""Leaves laid out in one buffer and cut into buckets: nothing is lost, shifted or of another type."""

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import LayoutError
from bus.layout import (
    ALIGNMENT_BYTES,
    ITEM_SIZES_BYTES,
    Layout,
    Leaf,
    fingerprint,
    first_difference,
    gradient_layout,
    weights_layout,
)

assert ml_dtypes  # gives NumPy the names bfloat16 and float8_*, as JAX does

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
KINDS = st.sampled_from(["trainable", "frozen", "state"])
BUCKET_BYTES = st.sampled_from([64, 128, 192, 512, 4096])


def leaves(dtypes: list[str] | None = None) -> st.SearchStrategy[list[Leaf]]:
    one = st.builds(
        Leaf, name=st.just(""), dtype=st.sampled_from(dtypes or list(ITEM_SIZES_BYTES)), shape=SHAPES, kind=KINDS
    )
    return st.lists(one, max_size=8).map(
        lambda found: [msgspec.structs.replace(leaf, name=f"['{index}']") for index, leaf in enumerate(found)]
    )


def values(leaf: Leaf, seed: int) -> np.ndarray[Any, Any]:
    """An array for a leaf with every bit set at random (but for bool, which has one)."""
    dtype = np.dtype(leaf.dtype)
    raw = np.random.default_rng(seed).integers(0, 256, leaf.size * dtype.itemsize, np.uint8)
    if leaf.dtype == "bool":
        raw %= 2
    return raw.view(dtype).reshape(leaf.shape)


@given(leaves(), BUCKET_BYTES, st.integers(0, 1000))
def test_what_is_packed_is_found_again_bit_for_bit(leaves: list[Leaf], bucket_bytes: int, seed: int) -> None:
    layout = Layout(leaves, bucket_bytes)
    arrays = [values(leaf, seed + index) for index, leaf in enumerate(leaves)]
    views = layout.views(layout.pack(arrays))
    for view, array, leaf in zip(views, arrays, leaves, strict=True):
        assert (view.dtype.name, view.shape) == (leaf.dtype, leaf.shape)
        assert view.tobytes() == array.tobytes()


@given(leaves(), BUCKET_BYTES, st.integers(0, 1000))
def test_buckets_carried_one_by_one_give_the_same_buffer(leaves: list[Leaf], bucket_bytes: int, seed: int) -> None:
    layout = Layout(leaves, bucket_bytes)
    sent = layout.pack([values(leaf, seed + index) for index, leaf in enumerate(leaves)])
    received = layout.empty()
    for index in reversed(range(len(layout.buckets))):
        layout.bucket(received, index)[:] = np.frombuffer(layout.bucket(sent, index).tobytes(), np.uint8)
    assert received.tobytes() == sent.tobytes()


@given(leaves(), BUCKET_BYTES)
def test_buckets_are_the_buffer_exactly_and_of_one_dtype_each(leaves: list[Leaf], bucket_bytes: int) -> None:
    layout = Layout(leaves, bucket_bytes)
    ends = [0, *(bucket.offset_bytes + bucket.size_bytes for bucket in layout.buckets)]
    assert [bucket.offset_bytes for bucket in layout.buckets] == ends[:-1]
    assert ends[-1] == layout.size_bytes
    assert all(bucket.size_bytes <= bucket_bytes for bucket in layout.buckets)
    assert len(layout.buckets) == 1 or all(bucket.size_bytes for bucket in layout.buckets)
    for bucket in layout.buckets:
        low, high = bucket.offset_bytes, bucket.offset_bytes + bucket.size_bytes
        inside = {
            leaf.dtype
            for leaf, offset in zip(leaves, layout.offsets_bytes, strict=True)
            if leaf.size and offset < high and offset + leaf.size * ITEM_SIZES_BYTES[leaf.dtype] > low
        }
        assert inside <= {bucket.dtype}


@given(leaves(), BUCKET_BYTES)
def test_everything_starts_at_a_multiple_of_64_bytes(leaves: list[Leaf], bucket_bytes: int) -> None:
    layout = Layout(leaves, bucket_bytes)
    if layout.size_bytes:  # an empty array lies nowhere
        assert layout.empty().ctypes.data % ALIGNMENT_BYTES == 0
    starts = [*layout.offsets_bytes, *(bucket.offset_bytes for bucket in layout.buckets)]
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)


@given(leaves(["float32", "float64", "bfloat16", "float16"]), BUCKET_BYTES)
def test_a_bucket_of_a_gradient_can_be_summed_as_one_flat_array(leaves: list[Leaf], bucket_bytes: int) -> None:
    layout = gradient_layout(leaves, bucket_bytes)
    parts = [layout.pack([np.full(leaf.shape, value, leaf.dtype) for leaf in layout.leaves]) for value in (1.5, 2.25)]
    total = layout.empty()
    for index, bucket in enumerate(layout.buckets):
        one, two, out = (layout.bucket(buffer, index).view(bucket.dtype) for buffer in (*parts, total))
        np.add(one, two, out=out)
    assert all((view == 3.75).all() for view in layout.views(total))
    assert total.tobytes() == layout.pack(layout.views(total)).tobytes()  # the padding is still zero


def test_a_gradient_is_summed_in_full_precision_and_has_no_frozen_leaves() -> None:
    leaves = [
        Leaf("half", "bfloat16", (3,), "trainable"),
        Leaf("table", "int32", (7,), "frozen"),
        Leaf("double", "float64", (), "trainable"),
        Leaf("mean", "float32", (2, 2), "state"),
    ]
    summed = [(leaf.name, leaf.dtype) for leaf in gradient_layout(leaves, 64).leaves]
    assert summed == [("half", "float32"), ("double", "float64"), ("mean", "float32")]
    assert [leaf.name for leaf in weights_layout(leaves, 64).leaves] == ["half", "table", "double", "mean"]


def test_a_leaf_larger_than_a_bucket_is_cut() -> None:
    layout = Layout([Leaf("small", "float32", (3,), "trainable"), Leaf("large", "float32", (100,), "trainable")], 128)
    assert [bucket.size_bytes for bucket in layout.buckets] == [64, 128, 128, 128, 64]
    assert layout.offsets_bytes == (0, 64)


def test_a_bucket_is_filled_to_the_last_byte() -> None:
    half = [Leaf(name, "float32", (16,), "trainable") for name in ("a", "b")]
    assert [bucket.size_bytes for bucket in Layout(half, 128).buckets] == [128]
    whole = [Leaf("a", "float32", (32,), "trainable"), Leaf("b", "float32", (1,), "trainable")]
    assert [bucket.size_bytes for bucket in Layout(whole, 128).buckets] == [128, 64]


def test_a_message_is_never_larger_than_a_bucket_however_large_a_leaf_is() -> None:
    layout = Layout([Leaf("huge", "float32", (600_000_000,), "trainable")], 1 << 30)  # 2.4 GB: more than an int holds
    assert [bucket.size_bytes for bucket in layout.buckets] == [1 << 30, 1 << 30, 2_400_000_000 - (2 << 30)]


@pytest.mark.parametrize(
    ("leaf", "array"),
    [
        (Leaf("['w']", "float32", (2, 3), "trainable"), np.zeros((3, 2), np.float32)),
        (Leaf("['w']", "float32", (2,), "trainable"), np.zeros(2, np.float64)),
        (Leaf("['w']", "float32", (), "trainable"), np.zeros(1, np.float32)),
        (Leaf("['w']", "bfloat16", (2,), "trainable"), np.zeros(2, np.uint16)),
    ],
)
def test_an_array_of_another_shape_or_dtype_is_refused_by_name(leaf: Leaf, array: Any) -> None:
    with pytest.raises(LayoutError, match=r"\['w'\]: found .*, expected " + leaf.dtype):
        Layout([leaf], 64).pack([array])


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_arrays_is_refused(count: int) -> None:
    with pytest.raises(ValueError):
        Layout([Leaf("w", "float32", (2,), "trainable")], 64).pack([np.zeros(2, np.float32)] * count)


def test_a_big_endian_array_arrives_as_the_same_numbers() -> None:
    layout = Layout([Leaf("w", "float32", (3,), "trainable")], 64)
    (view,) = layout.views(layout.pack([np.array([1.0, -2.5, 3e30], ">f4")]))
    assert view.tobytes() == np.array([1.0, -2.5, 3e30], "<f4").tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "object", "V2", "str", "int4", ""])
def test_a_dtype_outside_the_list_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(LayoutError, match=r"^\['w'\]: dtype .* cannot travel; expected one of bool"):
        Layout([Leaf("['w']", dtype, (2,), "trainable")], 64)


@pytest.mark.parametrize("bucket_bytes", [0, -64, 63, 100])
def test_a_bucket_size_that_would_break_the_alignment_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(LayoutError, match="expected a multiple of 64"):
        Layout([], bucket_bytes)


BASE = [
    Leaf("['a']", "float32", (3, 2), "trainable"),
    Leaf("['b']", "float32", (2,), "trainable"),
    Leaf("['n']", "int32", (), "frozen"),
]
CHANGES: list[tuple[list[Leaf], str]] = [
    (
        [BASE[0], Leaf("['b']", "float32", (3,), "trainable"), BASE[2]],
        "trainable ['b'] float32[3] here, trainable ['b'] float32[2] at the parameter server",
    ),
    (
        [BASE[0], Leaf("['b']", "float64", (2,), "trainable"), BASE[2]],
        "trainable ['b'] float64[2] here, trainable ['b'] float32[2] at the parameter server",
    ),
    ([BASE[0], Leaf("['c']", "float32", (2,), "trainable"), BASE[2]], "trainable ['c'] float32[2] here, "),
    ([*BASE[:2], Leaf("['n']", "int32", (), "state")], "state ['n'] int32[] here, frozen ['n'] int32[] at "),
    ([*BASE, Leaf("['z']", "float32", (9,), "trainable")], "trainable ['z'] float32[9] here, nothing at the "),
    (BASE[:2], "nothing here, frozen ['n'] int32[] at the parameter server"),
    ([], "nothing here, trainable ['a'] float32[3, 2] at the parameter server"),
]


@pytest.mark.parametrize(("ours", "said"), CHANGES)
def test_the_first_leaf_that_differs_is_named(ours: list[Leaf], said: str) -> None:
    found = first_difference(ours, BASE)
    assert found is not None and found.startswith(said)
    assert fingerprint(ours) != fingerprint(BASE)


def test_equal_trees_have_equal_fingerprints_also_after_a_journey() -> None:
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(BASE), type=list[Leaf])
    assert first_difference(travelled, BASE) is None
    assert fingerprint(travelled) == fingerprint(BASE)

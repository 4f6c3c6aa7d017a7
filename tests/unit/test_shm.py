"""Memory that processes share: between two real processes, with what may go wrong."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bus.codec import Place
from bus.messages import Segment
from bus.shm import HEAD_BYTES, SharedMemory, attach, create

SIZE = 1 << 20


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = create(SIZE)
    assert made is not None
    yield made
    made.close()


def in_another_process(segment: Segment, code: str) -> str:
    """What `code` prints, in a process that has the segment attached as `memory`."""
    text = f"""
import sys, msgspec
from bus.codec import Place
from bus.messages import Segment
from bus.shm import attach
segment = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Segment)
memory = attach(segment, writable={"=" in code})
{code}
"""
    command = [sys.executable, "-c", text, msgspec.msgpack.encode(segment).hex()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_one_process_writes_the_other_reads(memory: SharedMemory) -> None:
    memory.data[64:68] = (1, 2, 3, 4)
    assert in_another_process(memory.segment, "print(memory.at(Place(64, 4)).tolist())") == "[1, 2, 3, 4]"
    in_another_process(memory.segment, "memory.data[128:130] = (7, 8)")
    assert memory.data[128:130].tolist() == [7, 8]


def test_it_is_aligned_for_jax_and_begins_as_zeros(memory: SharedMemory) -> None:
    assert memory.data.ctypes.data % 64 == 0 and memory.data.nbytes == SIZE and not memory.data.any()


def test_who_only_reads_cannot_write(memory: SharedMemory) -> None:
    found = attach(memory.segment, writable=False)
    assert found is not None and not found.data.flags.writeable


def test_a_payload_is_found_where_it_lies_and_nowhere_else(memory: SharedMemory) -> None:
    assert memory.find(memory.data[128:192]) == Place(128, 64)
    assert memory.find(memory.data) == Place(0, SIZE)
    assert memory.find(np.zeros(64, np.uint8)) is None
    around = memory.around(memory.data[128:192], 128, 4096)
    assert around is not None and memory.find(around) == Place(0, 4096)
    assert memory.around(memory.data[128:192], 192, 64) is None


@pytest.mark.parametrize("place", [(-64, 64), (0, SIZE + 1), (SIZE, 64), (1, 64), (0, -1), (SIZE - 64, 128)])
def test_a_place_that_is_not_in_it_is_none(memory: SharedMemory, place: tuple[int, int]) -> None:
    assert memory.at(Place(*place)) is None


def test_no_peer_can_cut_it_off(memory: SharedMemory) -> None:
    path = f"/proc/{memory.segment.pid}/fd/{memory.segment.fd}"
    with pytest.raises(OSError):
        os.truncate(path, HEAD_BYTES)
    with pytest.raises(OSError):
        os.truncate(path, 2 * SIZE)


@pytest.mark.parametrize(
    "change",
    [{"pid": 2**22 + 1}, {"fd": 9999}, {"size_bytes": SIZE + 1}, {"nonce": b"another"}, {"size_bytes": -1}],
    ids=str,
)
def test_another_segment_is_not_taken_for_it(memory: SharedMemory, change: dict[str, object]) -> None:
    assert attach(msgspec.structs.replace(memory.segment, **change), writable=True) is None


def test_once_closed_nobody_new_can_have_it_and_who_has_it_keeps_it(memory: SharedMemory) -> None:
    mine = attach(memory.segment, writable=True)
    memory.close()
    assert attach(memory.segment, writable=True) is None
    assert mine is not None
    mine.data[0] = 9
    assert memory.data[0] == 9


def test_nothing_lies_in_a_file_system(memory: SharedMemory) -> None:
    assert "memfd:gradbus (deleted)" in os.readlink(f"/proc/self/fd/{memory.segment.fd}")


def test_a_system_without_it_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert create(SIZE) is None

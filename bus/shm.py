"""Memory that processes of one host share: the bulk stays where it is, and only notices travel over ZeroMQ.

A segment is a memfd (memfd_create(2)): it has no name in any file system, so nothing is left behind, whoever is
killed, and no /dev/shm has to be large enough. A peer opens it as /proc/PID/fd/N of the PS, which works for the same
user on the same host and in the same container; where it does not, everything goes by TCP. The PS makes all segments,
seals their size (a peer cannot cut them off under it), and opens none of anyone else's.

Who writes where, and why nobody reads what is being overwritten: docs/architecture.md, "Shared memory".
"""

import fcntl
import mmap
import os
import secrets

import numpy as np

from bus.codec import Bytes, Place
from bus.layout import ALIGNMENT_BYTES
from bus.messages import Segment

NONCE_BYTES = 16
HEAD_BYTES = 4096  # the nonce, and the rest of its page
# Of linux/fcntl.h, as Python has them only in some builds: no one may make the file smaller, larger, or undo that.
_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 1, 2, 4


class SharedMemory:
    """A mapped segment; ``data`` is all of it but the head. Unmapped when nothing refers to it any more."""

    def __init__(self, mapped: mmap.mmap, fd: int | None, segment: Segment) -> None:
        self.segment, self._fd = segment, fd
        self.data: Bytes = np.frombuffer(mapped, np.uint8)[HEAD_BYTES:]
        self._start: int = self.data.ctypes.data

    def find(self, payload: Bytes) -> Place | None:
        """Where ``payload`` lies in here; None if it does not."""
        offset = int(payload.ctypes.data) - self._start
        inside = offset >= 0 and offset + payload.nbytes <= self.data.nbytes
        return Place(offset, payload.nbytes) if inside else None

    def at(self, place: Place) -> Bytes | None:
        """What lies there; None if that is not in here."""
        offset, size = place
        inside = offset >= 0 and size >= 0 and offset % ALIGNMENT_BYTES == 0 and offset + size <= self.data.nbytes
        return self.data[offset : offset + size] if inside else None

    def around(self, payload: Bytes, before_bytes: int, size_bytes: int) -> Bytes | None:
        """The ``size_bytes`` that begin so much before ``payload``; None if they are not in here."""
        place = self.find(payload)
        return self.at(Place(place.offset_bytes - before_bytes, size_bytes)) if place else None

    def close(self) -> None:
        """Let nobody attach any more; who is attached stays so."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def create(size_bytes: int) -> SharedMemory | None:
    """A new segment of zeros, of which a page takes memory once it is used. None where the system has no such thing."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        fd = os.memfd_create("gradbus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(fd, HEAD_BYTES + size_bytes)
        fcntl.fcntl(fd, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
        mapped = mmap.mmap(fd, HEAD_BYTES + size_bytes)
    except (OSError, ValueError):
        os.close(fd)
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    mapped[:NONCE_BYTES] = nonce
    return SharedMemory(mapped, fd, Segment(os.getpid(), fd, size_bytes, nonce))


def attach(segment: Segment, *, writable: bool) -> SharedMemory | None:
    """The segment of another process; None if it cannot be had, or is another one."""
    try:
        mode = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(f"/proc/{segment.pid}/fd/{segment.fd}", mode | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != HEAD_BYTES + segment.size_bytes:
            return None
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(fd, HEAD_BYTES + segment.size_bytes, access=access)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return SharedMemory(mapped, None, segment) if mapped[:NONCE_BYTES] == segment.nonce else None

"""Segments: shared memory that a client owns and hands, by descriptor, to the workers of its host.

A memfd leaves nothing in /dev/shm, is not bounded by a container's 64 MB there, and goes when its last holder goes.
It is sealed against shrinking, so that nobody who maps it can be killed (SIGBUS) by somebody who cuts it short; a
worker maps no segment without those seals.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from batch_inference.errors import TransportError
from batch_inference.transport.scarce import explained
from batch_inference.transport.wire import UNIT, align


class Segment:
    """One mapping. `memory` is the mapping itself; `words` and `quads` are the same bytes as 4- and 8-byte integers."""

    def __init__(self, memory: mmap.mmap, fd: int = -1) -> None:
        self.memory = memory
        self.fd = fd
        self.size = len(memory)
        self.units = self.size // UNIT
        self.words = memoryview(memory).cast("B").cast("I")
        self.quads = memoryview(memory).cast("B").cast("Q")

    def __repr__(self) -> str:
        return f"<Segment {self.size} bytes, fd {self.fd}>"

    def discard(self) -> None:
        """Gives the pages back to the machine; the segment stays mapped, and is zeros again."""
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Closes the descriptor. The mapping goes with the last object that refers to it: a slot, or an array on it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


def create(size: int) -> Segment:
    """A new shared segment of at least `size` bytes of zeros, ours. Pages cost memory when they are first touched.

    TransportError where a limit of this process forbids it.
    """
    import fcntl

    with explained():
        fd = os.memfd_create("batch_inference", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, align(size))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(fd, align(size))
        except BaseException:
            os.close(fd)
            raise
    return Segment(memory, fd)


def attach(fd: int) -> Segment:
    """Maps a segment of another process; closes `fd`.

    TransportError unless it is sealed against shrinking and of whole units; OSError if it cannot be mapped.
    """
    import fcntl

    try:
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise TransportError(
                "a segment that is not sealed against shrinking was offered: refused, it could kill us"
            )
        size = os.fstat(fd).st_size
        if size <= 0 or size % UNIT:
            raise TransportError(f"a segment of {size} bytes was offered: refused, it must be whole units of {UNIT}")
        return Segment(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def private(size: int) -> Segment:
    """Memory of this process alone, for a worker that is a thread of it."""
    return Segment(mmap.mmap(-1, align(size)))

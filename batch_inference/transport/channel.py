"""Channels: request pipes towards a worker, and the wake-ups that come back.

A request pipe carries 32-byte descriptors from many clients to the one worker incarnation that reads it. Writes of up
to PIPE_BUF bytes are atomic and a read takes whatever waits, so no lock is shared and a killed process leaves none
behind.

A wake-up says "look at your slot" and may come late, twice or for nothing; the slot's header is the truth. A thread
waits on an eventfd of its own (a write to it never blocks and takes no pipe pages). An event loop, or the thread that
completes futures, reads the keys of finished slots from a pipe: one write for all replies of a batch.

The *near* end of a channel is the client's, the *far* end the worker's. The classes named Local do the same inside one
process, for a worker that is a thread of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import stat
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from batch_inference.errors import TransportError
from batch_inference.transport.scarce import explained
from batch_inference.transport.wire import DESCRIPTORS_PER_WRITE, ENTRIES_PER_WRITE, ENTRY, slot_key

_READ_SIZE = 1 << 16
NO_ENTRY = ENTRY.pack(0xFFFF, 0xFFFF, 0xFFFF_FFFF)


def milliseconds(timeout: float) -> int:
    """A wait in seconds for poll, which knows no longer one than 24 days; whoever waits looks at the clock again."""
    return math.ceil(min(max(0.0, timeout), 1e6) * 1e3)


def reopen(fd: int, flags: int) -> int:
    """An open file description of our own for a pipe that came from another process: its flags are nobody else's."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


class RequestPipe:
    """The client's end of a worker's request pipe; takes over `fd`.

    It is open for reading as well, so that the pipe never breaks (SIGPIPE, EPIPE) when the worker dies. It is closed
    with the last reference, so that a thread that is about to write cannot hit a number that now means another file.
    """

    def __init__(self, fd: int) -> None:
        try:
            self.fd = reopen(fd, os.O_RDWR | os.O_NONBLOCK)
        finally:
            os.close(fd)

    def write(self, descriptors: bytes) -> bool:
        """Sends at most DESCRIPTORS_PER_WRITE descriptors, all or none; False when the pipe is full. Never blocks."""
        try:
            os.write(self.fd, descriptors)
        except BlockingIOError:
            return False
        return True

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


class LocalRequestPipe:
    """Both ends of a request pipe within one process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def write(self, descriptors: bytes) -> bool:
        self._queue.put(descriptors)
        return True

    def read(self, timeout: float | None) -> bytes:
        """What waits; blocks for the first for `timeout` seconds (None: for as long as it takes)."""
        try:
            parts = [self._queue.get(timeout=timeout) if timeout != 0 else self._queue.get_nowait()]
            while not self._queue.empty():
                parts.append(self._queue.get_nowait())
        except queue.Empty:
            return b""
        return b"".join(parts)


def read_waiting(fd: int) -> bytes:
    """Everything that waits in a non-blocking request pipe: whole descriptors, if nobody wrote anything else."""
    data = b""
    try:
        data = part = os.read(fd, _READ_SIZE)
        while len(part) == _READ_SIZE:
            part = os.read(fd, _READ_SIZE)
            data += part
    except BlockingIOError:
        pass
    return data


def chunks(descriptors: Sequence[bytes]) -> Iterable[bytes]:
    """`descriptors` in pieces that a request pipe takes at once."""
    for start in range(0, len(descriptors), DESCRIPTORS_PER_WRITE):
        yield b"".join(descriptors[start : start + DESCRIPTORS_PER_WRITE])


def check(kind: str, fd: int) -> None:
    """TransportError unless `fd` is what a worker needs for the far end of a channel of this kind, thread or keys."""
    if kind == "thread":
        right = os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"
    else:
        right = stat.S_ISFIFO(os.fstat(fd).st_mode)
    if not right:
        raise TransportError(
            f"what was offered as a channel of kind {kind!r} is none: refused, a worker could not use it"
        )


class NearChannel(Protocol):
    """The client's end: what a slot needs to know of its channel."""

    number: int

    def wake(self, key: int) -> None:
        """Wakes the caller of slot `key` without the worker's help."""
        ...


class WaitChannel(NearChannel, Protocol):
    """A channel on which one thread at a time waits for its own slot."""

    def wait(self, timeout: float | None = None) -> None: ...


class KeyChannel(NearChannel, Protocol):
    """A channel from which one thread reads the keys of many slots."""

    def read(self, timeout: float | None) -> list[int]:
        """The keys posted since; waits up to `timeout` seconds for one (None: for as long as it takes)."""
        ...


class FarChannel(Protocol):
    """The worker's end: `post` each finished slot, `flush` at the end of a batch."""

    eventfd: int  # what `post` adds one to, if that is all it does; or -1

    @property
    def keys(self) -> list[int] | None:
        """What `post` appends a slot's key to, if that is all it does and it takes a flush."""
        ...

    def post(self, segment: int, unit: int) -> bool:
        """Tells of a finished slot; True when it takes a `flush` to send that."""
        ...

    def flush(self) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class ThreadChannel:
    """A waiting thread's eventfd."""

    def __init__(self, number: int) -> None:
        self.number = number
        with explained():
            self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll: select.poll | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Returns after a wake-up, or after `timeout` seconds (rounded up to milliseconds). Holds no GIL meanwhile."""
        if timeout is not None:
            if self._poll is None:
                self._poll = select.poll()
                self._poll.register(self.fd, select.POLLIN)
            if not self._poll.poll(milliseconds(timeout)):
                return
        os.eventfd_read(self.fd)

    def wake(self, key: int) -> None:
        os.eventfd_write(self.fd, 1)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


class FarThreadChannel:
    keys = None

    def __init__(self, fd: int) -> None:
        self.eventfd = fd

    def post(self, segment: int, unit: int) -> bool:
        try:
            os.eventfd_write(self.eventfd, 1)
        except BlockingIOError:
            pass  # it is full: then its reader is woken anyway
        return False

    def flush(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.eventfd

    def close(self) -> None:
        os.close(self.eventfd)


class PipeChannel:
    """A pipe of the keys of finished slots, for an event loop or for the thread that completes futures."""

    def __init__(self, number: int) -> None:
        self.number = number
        with explained():
            self.fd, self.far_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._woken: deque[int] = deque()

    def read(self, timeout: float | None = 0.0) -> list[int]:
        """The keys posted since; waits up to `timeout` seconds for one (None: for as long as it takes)."""
        if timeout != 0.0:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            poll.poll(None if timeout is None else milliseconds(timeout))
        try:
            keys = array("Q", os.read(self.fd, _READ_SIZE)).tolist()
        except BlockingIOError:
            keys = []
        while self._woken:
            keys.append(self._woken.popleft())
        return keys

    def wake(self, key: int) -> None:
        self._woken.append(key)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes its reader as well
            os.write(self.far_fd, NO_ENTRY)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)
            os.close(self.far_fd)


class FarPipeChannel:
    """Keeps what a full pipe does not take; the worker flushes again when `fileno` becomes writable."""

    eventfd = -1

    def __init__(self, fd: int) -> None:
        try:
            self._fd = reopen(fd, os.O_RDWR | os.O_NONBLOCK)
        finally:
            os.close(fd)
        self.keys: list[int] = []

    def post(self, segment: int, unit: int) -> bool:
        self.keys.append(slot_key(segment, unit))
        return True

    def flush(self) -> bool:
        """Sends what was posted; False when some is left."""
        while self.keys:
            try:
                os.write(self._fd, array("Q", self.keys[:ENTRIES_PER_WRITE]))
            except BlockingIOError:
                return False
            del self.keys[:ENTRIES_PER_WRITE]
        return True

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class LocalThreadChannel:
    """Both ends of a waiting thread's channel: a lock that its waiter holds."""

    eventfd = -1
    keys = None

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float | None = None) -> None:
        self._lock.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def wake(self, key: int) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # woken already

    def post(self, segment: int, unit: int) -> bool:
        self.wake(0)
        return False

    def flush(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class LocalKeyChannel:
    """Both ends of a channel of keys within one process: `deliver` gets them in the worker's thread."""

    eventfd = -1
    keys = None

    def __init__(self, number: int, deliver: Callable[[list[int]], None]) -> None:
        self.number = number
        self._deliver = deliver
        self._posted: list[int] = []

    def post(self, segment: int, unit: int) -> bool:
        self._posted.append(slot_key(segment, unit))
        return True

    def flush(self) -> bool:
        posted, self._posted = self._posted, []
        if posted:
            self._deliver(posted)
        return True

    def wake(self, key: int) -> None:
        self._deliver([key])

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class LocalQueueChannel(LocalKeyChannel):
    """The same, for a thread that waits."""

    def __init__(self, number: int) -> None:
        self._queue: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        super().__init__(number, self._queue.put)

    def read(self, timeout: float | None) -> list[int]:
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return []

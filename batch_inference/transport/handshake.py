"""Control connections: unix sockets that carry small JSON messages and descriptors between the processes of a host.

Packets keep their boundaries (SOCK_SEQPACKET), so there is never half a message. A message is a JSON object with a
"type"; descriptors travel beside it (SCM_RIGHTS). Nothing received here is unpickled.

An unnamed host listens at a random abstract address, which leaves nothing in the file system; whoever binds it is
elected. A named host listens at a path in a directory that only its user can enter, and flock on a file that is never
unlinked elects the one process that may bind it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from batch_inference.errors import TransportError
from batch_inference.transport.scarce import no_descriptor

Message = dict[str, Any]

MAX_MESSAGE = 1 << 16
MAX_TEXT = 1 << 14
"""Most bytes of a message that one text (a traceback, stderr lines) may take; longer ones are cut in the middle."""
MAX_DESCRIPTORS = 64
MAX_QUEUED = 10_000
MAX_WAITING = 4096
"""Processes that may wait to be let in; the machine's own limit may be lower (net.core.somaxconn)."""
CONNECT_TIMEOUT = 30.0
MAX_ADDRESS = 107
"""Bytes of a unix socket's path."""
_PEER = struct.Struct("iII")


class ConnectionLostError(Exception):
    """The peer closed the connection, or broke its rules."""


class Connection:
    """One end of a control connection. `send` never blocks: what the socket does not take waits for `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.unsent: deque[tuple[bytes, list[int]]] = deque()
        """Messages that wait for `flush`."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queues or sends a message with duplicates of `fds`; the caller keeps its own."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a control message of {len(data)} bytes is longer than {MAX_MESSAGE}")
        if not self.unsent and self._try(data, fds):
            return
        if len(self.unsent) >= MAX_QUEUED:
            raise ConnectionLostError(f"the peer left {MAX_QUEUED} messages unread")
        duplicates: list[int] = []
        try:
            for fd in fds:
                duplicates.append(os.dup(fd))
        except OSError:
            close_all(duplicates)
            raise
        self.unsent.append((data, duplicates))

    def flush(self) -> None:
        """Sends what the socket takes now."""
        while self.unsent and self._try(*self.unsent[0]):
            for fd in self.unsent.popleft()[1]:
                os.close(fd)

    def flush_until(self, deadline: float) -> None:
        """Sends what waits, until `deadline` (CLOCK_MONOTONIC) at most; what cannot be sent any more is let go."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        with contextlib.suppress(ConnectionLostError):
            self.flush()
            while self.unsent and poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                self.flush()

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors, or None when there is none now; ConnectionLostError at the end."""
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        try:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                # The peer left unread what we said; the kernel says so once, before it hands out the peer's last words.
                data, ancillary, flags, _ = self._sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        try:
            if not data:
                raise ConnectionLostError("closed by the peer")
            if flags & socket.MSG_CTRUNC and len(fds) < MAX_DESCRIPTORS:
                raise ConnectionLostError(f"a message was cut short: {no_descriptor('who was to receive it')}")
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise ConnectionLostError("a message was cut short: it brought more than it may")
            message = json.loads(data)
            if not isinstance(message, dict) or not isinstance(message.get("type"), str):
                raise ConnectionLostError("a message that is not an object with a type")
        except (ConnectionLostError, RecursionError, ValueError) as error:
            close_all(fds)
            raise error if isinstance(error, ConnectionLostError) else ConnectionLostError(str(error)) from error
        return message, list(fds)

    def close(self) -> None:
        while self.unsent:
            close_all(self.unsent.popleft()[1])
        self._sock.close()

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)  # SIGPIPE may end an application
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
                return False
            raise ConnectionLostError(str(error)) from error
        return True


def close_all(fds: Sequence[int] | array.array[int]) -> None:
    for fd in fds:
        os.close(fd)


def readable(fd: int, timeout: float) -> bool:
    """Whether `fd` has something to read, or is the pidfd of a dead process, within `timeout` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1e3))


def shorten(text: str, most: int = MAX_TEXT) -> str:
    """`text`, its middle left out where it would take more than `most` bytes of a message: up to 12 for a character."""
    shortened, kept = text, len(text)
    while (size := len(json.dumps(shortened))) > most:
        kept = min(kept - 100, kept * most // size)
        head = max(0, kept // 2)
        shortened = f"{text[:head]}\n[... {len(text) - 2 * head} characters left out ...]\n{text[len(text) - head :]}"
    return shortened


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of whoever made the other end."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def random_address() -> str:
    return f"\0batch_inference/{os.getuid()}/{os.urandom(16).hex()}"


def named_address(name: str) -> str:
    """Where the host `name` of this user listens. TransportError if the directory cannot be used."""
    address = os.path.join(runtime_directory(), f"{name}.sock")
    if len(os.fsencode(address)) > MAX_ADDRESS:
        raise TransportError(
            f"{address} is longer than the {MAX_ADDRESS} bytes that a unix socket's path may have: choose a shorter "
            "name, or a shorter XDG_RUNTIME_DIR (or TMPDIR)"
        )
    return address


def connect_or_listen(address: str, deadline: float) -> tuple[socket.socket, bool]:
    """A socket connected to whoever serves `address`, or, nobody doing so, one that is bound and listens there.

    Returns the socket and whether it listens. TransportError when `deadline` (CLOCK_MONOTONIC) passes first.
    """
    while True:
        sock = connect(address)
        if sock is not None:
            return sock, False
        with _election(address, deadline):
            sock = connect(address)  # somebody may have been quicker
            if sock is not None:
                return sock, False
            if not address.startswith("\0"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address)  # left by a supervisor that was killed
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.bind(address)
                sock.listen(MAX_WAITING)
                return sock, True
            except OSError as error:
                sock.close()
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise TransportError(f"cannot listen at {address!r}: {error}") from error
        time.sleep(0.001)  # an abstract address, bound by another process that does not listen yet


def connect(address: str) -> socket.socket | None:
    """A connection to whoever serves `address`, or None when nobody does.

    TransportError if it is another user, or one who takes nobody for CONNECT_TIMEOUT.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        _connect(sock, address)
        _, uid = peer(sock)
        if uid != os.geteuid():
            raise TransportError(f"{address!r} is served by user {uid}, not by us ({os.geteuid()}): refused")
        return sock
    except (ConnectionRefusedError, FileNotFoundError, ConnectionResetError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, address: str) -> None:
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:  # as many as may wait for it do
            if time.monotonic() > deadline:
                raise TransportError(
                    f"whoever serves {address!r} has not taken anybody for {CONNECT_TIMEOUT:.0f} s: is it stopped?"
                ) from None
            time.sleep(0.005)


def runtime_directory() -> str:
    """Where this user's named hosts listen: a directory of mode 0700 that the user owns, made if it is not there."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.geteuid():
        path = os.path.join(base, "batch_inference")
    else:
        import tempfile  # brings much along that the supervisor does not need

        path = os.path.join(tempfile.gettempdir(), f"batch_inference-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise TransportError(
            f"{path} must be a directory of user {os.geteuid()} with mode 0700, it is "
            f"{stat.filemode(status.st_mode)} of "
            f"user {status.st_uid}: somebody else may have made it; remove it, or set XDG_RUNTIME_DIR"
        )
    return path


@contextlib.contextmanager
def _election(address: str, deadline: float) -> Iterator[None]:
    """Holds the lock under which a path may be bound; binding an abstract address is an election by itself.

    The kernel lets go of the lock when its holder dies; one that is stopped meanwhile costs us no more than `deadline`.
    """
    if address.startswith("\0"):
        yield
        return
    import fcntl

    fd = os.open(f"{address}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransportError(
                        f"another process has held {address}.lock for too long: is it stopped?"
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def unlink(address: str) -> None:
    """Removes the path of a listener that ends; nothing for an abstract address."""
    with contextlib.suppress(OSError, TransportError), _election(address, time.monotonic() + 1.0):
        os.unlink(address)

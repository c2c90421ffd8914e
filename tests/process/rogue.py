"""A client of a host that keeps to none of the rules, and the rubbish it sends. All of it is determined by a seed."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import pickle
import random
import socket
import time
from typing import Any

import numpy as np

from batch_inference.transport import codec, handshake, segment
from batch_inference.transport.wire import (
    DESCRIPTOR,
    HEADER_SIZE,
    SENT,
    UNIT,
    VERSION,
)

VOCABULARY = ["hello", "segment", "channels", "bye", "welcome", "ready", "gone", "failed", "reply", "quit", "log", "x"]
NUMBERS = [
    0,
    1,
    -1,
    2,
    63,
    64,
    65,
    255,
    1 << 15,
    (1 << 16) - 1,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
]


class Touches:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


class Rubbish:
    """What a rogue may send: packets, values, descriptors of files."""

    def __init__(self, seed: int, mark: str) -> None:
        self.random = random.Random(seed)
        self.pickled = [pickle.dumps(Touches(mark), protocol) for protocol in range(6)]

    def bytes(self, most: int = 200) -> bytes:
        return self.random.randbytes(self.random.randrange(1, most))

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON can say."""
        choose = self.random.choice
        kind = self.random.randrange(8 if depth < 3 else 5)
        if kind == 0:
            return choose(NUMBERS) * choose([1, 1, 1, -1, 10**30])
        if kind == 1:
            return choose(["", "thread", "keys", "hello", "\ud800", "\0", "é" * 300, "../../x", "__import__('os')"])
        if kind == 2:
            return choose([None, True, False, 0.5, float("nan"), float("inf"), 1e308])
        if kind < 5:
            return choose(["thread", "keys", VERSION, {}, []])
        if kind < 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return {str(self.value(4)): self.value(depth + 1) for _ in range(self.random.randrange(4))}

    def message(self, kinds: list[str] = VOCABULARY) -> dict[str, Any]:
        """A message whose type is known, or nearly, with fields that may be anything."""
        message: dict[str, Any] = {"type": self.random.choice(kinds) if self.random.random() < 0.95 else self.value()}
        for name in ("version", "description", "again", "kind", "client", "number", "first", "gen", "status", "size"):
            if self.random.random() < 0.3:
                message[name] = self.value()
        if self.random.random() < 0.5:
            message["version"] = VERSION
        if self.random.random() < 0.5:
            message["kind"] = self.random.choice(["thread", "keys"])
        return message

    def packet(self) -> bytes:
        """Some bytes, most often close to a message."""
        kind = self.random.randrange(8)
        if kind == 0:
            return self.bytes()
        if kind == 1:
            return self.random.choice(self.pickled)
        if kind == 2:
            opening = self.random.choice([b"[", b'{"type":', b'{"":[', b"-"])
            return opening * self.random.choice([1, 100, 60_000 // len(opening)])
        data = json.dumps(self.message()).encode()
        if kind == 3:  # half a message
            return data[: self.random.randrange(len(data)) or 1]
        if kind == 4:
            at = self.random.randrange(len(data))
            return data[:at] + self.bytes(4) + data[at + 1 :]
        if kind == 5:
            return json.dumps({"type": "hello", "version": VERSION, "x": "y" * self.random.randrange(60_000)}).encode()
        return data

    def fd(self) -> int:
        """A descriptor of something; rarely of what it should be."""
        kind = self.random.randrange(12)
        if kind == 0:
            return os.open(os.devnull, os.O_RDWR)
        if kind == 1:
            return os.open("/", self.random.choice([os.O_RDONLY, os.O_PATH]) | os.O_CLOEXEC)
        if kind == 2:
            return socket.socket(socket.AF_UNIX).detach()
        if kind == 3:
            return os.eventfd(self.random.choice([0, 1, 1 << 20]), os.EFD_NONBLOCK)
        if kind == 4:
            return os.open("/proc/self/stat", os.O_RDONLY)
        if kind == 5:
            reading, writing = os.pipe()
            keep, drop = self.random.sample([reading, writing], 2)
            os.close(drop)
            return keep
        if kind == 6:
            return os.pidfd_open(os.getpid())
        if kind == 7:
            return os.timerfd_create(time.CLOCK_MONOTONIC) if hasattr(os, "timerfd_create") else os.eventfd(0)
        return self.memory()

    def memory(self) -> int:
        """A memfd, of some size, sealed in some way, opened in some way."""
        fd = os.memfd_create("rogue", os.MFD_CLOEXEC | self.random.choice([os.MFD_ALLOW_SEALING] * 3 + [0]))
        with contextlib.suppress(OSError):
            os.ftruncate(fd, self.random.choice([0, 1, 7, 63, 64, 100, 4096, 4097, 1 << 20, 1 << 45, (1 << 63) - 1]))
        shrink, grow, write, seal = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL
        with contextlib.suppress(OSError):
            seals = self.random.choice([0, shrink, shrink | grow, shrink | grow | seal, grow, shrink | write, write])
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        if self.random.random() < 0.2:
            opened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            os.close(fd)
            return opened
        return fd


class Rogue:
    """A connection to the supervisor at `address`, as a client that may have been welcomed."""

    def __init__(self, address: str, again: bool = True) -> None:
        deadline = time.monotonic() + 20
        while (sock := handshake.connect(address)) is None:
            assert time.monotonic() < deadline, "the supervisor has gone"
        self.sock = sock
        self.sock.settimeout(20)
        self.fds: list[int] = []
        self.number = 0

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        """Sends a packet and closes `fds`; False when the supervisor has dropped us."""
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self.sock.sendmsg([data], ancillary)
            return True
        except OSError:
            return False
        finally:
            handshake.close_all(fds or [])

    def join(self) -> None:
        """Is welcomed, and waits for the worker's request pipe."""
        self.send(json.dumps({"type": "hello", "version": VERSION, "again": True}).encode())
        message, _ = self._receive()
        assert message["type"] == "welcome", message
        self.number = message["client"]
        message, fds = self._receive()
        assert message["type"] == "ready", message
        self.pipe = os.open(f"/proc/self/fd/{fds[0]}", os.O_WRONLY | os.O_CLOEXEC)
        self.fds.append(self.pipe)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, ancillary, _, _ = self.sock.recvmsg(handshake.MAX_MESSAGE, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        self.fds += fds
        return json.loads(data), list(fds)

    def is_dropped(self) -> bool:
        """Says no more, and waits until the supervisor has read all of it and closed the connection."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(handshake.MAX_MESSAGE):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()
        handshake.close_all(self.fds)
        self.fds.clear()


class Intruder(Rogue):
    """A client that has been welcomed, with a segment and channels as they should be, and writes nonsense."""

    SIZE = 1 << 16

    def __init__(self, address: str, rubbish: Rubbish) -> None:
        super().__init__(address)
        self.join()
        self.rubbish = rubbish
        self.segment = segment.create(self.SIZE)
        self.send(json.dumps({"type": "segment"}).encode(), [os.dup(self.segment.fd)])
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC)
        self.fds.append(self.eventfd)
        self.send(json.dumps({"type": "channels", "kind": "thread"}).encode(), [os.dup(self.eventfd)])
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.fds += [reading, writing]
        self.send(json.dumps({"type": "channels", "kind": "keys"}).encode(), [os.dup(writing)])

    def close(self) -> None:
        self.segment.close()
        super().close()

    def write_slot(self, unit: int, gen: int) -> None:
        """A header and a request, none of which need be true."""
        source = self.rubbish.random
        values = [np.ones((2, 3)), "text", {"a": [np.zeros(3), 1]}, (np.ones(1), np.ones((1, 2), np.int64))]
        encoded = codec.encode((source.choice(values),))
        data = bytearray(len(encoded))
        codec.write(encoded, data, 0)
        for _ in range(source.choice([0, 0, 1, 3, 30])):
            data[source.randrange(len(data))] = source.randrange(256)
        length = len(data) if source.random() < 0.7 else abs(source.choice(NUMBERS))
        room = 1024 if source.random() < 0.7 else abs(source.choice(NUMBERS))
        given_up, tries = source.choice([0, 0, gen, (1 << 32) - 1]), abs(source.choice(NUMBERS))
        start = unit * UNIT
        SENT.pack_into(self.segment.memory, start, gen, given_up, length, tries, room)
        end = min(self.SIZE, start + HEADER_SIZE + len(data))
        self.segment.memory[start + HEADER_SIZE : end] = bytes(data[: end - start - HEADER_SIZE])

    def descriptor(self) -> bytes:
        source, now = self.rubbish.random, time.monotonic_ns()
        unit, gen = source.randrange(self.SIZE // UNIT), source.randrange(1, 1 << 32)
        self.write_slot(unit, gen)
        fields = [self.number, source.randrange(2), 0, unit, gen, now, source.choice([0, 0, now + 10**9])]
        bits = [32, 16, 16, 32, 32, 63, 63]
        for _ in range(source.choice([0, 0, 1, 2])):
            field = source.randrange(len(fields))
            number = source.choice([*NUMBERS, (1 << bits[field]) - 1, source.randrange(1 << bits[field])])
            fields[field] = -number if field > 4 and source.random() < 0.3 else abs(number) % (1 << bits[field])
        return DESCRIPTOR.pack(*fields)

    def write(self, data: bytes) -> None:
        os.write(self.pipe, data)

    def burst(self) -> int:
        """Sends some descriptors, at times cut short or with something in between; how many."""
        source = self.rubbish.random
        descriptors = [self.descriptor() for _ in range(source.randrange(1, 8))]
        parts = list(descriptors)
        if source.random() < 0.2:
            parts.insert(source.randrange(len(parts) + 1), self.rubbish.bytes(60))
        if source.random() < 0.1:
            parts[-1] = parts[-1][: source.randrange(1, len(parts[-1]) + 1)]
        self.write(b"".join(parts))
        return len(descriptors)

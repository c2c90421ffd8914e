"""The other processes of a host as its supervisor sees them: clients and workers."""

from __future__ import annotations

import socket
import subprocess
from collections import deque

from batch_inference.transport.handshake import Connection
from batch_inference.watching import Pulse

TAIL_LINES = 20


class Client:
    """A process that uses the host, as the supervisor sees it."""

    def __init__(self, connection: Connection, pid: int, pidfd: int) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = pidfd
        self.number = 0  # given with the welcome, never used again for another client
        self.row = -1
        self.segments: list[int] = []
        self.channels: list[tuple[str, int]] = []


class Worker:
    """A place for a worker process, and the incarnation that fills it at present."""

    def __init__(self, index: int, place: int, config: int) -> None:
        self.index = index  # of its row on the board and of its cells; its successor after a reload has another
        self.place = place  # which of the host's workers it is: its device goes by that
        self.config = config  # descriptor of the payload that it is made from; not its own
        self.succeeds = False  # it loads a new model and serves nobody before the others that do are ready as well
        self.retires = False  # a successor has taken its place: it answers what it has
        self.listeners: set[int] = set()  # then, the numbers of clients that may still send it requests
        self.asked = False  # then, whether it was asked to end
        self.incarnation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.pidfd = self.pipe = self.output = -1
        self.log: socket.socket | None = None
        self.ready = False
        self.was_ready = False  # in this incarnation or an earlier one
        self.pulse = Pulse(0.0)
        self.pinged = False  # in the present silence
        self.killed: str | None = None  # why we killed it, where we did
        self.batches_at_start = 0
        self.failures = 0  # deaths since the last served batch
        self.failure: str | None = None  # traceback of a load that failed
        self.unstarted: str | None = None  # why there is no process, where one could not be started
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def __str__(self) -> str:
        return f"worker {self.index}" + (f" (process {self.process.pid})" if self.process else "")

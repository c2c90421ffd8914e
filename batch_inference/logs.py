"""Log records of the worker, delivered to the application's own handlers.

In the worker a handler on the root logger writes each record, as one datagram, to a socket that ends in the supervisor,
which passes it on to the oldest client. A datagram is written whole or not at all and by no lock between processes, so
processes that a model forks write to the same socket, and one that is killed in the middle of it wedges nobody.

In the client a thread of its own hands the records to `logging`, so that a slow handler holds up nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import socket
import struct
import sys
import threading
from typing import Any

from batch_inference.transport.handshake import shorten

PATIENCE = 1  # seconds that a record waits for its reader
_SKIPPED = ("args", "exc_info", "msg")


class DatagramHandler(logging.Handler):
    """Sends records through a datagram socket, as JSON; drops one rather than wait for long or raise.

    The kernel holds ten of them or so. A burst waits for its reader; while nobody reads, only its first record waits.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", PATIENCE, 0))
        self._socket = sock
        self._flags = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.send(pack_record(record), self._flags)
            self._flags = 0
        except BlockingIOError:
            self._flags = socket.MSG_DONTWAIT
        except Exception:
            self.handleError(record)


def pack_record(record: logging.LogRecord) -> bytes:
    """A record as JSON: its message formatted, its traceback as text, of its other attributes what JSON can hold."""
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    content = {key: value for key, value in record.__dict__.items() if key not in _SKIPPED}
    content["msg"] = shorten(record.getMessage())
    if record.exc_text:
        content["exc_text"] = shorten(record.exc_text)
    return json.dumps(content, default=repr).encode()


def install(sock: socket.socket, levels: dict[str, int]) -> None:
    """Makes the worker's records go to `sock`, at the levels the application has set."""
    root = logging.getLogger()
    root.addHandler(DatagramHandler(sock))
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


class Relay:
    """The application's side: delivers records and output of the workers in a thread that starts with the first."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, message: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="batch_inference-logs", daemon=True)
            self._thread.start()
        self._queue.put(message)

    def close(self) -> None:
        """Delivers what is there and ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            if message["type"] == "output":
                write_output(message["text"].encode())
            else:
                deliver(message["record"])


def deliver(content: dict[str, Any]) -> None:
    """Hands one record to the logger of its name, as if it had been made here."""
    record = logging.makeLogRecord(content)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        try:
            logger.handle(record)
        except Exception:  # a handler of the application's that raises concerns this record only
            logging.Handler().handleError(record)


def write_output(data: bytes) -> None:
    """Copies what a worker printed to our standard error; drops it where nobody reads that."""
    if sys.__stderr__ is None:  # closed before we began: descriptor 2 may be anything now
        return
    for start in range(0, len(data), 4096):  # a pipe that select calls writable takes this much without blocking
        try:
            if select.select([], [2], [], 1.0)[1]:
                os.write(2, data[start : start + 4096])
        except (OSError, ValueError):
            return

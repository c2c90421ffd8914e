"""Main of the worker process, and the loop that it runs: take -> collate -> run -> scatter.

    take      reads the descriptors that wait, decodes each request in its caller's slot, and queues it with its kind
    collate   cuts a batch from the kind whose head is oldest, and merges it: rows are copied into a batch buffer here
    run       calls the model's predict_batch
    scatter   splits the outputs and writes each reply into its caller's own slot

One thread does all of it, in turn: with more, they take each other's interpreter lock. The loop knows nothing of processes: it is
the same in a thread of the application, where its inbox is another.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Hashable, MutableSequence
from typing import Any

from batch_inference import logs, payload
from batch_inference import statistics as board
from batch_inference.batcher.batcher import Batcher
from batch_inference.batcher.multi_batcher import MultiBatcher
from batch_inference.errors import BatcherError
from batch_inference.options import WORKER_VARIABLE
from batch_inference.transport import codec, handshake, segment
from batch_inference.transport.handshake import Connection
from batch_inference.transport.inbox import Inbox, Incoming, RemoteInbox, lowest
from batch_inference.transport.wire import ERROR


class Request:
    """A request that waits in the worker, or a part of one that was split."""

    __slots__ = ("incoming", "args", "size", "kind")

    def __init__(self, incoming: Incoming, args: tuple[Any, ...], size: int, kind: Hashable) -> None:
        self.incoming = incoming
        self.args = args
        self.size = size
        self.kind = kind

    def reply(self, response: Any) -> None:
        self.incoming.reply(codec.encode(response))

    def fail(self, encoded_error: Any) -> None:
        self.incoming.reply(encoded_error, ERROR)


class Part(Request):
    """One of the requests that a request larger than a batch was split into."""

    __slots__ = ("whole", "index")

    def __init__(self, whole: Whole, index: int, args: tuple[Any, ...], size: int, kind: Hashable) -> None:
        super().__init__(whole.incoming, args, size, kind)
        self.whole = whole
        self.index = index

    def reply(self, response: Any) -> None:
        self.whole.settle(self.index, response)

    def fail(self, encoded_error: Any) -> None:
        self.whole.fail(encoded_error)


class Whole:
    """A request that was split: answered when its last part is, failed when its first part fails."""

    def __init__(self, incoming: Incoming, batcher: Batcher, parts: int) -> None:
        self.incoming = incoming
        self.over = False
        self._batcher = batcher
        self._responses: list[Any] = [None] * parts
        self._missing = parts

    def settle(self, index: int, response: Any) -> None:
        if self.over:
            return
        # Written out now, as what the model returned may be its own memory, to be used again in the next batch.
        encoded = codec.encode(response)
        memory = bytearray(encoded.size)
        encoded.write(memory, 0)
        self._responses[index] = codec.decode(memory, 0, len(memory), lend=True)
        self._missing -= 1
        if not self._missing:
            self.incoming.reply(codec.encode(self._batcher.join(self._responses)))
            self.over = True

    def fail(self, encoded_error: Any) -> None:
        if not self.over:
            self.over = True
            self.incoming.reply(encoded_error, ERROR)


class Worker:
    """Runs a model over the requests of an inbox, and counts on its row of the board."""

    def __init__(
        self, model: Any, batcher: Batcher, max_batch_size: int, inbox: Inbox, cells: MutableSequence[int], row: int
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._max_batch_size = max_batch_size
        self._inbox = inbox
        self._cells = cells
        self._row = row
        self._queues: dict[Hashable, deque[Request]] = {}

    def run(self) -> None:
        """Serves until the inbox says quit and nothing waits."""
        while True:
            self._take(0.0 if self._queues else None)
            if self._queues:
                self._serve(self._cut(time.monotonic_ns()))
            elif self._inbox.quitting:
                return

    # --- take -----------------------------------------------------------------------------------------------------

    def _take(self, timeout: float | None) -> None:
        for incoming in self._inbox.receive(timeout):
            try:
                args = incoming.decode(self._batcher.borrows)
                size, kind = self._batcher.size(args), self._batcher.kind(args)
                if size > self._max_batch_size:
                    self._queue_parts(incoming, args)
                else:
                    self._queue(Request(incoming, args, size, kind))
            except Exception as error:
                incoming.fail(error)
                self._count_failed(1)
        self._inbox.flush()

    def _queue_parts(self, incoming: Incoming, args: tuple[Any, ...]) -> None:
        parts = self._batcher.split(args, self._max_batch_size)
        whole = Whole(incoming, self._batcher, len(parts))
        for index, part in enumerate(parts):
            self._queue(Part(whole, index, part, self._batcher.size(part), self._batcher.kind(part)))

    def _queue(self, request: Request) -> None:
        queue = self._queues.get(request.kind)
        if queue is None:
            queue = self._queues[request.kind] = deque()
        queue.append(request)

    # --- collate --------------------------------------------------------------------------------------------------

    def _cut(self, now: int) -> list[Request]:
        """The next batch: of the kind whose head is oldest, in order of arrival, without those nobody waits for."""
        kind = next(iter(self._queues))
        if len(self._queues) > 1:
            kind = min(self._queues, key=lambda kind: self._queues[kind][0].incoming.arrived)
        queue, batch, size = self._queues[kind], [], 0
        while queue:
            request = queue[0]
            if request.incoming.unwanted(now):
                queue.popleft()
                request.incoming.drop()
                continue
            size += request.size
            if batch and size > self._max_batch_size:
                break
            batch.append(queue.popleft())
        if not queue:
            del self._queues[kind]
        return batch

    # --- run and scatter ------------------------------------------------------------------------------------------

    def _serve(self, batch: list[Request]) -> None:
        if batch:
            started = time.monotonic_ns()
            waiting = self._row + board.WAITING
            for request in batch:
                request.incoming.start()
                self._cells[waiting + board.bucket(started - request.incoming.arrived)] += 1
            self._run(batch, started)
        self._inbox.flush()

    def _run(self, batch: list[Request], started: int) -> None:
        try:
            batched, context = self._batcher.batch([request.args for request in batch])
        except Exception as error:
            self._isolate(batch, error)
            return
        try:
            outputs = self._call(batched)
        except Exception as error:
            self._fail(batch, error)
            return
        del batched
        try:
            responses = self._batcher.unbatch(outputs, context)
            if len(responses) != len(batch):
                raise BatcherError(
                    f"{type(self._batcher).__name__}.unbatch gave {len(responses)} responses for {len(batch)} requests: it "
                    "must give one per request, in their order"
                )
        except BatcherError as error:
            self._fail(batch, BatcherError(f"{type(self._model).__name__}.predict_batch: {error}"))
            return
        except Exception as error:
            self._isolate(batch, error)
            return
        self._count_batch(batch, time.monotonic_ns() - started)
        self._scatter(batch, responses)

    def _call(self, batched: Any) -> Any:
        predict_batch = self._model.predict_batch
        if isinstance(self._batcher, MultiBatcher):
            return [predict_batch(*part) if type(part) is tuple else predict_batch(part) for part in batched]
        return predict_batch(*batched) if type(batched) is tuple else predict_batch(batched)

    def _scatter(self, batch: list[Request], responses: list[Any]) -> None:
        for request, response in zip(batch, responses):
            try:
                request.reply(response)
            except Exception as error:
                request.fail(codec.encode_error(error))
                self._count_failed(1, answered=0)

    def _isolate(self, batch: list[Request], error: Exception) -> None:
        """A hook raised: each request is tried alone, so that only the culprit fails."""
        if len(batch) == 1:
            self._fail(batch, error)
            return
        for request in batch:
            self._run([request], time.monotonic_ns())

    def _fail(self, batch: list[Request], error: Exception) -> None:
        encoded = codec.encode_error(error)
        for request in batch:
            request.fail(encoded)
        self._count_failed(len(batch))

    # --- counting -------------------------------------------------------------------------------------------------

    def _count_batch(self, batch: list[Request], nanoseconds: int) -> None:
        cells, row = self._cells, self._row
        cells[row + board.BATCHES] += 1
        cells[row + board.REQUESTS] += len(batch)
        cells[row + board.SIZE] += sum([request.size for request in batch])
        cells[row + board.RUNNING + board.bucket(nanoseconds)] += len(batch)

    def _count_failed(self, requests: int, answered: int | None = None) -> None:
        self._cells[self._row + board.FAILED] += requests
        self._cells[self._row + board.REQUESTS] += requests if answered is None else answered


def main(index: int, supervisor: int, config: int, control: int, pipe: int, log: int, board_fd: int) -> None:
    """Runs worker number `index` on descriptors that its supervisor passed on."""
    _die_with(supervisor)
    os.environ[WORKER_VARIABLE] = str(os.getpid())
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pipe, connection = lowest(pipe), Connection(socket.socket(fileno=lowest(control)))
    os.set_blocking(pipe, False)
    for fd in (config, log, board_fd):
        os.set_inheritable(fd, False)
    logs.install(socket.socket(fileno=log), payload.read_settings(config)["levels"])
    try:
        recipe = payload.load(config)
        model = recipe.build()
    except Exception:
        connection.send({"type": "failed", "traceback": handshake.shorten(traceback.format_exc())})
        sys.exit(1)
    cells = segment.attach(board_fd)
    inbox = RemoteInbox(pipe, connection)
    connection.send({"type": "ready"})
    Worker(model, recipe.batcher, recipe.max_batch_size, inbox, cells.quads, board.worker_row(index)).run()
    payload.close_model(model)


def _die_with(supervisor: int) -> None:
    """Asks the kernel to kill us when the supervisor ends, however that happens and whatever we are doing then."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it was quicker than we
        os._exit(1)

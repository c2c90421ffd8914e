"""Main of the worker process, and the loop that it runs: take -> collate -> run -> scatter.

    take      reads the descriptors that wait, decodes each request in its caller's slot, and queues it with its kind
    collate   cuts a batch when the policy says so, and merges it: rows are copied into a batch buffer here
    run       calls the model's predict_batch
    scatter   splits the outputs and writes each reply into its caller's own slot

One thread does all of it, in turn: with more, they take each other's interpreter lock. The loop knows nothing of
processes: it is the same in a thread of the application, where its inbox is another.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

from batch_inference import logs, payload, processes
from batch_inference import statistics as board
from batch_inference.batcher.batcher import Batcher, model_arguments
from batch_inference.batcher.multi_batcher import MultiBatcher
from batch_inference.errors import BatcherError
from batch_inference.isolation import Hope, culprits
from batch_inference.options import WORKER_VARIABLE
from batch_inference.transport import codec, handshake, segment
from batch_inference.transport.handshake import Connection
from batch_inference.transport.inbox import Inbox, RemoteInbox, lowest
from batch_inference.waiting import Intake, Request, Waiting, own_copy, summary


class WrongOutputError(Exception):
    """The model returned something that cannot be divided among the requests: no single request is to blame."""

    def __init__(self, error: BatcherError) -> None:
        super().__init__(error)
        self.error = error  # what callers get


DEADLINE_MARGIN = 0.005  # seconds, beside two usual runs, that a request is given before its deadline
WAITS_TIMED = 4  # about so many waits of a batch go into the histogram, each for as many as it stands for


class Worker:
    """Runs a model over the requests of an inbox, and counts on its row of the board."""

    def __init__(self, model: Any, recipe: payload.Recipe, inbox: Inbox, cells: memoryview[int], row: int) -> None:
        self._model = model
        self._batcher = recipe.batcher
        self._policy = recipe.policy
        self._inbox = inbox
        self._cells = cells
        self._row = row
        self._isolates = recipe.isolate_errors
        self._hope = Hope()
        self._pads = type(recipe.batcher).padding is not Batcher.padding
        self._intake = Intake(recipe.batcher)
        self._waiting = Waiting()
        self._overshoot = 0.0  # seconds by which a short wait lasts longer than asked
        self._usual_run = 0.0  # seconds that a batch takes

    def run(self) -> None:
        """Serves until the inbox says quit and nothing waits."""
        pause: float | None = None
        while self._waiting or not self._inbox.quitting:
            self._take(pause)
            if not self._waiting:
                pause = None
                continue
            queue = self._waiting.oldest()
            limit = self._cells[board.MAX_BATCH_SIZE]
            pause = self._pause(queue, limit)
            if pause <= 0:
                self._serve(self._waiting.cut(queue, limit, time.monotonic_ns()))
                pause = 0.0

    def _take(self, pause: float | None) -> None:
        """Queues what has arrived, after waiting up to `pause` seconds for it."""
        asked = time.monotonic() if pause else 0.0
        arrived = self._inbox.receive(pause and max(0.0, pause - self._overshoot))
        if pause and not arrived:
            self._overshoot += 0.1 * (time.monotonic() - asked - max(0.0, pause - self._overshoot) - self._overshoot)
        limit = self._cells[board.MAX_BATCH_SIZE]
        for incoming in arrived:
            try:
                for request in self._intake.requests(incoming, limit):
                    self._waiting.add(request)
                    self._policy.arrived(incoming.arrived / 1e9, request.size)
            except Exception as error:
                self._count_failed(1, answered=1)
                incoming.fail(error)
        self._inbox.flush()

    def _pause(self, queue: deque[Request], limit: int) -> float:
        """How long to wait for more requests before `queue` is cut; 0 or less, and counted why, to cut it now."""
        summed = summary(queue, limit)
        if summed is None:
            wait, why = 0.0, board.CUT_FULL
        elif self._waiting.kinds > 1:  # the model has other work: holding it back for this kind would cost the others
            wait, why = 0.0, board.CUT_KIND
        else:
            now = time.monotonic()
            wait, why = self._policy.wait(summed, now), board.CUT_NOTHING
            if wait > 0 and (max_delay := board.max_delay_of(self._cells)) is not None:
                if (left := summed.oldest + max_delay - now) < wait:
                    wait, why = left, board.CUT_MAX_DELAY
            if wait > 0 and summed.deadline is not None:
                if (left := summed.deadline - 2 * self._usual_run - DEADLINE_MARGIN - now) < wait:
                    wait, why = left, board.CUT_DEADLINE
        if wait <= 0:
            self._cells[self._row + why] += 1
        return wait

    # --- collate, run and scatter ---------------------------------------------------------------------------------

    def _serve(self, batch: list[Request]) -> None:
        if not batch:
            self._inbox.flush()
            return
        started = time.monotonic_ns()
        for request in batch:
            request.incoming.start(started)
        stride = 1 + len(batch) // WAITS_TIMED
        for request in batch[::stride]:
            self._cells[self._row + board.WAITING + board.bucket(started - request.incoming.arrived)] += stride
        self._run(batch)
        self._inbox.flush()
        now = time.monotonic()
        took = now - started / 1e9
        self._usual_run += 0.2 * (took - self._usual_run)
        self._policy.ran(sum([request.size for request in batch]), took)
        self._policy.completed(now, len(batch))

    def _run(self, batch: list[Request]) -> None:
        """Runs a batch; when it fails, finds out for whom."""
        error = self._attempt(batch)
        if error is None:
            self._hope.saw(len(batch), 0)
        elif not self._isolates or not self._hope or isinstance(error, WrongOutputError):
            self._hope.saw(len(batch), len(batch))
            self._fail(batch, error)
        else:
            found = culprits(batch, error, self._attempt_again)
            self._hope.saw(len(batch), len(found))
            for request, its_error in found:
                self._fail([request], its_error)

    def _attempt_again(self, batch: Sequence[Request]) -> Exception | None:
        if not self._batcher.borrows:  # the model may have changed what it was given the last time
            for request in batch:
                request.args = request.fresh_args(self._batcher)
        return self._attempt(batch)

    def _attempt(self, batch: Sequence[Request]) -> Exception | None:
        """Collates, runs and scatters; the error, if that fails before anybody has been answered."""
        started = time.monotonic_ns()
        try:
            batched, context = collate(self._batcher, [request.args for request in batch])
            outputs = call_model(self._model, self._batcher, batched)
            del batched
            responses = self._unbatch(outputs, context, len(batch))
        except Exception as error:
            return error
        self._count_batch(batch, time.monotonic_ns() - started, context)
        for request, response in zip(batch, responses):
            try:
                request.reply(response)
            except Exception as error:
                self._count_failed(1)
                request.fail(codec.encode_error(error))
        return None

    def _unbatch(self, outputs: Any, context: Any, requests: int) -> list[Any]:
        try:
            responses = self._batcher.unbatch(outputs, context)
            if not hasattr(responses, "__len__"):
                raise BatcherError(
                    f"{type(self._batcher).__name__}.unbatch must return a list with one response per request, got "
                    f"{type(responses).__name__}"
                )
            if len(responses) != requests:
                raise BatcherError(
                    f"{type(self._batcher).__name__}.unbatch gave {len(responses)} responses for {requests} requests: "
                    "it must give one per request, in their order"
                )
        except BatcherError as error:
            raise WrongOutputError(BatcherError(f"{type(self._model).__name__}.predict_batch: {error}")) from error
        return responses

    def _fail(self, batch: list[Request], error: Exception) -> None:
        encoded = codec.encode_error(error.error if isinstance(error, WrongOutputError) else error)
        answered = sum([request.answers for request in batch])
        self._count_failed(answered, answered)
        for request in batch:
            request.fail(encoded)

    # --- counting: before the reply, so that its caller finds it counted ------------------------------------------

    def _count_batch(self, batch: Sequence[Request], nanoseconds: int, context: Any) -> None:
        cells, row = self._cells, self._row
        cells[row + board.BATCHES] += 1
        cells[row + board.REQUESTS] += sum([request.answers for request in batch])
        cells[row + board.SIZE] += sum([request.size for request in batch])
        cells[row + board.RUNNING + board.bucket(nanoseconds)] += len(batch)
        if self._pads:
            own, padded = self._batcher.padding(context)
            cells[row + board.OWN] += own
            cells[row + board.PADDED] += padded

    def _count_failed(self, requests: int, answered: int = 0) -> None:
        self._cells[self._row + board.FAILED] += requests
        self._cells[self._row + board.REQUESTS] += answered


def collate(batcher: Batcher, requests: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    """What `batcher.batch` makes of the requests."""
    made = batcher.batch(requests)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise BatcherError(
            f"{type(batcher).__name__}.batch must return a pair (batched_request, context), got {type(made).__name__}"
        )
    return made[0], made[1]


def call_model(model: Any, batcher: Batcher, batched: Any) -> Any:
    """What the model returns for what `batcher.batch` made: one call, or one for each of a MultiBatcher's batches."""
    if isinstance(batcher, MultiBatcher):
        return [predict(model, part) for part in batched]
    return predict(model, batched)


def predict(model: Any, batched: Any) -> Any:
    return model.predict_batch(*model_arguments(batched))


def warm_up(model: Any, recipe: payload.Recipe) -> None:
    """Runs each shape that the batcher can make of the sample arguments once, before the first caller needs it."""
    if recipe.warmup is None:
        return
    batches = list(recipe.batcher.warmup_requests(recipe.warmup, recipe.max_batch_size))
    for number, requests in enumerate(batches, 1):
        started = time.monotonic()
        batched, context = collate(recipe.batcher, [own_copy(request) for request in requests])
        recipe.batcher.unbatch(call_model(model, recipe.batcher, batched), context)
        took = time.monotonic() - started
        print(f"batch_inference: warm-up {number} of {len(batches)}, {took:.3f} s", file=sys.stderr, flush=True)


def main(index: int, supervisor: int, config: int, control: int, pipe: int, log: int, board_fd: int) -> None:
    """Runs worker number `index` on descriptors that its supervisor passed on."""
    processes.become_worker(supervisor)
    try:
        serve(index, config, control, pipe, log, board_fd)
    except BaseException as error:
        processes.end(error)


def serve(index: int, config: int, control: int, pipe: int, log: int, board_fd: int) -> None:
    """Builds the model and runs it until the supervisor says quit."""
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
        warm_up(model, recipe)
    except Exception:
        connection.send({"type": "failed", "traceback": handshake.shorten(traceback.format_exc())})
        raise SystemExit(1) from None
    cells = segment.attach(board_fd)
    inbox = RemoteInbox(pipe, connection)
    connection.send({"type": "ready"})
    Worker(model, recipe, inbox, cells.quads, board.worker_row(index)).run()
    payload.close_model(model)

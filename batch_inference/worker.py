"""Main of the worker process, and the loop that it runs: take -> collate -> run -> scatter.

To take is to read the descriptors that wait, decode each request in its caller's slot, and queue it with its kind; a
batch is cut when the policy says so. The rest is in `running`.

One thread does all of it, in turn: with more, they take each other's interpreter lock. The loop knows nothing of
processes: it is the same in a thread of the application, where its inbox is another.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

from batch_inference import board, logs, payload, processes
from batch_inference.awake import LONG, MOMENT, keep_awake
from batch_inference.counting import add, bucket
from batch_inference.options import WORKER_VARIABLE
from batch_inference.policy import LEARNING_INTERVAL, FixedDelay, Policy, Queue, Returning
from batch_inference.running import ENDS, Runner, call_model, collate
from batch_inference.transport import handshake, segment
from batch_inference.transport.handshake import Connection
from batch_inference.transport.inbox import Inbox, RemoteInbox, lowest
from batch_inference.transport.incoming import Incoming
from batch_inference.waiting import ALONE, ONE, Intake, Request, Waiting, arrivals, own_copy, summary

DEADLINE_MARGIN = 0.005  # seconds, beside two usual runs, that a request is given before its deadline
LONGEST_WAIT = 1e6  # seconds; the kernel knows no infinite ones, which a policy may ask for
OURS = (Returning, FixedDelay)  # the policies that are known not to raise


class Worker:
    """Runs a model over the requests of an inbox, and counts on its row of the board."""

    def __init__(self, model: Any, recipe: payload.Recipe, inbox: Inbox, cells: memoryview[int], row: int) -> None:
        given: Any = recipe.policy
        self._policy: Returning | FixedDelay | Guarded = given if type(given) in OURS else Guarded(given)
        self._inbox = inbox
        self._cells = cells
        self._row = row
        self._runner = Runner(model, recipe.batcher, recipe.isolate_errors, cells, row, inbox.flush)
        self._intake = Intake(recipe.batcher)
        self._waiting = Waiting()
        self._limit = 0  # the most that a batch may hold
        self._overshoot = 0.0  # seconds by which a short wait lasts longer than asked
        self._usual_run = 0.0  # seconds that a batch takes
        self._next_learning = 0.0  # when an eager policy is told again what a batch took
        self._turn = 0  # batches so far: which of a batch's requests has its wait timed

    def run(self) -> None:
        """Serves until the inbox says quit and nothing waits."""
        pause: float | None = None
        queues = self._waiting.queues
        while queues or not self._inbox.quitting:
            self._take(pause)
            if not queues:
                pause = None
                continue
            queue = self._waiting.oldest()
            limit = ONE if queue[0].kind is ALONE else self._limit
            pause, why = self._pause(queue, limit)
            if pause <= 0:
                self._serve(queue, limit, why)
                pause = 0.0 if queues else None
            else:
                pause = max(0.0, pause - self._runner.ahead.copy(queue, limit))

    def _take(self, pause: float | None) -> None:
        """Queues what has arrived, after waiting up to `pause` seconds for it, and looks at the limits in force."""
        if pause:
            timeout = min(max(0.0, pause - self._overshoot), LONGEST_WAIT)
            until = time.monotonic() + timeout
            arrived = self._inbox.receive(timeout)
            if not arrived and (late := time.monotonic() - until) > 0:  # else it was woken early
                self._overshoot += 0.1 * (late - self._overshoot)
        else:
            arrived = self._inbox.receive(pause)
        cells, row = self._cells, self._row
        add(cells, row + board.BEATS, 1)
        self._limit = limit = most = cells[board.MAX_BATCH_SIZE]
        if cells[row + board.SIZE_LIMIT]:
            self._limit = limit = self._smaller(most)
        done = 0
        while done < len(arrived):
            start, done = done, self._intake.sort(arrived, done, limit, self._waiting.queues)
            self._tell(arrived[start:done])
            if done < len(arrived):
                self._take_one(arrived[done], limit, most)
                done += 1

    def _take_one(self, incoming: Incoming, limit: int, most: int) -> None:
        """Queues a request that takes more than to look up what is known of its layout."""
        try:
            requests = self._intake.requests(incoming, limit, most)
            self._tell(requests)
            for request in requests:
                self._waiting.add(request)
        except ENDS:
            raise
        except BaseException as error:
            self._runner.count_failed(1, answered=1)
            incoming.fail(error)
            self._inbox.flush()

    def _tell(self, requests: Sequence[Request]) -> None:
        if requests and not self._policy.eager:
            self._policy.arrived_all(*arrivals(requests))

    def _smaller(self, most: int) -> int:
        """`most`, or the size that memory was found to hold, as long as that is less than any max_batch_size since."""
        learned: int = self._cells[self._row + board.SIZE_LIMIT]
        if learned < most:
            return learned
        self._cells[self._row + board.SIZE_LIMIT] = 0
        return most

    def _pause(self, queue: deque[Request], limit: int) -> tuple[float, int]:
        """How long to wait for more requests before `queue` is cut, 0 or less to cut it now; and the reason not to wait
        longer, unless the batch is full (a cell of the board)."""
        if self._policy.eager:
            return 0.0, board.CUT_NOTHING
        summed = summary(queue, limit)
        if summed is None or self._inbox.draining:
            wait, why = 0.0, board.CUT_NOTHING
        elif len(self._waiting.queues) > 1:  # the model has other work: holding it back would cost the other kinds
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
        return wait, why

    def _serve(self, queue: deque[Request], limit: int, why: int) -> None:
        """Cuts a batch from a queue, and runs it. `why` it is cut now, unless it is full."""
        started = time.monotonic_ns()
        batch, size = self._waiting.cut(queue, limit, started)
        if not batch:  # nobody waits for any of them
            self._inbox.flush()
            return
        requests, cells, row = len(batch), self._cells, self._row
        self._turn += 1
        waited = started - batch[self._turn % requests].arrived  # one stands for all, each place in its turn
        why = board.CUT_FULL if queue or size >= limit else why
        add(cells, row + board.WAITING + bucket(waited), requests, row + why, 1, row + board.BEATS, 1)
        keep_awake(LONG)
        self._runner.run(batch)
        self._inbox.flush()
        keep_awake(MOMENT)
        now = time.monotonic()
        took = now - started / 1e9
        self._usual_run += 0.2 * (took - self._usual_run)
        policy = self._policy
        if not policy.eager:
            policy.ran(size, took)
            policy.completed(now, requests)
        elif now >= self._next_learning:
            self._next_learning = now + LEARNING_INTERVAL
            policy.ran(size, took)


class Guarded:
    """A policy of the user's own, until it fails: from then on batches are cut at once, and the log says why."""

    eager = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def arrived_all(self, times: list[float], sizes: list[int]) -> None:
        for sent, size in zip(times, sizes):
            self._ask("arrived", sent, size)

    def ran(self, size: int, seconds: float) -> None:
        self._ask("ran", size, seconds)

    def completed(self, time: float, requests: int) -> None:
        self._ask("completed", time, requests)

    def wait(self, queue: Queue, now: float) -> float:
        return self._ask("wait", queue, now) or 0.0

    def _ask(self, name: str, *args: Any) -> float | None:
        try:
            answer = getattr(self._policy, name)(*args)
            return seconds_of(answer) if name == "wait" else None
        except Exception:
            logging.getLogger("batch_inference").exception(
                "%s.%s of the policy failed: batches are cut at once from now on; mend it and start the host again",
                type(self._policy).__qualname__,
                name,
            )
            self._policy = FixedDelay(0)
            return None


def seconds_of(answer: Any) -> float:
    """The seconds that a policy answers with. ValueError for NaN, which no time that passes is as long as."""
    seconds = float(answer)
    if math.isnan(seconds):
        raise ValueError("wait returned NaN, which is no number of seconds")
    return seconds


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


def main(index: int, config: int, control: int, pipe: int, log: int, board_fd: int) -> None:
    """Runs worker number `index` on descriptors that its supervisor passed on."""
    processes.become_worker()
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
        processes.leave(1)
    cells = segment.attach(board_fd)
    inbox = RemoteInbox(pipe, connection)
    connection.send({"type": "ready"})
    Worker(model, recipe, inbox, cells.quads, board.worker_row(index)).run()
    payload.close_model(model)
    connection.close()

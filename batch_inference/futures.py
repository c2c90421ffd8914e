"""Futures for `submit`: a thread of the client's, started with the first, completes them as their slots are answered.

Callbacks of a future run in that thread, and nothing else waits for it: one that blocks holds up other futures only.
One that would end the thread, as sys.exit() does, is logged.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from batch_inference.client import Client
from batch_inference.transport.slot import Slot


class Submitted(Future[Any]):
    """A future that gives its request up when it is cancelled.

    Its reference is weak, so that an application that keeps it keeps no memory of ours.
    """

    def __init__(self, owner: weakref.ref[Futures], key: int) -> None:
        super().__init__()
        self._owner = owner
        self._key = key

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and (owner := self._owner()) is not None:
            owner.cancelled(self._key)
        return cancelled

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        def call(future: Future[Any]) -> None:
            try:
                fn(future)
            except Exception:
                raise  # Future logs it
            except BaseException as error:
                if not self._completed_here():
                    raise  # to the caller's own code, which cancelled the future or came when it was done
                logging.getLogger("batch_inference").exception(
                    "a callback of a submitted future raised %s, which would have ended the thread that completes all "
                    "futures of the host, so it went no further: to end the application, have the callback tell its "
                    "main thread, by an event or a signal",
                    type(error).__name__,
                )

        super().add_done_callback(call)

    def _completed_here(self) -> bool:
        owner = self._owner()
        return owner is not None and owner.completes_here


class Futures:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.RLock()  # as the client's
        self._waiting: dict[int, tuple[Slot, Future[Any]]] = {}
        self._deadlines: list[tuple[float, int, Slot, Future[Any]]] = []
        self._counter = itertools.count()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._channel = client.link.new_key_channel()
        self._weak = weakref.ref(self)

    def submit(self, args: tuple[Any, ...], timeout: float | None) -> Future[Any]:
        """Sends a request; OverloadedError when there is no memory for it now. Never blocks."""
        deadline = None if timeout is None else time.monotonic() + timeout
        slot = self._client.room.fill(args)
        if slot is None:
            slot = self._client.fill_without_waiting(args)
        future = Submitted(self._weak, slot.key)
        earliest = False
        with self._lock:
            self._waiting[slot.key] = slot, future
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, next(self._counter), slot, future))
                earliest = self._deadlines[0][3] is future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="batch_inference-futures", daemon=True)
                self._thread.start()
        try:
            self._client.send(slot, self._channel, deadline)
        except BaseException:
            if self._take(slot, future):
                self._client.abandon(slot)
            raise
        if earliest:
            self._channel.wake(slot.key)  # the thread sleeps until a later deadline
        return future

    @property
    def completes_here(self) -> bool:
        """Whether this is the thread that completes futures."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        with self._lock:
            self._closing, thread = True, self._thread
        if thread is not None:
            self._channel.wake(0)
            if not self.completes_here:
                thread.join()

    def _run(self) -> None:
        while not (self._closing and not self._waiting):
            timeout = None
            with self._lock:
                while self._deadlines and self._deadlines[0][3].done():
                    heapq.heappop(self._deadlines)
                if self._deadlines:
                    timeout = max(0.0, self._deadlines[0][0] - time.monotonic())
            for key in self._channel.read(timeout):
                self._answered(key)
            self._expire()

    def _answered(self, key: int) -> None:
        waiting = self._waiting.get(key)
        if waiting is None or not waiting[0].done:
            return
        slot, future = waiting
        if not self._take(slot, future):
            return
        if not future.set_running_or_notify_cancel():
            self._client.abandon(slot)
            return
        try:
            result = self._client.collect(slot)
        except BaseException as error:
            future.set_exception(error.with_traceback(None))  # its frames hold the client
        else:
            future.set_result(result)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            with self._lock:
                _, _, slot, future = heapq.heappop(self._deadlines)
            if self._take(slot, future) and future.set_running_or_notify_cancel():
                error = self._client.timed_out(slot)
                self._client.abandon(slot)
                future.set_exception(error)

    def cancelled(self, key: int) -> None:
        """The future of the slot with this key was cancelled, perhaps."""
        waiting = self._waiting.get(key)
        if waiting is not None and waiting[1].cancelled() and self._take(*waiting):
            self._client.abandon(waiting[0])

    def _take(self, slot: Slot, future: Future[Any]) -> bool:
        """Removes a future from those that are waited for; True for the one caller who does."""
        with self._lock:
            waiting = self._waiting.get(slot.key)
            if waiting is None or waiting[1] is not future:
                return False
            del self._waiting[slot.key]
            if self._closing:
                self._channel.wake(0)  # the thread may wait for just this one
            return True

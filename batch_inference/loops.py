"""One event loop's side of a client: `apredict`.

Requests of one turn of the loop leave in few writes: half of what waits as soon as it is there, so that worker and loop
have something to do at the same time. The replies of one batch come back in one read, and their tasks go on within it:
what they send leaves with the last of them. Nothing here blocks the loop: what would (copying a large tensor, mapping
more memory, waiting for memory) is done in a helper thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import get_ident
from typing import Any

from batch_inference.awaited import Awaited, for_future
from batch_inference.client import Client, copy_of
from batch_inference.errors import BatchInferenceError, HostClosedError, RequestTimeoutError
from batch_inference.speedups import in_c
from batch_inference.transport.slot import Slot

LARGE = 1 << 20  # bytes that are copied in a helper thread rather than in the loop
HELPERS = 4
LEAST_PIECE = 4  # requests that are worth a write of their own before the turn of the loop ends


class Loops:
    """The loops of this process that use a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sides: dict[int, LoopSide] = {}
        self._latest: LoopSide | None = None  # of them
        self._fillers = ThreadPoolExecutor(HELPERS, thread_name_prefix="batch_inference-fill")
        # Apart from those, which may all be waiting for the memory that a reply gives back when it is collected.
        self._collectors = ThreadPoolExecutor(HELPERS, thread_name_prefix="batch_inference-collect")
        client.room.unsent = lambda: sum([side.unsent for side in list(self._sides.values())])

    def side(self) -> LoopSide:
        """That of the running loop."""
        side = self._latest
        if side is not None and side.resuming == get_ident():
            return side  # without the system call that get_running_loop makes before Python 3.12
        loop = asyncio.get_running_loop()
        if side is None or side.loop is not loop:
            side = self._sides.get(id(loop))
            if side is None or side.loop is not loop:
                side = self._sides[id(loop)] = self._new_side(loop)
            self._latest = side
        return side

    def close(self) -> None:
        """After the client was closed: what has come for callers is given to them first."""
        for side in list(self._sides.values()):
            side.close()
        self._sides.clear()
        self._latest = None
        self._client.room.unsent = lambda: 0  # and holds us no longer
        self._fillers.shutdown(wait=False)
        self._collectors.shutdown(wait=False)

    def _new_side(self, loop: asyncio.AbstractEventLoop) -> LoopSide:
        for key, side in list(self._sides.items()):
            if side.loop.is_closed():
                self._sides.pop(key).abandon()
        return LoopSide(self._client, loop, self._fillers, self._collectors)


class LoopSide:
    def __init__(
        self,
        client: Client,
        loop: asyncio.AbstractEventLoop,
        fillers: ThreadPoolExecutor,
        collectors: ThreadPoolExecutor,
    ) -> None:
        self.loop = loop
        self._client = client
        self._room = client.room
        self._fillers = fillers
        self._collectors = collectors
        self._waiting: dict[int, Awaited] = {}
        self._outbox: list[tuple[Slot, float | None]] = []  # what was filled and is to be sent, with its deadline
        self.resuming = 0  # or the thread in which tasks go on: what they send leaves when all have
        self.channel = client.link.new_loop_channel(loop, self._answered)

    @property
    def unsent(self) -> int:
        """How many requests are to be sent before the turn of the loop ends."""
        return len(self._outbox)

    def close(self) -> None:
        """From any thread."""
        try:
            self.loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            self.abandon()

    def abandon(self) -> None:
        """After the loop was closed: nobody waits in it, though tasks may have been left in the middle of a request."""
        for key in list(self._waiting):
            self._client.abandon(self._waiting.pop(key).slot)
        self._client.link.retire(self.channel, self.loop)

    def _close(self) -> None:
        self._flush()
        self._answered(list(self._waiting))  # replies whose wake-up the loop has not read yet, and it will not now
        self._client.link.retire(self.channel, self.loop)

    async def predict(self, args: tuple[Any, ...], timeout: float | None, block: bool) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        slot = self._room.fill(args, LARGE)
        if slot is None:
            slot = await self._fill(args, deadline) if block else self._client.fill_without_waiting(args)
        loop, outbox = self.loop, self._outbox
        done = self._waiting[slot.key] = Awaited(loop, slot)
        if not outbox and not self.resuming:
            loop.call_soon(self._flush)
        outbox.append((slot, deadline))
        if len(outbox) >= LEAST_PIECE and 2 * len(outbox) >= len(self._waiting):
            self._flush()  # half of them: the worker takes these while the loop goes on with the others
        timer = None
        if deadline is not None:
            timer = loop.call_later(deadline - time.monotonic(), self._expire, done)
        try:
            reply = await done
        except BaseException:
            if self._forget(done):  # the task was cancelled, or dropped
                self._client.abandon(slot)
            del done  # it may hold the exception, whose traceback holds this frame
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if reply is _TO_BE_COLLECTED:
            self._forget(done)
            return await self._collect_in_helper(slot)
        return reply

    async def _collect_in_helper(self, slot: Slot) -> Any:
        try:
            collecting = self._collectors.submit(self._outcome, slot)
        except RuntimeError:  # the host was stopped meanwhile
            reply, error = self._outcome(slot)
        else:
            collecting.add_done_callback(lambda done: self._client.abandon(slot) if done.cancelled() else None)
            reply, error = await asyncio.wrap_future(collecting)
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame
        return reply

    def _outcome(self, slot: Slot) -> tuple[Any, BaseException | None]:
        """What `collect` returns or raises: not every exception passes through a future as what it is."""
        try:
            return self._client.collect(slot), None
        except BaseException as error:
            return None, for_future(error)

    async def _fill(self, args: tuple[Any, ...], deadline: float | None) -> Slot:
        slot = self._client.fill_at_once(args, LARGE)
        if slot is None:
            slot = await self._fill_in_helper(args, deadline)
            self._room.admitted.discard(slot.key)  # it counts as unsent from here on
        return slot

    async def _fill_in_helper(self, args: tuple[Any, ...], deadline: float | None) -> Slot:
        unwanted = threading.Event()
        try:
            filling = self._fillers.submit(self._client.fill, args, deadline, unwanted)
        except RuntimeError:
            raise HostClosedError("the host was stopped: start() it again to send more requests") from None
        filled = asyncio.wrap_future(filling)
        try:
            if deadline is not None:  # all helpers may be waiting for memory, some without a limit
                await asyncio.wait([filled], timeout=max(0.0, deadline - time.monotonic()))
                if not filled.done():
                    raise self._room.no_room()
            return await filled
        except (asyncio.CancelledError, GeneratorExit, RequestTimeoutError):
            filled.cancel()
            filling.add_done_callback(self._release_filled)  # it may succeed yet
            unwanted.set()  # else the helper would wait on, and the end of the process for the helper
            self._room.tell()
            raise

    def _release_filled(self, filling: Future[Slot]) -> None:
        if not filling.cancelled() and filling.exception() is None:
            self._client.abandon(filling.result())

    def _forget(self, done: Awaited) -> bool:
        """Removes a request from those that wait; True for the one caller who does."""
        slot = done.slot
        if self._waiting.get(slot.key) is not done:
            return False
        del self._waiting[slot.key]
        if self._outbox:  # it may not have been sent yet
            self._outbox[:] = [entry for entry in self._outbox if entry[0] is not slot]
        return True

    def _flush(self) -> None:
        """Sends the requests of this turn of the loop."""
        outbox, self._outbox = self._outbox, []
        if not outbox:
            return
        try:
            self._client.send_all(outbox, self.channel)
        except BatchInferenceError as error:
            for slot, _ in outbox:
                slot.error = copy_of(error)  # without the traceback, which holds the frames of whoever is above
            self.loop.call_soon(self._answered, [slot.key for slot, _ in outbox])  # this may be a task

    def _answered(self, keys: list[int]) -> None:
        """The slots with these keys may be done; their headers say whether they are."""
        ready = take_answered(self._waiting, keys, LARGE, _TO_BE_COLLECTED)
        self._client.leave_all([done.slot for done in ready])
        collect = self._room.collect
        for done in ready:
            done.settle(collect)
        if hasattr(self.loop, "_nest_patched"):  # nest_asyncio: a task may run the loop, and so this, within itself
            for done in ready:
                done.resume_soon()
        else:
            ready.reverse()
            self._resume(ready)

    def _resume(self, ready: list[Awaited]) -> None:
        """Goes on with the tasks of requests that have an outcome, from the last, and sends what they want to send."""
        self.resuming = get_ident()
        try:
            while ready:
                ready.pop().resume()
        except BaseException:  # what ends the loop, for now at least: a task called sys.exit()
            self.loop.call_soon(self._resume, ready)
            raise
        finally:
            self.resuming = 0
            self._flush()

    def _expire(self, done: Awaited) -> None:
        if not done.done() and self._forget(done):
            error = self._client.timed_out(done.slot)
            self._client.abandon(done.slot)
            done.set_exception(error)


@in_c
def take_answered(waiting: dict[int, Awaited], keys: list[int], most: int, large: object) -> list[Awaited]:
    """Removes from `waiting`, and returns, what is answered of the slots with these keys. A reply of more than `most`
    bytes stays, and its result is `large`."""
    ready = []
    for key in keys:
        done = waiting.get(key)
        if done is None or not done.slot.done or done.done():
            continue  # `done`: cancelled, or collected by a helper at this moment, and its task sees to it
        if done.slot.replies_within(most):
            ready.append(waiting.pop(key))
        else:
            done.set_result(large)
    return ready


_TO_BE_COLLECTED = object()  # in place of a reply whose copying would hold up the loop

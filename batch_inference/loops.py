"""One event loop's side of a client: `apredict`.

Requests of one turn of the loop leave in one write, and the replies of one batch come back in one read. Nothing here
blocks the loop: what would (copying a large tensor, mapping more memory, waiting for memory) is done in a helper
thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from batch_inference.client import Client
from batch_inference.errors import BatchInferenceError, HostClosedError
from batch_inference.transport.arena import Slot
from batch_inference.transport.channel import chunks
from batch_inference.transport.wire import DONE_GEN, REPLY_SIZE

LARGE = 1 << 20  # bytes that are copied in a helper thread rather than in the loop
HELPERS = 4


class Loops:
    """The loops of this process that use a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sides: dict[int, LoopSide] = {}
        self._helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix="batch_inference-helper")

    def side(self) -> LoopSide:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        side = self._sides.get(id(loop))
        if side is None or side.loop is not loop:
            side = self._sides[id(loop)] = self._new_side(loop)
        return side

    def close(self) -> None:
        """After the client was closed: what has come for callers is given to them first."""
        for side in list(self._sides.values()):
            side.close()
        self._sides.clear()
        self._helpers.shutdown(wait=False)

    def _new_side(self, loop: asyncio.AbstractEventLoop) -> LoopSide:
        for key, side in list(self._sides.items()):
            if side.loop.is_closed():
                self._client.link.retire(self._sides.pop(key).channel, side.loop)
        return LoopSide(self._client, loop, self._helpers)


class LoopSide:
    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, helpers: ThreadPoolExecutor) -> None:
        self.loop = loop
        self._client = client
        self._helpers = helpers
        self._waiting: dict[int, tuple[Slot, asyncio.Future[None]]] = {}
        self._outbox: list[tuple[Slot, int, float | None]] = []  # with the slot's gen
        self.channel = client.link.new_loop_channel(loop, self._answered)

    def close(self) -> None:
        """From any thread."""
        try:
            self.loop.call_soon_threadsafe(self._close)
        except RuntimeError:  # the loop is closed: nobody waits in it
            self._client.link.retire(self.channel, self.loop)

    def _close(self) -> None:
        self._flush()
        self._answered(list(self._waiting))  # replies whose wake-up the loop has not read yet, and it will not now
        self._client.link.retire(self.channel, self.loop)

    async def predict(self, args: tuple[Any, ...], timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        slot = self._client.fill_at_once(args, LARGE)
        if slot is None:
            slot = await self._fill_in_helper(args, deadline)
        done = self.loop.create_future()
        self._waiting[slot.key] = slot, done
        self._outbox.append((slot, slot.gen, deadline))
        if len(self._outbox) == 1:
            self.loop.call_soon(self._flush)
        timer = None if deadline is None else self.loop.call_later(deadline - time.monotonic(), expire, done)
        try:
            await done
        except BaseException as error:
            self._forget(slot)
            late = self._client.timed_out(slot) if isinstance(error, _Expired) else None
            self._client.abandon(slot)
            if late is not None:
                raise late from None
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if slot.segment.quads[slot.quad + REPLY_SIZE] > LARGE or slot.elsewhere is not None:
            return await self._collect_in_helper(slot)
        return self._client.collect(slot)

    async def _collect_in_helper(self, slot: Slot) -> Any:
        try:
            collecting = self._helpers.submit(self._client.collect, slot)
        except RuntimeError:  # the host was stopped meanwhile
            return self._client.collect(slot)
        collecting.add_done_callback(lambda done: self._client.abandon(slot) if done.cancelled() else None)
        return await asyncio.wrap_future(collecting)

    async def _fill_in_helper(self, args: tuple[Any, ...], deadline: float | None) -> Slot:
        try:
            filling = self._helpers.submit(self._client.fill, args, deadline)
        except RuntimeError:
            raise HostClosedError("the host was stopped: start() it again to send more requests") from None
        try:
            return await asyncio.wrap_future(filling)
        except asyncio.CancelledError:
            filling.add_done_callback(self._release_filled)  # it may succeed yet
            raise

    def _release_filled(self, filling: Future[Slot]) -> None:
        if not filling.cancelled() and filling.exception() is None:
            self._client.abandon(filling.result())

    def _forget(self, slot: Slot) -> None:
        waiting = self._waiting.get(slot.key)
        if waiting is not None and waiting[0] is slot:
            del self._waiting[slot.key]

    def _flush(self) -> None:
        """Sends the requests of this turn of the loop."""
        outbox, self._outbox = self._outbox, []
        by_peer: dict[Any, list[bytes]] = {}
        for slot, gen, deadline in outbox:
            if slot.gen != gen or slot.key not in self._waiting:
                continue  # given up before it was sent
            try:
                peer = self._client.enter(slot, self.channel, deadline)
            except BatchInferenceError as error:
                slot.error = error
                self._answered([slot.key])
                continue
            if peer is not None:
                by_peer.setdefault(peer, []).append(self._client.descriptor(slot))
        for peer, descriptors in by_peer.items():
            for chunk in chunks(descriptors):
                self._client.link.send(peer, chunk)

    def _answered(self, keys: list[int]) -> None:
        """The slots with these keys may be done; their headers say whether they are."""
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is None:
                continue
            slot, done = waiting
            if slot.segment.words[slot.word + DONE_GEN] == slot.gen or slot.error is not None:
                del self._waiting[key]
                if not done.done():
                    done.set_result(None)


class _Expired(Exception):
    pass


def expire(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_exception(_Expired())

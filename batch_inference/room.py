"""Whether one more request of this process may be pending, and where in shared memory it goes.

Two limits hold: `max_pending` over all client processes, and the memory that this one may map. Who finds no room
waits, first come first served, or is told so at once. While anybody waits nobody else takes any room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sized
from typing import Any

from batch_inference import board
from batch_inference.errors import OverloadedError, RequestTimeoutError
from batch_inference.gate import Gate
from batch_inference.ledger import Board
from batch_inference.transport.arena import Arena, order_of
from batch_inference.transport.slot import Slot
from batch_inference.transport.wire import HEADER_SIZE, UNIT

ORDERS_REMEMBERED = 4096
COUNT_INTERVAL = 64  # requests between counts of what other clients have pending
LEAST_REPLY_ROOM = 256
FIRST_REPLY_ROOM = 1 << 16  # at most, before it is known how large replies are
SWEEP_INTERVAL = 0.02  # seconds between looks at what nobody tells a waiter of: given-up slots, other clients


class Room(Gate):
    """The room of one client. `outstanding` are its requests that are pending.

    `changed` is notified when there may be room again. A waiter calls `check`, which raises once the host takes no more
    requests, and `sweep`, which frees slots that were given up; while there are any `given_up`, it looks by itself.
    """

    def __init__(
        self,
        arena: Arena,
        link: Board,
        outstanding: Sized,
        changed: threading.Condition,
        check: Callable[[], None],
        sweep: Callable[[], None],
        given_up: Sized,
        collect_rare: Callable[[Slot], Any],
    ) -> None:
        super().__init__(link, arena, collect_rare)
        self.arena = arena
        self.unsent: Callable[[], int] = lambda: 0  # how many slots event loops have filled and not sent yet
        self._link = link
        self._outstanding = outstanding
        self._changed = changed
        self._check = check
        self._sweep = sweep
        self._given_up = given_up
        self._others = 0  # requests of other clients, when they were last counted
        self._reply_room: dict[int, int] = {}  # bytes, by log2 of the request's

    def slot(self, size: int, *, grow: bool = True) -> Slot | None:
        """A slot for an encoded request of `size` bytes and its reply, or None if there is no room now."""
        if self.waiting:
            return None
        self.until_count -= 1
        if (self.until_count <= 0 or self._link.cells[board.MAX_PENDING] != self.most) and self._crowded():
            return None
        try:
            order = self.orders[size]
        except KeyError:
            if len(self.orders) >= ORDERS_REMEMBERED:
                self.orders.clear()
            order = self.orders[size] = order_of(self._slot_size(size))
        return self.arena.pop(order) or self.arena.acquire(self._slot_size(size), grow=grow)

    def wait_for_slot(self, size: int, deadline: float | None, unwanted: threading.Event | None = None) -> Slot:
        """The same, waiting for room until `deadline` (CLOCK_MONOTONIC), or until nobody wants it any more;
        RequestTimeoutError then."""
        ticket, slot_size = object(), self._slot_size(size)
        with self._changed:
            self.waiting.append(ticket)
            try:
                while True:
                    self._check()
                    crowded = False
                    if self.waiting[0] is ticket:
                        self._sweep()
                        crowded = self._crowded()
                        slot = None if crowded else self.arena.acquire(slot_size)
                        if slot is not None:
                            self.admitted.add(slot.key)  # it counts before anybody else is let through
                            return slot
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0 or unwanted is not None and unwanted.is_set():
                        raise self.no_room(size, self.waiting.index(ticket))
                    pause = SWEEP_INTERVAL if self._given_up or crowded else None
                    self._changed.wait(pause if remaining is None else min(remaining, pause or remaining))
            finally:
                self.waiting.remove(ticket)
                self._changed.notify_all()

    def tell(self) -> None:
        """Lets those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def learn(self, length: int, reply: int) -> None:
        """From now on requests of about `length` bytes get room for the largest reply that one of them had."""
        order = length.bit_length()
        room = max(reply, self._reply_room.get(order, 0))
        if 1 << (2 * HEADER_SIZE + (1 << order) + room).bit_length() > self.arena.limit:
            room = LEAST_REPLY_ROOM  # its replies come in memory of their own
        self._reply_room[order] = room
        self.orders.clear()

    def pending(self) -> int:
        """The requests that are pending, over all clients; those of the others as of now."""
        cells, row = self._link.cells, self._link.row
        starts = range(board.client_row(0), board.client_row(cells[board.CLIENT_ROWS]), board.ROW)
        self._others = sum([sum(cells[start : start + board.MAX_WORKERS]) for start in starts if start != row])
        pending = len(self._outstanding) + len(self.admitted) + self.unsent() + self._others
        self.most = cells[board.MAX_PENDING]
        left = (self.most - pending) // max(1, len(starts))  # our share of what may still be sent
        self.until_count = max(1, min(COUNT_INTERVAL, left))
        return pending

    def no_room(self, size: int = 0, ahead: int | None = None) -> RequestTimeoutError:
        """The error of a request of `size` bytes that has waited in vain; `ahead` of it so many others wait."""
        if ahead is None:
            ahead = max(0, len(self.waiting) - 1)
        return RequestTimeoutError(f"no room for the request within its timeout: {self._why(size, ahead)}")

    def overloaded(self, size: int) -> OverloadedError:
        return OverloadedError(f"no room for one more request: {self._why(size, len(self.waiting))}")

    def _crowded(self) -> bool:
        """Whether `max_pending` requests are pending, over all clients, whose requests are counted for it."""
        return bool(self.pending() >= self._link.cells[board.MAX_PENDING])

    def _slot_size(self, size: int) -> int:
        """Bytes for header, an encoded request of `size` bytes, and its reply."""
        room = self._reply_room.get(size.bit_length())
        if room is None:
            room = max(LEAST_REPLY_ROOM, min(size, FIRST_REPLY_ROOM))
        return HEADER_SIZE + size + UNIT + room

    def _why(self, size: int, ahead: int) -> str:
        """Why there is no room for a request of `size` bytes: others may have given some back just now."""
        pending, most = self.pending(), self._link.cells[board.MAX_PENDING]
        mapped, limit = self.arena.mapped, self.arena.limit
        too_slow = "The model is too slow for what is sent to it"
        if pending >= most:
            return f"{pending} are pending, and max_pending is {most}. {too_slow}"
        if ahead:
            return (
                f"{ahead} of this process wait for room already, and get it first. {pending} are pending, max_pending "
                f"is {most}, and this process's hold {mapped} of at most {limit} bytes of shared memory. {too_slow}"
            )
        if mapped + (1 << order_of(self._slot_size(size))) > limit:
            return (
                f"{pending} are pending, and this process's hold {mapped} of at most {limit} bytes of shared memory. "
                f"{too_slow}, or shared_memory is too small"
            )
        return f"max_pending is {most}, and as many were pending until a moment ago. {too_slow}"

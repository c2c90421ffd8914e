"""Gate: the way of a request into its slot, and of its reply out of it, as long as there is nothing to decide."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from batch_inference import board
from batch_inference.counting import add, bucket
from batch_inference.ledger import Board
from batch_inference.speedups import in_c
from batch_inference.transport.arena import Arena
from batch_inference.transport.slot import Slot
from batch_inference.transport.wire import DONE_AT

TRANSPORT_SAMPLE, FIRST_SAMPLES = 15, 512  # of the generations, which are odd, one in eight is timed; the first all


@in_c
class Gate:
    """Takes slots from an arena and gives them back. What it knows is for `Room`, a subclass, which decides."""

    def __init__(self, board: Board, arena: Arena, collect_rare: Callable[[Slot], Any]) -> None:
        self.waiting: deque[object] = deque()  # for room, in order of arrival
        self.admitted: set[int] = set()  # keys of slots given to those who waited, until they are outstanding
        self.orders: dict[int, int] = {}  # of slots, by the encoded request's size
        self.until_count = 0  # requests of ours until those of other clients are counted again,
        self.most = 0  # unless max_pending is another than it was then
        self._board = board
        self._arena = arena
        self._collect_rare = collect_rare

    def fill(self, args: tuple[Any, ...], most: int | None = None) -> Slot | None:
        """A slot with the request in it, if one is free and all it takes is to copy at most `most` bytes; None if there
        is more to do, or to decide. In Python nothing is quicker than to decide."""
        return None

    def collect(self, slot: Slot) -> Any:
        """The reply to a request that is done and not outstanding any more, if it is a result in the slot, else what
        `collect_rare` says; frees the slot."""
        try:
            if slot.gen & TRANSPORT_SAMPLE == 1 or slot.gen < FIRST_SAMPLES:
                self._time_reply(slot)
            return slot.reply(self._collect_rare)
        finally:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """Takes back a slot that no worker will touch again."""
        if self.admitted:
            self.admitted.discard(slot.key)
        self._arena.release(slot)
        if self.waiting:
            self.tell()

    def tell(self) -> None:
        """Lets those who wait look again."""
        raise NotImplementedError

    def _time_reply(self, slot: Slot) -> None:
        took = time.monotonic_ns() - slot.segment.quads[slot.quad + DONE_AT]
        if slot.error is None:
            add(self._board.cells, self._board.row + board.TRANSPORT + bucket(took), 1)

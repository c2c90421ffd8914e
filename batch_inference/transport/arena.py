"""The arena: one client's allocator of slots over segments that it grows on demand.

Sizes are powers of two. A free slot of the right size is popped from a list, last in first out, so that the pages are
warm; without one, a larger slot is cut in half until it fits (a buddy allocator), free halves are put together again
when nothing else helps, and after that the arena grows. At its limit, segments that are wholly free make way for one
of the size that is needed: their pages go back to the machine, and the mappings wait to be used again. Only the owner
allocates, so no lock is shared between processes.

Threads: popping and appending are single list operations and need no lock; cutting, merging and growing hold one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from batch_inference.errors import RequestTooLargeError
from batch_inference.transport.segment import Segment
from batch_inference.transport.slot import Slot
from batch_inference.transport.wire import HEADER_SIZE, SENT

MIN_ORDER = 10
FIRST_SEGMENT_ORDER = 20
GENERATIONS = 0xFFFF_FFFF


def order_of(nbytes: int) -> int:
    """log2 of the size of the slots for a request and reply of `nbytes` together, header included."""
    return max(MIN_ORDER, (nbytes - 1).bit_length())


class Arena:
    """Slots for one client. `make(size)` creates a segment; `attached(number, segment)` announces it to the workers."""

    def __init__(
        self, limit: int, make: Callable[[int], Segment], attached: Callable[[int, Segment], None] = lambda n, s: None
    ) -> None:
        self.limit = limit
        self.segments: list[Segment] = []
        self.mapped = 0
        self._make = make
        self._attached = attached
        self.free_slots: list[list[Slot]] = [[] for _ in range(64)]  # by order
        self._parked: list[Slot] = []  # whole segments without pages, which `mapped` does not count
        self._lock = threading.Lock()
        self.generations = itertools.count(1, 2)  # of slots; odd, so never 0 when they wrap around

    def __repr__(self) -> str:
        return f"<Arena {self.mapped} of at most {self.limit} bytes in {len(self.segments)} segments>"

    def acquire(self, nbytes: int, *, grow: bool = True) -> Slot | None:
        """A slot for header, request and reply of `nbytes` together, or None when there is no room now.

        RequestTooLargeError when there can never be. With `grow=False` only memory that is mapped already is used.
        """
        order = order_of(nbytes)
        slot = self.pop(order) or self._acquire_slowly(order, nbytes, grow)
        if slot is not None:
            slot.gen = next(self.generations) & GENERATIONS
        return slot

    def pop(self, order: int) -> Slot | None:
        """A slot of 2**order bytes if one is free as it is."""
        try:
            slot = self.free_slots[order].pop()
        except IndexError:
            return None
        slot.gen = next(self.generations) & GENERATIONS
        return slot

    def release(self, slot: Slot) -> None:
        """Takes back a slot that no worker will touch again."""
        slot.forget()
        self.free_slots[slot.order].append(slot)

    @property
    def free(self) -> int:
        """Bytes of the slots that are free now; equal to `mapped` when every slot is back."""
        return sum(len(slots) << order for order, slots in enumerate(self.free_slots))

    def close(self) -> None:
        """Forgets all memory; the mappings go with the last slot that a caller still holds."""
        with self._lock:
            for slots in self.free_slots:
                slots.clear()
            self._parked.clear()
            for segment in self.segments:
                segment.close()
            self.segments.clear()
            self.mapped = 0

    def forget(self) -> None:
        """In a forked child: `close`, whatever a thread that is not here held or was doing."""
        self._lock = threading.Lock()
        self.close()

    def _acquire_slowly(self, order: int, nbytes: int, grow: bool) -> Slot | None:
        if 1 << order > self.limit:
            raise RequestTooLargeError(
                f"a request with its reply needs {nbytes} bytes in one piece ({1 << order} with rounding), and this "
                f"process may map {self.limit} bytes of shared memory in all: send smaller requests or raise "
                "shared_memory"
            )
        with self._lock:
            slot = self._cut(order)
            if slot is None:
                self._merge()
                slot = self._cut(order)
            while slot is None and grow and self._grow(order):
                slot = self._cut(order)  # None if another thread, which needs no lock for it, was quicker
            return slot

    def _cut(self, order: int) -> Slot | None:
        """Takes the smallest free slot of at least `order` and halves it down to `order`."""
        for larger in range(order, len(self.free_slots)):
            try:
                slot = self.free_slots[larger].pop()
            except IndexError:
                continue
            while slot.order > order:
                half = slot.order - 1
                self.free_slots[half].append(self._new_slot(slot.segment, slot.number, slot.offset + (1 << half), half))
                slot = self._new_slot(slot.segment, slot.number, slot.offset, half)
            return slot
        return None

    def _merge(self) -> None:
        """Puts free buddies together, smallest first. Other threads may pop and append meanwhile: hence one by one."""
        for order in range(MIN_ORDER, len(self.free_slots) - 1):
            taken: dict[tuple[int, int], Slot] = {}
            while True:
                try:
                    slot = self.free_slots[order].pop()
                except IndexError:
                    break
                taken[slot.number, slot.offset] = slot
            for (number, offset), slot in list(taken.items()):
                buddy = (number, offset ^ (1 << order))
                if (number, offset) in taken and buddy in taken:
                    del taken[number, offset], taken[buddy]
                    start = min(offset, buddy[1])
                    self.free_slots[order + 1].append(self._new_slot(slot.segment, number, start, order + 1))
            self.free_slots[order].extend(taken.values())

    def _grow(self, order: int) -> bool:
        """Maps one more segment: as much again as there is, as far as the limit allows; False when it does not."""
        if self.mapped + (1 << order) > self.limit:
            self._park(order)
        wanted = max(order, FIRST_SEGMENT_ORDER, min(self.mapped.bit_length() - 1, 30))
        while self.mapped + (1 << wanted) > self.limit and wanted > order:
            wanted -= 1
        if self.mapped + (1 << wanted) > self.limit:
            return False
        if self._unpark(order, wanted):
            return True
        segment, number = self._make(1 << wanted), len(self.segments)
        try:
            self._attached(number, segment)  # before any of its slots can be handed out
        except BaseException:
            segment.close()
            raise
        self.segments.append(segment)
        self.mapped += segment.size
        self.free_slots[wanted].append(self._new_slot(segment, number, 0, wanted))
        return True

    def _park(self, order: int) -> None:
        """Parks smaller segments that are wholly free, until there is room for one of `order`."""
        for slots in self.free_slots[MIN_ORDER:order]:
            for slot in list(slots):
                if self.mapped + (1 << order) <= self.limit:
                    return
                if slot.size == slot.segment.size:
                    try:
                        slots.remove(slot)
                    except ValueError:
                        continue  # another thread has just taken it
                    slot.segment.discard()
                    self._parked.append(slot)
                    self.mapped -= slot.size

    def _unpark(self, least: int, most: int) -> bool:
        """Uses a parked segment again, of an order from `least` to `most`; False if there is none."""
        for slot in self._parked:
            if least <= slot.order <= most:
                self._parked.remove(slot)
                self.mapped += slot.size
                self.free_slots[slot.order].append(slot)
                return True
        return False

    @staticmethod
    def _new_slot(segment: Segment, number: int, offset: int, order: int) -> Slot:
        slot = Slot(segment, number, offset, order)
        # What an earlier use left in the worker's half of the header says nothing about this one.
        segment.memory[offset + SENT.size : offset + HEADER_SIZE] = bytes(HEADER_SIZE - SENT.size)
        return slot

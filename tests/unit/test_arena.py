"""The arena: slots never overlap, and every byte comes back."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_inference.errors import RequestTooLargeError
from batch_inference.transport import segment
from batch_inference.transport.arena import MIN_ORDER, Arena
from batch_inference.transport.slot import Slot
from batch_inference.transport.wire import DONE_GEN, HEADER_SIZE, UNIT

MIB = 1 << 20


def arena(limit: int = 64 * MIB, **options: Any) -> Arena:
    return Arena(limit, segment.private, **options)


def overlap(one: Slot, other: Slot) -> bool:
    return (
        one.number == other.number and one.offset < other.offset + other.size and other.offset < one.offset + one.size
    )


def acquired(used: Arena, nbytes: int, **options: Any) -> Slot:
    slot = used.acquire(nbytes, **options)
    assert slot is not None
    return slot


# Sizes to acquire, or the number of the slot to release among those that live.
STEPS = st.lists(st.one_of(st.integers(0, 6 * MIB), st.integers(-1000, -1)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_live_slots_never_overlap_and_all_memory_comes_back(steps: list[int]) -> None:
    used = arena(32 * MIB)
    live: list[Slot] = []
    generations = set()
    for step in steps:
        if step >= 0:
            slot = used.acquire(step)
            if slot is None:
                continue
            assert slot.size >= step and slot.size & (slot.size - 1) == 0 and slot.offset % UNIT == 0
            assert slot.offset + slot.size <= slot.segment.size and used.segments[slot.number] is slot.segment
            assert not any(overlap(slot, other) for other in live)
            assert slot.gen and slot.gen not in generations and not slot.done
            generations.add(slot.gen)
            live.append(slot)
        elif live:
            used.release(live.pop(step % len(live)))
        assert used.free + sum(slot.size for slot in live) == used.mapped <= used.limit
    for slot in live:
        used.release(slot)
    assert used.free == used.mapped
    whole = acquired(used, 32 * MIB - HEADER_SIZE)  # all of it in one piece, whatever was there before
    assert whole.size == used.mapped == 32 * MIB
    used.release(whole)


def test_slots_are_reused_last_in_first_out_with_a_new_generation() -> None:
    used = arena()
    first, second = acquired(used, 2000), acquired(used, 2000)
    generation = second.gen
    used.release(first)
    used.release(second)
    again = acquired(used, 2000)
    assert (again.number, again.offset) == (second.number, second.offset) and again.gen != generation


def test_free_halves_are_put_together_when_nothing_else_helps() -> None:
    used = arena(1 * MIB)
    small = [acquired(used, 1024 - HEADER_SIZE) for _ in range(1024)]
    assert used.mapped == MIB and used.free == 0 and used.acquire(1) is None
    for slot in small:
        used.release(slot)
    large = acquired(used, MIB - HEADER_SIZE)
    assert large.size == MIB and len(used.segments) == 1
    assert used.acquire(1) is None


def test_what_an_earlier_use_left_in_a_slot_says_nothing_about_the_next() -> None:
    used = arena(MIB)
    small = [acquired(used, 100) for _ in range(4)]
    for slot in small:
        slot.segment.memory[slot.offset : slot.offset + slot.size] = b"\xff" * slot.size
        slot.segment.words[slot.word + DONE_GEN] = slot.gen
        used.release(slot)
    for _ in range(3):
        slot = acquired(used, MIB - HEADER_SIZE)
        assert not slot.done
        used.release(slot)
        assert not acquired_and_released(used, 100).done


def acquired_and_released(used: Arena, nbytes: int) -> Slot:
    slot = acquired(used, nbytes)
    used.release(slot)
    return slot


def test_segments_are_announced_before_their_first_slot_and_grow_with_the_need() -> None:
    announced: list[tuple[int, int]] = []
    used = arena(attached=lambda number, new: announced.append((number, new.size)))
    acquired(used, 10)
    assert announced == [(0, MIB)]
    acquired(used, 5 * MIB)
    assert announced == [(0, MIB), (1, 8 * MIB)]
    assert used.acquire(9 * MIB, grow=False) is None and len(announced) == 2
    acquired(used, 9 * MIB)
    assert announced[2:] == [(2, 16 * MIB)]


def test_a_segment_that_cannot_be_announced_is_not_used() -> None:
    def refuse(number: int, new: Any) -> None:
        raise OSError("no")

    used = arena(attached=refuse)
    with pytest.raises(OSError, match="no"):
        used.acquire(10)
    assert used.mapped == 0 and not used.segments


def test_what_can_never_fit_is_refused_and_what_does_not_fit_now_waits() -> None:
    used = arena(4 * MIB)
    with pytest.raises(RequestTooLargeError, match="shared_memory"):
        used.acquire(4 * MIB + 1)
    held = acquired(used, 3 * MIB)
    assert used.acquire(MIB) is None
    used.release(held)
    assert acquired(used, MIB).size >= MIB


def test_segments_that_are_free_make_way_for_one_of_another_size() -> None:
    used = arena(4 * MIB)
    small = [acquired(used, MIB // 2) for _ in range(3)]
    for slot in small:
        slot.segment.memory[slot.offset : slot.offset + 8] = b"contents"
    assert used.acquire(4 * MIB - HEADER_SIZE) is None  # they are in use
    for slot in small:
        used.release(slot)
    large = acquired(used, 4 * MIB - HEADER_SIZE)
    assert used.mapped == large.size == 4 * MIB
    used.release(large)
    count = len(used.segments)
    for _ in range(5):  # to and fro, without a new segment each time
        used.release(acquired(used, MIB // 2))
        used.release(acquired(used, 4 * MIB - HEADER_SIZE))
        assert used.mapped <= used.limit and used.free == used.mapped
    assert len(used.segments) == count


def test_threads_never_get_the_same_slot() -> None:
    used = arena(16 * MIB)
    wrong: list[Slot] = []

    def work(number: int) -> None:
        mark = number.to_bytes(4, "little")
        for turn in range(400):
            slot = used.acquire((number * turn * 37) % 50_000)
            if slot is None:
                continue
            at = slot.offset + HEADER_SIZE
            slot.segment.memory[at : at + 4] = mark
            if slot.segment.memory[at : at + 4] != mark:
                wrong.append(slot)
            used.release(slot)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and used.free == used.mapped


def test_reprs_say_what_is_where() -> None:
    used = arena(MIB)
    slot = acquired(used, 100)
    assert repr(slot) == f"<Slot 0:{slot.offset} of {1 << MIN_ORDER} bytes, gen {slot.gen}>"
    assert repr(used) == f"<Arena {MIB} of at most {MIB} bytes in 1 segments>"
    used.close()
    assert used.mapped == 0 and used.free == 0

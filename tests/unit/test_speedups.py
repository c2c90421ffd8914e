"""What runs in C does what stands in Python; and all of it runs without C."""

import asyncio
import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from batch_inference import awaited, board, buffers, counting, loops, running, speedups, tensors, waiting
from batch_inference.batcher import ConcatBatcher
from batch_inference.gate import Gate
from batch_inference.ledger import Ledger
from batch_inference.transport import codec, inbox, incoming, segment
from batch_inference.transport.arena import Arena
from batch_inference.transport.slot import Slot
from batch_inference.transport.wire import (
    DESCRIPTOR,
    ERROR,
    FINISHED,
    FINISHED_OFFSET,
    HEADER_SIZE,
    OK,
    SENT,
    UNIT,
    reply_at,
    slot_key,
)

ROOT = Path(__file__).parents[2]
WITHOUT = {**os.environ, "BATCH_INFERENCE_NO_EXTENSIONS": "1"}

in_c_only = pytest.mark.skipif(not speedups.built, reason="the extension was not built")

DTYPES = [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"] + [np.dtype(">i4"), np.dtype(">c16")]
any_array = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(
        dtype, arrays_of.array_shapes(min_dims=0, max_dims=10, min_side=0, max_side=3), elements=st.just(dtype.type(1))
    )
)


def as_it_is(array: Any) -> Any:
    """All but the strides of dimensions without a second element, which say nothing."""
    strides = [stride for stride, length in zip(array.strides, array.shape) if length > 1]
    flags = array.flags
    kinds = flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
    return array.dtype, array.shape, array.size and strides, kinds


def written(encoded: codec.Encoded) -> bytearray:
    memory = bytearray(len(encoded) + 64)
    codec.write(encoded, memory, 64)
    return memory[64:]


@in_c_only
@given(st.integers(-(2**40), 2**62))
def test_a_duration_goes_into_the_same_bucket(nanoseconds: int) -> None:
    assert counting.bucket(nanoseconds) == speedups.in_python["bucket"](nanoseconds)


@in_c_only
@given(any_array, st.sampled_from(["as it is", "reversed", "transposed", "read-only", "large"]))
def test_arrays_travel_as_the_same_bytes_and_arrive_as_the_same_arrays(array: Any, how: str) -> None:
    if how == "reversed" and array.ndim:
        array = array[::-1]
    elif how == "transposed":
        array = array.T
    elif how == "read-only":
        array.flags.writeable = False
    elif how == "large":
        array = np.full((3, 5000), array.reshape(-1)[:1].sum(), array.dtype)
    for value, encode in ((array, "encode"), ((array,), "encode_request")):
        for _ in range(2):  # the second time it is known
            theirs = written(getattr(codec, encode)(value))
        assert theirs == written(speedups.in_python[encode](value))
        memory = segment.private(len(theirs) + 64)
        memory.memory[64 : 64 + len(theirs)] = theirs
        for lend in (True, False):
            one, other = (
                function(memory.memory, 64, len(theirs), lend=lend)
                for function in (codec.decode, speedups.in_python["decode"])
            )
            if encode == "encode_request":
                assert type(one) is type(other) is tuple and len(one) == len(other) == 1
                one, other = one[0], other[0]
            np.testing.assert_array_equal(one, other)
            assert as_it_is(one) == as_it_is(other)
            assert (one.base is memory.memory) == lend and one.flags.owndata != lend


@in_c_only
def test_more_layouts_than_are_remembered_come_in_turn() -> None:
    values = [np.arange(size, dtype=np.float32) for size in range(40)]
    memory = segment.private(1 << 12).memory
    for _ in range(3):
        for value in values:
            encoded = codec.encode(value)
            assert written(encoded) == written(speedups.in_python["encode"](value))
            codec.write(encoded, memory, 0)
            np.testing.assert_array_equal(codec.decode(memory, 0, len(encoded)), value)


@in_c_only
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
def test_columns_are_joined_as_the_batcher_does_step_by_step(lengths: list[int], dtypes: list[Any]) -> None:
    requests = [tuple([np.full((length, 3), length, dtype) for dtype in dtypes]) for length in lengths]
    merged, layout = ConcatBatcher().batch(requests)
    step_by_step = ConcatBatcher()
    step_by_step._only_joins = False
    theirs, its_layout = step_by_step.batch(requests)
    assert layout == its_layout and type(merged) is type(theirs) and len(merged) == len(theirs)
    for mine, its in zip(merged, theirs):
        np.testing.assert_array_equal(mine, its)
        assert as_it_is(mine) == as_it_is(its) and not any(np.shares_memory(mine, part) for part in requests[0])


@in_c_only
def test_columns_that_take_more_than_copying_are_left_to_the_batcher() -> None:
    row = np.ones((1, 2), np.float32)
    for requests in (
        [(row,), (row.astype(np.float64),)],
        [(row,), (np.ones((1, 3), np.float32),)],
        [(np.ones((3, 2), np.float32)[::2],)],
        [(np.ones(()),)],
        [(row.astype(object),)],
        [(row, 3)],
        [()],
        [],
        [(row.view(np.matrix),)],
    ):
        assert tensors.joined_columns(requests) is None


@in_c_only
def test_the_memory_of_large_columns_is_used_again_unless_somebody_has_it_still() -> None:
    buffers.release_unused()
    requests = [(np.full((rows, 1 << 14), rows, dtype), np.ones(rows)) for rows, dtype in ((1, "f4"), (3, "f4"))]
    places = []
    for _ in range(3):
        joined = tensors.joined_columns(requests)
        assert joined is not None and joined[1:] == ([1, 3], 4)
        large, small = joined[0]
        places.append(large.ctypes.data)
        np.testing.assert_array_equal(large, np.concatenate([requests[0][0], requests[1][0]]))
        assert large.dtype == np.float32 and large.flags.c_contiguous and small.tolist() == [1.0] * 4
        if len(places) == 2:
            kept = large
        del joined, large
    assert places[0] == places[1] != places[2] and not places[0] % 64
    assert kept[0, 0] == 1 and kept[3, 0] == 3


@in_c_only
def test_too_little_memory_for_large_columns_is_the_batchers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("on purpose")

    monkeypatch.setattr(buffers, "array", fail)
    with pytest.raises(MemoryError, match="on purpose"):
        ConcatBatcher().batch([(np.ones((1, 1 << 14), np.float32),)])
    monkeypatch.setattr(buffers, "array", lambda *_: np.ones(3))
    with pytest.raises(TypeError, match="no array of that size"):
        ConcatBatcher().batch([(np.ones((1, 1 << 14), np.float32),)])


@in_c_only
@given(any_array.filter(lambda array: array.ndim > 0), st.booleans(), st.randoms())
def test_parts_are_what_slices_give_and_share_the_memory(array: Any, other_way: bool, random: Any) -> None:
    array = array[::-1] if other_way else array
    cuts = [0, *sorted(random.choices(range(len(array) + 1), k=3))]
    counts = [end - start for start, end in zip(cuts, cuts[1:])]
    found = tensors.parts(array, counts, len(array))
    assert found is not None and len(found) == len(counts)
    for part, start, end in zip(found, cuts, cuts[1:]):
        np.testing.assert_array_equal(part, array[start:end])
        assert as_it_is(part) == as_it_is(array[start:end])
        assert part.size == 0 or np.shares_memory(part, array)


@pytest.mark.parametrize("parts", {tensors.parts, speedups.in_python["parts"]})
def test_what_has_other_rows_or_is_no_plain_array_is_not_cut(parts: Any) -> None:
    assert [part.shape for part in parts(np.ones((3, 2)), [1, 1, 1], 3)] == [(1, 2)] * 3
    for output, counts in (
        (np.ones((3, 2)), [1, 1]),
        (np.ones((2, 2)), [1, 1, 1]),
        (np.ones(()), [1]),
        ([1, 2], [1, 1]),
        (np.ones((2, 2)).view(np.matrix), [1, 1]),
    ):
        assert parts(output, counts, sum(counts)) is None


@in_c_only
def test_cells_are_added_to_and_none_beyond_them() -> None:
    cells = segment.private(64).quads
    counting.add(cells, 0, 3, 7, 1)
    counting.add(cells, 0, 4)
    assert cells.tolist() == [7, 0, 0, 0, 0, 0, 0, 1]
    with pytest.raises(IndexError):
        counting.add(cells, 8, 1)


@pytest.mark.parametrize("count_batch", {running.count_batch, speedups.in_python["count_batch"]})
def test_a_batch_is_counted(count_batch: Any) -> None:
    cells, row = segment.private(board.BOARD_SIZE).quads, board.worker_row(1)
    batch = [SimpleNamespace(answers=answers, size=size) for answers, size in ((1, 3), (1, 2), (0, 7))]
    count_batch(cells, row, batch, 5_000_000)
    count_batch(cells, row, batch[:1], 5_000_000)
    counted = {index - row: cells[index] for index in range(len(cells)) if cells[index]}
    running_time = board.RUNNING + counting.bucket(5_000_000)
    assert counted == {board.REQUESTS: 3, board.BATCHES: 2, board.SIZE: 15, running_time: 4}
    with pytest.raises(IndexError):
        count_batch(cells, len(cells), batch, 1)


def test_a_slot_takes_no_request_that_is_too_large_for_it() -> None:
    memory = segment.private(1 << 12)
    slot = Slot(memory, 0, 1024, 10)
    with pytest.raises(ValueError, match="does not fit"):
        slot.write(bytes(1024))
    slot.write(bytes(960))
    assert slot.length == 960 and slot.room == 0 and memory.memory[2048:] == bytes(2048)


@in_c_only
def test_a_slot_lies_within_its_segment() -> None:
    for offset, order in ((0, 13), (4096, 10), (-64, 10), (32, 6)):
        with pytest.raises(ValueError, match="within"):
            Slot(segment.private(1 << 12), 0, offset, order)


@in_c_only
def test_what_memory_is_read_lies_within_it() -> None:
    memory = segment.private(1 << 12).memory
    for offset, length in ((-1, 8), (4090, 8), (0, 4097), (0, -1)):
        with pytest.raises(codec.TransportError):
            codec.decode(memory, offset, length)


@in_c_only
def test_a_ledger_is_of_slots() -> None:
    ledger = Ledger(SimpleNamespace(cells=segment.private(1 << 12).quads, row=0))
    for call in (ledger.assign, ledger.leave, lambda slot: ledger.enter(slot, None, None)):
        with pytest.raises(TypeError, match="slot"):
            call("none")
    for calls in (ledger.leave_all, lambda slots: ledger.assign_all(slots, 1)):
        with pytest.raises(TypeError, match="slot"):
            calls(["none"])
    with pytest.raises(TypeError, match="slot"):
        ledger.enter_all([("none", None)], None, 1)


@pytest.mark.parametrize("ledger_type", {Ledger, speedups.in_python["Ledger"]})
def test_a_ledger_counts_where_its_board_lies_now(ledger_type: Any) -> None:
    one, other = segment.private(1 << 12), segment.private(1 << 12)
    link, peer, channel = SimpleNamespace(cells=one.quads, row=64), SimpleNamespace(index=3), SimpleNamespace(number=1)
    ledger, slots = ledger_type(link), [Slot(one, 0, 1024 * n, 10) for n in range(2)]
    assert ledger.enter(slots[0], channel, None) is None and slots[0].worker is None and slots[0].deadline == 0
    ledger.ready.append(peer)
    assert ledger.enter(slots[1], channel, 2.5) is peer and slots[1].deadline == 2_500_000_000
    assert ledger.assign(slots[0]) is peer and one.quads[64 + 3] == 2
    link.cells, link.row = other.quads, 128
    ledger.leave(slots[0])
    ledger.leave(slots[0])  # once is all
    assert list(ledger.requests.values()) == [slots[1]] and one.quads[64 + 3] == 2 and other.quads[128 + 3] == 1
    link.row = 10**6
    with pytest.raises(IndexError):
        ledger.count(peer, 1)


@pytest.mark.parametrize("ledger_type", {Ledger, speedups.in_python["Ledger"]})
def test_of_several_workers_the_one_with_the_least_of_all_clients_gets_a_request(ledger_type: Any) -> None:
    cells, slot = segment.private(board.BOARD_SIZE).quads, Slot(segment.private(1 << 12), 0, 1024, 10)
    ledger = ledger_type(SimpleNamespace(cells=cells, row=board.client_row(2)))
    peers = [Peer(index) for index in range(4)]
    ledger.ready.extend(peers[:3])
    cells[board.CLIENT_ROWS] = 3
    cells[board.client_row(0) + 1] = 2  # others' requests; there is no fourth client
    cells[board.client_row(1) + 2] = 1
    cells[board.client_row(3)] = 9
    assert [ledger.assign(slot).index for _ in range(7)] == [0, 2, 0, 1, 2, 0, 1]
    assert [cells[board.client_row(2) + index] for index in range(4)] == [3, 2, 2, 0]
    ledger.ready.append(peers[3])
    assert ledger.assign(slot) is peers[3] and set(ledger.ready) == set(peers)
    assert [board.outstanding(cells, index) for index in range(4)] == [3, 4, 3, 1]


@in_c_only
def test_a_worker_has_its_place_on_the_board() -> None:
    slot = Slot(segment.private(1 << 12), 0, 1024, 10)
    ledger = Ledger(SimpleNamespace(cells=segment.private(board.BOARD_SIZE).quads, row=board.client_row(0)))
    ledger.ready.extend([Peer(1), Peer(board.MAX_WORKERS)])
    with pytest.raises(IndexError):
        ledger.assign(slot)
    ledger.ready[:] = [Peer(1), SimpleNamespace()]  # type: ignore[list-item]
    with pytest.raises(AttributeError):
        ledger.assign(slot)


@pytest.mark.parametrize("ledger_type", {Ledger, speedups.in_python["Ledger"]})
def test_several_requests_are_entered_assigned_and_left_at_once(ledger_type: Any) -> None:
    memory = segment.private(1 << 14)
    ledger = ledger_type(SimpleNamespace(cells=memory.quads, row=0))
    one, other = Peer(0), Peer(1)
    channel, slots = SimpleNamespace(number=5), [Slot(memory, 0, 1024 * n, 10) for n in range(1, 6)]

    assert ledger.enter_all([(slot, 2.0) for slot in slots], channel, 9) == {}
    assert list(ledger.requests.values()) == slots and all(slot.worker is None for slot in slots)
    ledger.ready.append(one)
    assert ledger.assign_all(slots[:2], 9) == {one: [slot.descriptor(9) for slot in slots[:2]]}
    ledger.ready.append(other)
    shares = ledger.enter_all([(slot, None) for slot in slots[2:]], channel, 9)
    assert shares == {one: [slots[i].descriptor(9) for i in (2, 4)], other: [slots[3].descriptor(9)]}
    assert [slot.deadline for slot in slots] == [2_000_000_000] * 2 + [0] * 3 and memory.quads[:2].tolist() == [4, 1]
    ledger.leave_all([*slots[:4], slots[0]])  # once is all
    assert list(ledger.requests.values()) == slots[4:] and memory.quads[:2].tolist() == [1, 0]


@dataclass(frozen=True)
class Peer:
    index: int


class Gates:
    """A gate of each kind on the same arena, with a board whose cells lie in `memory`."""

    def __init__(self, kind: Any) -> None:
        class Told(kind):  # type: ignore[misc]
            told = 0

            def tell(self) -> None:
                self.told += 1

        self.memory = segment.private(board.BOARD_SIZE)
        self.memory.quads[board.MAX_PENDING] = 100
        self.arena = Arena(1 << 22, segment.private)
        self.link = SimpleNamespace(cells=self.memory.quads, row=board.client_row(0))
        self.gate = Told(self.link, self.arena, self.rare)
        self.gate.most, self.gate.until_count = 100, 64

    def rare(self, slot: Slot) -> Any:
        if slot.error is not None:
            raise slot.error
        return slot, "rare"

    def answered(self, reply: Any, gen: int, status: int = OK) -> Slot:
        """A slot whose request has been answered."""
        slot = self.arena.acquire(4096)
        assert slot is not None
        slot.gen = gen
        slot.write(bytes(100))
        encoded = codec.encode(reply)
        codec.write(encoded, slot.segment.memory, slot.offset + slot.reply_at)
        FINISHED.pack_into(
            slot.segment.memory, slot.offset + FINISHED_OFFSET, len(encoded), time.monotonic_ns(), status, gen
        )
        return slot

    @property
    def timed(self) -> int:
        start = board.client_row(0) + board.TRANSPORT
        return sum(self.memory.quads[start : start + board.BUCKETS])


both_gates = pytest.mark.parametrize("kind", {Gate, speedups.in_python["Gate"]})


@both_gates
def test_a_reply_frees_its_slot(kind: Any) -> None:
    made = Gates(kind)
    for gen, timed in ((1, 1), (513, 2), (515, 2)):
        slot = made.answered(np.arange(3), gen)
        assert made.gate.collect(slot).tolist() == [0, 1, 2] and made.arena.free == made.arena.mapped
        assert made.timed == timed and made.gate.told == 0
    slot = made.answered(1, 1, ERROR)
    slot.abandoned = True
    assert made.gate.collect(slot) == (slot, "rare") and not slot.abandoned
    slot = made.answered(1, 1, ERROR)
    slot.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        made.gate.collect(slot)
    assert made.arena.free == made.arena.mapped


@both_gates
def test_who_waits_hears_of_a_slot_that_is_free(kind: Any) -> None:
    made = Gates(kind)
    slot = made.answered(1, 1)
    made.gate.admitted.update([slot.key, -1])
    made.gate.waiting.append(object())
    made.gate.release(slot)
    assert made.gate.told == 1 and made.gate.admitted == {-1} and made.arena.free == made.arena.mapped


@in_c_only
def test_a_request_goes_into_a_free_slot_as_it_would_in_python() -> None:
    made, array = Gates(Gate), np.arange(48, dtype=np.int16).reshape(2, 24)
    encoded = written(codec.encode_request((array,)))  # its layout is known from here on
    made.gate.orders[len(encoded)] = 11
    slot = made.arena.acquire(1 << 11)
    assert slot is not None
    made.arena.release(slot)
    assert made.gate.fill((array,), len(encoded)) is slot and made.gate.until_count == 63
    memory, start = slot.segment.memory, slot.offset
    assert memory[start + HEADER_SIZE : start + HEADER_SIZE + len(encoded)] == encoded
    assert SENT.unpack_from(memory, start) == (slot.gen, 0, len(encoded), 0, slot.room) and slot.gen % 2 == 1


@in_c_only
def test_who_has_something_to_decide_does_not_just_get_a_slot() -> None:
    made, array = Gates(Gate), np.ones((2, 24), np.int16)
    size = len(codec.encode_request((array,)))
    gate, orders = made.gate, made.gate.orders
    orders[size] = 11
    assert gate.fill((array,)) is None  # none is free
    made.arena.release(made.arena.acquire(1 << 11))  # type: ignore[arg-type]
    assert gate.fill((array,), size - 1) is None
    for other in ((array, array), (array.T,), ([1],), (), (array.view(np.matrix),), (np.ones((2, 17), np.int16),)):
        assert gate.fill(other) is None
    gate.waiting.append(object())
    assert gate.fill((array,)) is None
    gate.waiting.clear()
    made.memory.quads[board.MAX_PENDING] = 99
    assert gate.fill((array,)) is None
    made.memory.quads[board.MAX_PENDING] = 100
    orders.clear()
    assert gate.fill((array,)) is None
    orders[size], gate.until_count = 11, 1
    assert gate.fill((array,)) is None and gate.until_count == 1
    gate.until_count = 2
    assert gate.fill((array,)) is not None
    orders[size] = 64
    gate.until_count = 2
    with pytest.raises(IndexError):
        gate.fill((array,))


@in_c_only
def test_what_runs_when_a_board_goes_finds_the_new_one() -> None:
    made, array, filled = Gates(Gate), np.ones((2, 24), np.int16), []
    made.gate.orders[len(codec.encode_request((array,)))] = 11
    for slot in [made.arena.acquire(1 << 11) for _ in range(3)]:
        made.arena.release(slot)  # type: ignore[arg-type]

    class Board(bytearray):
        def __del__(self) -> None:
            filled.append(made.gate.fill((array,)))

    made.link.cells = memoryview(Board(made.memory.memory[:])).cast("Q")
    assert made.gate.fill((array,)) is not None
    made.memory.quads[board.MAX_PENDING] = 99
    made.link.cells = made.memory.quads  # the old one goes when the gate looks at this one
    assert made.gate.fill((array,)) is None
    assert filled == [None]


@pytest.mark.parametrize("of", [{}, speedups.in_python])
def test_what_is_answered_is_taken_from_what_waits(of: Any) -> None:
    take_answered, kind = (of.get(its.__name__, its) for its in (loops.take_answered, awaited.Awaited))
    made, loop = Gates(Gate), asyncio.new_event_loop()
    small, large, failed, cancelled = (made.answered(bytes(size), 1) for size in (10, 1000, 1000, 10))
    unanswered = made.answered(1, 1)
    unanswered.gen = 3
    failed.error = ValueError()
    waiting = {slot.key: kind(loop, slot) for slot in (small, large, failed, cancelled, unanswered)}
    waiting[cancelled.key].cancel()
    entries, late = dict(waiting), object()
    ready = take_answered(waiting, [-1, *waiting, small.key], 500, late)
    assert ready == [entries[small.key], entries[failed.key]]
    assert set(waiting) == {large.key, cancelled.key, unanswered.key}
    assert waiting[large.key].result() is late and not waiting[unanswered.key].done()
    assert take_answered(waiting, [large.key], 500, late) == []  # its task sees to it
    loop.close()


class Caller:
    """Requests in slots of one client, as its worker opens them; and what comes back."""

    eventfd = -1

    def __init__(self) -> None:
        self.memory = segment.private(1 << 16)
        self.peer = incoming.Peer(7)
        self.peer.segments[0], self.peer.channels[0] = self.memory, self  # type: ignore[assignment]
        self.keys: list[int] = []
        self.posted: set[Caller] = set()
        self.elsewhere: list[tuple[int, Any]] = []

    def requests(self, count: int, deadlines: list[int] | None = None) -> list[incoming.Incoming]:
        descriptors, opened = b"", list[incoming.Incoming]()
        for number in range(count):
            SENT.pack_into(self.memory.memory, number * 64 * UNIT, 1, 0, 0, 0, 62 * UNIT)
            deadline = deadlines[number] if deadlines else 0
            descriptors += DESCRIPTOR.pack(7, 0, 0, number * 64, 1, time.monotonic_ns(), deadline)
        assert not incoming.open_requests(self, {7: self.peer}, descriptors, opened)  # type: ignore[arg-type]
        return opened

    def answer(self, number: int) -> tuple[int, Any]:
        """The status of the request with that number, and its reply."""
        start = number * 64 * UNIT
        size, _, status, gen = FINISHED.unpack_from(self.memory.memory, start + FINISHED_OFFSET)
        return (status, codec.decode(self.memory.memory, start + reply_at(0), size)) if gen else (0, None)

    def post(self, segment: int, unit: int) -> bool:
        self.keys.append(slot_key(segment, unit))
        return True

    def reply_elsewhere(self, peer: Any, slot: tuple[int, int, int, int], encoded: Any) -> None:
        self.elsewhere.append((slot[1], codec.decode(written(encoded), 0, len(encoded))))


class Ends:
    """Cannot be sent, as pickling it raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


both_replies = pytest.mark.parametrize("reply_all", {running.reply_all, speedups.in_python["reply_all"]})


@both_replies
def test_each_request_is_answered_with_its_response_or_the_error_of_sending_it(reply_all: Any) -> None:
    caller, array = Caller(), np.arange(12, dtype=np.float32).reshape(3, 4)
    cells, row = segment.private(board.BOARD_SIZE).quads, board.worker_row(0)
    told: list[tuple[Any, ...]] = []
    responses = [array, array.T, np.ones(()), {"a": array}, Ends(ValueError("no")), np.ones(1000), array[1:]]
    batch = [*caller.requests(len(responses)), SimpleNamespace(reply=lambda *args: told.append(args))]
    for _ in range(2):  # the second time the layouts are known
        reply_all(batch, [*responses, array], cells, row)
    for number, response in enumerate(responses):
        status, reply = caller.answer(number)
        if number == 4:
            assert status == ERROR
        elif number == 5:
            assert status == 0
        else:
            assert status == OK
            np.testing.assert_equal(reply, response)
    assert [unit for unit, _ in caller.elsewhere] == [5 * 64] * 2
    np.testing.assert_array_equal(caller.elsewhere[0][1], np.ones(1000))
    assert caller.posted == {caller} and caller.keys == [slot_key(0, n * 64) for n in (0, 1, 2, 3, 4, 6)] * 2
    assert [written(args[0]) for args in told] == [written(codec.encode(array))] * 2
    assert {index - row: cells[index] for index in range(len(cells)) if cells[index]} == {board.FAILED: 2}


@both_replies
@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_worker_ends_it_in_the_middle_of_replies(reply_all: Any, end: Any) -> None:
    caller, cells = Caller(), segment.private(board.BOARD_SIZE).quads
    with pytest.raises(end):
        reply_all(caller.requests(3), [1, Ends(end()), 3], cells, board.worker_row(0))
    assert [caller.answer(number)[0] for number in range(3)] == [OK, 0, 0] and not any(cells)


@both_replies
def test_a_caller_that_has_gone_gets_no_reply(reply_all: Any) -> None:
    caller = Caller()
    caller.peer.gone = True
    reply_all(caller.requests(2), [np.ones(3), 1], segment.private(board.BOARD_SIZE).quads, board.worker_row(0))
    assert caller.answer(0) == caller.answer(1) == (0, None) and not caller.keys and not caller.posted


@both_replies
def test_an_error_that_cannot_be_told_is_not_silent(reply_all: Any) -> None:
    caller = Caller()
    caller.peer.channels[0] = SimpleNamespace(eventfd=-1, keys=None, post=lambda *_: 1 / 0)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        reply_all(caller.requests(1), [1], segment.private(board.BOARD_SIZE).quads, board.worker_row(0))


@pytest.mark.parametrize("of", [{}, speedups.in_python])
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 10**9, 2 * 10**9]), st.booleans()), max_size=8),
    st.integers(1, 30),
)
def test_what_waits_is_summed_up(of: Any, waits: list[tuple[int, int, bool]], limit: int) -> None:
    summed, arrivals, args_of = (of.get(name, getattr(waiting, name)) for name in ("summed", "arrivals", "args_of"))
    opened = Caller().requests(len(waits), [deadline for _, deadline, _ in waits])
    queue: deque[Any] = deque()
    for request, (size, deadline, whole) in zip(opened, waits):
        request.size, request.args = size, (size,)
        of_part = SimpleNamespace(size=size, arrived=request.arrived, deadline=deadline, args=request.args)
        queue.append(request if whole else of_part)
    times = [request.arrived / 1e9 for request in opened]
    assert arrivals(list(queue)) == (times, [size for size, _, _ in waits])
    assert args_of(list(queue)) == [(size,) for size, _, _ in waits]
    size, deadlines = sum([size for size, _, _ in waits]), [deadline / 1e9 for _, deadline, _ in waits if deadline]
    if queue:
        expected = None if size >= limit else (len(queue), size, times[0], min(deadlines, default=None))
        assert summed(queue, limit) == expected


@pytest.mark.parametrize("of", [{}, speedups.in_python])
def test_what_is_no_request_cannot_wait(of: Any) -> None:
    for name in ("summed", "arrivals", "args_of"):
        with pytest.raises(AttributeError):
            of.get(name, getattr(waiting, name))(deque([3]), *([9] if name == "summed" else []))


@pytest.fixture
def ends() -> Iterator[tuple[int, int, int, int]]:
    """Of a request pipe and of another that stands for a control connection: reading and writing."""
    made = (*os.pipe(), *os.pipe())
    os.set_blocking(made[0], False)
    os.set_blocking(made[1], False)
    yield made
    for end in made:
        os.close(end)


both_ways = pytest.mark.parametrize("read_or_hear", {inbox.read_or_hear, speedups.in_python["read_or_hear"]})


@both_ways
def test_all_that_waits_is_read_and_what_is_to_be_heard_is_told(read_or_hear: Any, ends: Any) -> None:
    pipe, requests, control, commands = ends
    assert read_or_hear(pipe, control, 0.0) == (b"", False)
    os.write(requests, b"a" * 100)
    assert read_or_hear(pipe, control, None) == (b"a" * 100, False)
    os.write(commands, b"c")
    assert read_or_hear(pipe, control, 100) == (b"", True)
    fcntl.fcntl(requests, fcntl.F_SETPIPE_SZ, 1 << 18)
    much = os.urandom(200_000)
    assert os.write(requests, much) == len(much)
    assert read_or_hear(pipe, control, 0.0) == (much, True)


@both_ways
def test_a_wait_lasts_as_long_as_it_says_also_when_a_signal_comes(read_or_hear: Any, ends: Any) -> None:
    pipe, _, control, _ = ends
    came = []
    signal.signal(signal.SIGALRM, lambda *_: came.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        started = time.monotonic()
        assert read_or_hear(pipe, control, 0.1) == (b"", False)
        assert time.monotonic() - started >= 0.1 and len(came) == 1
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(ZeroDivisionError):
            read_or_hear(pipe, control, None)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@both_ways
def test_a_descriptor_that_cannot_be_read_is_an_error(read_or_hear: Any, ends: Any) -> None:
    closed = os.dup(ends[0])
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_or_hear(closed, ends[2], 0.0)


@pytest.mark.skipif(bool(os.environ.get("BATCH_INFERENCE_NO_EXTENSIONS")), reason="not wanted")
@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="there is none without a global lock")
def test_where_there_is_a_compiler_the_extension_was_built() -> None:
    """A C source that does not compile would go unnoticed otherwise: the package is then installed without it."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler) or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip(f"no {compiler}, or no Python.h")
    assert speedups.built, "pip install -e . -v says why not"


def test_all_that_is_in_c_stands_in_python_too() -> None:
    importlib.import_module("batch_inference.worker")  # has the rest imported
    if speedups.built:
        assert {name for name in vars(speedups._speedups) if name[0] != "_"} == set(speedups.in_python)
        assert codec.decode is not speedups.in_python["decode"] is not None
    else:
        assert codec.decode is speedups.in_python["decode"]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_tests_of_what_runs_in_c_pass_without_it() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from batch_inference import speedups; print(speedups.built)"],
        env=WITHOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert said.stdout == "False\n"
    units = [f"tests/unit/test_{name}.py" for name in ("arena", "codec", "inbox", "worker", "statistics")]
    process = [f"tests/process/test_{name}.py" for name in ("example", "submit", "poison", "forms")]
    passed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            "--dist",
            "loadfile",
            *units,
            *process,
        ],
        cwd=ROOT,
        env=WITHOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert passed.returncode == 0, passed.stdout[-5000:]

"""Request pipes and wake-ups."""

import os
import select
import threading
from collections.abc import Iterator

import pytest

from batch_inference.transport import channel
from batch_inference.transport.channel import (
    FarPipeChannel,
    FarThreadChannel,
    LocalKeyChannel,
    LocalQueueChannel,
    LocalRequestPipe,
    LocalThreadChannel,
    PipeChannel,
    RequestPipe,
    ThreadChannel,
    chunks,
    read_waiting,
)
from batch_inference.transport.wire import DESCRIPTOR, DESCRIPTORS_PER_WRITE, ENTRIES_PER_WRITE, PIPE_BUF, slot_key


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def descriptor(number: int) -> bytes:
    return DESCRIPTOR.pack(1, 2, 3, number, 5, 6, 7)


def numbers(data: bytes) -> list[int]:
    return [entry[3] for entry in DESCRIPTOR.iter_unpack(data)]


# --- request pipes --------------------------------------------------------------------------------------------------


def test_a_request_pipe_takes_whole_writes_until_it_is_full_and_keeps_their_order() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pipe = RequestPipe(writing)
    sent = 0
    while pipe.write(b"".join(descriptor(sent + offset) for offset in range(DESCRIPTORS_PER_WRITE))):
        sent += DESCRIPTORS_PER_WRITE
    assert sent >= 2 * DESCRIPTORS_PER_WRITE
    found = []
    while part := read_waiting(reading):
        found += numbers(part)
    assert found == list(range(sent))
    assert pipe.write(descriptor(1)) and numbers(read_waiting(reading)) == [1]
    os.close(reading)
    assert pipe.write(descriptor(2))  # nobody reads: no EPIPE and no signal
    del pipe


def test_writes_of_many_threads_are_never_mixed() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pipe = RequestPipe(writing)
    found: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set() or select.select([reading], [], [], 0)[0]:
            if select.select([reading], [], [], 0.01)[0]:
                found.extend(numbers(read_waiting(reading)))

    def write(start: int) -> None:
        for number in range(start, start + 2000):
            while not pipe.write(descriptor(number)):
                select.select([], [pipe.fd], [], 1)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=[start]) for start in range(0, 8000, 2000)]
    for thread in [reader, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    reader.join()
    assert sorted(found) == list(range(8000))
    os.close(reading)


def test_flags_of_the_other_end_are_its_own() -> None:
    reading, writing = os.pipe()
    pipe = RequestPipe(os.dup(writing))
    assert os.get_blocking(writing) and not os.get_blocking(pipe.fd)
    os.close(reading)
    os.close(writing)
    del pipe


def test_chunks_are_as_large_as_one_atomic_write_may_be() -> None:
    parts = list(chunks([descriptor(number) for number in range(300)]))
    assert all(len(part) <= PIPE_BUF for part in parts) and len(parts) == 3
    assert numbers(b"".join(parts)) == list(range(300))
    assert list(chunks([])) == []


def test_a_local_request_pipe_delivers_in_order_and_waits_no_longer_than_it_should() -> None:
    pipe = LocalRequestPipe()
    assert pipe.read(0.0) == b"" and pipe.read(0.01) == b""
    pipe.write(descriptor(1) + descriptor(2))
    pipe.write(descriptor(3))
    assert numbers(pipe.read(None)) == [1, 2, 3]


# --- wake-ups -------------------------------------------------------------------------------------------------------


def test_a_thread_channel_wakes_its_waiter_from_either_side() -> None:
    near = ThreadChannel(4)
    far = FarThreadChannel(os.dup(near.fd))
    near.wait(0.01)  # times out
    far.post(0, 0)
    far.post(0, 0)  # twice is once
    near.wait()
    near.wait(0.01)
    near.wake(0)
    near.wait(None)
    waiter = threading.Thread(target=near.wait)
    waiter.start()
    far.post(0, 0)
    waiter.join(10)
    assert not waiter.is_alive()
    far.close()
    del near


def test_a_pipe_channel_delivers_the_keys_of_a_batch_in_few_writes() -> None:
    near = PipeChannel(4)
    far = FarPipeChannel(os.dup(near.far_fd))
    assert near.read() == [] and near.read(0.01) == []
    keys = [(number % 3, number) for number in range(2 * ENTRIES_PER_WRITE + 5)]
    for segment, unit in keys:
        far.post(segment, unit)
    assert near.read() == []  # not before the end of the batch
    assert far.flush()
    assert near.read(None) == [slot_key(segment, unit) for segment, unit in keys]
    near.wake(slot_key(1, 99))
    assert slot_key(1, 99) in near.read(None)
    far.close()
    del near


def test_a_reader_that_sleeps_never_blocks_the_worker_and_loses_no_key() -> None:
    near = PipeChannel(4)
    far = FarPipeChannel(os.dup(near.far_fd))
    count = 50_000  # 8 bytes each: more than a pipe holds
    for unit in range(count):
        far.post(0, unit)
    assert not far.flush()
    near.wake(slot_key(7, 7))  # although the pipe is full
    found: list[int] = []
    while not far.flush():
        found += near.read()
    while part := near.read():
        found += part
    assert slot_key(7, 7) in found
    found.remove(slot_key(7, 7))
    assert found == [slot_key(0, unit) for unit in range(count)]
    far.close()
    del near


def test_a_wake_up_that_names_no_slot_is_no_key_of_one() -> None:
    near = PipeChannel(0)
    near.wake(slot_key(0, 0))
    keys = near.read(None)
    assert slot_key(0, 0) in keys and all(key == 0 or key >> 32 == 0xFFFF_FFFF for key in keys)
    del near
    assert channel.NO_ENTRY


def test_local_channels_do_the_same_within_one_process() -> None:
    thread = LocalThreadChannel(1)
    thread.wait(0.01)
    thread.post(0, 0)
    thread.post(0, 0)
    thread.wait()
    thread.wait(0.01)
    delivered: list[list[int]] = []
    keys = LocalKeyChannel(2, delivered.append)
    keys.post(0, 1)
    keys.post(1, 2)
    assert delivered == [] and keys.flush() and delivered == [[slot_key(0, 1), slot_key(1, 2)]]
    assert keys.flush() and len(delivered) == 1
    keys.wake(5)
    assert delivered[1] == [5]
    queue = LocalQueueChannel(3)
    assert queue.read(0.01) == []
    queue.post(0, 1)
    queue.flush()
    assert queue.read(None) == [slot_key(0, 1)]

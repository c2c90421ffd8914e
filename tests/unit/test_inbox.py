"""What a worker finds in its request pipe."""

import os
import time
from collections.abc import Iterator

import pytest

from batch_inference.transport import handshake, segment
from batch_inference.transport.handshake import Connection
from batch_inference.transport.inbox import RemoteInbox
from batch_inference.transport.wire import DESCRIPTOR, GEN, WORDS_PER_UNIT

CLIENT, SLOTS, UNITS = 3, 5, 4  # a client with so many slots, of so many units each


class Pipe:
    """A request pipe with its inbox, which knows one client, and what that client has sent."""

    def __init__(self) -> None:
        ours, theirs = handshake.pair()
        reading, self.writing = os.pipe2(os.O_NONBLOCK)
        self.control = Connection(ours)
        self.inbox = RemoteInbox(reading, Connection(theirs))
        self.memory = segment.create(1 << 12)
        self.eventfd = os.eventfd(0)

    def introduce(self) -> None:
        self.control.send({"type": "segment", "client": CLIENT, "number": 0}, [self.memory.fd])
        self.control.send({"type": "channels", "client": CLIENT, "first": 0, "kind": "thread"}, [self.eventfd])

    def write(self, data: bytes) -> None:
        if data:
            os.write(self.writing, data)

    def send(self, gen: int) -> None:
        """A descriptor of each slot, filled for use number `gen`."""
        for slot in range(SLOTS):
            self.memory.words[slot * UNITS * WORDS_PER_UNIT + GEN] = gen
            self.write(DESCRIPTOR.pack(CLIENT, 0, 0, slot * UNITS, gen, time.monotonic_ns(), 0))


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.writing)
    os.close(pipe.eventfd)
    pipe.control.close()


@pytest.mark.parametrize("gen", [1, 100, 1 << 31])
@pytest.mark.parametrize("after", [True, False])
def test_descriptors_are_found_wherever_they_lie_among_rubbish(pipe: Pipe, gen: int, after: bool) -> None:
    pipe.introduce()
    for shift in range(DESCRIPTOR.size + 1):
        pipe.write(bytes(shift))
        pipe.send(gen)
        if after:  # so that all of it together could be whole descriptors
            pipe.write(bytes(-shift % DESCRIPTOR.size))
        assert len(pipe.inbox.receive(1.0)) == SLOTS, shift


def test_descriptors_that_come_before_their_memory_wait_for_it(pipe: Pipe) -> None:
    pipe.send(7)
    assert pipe.inbox.receive(0.0) == []
    pipe.write(b"rubbish")
    assert pipe.inbox.receive(0.0) == []
    pipe.introduce()
    assert len(pipe.inbox.receive(1.0)) == SLOTS
    assert pipe.inbox.receive(0.0) == []


def test_descriptors_of_who_has_gone_or_of_slots_filled_again_are_ignored(pipe: Pipe) -> None:
    pipe.introduce()
    pipe.send(7)
    pipe.send(8)
    assert len(pipe.inbox.receive(1.0)) == SLOTS  # of the later use
    pipe.control.send({"type": "gone", "client": CLIENT})
    pipe.send(9)
    assert pipe.inbox.receive(1.0) == []
    assert pipe.inbox.receive(0.0) == []

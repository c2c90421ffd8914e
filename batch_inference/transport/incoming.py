"""Incoming: a request as its worker sees it, in its caller's slot.

Nothing in a descriptor or a header is believed: places are checked against the segment, and what does not fit is
ignored, so a client that writes nonsense hurts only itself.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, Protocol

from batch_inference.errors import TransportError
from batch_inference.speedups import in_c
from batch_inference.transport import codec
from batch_inference.transport.channel import FarChannel
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import (
    DESCRIPTOR,
    DROPPED,
    ERROR,
    FINISHED,
    FINISHED_OFFSET,
    GIVEN_UP,
    HEADER_SIZE,
    OK,
    RUNS_ALONE,
    SENT,
    STARTED,
    STARTED_OFFSET,
    STATUS,
    TICK,
    UNIT,
    WORDS_PER_UNIT,
    reply_at,
)

Fields = tuple[int, ...]
"""Of a descriptor, or of the client's half of a header, in the order of wire.py."""


class Sink(Protocol):
    """Where a worker's requests came from, as far as an answer has to know."""

    posted: set[FarChannel]  # channels to flush at the end of the batch

    def reply_elsewhere(self, peer: Peer, slot: tuple[int, int, int, int], encoded: Any) -> None: ...


class Peer:
    """A client as its worker sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: dict[int, Segment] = {}
        self.channels: dict[int, FarChannel] = {}
        self.gone = False


@in_c
class Incoming:
    """A request in its caller's slot, until it has been answered there."""

    __slots__ = (
        "peer",
        "arrived",
        "deadline",
        "alone",
        "args",
        "size",
        "kind",
        "_inbox",
        "_segment",
        "_channel",
        "_number",
        "_unit",
        "_gen",
        "_start",
        "_length",
        "_room",
    )

    answers = 1  # how many calls it stands for in the statistics

    args: tuple[Any, ...]  # these three are set by who queues it
    size: int
    kind: Hashable

    def __init__(
        self, inbox: Sink, peer: Peer, segment: Segment, channel: FarChannel, descriptor: Fields, sent: Fields
    ) -> None:
        """`sent` is the client's half of the slot's header."""
        _, _, self._number, self._unit, self._gen, self.arrived, self.deadline = descriptor
        _, _, self._length, tries, self._room = sent
        self.alone = tries > 0  # a worker died under it: it must share no batch
        self.peer = peer
        self._inbox = inbox
        self._segment = segment
        self._channel = channel
        self._start = self._unit * UNIT

    def decode(self, lend: bool, takes: bool = False) -> tuple[tuple[Any, ...], codec.Layout | None]:
        """The arguments of the call, and their layout if they are plain; with `lend`, views of the caller's memory.

        With `takes`, a request whose decoding runs code of others (unpickling) is marked as `take` does.
        """
        segment, start, length = self._segment, self._start + HEADER_SIZE, self._length
        if start + length > segment.size:
            raise TransportError("a request claims to reach beyond its segment: the slot was overwritten")
        layout = codec.layout_at(segment.memory, start, length)
        if layout is None:
            if takes:
                self.take()
            value = codec.decode(segment.memory, start, length)
        else:
            value = layout.view(segment.memory, start) if lend else layout.copy(segment.memory, start)
        if type(value) is not tuple:
            raise TransportError("a request is not a tuple of arguments: the slot was overwritten")
        return value, layout

    def fresh_args(self, lend: bool) -> tuple[Any, ...]:
        """The arguments as they were sent, for another run."""
        return self.decode(lend)[0]

    def unwanted(self, now: int) -> bool:
        """Whether nobody waits for the answer any more. `now` is CLOCK_MONOTONIC in ns."""
        given_up = self._segment.words[self._unit * WORDS_PER_UNIT + GIVEN_UP] == self._gen
        return given_up or 0 < self.deadline < now or self.peer.gone

    def take(self) -> None:
        """Marks the request as the only one that the worker deals with, until `rest`: what dies now dies of it."""
        STARTED.pack_into(self._segment.memory, self._start + STARTED_OFFSET, RUNS_ALONE, 0, 0, self._gen)

    def rest(self) -> None:
        """Marks a request that was taken as one that waits."""
        STARTED.pack_into(self._segment.memory, self._start + STARTED_OFFSET, 0, 0, 0, 0)

    def claim(self, now: int, alone: bool) -> bool:
        """Marks the request as one that the model may see from `now` on (CLOCK_MONOTONIC in ns), it only if `alone`.

        False, and nothing is marked, if nobody waits for it any more.
        """
        segment, gen, deadline = self._segment, self._gen, self.deadline
        given_up = segment.words[self._unit * WORDS_PER_UNIT + GIVEN_UP] == gen
        if given_up or (deadline and deadline < now) or self.peer.gone:  # as `unwanted`, but without the call
            return False
        after = (now - self.arrived) // TICK & 0xFFFF_FFFF
        STARTED.pack_into(segment.memory, self._start + STARTED_OFFSET, RUNS_ALONE if alone else 0, 0, after, gen)
        return True

    def runs(self, alone: bool) -> None:
        """Marks a request that was claimed, and has no reply yet, as the only one that the model has, or not so."""
        self._segment.words[self._unit * WORDS_PER_UNIT + STATUS] = RUNS_ALONE if alone else 0

    def reply(self, encoded: codec.Encoded, status: int = OK) -> None:
        """Writes an encoded value into the caller's slot, or beside it if it does not fit, and wakes the caller."""
        if self.peer.gone:
            return
        segment, size = self._segment, len(encoded)
        start = self._start + reply_at(self._length)
        if size > self._room or start + size > segment.size:
            self._inbox.reply_elsewhere(self.peer, (self._number, self._unit, self._gen, status), encoded)
            return
        memory = segment.memory
        codec.write(encoded, memory, start)
        # From here on the slot is the client's again.
        FINISHED.pack_into(memory, self._start + FINISHED_OFFSET, size, time.monotonic_ns(), status, self._gen)
        if self._channel.post(self._number, self._unit):
            self._inbox.posted.add(self._channel)

    def fail(self, error: BaseException) -> None:
        self.reply(codec.encode_error(error), ERROR)

    def drop(self) -> None:
        """Gives the slot back unanswered: nobody waits."""
        self.reply(b"", DROPPED)


@in_c
def open_requests(inbox: Sink, peers: dict[int, Peer], descriptors: bytes, opened: list[Incoming]) -> bytes:
    """Appends the requests in slots that are here to `opened`; the descriptors of those whose client, memory or channel
    is not."""
    now, unknown = time.monotonic_ns(), b""
    for at in range(0, len(descriptors) - DESCRIPTOR.size + 1, DESCRIPTOR.size):
        fields = DESCRIPTOR.unpack_from(descriptors, at)
        client, channel, number, unit, gen, arrived, _ = fields
        if not 0 < arrived <= now:
            continue
        try:
            peer = peers[client]
            segment, far = peer.segments[number], peer.channels[channel]
        except KeyError:
            unknown += descriptors[at : at + DESCRIPTOR.size]
            continue
        if unit < segment.units:
            sent = SENT.unpack_from(segment.memory, unit * UNIT)
            if sent[0] == gen:
                opened.append(Incoming(inbox, peer, segment, far, fields, sent))
    return unknown

"""Slot: a piece of shared memory that carries one request and its reply, as its client sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_inference.speedups import in_c
from batch_inference.transport import codec
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import (
    DESCRIPTOR,
    DONE_GEN,
    FINISHED,
    FINISHED_OFFSET,
    HEADER_SIZE,
    OK,
    QUADS_PER_UNIT,
    REPLY_SIZE,
    SENT,
    UNIT,
    WORDS_PER_UNIT,
    reply_at,
    slot_key,
)


@in_c
class Slot:
    """The fields below `gen` belong to the client, and so do the methods: one thread at a time calls them."""

    __slots__ = (
        "segment",  # Segment
        "number",  # of the segment, within the arena
        "offset",  # bytes from the segment's start
        "order",  # log2 of the size
        "unit",  # offset in units
        "word",  # index of the header's first word in segment.words
        "quad",  # index of the header's first quad in segment.quads
        "key",  # wire.slot_key
        "gen",  # of the present use
        "channel",  # the channel on which its caller is woken
        "worker",  # the peer it was sent to, or None while no worker is ready
        "arrived",  # ns
        "deadline",  # ns, 0 for none
        "length",  # bytes of the encoded request
        "reply_at",  # where its reply starts, from offset; follows from length, as does
        "room",  # bytes for the reply
        "deaths",  # deaths.Fatality, for each worker that died with it in the running batch
        "error",  # exception that this process set in place of a reply
        "elsewhere",  # a reply that did not fit, as (Segment, length)
        "abandoned",  # nobody waits: free it when the worker is through with it
    )

    def __init__(self, segment: Segment, number: int, offset: int, order: int) -> None:
        self.segment = segment
        self.number = number
        self.offset = offset
        self.order = order
        self.unit = offset // UNIT
        self.word = offset // UNIT * WORDS_PER_UNIT
        self.quad = offset // UNIT * QUADS_PER_UNIT
        self.key = slot_key(number, offset // UNIT)
        self.gen = 0
        self.channel: Any = None
        self.worker: Any = None
        self.arrived = self.deadline = 0
        self._fit(0)
        self.deaths: tuple[Any, ...] = ()
        self.error: BaseException | None = None
        self.elsewhere: tuple[Segment, int] | None = None
        self.abandoned = False

    def __repr__(self) -> str:
        return f"<Slot {self.number}:{self.offset} of {1 << self.order} bytes, gen {self.gen}>"

    def _fit(self, length: int) -> None:
        """Divides the slot for a request of `length` bytes and its reply."""
        self.length, self.reply_at = length, reply_at(length)
        self.room = (1 << self.order) - self.reply_at

    def write(self, encoded: codec.Encoded) -> None:
        """Writes a request, and the client's half of the header. ValueError if the slot is too small for it."""
        memory, start, size = self.segment.memory, self.offset, len(encoded)
        if self.length != size:  # of its last use
            self._fit(size)
        if self.room < 0:
            raise ValueError(f"a request of {size} bytes does not fit {self!r}")
        SENT.pack_into(memory, start, self.gen, 0, size, 0, self.room)
        codec.write(encoded, memory, start + HEADER_SIZE)

    def descriptor(self, client: int) -> bytes:
        """What tells a worker of the request."""
        return DESCRIPTOR.pack(
            client, self.channel.number, self.number, self.unit, self.gen, self.arrived, self.deadline
        )

    def reply(self, rare: Callable[[Slot], Any]) -> Any:
        """The reply to a request that is done, if it is a result in the slot itself; what `rare` says for all else."""
        memory = self.segment.memory
        size, _, status, _ = FINISHED.unpack_from(memory, self.offset + FINISHED_OFFSET)
        if status == OK and self.error is None and self.elsewhere is None:
            return codec.decode(memory, self.offset + self.reply_at, size)
        return rare(self)

    def replies_within(self, most: int) -> bool:
        """Whether the reply to a request that is done takes no more than `most` bytes in the slot, or is an error."""
        return self.error is not None or (self.elsewhere is None and self.reply_size <= most)

    def forget(self) -> None:
        """Lets go of what became of its last use."""
        if self.error is not None or self.elsewhere is not None or self.abandoned or self.deaths:
            self.error = self.elsewhere = None
            self.abandoned, self.deaths = False, ()

    @property
    def size(self) -> int:
        return 1 << self.order

    @property
    def reply_size(self) -> int:
        """Bytes of the encoded reply in the slot, once it is done."""
        return self.segment.quads[self.quad + REPLY_SIZE]

    @property
    def done(self) -> bool:
        """Whether there is a reply, or an error in its place."""
        return self.segment.words[self.word + DONE_GEN] == self.gen or self.error is not None

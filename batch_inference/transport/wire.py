"""What both sides of the shared memory agree on: the descriptor, the slot header and the status words.

A *descriptor* is 32 bytes on a request pipe and names a slot. The slot's *header* is the truth about the request: a
wake-up only says "look". Every header word has one writer:

    word   0  gen         client    which use of the slot this is; unique within the client
    word   1  given_up    client    equal to gen once nobody waits for the reply
    quad   1  length      client    bytes of the encoded request, which starts HEADER_SIZE after the slot's start
    quad   2  tries       client    batches with the request under which a worker died; unless 0 it must run alone
    quad   3  reply_room  client    bytes the reply may take, from `reply_at(length)` after the slot's start
    quad   4  reply_size  worker    bytes of the encoded reply
    quad   5  done_at     worker    CLOCK_MONOTONIC in ns, when the reply was written
    word  12  status      worker    one of the status words below; RUNS_ALONE while the model has it in a batch of one
    word  13  done_gen    worker    equal to gen once status and reply stand
    word  14  started_after worker  how long after its arrival the model got it, in units of 10 us
    word  15  started_gen worker    equal to gen once the model may have seen the request

(a word is 4 bytes, a quad 8.) The client writes its half at once. The worker writes twice, STARTED and FINISHED below;
what tells the other side that the rest is there, done_gen or started_gen, is stored last.
"""

from __future__ import annotations

import struct

VERSION = 1
"""Of everything in this module and of the control messages; both sides of a connection compare it."""

UNIT = 64
"""Slots start at multiples of this many bytes, and so do the tensors in them."""

HEADER_SIZE = 64
WORDS_PER_UNIT, QUADS_PER_UNIT = UNIT // 4, UNIT // 8

GEN, GIVEN_UP, STATUS, DONE_GEN, STARTED_AFTER, STARTED_GEN = 0, 1, 12, 13, 14, 15
LENGTH, TRIES, REPLY_ROOM, REPLY_SIZE, DONE_AT = range(1, 6)

TICK = 10_000
"""Nanoseconds in a unit of started_after."""

OK, ERROR, DROPPED, RUNS_ALONE = 1, 2, 3, 4

DESCRIPTOR = struct.Struct("=IHHIIqq")
"""client, channel, segment, unit (the slot's start / UNIT), gen, arrival (ns), deadline (ns; 0: none)"""

CLIENT = struct.Struct("=I")
"""The first field of a descriptor."""

SENT = struct.Struct("=2I3Q")
"""The client's half of the header: gen, given_up, length, tries, reply_room."""

STARTED, STARTED_OFFSET = struct.Struct("=4I"), 4 * STATUS
"""What a worker writes when the model gets a request, and where: status, 0 for done_gen, started_after, started_gen."""

FINISHED, FINISHED_OFFSET = struct.Struct("=2Q2I"), 8 * REPLY_SIZE
"""What a worker writes when the reply stands, and where: reply_size, done_at, status, done_gen."""

ENTRY = struct.Struct("=HHI")
"""What a loop pipe carries per reply: segment, 0, unit; as one quad it is `slot_key(segment, unit)`."""

PIPE_BUF = 4096
"""Writes to a pipe of at most this many bytes are atomic."""

DESCRIPTORS_PER_WRITE = PIPE_BUF // DESCRIPTOR.size
ENTRIES_PER_WRITE = PIPE_BUF // ENTRY.size


def slot_key(segment: int, unit: int) -> int:
    """A slot's name within its client; the little-endian reading of its ENTRY."""
    return segment | unit << 32


def align(n: int) -> int:
    """`n` rounded up to a multiple of UNIT."""
    return (n + UNIT - 1) & -UNIT


def reply_at(length: int) -> int:
    """Where the reply to a request of `length` bytes may start, relative to the slot's start."""
    return HEADER_SIZE + (length + UNIT - 1 & -UNIT)

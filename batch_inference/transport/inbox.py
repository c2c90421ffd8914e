"""The worker's end of the transport: the memory and channels of its clients, the requests that arrive, their replies.

A descriptor may overtake the segment or channel that it names, since those come by way of the supervisor: it is
*parked* until they are here. Nothing in a descriptor or a header is believed: places are checked against the segment,
and what does not fit is ignored, so a client that writes nonsense hurts only itself.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol

from batch_inference.errors import TransportError
from batch_inference.transport import codec, segment
from batch_inference.transport.channel import (
    FarChannel,
    FarPipeChannel,
    FarThreadChannel,
    LocalRequestPipe,
    read_waiting,
)
from batch_inference.transport.handshake import Connection, close_all
from batch_inference.transport.scarce import explanation
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import (
    CLIENT,
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

Descriptor = tuple[int, ...]

MAX_PARKED = 1 << 16
"""Descriptors that wait for their segment; in more than so many, the oldest are nobody's."""


class Peer:
    """A client as its worker sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: dict[int, Segment] = {}
        self.channels: dict[int, FarChannel] = {}
        self.gone = False


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
        self, inbox: Inbox, peer: Peer, segment: Segment, channel: FarChannel, descriptor: Descriptor, sent: Descriptor
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
        if type(encoded) is bytes:
            memory[start : start + size] = encoded
        else:
            encoded.write(memory, start)  # type: ignore[union-attr]
        # From here on the slot is the client's again.
        FINISHED.pack_into(memory, self._start + FINISHED_OFFSET, size, time.monotonic_ns(), status, self._gen)
        if self._channel.post(self._number, self._unit):
            self._inbox.posted.add(self._channel)

    def fail(self, error: BaseException) -> None:
        self.reply(codec.encode_error(error), ERROR)

    def drop(self) -> None:
        """Gives the slot back unanswered: nobody waits."""
        self.reply(b"", DROPPED)


class Inbox(Protocol):
    """Where a worker's requests come from."""

    draining: bool  # no more will come: what waits is not to wait for company
    quitting: bool
    posted: set[FarChannel]

    def receive(self, timeout: float | None) -> list[Incoming]:
        """The requests that have arrived; waits up to `timeout` seconds for one (None: for as long as it takes).

        Returns early, with none, when something else is to be heard of.
        """
        ...

    def reply_elsewhere(self, peer: Peer, slot: tuple[int, int, int, int], encoded: Any) -> None: ...

    def flush(self) -> None:
        """Sends the wake-ups of the replies that were written."""
        ...


class RemoteInbox:
    """Of a worker process: a request pipe, and a control connection to the supervisor."""

    def __init__(self, pipe: int, control: Connection) -> None:
        self.draining = self.quitting = False
        self.posted: set[FarChannel] = set()
        self._pipe = pipe
        self._control = control
        self._control_fd = control.fileno()
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._poll.register(self._control_fd, select.POLLIN)
        self._peers: dict[int, Peer] = {}
        self._gone: set[int] = set()
        self._parked: list[Descriptor] = []
        self._full: list[FarChannel] = []  # channels that could not take all wake-ups

    def receive(self, timeout: float | None) -> list[Incoming]:
        if self._full or self._control.unsent:
            commands, requests = self._wait_for_room(timeout)
        else:
            # poll is quicker, but its waits are whole milliseconds.
            if timeout:
                ready = select.select([self._pipe, self._control_fd], [], [], timeout)[0]
                commands, requests = self._control_fd in ready, self._pipe in ready
            else:
                commands = requests = False
                for fd, _ in self._poll.poll(timeout):
                    if fd == self._pipe:
                        requests = True
                    else:
                        commands = True
        opened: list[Incoming] = []
        if commands:
            self._obey()
            parked, self._parked = self._parked, []
            self._open(parked, opened)
        if requests:
            self._open_waiting(read_waiting(self._pipe), opened)
        return opened

    def _open_waiting(self, data: bytes, opened: list[Incoming]) -> None:
        """Opens the requests whose descriptors were read from the pipe."""
        size, before = DESCRIPTOR.size, len(opened)
        excess = len(data) % size
        self._open(DESCRIPTOR.iter_unpack(data[:-excess] if excess else data), opened)
        if (len(opened) - before) * size != len(data):
            # Some are early or late, or somebody wrote what is no descriptor: then those of others may lie between the
            # places where they should.
            places = sorted(place for client in self._peers for place in occurrences(CLIENT.pack(client), data))
            misplaced = [place for place in places if place % size and place + size <= len(data)]
            parked, self._parked = self._parked, []
            self._open([DESCRIPTOR.unpack_from(data, place) for place in misplaced], opened)
            self._parked = parked

    def _wait_for_room(self, timeout: float | None) -> tuple[bool, bool]:
        """Waits for commands, requests, and room for what did not fit: with poll, as select knows no large numbers."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._control, select.POLLIN | (select.POLLOUT if self._control.unsent else 0))
        for channel in self._full:
            poll.register(channel, select.POLLOUT)
        ready = dict(poll.poll(None if timeout is None else timeout * 1e3))
        if any(event & select.POLLOUT for event in ready.values()):
            self.flush()
        return bool(ready.get(self._control.fileno(), 0) & ~select.POLLOUT), self._pipe in ready

    def _open(self, descriptors: Iterable[Descriptor], opened: list[Incoming]) -> None:
        """Adds the requests in slots that are here; descriptors whose memory or channel has yet to come are parked."""
        now = time.monotonic_ns()
        for descriptor in descriptors:
            client, channel, number, unit, gen, arrived, _ = descriptor
            if not 0 < arrived <= now:
                continue
            try:
                peer = self._peers[client]
                memory, far = peer.segments[number], peer.channels[channel]
            except KeyError:
                if client not in self._gone:
                    self._parked.append(descriptor)
                continue
            if unit < memory.units:
                sent = SENT.unpack_from(memory.memory, unit * UNIT)
                if sent[0] == gen:
                    opened.append(Incoming(self, peer, memory, far, descriptor, sent))
        if self._parked:
            del self._parked[:-MAX_PARKED]

    def reply_elsewhere(self, peer: Peer, slot: tuple[int, int, int, int], encoded: Any) -> None:
        number, unit, gen, status = slot
        reply = segment.create(max(1, len(encoded)))
        try:
            codec.write(encoded, reply.memory, 0)
            message = {
                "type": "reply",
                "client": peer.number,
                "segment": number,
                "unit": unit,
                "gen": gen,
                "status": status,
                "size": len(encoded),
            }
            self._control.send(message, [reply.fd])
        finally:
            reply.close()

    def flush(self) -> None:
        if self._control.unsent:
            self._control.flush()
        if self._full:
            self.posted.update(self._full)  # each once
        if self.posted:
            self._full = [channel for channel in self.posted if not channel.flush()]
            self.posted.clear()

    def _obey(self) -> None:
        while (received := self._control.receive()) is not None:
            message, fds = received
            if message["type"] == "quit":
                self.draining = self.quitting = True
            elif message["type"] == "drain":
                self.draining = True
            elif message["type"] == "gone":
                self._forget(message["client"])
            elif message["type"] in ("limits", "ping"):
                pass  # a worker that waits is to look again: for limits, or only to show that it can
            else:
                self._attach(message, fds)

    def _attach(self, message: dict[str, Any], fds: list[int]) -> None:
        number = message["client"]
        if number in self._gone:
            close_all(fds)
            return
        peer = self._peers.setdefault(number, Peer(number))
        try:
            if message["type"] == "segment":
                peer.segments[message["number"]] = segment.attach(fds.pop())
            else:
                far = FarThreadChannel if message["kind"] == "thread" else FarPipeChannel
                for number_of_channel in range(message["first"], message["first"] + len(fds)):
                    peer.channels[number_of_channel] = far(fds.pop(0))
        except (TransportError, OSError) as error:  # the supervisor lets pass what is right: we lack something
            close_all(fds)
            self._forget(number)
            why = explanation(error, "a worker process") or f"a worker process cannot map its memory ({error})"
            self._control.send({"type": "unable", "client": number, "why": why})

    def _forget(self, number: int) -> None:
        self._gone.add(number)
        self._parked = [descriptor for descriptor in self._parked if descriptor[0] != number]
        peer = self._peers.pop(number, None)
        if peer is None:
            return
        peer.gone = True
        for channel in peer.channels.values():
            self.posted.discard(channel)
            if channel in self._full:
                self._full.remove(channel)
            channel.close()
        # The mappings go when the last request that was read from them does.


class LocalInbox:
    """Of a worker that is a thread: the one client is this process itself."""

    def __init__(
        self, pipe: LocalRequestPipe, peer: Peer, deliver: Callable[[tuple[int, int, int, int], Segment, int], None]
    ) -> None:
        self.draining = self.quitting = False
        self.posted: set[FarChannel] = set()
        self._pipe = pipe
        self._peer = peer
        self._deliver = deliver

    def receive(self, timeout: float | None) -> list[Incoming]:
        peer, opened = self._peer, []
        for descriptor in self._pipe.read(timeout):
            _, channel, number, unit, gen, _, _ = descriptor
            if gen:
                memory, far = peer.segments[number], peer.channels[channel]
                sent = SENT.unpack_from(memory.memory, unit * UNIT)
                opened.append(Incoming(self, peer, memory, far, descriptor, sent))
        return opened

    def reply_elsewhere(self, peer: Peer, slot: tuple[int, int, int, int], encoded: Any) -> None:
        reply = segment.private(max(1, len(encoded)))
        codec.write(encoded, reply.memory, 0)
        self._deliver(slot, reply, len(encoded))

    def flush(self) -> None:
        for channel in self.posted:
            channel.flush()
        self.posted.clear()


def occurrences(part: bytes, data: bytes) -> Iterator[int]:
    """Where in `data` a `part` lies."""
    place = data.find(part)
    while place >= 0:
        yield place
        place = data.find(part, place + 1)


def lowest(fd: int) -> int:
    """Moves a descriptor to the lowest free number: select takes none above 1023, and low ones faster."""
    import fcntl

    low = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return low

"""The worker's end of the transport: where its clients' requests come in, and what else the worker hears of.

A descriptor may overtake the segment or channel that it names, since those come by way of the supervisor: it is
*parked* until they are here.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from batch_inference.errors import TransportError
from batch_inference.speedups import in_c
from batch_inference.transport import codec, segment
from batch_inference.transport.channel import (
    FarChannel,
    FarPipeChannel,
    FarThreadChannel,
    LocalRequestPipe,
    read_waiting,
)
from batch_inference.transport.handshake import Connection, close_all
from batch_inference.transport.incoming import Incoming, Peer, Sink, open_requests
from batch_inference.transport.scarce import explanation
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import CLIENT, DESCRIPTOR

MAX_PARKED = 1 << 16
"""Descriptors that wait for their segment; in more than so many, the oldest are nobody's."""


class Inbox(Sink, Protocol):
    """Where a worker's requests come from."""

    draining: bool  # no more will come: what waits is not to wait for company
    quitting: bool

    def receive(self, timeout: float | None) -> list[Incoming]:
        """The requests that have arrived; waits up to `timeout` seconds for one (None: for as long as it takes).

        Returns early, with none, when something else is to be heard of.
        """
        ...

    def flush(self) -> None:
        """Sends the wake-ups of the replies that were written."""
        ...


@in_c
def read_or_hear(pipe: int, control: int, timeout: float | None) -> tuple[bytes, bool]:
    """Waits up to `timeout` seconds (None: for as long as it takes) until there is something in a request pipe, or on a
    control connection; what waits in the pipe, and whether there is something to hear. Both numbers are below 1024."""
    ready = select.select([pipe, control], [], [], timeout)[0]
    return read_waiting(pipe) if pipe in ready else b"", control in ready


class RemoteInbox:
    """Of a worker process: a request pipe, and a control connection to the supervisor."""

    def __init__(self, pipe: int, control: Connection) -> None:
        self.draining = self.quitting = False
        self.posted: set[FarChannel] = set()
        self._pipe = pipe
        self._control = control
        self._control_fd = control.fileno()
        self._peers: dict[int, Peer] = {}
        self._gone: set[int] = set()
        self._parked = b""  # descriptors
        self._full: list[FarChannel] = []  # channels that could not take all wake-ups

    def receive(self, timeout: float | None) -> list[Incoming]:
        if self._full or self._control.unsent:
            data, commands = self._wait_for_room(timeout)
        else:
            data, commands = read_or_hear(self._pipe, self._control_fd, timeout)
        opened: list[Incoming] = []
        if commands:
            self._obey()
            parked, self._parked = self._parked, b""
            self._open(parked, opened)
        if data:
            before = len(opened)
            unknown = open_requests(self, self._peers, data, opened)
            if (len(opened) - before) * DESCRIPTOR.size != len(data):
                self._park(unknown)
                self._open_misplaced(data, opened)
        return opened

    def _open_misplaced(self, data: bytes, opened: list[Incoming]) -> None:
        """Of what was read from the pipe, some is early or late, or somebody wrote what is no descriptor: then those of
        others may lie between the places where they should."""
        size = DESCRIPTOR.size
        places = sorted(place for client in self._peers for place in occurrences(CLIENT.pack(client), data))
        misplaced = [data[place : place + size] for place in places if place % size and place + size <= len(data)]
        parked, self._parked = self._parked, b""
        self._open(b"".join(misplaced), opened)
        self._parked = parked

    def _wait_for_room(self, timeout: float | None) -> tuple[bytes, bool]:
        """As `read_or_hear`, or until there is room for what did not fit: with poll, which knows large numbers."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._control, select.POLLIN | (select.POLLOUT if self._control.unsent else 0))
        for channel in self._full:
            poll.register(channel, select.POLLOUT)
        ready = dict(poll.poll(None if timeout is None else timeout * 1e3))
        if any(event & select.POLLOUT for event in ready.values()):
            self.flush()
        commands = bool(ready.get(self._control.fileno(), 0) & ~select.POLLOUT)
        return read_waiting(self._pipe) if self._pipe in ready else b"", commands

    def _open(self, descriptors: bytes, opened: list[Incoming]) -> None:
        """Adds the requests in slots that are here; descriptors whose memory or channel has yet to come are parked."""
        unknown = open_requests(self, self._peers, descriptors, opened)
        if unknown:
            self._park(unknown)

    def _park(self, descriptors: bytes) -> None:
        """Keeps descriptors for when there is more; those of clients that have left are nobody's."""
        size = DESCRIPTOR.size
        parts = [descriptors[at : at + size] for at in range(0, len(descriptors), size)]
        self._parked += b"".join([part for part in parts if CLIENT.unpack_from(part)[0] not in self._gone])
        self._parked = self._parked[-MAX_PARKED * size :]

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
        parked, self._parked = self._parked, b""
        self._park(parked)
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
        self._peers = {peer.number: peer}
        self._deliver = deliver

    def receive(self, timeout: float | None) -> list[Incoming]:
        opened: list[Incoming] = []
        open_requests(self, self._peers, self._pipe.read(timeout), opened)
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

"""Ledger: which requests of a client are outstanding, and how many each worker has of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from batch_inference.board import MAX_WORKERS, outstanding
from batch_inference.speedups import in_c
from batch_inference.transport.channel import NearChannel
from batch_inference.transport.slot import Slot


class Peer(Protocol):
    """A worker to which requests can be sent."""

    index: int

    def send(self, descriptors: bytes) -> None:
        """Sends descriptors, one write's worth at most. Never blocks."""
        ...


class Board(Protocol):
    """Where a client counts. Both change when another supervisor takes over."""

    cells: Any
    row: int  # the index of this client's first cell


@in_c
class Ledger:
    """Counts on the board as well. Has no lock: its user holds one for every call."""

    def __init__(self, board: Board) -> None:
        self.requests: dict[int, Slot] = {}  # that are outstanding, by their slots' keys
        self.ready: list[Peer] = []
        self._board = board
        self._counts = [0] * MAX_WORKERS

    def enter(self, slot: Slot, channel: NearChannel, deadline: float | None) -> Peer | None:
        """Notes that a request is outstanding from now on; the worker to send it to, if any is ready."""
        self._note(slot, channel, deadline)
        return self.assign(slot)

    def enter_all(
        self, entries: Sequence[tuple[Slot, float | None]], channel: NearChannel, client: int
    ) -> dict[Peer, list[bytes]]:
        """The same for several slots, each with its deadline; the descriptors to send to each worker."""
        for slot, deadline in entries:
            self._note(slot, channel, deadline)
        return self.assign_all([slot for slot, _ in entries], client)

    def _note(self, slot: Slot, channel: NearChannel, deadline: float | None) -> None:
        slot.channel, slot.arrived = channel, time.monotonic_ns()
        slot.deadline = 0 if deadline is None else int(deadline * 1e9)
        self.requests[slot.key] = slot

    def assign(self, slot: Slot) -> Peer | None:
        """The worker that gets a request now, if any is ready."""
        ready = self.ready
        if not ready:
            slot.worker = None
            return None
        slot.worker = peer = ready[0] if len(ready) == 1 else self._least_loaded()
        self.count(peer, 1)
        return peer

    def _least_loaded(self) -> Peer:
        """The ready worker with least outstanding work, over all clients; among equals each in turn."""
        cells, ready = self._board.cells, self.ready
        peer = min(ready, key=lambda peer: outstanding(cells, peer.index))
        ready.remove(peer)
        ready.append(peer)
        return peer

    def assign_all(self, slots: Iterable[Slot], client: int) -> dict[Peer, list[bytes]]:
        """The same for several slots; the descriptors to send to each worker."""
        shares: dict[Peer, list[bytes]] = {}
        for slot in slots:
            peer = self.assign(slot)
            if peer is not None:
                shares.setdefault(peer, []).append(slot.descriptor(client))
        return shares

    def leave(self, slot: Slot) -> None:
        """Notes that a request is not outstanding any more; nothing if it is not."""
        if self.requests.pop(slot.key, None) is not None and slot.worker is not None:
            self.count(slot.worker, -1)

    def leave_all(self, slots: Iterable[Slot]) -> None:
        """The same for several slots."""
        for slot in slots:
            self.leave(slot)

    def count(self, peer: Peer, change: int) -> None:
        """Notes that a worker has so many requests more, or less."""
        index, board = peer.index, self._board
        self._counts[index] = count = self._counts[index] + change
        board.cells[board.row + index] = count

"""A worker without a process: requests in slots of private memory, an inbox that hands them out in rounds, and a model
that is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batch_inference import board
from batch_inference.batcher import Batcher, ConcatBatcher
from batch_inference.payload import Recipe
from batch_inference.policy import FixedDelay, Policy
from batch_inference.transport import codec, segment
from batch_inference.transport.channel import LocalKeyChannel
from batch_inference.transport.incoming import Incoming, Peer, open_requests
from batch_inference.transport.wire import (
    DESCRIPTOR,
    DONE_GEN,
    ERROR,
    GIVEN_UP,
    HEADER_SIZE,
    OK,
    REPLY_SIZE,
    RUNS_ALONE,
    SENT,
    STATUS,
    UNIT,
    WORDS_PER_UNIT,
    align,
    reply_at,
)
from batch_inference.worker import Worker

ROOM = 1 << 16  # bytes for a reply
ROW = board.worker_row(0)


class Sent:
    """A request in its slot, as its caller sees it."""

    def __init__(self, memory: segment.Segment, unit: int, size: int) -> None:
        self._memory = memory
        self.unit = unit
        self._start = unit * UNIT
        self._size = size

    @property
    def _status(self) -> int:
        return self._memory.words[self.unit * WORDS_PER_UNIT + STATUS]

    @property
    def done(self) -> bool:
        return self._memory.words[self.unit * WORDS_PER_UNIT + DONE_GEN] == 1

    @property
    def runs_alone(self) -> bool:
        return not self.done and self._status == RUNS_ALONE

    def give_up(self) -> None:
        self._memory.words[self.unit * WORDS_PER_UNIT + GIVEN_UP] = 1

    @property
    def result(self) -> Any:
        """The reply; raises the error that it is."""
        assert self.done, "not answered"
        at = self._start + reply_at(self._size)
        size = self._memory.quads[self._start // 8 + REPLY_SIZE]
        if self._status == ERROR:
            raise codec.decode_error(self._memory.memory, at, size)
        assert self._status == OK
        return codec.decode(self._memory.memory, at, size)

    @property
    def error(self) -> BaseException | None:
        try:
            _ = self.result
        except BaseException as error:
            return error
        return None


class Bench:
    """Runs a worker over rounds of requests: what one `receive` of the worker gives."""

    def __init__(
        self,
        run: Callable[..., Any],
        batcher: Batcher | None = None,
        max_batch_size: int = 32,
        isolate_errors: bool = True,
        policy: Policy | None = None,
    ) -> None:
        self.cells = segment.private(board.BOARD_SIZE).quads
        board.write_limits(self.cells, {"max_batch_size": max_batch_size})
        self.draining = self.quitting = False
        self.posted: set[Any] = set()
        self.waits: list[float | None] = []
        self._memory = segment.private(1 << 24)
        self._peer = Peer(0)
        self._peer.segments[0] = self._memory
        self._peer.channels[0] = LocalKeyChannel(0, lambda keys: None)
        self._unit = 0
        self._rounds: list[list[Incoming] | Callable[[], None]] = []
        model = type("Model", (), {"predict_batch": staticmethod(run)})()
        batcher, policy = batcher or ConcatBatcher(), policy or FixedDelay(0)
        recipe = Recipe(None, model, (), {}, batcher, policy, max_batch_size, isolate_errors, None)
        self.worker = Worker(model, recipe, self, self.cells, ROW)

    def send(self, requests: Sequence[tuple[Any, ...]], tries: int = 0) -> list[Sent]:
        """One more round of requests."""
        sent, descriptors, opened = [], b"", list[Incoming]()
        for args in requests:
            encoded, unit = codec.encode(args), self._unit
            size, start = len(encoded), unit * UNIT
            SENT.pack_into(self._memory.memory, start, 1, 0, size, tries, ROOM)
            codec.write(encoded, self._memory.memory, start + HEADER_SIZE)
            descriptors += DESCRIPTOR.pack(0, 0, 0, unit, 1, time.monotonic_ns(), 0)
            sent.append(Sent(self._memory, unit, size))
            self._unit += (reply_at(size) + align(ROOM)) // UNIT
        assert not open_requests(self, {0: self._peer}, descriptors, opened)
        self._rounds.append(opened)
        return sent

    def send_numbers(self, *numbers: int, tries: int = 0) -> list[Sent]:
        return self.send([(np.array([[number]]),) for number in numbers], tries)

    def send_together(self) -> None:
        """Makes one round of those so far."""
        self._rounds[:] = [[incoming for step in self._rounds if isinstance(step, list) for incoming in step]]

    def then(self, change: Callable[[], None]) -> None:
        """Does something before the next round."""
        self._rounds.append(change)

    def run(self) -> None:
        """Until every round is served."""
        self.draining = self.quitting = False
        self.worker.run()

    # what the worker asks of an inbox

    def receive(self, timeout: float | None) -> list[Incoming]:
        self.waits.append(timeout)
        while self._rounds:
            step = self._rounds.pop(0)
            if isinstance(step, list):
                return step
            step()
        self.quitting = True
        return []

    def flush(self) -> None:
        self.posted.clear()

    def reply_elsewhere(self, peer: Peer, slot: tuple[int, int, int, int], encoded: Any) -> None:
        raise AssertionError("a reply is larger than its room")

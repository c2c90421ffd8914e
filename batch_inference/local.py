"""The link to a worker that is a thread of this process (num_workers=0).

For debuggers, tests, and platforms that lack what worker processes need.

The same client, slots, codec and worker loop as with processes; only the channels are others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from batch_inference import payload
from batch_inference import statistics as board
from batch_inference.errors import ModelLoadError, WorkerDiedError
from batch_inference.link import Events
from batch_inference.payload import Recipe
from batch_inference.transport import segment
from batch_inference.transport.channel import (
    KeyChannel,
    LocalKeyChannel,
    LocalQueueChannel,
    LocalRequestPipe,
    LocalThreadChannel,
    NearChannel,
    WaitChannel,
)
from batch_inference.transport.inbox import LocalInbox, Peer
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import slot_key
from batch_inference.worker import Worker, warm_up

_LOOK = bytes(32)  # a descriptor of generation 0, which no request has: wakes the worker


class LocalLink:
    client_number = 0
    worker_count = 1
    row = board.client_row(0)
    index = 0  # as the one peer of itself

    def __init__(self, recipe: Recipe, limits: board.Limits, events: Events) -> None:
        self._recipe = recipe
        self._events = events
        self._pipe = LocalRequestPipe()
        self._peer = Peer(0)
        self._inbox = LocalInbox(self._pipe, self._peer, self._deliver_elsewhere)
        self.cells: Any = segment.private(board.BOARD_SIZE).quads
        self.cells[board.CLIENT_ROWS] = 1
        self.configure(limits)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="batch_inference-worker", daemon=True)

    def open(self) -> None:
        """Builds the model, in the thread that will run it; errors come by `host_failed`."""
        self._show(board.STARTING)
        self._thread.start()

    def make_segment(self, size: int) -> Segment:
        return segment.private(size)

    def announce_segment(self, number: int, new: Segment) -> None:
        self._peer.segments[number] = new

    def new_thread_channels(self) -> Sequence[WaitChannel]:
        return [self._enter(LocalThreadChannel)]

    def new_key_channel(self) -> KeyChannel:
        channel: LocalQueueChannel = self._enter(LocalQueueChannel)
        return channel

    def new_loop_channel(self, loop: Any, deliver: Callable[[list[int]], None]) -> NearChannel:
        def deliver_in_loop(keys: list[int]) -> None:
            try:
                loop.call_soon_threadsafe(deliver, keys)
            except RuntimeError:
                pass  # the loop was closed: its callers are gone

        channel: LocalKeyChannel = self._enter(lambda number: LocalKeyChannel(number, deliver_in_loop))
        return channel

    def retire(self, channel: Any, loop: Any) -> None:
        with self._lock:
            self._peer.channels.pop(channel.number, None)

    def send(self, peer: Any, descriptors: bytes) -> None:
        self._pipe.write(descriptors)

    def configure(self, limits: board.Limits) -> None:
        """Puts limits in force."""
        board.write_limits(self.cells, limits)
        self._pipe.write(_LOOK)

    def statistics(self) -> board.Statistics:
        return board.read_board(self.cells, self.worker_count, 0)

    def close(self) -> None:
        self._inbox.quitting = True
        self._pipe.write(_LOOK)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _enter(self, make: Callable[[int], Any]) -> Any:
        with self._lock:
            number = next(n for n in range(1 << 16) if n not in self._peer.channels)
            channel = self._peer.channels[number] = make(number)
        return channel

    def _deliver_elsewhere(self, slot: tuple[int, int, int, int], reply: Segment, size: int) -> None:
        number, unit, gen, status = slot
        self._events.reply_elsewhere(slot_key(number, unit), gen, status, reply, size)

    def _show(self, state: int) -> None:
        self.cells[board.WORKER_STATE] = state
        self.cells[board.WORKER_PID] = os.getpid()

    def _run(self) -> None:
        try:
            model = self._recipe.build()
            warm_up(model, self._recipe)
        except BaseException as error:
            failure = ModelLoadError(f"building the model raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._show(board.FAILED_STATE)
            self._events.host_failed(failure)
            return
        worker = Worker(model, self._recipe, self._inbox, self.cells, board.worker_row(0))
        self._show(board.READY)
        self._events.worker_ready(self)
        try:
            worker.run()
            payload.close_model(model)
            self._show(board.STOPPED)
        except BaseException as error:  # what would end a worker process must not leave callers waiting
            died = WorkerDiedError(
                f"{type(error).__name__} ended the thread that runs the model ({error}); with num_workers=0 it is not "
                "restarted: stop() and start() the host"
            )
            died.__cause__ = error
            self._show(board.FAILED_STATE)
            self._events.host_failed(died)

"""The link to a worker that is a thread of this process (num_workers=0).

For debuggers, tests, and platforms that lack what worker processes need.

The same client, slots, codec and worker loop as with processes; only the channels are others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from batch_inference import board, payload
from batch_inference.errors import ModelLoadError, WorkerDiedError
from batch_inference.link import Events
from batch_inference.payload import Recipe
from batch_inference.statistics import Statistics, read_board
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
from batch_inference.transport.inbox import LocalInbox
from batch_inference.transport.incoming import Peer
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import slot_key
from batch_inference.worker import Worker, warm_up

RETIRE_INTERVAL = 0.005  # seconds between two looks at what an old model still has to do
_LOOK = bytes(32)  # a descriptor of generation 0, which no request has: wakes the worker


class Lane:
    """One model in a thread of its own, and the pipe to it: what a worker process is elsewhere."""

    def __init__(self, link: LocalLink, index: int, recipe: Recipe, succeeds: bool = False) -> None:
        self.index = index
        self.succeeds = succeeds  # another, which goes on until `reload` has them change, or if this one does not load
        self.pipe = LocalRequestPipe()
        self.loaded = threading.Event()
        self.failure: ModelLoadError | None = None
        self._link = link
        self._recipe = recipe
        self._inbox = LocalInbox(self.pipe, link.here, link.deliver_elsewhere)
        self._thread = threading.Thread(target=self._run, name="batch_inference-worker", daemon=True)

    def start(self) -> None:
        """Builds the model, in the thread that will run it, and tells the client when it is ready."""
        self.show(board.STARTING)
        self._thread.start()

    def send(self, descriptors: bytes) -> None:
        self.pipe.write(descriptors)

    def drain(self) -> None:
        """No more will be sent: what waits is not to wait for company."""
        self._inbox.draining = True
        self.pipe.write(_LOOK)

    def end(self) -> None:
        """Returns when what was sent has been answered and the model is closed."""
        self._inbox.quitting = True
        self.drain()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def show(self, state: int) -> None:
        at = self.index * board.WORKER_CELLS
        self._link.cells[at + board.WORKER_STATE] = state
        self._link.cells[at + board.WORKER_PID] = os.getpid()

    def _run(self) -> None:
        try:
            model = self._recipe.build()
            warm_up(model, self._recipe)
        except BaseException as error:
            self.failure = ModelLoadError(f"building the model raised {type(error).__name__}: {error}")
            self.failure.__cause__ = error
            self.show(board.FAILED_STATE)
            self.loaded.set()
            if not self.succeeds:
                self._link.events.host_failed(self.failure)
            return
        worker = Worker(model, self._recipe, self._inbox, self._link.cells, board.worker_row(self.index))
        self.show(board.READY)
        if not self.succeeds:
            self._link.events.workers_change([self])
        self.loaded.set()
        try:
            worker.run()
            payload.close_model(model)
            self.show(board.STOPPED)
        except BaseException as error:  # what would end a worker process must not leave callers waiting
            died = WorkerDiedError(
                f"{type(error).__name__} ended the thread that runs the model ({error}); with num_workers=0 it is not "
                "restarted: stop() and start() the host"
            )
            died.__cause__ = error
            self.show(board.FAILED_STATE)
            self._link.events.host_failed(died)


class LocalLink:
    client_number = 0
    worker_count = 1
    row = board.client_row(0)

    def __init__(self, recipe: Recipe, limits: board.Limits, events: Events) -> None:
        self.events = events
        self.here = Peer(0)
        self.cells: Any = segment.private(board.BOARD_SIZE).quads
        self.cells[board.CLIENT_ROWS] = 1
        board.write_limits(self.cells, limits)
        self._closing = False
        self._lock = threading.Lock()
        self._lane = Lane(self, 0, recipe)  # that new requests go to
        self._lanes = [self._lane]  # and those that still answer, or load

    def open(self) -> None:
        """Builds the model; errors come by `host_failed`."""
        self._lane.start()

    def reload(self, recipe: Recipe) -> None:
        """Changes to the model of another recipe; ModelLoadError if it cannot be built, and the old one goes on."""
        with self._lock:
            used = {lane.index for lane in self._lanes}
            free = [index for index in range(board.MAX_WORKERS) if index not in used]
            if not free or not all(lane.loaded.is_set() for lane in self._lanes):
                raise ModelLoadError("another change of model is under way already: try again when it has ended")
            new = Lane(self, free[0], recipe, succeeds=True)
            self._lanes.append(new)
        new.start()
        new.loaded.wait()
        with self._lock:
            if new.failure is not None:
                self._lanes.remove(new)
                new.show(board.STOPPED)
                raise new.failure
            old, self._lane = self._lane, new
        self.events.workers_change([new], [old])
        threading.Thread(target=self._retire, args=(old,), name="batch_inference-retire", daemon=True).start()

    def _retire(self, lane: Lane) -> None:
        """Ends a lane when it has answered all that was meant for it."""
        lane.drain()
        while not self._closing and board.outstanding(self.cells, lane.index):
            time.sleep(RETIRE_INTERVAL)
        lane.end()
        with self._lock:
            self._lanes.remove(lane)

    def make_segment(self, size: int) -> Segment:
        return segment.private(size)

    def announce_segment(self, number: int, new: Segment) -> None:
        self.here.segments[number] = new

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
            self.here.channels.pop(channel.number, None)

    def configure(self, limits: board.Limits) -> None:
        """Puts limits in force."""
        board.write_limits(self.cells, limits)
        for lane in list(self._lanes):
            lane.pipe.write(_LOOK)

    def statistics(self) -> Statistics:
        return read_board(self.cells, 0)

    def drain(self) -> None:
        for lane in list(self._lanes):
            lane.drain()

    def close(self) -> None:
        self._closing = True
        for lane in list(self._lanes):
            lane.end()

    def _enter(self, make: Callable[[int], Any]) -> Any:
        with self._lock:
            number = next(n for n in range(1 << 16) if n not in self.here.channels)
            channel = self.here.channels[number] = make(number)
        return channel

    def deliver_elsewhere(self, slot: tuple[int, int, int, int], reply: Segment, size: int) -> None:
        number, unit, gen, status = slot
        self.events.reply_elsewhere(slot_key(number, unit), gen, status, reply, size)

"""One process's side of a host: encode, route, submit, wait, decode.

The client is the only authority on what is outstanding: a request is entered here before its descriptor is written,
and its slot is not used again before the worker is done with it (`done_gen == gen`) or known to be dead, also when
nobody waits for the reply any more. So whoever dies, what was not answered can be sent again, and no reply can land
in another's request.

Threads: any number call `predict` and `submit`; the link's monitor thread calls the `Events` methods. `_lock` guards
the ledger and `_over`; it is held for a few dictionary operations only. It is reentrant for the sake of a signal
handler that calls `stop()` in the middle of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from batch_inference import board, deaths
from batch_inference.awake import LONG, keep_awake
from batch_inference.deaths import Death, Fatality
from batch_inference.errors import (
    BatchInferenceError,
    HostClosedError,
    RequestTimeoutError,
)
from batch_inference.ledger import Ledger, Peer
from batch_inference.room import Room
from batch_inference.statistics import Statistics
from batch_inference.transport import codec
from batch_inference.transport.arena import Arena
from batch_inference.transport.channel import KeyChannel, NearChannel, WaitChannel, chunks
from batch_inference.transport.segment import Segment
from batch_inference.transport.slot import Slot
from batch_inference.transport.wire import (
    DONE_AT,
    DONE_GEN,
    DROPPED,
    ERROR,
    GIVEN_UP,
    RUNS_ALONE,
    STARTED_AFTER,
    STARTED_GEN,
    STATUS,
    TICK,
    TRIES,
)


class ClientLink(Protocol):
    """The connection to the workers, in other processes or in a thread of this one."""

    client_number: int
    worker_count: int
    cells: Any  # the board
    row: int  # the board index of this client's first cell

    def make_segment(self, size: int, /) -> Segment: ...
    def announce_segment(self, number: int, new: Segment, /) -> None: ...
    def new_thread_channels(self) -> Sequence[WaitChannel]: ...
    def new_key_channel(self) -> KeyChannel: ...
    def new_loop_channel(self, loop: Any, deliver: Callable[[list[int]], None], /) -> NearChannel: ...
    def retire(self, channel: Any, loop: Any, /) -> None: ...
    def configure(self, limits: board.Limits, /) -> None: ...
    def drain(self) -> None: ...
    def statistics(self) -> Statistics: ...
    def close(self) -> None: ...


class Client:
    """Sends the requests of this process over a link, which calls its `Events` methods."""

    def __init__(self, shared_memory: int, make_link: Callable[[Client], ClientLink]) -> None:
        self._abandoned: deque[Slot] = deque()
        self._lock = threading.RLock()
        self._over: BatchInferenceError | None = None  # why no request is taken any more
        self._changed = threading.Condition()  # a worker is ready, a slot is free, or it is over
        self._thread_channels: list[WaitChannel] = []
        self._making = threading.Lock()
        with self._lock:  # what the link has to tell waits until there is all that it takes to hear it
            self.link = make_link(self)
            self.arena = Arena(shared_memory, self.link.make_segment, self.link.announce_segment)
            self._ledger = Ledger(self.link)
            self._outstanding, self._ready = self._ledger.requests, self._ledger.ready
            self.room = Room(
                self.arena,
                self.link,
                self._outstanding,
                self._changed,
                self._check_open,
                self.sweep,
                self._abandoned,
                self._collect_rare,
            )

    # --- predict --------------------------------------------------------------------------------------------------

    def predict(self, args: tuple[Any, ...], timeout: float | None, block: bool) -> Any:
        """Sends one request and waits for its reply. RequestTimeoutError after `timeout` seconds (None: no limit)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        slot = self.room.fill(args)
        if slot is None:
            slot = self.fill(args, deadline) if block else self.fill_without_waiting(args)
        channel = None
        try:
            try:
                channel = self._thread_channels.pop()
            except IndexError:
                channel = self._new_channel()
            self.send(slot, channel, deadline)
            while not slot.done:
                if deadline is None:
                    channel.wait()
                else:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise self.timed_out(slot)
                    channel.wait(remaining)
        except BaseException:
            self.abandon(slot)
            raise
        finally:
            if channel is not None:
                self._thread_channels.append(channel)
        return self.collect(slot)

    def _new_channel(self) -> WaitChannel:
        while True:
            with self._making:  # each is a descriptor in three processes: who comes together shares what one makes
                if not self._thread_channels:
                    self._thread_channels.extend(self.link.new_thread_channels())
            with contextlib.suppress(IndexError):
                return self._thread_channels.pop()

    # --- the life of a request ------------------------------------------------------------------------------------

    def fill(self, args: tuple[Any, ...], deadline: float | None, unwanted: threading.Event | None = None) -> Slot:
        """A slot with the encoded request in it; waits for room until `deadline` (CLOCK_MONOTONIC), or until it is
        `unwanted` and `room.tell` was called."""
        encoded = codec.encode_request(args)
        slot = self.room.slot(len(encoded)) or self.room.wait_for_slot(len(encoded), deadline, unwanted)
        return self._write(slot, encoded)

    def fill_at_once(self, args: tuple[Any, ...], most: int) -> Slot | None:
        """The same without waiting, growing or copying more than `most` bytes; None when it would take that."""
        encoded = codec.encode_request(args)
        if len(encoded) > most:
            return None
        slot = self.room.slot(len(encoded), grow=False)
        return slot and self._write(slot, encoded)

    def fill_without_waiting(self, args: tuple[Any, ...]) -> Slot:
        """The same without waiting for anybody: OverloadedError when there is no room."""
        self.sweep()
        encoded = codec.encode_request(args)
        slot = self.room.slot(len(encoded))
        if slot is None:
            raise self.room.overloaded(len(encoded))
        return self._write(slot, encoded)

    def _write(self, slot: Slot, encoded: codec.Encoded) -> Slot:
        try:
            slot.write(encoded)
        except BaseException:
            self.room.release(slot)
            raise
        return slot

    def send(self, slot: Slot, channel: NearChannel, deadline: float | None) -> None:
        """Enters a filled slot as outstanding, and sends it to the worker with least to do.

        Without a worker that is ready the monitor sends it, once there is one.
        """
        with self._lock:
            if self._over is not None:
                self._check_open()
            peer = self._ledger.enter(slot, channel, deadline)
            if self.room.admitted:
                self.room.admitted.discard(slot.key)
        if peer is not None:
            peer.send(slot.descriptor(self.link.client_number))
            keep_awake(LONG)

    def send_all(self, slots: list[tuple[Slot, float | None]], channel: NearChannel) -> None:
        """`send` for several slots, each with its deadline."""
        admitted = self.room.admitted
        with self._lock:
            self._check_open()
            shares = self._ledger.enter_all(slots, channel, self.link.client_number)
            if admitted:
                admitted.difference_update([slot.key for slot, _ in slots])
        self._send_shares(shares)
        keep_awake(LONG)

    def collect(self, slot: Slot) -> Any:
        """The reply to a request that is done, or the exception that it ended in; frees the slot."""
        with self._lock:
            self._ledger.leave(slot)
        if not self._outstanding:
            keep_awake(0)
        return self.room.collect(slot)

    def leave_all(self, slots: Iterable[Slot]) -> None:
        """Requests that are done are not outstanding any more; `room.collect` gives their replies."""
        with self._lock:
            self._ledger.leave_all(slots)
        if not self._outstanding:
            keep_awake(0)

    def _collect_rare(self, slot: Slot) -> Any:
        """What `room.collect` gives for all but a result in the slot itself."""
        if slot.error is not None:
            raise slot.error
        if slot.elsewhere is None:
            memory, start = slot.segment.memory, slot.offset + slot.reply_at
            size = slot.reply_size
        else:
            reply, size = slot.elsewhere
            memory, start = reply.memory, 0
            self.room.learn(slot.length, size)
        status = slot.segment.words[slot.word + STATUS]
        if status == ERROR:
            raise codec.decode_error(memory, start, size)
        if status == DROPPED:
            raise self.timed_out(slot)
        return codec.decode(memory, start, size)

    def abandon(self, slot: Slot) -> None:
        """Gives a request up. Its slot comes back once the worker is through with it."""
        with self._lock:
            if self._outstanding.get(slot.key) is not slot:  # it was not entered
                entered = False
            else:
                entered = True
                slot.abandoned = True
                slot.segment.words[slot.word + GIVEN_UP] = slot.gen
        if entered:
            self._abandoned.append(slot)
            self.sweep()
            if self.room.waiting:  # who waits must look after this slot from now on
                self.room.tell()
        else:
            self.room.release(slot)

    def sweep(self) -> None:
        """Frees those slots, of the ones that were given up, with which the worker is through."""
        for _ in range(len(self._abandoned)):
            try:
                slot = self._abandoned.popleft()
            except IndexError:
                return  # another thread sweeps as well
            with self._lock:
                through = slot.done or slot.worker is None
                if through:
                    self._ledger.leave(slot)
            if through:
                self.room.release(slot)
            else:
                self._abandoned.append(slot)

    def timed_out(self, slot: Slot) -> RequestTimeoutError:
        words, age = slot.segment.words, (time.monotonic_ns() - slot.arrived) / 1e9
        if 0 < slot.deadline <= slot.arrived:
            where = (
                "its timeout had passed before it was sent: 0 seconds leave no time for an answer, and what waits for "
                "room until its timeout has none left"
            )
        elif slot.worker is None:
            where = "no worker was ready to take it: the model is loading, or its worker is being restarted"
            if slot.deaths:
                where += f" because it died while it ran this request: {slot.deaths[-1].death.cause}"
        elif words[slot.word + STARTED_GEN] == slot.gen:
            waited = words[slot.word + STARTED_AFTER] * TICK / 1e9
            where = (
                f"it waited {waited:.3f} s for its batch and the model has run it for {max(0.0, age - waited):.3f} s: "
                "the timeout is shorter than waiting and a batch take"
            )
        else:
            where = (
                "it was still waiting for its batch: more arrives than the model can do, or one batch takes very long"
            )
        return RequestTimeoutError(
            f"no answer within {age:.3f} s; {where}. {self.room.pending()} requests are pending, "
            f"{len(self._outstanding)} of them of this process"
        )

    def _check_open(self) -> None:
        if self._over is not None:
            raise copy_of(self._over)

    # --- what the link tells us, in its thread --------------------------------------------------------------------

    def workers_change(self, ready: Sequence[Peer], retiring: Sequence[Peer] = ()) -> None:
        """Workers are ready, and take over from others, which get nothing more and answer what they have.

        Sends what waited for a worker to be ready.
        """
        with self._lock:
            self._ready[:] = [peer for peer in self._ready if peer not in retiring]
            self._ready += ready
            waiting = [slot for slot in self._outstanding.values() if slot.worker is None and not slot.abandoned]
            waiting = [slot for slot in waiting if slot.error is None]
            shares = self._ledger.assign_all(waiting, self.link.client_number)
        self._send_shares(shares)
        with self._changed:
            self._changed.notify_all()

    def worker_gone(self, peer: Peer, death: Death, retry: bool) -> list[list[Death]]:
        """A worker is dead: what it has not answered goes to another one, or waits for the next incarnation.

        Except what is to blame for it, or must not be run twice (`retry`). Returns, for each request that was convicted
        now, the deaths that it caused.
        """
        again: list[Slot] = []
        convicted: list[list[Death]] = []
        with self._lock:
            if peer in self._ready:
                self._ready.remove(peer)
            for slot in [slot for slot in self._outstanding.values() if slot.worker is peer]:
                if slot.done:
                    continue
                self._ledger.count(peer, -1)
                slot.worker = None
                if self._judge(slot, death, retry):
                    convicted.append([fatality.death for fatality in slot.deaths])
                if slot.error is None and not slot.abandoned:
                    again.append(slot)
            shares = self._ledger.assign_all(again, self.link.client_number)
            pending = list(self._outstanding.values())
            stopping = self._over is not None
        self._send_shares(shares)
        for slot in pending:
            if slot.done:  # failed just now, or answered by the dead worker without a wake-up
                self._wake(slot)
        self.sweep()
        if stopping and death.ours:  # more of them may hang as well, and stop() would wait for each
            self._end(HostClosedError(f"the model hung while the host was being stopped: {death.cause}"))
        return convicted

    def _judge(self, slot: Slot, death: Death, retry: bool) -> bool:
        """The worker that had this request is dead: sets the request's error unless it may be sent again.

        True when it was the request's fault. Needs the lock.
        """
        words, word = slot.segment.words, slot.word
        if words[word + STARTED_GEN] != slot.gen:
            return False  # it only waited
        alone = words[word + STATUS] == RUNS_ALONE
        words[word + STARTED_GEN] = words[word + STATUS] = 0
        if not retry:
            slot.deaths = (Fatality(death, alone),)
            slot.error = deaths.not_retried(death)
            return alone and not death.with_supervisor
        if death.with_supervisor:
            return False
        slot.deaths += (Fatality(death, alone),)
        slot.segment.quads[slot.quad + TRIES] = len(slot.deaths)
        if not deaths.convicted(slot.deaths):
            return False
        slot.error = deaths.blame(slot.deaths)
        return True

    def host_failed(self, error: BatchInferenceError) -> None:
        """The host is finished: every caller gets `error`, now and later."""
        self._end(error)

    def reply_elsewhere(self, key: int, gen: int, status: int, reply: Segment, size: int) -> None:
        """A reply that did not fit its slot has come in memory of its own."""
        with self._lock:
            slot = self._outstanding.get(key)
            if slot is None or slot.gen != gen:
                return
            slot.elsewhere = (reply, size)
            slot.segment.words[slot.word + STATUS] = status
            slot.segment.quads[slot.quad + DONE_AT] = time.monotonic_ns()
            slot.segment.words[slot.word + DONE_GEN] = gen
        self._wake(slot)

    @staticmethod
    def _send_shares(shares: dict[Peer, list[bytes]]) -> None:
        for peer, descriptors in shares.items():
            for chunk in chunks(descriptors):
                peer.send(chunk)

    def _wake(self, slot: Slot) -> None:
        channel = slot.channel
        if channel is not None:
            channel.wake(slot.key)

    def _end(self, error: BatchInferenceError) -> None:
        with self._lock:
            if self._over is None:
                self._over = error
            pending = list(self._outstanding.values())
            for slot in pending:
                if not slot.done:
                    slot.error = copy_of(error)
        for slot in pending:  # those with a reply as well: the worker may end before it has woken them
            self._wake(slot)
        with self._changed:
            self._changed.notify_all()

    # --- start and stop -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now finds a worker that is ready."""
        return bool(self._ready) and self._over is None

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        return self._over is None

    def wait_until_ready(self, workers: int, deadline: float) -> bool:
        """Waits until that many workers are ready; False when `deadline` passes, the host's error when it fails."""
        with self._changed:
            while len(self._ready) < workers:
                self._check_open()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
        return True

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, waits for the answers to those it took (`drain`) or fails them, leaves the host.

        It waits for `timeout` seconds at most. Without one the wait has an end as every batch has: a worker that hangs
        is killed after batch_timeout, and then what is left fails as well.
        """
        closed = HostClosedError("the host was stopped: start() it again to send more requests")
        with self._lock:
            if self._over is None:
                self._over = closed
        if drain:
            self.link.drain()
        try:
            end = None if timeout is None else time.monotonic() + timeout
            while drain and any(not slot.done and not slot.abandoned for slot in list(self._outstanding.values())):
                if end is not None and time.monotonic() > end:
                    break
                with self._changed:
                    self._changed.wait(0.005)
        finally:
            self._end(closed)
            try:
                self.link.close()
            finally:
                self.arena.close()
                self._thread_channels.clear()

    def forget(self) -> None:
        """In a forked child: lets go of everything without a word to the host, which is the parent's."""
        self.arena.forget()
        self._thread_channels.clear()
        self._outstanding.clear()
        self._abandoned.clear()

    @property
    def idle(self) -> bool:
        """Whether every slot is free."""
        self.sweep()
        return not self._outstanding and self.arena.free == self.arena.mapped


def copy_of(error: BatchInferenceError) -> BatchInferenceError:
    """A copy for one more caller, so that tracebacks do not pile up on one object."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy

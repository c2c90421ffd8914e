"""A client's connection to the workers of its host, by way of the supervisor.

It elects (starts) the supervisor where nobody serves the host's address, announces this process's memory and
channels, and keeps for each worker the request pipe of its present incarnation. One thread per client process, the
*monitor*, sleeps in poll until the supervisor says something or dies, or a full pipe has room again. When the
supervisor is dead, the monitor waits until its workers are as well, since only then may their slots be sent
elsewhere, and elects another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batch_inference import board, logs, payload, processes
from batch_inference.deaths import Death
from batch_inference.errors import (
    BatchInferenceError,
    ConfigError,
    HostClosedError,
    ModelLoadError,
    RemoteTraceback,
    TransportError,
    WorkerDiedError,
)
from batch_inference.statistics import Statistics, read_board
from batch_inference.transport import handshake, segment
from batch_inference.transport.channel import (
    KeyChannel,
    NearChannel,
    PipeChannel,
    RequestPipe,
    ThreadChannel,
    WaitChannel,
)
from batch_inference.transport.handshake import Connection, ConnectionLostError, Message
from batch_inference.transport.scarce import explained
from batch_inference.transport.segment import Segment
from batch_inference.transport.wire import VERSION

JOIN_TIMEOUT = 30.0  # seconds for finding or starting a supervisor and its welcome
DEATH_TIMEOUT = 5.0  # seconds between the end of a supervisor's connection and its own
ELECTIONS = 5  # in a minute, before a supervisor that keeps dying is given up
HASTE = 2.0  # seconds for the monitor's end after Ctrl-C
THREAD_CHANNELS_AT_ONCE = 8


class Peer:
    """One incarnation of a worker, as its client sees it."""

    def __init__(self, index: int, incarnation: int, pidfd: int, pipe: RequestPipe, wake: Callable[[], None]) -> None:
        self.index = index
        self.incarnation = incarnation
        self.pidfd = pidfd
        self.pipe = pipe
        self.backlog: deque[bytes] = deque()  # what the full pipe did not take
        self.watched = False  # the monitor waits for room in the pipe, or is about to look at the backlog
        self._wake = wake

    def __repr__(self) -> str:
        return f"<Peer {self.index}, incarnation {self.incarnation}>"

    def send(self, descriptors: bytes) -> None:
        """Sends descriptors (one write's worth at most). Never blocks: the monitor sends what must wait."""
        if self.backlog or not self.pipe.write(descriptors):
            self.backlog.append(descriptors)
            if not self.watched:
                self._wake()


class Events(Protocol):
    """What a link tells its client, from the monitor thread."""

    def workers_change(self, ready: Sequence[Any], retiring: Sequence[Any] = ()) -> None: ...
    def worker_gone(self, peer: Any, death: Death, retry: bool) -> list[list[Death]]: ...
    def host_failed(self, error: BatchInferenceError) -> None: ...
    def reply_elsewhere(self, key: int, gen: int, status: int, reply: Segment, size: int) -> None: ...


class Reload:
    """A change of model that this process has asked for. Takes over the descriptor of the new payload."""

    def __init__(self, config: int) -> None:
        self.config = config
        self.done = threading.Event()
        self.error: BatchInferenceError | None = None

    def end(self, error: BatchInferenceError | None) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()


class Link:
    """Connects to the host at `address`. `config` is the payload to start it with, or None to join only.

    Takes over the descriptor `config`. `description` is compared with that of a host that runs there already.
    """

    make_segment: Callable[[int], Segment] = staticmethod(segment.create)

    def __init__(self, address: str, config: int | None, description: dict[str, str] | None, events: Events) -> None:
        self.address = address
        self.config = config
        self.description = description
        self._events = events
        self._lock = threading.Lock()  # of the two lists, of sending, and of who is connected
        self._segments: list[Segment] = []
        self._channels: list[tuple[str, int, NearChannel]] = []  # kind, descriptor, and its owner to keep it open
        self._idle_channels: list[PipeChannel] = []
        self._connection: Connection | None = None
        self._supervisor = -1  # pidfd
        self._supervisor_pid = 0
        self._peers: dict[int, Peer] = {}
        self._successors: list[Peer] = []  # of workers that have not been said to retire yet
        self.cells: Any = None  # the host's board
        self._limits: board.Limits = {}  # those that this process put in force
        self.row = 0  # the board index of this client's first cell
        self.client_number = 0
        self.worker_count = 0
        self._reload: Reload | None = None  # while it goes on
        self._elections: deque[float] = deque()
        self._closing = False
        self._failed = False
        self._retry = True  # whether what a worker ran when it died may be run again
        self._served = False  # a worker has been ready: one that dies while it loads is restarted
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._relay = logs.Relay()
        self._monitor = threading.Thread(target=self._run, name="batch_inference-monitor", daemon=True)

    # --- for the client -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Joins the host, starting it if need be; ConfigError, HostClosedError or TransportError if it cannot."""
        try:
            self._join()
        except BaseException:
            self._disconnect()
            self._close_descriptors()
            raise
        self._monitor.start()

    def configure(self, limits: board.Limits) -> None:
        """Puts limits in force, for all clients and workers; also under a supervisor that takes over later."""
        self._limits |= limits
        board.write_limits(self.cells, limits)
        with self._lock:
            self._say({"type": "limits"}, [])

    def drain(self) -> None:
        """Says that this process sends no more requests, and waits for the answers to those it sent."""
        with self._lock:
            self._say({"type": "drain"}, [])

    def statistics(self) -> Statistics:
        seen = read_board(self.cells, self._supervisor_pid)
        if not self._failed:
            return seen
        # The board says what it said before the last supervisor died, if that is why.
        return dataclasses.replace(seen, state="failed", workers=seen.workers if self._connection else ())

    def reload(self, changes: payload.Settings, content: bytes) -> None:
        """Has the host change to another model: `content`, and `changes` to the settings that it is started with.

        Returns when our requests go to the new model. ModelLoadError when it does not load, or the host cannot change
        now.
        """
        with self._lock:
            if self._failed or self._closing:
                raise HostClosedError("the host has given up or was stopped: stop() and start() it")
            if self._reload is not None:
                raise ModelLoadError("this process is changing the model already: try again when that has ended")
            assert self.config is not None
            settings = payload.read_settings(self.config)
            changes = changes | {"revision": settings["revision"] + 1}
            with explained():
                reload = self._reload = Reload(payload.pack(settings | changes, content))
            self._say({"type": "reload"}, [reload.config])
        try:
            timeout = settings["start_timeout"] + JOIN_TIMEOUT  # the supervisor sees to the start_timeout
            if not reload.done.wait(min(timeout, threading.TIMEOUT_MAX)):
                raise ModelLoadError(
                    f"nothing was heard of the new model for {timeout:.0f} s: is the machine overloaded?"
                )
        finally:
            with self._lock:
                self._reload = None
                os.close(reload.config)
        if reload.error is not None:
            raise reload.error

    def announce_segment(self, number: int, new: Segment) -> None:
        """Hands a segment to the workers; they learn of it no later than of the first request in it."""
        with self._lock:
            self._say({"type": "segment"}, [new.fd])
            self._segments.append(new)  # numbered in the order in which they were said

    def new_thread_channels(self) -> Sequence[WaitChannel]:
        """Some channels, each for one waiting thread."""
        with self._lock:
            first = len(self._channels)
            new = [ThreadChannel(first + offset) for offset in range(THREAD_CHANNELS_AT_ONCE)]
            self._say({"type": "channels", "kind": "thread"}, [channel.fd for channel in new])
            self._channels += [("thread", channel.fd, channel) for channel in new]
        return new

    def new_key_channel(self) -> KeyChannel:
        """A channel for a thread that reads the keys of finished slots."""
        return self._pipe_channel()

    def new_loop_channel(self, loop: Any, deliver: Callable[[list[int]], None]) -> NearChannel:
        """A channel whose keys are given to `deliver` in the running event loop `loop`."""
        channel = self._pipe_channel()
        channel.read()  # late keys of the loop that had it before
        loop.add_reader(channel.fd, lambda: deliver(channel.read()))
        return channel

    def retire(self, channel: Any, loop: Any) -> None:
        """Takes back the channel of a loop, for the next one."""
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(loop.remove_reader, channel.fd)
        self._idle_channels.append(channel)

    def _wake_monitor(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Leaves the host; returns when the workers have ended, if they end with us."""
        with self._lock:
            self._closing = True
            self._say({"type": "bye"}, [])
        self._end_reload(HostClosedError("the host was stopped while its model was being changed"))
        self._wake_monitor()
        try:
            self._join_monitor(JOIN_TIMEOUT)
        finally:  # Ctrl-C leaves no descriptor open either
            self._join_monitor(HASTE)
            self._disconnect()
            self._relay.close()
            self._close_descriptors()

    def _join_monitor(self, timeout: float) -> None:
        if self._monitor is not threading.current_thread() and self._monitor.is_alive():
            self._monitor.join(timeout)

    def forget(self) -> None:
        """In a forked child: closes what belongs to the parent, which goes on as if nothing had happened."""
        self._closing = True
        if self._connection is not None:
            self._connection.close()
        for fd in (self._supervisor, self._wake, *(peer.pidfd for peer in self._peers.values())):
            with contextlib.suppress(OSError):  # the parent's monitor may have been closing it
                os.close(fd)
        self._supervisor = self._wake = -1
        self._peers.clear()
        self._channels.clear()
        self._idle_channels.clear()
        self._connection = None

    # --- joining --------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connects, says hello and waits for the welcome; tries again when the supervisor ends meanwhile."""
        deadline = time.monotonic() + JOIN_TIMEOUT
        while not self._try_to_join(deadline):
            if time.monotonic() > deadline:
                raise TransportError(
                    f"no supervisor answered within {JOIN_TIMEOUT:.0f} s: is one stopped, or is the machine overloaded?"
                )

    def _try_to_join(self, deadline: float) -> bool:
        launched = None
        if self.config is None:
            sock = handshake.connect(self.address)
            if sock is None:
                raise HostClosedError(
                    f"no host serves {self.address}: start it, or wait until the process that does is up"
                )
        else:
            sock, listens = handshake.connect_or_listen(self.address, deadline)
            if listens:
                launched = processes.start_supervisor(payload.read_settings(self.config)["python"], sock, self.config)
                sock = handshake.connect(self.address)
                if sock is None:
                    return False
        connection = Connection(sock)
        try:
            hello = {"type": "hello", "version": VERSION, "description": self.description, "again": self._served}
            connection.send(hello)
            received = None
            while received is None:
                if not handshake.readable(connection.fileno(), 0.1):
                    if launched is not None and launched.poll() is not None:
                        raise TransportError(
                            f"the supervisor process ended at once, with code {launched.returncode}: see what it "
                            "printed"
                        )
                    if time.monotonic() > deadline:
                        raise ConnectionLostError("no answer")
                received = connection.receive()
        except ConnectionLostError:
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        message, fds = received
        if message["type"] == "unable":
            connection.close()
            if launched is not None:
                launched.wait()  # it has said its last words
            raise TransportError(f"the supervisor process cannot start: {message['why']}")
        if message["type"] == "refused":
            connection.close()
            raise ConfigError(f"the host that serves this name will not take us: {message['why']}")
        self._enter(connection, message, fds)
        return True

    def _enter(self, connection: Connection, welcome: Message, fds: list[int]) -> None:
        """Takes the place that a supervisor offers, and tells it all that the workers must know."""
        supervisor, board_fd, config = fds
        with self._lock:
            self._connection, self._supervisor = connection, supervisor
            self.cells = segment.attach(board_fd).quads
            board.write_limits(self.cells, self._limits)
            newer = self._take_config(config)
            self.row = board.client_row(welcome["row"])
            self.client_number, self._supervisor_pid = welcome["client"], welcome["pid"]
            self.worker_count = welcome["workers"]
            assert self.config is not None
            self._retry = payload.read_settings(self.config)["retry"]
            for shared in self._segments:
                self._say({"type": "segment"}, [shared.fd])
            for kind, fd, _ in self._channels:
                self._say({"type": "channels", "kind": kind}, [fd])
            if self._reload is not None:  # the supervisor that was told is dead
                self._say({"type": "reload"}, [self._reload.config])
            elif newer is not None:  # the supervisor before this one knew it, whoever elected this one did not
                self._say({"type": "reload"}, [newer])
            if self._closing:  # said while nobody listened
                self._say({"type": "bye"}, [])

    def _take_config(self, config: int) -> int | None:
        """Keeps the payload of the host if it is newer than ours, else returns ours if that is newer."""
        ours = self.config
        theirs_at, ours_at = (-1 if fd is None else payload.read_settings(fd)["revision"] for fd in (config, ours))
        if theirs_at > ours_at:
            self.config = config
            if ours is not None:
                os.close(ours)
            return None
        os.close(config)
        return ours if theirs_at < ours_at else None

    def _end_reload(self, error: BatchInferenceError | None) -> None:
        reload = self._reload
        if reload is not None:
            reload.end(error)

    def _pipe_channel(self) -> PipeChannel:
        if self._idle_channels:
            return self._idle_channels.pop()
        with self._lock:
            channel = PipeChannel(len(self._channels))
            self._say({"type": "channels", "kind": "keys"}, [channel.far_fd])
            self._channels.append(("keys", channel.far_fd, channel))
        return channel

    def _say(self, message: Message, fds: list[int]) -> None:
        if self._connection is not None:
            try:
                with explained():
                    self._connection.send(message, fds)
            except ConnectionLostError:
                return  # the monitor will see the death, and say it again to the next supervisor
            if self._connection.unsent:
                self._wake_monitor()

    # --- the monitor ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with explained():
                while self._connection is not None:
                    self._watch()
                    self._reconnect_if_lost()
        except BatchInferenceError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, nobody may wait for ever
            failure = TransportError(f"the connection to the host broke: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _watch(self) -> None:
        """Waits for one thing to happen, and sees to it."""
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._supervisor, select.POLLIN)
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._connection.unsent else 0))
        for peer in self._peers.values():
            peer.watched = False  # before the look at its backlog: who adds to it after that wakes us
            if peer.backlog:
                poll.register(peer.pipe.fd, select.POLLOUT)
                peer.watched = True
        ready = dict(poll.poll())
        if self._wake in ready:
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
        for peer in self._peers.values():
            if peer.pipe.fd in ready:
                while peer.backlog and peer.pipe.write(peer.backlog[0]):
                    peer.backlog.popleft()
        try:
            self._hear()
        except ConnectionLostError as error:
            if not handshake.readable(self._supervisor, DEATH_TIMEOUT):
                raise TransportError(f"the connection to the supervisor, which lives on, is lost: {error}") from None
        if self._connection is not None and handshake.readable(self._supervisor, 0.0):
            with contextlib.suppress(ConnectionLostError):
                self._hear()  # its last words, said after we listened
            self._supervisor_died()

    def _hear(self) -> None:
        connection = self._connection
        assert connection is not None
        with self._lock:
            connection.flush()
        for _ in range(1000):  # more than a socket holds, and an end, for who waits for room in a pipe meanwhile
            if self._connection is not connection or (received := connection.receive()) is None:
                break
            message, fds = received
            if message["type"] == "ready":
                self._worker_ready(message, fds)
            elif message["type"] == "gone":
                self._worker_gone(death_of(message))
            elif message["type"] == "failed":
                self._fail(failure(message))
            elif message["type"] == "dropped":
                self._fail(TransportError(f"the supervisor of the host has dropped this process: {message['why']}"))
            elif message["type"] == "retiring":
                self._workers_retire(message["workers"], fds[0])
            elif message["type"] == "reloaded":
                self._end_reload(None)
            elif message["type"] == "reload failed":
                why = message.get("refused")
                self._end_reload(failure(message) if why is None else ModelLoadError(why))
            elif message["type"] == "reply":
                key = segment_key(message)
                self._events.reply_elsewhere(
                    key, message["gen"], message["status"], segment.attach(fds[0]), message["size"]
                )
            elif message["type"] == "bye":
                if not message["ending"]:
                    self._disconnect()
                    processes.reap_later(self._supervisor_pid)
            else:
                self._relay.put(message)

    def _worker_ready(self, message: Message, fds: list[int]) -> None:
        pipe, pidfd = fds
        peer = Peer(message["worker"], message["incarnation"], pidfd, RequestPipe(pipe), self._wake_monitor)
        self._peers[peer.index] = peer
        self._served = True
        if message["succeeds"]:  # others, who retire; they change all at once
            self._successors.append(peer)
        else:
            self._events.workers_change([peer])

    def _workers_retire(self, indices: list[int], config: int) -> None:
        """Their successors are ready: from now on nothing more goes to these workers."""
        ready, self._successors = self._successors, []
        self._events.workers_change(ready, [self._peers[index] for index in indices if index in self._peers])
        with self._lock:
            self._take_config(config)
            self._say({"type": "retired"}, [])

    def _fail(self, error: BatchInferenceError) -> None:
        self._failed = True
        self._end_reload(error)
        self._events.host_failed(error)

    def _worker_gone(self, death: Death) -> None:
        peer = self._peers.pop(death.worker, None)
        if peer is not None:
            os.close(peer.pidfd)
            for deaths in self._events.worker_gone(peer, death, self._retry):
                with self._lock:
                    self._say({"type": "convicted", "deaths": [(d.worker, d.incarnation) for d in deaths]}, [])

    def _supervisor_died(self) -> None:
        """Its workers die with it; their slots are ours again once that is certain."""
        deadline = time.monotonic() + JOIN_TIMEOUT
        for peer in list(self._peers.values()):
            if not handshake.readable(peer.pidfd, deadline - time.monotonic()):
                raise TransportError(f"worker {peer.index} survived its supervisor: is it stuck in the kernel?")
            cause = f"worker {peer.index} was killed because its supervisor died"
            self._worker_gone(Death(peer.index, peer.incarnation, cause))
        self._disconnect()

    def _reconnect_if_lost(self) -> None:
        if self._connection is not None or self._closing or self._failed:
            return
        now = time.monotonic()
        while self._elections and self._elections[0] < now - 60:
            self._elections.popleft()
        if len(self._elections) >= ELECTIONS:
            raise WorkerDiedError(
                f"the supervisor process died more than {ELECTIONS} times within a minute: something on this machine "
                "kills it (look for the out-of-memory killer in the kernel's log); stop() and start() the host to try "
                "again"
            )
        self._elections.append(now)
        self._join()

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            supervisor, self._supervisor = self._supervisor, -1
        if connection is not None:
            connection.close()
        if supervisor >= 0:
            os.close(supervisor)
        for peer in self._peers.values():
            os.close(peer.pidfd)
        self._peers.clear()
        self._successors.clear()
        processes.reap()

    def _close_descriptors(self) -> None:
        for fd in (self._wake, -1 if self.config is None else self.config):
            if fd >= 0:
                os.close(fd)
        self._wake, self.config = -1, None
        self._channels.clear()
        self._idle_channels.clear()


def segment_key(message: Message) -> int:
    from batch_inference.transport.wire import slot_key

    return slot_key(message["segment"], message["unit"])


def death_of(message: Message) -> Death:
    return Death(**{name: message[name] for name in ("worker", "incarnation", "cause", "output", "code", "ours")})


def exception_text(traceback: str) -> str:
    """What a traceback says below its frames: the exception, with all lines of its message."""
    lines = traceback.rpartition("Traceback (most recent call last):")[2].strip("\n").splitlines()
    return "\n".join(itertools.dropwhile(lambda line: line.startswith(" "), lines))


def failure(message: Message) -> BatchInferenceError:
    """The error that a supervisor's last words amount to."""
    output = f"\nThe last it printed:\n{message['output']}" if message["output"].strip() else ""
    error: BatchInferenceError
    if message["unstarted"]:
        return ModelLoadError(f"a worker process cannot be started: {message['unstarted']}")
    if message["loading"]:
        how = "raised an exception" if message["traceback"] else f"did not survive: {message['what']}"
        error = ModelLoadError(
            f"loading the model in its worker process {how}{output if not message['traceback'] else ''}"
        )
        if message["traceback"]:
            raised = exception_text(message["traceback"])
            error = ModelLoadError(f"loading the model in its worker process raised {raised}")
            error.__cause__ = RemoteTraceback(message["traceback"])
        return error
    most = message["restarts"]
    allowed = f"{most} restart{'s' * (most != 1)} within a minute" if most else "no restart"
    return WorkerDiedError(
        f"{message['what']}, and max_restarts={most} allows {allowed}: the host has given up. Mend the cause, then "
        f"stop() and start() the host{output}"
    )

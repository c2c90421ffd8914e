"""Main of the supervisor: the small process between the clients of a host and its workers.

    clients  --hello, segments, channels, limits, convicted, reload, retired, drain, bye-->  supervisor
             <--welcome, ready, retiring, gone, failed, reply, log, output, reloaded--
                                           workers  <--segments, channels, limits, ping, gone, drain, quit--  supervisor
                                                    --ready, failed, reply-->

It is the parent of the workers, so that their exit status cannot be stolen by the application's SIGCHLD handlers; it
runs in a session of its own, out of reach of the terminal's Ctrl-C; it watches clients and workers by pidfd; and it
keeps duplicates of the clients' descriptors, so that a restarted worker sees the same memory. It never sees a
request, and does not import numpy. When it dies its workers die (PR_SET_PDEATHSIG) and the clients elect another.

One thread, one selector; nothing in it blocks. How much is decided here: when to start, restart and end workers
(`watching.py` says whether one hangs, and when there were too many restarts).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

from batch_inference import board, description, payload, processes
from batch_inference.crew import Client, Worker
from batch_inference.errors import TransportError
from batch_inference.reloading import Reload
from batch_inference.transport import channel, handshake, segment
from batch_inference.transport.handshake import Connection, ConnectionLostError, Message
from batch_inference.transport.scarce import explanation
from batch_inference.transport.wire import VERSION
from batch_inference.watching import Pulse, Restarts, restart_delay

FIRST_CLIENT_TIMEOUT = 3.0  # seconds until somebody must have joined: whoever elected us may be dead
ACCEPT_AGAIN = 0.2  # seconds until the next try when there was no descriptor for a client
QUIT_TIMEOUT = 3.0  # seconds between asking a worker to end and killing it
CLEAR_AGAIN = 1.0  # seconds after which the counts of a client that was dropped are cleared once more
VERDICT_TIMEOUT = 0.5  # seconds that clients have to convict a request of a death, before the host gives up for it
LOOKS, SELDOM, OFTEN = 4, 5.0, 0.05  # looks at a worker's signs of life in a batch_timeout; seconds between two
LAST_WORDS_TIMEOUT = 1.0  # seconds that a supervisor, about to end, waits for clients to make room
MESSAGES_AT_ONCE = 100  # of one client, before the others have their turn
LONGEST_SLEEP = 3600.0  # seconds; the selector knows no infinity
WARNING = {"levelno": 30, "levelname": "WARNING"}  # of logging, whose import costs memory here
MAX_NEWS = 1000  # messages that a client has not read yet, at which log records wait and output is dropped


class Supervisor:
    def __init__(self, listener: socket.socket, config: int) -> None:
        self._config = config
        self._settings = payload.read_settings(config)
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count(1)
        self._clients: dict[Connection, Client] = {}
        self._start_timeout: float = self._settings["start_timeout"]
        self._batch_timeout: float | None = self._settings["batch_timeout"]
        self._look_interval = max(OFTEN, min(SELDOM, (self._batch_timeout or SELDOM) / LOOKS))
        self.workers = [Worker(index, index, config) for index in range(self._settings["workers"])]
        self._reload: Reload | None = None  # the last one
        self._restarts = Restarts(self._settings["max_restarts"])
        self._board = segment.create(board.BOARD_SIZE)
        board.write_limits(self._board.quads, self._settings["limits"])
        for worker in self.workers:
            self._show(worker, board.STARTING)
        self._dies_with_us = processes.dies_with_us()
        self._pidfd = os.pidfd_open(os.getpid())
        self._stopping = False
        self._draining = False  # the last client has sent its last request
        self._started = False
        self._listener: socket.socket | None = listener
        listener.setblocking(False)
        self._watch_listener()

    def run(self) -> None:
        self.after(FIRST_CLIENT_TIMEOUT, self._stop_if_unused)
        if self._batch_timeout is not None:
            self.after(self._look_interval, self._look_for_hangs)
        while not (self._stopping and all(worker.process is None for worker in self.workers)):
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(timeout and min(timeout, LONGEST_SLEEP)):
                if self._selector.get_map().get(key.fd) is key:  # an earlier event of this round may have closed it
                    key.data(events)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            self._watch_for_room()
        processes.kill_orphans(None)
        deadline = time.monotonic() + LAST_WORDS_TIMEOUT
        for client in list(self._clients.values()):
            client.connection.flush_until(deadline)
            self._drop(client)

    # --- clients --------------------------------------------------------------------------------------------------

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is free: they must wait until one is
            self._unwatch(self._listener)
            self.after(ACCEPT_AGAIN, self._watch_listener)
            return
        pid, uid = handshake.peer(sock)
        try:
            if uid != os.geteuid():  # before a byte of theirs is read
                raise ConnectionLostError
            pidfd = os.pidfd_open(pid)
        except (ConnectionLostError, OSError):
            sock.close()
            self.after(0.1, self._stop_if_never_used)
            return
        client = Client(Connection(sock), pid, pidfd)
        self._clients[client.connection] = client
        self._selector.register(
            client.connection, selectors.EVENT_READ, lambda events: self._hear_client(client, events)
        )
        self._selector.register(pidfd, selectors.EVENT_READ, lambda events: self._drop(client))

    def _watch_listener(self) -> None:
        if self._listener is not None and not self._stopping:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _hear_client(self, client: Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.connection.flush()
            for _ in range(MESSAGES_AT_ONCE):
                if client.connection not in self._clients or (received := client.connection.receive()) is None:
                    return
                message, fds = received
                try:
                    self._obey(client, message, fds)
                finally:
                    handshake.close_all(fds)
        except (ConnectionLostError, TransportError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            # It is gone, or it broke the rules, or we have no descriptor for it; either way it hurts nobody else.
            self._drop(client, explanation(error, "the supervisor process") or str(error))

    def _obey(self, client: Client, message: Message, fds: list[int]) -> None:
        """Does what a client says. A duplicate of each descriptor is kept; KeyError etc. for a message that is none."""
        kind = message["type"]
        if kind == "hello" and client.row < 0:
            self._welcome(client, message)
        elif client.row < 0:
            raise ConnectionLostError("not a client yet")
        elif kind == "segment":
            (fd,) = fds
            segment.attach(os.dup(fd))  # let go at once: no worker is offered what it could not map
            client.segments.append(os.dup(fd))
            self._tell_workers(segment_message(client, len(client.segments) - 1), [fd])
        elif kind == "channels" and message["kind"] in ("thread", "keys") and fds:
            for fd in fds:
                channel.check(message["kind"], fd)
            first = len(client.channels)
            client.channels += [(message["kind"], os.dup(fd)) for fd in fds]
            self._tell_workers(channels_message(client, first, message["kind"]), fds)
        elif kind == "limits":
            self._tell_workers({"type": "limits"})
        elif kind == "convicted":
            self._restarts.convict({(int(worker), int(incarnation)) for worker, incarnation in message["deaths"]})
        elif kind == "reload":
            (fd,) = fds
            self._begin_reload(client, os.dup(fd))
        elif kind == "retired":
            for worker in self.workers:
                worker.listeners.discard(client.number)
        elif kind == "drain":
            if self._ends_without(client):
                self._draining = True
                self._tell_workers({"type": "drain"})
        elif kind == "bye":
            self._farewell(client)
        else:
            raise ConnectionLostError(f"unknown message {kind!r}")

    def _welcome(self, client: Client, message: Message) -> None:
        if self._stopping:
            raise ConnectionLostError("too late: it will find or elect another supervisor")
        if message["version"] != VERSION:
            self._refuse(
                client,
                f"it speaks version {VERSION} of our protocol and this process {message['version']}: "
                "two releases of the library are in use on this machine",
            )
            return
        difference = self._difference(message.get("description"))
        if difference:
            self._refuse(client, difference)
            return
        used = {other.row for other in self._clients.values()}
        client.row = next(row for row in itertools.count() if row not in used)
        if client.row >= board.MAX_CLIENTS:
            client.row = -1
            self._refuse(client, f"it has {board.MAX_CLIENTS} clients already, the most there may be")
            return
        self._board.quads[board.CLIENT_ROWS] = max(self._board.quads[board.CLIENT_ROWS], client.row + 1)
        client.number = next(self._counter)
        welcome = {
            "type": "welcome",
            "client": client.number,
            "row": client.row,
            "pid": os.getpid(),
            "workers": self._settings["workers"],
        }
        client.connection.send(welcome, [self._pidfd, self._board.fd, self._config])
        for worker in self.workers:
            if message.get("again") is True:  # it was ready under the supervisor before us, whoever elected this one
                worker.was_ready = True
            if worker.ready and not worker.succeeds and not worker.retires:
                self.tell_ready(client, worker)
        if not self._started:  # not before somebody is there to hear how it goes
            self._started = True
            for worker in self.workers:
                self.spawn(worker)

    def _difference(self, theirs: description.Description | None) -> str:
        """How a client's host differs from ours; it may be as ours was at its start, or as the last reload made it."""
        difference = description.difference(self._settings["description"], theirs)
        reloaded = self._settings["reloaded"]
        return "" if reloaded is not None and not description.difference(reloaded, theirs) else difference

    def _refuse(self, client: Client, why: str) -> None:
        client.connection.send({"type": "refused", "why": why})
        self._drop(client)

    def _ends_without(self, client: Client) -> bool:
        """Whether the host ends when this client leaves."""
        return self.members() == [client] and not self._settings["linger"]

    def _farewell(self, client: Client) -> None:
        ending = self._ends_without(client)
        for worker in self.workers:
            if worker.process is not None:  # what was printed and logged while the client was here
                self._copy_output(worker)
                self._copy_log(worker)
        client.connection.send({"type": "bye", "ending": ending})
        if ending:  # the client stays to hear what the workers say when they close their models
            self._tell_workers({"type": "gone", "client": client.number})
            self._stop()
        else:
            self._drop(client)

    def _drop(self, client: Client, why: str | None = None) -> None:
        """Forgets a client that has left, died or broken the rules. It is told why, in case it lives."""
        if self._clients.pop(client.connection, None) is None:
            return
        if why is not None and client.row >= 0:
            with contextlib.suppress(ConnectionLostError):
                client.connection.send({"type": "dropped", "why": handshake.shorten(why)})
        self._selector.unregister(client.connection)
        self._selector.unregister(client.pidfd)
        client.connection.close()
        handshake.close_all([client.pidfd, *client.segments, *(fd for _, fd in client.channels)])
        if client.row < 0:
            self.after(0.1, self._stop_if_never_used)
            return
        self._tell_workers({"type": "gone", "client": client.number})
        for worker in self.workers:
            worker.listeners.discard(client.number)
        cells, row, departed = self._board.quads, board.client_row(client.row), board.client_row(-1)
        for cell in range(board.TRANSPORT, board.TRANSPORT + board.BUCKETS):
            cells[departed + cell] += cells[row + cell]
        self._clear_row(client.row)
        # One that was dropped may live, and count once more before it hears of it; nobody else would set that right.
        self.after(CLEAR_AGAIN, lambda: self._clear_row(client.row))
        if not any(other.row >= 0 for other in self._clients.values()):
            self.after(self._settings["linger"], self._stop_if_unused)

    def _clear_row(self, number: int) -> None:
        """Sets the counts of a client that has left to zero, unless another has its row by now."""
        if all(client.row != number for client in self._clients.values()):
            start = board.client_row(number)
            for cell in range(start, start + board.ROW):
                self._board.quads[cell] = 0

    def members(self) -> list[Client]:
        """The clients that were welcomed."""
        return [client for client in self._clients.values() if client.row >= 0]

    def _tell_clients(self, message: Message) -> None:
        for client in self.members():
            self.send(client, message)

    def tell_ready(self, client: Client, worker: Worker, succeeds: bool = False) -> None:
        assert worker.process is not None
        message = {
            "type": "ready",
            "worker": worker.index,
            "incarnation": worker.incarnation,
            "pid": worker.process.pid,
            "succeeds": succeeds,
        }
        self.send(client, message, [worker.pipe, worker.pidfd])

    def send(self, client: Client, message: Message, fds: list[int] | None = None) -> None:
        try:
            client.connection.send(message, fds or [])
        except ConnectionLostError:
            self._drop(client)

    def _tell_application(self, message: Message) -> None:
        """Sends what a person should see to the client that has been here longest."""
        application = self._application()
        if application is not None and not self._application_is_behind():
            self.send(application, message)

    def _application(self) -> Client | None:
        return next((client for client in self._clients.values() if client.row >= 0), None)

    def _application_is_behind(self) -> bool:
        application = self._application()
        return application is not None and len(application.connection.unsent) >= MAX_NEWS

    # --- workers --------------------------------------------------------------------------------------------------

    def spawn(self, worker: Worker) -> None:
        """Starts the next incarnation of a worker in a fresh interpreter, with a request pipe of its own."""
        worker.incarnation = next(self._counter)
        worker.ready, worker.failure, worker.unstarted, worker.killed = False, None, None, None
        try:
            process = self._launch(worker)
        except (OSError, subprocess.SubprocessError) as error:
            python = self._settings["python"]
            worker.unstarted = explanation(error, "the supervisor process") or f"{python} cannot be started: {error}"
            if worker.succeeds and self._reload is not None:
                self._reload.died(worker, str(worker))
            else:
                self._give_up(worker, str(worker))
            return
        worker.pulse, worker.pinged = Pulse(self._look_interval), False
        worker.tail.clear()
        worker.batches_at_start = self._batches(worker)
        connection, log = worker.connection, worker.log
        assert connection is not None and log is not None
        self._selector.register(connection, selectors.EVENT_READ, lambda events: self._hear_worker(worker, events))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda events: self._bury(worker))
        self._selector.register(worker.output, selectors.EVENT_READ, lambda events: self._copy_output(worker))
        self._watch_log(worker, log)
        with contextlib.suppress(ConnectionLostError):  # it is dead already: its pidfd will say so
            for client in self._clients.values():
                self._introduce(client, connection)
            if self._draining:
                self.drain(worker)
        self._show(worker, board.RESTARTING if worker.was_ready else board.STARTING)
        self.after(self._start_timeout, lambda: self._check_loaded(worker, process))

    def _launch(self, worker: Worker) -> subprocess.Popen[bytes]:
        """Starts the process of a worker and notes it, with our ends of what connects us; OSError etc. if it cannot."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:  # ours only if it fails
            control, control_theirs = handshake.pair()
            ours.callback(control.close)
            theirs.callback(control_theirs.close)
            log, log_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            ours.callback(log.close)
            theirs.callback(log_theirs.close)
            log.setblocking(False)
            pipe, request_pipe = os.pipe()
            ours.callback(os.close, request_pipe)
            theirs.callback(os.close, pipe)
            output, output_theirs = os.pipe2(os.O_NONBLOCK)
            ours.callback(os.close, output)
            theirs.callback(os.close, output_theirs)
            os.set_blocking(output_theirs, True)
            given = (worker.config, control_theirs.fileno(), pipe, log_theirs.fileno(), self._board.fd)
            root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            code = (
                f"import sys; sys.path[:0] = [{root!r}]; "
                f"from batch_inference.payload import enter; enter({worker.config}); "
                f"from batch_inference.worker import main; main{(worker.index, *given)}"
            )
            process = subprocess.Popen(
                [self._settings["python"], *self._settings["flags"], "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output_theirs,
                stderr=output_theirs,
                pass_fds=given,
                env={**os.environ, **self._settings["environments"][worker.place]},
                start_new_session=True,
                preexec_fn=self._dies_with_us,
            )
            ours.callback(process.wait)
            ours.callback(process.kill)
            worker.pidfd = os.pidfd_open(process.pid)
            worker.process, worker.connection, worker.log = process, Connection(control), log
            worker.pipe, worker.output = request_pipe, output
            ours.pop_all()
        return process

    def _introduce(self, client: Client, connection: Connection) -> None:
        """Tells a new worker all that a client has shared so far."""
        for number, fd in enumerate(client.segments):
            connection.send(segment_message(client, number), [fd])
        for number, (kind, fd) in enumerate(client.channels):
            connection.send(channels_message(client, number, kind), [fd])

    def _tell_workers(self, message: Message, fds: list[int] | None = None) -> None:
        for worker in self.workers:
            self._tell(worker, message, fds)

    def _tell(self, worker: Worker, message: Message, fds: list[int] | None = None) -> None:
        if worker.connection is not None:
            with contextlib.suppress(ConnectionLostError):  # it is dying; its pidfd will say so
                worker.connection.send(message, fds or [])

    def _hear_worker(self, worker: Worker, events: int) -> None:
        connection = worker.connection
        assert connection is not None
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            while worker.connection is connection and (received := connection.receive()) is not None:
                message, fds = received
                try:
                    self._note(worker, message, fds)
                finally:
                    handshake.close_all(fds)
        except ConnectionLostError:
            self._unwatch(connection)  # it is dying, or a model closed our descriptors: then it must die
            connection.close()
            worker.connection = None
            if worker.process is not None:
                self.after(QUIT_TIMEOUT, worker.process.kill)

    def _note(self, worker: Worker, message: Message, fds: list[int]) -> None:
        kind = message["type"]
        if kind == "ready":
            worker.ready = True
            self._show(worker, board.READY)
            if worker.succeeds:
                assert self._reload is not None
                self._reload.ready()
                return
            worker.was_ready = True
            for client in self.members():
                self.tell_ready(client, worker)
        elif kind == "failed":
            worker.failure = message["traceback"]
        elif kind == "reply":
            for client in list(self._clients.values()):
                if client.number == message["client"] and client.row >= 0:
                    self.send(client, message, fds)
        elif kind == "unable":  # to take what a client shares: it must hear of it
            for client in list(self._clients.values()):
                if client.number == message["client"]:
                    self._drop(client, message["why"])

    def _bury(self, worker: Worker) -> None:
        """A worker has died: says so to all, and starts its next incarnation or gives up."""
        self._copy_output(worker)
        self._copy_log(worker)
        if worker.connection is not None:
            self._hear_worker(worker, 0)  # what it said last: the traceback of a failed load, or a reply
        assert worker.process is not None
        pid, code = worker.process.pid, worker.process.wait()
        processes.kill_orphans(pid)
        who, how = str(worker), worker.killed or processes.describe_exit(code)
        self._close(worker)
        self._show(worker, board.STOPPED if self._stopping else board.RESTARTING)  # before anybody hears of it
        message = {
            "type": "gone",
            "worker": worker.index,
            "incarnation": worker.incarnation,
            "cause": f"{who} {how}",
            "output": handshake.shorten("".join(worker.tail)),
            "code": code,
            "ours": worker.killed is not None,
        }
        self._tell_clients(message)
        if self._stopping:
            return
        if worker.succeeds or worker.retires:
            if worker.succeeds and self._reload is not None:
                self._reload.died(worker, f"{who} {how}")
            self.remove(worker)
            return
        served = self._batches(worker) > worker.batches_at_start
        worker.failures = 1 if served else worker.failures + 1
        if not worker.was_ready:
            self._give_up(worker, f"{who} {how}")
            return
        self._restarts.died((worker.index, worker.incarnation), time.monotonic(), self._served())
        delay, what = restart_delay(worker.failures), f"{who} {how}"
        if self._too_many_restarts():
            self.after(max(delay, VERDICT_TIMEOUT), lambda: self._after_verdict(worker, what))
        else:
            self._warn(f"{what}; it is started again")
            self.after(delay, lambda: self._restart(worker, what))

    def _warn(self, text: str) -> None:
        """A record in the application's log."""
        self._tell_application({"type": "log", "record": {"name": "batch_inference", "msg": text} | WARNING})

    def _after_verdict(self, worker: Worker, what: str) -> None:
        """A death was one too many, unless clients have convicted a request of it meanwhile."""
        again = not self._too_many_restarts()
        if not self._stopping and not worker.retires:
            self._warn(f"{what}; {'it is started again' if again else 'the host gives up, see max_restarts'}")
        self._restart(worker, what)

    def _restart(self, worker: Worker, what: str) -> None:
        if self._stopping or worker.retires:
            return
        if self._too_many_restarts():
            self._give_up(worker, what)
            return
        self._board.quads[worker.index * board.WORKER_CELLS + board.WORKER_RESTARTS] += 1
        self.spawn(worker)

    def _too_many_restarts(self) -> bool:
        return self._restarts.exceeded(time.monotonic(), self._served())

    def _close(self, worker: Worker) -> None:
        for source in (worker.connection, worker.pidfd, worker.output, worker.log):
            if source is not None:
                self._unwatch(source)
        if worker.connection is not None:
            worker.connection.close()
        if worker.log is not None:
            worker.log.close()
        handshake.close_all([worker.pidfd, worker.pipe, worker.output])
        worker.process = worker.connection = worker.log = None
        worker.ready = False

    def _give_up(self, worker: Worker, what: str) -> None:
        self._show(worker, board.FAILED_STATE)
        self._tell_clients(
            {
                "type": "failed",
                "loading": worker.failure is not None or worker.unstarted is not None or not worker.was_ready,
                "what": what,
                "unstarted": worker.unstarted,
                "traceback": worker.failure and handshake.shorten(worker.failure),
                "output": handshake.shorten("".join(worker.tail)),
                "restarts": self._settings["max_restarts"],
            }
        )
        self._stop()

    def _copy_output(self, worker: Worker) -> None:
        """Passes on what a worker printed, and remembers its last lines for the message on its death."""
        for _ in range(64):
            try:
                data = os.read(worker.output, 8192)
            except BlockingIOError:
                return
            if not data:  # closed by the worker, which is dying, or daemonised its output
                self._unwatch(worker.output)
                return
            text = data.decode(errors="replace")
            for line in text.splitlines(keepends=True):
                if worker.tail and not worker.tail[-1].endswith("\n"):
                    worker.tail[-1] = (worker.tail[-1] + line)[-2000:]
                else:
                    worker.tail.append(line[-2000:])
            self._tell_application({"type": "output", "text": text})

    def _watch_log(self, worker: Worker, log: socket.socket) -> None:
        self._selector.register(log, selectors.EVENT_READ, lambda events: self._copy_log(worker))

    def _copy_log(self, worker: Worker) -> None:
        """Passes on a worker's records. While the application is behind they are left to wait, see logs.py."""
        assert worker.log is not None
        for _ in range(64):
            if self._application_is_behind():
                self._unwatch(worker.log)
                return
            try:
                data = worker.log.recv(handshake.MAX_MESSAGE)
            except OSError:  # nothing there now
                return
            try:
                self._tell_application({"type": "log", "record": json.loads(data)})
            except ValueError:
                pass  # a record that was cut short

    # --- another model (see reloading.py) -------------------------------------------------------------------------

    def _begin_reload(self, client: Client, config: int) -> None:
        """Starts a reload; one that a client asks for again after an election may have happened already."""
        try:
            settings = payload.read_settings(config)
            if settings.keys() != self._settings.keys() or settings["workers"] != self._settings["workers"]:
                raise ConnectionLostError("not a payload of this host")
            newer = settings["revision"] > self._settings["revision"]
        except (ConnectionLostError, struct.error, ArithmeticError, MemoryError, TypeError, ValueError) as error:
            os.close(config)
            raise ConnectionLostError("not a payload") from error
        if not newer:
            happened = os.path.samestat(os.fstat(config), os.fstat(self._config))
            os.close(config)
            why = "another process has changed the model at the same time: try again"
            self.send(client, {"type": "reloaded"} if happened else {"type": "reload failed", "refused": why})
            return
        if self._stopping or (self._reload is not None and not self._reload.over):
            os.close(config)
            why = "another reload is under way: try again when it has ended"
            self.send(client, {"type": "reload failed", "refused": why})
            return
        self._reload = Reload(self, client, config, settings)
        self._reload.start()

    def new_worker(self, place: int, config: int) -> Worker | None:
        """A worker for a free row of the board, not started; None if there is none."""
        used = {worker.index for worker in self.workers}
        index = next((index for index in range(board.MAX_WORKERS) if index not in used), None)
        if index is None:
            return None
        worker = Worker(index, place, config)
        self.workers.append(worker)
        self._board.quads[index * board.WORKER_CELLS + board.WORKER_RESTARTS] = 0
        return worker

    def adopt(self, config: int, settings: payload.Settings) -> None:
        """From now on workers and elections are made from this payload."""
        os.close(self._config)
        self._config, self._settings = config, settings

    def outstanding(self, worker: Worker) -> int:
        return board.outstanding(self._board.quads, worker.index)

    def drain(self, worker: Worker) -> None:
        """Tells a worker that no more will come."""
        self._tell(worker, {"type": "drain"})

    def quit(self, worker: Worker) -> None:
        """Asks a worker to end, and kills it if it does not."""
        if worker.asked or worker.connection is None or worker.process is None:
            return
        worker.asked = True
        self._tell(worker, {"type": "quit"})
        self.after(QUIT_TIMEOUT, worker.process.kill)

    def remove(self, worker: Worker) -> None:
        """Forgets a worker that has no process any more."""
        if worker in self.workers:
            self.workers.remove(worker)
            self._show(worker, board.STOPPED)

    # --- hangs ----------------------------------------------------------------------------------------------------

    def _look_for_hangs(self) -> None:
        """Kills those workers that have had something to do and have given no sign of life for batch_timeout.

        A worker whose answers have not been collected yet looks as if it had something to do; a ping makes it give a
        sign of life.
        """
        assert self._batch_timeout is not None
        for worker in self.workers:
            if worker.process is None or not worker.ready:
                continue
            beats = self._board.quads[board.worker_row(worker.index) + board.BEATS]
            silent = worker.pulse.look(beats, self.outstanding(worker), time.monotonic())
            if silent >= self._batch_timeout:
                worker.killed = (
                    f"hung for {silent:.3g} s in a batch: killed after batch_timeout={self._batch_timeout:g} s"
                )
                worker.process.kill()
            elif silent and not worker.pinged:
                self._tell(worker, {"type": "ping"})
            worker.pinged = bool(silent)
        self.after(self._look_interval, self._look_for_hangs)

    def _check_loaded(self, worker: Worker, process: subprocess.Popen[bytes]) -> None:
        """Kills a worker that still loads its model after start_timeout."""
        if worker.process is process and not worker.ready:
            worker.killed = f"was killed: its model was not ready within start_timeout={self._start_timeout:g} s"
            process.kill()

    # --- ends and odds --------------------------------------------------------------------------------------------

    def _stop_if_never_used(self) -> None:
        if not self._started:
            self._stop_if_unused()

    def _stop_if_unused(self) -> None:
        if not any(client.row >= 0 for client in self._clients.values()):
            self._stop()

    def _stop(self) -> None:
        """Takes no more clients and ends the workers: asked first, killed later."""
        if self._stopping:
            return
        self._stopping = True
        if self._listener is not None:
            self._unwatch(self._listener)
            address = self._listener.getsockname()
            if isinstance(address, str) and address:
                handshake.unlink(address)
            self._listener.close()
        self._tell_workers({"type": "quit"})
        for worker in self.workers:
            if worker.process is not None:
                self.after(QUIT_TIMEOUT if worker.ready else 0.0, worker.process.kill)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._counter), callback))

    def _unwatch(self, source: int | Connection | socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _watch_for_room(self) -> None:
        """Asks the selector about room in those sockets that could not take all we had to say."""
        connections = [c.connection for c in self._clients.values()]
        connections += [w.connection for w in self.workers if w.connection is not None]
        for connection in connections:
            key = self._selector.get_key(connection)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            if key.events != wanted:
                self._selector.modify(connection, wanted, key.data)
        if not self._application_is_behind():
            for worker in self.workers:
                if worker.log is not None and worker.log not in self._selector.get_map():
                    self._watch_log(worker, worker.log)

    def _show(self, worker: Worker, state: int) -> None:
        at = worker.index * board.WORKER_CELLS
        self._board.quads[at + board.WORKER_PID] = worker.process.pid if worker.process else 0
        self._board.quads[at + board.WORKER_STATE] = state

    def _served(self) -> int:
        """Batches of all workers since the host began."""
        return sum(self._board.quads[board.worker_row(index) + board.BATCHES] for index in range(board.MAX_WORKERS))

    def _batches(self, worker: Worker) -> int:
        return self._board.quads[board.worker_row(worker.index) + board.BATCHES]


def segment_message(client: Client, number: int) -> Message:
    return {"type": "segment", "client": client.number, "number": number}


def channels_message(client: Client, first: int, kind: str) -> Message:
    return {"type": "channels", "client": client.number, "first": first, "kind": kind}


def excuse(listener: socket.socket, why: str) -> None:
    """Tells whoever elected us why there will be no supervisor."""
    with contextlib.suppress(OSError):
        listener.settimeout(FIRST_CLIENT_TIMEOUT)
        client, _ = listener.accept()
        client.settimeout(FIRST_CLIENT_TIMEOUT)
        client.recv(handshake.MAX_MESSAGE)  # its hello: where one is left unread, what we say is lost
        client.send(json.dumps({"type": "unable", "why": handshake.shorten(why)}).encode())


def main(listener: int, config: int) -> None:
    for fd in (listener, config):
        os.set_inheritable(fd, False)
    processes.become_supervisor()
    listening = socket.socket(fileno=listener)
    try:
        supervisor = Supervisor(listening, config)
    except Exception as error:
        excuse(listening, str(error))
        raise
    supervisor.run()
    if sys.stdout is not None:  # closed by the application
        sys.stdout.flush()

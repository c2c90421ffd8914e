"""How a host changes its model while it serves: each worker gets a successor, which takes over between two batches.

    the client that wants it   --reload, with the new payload-->  supervisor
    supervisor                 starts a successor for each worker, in a free row of the board
    successors                 --ready-->                         all of them: the new payload is the host's
    supervisor                 --ready, retiring-->               clients: send nothing more to the old workers
    clients                    --retired-->                       what they have sent by then is counted on the board
    supervisor                 --drain, quit-->                   an old worker, when all clients have said so; and when
                                                                  it has nothing outstanding any more

A successor that dies or fails before all are ready ends the reload, and the old workers go on. Whoever dies later is
what it always was: a worker whose requests are sent again to those that are ready.

A payload has a *revision*, so that after the death of the supervisor the newest one wins, whoever was told of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from batch_inference.crew import Client, Worker
from batch_inference.transport import handshake
from batch_inference.transport.handshake import Message

FIRST_LOOK, LAST_LOOK = 0.02, 1.0  # seconds between two looks at what old workers still have to do


class Host(Protocol):
    """What a reload needs of the supervisor."""

    workers: list[Worker]

    def new_worker(self, place: int, config: int) -> Worker | None: ...
    def spawn(self, worker: Worker) -> None: ...
    def members(self) -> list[Client]: ...
    def send(self, client: Client, message: Message, fds: list[int] | None = None) -> None: ...
    def tell_ready(self, client: Client, worker: Worker, succeeds: bool = False) -> None: ...
    def adopt(self, config: int, settings: dict[str, Any]) -> None: ...
    def outstanding(self, worker: Worker) -> int: ...
    def drain(self, worker: Worker) -> None: ...
    def quit(self, worker: Worker) -> None: ...
    def remove(self, worker: Worker) -> None: ...
    def after(self, seconds: float, callback: Callable[[], None]) -> None: ...


class Reload:
    """A change of model whose successors load. Takes over the descriptor `config`."""

    def __init__(self, host: Host, client: Client, config: int, settings: dict[str, Any]) -> None:
        self._host = host
        self._client = client
        self._config = config
        self._settings = settings  # as they were read from it when it came
        self._predecessors = [worker for worker in host.workers if not worker.retires and not worker.succeeds]
        self._successors: list[Worker] = []
        self.over = False

    def start(self) -> None:
        for worker in self._predecessors:
            successor = self._host.new_worker(worker.place, self._config)
            if successor is None:
                self._fail("there is no place for so many workers beside each other, old ones still have work to do")
                return
            successor.succeeds = True
            self._successors.append(successor)
        for successor in self._successors:
            if not self.over:
                self._host.spawn(successor)

    def ready(self) -> None:
        """A successor is ready. When all are, they take over."""
        if self.over or not all(successor.ready for successor in self._successors):
            return
        self.over = True
        self._host.adopt(self._config, self._settings)
        for successor in self._successors:
            successor.succeeds, successor.was_ready = False, True
        clients = self._host.members()
        for worker in self._predecessors:
            worker.retires = True
            worker.listeners = {client.number for client in clients}
        message = {"type": "retiring", "workers": [worker.index for worker in self._predecessors]}
        for client in clients:
            for successor in self._successors:
                self._host.tell_ready(client, successor, succeeds=True)
            self._host.send(client, message, [self._config])
        self._answer({"type": "reloaded"})
        retire(self._host, FIRST_LOOK)

    def died(self, worker: Worker, what: str) -> None:
        """A worker that was to succeed has died, or cannot be started; perhaps one of an earlier reload."""
        if worker in self._successors:
            self._fail(what, worker.failure, "".join(worker.tail), worker.unstarted)

    def _fail(self, what: str, traceback: str | None = None, output: str = "", unstarted: str | None = None) -> None:
        """There will be no successors: those that load are ended, and the old workers stay."""
        if self.over:
            return
        self.over = True
        self._answer(
            {
                "type": "reload failed",
                "loading": True,
                "what": what,
                "unstarted": unstarted,
                "traceback": traceback and handshake.shorten(traceback),
                "output": handshake.shorten(output),
            }
        )
        for successor in self._successors:
            if successor.process is None:
                self._host.remove(successor)
            else:
                successor.process.kill()
        os.close(self._config)

    def _answer(self, message: dict[str, Any]) -> None:
        if self._client in self._host.members():
            self._host.send(self._client, message)


def retire(host: Host, pause: float) -> None:
    """Ends those old workers that have nothing to do and will not get anything, and looks again for the others."""
    for worker in [worker for worker in host.workers if worker.retires]:
        if worker.process is None:
            host.remove(worker)
        elif not worker.listeners:
            if host.outstanding(worker):
                host.drain(worker)
            else:
                host.quit(worker)
    if any(worker.retires and not worker.asked for worker in host.workers):
        host.after(pause, lambda: retire(host, min(2 * pause, LAST_LOOK)))

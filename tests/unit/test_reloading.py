"""What follows from what happens while a host changes its model."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from batch_inference.crew import Client, Worker
from batch_inference.reloading import LAST_LOOK, Reload, retire


class Host:
    """A supervisor that notes what it is told to do."""

    def __init__(self, workers: int, clients: int, rows: int = 8) -> None:
        self.workers = [Worker(index, index, -1) for index in range(workers)]
        for worker in self.workers:
            self.start(worker)
        self.clients: list[Any] = [SimpleNamespace(number=number) for number in range(1, clients + 1)]
        self.said: list[tuple[int, str]] = []
        self.left: dict[int, int] = {}
        self.config = -1
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.quits: list[int] = []
        self.drained: list[int] = []
        self._rows = rows

    def start(self, worker: Worker) -> None:
        worker.process, worker.ready = SimpleNamespace(kill=lambda: self.quits.append(-worker.index)), True  # type: ignore

    def new_worker(self, place: int, config: int) -> Worker | None:
        index = next((n for n in range(self._rows) if n not in {w.index for w in self.workers}), None)
        if index is None:
            return None
        self.workers.append(Worker(index, place, config))
        return self.workers[-1]

    def spawn(self, worker: Worker) -> None:
        self.start(worker)
        worker.ready = False

    def members(self) -> list[Client]:
        return list(self.clients)

    def send(self, client: Client, message: dict[str, Any], fds: list[int] | None = None) -> None:
        self.said.append((client.number, message["type"]))

    def tell_ready(self, client: Client, worker: Worker, succeeds: bool = False) -> None:
        assert succeeds  # the client keeps it back until it hears who retires
        self.said.append((client.number, f"ready {worker.index}"))

    def adopt(self, config: int, settings: dict[str, Any]) -> None:
        self.config = config

    def drain(self, worker: Worker) -> None:
        self.drained.append(worker.index)

    def outstanding(self, worker: Worker) -> int:
        return self.left.get(worker.index, 0)

    def quit(self, worker: Worker) -> None:
        worker.asked = True
        self.quits.append(worker.index)

    def remove(self, worker: Worker) -> None:
        self.workers.remove(worker)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((seconds, callback))

    def look(self) -> float:
        (seconds, callback) = self.timers.pop()
        callback()
        return seconds

    def indices(self) -> list[int]:
        return [worker.index for worker in self.workers]


@pytest.fixture
def config() -> int:
    return os.memfd_create("config")


def begin(host: Host, config: int) -> Reload:
    reload = Reload(host, host.clients[0], config, {})
    reload.start()
    return reload


def test_successors_take_over_when_all_are_ready_and_clients_hear_of_them_before_the_old_ones_retire(
    config: int,
) -> None:
    host = Host(2, 2)
    reload = begin(host, config)
    old, new = host.workers[:2], host.workers[2:]
    assert [worker.place for worker in new] == [0, 1] and [worker.config for worker in new] == [config] * 2
    new[0].ready = True
    reload.ready()
    assert not host.said and host.config == -1
    new[1].ready = True
    reload.ready()
    assert host.config == config and reload.over
    for client in (1, 2):
        heard = [what for number, what in host.said if number == client and what != "reloaded"]
        assert heard == ["ready 2", "ready 3", "retiring"]
    assert host.said[-1] == (1, "reloaded")
    assert all(worker.retires for worker in old) and not any(worker.retires or worker.succeeds for worker in new)
    os.close(config)


def test_an_old_worker_ends_when_no_client_will_send_to_it_and_it_has_answered_all(config: int) -> None:
    host = Host(1, 2)
    reload = begin(host, config)
    old, new = host.workers
    new.ready, host.left = True, {0: 3}
    reload.ready()
    host.look()
    old.listeners.discard(1)
    host.left = {}
    host.look()
    assert not host.quits  # client 2 may still send
    old.listeners.discard(2)
    assert not host.drained
    host.left = {0: 1}
    host.look()
    assert host.drained == [0] and not host.quits  # it is not to wait for requests that will not come
    host.left = {}
    host.look()
    assert host.quits == [0] and not host.timers
    os.close(config)


def test_looks_get_rarer_while_a_client_does_not_say_that_it_has_heard(config: int) -> None:
    host = Host(1, 1)
    reload = begin(host, config)
    host.workers[1].ready = True
    reload.ready()
    pauses = [host.look() for _ in range(12)]
    assert pauses == sorted(pauses) and pauses[-1] == LAST_LOOK
    os.close(config)


def test_an_old_worker_that_is_dead_when_its_successor_takes_over_is_forgotten(config: int) -> None:
    host = Host(1, 1)
    reload = begin(host, config)
    host.workers[0].process = None  # and would have been restarted
    host.workers[1].ready = True
    reload.ready()
    assert host.indices() == [1] and not host.timers
    os.close(config)


def test_a_successor_that_dies_ends_the_others_and_keeps_the_old_ones(config: int) -> None:
    host = Host(2, 1)
    reload = begin(host, config)
    host.workers[2].ready = True
    dead = host.workers[3]
    dead.process, dead.failure = None, "Traceback"
    reload.died(dead, "worker 3 exited with code 1")
    assert host.said == [(1, "reload failed")] and host.quits == [-2] and host.indices() == [0, 1, 2]
    assert reload.over and host.config == -1
    host.workers[2].process = None
    reload.died(host.workers[2], "worker 2 was killed")  # by us
    reload.ready()
    assert len(host.said) == 1
    with pytest.raises(OSError):
        os.fstat(config)


def test_a_death_of_an_earlier_reload_is_not_one_of_this(config: int) -> None:
    host = Host(1, 1)
    straggler = host.new_worker(0, -1)
    assert straggler is not None
    straggler.succeeds = True
    reload = begin(host, config)
    assert host.indices() == [0, 1, 2]
    reload.died(straggler, "worker 1 was killed")
    assert not reload.over and not host.said
    os.close(config)


def test_without_room_on_the_board_nothing_changes(config: int) -> None:
    host = Host(3, 1, rows=5)
    reload = begin(host, config)
    assert reload.over and host.said == [(1, "reload failed")] and host.indices() == [0, 1, 2]


def test_who_asked_may_be_gone(config: int) -> None:
    host = Host(1, 2)
    reload = begin(host, config)
    del host.clients[0]
    host.workers[1].ready = True
    reload.ready()
    assert host.said == [(2, "ready 1"), (2, "retiring")]
    retire(host, 0.1)
    os.close(config)

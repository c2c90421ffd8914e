"""The table of faults of a worker, each caused for real while it deals with a request.

For each cell, three requests share a batch, of which one strikes at the place, and two wait meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from batch_inference import ModelError, ModelHost, WorkerDiedError
from batch_inference.errors import RemoteTraceback
from batch_inference.policy import FixedDelay
from batch_inference.testing import alive, wait_until
from tests.faults import table
from tests.faults.doubles import BATCH, Item, Strikes, Struck, here
from tests.faults.table import Outcome
from tests.process.load import MANY, supervisor_pid, worker_pid

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # of Python 3.12 and later

PLACES = [place for place in table.WORKER if place not in (table.LOADING, table.LOADING_AGAIN)]
HOW = {  # what the message says of the death
    table.EXIT: "exited with code 7",
    table.KILL: "SIGKILL",
    table.SEGFAULT: "SIGSEGV",
    table.STOP: "batch_timeout",
}
TOGETHER = 0.3  # seconds for three requests to come together
PATIENCE = 60.0


@pytest.fixture(scope="module")
def shared_host(request: pytest.FixtureRequest) -> Iterator[ModelHost]:
    """One host for all cells of the module, which leave it as good as new; another for those that are about hangs."""
    limit = 1.0 if request.param == "impatient" else 600.0
    options: dict[str, Any] = {"max_restarts": MANY, "batch_timeout": limit, "policy": FixedDelay(TOGETHER)}
    with ModelHost(Struck, batcher=Strikes(), max_batch_size=BATCH, **options)() as host:
        yield host


def cells() -> list[Any]:
    found = []
    for place in PLACES:
        for fault, outcome in table.WORKER[place].items():
            host = "impatient" if fault == table.STOP else "patient"
            found.append(pytest.param(host, place, fault, outcome, id=f"{place}-{fault}"))
    return found


class Caller:
    """A process that uses the host to send one request, when told to, and waits for the answer; to be killed."""

    def __init__(self, host: ModelHost, item: Item) -> None:
        ready, say_ready = os.pipe()
        go, self._say_go = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self._say_go)
                assert host.predict(Item(0, weight=BATCH), timeout=PATIENCE) == 0
                os.write(say_ready, b"!")
                os.read(go, 1)
                item.caller = os.getpid()
                host.predict(item, timeout=PATIENCE)
                signal.pause()
            finally:
                os._exit(1)
        os.close(say_ready)
        os.close(go)
        assert os.read(ready, 1), "the caller failed"
        os.close(ready)

    def send(self) -> None:
        os.write(self._say_go, b"!")

    def status(self) -> int:
        os.close(self._say_go)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize(("shared_host", "place", "fault", "expected"), cells(), indirect=["shared_host"])
def test_what_callers_see(shared_host: ModelHost, place: str, fault: str, expected: Outcome, tmp_path: Path) -> None:
    host, gate = shared_host, tmp_path / "gate"
    worker = worker_pid(host)
    item = Item(50, place=place, fault=fault, gate=str(gate))
    caller = Caller(host, item) if fault == table.CALLER_GONE else None
    mates = [host.submit(Item(1))]
    culprit = None if caller else host.submit(item)
    mates.append(host.submit(Item(2)))
    if caller:
        caller.send()
    wait_until(lambda: os.path.exists(here(str(gate))), PATIENCE, "the culprit is where it strikes")
    if place == table.IDLE:
        assert [mate.result(PATIENCE) for mate in mates] == [2, 4]
        gate.touch()
        wait_until(lambda: struck(host, worker, fault, caller), PATIENCE, "the idle worker is struck")
    waiting = [host.submit(Item(number, weight=BATCH)) for number in (10, 11)]
    gate.touch()
    assert (told(culprit, fault), *map(told_all, (mates, waiting))) == expected
    assert caller is None or caller.status() == -signal.SIGKILL
    assert host.predict(Item(100, weight=BATCH), timeout=PATIENCE) == 200
    nothing_is_left_in(host)


def told(future: Future[Any] | None, fault: str) -> str:
    """What the culprit's caller is told, in the words of the table."""
    if future is None:
        return table.NOBODY
    error = future.exception(PATIENCE)
    if error is None:
        assert future.result() == 100
        return table.ANSWERED
    if isinstance(error, WorkerDiedError):
        assert HOW[fault] in str(error), error
        return table.DIED
    assert "strike of 50" in str(error) and isinstance(error.__cause__, RemoteTraceback), error
    return table.MODEL_ERROR if isinstance(error, ModelError) else table.OWN_ERROR


def told_all(futures: list[Future[Any]]) -> str:
    """What others are told: they are answered, each with its own result."""
    results = [future.result(PATIENCE) for future in futures]
    assert results in ([2, 4], [20, 22])
    return table.ANSWERED


def struck(host: ModelHost, worker: int, fault: str, caller: Caller | None) -> bool:
    """Whether the fault of an idle worker has taken effect."""
    if caller is not None:
        return not alive(caller.pid)
    if fault == table.STOP:
        return bool(psutil.Process(worker).status() == psutil.STATUS_STOPPED)
    return fault in (table.RAISE, table.UNPICKLABLE) or not alive(worker)


def nothing_is_left_in(host: ModelHost) -> None:
    """All slots are free, nothing is pending, and the supervisor has one child: the worker."""
    wait_until(lambda: host._client is not None and host._client.idle, PATIENCE, "all slots are back")
    wait_until(lambda: host.statistics().pending == 0, PATIENCE, "nothing is pending")
    supervisor = psutil.Process(supervisor_pid(host))
    wait_until(lambda: [child.pid for child in supervisor.children(recursive=True)] == [worker_pid(host)], PATIENCE)

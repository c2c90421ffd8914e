"""The table of faults of the supervisor: whatever happens to it, callers are answered."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batch_inference import ModelHost, WorkerDiedError
from batch_inference.link import ELECTIONS
from batch_inference.testing import wait_until
from batch_inference.transport import handshake
from tests.faults import table
from tests.faults.doubles import BATCH, Item, Strikes, Struck, here
from tests.faults.test_workers import PATIENCE, nothing_is_left_in
from tests.process.load import kill, supervisor_pid, worker_pid

Scene = Callable[[Path, str, pytest.MonkeyPatch], None]


@contextmanager
def struck(supervisor: int, fault: str) -> Iterator[None]:
    """What happens within happens while the supervisor is stopped, or after it was killed."""
    if fault == table.SUPERVISOR_STOPPED:
        kill(supervisor, signal.SIGSTOP)
    else:
        kill(supervisor, signal.SIGKILL if fault == table.SUPERVISOR_KILLED else signal.SIGTERM)
    try:
        yield
    finally:
        if fault == table.SUPERVISOR_STOPPED:
            kill(supervisor, signal.SIGCONT)


def check(host: ModelHost, supervisor: int, fault: str) -> None:
    """The host is as good as new; under the same supervisor, if that was stopped only."""
    assert host.predict(Item(100), timeout=PATIENCE) == 200
    nothing_is_left_in(host)
    assert (supervisor_pid(host) == supervisor) == (fault == table.SUPERVISOR_STOPPED)


def while_idle(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelHost(Struck, batcher=Strikes())() as host:
        assert host.predict(Item(1), timeout=PATIENCE) == 2
        supervisor = supervisor_pid(host)
        with struck(supervisor, fault):
            waiting = host.submit(Item(2))
        assert waiting.result(PATIENCE) == 4
        check(host, supervisor, fault)


def while_a_batch_runs(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = folder / "gate"
    with ModelHost(Struck, batcher=Strikes(), max_batch_size=BATCH)() as host:
        supervisor = supervisor_pid(host)
        running = host.submit(Item(1, place=table.RUNNING, gate=str(gate)))
        wait_until(Path(here(str(gate))).exists, PATIENCE, "the batch runs")
        waiting = [host.submit(Item(number, weight=BATCH)) for number in (2, 3)]
        with struck(supervisor, fault):
            gate.touch()
            waiting.append(host.submit(Item(4)))
        assert [future.result(PATIENCE) for future in (running, *waiting)] == [2, 4, 6, 8]
        check(host, supervisor, fault)


def while_a_worker_restarts(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, loads = folder / "gate", folder / "loads"
    loads.mkdir()
    with ModelHost(Struck, batcher=Strikes())(str(loads), 2, "", str(gate)) as host:
        supervisor = supervisor_pid(host)
        kill(worker_pid(host))
        waiting = [host.submit(Item(1))]
        wait_until(Path(here(str(gate))).exists, PATIENCE, "the model loads again")
        with struck(supervisor, fault):
            gate.touch()
            waiting.append(host.submit(Item(2)))
        assert [future.result(PATIENCE) for future in waiting] == [2, 4]
        check(host, supervisor, fault)


def while_a_client_joins(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, connected = handshake.connect_or_listen, threading.Event()

    def watched(*arguments: Any) -> Any:
        found = connect(*arguments)
        connected.set()
        return found

    with tempfile.TemporaryDirectory(prefix="bi-") as short:  # a socket's path may have 107 characters
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        host, other = (ModelHost(Struck, batcher=Strikes(), name="joined", linger=0.1)() for _ in range(2))
        with host:
            supervisor = supervisor_pid(host)
            kill(supervisor, signal.SIGSTOP)
            monkeypatch.setattr(handshake, "connect_or_listen", watched)
            joining = threading.Thread(target=other.start)
            joining.start()
            assert connected.wait(PATIENCE)
            with struck(supervisor, fault):
                waiting = host.submit(Item(1))
            kill(supervisor, signal.SIGCONT)  # a stopped process does not hear of SIGTERM
            joining.join(PATIENCE)
            assert waiting.result(PATIENCE) == 2
            assert other.predict(Item(2), timeout=PATIENCE) == 4
            assert supervisor_pid(other) == supervisor_pid(host)
            other.stop()
            check(host, supervisor, fault)


SCENES: dict[str, Scene] = {
    table.JOINING: while_a_client_joins,
    table.IDLE: while_idle,
    table.BATCH_RUNS: while_a_batch_runs,
    table.WORKER_RESTARTS: while_a_worker_restarts,
}
CELLS = [pytest.param(place, fault, id=f"{place}-{fault}") for place, row in table.SUPERVISOR.items() for fault in row]


@pytest.mark.parametrize(("place", "fault"), CELLS)
def test_callers_are_answered_whatever_happens_to_the_supervisor(
    place: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert table.SUPERVISOR[place][fault] == table.ANSWERED
    SCENES[place](tmp_path, fault, monkeypatch)


def test_a_host_whose_supervisor_is_killed_over_and_over_gives_up_and_says_so_everywhere() -> None:
    with ModelHost(Struck, batcher=Strikes())() as host:
        assert host._client is not None
        link: Any = host._client.link
        for _ in range(ELECTIONS):
            assert host.predict(Item(1), timeout=PATIENCE) == 2
            killed = link._supervisor_pid
            kill(killed)
            wait_until(lambda killed=killed: link._supervisor_pid != killed and host.ready, PATIENCE)
        assert host.healthy and host.predict(Item(1), timeout=PATIENCE) == 2
        kill(link._supervisor_pid)
        wait_until(lambda: not host.healthy, PATIENCE)
        with pytest.raises(WorkerDiedError, match="stop.. and start.. the host"):
            host.predict(Item(1), timeout=PATIENCE)
        seen = host.statistics()
        assert (seen.state, seen.workers, host.ready, host.healthy) == ("failed", (), False, False)
        assert ": failed," in repr(host)
        host.stop()
        host.start()
        assert host.predict(Item(2), timeout=PATIENCE) == 4

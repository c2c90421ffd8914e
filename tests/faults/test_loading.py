"""The rows of the table about a model that loads: for the first time, and again because its worker died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from batch_inference import ModelHost, ModelLoadError
from batch_inference.errors import RemoteTraceback
from batch_inference.testing import alive, wait_until
from tests.faults import table
from tests.faults.doubles import Item, Strikes, Struck
from tests.faults.table import Outcome
from tests.faults.test_workers import PATIENCE, nothing_is_left_in
from tests.process.load import MANY, kill, worker_pid

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # of Python 3.12 and later

LOAD_LIMIT = 6.0  # seconds, of which a stopped worker uses up all
HOW = {
    table.RAISE: "strike of load 1",
    table.UNPICKLABLE: "strike of load 1",
    table.EXIT: "exited with code 7",
    table.KILL: "SIGKILL",
    table.SEGFAULT: "SIGSEGV",
    table.STOP: "start_timeout",
}


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """A folder with a file for each load, named by its number and process."""
    folder = tmp_path / "loads"
    folder.mkdir()
    return folder


def host_that_strikes(loads: Path, load: int, fault: str) -> ModelHost:
    """The gate is open; the process to be killed is named in the file `caller` beside it."""
    gate, caller = loads.parent / "gate", loads.parent / "caller"
    gate.touch()
    options = {"max_restarts": MANY, "start_timeout": LOAD_LIMIT if fault == table.STOP else PATIENCE}
    host = ModelHost(Struck, batcher=Strikes(), **options)  # type: ignore[arg-type]
    return host(str(loads), load, fault, str(gate), str(caller) if fault == table.CALLER_GONE else "")


@pytest.mark.parametrize("fault", [fault for fault in table.WORKER[table.LOADING] if fault != table.CALLER_GONE])
def test_while_loading(loads: Path, fault: str) -> None:
    host = host_that_strikes(loads, 1, fault)
    with pytest.raises(ModelLoadError) as caught:
        host.start()
    assert table.WORKER[table.LOADING][fault] == Outcome(table.NOT_LOADED)
    assert HOW[fault] in str(caught.value)
    if fault in (table.RAISE, table.UNPICKLABLE):
        assert isinstance(caught.value.__cause__, RemoteTraceback)
    (load,) = os.listdir(loads)
    wait_until(lambda: not alive(int(load.split()[1])), PATIENCE, "the worker is gone")
    with host:  # the next load does not strike
        assert host.predict(Item(4), timeout=PATIENCE) == 8
        nothing_is_left_in(host)


def test_the_only_caller_is_killed_while_loading(loads: Path) -> None:
    assert table.WORKER[table.LOADING][table.CALLER_GONE].culprit == table.ENDS
    caller = os.fork()
    if not caller:
        try:
            (loads.parent / "caller").write_text(str(os.getpid()))
            host_that_strikes(loads, 1, table.CALLER_GONE).start()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(caller, 0)[1]) == -signal.SIGKILL
    (load,) = os.listdir(loads)
    wait_until(lambda: not alive(int(load.split()[1])), PATIENCE, "the worker ends when nobody is there to use it")


@pytest.mark.parametrize("fault", table.WORKER[table.LOADING_AGAIN])
def test_while_a_worker_loads_again(loads: Path, fault: str) -> None:
    with host_that_strikes(loads, 2, fault) as host:
        assert host.predict(Item(1), timeout=PATIENCE) == 2
        caller = 0
        if fault == table.CALLER_GONE:
            caller = waiting_caller(host, loads.parent / "caller")
        kill(worker_pid(host))
        waiting = [host.submit(Item(number)) for number in (2, 3)]
        assert [future.result(PATIENCE) for future in waiting] == [4, 6]
        expected = table.NOBODY if caller else table.ANSWERED
        assert table.WORKER[table.LOADING_AGAIN][fault] == Outcome(expected)
        if caller:
            assert os.waitstatus_to_exitcode(os.waitpid(caller, 0)[1]) == -signal.SIGKILL
        assert host.predict(Item(4), timeout=PATIENCE) == 8
        assert len(os.listdir(loads)) == (2 if caller else 3)
        nothing_is_left_in(host)


def waiting_caller(host: ModelHost, file: Path) -> int:
    """A process that uses the host; its process id is in `file`."""
    joined, say = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            assert host.predict(Item(1), timeout=PATIENCE) == 2
            os.write(say, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(say)
    assert os.read(joined, 1)
    os.close(joined)
    file.write_text(str(pid))
    return pid

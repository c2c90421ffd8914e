"""Applications that fork, before and after start: children have connections of their own, the parent's stays intact."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batch_inference import HostClosedError, ModelHost, RequestTimeoutError
from batch_inference.testing import Doubles, alive, wait_until
from tests.process.load import Load, kill, supervisor_pid, value, worker_pid
from tests.process.models import WhoAmI

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # of Python 3.12 and later


class Child:
    """A forked child that runs `function` and ends; its result or traceback comes back through a pipe."""

    def __init__(self, function: Callable[[], Any], end: Callable[[], None] = lambda: os._exit(0)) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.write(write, pickle.dumps((True, function())))
            except BaseException:
                os.write(write, pickle.dumps((False, traceback.format_exc())))
            finally:
                os.close(write)
                end()
                os._exit(1)
        os.close(write)

    def ended(self, timeout: float = 30.0) -> None:
        """Waits for the end of one that kills itself."""
        try:
            assert select.select([self._read], [], [], timeout)[0], "the child hangs"
            assert not os.read(self._read, 1), "the child has survived"
        finally:
            os.close(self._read)
            kill(self.pid)
            os.waitpid(self.pid, 0)

    def result(self, timeout: float = 30.0) -> Any:
        try:
            data, deadline = b"", time.monotonic() + timeout
            while True:
                assert select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0], "the child hangs"
                if not (part := os.read(self._read, 65536)):
                    break
                data += part
        finally:
            os.close(self._read)
            kill(self.pid)
            os.waitpid(self.pid, 0)
        ok, result = pickle.loads(data)
        assert ok, result
        return result


def all_ways(host: ModelHost, number: int) -> list[Any]:
    """The answers of predict, submit and apredict."""
    futures = [host.submit(value(number, index)) for index in range(5)]
    found = [host.predict(value(number, 5), timeout=20), asyncio.run(host.apredict(value(number, 6), timeout=20))]
    with ThreadPoolExecutor(4) as pool:
        found += pool.map(lambda index: host.predict(value(number, index), timeout=20), range(7, 20))
    return [answer.tolist() for answer in [*(future.result(timeout=20) for future in futures), *found]]


def expected(number: int) -> list[Any]:
    return [[[2 * number, 2 * index]] for index in range(20)]


@pytest.fixture
def host() -> Iterator[ModelHost]:
    with ModelHost(Doubles)() as host:
        yield host


def test_children_use_the_host_that_the_parent_had_started(host: ModelHost) -> None:
    assert all_ways(host, 1) == expected(1)
    children = [Child(lambda number=number: all_ways(host, number)) for number in range(2, 5)]
    assert all_ways(host, 5) == expected(5)
    for number, child in enumerate(children, 2):
        assert child.result() == expected(number)
    assert all_ways(host, 6) == expected(6)
    wait_until(lambda: host.statistics().pending == 0, 5)


def test_children_of_children_use_it_too_whether_or_not_their_parent_did(host: ModelHost) -> None:
    def child(first: bool) -> list[Any]:
        before = all_ways(host, 1) if first else []
        return before + Child(lambda: all_ways(host, 2)).result() + all_ways(host, 3)

    for first in (False, True):
        assert Child(lambda first=first: child(first)).result() == first * expected(1) + expected(2) + expected(3)
    assert all_ways(host, 4) == expected(4)


def test_apredict_is_the_first_use_in_a_child(host: ModelHost) -> None:
    async def calls() -> list[Any]:
        return [answer.tolist() for answer in await asyncio.gather(*[host.apredict(value(n)) for n in range(50)])]

    assert asyncio.run(calls()) == [[[2 * number]] for number in range(50)]
    assert Child(lambda: asyncio.run(calls())).result() == [[[2 * number]] for number in range(50)]
    assert asyncio.run(calls()) == [[[2 * number]] for number in range(50)]


def test_a_host_made_before_the_fork_is_started_in_the_children() -> None:
    host = ModelHost(WhoAmI)()

    def child() -> int:
        with host:
            return int(host.predict(value(0), timeout=20)[0, 0])

    workers = {Child(child).result() for _ in range(2)}
    assert len(workers) == 2
    with pytest.raises(HostClosedError):
        host.predict(value(0))
    with host:
        assert int(host.predict(value(0))[0, 0]) not in workers


def test_forks_while_other_threads_are_inside_predict_disturb_nobody(host: ModelHost) -> None:
    with Load(host, 8) as load:
        for number in range(12):
            load.wait_for_more(number)
            assert Child(lambda number=number: all_ways(host, number)).result() == expected(number)
        load.wait_for_all()
        load.stop()
        load.assert_clean()


def test_a_fork_while_another_thread_holds_the_locks_leaves_a_child_that_works(host: ModelHost) -> None:
    client: Any = host._client
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with client._lock, client._changed, client.arena._lock, client.link._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        assert Child(lambda: all_ways(host, 1)).result() == expected(1)
    finally:
        release.set()
        thread.join()
    assert all_ways(host, 2) == expected(2)


def test_a_fork_while_another_thread_starts_the_host_leaves_one_that_is_not_started() -> None:
    for delay in (0.0, 0.02, 0.1, 0.2):
        host = ModelHost(Doubles)()
        thread = threading.Thread(target=host.start)
        thread.start()
        thread.join(delay)  # wherever it is by then

        def child(host: ModelHost = host) -> str:
            try:
                return str(host.predict(value(1), timeout=20).tolist())
            except HostClosedError:
                return "not started"

        assert Child(child).result() in ("not started", "[[2]]")
        thread.join(30)
        assert host.predict(value(2), timeout=20).tolist() == [[4]]
        host.stop()


def test_a_child_that_stops_the_host_stops_only_its_own_use(host: ModelHost) -> None:
    worker = worker_pid(host)

    def child() -> str:
        host.predict(value(1))
        host.stop()
        try:
            host.predict(value(1))
        except HostClosedError:
            return "closed"
        return "open"

    assert Child(child).result() == "closed"
    assert all_ways(host, 2) == expected(2)
    assert worker_pid(host) == worker


@pytest.mark.parametrize("end", ["os._exit", "sys.exit", "kill"])
def test_however_a_child_ends_the_parent_goes_on(host: ModelHost, end: str) -> None:
    worker = worker_pid(host)
    ends = {"os._exit": lambda: os._exit(3), "sys.exit": lambda: sys.exit(3), "kill": lambda: kill(os.getpid())}
    if end == "sys.exit":  # the interpreter shuts down, with its atexit functions: in a program of its own
        child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(int(host.predict(value(1)).sum())))
        child.start()
        child.join(30)
        assert child.exitcode == 2
        child.close()
    else:
        assert Child(lambda: all_ways(host, 1), ends[end]).result() == expected(1)
    assert all_ways(host, 2) == expected(2)
    assert worker_pid(host) == worker


def test_a_child_goes_on_when_its_parent_is_killed() -> None:
    """And the host ends when the last of the two has."""
    ready, pids = os.pipe()

    def parent() -> None:
        host = ModelHost(Doubles)()
        host.start()
        worker, together = worker_pid(host), threading.Event()
        if os.fork():
            together.wait()
        host.predict(value(1), timeout=20)
        os.write(pids, f"{os.getpid()} {worker} {supervisor_pid(host)}\n".encode())
        while os.getppid() == int(os.environ["PARENT"]):
            host.predict(value(1), timeout=20)
        assert all_ways(host, 2) == expected(2) and worker_pid(host) == worker
        os.write(pids, b"went on\n")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            os.environ["PARENT"] = str(os.getpid())
            parent()
        finally:
            os._exit(1)
    os.close(pids)
    with open(ready) as lines:
        assert select.select([ready], [], [], 30)[0]
        _, worker, supervisor = map(int, lines.readline().split())
        kill(child)
        os.waitpid(child, 0)
        assert select.select([ready], [], [], 30)[0]
        assert lines.readline() == "went on\n"
    wait_until(lambda: not alive(worker) and not alive(supervisor), 5, "worker and supervisor end")


def test_multiprocessing_pools_that_fork(host: ModelHost) -> None:
    global shared
    shared = host
    with multiprocessing.get_context("fork").Pool(3) as pool:
        answers = pool.map(call_shared, range(60))
        pool.close()
        pool.join()
    assert answers == [2 * number for number in range(60)]
    assert all_ways(host, 1) == expected(1)


shared: ModelHost | None = None


def call_shared(number: int) -> int:
    assert shared is not None
    return int(shared.predict(value(number), timeout=20)[0, 0])


def elected_after(host: ModelHost, old: int) -> int:
    """The supervisor that serves `host` once the one with process id `old` has been replaced for this process.

    An answer is no sign of that: the old worker may have given it just before it died with its supervisor.
    """
    link: Any = host._client.link if host._client else None
    wait_until(lambda: link._supervisor_pid != old, 20, "this process has joined another supervisor")
    return supervisor_pid(host)


def test_the_worker_of_parent_and_child_is_killed_and_both_go_on(host: ModelHost) -> None:
    supervisor = supervisor_pid(host)

    def child() -> int:
        with Load(host, 4, first=100) as load:
            load.wait_for_all()
            kill(worker_pid(host))
            load.wait_for_all()
            kill(supervisor)
            elected = elected_after(host, supervisor)
            load.wait_for_all()
            load.stop()
        load.assert_clean()
        return elected

    with Load(host, 4) as load:
        elected = Child(child).result(60)
        load.wait_for_all()
        assert elected_after(host, supervisor) == elected
        load.stop()
        load.assert_clean()


def test_a_child_whose_first_connection_fails_may_try_again(host: ModelHost) -> None:
    supervisor = supervisor_pid(host)

    def child() -> list[Any]:
        from batch_inference import link

        join, link.JOIN_TIMEOUT = link.JOIN_TIMEOUT, 0.2
        kill(supervisor, signal.SIGSTOP)
        for _ in range(3):
            try:
                host.predict(value(1))
            except Exception as error:
                assert "supervisor" in str(error), error
            else:
                raise AssertionError("nobody answered, and no error")
        kill(supervisor, signal.SIGCONT)
        link.JOIN_TIMEOUT = join
        return all_ways(host, 2)

    try:
        assert Child(child).result() == expected(2)
    finally:
        kill(supervisor, signal.SIGCONT)
    assert all_ways(host, 3) == expected(3)


class LoadsBehindGate(Doubles):
    """Loads at once the first time, and from then on only while there is a gate."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        gate = os.path.join(folder, "gate")
        if os.path.exists(os.path.join(folder, "loaded")):
            wait_until(lambda: os.path.exists(gate), 60)
        open(os.path.join(folder, "loaded"), "w").close()


def test_timeouts_hold_in_a_child_whose_first_use_comes_while_the_model_loads_again(tmp_path: Path) -> None:
    def child() -> list[float]:
        found = []
        for call in (
            lambda: host.predict(value(1), timeout=0.2),
            lambda: host.submit(value(1), timeout=0.2).result(),
            lambda: asyncio.run(host.apredict(value(1), timeout=0.2)),
        ):
            started = time.monotonic()
            with pytest.raises(RequestTimeoutError):
                call()
            found.append(time.monotonic() - started)
        assert not host.ready and host.healthy
        future = host.submit(value(3))
        (tmp_path / "gate").touch()
        assert future.result(30).tolist() == [[6]]
        return found

    with ModelHost(LoadsBehindGate, start_timeout=90)(str(tmp_path)) as host:
        kill(worker_pid(host))
        wait_until(lambda: not host.ready, 10)
        assert max(Child(child).result(60)) < 10

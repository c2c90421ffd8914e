"""More than the model can do: what waits is bounded, what was given up never runs, and stopping ends all of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import ConfigError, HostClosedError, ModelHost, OverloadedError, RequestTimeoutError
from batch_inference.batcher import BucketSeqBatcher
from batch_inference.link import Link
from batch_inference.loops import HELPERS
from batch_inference.policy import FixedDelay
from batch_inference.testing import alive, parent_of, wait_until
from tests.process.conftest import environment
from tests.process.models import Doubles, Sleeps
from tests.process.overloaded import Gated, Notes, WaitsForEver
from tests.process.test_callers import all_slots_are_back, check, request
from tests.process.test_leftovers import SECONDS, Marked, assert_gone


class Gate:
    """The test's side of a Gated model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batches(self) -> list[list[int]]:
        """The values of each batch that the model saw."""
        seen = self.folder / "seen"
        return (
            [[int(value) for value in line.split()] for line in seen.read_text().splitlines()] if seen.exists() else []
        )

    def values(self) -> list[int]:
        return sorted(value for batch in self.batches() for value in batch)

    def block(self, host: ModelHost, batches: int = 1) -> list[Future[Any]]:
        """Requests of value 0 until that many batches are held up: one in each worker."""
        futures = []
        for number in range(1, batches + 1):
            futures.append(host.submit(request(0)))
            self.wait_for(number)
        return futures

    def wait_for(self, batches: int) -> None:
        wait_until(lambda: len(self.batches()) >= batches, 20, f"{batches} batches run")

    def open(self) -> None:
        (self.folder / "gate").touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Names of our own, in a folder with a short path: a unix socket's may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="bi-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


class Caller:
    """A process that joins the host "shared" and sends requests, one for each of `values`; it ends with its input."""

    def __init__(self, *values: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALLER, *map(str, values)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "sent\n"

    def end(self) -> list[int]:
        """Its answers."""
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return [int(answer) for answer in out.split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


CALLER = """
import sys
import numpy as np
from batch_inference import connect

host = connect("shared")
futures = [host.submit(np.array([[int(value)]])) for value in sys.argv[1:]]
print("sent", flush=True)
sys.stdin.read()
print(*[future.result(30).item() for future in futures])
host.stop()
"""


async def refused(host: ModelHost) -> None:
    with pytest.raises(OverloadedError, match="max_pending is 3"):
        await host.apredict(request(9), block=False)


def waits_for_room(host: ModelHost, count: int) -> None:
    """Until that many requests wait in this process for leave to be sent."""
    assert host._client is not None
    waiting = host._client.room.waiting
    wait_until(lambda: len(waiting) == count, 10, f"{count} wait for room")


# --- max_pending ----------------------------------------------------------------------------------------------------


def test_what_exceeds_max_pending_is_refused_at_once_or_waits_within_its_timeout(gate: Gate) -> None:
    with ModelHost(Gated, max_pending=3)(gate.folder) as host:
        futures = [*gate.block(host), host.submit(request(1)), host.submit(request(2))]
        with pytest.raises(OverloadedError, match="3 are pending, and max_pending is 3"):
            host.submit(request(9))
        with pytest.raises(OverloadedError, match="max_pending is 3"):
            host.predict(request(9), block=False)
        asyncio.run(refused(host))
        with pytest.raises(RequestTimeoutError, match="max_pending is 3"):
            host.predict(request(9), timeout=0.05)
        with pytest.raises(RequestTimeoutError, match="max_pending is 3"):
            asyncio.run(host.apredict(request(9), timeout=0.05))
        assert host.statistics().pending == 3
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(host.predict, request(3)), pool.submit(asyncio.run, host.apredict(request(4)))]
            waits_for_room(host, 2)
            gate.open()
            for number, future in enumerate([*futures, *waiting]):
                check(future.result(30), number)
        all_slots_are_back(host)
        check(host.predict(request(5), block=False), 5)
    assert gate.values() == [0, 1, 2, 3, 4, 5]


def test_the_tasks_of_a_loop_have_hardly_more_pending_than_max_pending(gate: Gate) -> None:
    async def all_at_once() -> int:
        tasks = [asyncio.ensure_future(host.apredict(request(1))) for _ in range(300)]
        while host.statistics().pending < 40:
            await asyncio.sleep(0.005)
        for _ in range(20):  # of those that have not sent theirs, each has its turn
            await asyncio.sleep(0.005)
        pending = host.statistics().pending
        gate.open()
        for task in tasks:
            check(await task, 1)
        return pending

    with ModelHost(Gated, max_pending=40, max_batch_size=4)(gate.folder) as host:
        assert 40 <= asyncio.run(all_at_once()) <= 40 + HELPERS  # each of which may be about to hand one over
        all_slots_are_back(host)


def test_who_is_refused_because_others_wait_is_told_so_and_memory_is_not_blamed(gate: Gate) -> None:
    with ModelHost(Gated, max_pending=1)(gate.folder) as host, ThreadPoolExecutor(2) as pool:
        gate.block(host)
        waiting = [pool.submit(host.predict, request(number)) for number in (1, 2)]
        waits_for_room(host, 2)
        assert host._client is not None
        room = host._client.room
        with room._changed:  # so that those who wait do not look again before we have
            host.configure(max_pending=100)
            with pytest.raises(OverloadedError) as refused:
                host.submit(request(9))
        gate.open()
        for number, future in enumerate(waiting, 1):
            check(future.result(30), number)
    assert "2 of this process wait for room already, and get it first. 1 are pending" in str(refused.value)
    assert "max_pending is 100" in str(refused.value) and "too small" not in str(refused.value)


def test_who_waits_for_room_gets_it_in_order_of_coming(gate: Gate) -> None:
    with ModelHost(Gated, max_pending=1)(gate.folder) as host, ThreadPoolExecutor(8) as pool:
        first, waiting = gate.block(host), []
        for number in range(1, 9):
            if number % 3:
                waiting.append(pool.submit(host.predict, request(number)))
            else:
                waiting.append(pool.submit(asyncio.run, host.apredict(request(number))))
            waits_for_room(host, number)
        gate.open()
        for number, future in enumerate([*first, *waiting]):
            check(future.result(30), number)
    assert gate.batches() == [[number] for number in range(9)]


def test_a_waiting_caller_that_gives_up_makes_way_for_the_next(gate: Gate) -> None:
    with ModelHost(Gated, max_pending=1)(gate.folder) as host, ThreadPoolExecutor(2) as pool:
        gate.block(host)
        gives_up = pool.submit(host.predict, request(1), timeout=0.3)
        waits_for_room(host, 1)
        stays = pool.submit(host.predict, request(2))
        waits_for_room(host, 2)
        assert isinstance(gives_up.exception(30), RequestTimeoutError)
        waits_for_room(host, 1)
        gate.open()
        check(stays.result(30), 2)
    assert gate.batches() == [[0], [2]]


def test_a_task_that_gives_up_waiting_for_room_keeps_no_helper(gate: Gate) -> None:
    async def give_up() -> None:
        waiting = asyncio.create_task(host.apredict(request(7)))
        await asyncio.to_thread(waits_for_room, host, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.to_thread(waits_for_room, host, 0)

    with ModelHost(Gated, max_pending=1)(str(gate.folder)) as host:
        first = gate.block(host)
        for _ in range(6):
            asyncio.run(give_up())
        gate.open()
        check(first[0].result(20), 0)
        check(host.predict(request(8)), 8)
        all_slots_are_back(host)


def test_what_other_processes_have_pending_counts_too(gate: Gate, runtime_directory: str) -> None:
    with ModelHost(Gated, max_pending=4, name="shared")(gate.folder) as host, ThreadPoolExecutor(1) as pool:
        caller = Caller(1, 2, 3)
        futures = [host.submit(request(4))]
        with pytest.raises(OverloadedError, match="4 are pending, and max_pending is 4"):
            host.submit(request(9))
        assert host.statistics().pending == 4
        waiting = pool.submit(host.predict, request(5))
        waits_for_room(host, 1)
        gate.open()  # room is made by the answers to the other process
        check(futures[0].result(30), 4)
        check(waiting.result(30), 5)
        assert caller.end() == [2, 4, 6]
        all_slots_are_back(host)
    assert gate.values() == [1, 2, 3, 4, 5]


def test_max_pending_does_not_count_what_a_dead_process_had_sent(gate: Gate, runtime_directory: str) -> None:
    with ModelHost(Gated, max_pending=4, name="shared")(gate.folder) as host:
        Caller(1, 2, 3, 4).kill()
        wait_until(lambda: host.statistics().pending == 0)
        future = host.submit(request(5))
        gate.open()
        check(future.result(30), 5)


# --- giving up ------------------------------------------------------------------------------------------------------


def test_a_timeout_says_how_long_the_request_waited_and_ran_and_how_deep_the_queue_is(gate: Gate) -> None:
    with ModelHost(Gated)(gate.folder) as host, ThreadPoolExecutor(1) as pool:
        runs = pool.submit(host.predict, request(0), timeout=3)
        wait_until(gate.batches)
        host.submit(request(1))
        waits = host.submit(request(2), timeout=0.1)
        assert isinstance(waits.exception(30), RequestTimeoutError)
        said = re.match(r"no answer within (\S+) s; ", str(waits.exception()))
        assert said is not None and 0.1 <= float(said[1]) < 3
        assert "it was still waiting for its batch" in str(waits.exception())
        assert "3 requests are pending, 3 of them of this process" in str(waits.exception())
        error = runs.exception(30)
        assert isinstance(error, RequestTimeoutError)
        gate.open()
        said = re.match(r"no answer within (\S+) s; it waited (\S+) s .* the model has run it for (\S+) s", str(error))
        assert said is not None
        after, waited, ran = map(float, said.groups())
        assert 0 <= waited < ran and after == pytest.approx(waited + ran, abs=0.01) and after == pytest.approx(3, abs=1)
        assert "requests are pending" in str(error)


def test_what_was_given_up_before_it_started_never_enters_a_batch(gate: Gate, runtime_directory: str) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(host.apredict(request(3)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pending(4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def pending(count: int) -> None:
        wait_until(lambda: host.statistics().pending == count, 10, f"{count} are pending")

    with ModelHost(Gated, max_batch_size=100, name="shared")(gate.folder) as host:
        (running,) = gate.block(host)
        with pytest.raises(RequestTimeoutError):
            host.predict(request(1), timeout=0.05)
        assert host.submit(request(2)).cancel()
        asyncio.run(cancelled())
        assert isinstance(host.submit(request(4), timeout=0.05).exception(30), RequestTimeoutError)
        with pytest.raises(RequestTimeoutError):
            asyncio.run(host.apredict(request(5), timeout=0.05))
        pending(6)  # they wait, and those who sent them do not
        caller = Caller(6, 7)
        pending(8)
        caller.kill()
        pending(6)
        stays = host.submit(request(8))
        gate.open()
        check(running.result(30), 0)
        check(stays.result(30), 8)
        all_slots_are_back(host)
    assert gate.batches() == [[0], [8]]


def test_what_has_started_is_finished_and_dropped_when_it_is_given_up(gate: Gate) -> None:
    with ModelHost(Gated)(gate.folder) as host:
        with pytest.raises(RequestTimeoutError, match="the model has run it"):
            futures = gate.block(host)
            assert futures[0].cancel()
            gate.open()
            all_slots_are_back(host)
            (gate.folder / "gate").unlink()
            host.predict(request(1), timeout=0.5)
        gate.open()
        check(host.predict(request(2)), 2)
        all_slots_are_back(host)
        assert host.statistics().workers[0].restarts == 0
    assert gate.batches() == [[0], [1], [2]]


# --- when a batch is cut ----------------------------------------------------------------------------------------------


def test_configure_holds_for_all_workers_of_a_running_host(gate: Gate) -> None:
    with ModelHost(Gated, max_batch_size=64, num_workers=2)(gate.folder) as host:
        futures = gate.block(host, 2)
        futures += [host.submit(request(0)) for _ in range(60)]
        host.configure(max_batch_size=4, max_pending=62)
        with pytest.raises(OverloadedError, match="max_pending is 62"):
            host.submit(request(0))
        gate.open()
        for future in futures:
            check(future.result(30), 0)
        assert max(map(len, gate.batches())) == 4
        assert all(worker.batches >= 7 for worker in host.statistics().workers)
        assert "max_batch_size=4" in repr(host)
        host.configure(max_pending=1000)
        with pytest.raises(ConfigError, match="max_batch_size"):
            host.configure(max_batch_size=0)
        with pytest.raises(ConfigError, match="max_delay"):
            host.configure(max_delay=-1)
        wait([host.submit(request(0)) for _ in range(100)], 30)
        assert max(map(len, gate.batches())) == 4
    with pytest.raises(HostClosedError):
        host.configure(max_pending=1)


def test_max_delay_counts_from_the_oldest_request_and_later_ones_do_not_prolong_it() -> None:
    with ModelHost(Doubles, policy=WaitsForEver(), max_delay=0.4, max_batch_size=10_000)() as host:
        started, number = time.monotonic(), 0
        first = host.submit(request(0))
        later = []
        while not wait([first], 0.01).done and time.monotonic() < started + 20:
            number += 1
            later.append(host.submit(request(number)))
        took = time.monotonic() - started
        check(first.result(0), 0)
        assert 0.39 <= took < 5
        for number, future in enumerate(later, 1):
            check(future.result(30), number)
        cuts = host.statistics().cuts
        assert cuts.max_delay in (1, 2) and cuts.nothing_to_wait_for == cuts.full == 0


@pytest.mark.parametrize("policy", [WaitsForEver(), FixedDelay(1000)], ids=["own", "fixed"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_that_wait_learn_of_new_limits_at_once(workers: int, policy: Any) -> None:
    with ModelHost(Doubles, policy=policy, num_workers=workers, max_batch_size=8)() as host:
        for limits in ({"max_batch_size": 1}, {"max_delay": 0}):
            futures = [host.submit(request(number)) for number in range(3)]
            assert not wait(futures, 0.3, FIRST_COMPLETED).done
            host.configure(**limits)
            for number, future in enumerate(futures):
                check(future.result(20), number)
            host.configure(max_batch_size=8)


def test_a_full_batch_is_run_whatever_the_policy_wants() -> None:
    with ModelHost(Doubles, policy=WaitsForEver(), max_batch_size=5)() as host:
        futures = [host.submit(request(number)) for number in range(15)]
        for number, future in enumerate(futures):
            check(future.result(30), number)
        assert host.statistics().cuts.full == host.statistics().batches == 3


def test_no_kind_is_made_to_wait_while_another_does() -> None:
    with ModelHost(Doubles, policy=WaitsForEver(), max_batch_size=3)() as host:
        whole = [host.submit(request(0))]
        half = [host.submit(np.full((1, 1), 0.5))]
        check(whole[0].result(30), 0)
        assert not half[0].done()  # alone again, it waits for others
        half += [host.submit(np.full((1, 1), number + 0.5)) for number in (1, 2)]
        for number, future in enumerate(half):
            check(future.result(30), number + 0.5)
        cuts = host.statistics().cuts
        assert (cuts.kind, cuts.full, host.statistics().batches) == (1, 1, 2)


def test_a_batch_is_full_when_its_budget_is_and_each_bucket_fills_on_its_own() -> None:
    batcher = BucketSeqBatcher([0], [16, 32], pad_to_bucket=True)  # a request's size is what it is padded to
    with ModelHost(Doubles, batcher=batcher, policy=WaitsForEver(), max_delay=20, max_batch_size=64)() as host:
        short = [host.submit(np.full((1, 9), number)) for number in range(4)]
        for number, future in enumerate(short):
            assert future.result(30)[0, 0] == 2 * number
        long = [host.submit(np.full((1, 20), number)) for number in range(2)]
        for number, future in enumerate(long):
            assert future.result(30)[0, 0] == 2 * number
        assert host.statistics().cuts.full == host.statistics().batches == 2


def test_a_users_own_policy_is_asked_and_told(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with ModelHost(Doubles, policy=Notes(str(notes)))() as host:
        check(host.predict(request(1)), 1)
        assert host.predict(np.ones((3, 2)), timeout=30).shape == (3, 2)
        cuts = host.statistics().cuts
    told = [line.split() for line in notes.read_text().splitlines()]
    assert [word for word, *_ in told] == ["arrived", "wait", "ran", "completed"] * 2
    arrived, asked, ran, completed = told[4:]
    assert arrived[2] == "3" and asked[2:] == ["1", "3", "True"] and ran[1] == "3" and completed[2] == "1"
    assert float(arrived[1]) == float(asked[1]) < float(completed[1])
    assert float(told[0][1]) < float(told[3][1])  # which the next request may overtake: its caller has its answer
    assert 0 < float(ran[2]) < 10
    assert cuts.nothing_to_wait_for == 2


def test_a_request_close_to_its_deadline_is_not_made_to_wait() -> None:
    with ModelHost(Sleeps, policy=WaitsForEver(), max_batch_size=2)(0.15) as host:
        for _ in range(10):  # the host learns what a batch takes
            wait([host.submit(request(1)), host.submit(request(2))], 30)
        check(host.predict(request(3), timeout=2.0), 3)
        assert host.statistics().cuts.deadline == 1


def test_a_fixed_delay_is_kept() -> None:
    with ModelHost(Doubles, policy=FixedDelay(0.2))() as host:
        started = time.monotonic()
        check(host.predict(request(1)), 1)
        assert 0.2 <= time.monotonic() - started < 5


def test_the_monitor_is_woken_once_for_a_full_pipe_and_not_for_each_request(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake, woken = Link._wake_monitor, []
    monkeypatch.setattr(Link, "_wake_monitor", lambda link: (woken.append(1), wake(link)))
    with ModelHost(Gated, max_batch_size=64)(gate.folder) as host:
        futures = [host.submit(request(number)) for number in range(6000)]  # the pipe holds some 2000
        (peer,) = host._client.link._peers.values()  # type: ignore[union-attr]
        backlog, times = len(peer.backlog), len(woken)
        gate.open()
        for number, future in enumerate(futures):
            check(future.result(60), number)
    assert backlog > 1000 and times < backlog / 2  # some come while the monitor gets up


# --- stop -------------------------------------------------------------------------------------------------------------


def test_stop_with_a_timeout_answers_what_it_can_and_fails_what_has_no_answer_by_then(gate: Gate) -> None:
    host = ModelHost(Gated)(gate.folder)
    host.start()
    with ThreadPoolExecutor(1) as pool:
        futures = gate.block(host)
        stopping = pool.submit(host.stop, timeout=0.2)
        assert [type(future.exception(30)) for future in futures] == [HostClosedError] * len(futures)
        stopping.result(30)


def test_stop_with_a_timeout_answers_what_is_answered_in_time(gate: Gate) -> None:
    gate.open()
    host = ModelHost(Gated)(gate.folder)
    host.start()
    answered = host.submit(request(5))
    host.stop(timeout=SECONDS)
    check(answered.result(30), 5)


def test_stop_without_draining_fails_what_waits_and_what_runs(gate: Gate) -> None:
    async def one() -> Any:
        return await host.apredict(request(2))

    host = ModelHost(Gated)(gate.folder)
    host.start()
    pid = host.statistics().workers[0].pid
    with ThreadPoolExecutor(2) as pool:
        futures = gate.block(host)
        futures += [pool.submit(host.predict, request(1)), pool.submit(asyncio.run, one()), host.submit(request(3))]
        wait_until(lambda: host.statistics().pending == 4)
        started = time.monotonic()
        host.stop(drain=False)
        assert time.monotonic() - started < 2 * SECONDS
        for future in futures:
            assert isinstance(future.exception(30), HostClosedError)
    wait_until(lambda: not alive(pid), SECONDS)
    assert gate.batches() == [[0]]


def test_astop_answers_what_was_accepted(gate: Gate) -> None:
    async def all_of_it() -> None:
        async with ModelHost(Gated)(gate.folder) as host:
            tasks = [asyncio.ensure_future(host.apredict(request(number))) for number in range(5)]
            while host.statistics().pending < len(tasks):  # until all are accepted
                await asyncio.sleep(0.005)
            gate.open()
        for number, task in enumerate(tasks):
            check(await task, number)

    asyncio.run(all_of_it())


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_models_close_is_called_in_its_worker(workers: int, gate: Gate) -> None:
    gate.open()
    with ModelHost(Gated, num_workers=workers)(gate.folder) as host:
        check(host.predict(request(1)), 1)
        pids = {worker.pid for worker in host.statistics().workers}
    closed = [int(pid) for pid in (gate.folder / "closed").read_text().split()]
    assert sorted(closed) == sorted(pids)
    assert (closed == [os.getpid()]) == (workers == 0)


# --- signals to the application ---------------------------------------------------------------------------------------

LOADED = """
import signal, sys, threading
import numpy as np
from batch_inference import HostClosedError, ModelHost
from tests.process.overloaded import Gated

folder, way = sys.argv[1:]
wrong, ended, busy = [], [], []
if way == "handled":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))

def call(index):
    number = index
    try:
        while True:
            number += 8
            if host.predict(np.array([[number]])).item() != 2 * number:
                wrong.append(number)
            if number == 10 * 8 + index:
                busy.append(index)
                if len(busy) == 8:
                    print("busy", flush=True)
    except HostClosedError:
        ended.append(index)

host = ModelHost(Gated, num_workers=2)(folder)
threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
try:
    with host:
        for thread in threads:
            thread.start()
        threading.Event().wait()
except KeyboardInterrupt:
    pass
finally:
    for thread in threads:
        thread.join()
    print(len(wrong), len(ended), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "way", "code"), [("SIGINT", "", 0), ("SIGTERM", "handled", 0), ("SIGTERM", "", -signal.SIGTERM)]
)
def test_a_signal_to_an_application_under_load_ends_its_workers(how: str, way: str, code: int, gate: Gate) -> None:
    gate.open()
    application = Marked(LOADED, str(gate.folder), way)
    try:
        assert application.read_line() == "busy"
        os.kill(application.process.pid, getattr(signal, how))
        out, err = application.process.communicate(timeout=30)
    finally:
        application.process.kill()
    assert (application.process.returncode, err) == (code, "")
    assert_gone(application)
    if code == 0:  # it had the chance to stop(): every caller got its answer or was refused
        assert out == "0 8\n"
        assert len((gate.folder / "closed").read_text().split()) == 2


def test_ctrl_c_while_stop_waits_for_the_end_of_the_workers_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join, interrupts = Link._join_monitor, [KeyboardInterrupt()]

    def interrupted(link: Link, timeout: float) -> None:
        if interrupts:
            raise interrupts.pop()
        join(link, timeout)

    monkeypatch.setattr(Link, "_join_monitor", interrupted)
    host = ModelHost(Doubles)()
    host.start()
    check(host.predict(request(1)), 1)
    with pytest.raises(KeyboardInterrupt):
        host.stop()
    with host:
        check(host.predict(request(2)), 2)


DRAINING = """
import sys, threading
import numpy as np
from batch_inference import HostClosedError, ModelHost
from tests.process.overloaded import Gated

def watch():
    while True:
        try:
            host.predict(np.array([[1]]), timeout=0.01)
        except TimeoutError:
            pass
        except HostClosedError:
            print("draining", flush=True)
            return

host = ModelHost(Gated)(sys.argv[1])
with host:
    futures = [host.submit(np.array([[number]])) for number in range(5)]
    threading.Thread(target=watch).start()
    print("running", flush=True)
    threading.Event().wait()
"""


def test_a_second_ctrl_c_ends_an_application_that_drains_at_once(gate: Gate) -> None:
    application = Marked(DRAINING, str(gate.folder))
    try:
        assert application.read_line() == "running"
        wait_until(gate.batches, 30)  # and the gate stays shut
        os.kill(application.process.pid, signal.SIGINT)
        assert application.read_line() == "draining"
        assert application.process.poll() is None
        started = time.monotonic()
        os.kill(application.process.pid, signal.SIGINT)
        _, err = application.process.communicate(timeout=30)
    finally:
        application.process.kill()
    assert time.monotonic() - started < SECONDS
    assert application.process.returncode == -signal.SIGINT and "KeyboardInterrupt" in err
    assert_gone(application)


# --- idle -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_idle_host_uses_no_cpu() -> None:
    idle = 10.0
    with ModelHost(Doubles, num_workers=2)() as host:
        check(host.predict(request(1)), 1)
        check(host.submit(request(2)).result(30), 2)
        check(asyncio.run(host.apredict(request(3))), 3)
        workers = [worker.pid for worker in host.statistics().workers]
        processes = {*workers, parent_of(workers[0]), os.getpid()}
        before = {pid: cpu(pid) for pid in processes}
        threading.Event().wait(idle)
        used = {pid: (cpu(pid) - before[pid]) / 1e6 for pid in processes}
        assert sum(used.values()) < 10, f"ms of CPU in {idle} s: {used}, this process is {os.getpid()}"
        check(host.predict(request(4)), 4)


def cpu(pid: int) -> int:
    """CPU time of a process with all its threads, in ns: the clock whose number stands for that process."""
    return time.clock_gettime_ns((~pid << 3) | 2)

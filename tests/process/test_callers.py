"""Many callers at once: threads, event loops, and callers that give up. Nobody gets another's answer."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import HostClosedError, ModelHost, RequestTimeoutError, RequestTooLargeError, speedups
from batch_inference.testing import Raises, wait_until
from tests.process.conftest import environment
from tests.process.models import Blocks, Doubles, Sleeps

THREADS, REQUESTS = 64, 500


def request(*numbers: int) -> "np.ndarray[Any, Any]":
    return np.array([numbers], np.int64)


def check(answer: "np.ndarray[Any, Any]", *numbers: int) -> None:
    assert answer.tolist() == [[2 * number for number in numbers]]


def all_slots_are_back(host: ModelHost) -> None:
    client = host._client
    assert client is not None
    wait_until(lambda: client.idle and host.statistics().pending == 0, 10, "all slots are free again")


@contextlib.contextmanager
def stopped(host: ModelHost) -> Iterator[Callable[[], None]]:
    """The host's worker stopped (SIGSTOP); it goes on at the end, or when the function given is called."""
    pid = host.statistics().workers[0].pid
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        os.kill(pid, signal.SIGCONT)

    try:
        yield go_on
    finally:
        go_on()


# --- each its own answer --------------------------------------------------------------------------------------------


def test_64_threads_get_their_own_answers(shared_host: ModelHost) -> None:
    together = threading.Barrier(THREADS)

    def call(caller: int) -> None:
        together.wait()
        for number in range(REQUESTS):
            check(shared_host.predict(request(caller, number)), caller, number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(call, range(THREADS)))
    statistics = shared_host.statistics()
    assert statistics.mean_batch > 1
    all_slots_are_back(shared_host)


def test_requests_of_many_sizes_and_types_get_their_own_answers(shared_host: ModelHost) -> None:
    def call(caller: int) -> None:
        source = random.Random(caller)
        for _ in range(60):
            kind = source.choice(["<f4", "<f8", "<i4", "|u1", "<f2"])
            shape = (source.randint(1, 40), source.choice([1, 3, 1000]))
            x = np.full(shape, source.randint(0, 100), kind)
            answer = shared_host.predict(x)
            assert answer.dtype == x.dtype and np.array_equal(answer, x * 2)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(16)))
    all_slots_are_back(shared_host)


def test_4_threads_in_each_of_3_event_loops_get_their_own_answers_though_a_third_gives_up() -> None:
    given_up, answered = [], []

    async def call(host: ModelHost, source: random.Random, *numbers: int) -> None:
        way = source.randrange(6)
        if way == 0:  # the library's timeout
            try:
                check(await host.apredict(request(*numbers), timeout=source.random() * 0.005), *numbers)
            except RequestTimeoutError:
                given_up.append(numbers)
                return
        elif way == 1:  # the task is cancelled
            task = asyncio.ensure_future(host.apredict(request(*numbers)))
            asyncio.get_running_loop().call_later(source.random() * 0.005, task.cancel)
            try:
                check(await task, *numbers)
            except asyncio.CancelledError:
                given_up.append(numbers)
                return
        else:
            check(await host.apredict(request(*numbers)), *numbers)
        answered.append(numbers)

    async def calls(host: ModelHost, *caller: int) -> None:
        source = random.Random(str(caller))
        numbers = iter(range(REQUESTS))

        async def one_after_another() -> None:
            for number in numbers:
                await call(host, source, *caller, number)

        await asyncio.gather(*[one_after_another() for _ in range(10)])

    def run_loop(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    with ModelHost(Sleeps, max_batch_size=64)(0.001) as host:
        loops = [asyncio.new_event_loop() for _ in range(3)]
        runners = [threading.Thread(target=run_loop, args=[loop]) for loop in loops]
        for runner in runners:
            runner.start()

        def from_thread(index: int, thread: int) -> None:
            asyncio.run_coroutine_threadsafe(calls(host, index, thread), loops[index]).result(100)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(from_thread, *zip(*[(index, thread) for index in range(3) for thread in range(4)])))
        all_slots_are_back(host)
        for loop, runner in zip(loops, runners):
            loop.call_soon_threadsafe(loop.stop)
            runner.join()
        check(host.predict(request(1, 2, 3)), 1, 2, 3)
    assert len(answered) + len(given_up) == 12 * REQUESTS
    assert len(given_up) > 500 and len(answered) > 8 * REQUESTS


def test_threads_whose_calls_time_out_at_random_get_only_their_own_answers() -> None:
    given_up = []

    def call(caller: int) -> None:
        source = random.Random(caller)
        for number in range(200):
            timeout = source.random() * 0.004 if source.random() < 0.4 else 30
            try:
                check(host.predict(request(caller, number), timeout=timeout), caller, number)
            except RequestTimeoutError:
                given_up.append(number)

    with ModelHost(Sleeps, max_batch_size=4)(0.001) as host:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(call, range(12)))
        all_slots_are_back(host)
    assert given_up


# --- event loops ----------------------------------------------------------------------------------------------------


def test_a_new_event_loop_per_call_takes_no_more_descriptors(shared_host: ModelHost) -> None:
    def call(number: int) -> int:
        check(asyncio.run(shared_host.apredict(request(number))), number)
        return len(os.listdir("/proc/self/fd"))

    counts = [call(number) for number in range(40)]
    assert max(counts[2:]) <= counts[1]
    all_slots_are_back(shared_host)


def test_a_loop_that_is_closed_while_requests_run_hurts_no_other(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def leave() -> None:
        tasks = [asyncio.ensure_future(host.apredict(request(number))) for number in range(5)]
        while not (tmp_path / "entered").exists():
            await asyncio.sleep(0.002)
        assert not any(task.done() for task in tasks)  # asyncio.run cancels them

    with ModelHost(Blocks)(str(tmp_path / "entered"), str(gate)) as host:
        asyncio.run(leave())
        loop = asyncio.new_event_loop()
        abandoned = loop.create_task(host.apredict(request(99)))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()  # with a task in it that will never end
        gate.touch()
        check(asyncio.run(host.apredict(request(7))), 7)
        check(host.predict(request(8)), 8)
        abandoned._log_destroy_pending = False  # type: ignore[attr-defined]
        del abandoned
        all_slots_are_back(host)


def test_a_task_that_ends_its_loop_takes_no_reply_from_the_others(shared_host: ModelHost) -> None:
    answered: list[int] = []

    async def call(number: int) -> None:
        check(await shared_host.apredict(request(number)), number)
        answered.append(number)
        if len(answered) % 3 == 0:  # while others of the same batch are still to go on
            sys.exit(number)

    loop = asyncio.new_event_loop()
    with stopped(shared_host):
        tasks = [loop.create_task(call(number)) for number in range(8)]
        loop.run_until_complete(asyncio.sleep(0.01))
    for ends in (3, 6):
        with pytest.raises(SystemExit):
            loop.run_until_complete(asyncio.wait(tasks))
        assert len(answered) == ends
    loop.run_until_complete(asyncio.wait(tasks, timeout=10))
    assert sorted(answered) == list(range(8))
    assert {number for number, task in enumerate(tasks) if task.exception()} == {answered[2], answered[5]}
    loop.close()
    all_slots_are_back(shared_host)


class Held(np.ndarray):  # type: ignore[type-arg]
    """An array whose end can be seen."""


def held(*numbers: int) -> "tuple[Held, weakref.ref[Held]]":
    array = request(*numbers).view(Held)
    return array, weakref.ref(array)


async def fails(host: ModelHost, way: str) -> "weakref.ref[Held]":
    array, left = held(-1)
    with contextlib.suppress(ValueError, RequestTimeoutError, asyncio.CancelledError):
        if way == "cancelled":
            task = asyncio.ensure_future(host.apredict(array))
            await asyncio.sleep(0)
            task.cancel()
            await task
        await host.apredict(array, timeout=0 if way == "timeout" else None)
    return left


@pytest.mark.parametrize("way", ["cancelled", "timeout", "model's error"])
def test_a_request_that_fails_leaves_nothing_to_the_garbage_collector(way: str) -> None:
    if way != "cancelled" and not speedups.built:
        pytest.skip("the future in Python is in the traceback of what it raises")

    async def main() -> None:
        await fails(host, way)
        gc.collect()
        assert [left() for left in [await fails(host, way) for _ in range(5)][:-1]] == [None] * 4

    with ModelHost(Raises)() as host:
        gc.disable()
        try:
            asyncio.run(main())
        finally:
            gc.enable()
        all_slots_are_back(host)


def test_tasks_that_try_again_at_once_hold_no_more_than_their_last_try() -> None:
    tried: deque[weakref.ref[Held]] = deque()

    async def insist() -> None:
        for number in range(50):
            array, left = held(number)
            tried.append(left)
            with contextlib.suppress(HostClosedError):
                await host.apredict(array)

    async def main() -> None:
        await asyncio.gather(*[insist() for _ in range(20)])
        gc.collect()
        assert sum(left() is not None for left in tried) <= 20

    async def insist_and_look() -> None:
        rest = asyncio.ensure_future(main())
        while not rest.done():
            await asyncio.sleep(0)
            gc.collect()
            assert sum(left() is not None for left in tried) <= 2 * 20
        await rest

    with ModelHost(Doubles)() as host:
        assert host._client is not None
        host._client.host_failed(HostClosedError("given up"))
        asyncio.run(insist_and_look())


class Nested(asyncio.SelectorEventLoop):
    """A loop that a task may run within itself, as nest_asyncio makes them."""

    _nest_patched = True

    def run_within(self, awaitable: Any) -> Any:
        outer, inner = asyncio.current_task(), asyncio.ensure_future(awaitable)
        assert outer is not None
        asyncio.tasks._leave_task(self, outer)
        try:
            while not inner.done():
                self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio.tasks._enter_task(self, outer)
            for _ in range(100):
                self.call_soon(int)  # in place of those that it was about to call when this began
        return inner.result()


def test_a_task_that_runs_its_loop_within_itself_hears_of_replies(shared_host: ModelHost) -> None:
    async def main() -> None:
        with stopped(shared_host) as go_on:
            others = [asyncio.ensure_future(shared_host.apredict(request(number))) for number in range(8)]
            loop.call_later(0.02, go_on)  # all of them are in one batch
            check(await shared_host.apredict(request(8)), 8)
        more = asyncio.wait_for(asyncio.gather(*others, shared_host.apredict(request(9))), 20)
        for number, answer in zip((*range(8), 9), loop.run_within(more)):
            check(answer, number)

    loop = Nested()
    loop.run_until_complete(main())
    loop.close()
    all_slots_are_back(shared_host)


def test_a_task_that_stops_the_host_takes_no_reply_from_the_others() -> None:
    host = ModelHost(Doubles)()
    host.start()

    async def call(number: int) -> None:
        check(await host.apredict(request(number)), number)
        if number == 3:
            host.stop()

    async def main() -> None:
        with stopped(host):
            calls = asyncio.gather(*[call(number) for number in range(9)])
            await asyncio.sleep(0.01)
        await calls
        with pytest.raises(HostClosedError):
            await host.apredict(request(1))

    asyncio.run(main())


def test_apredict_does_not_block_the_loop_when_the_request_pipe_is_full(shared_host: ModelHost) -> None:
    async def main() -> None:
        with stopped(shared_host) as go_on:
            numbers = range(5000)  # 32 bytes each: more than a pipe holds
            tasks = [asyncio.ensure_future(shared_host.apredict(request(number))) for number in numbers]
            for _ in range(20):  # it would hang here
                await asyncio.sleep(0.001)
            assert not any(task.done() for task in tasks)
            go_on()
            for number, answer in zip(numbers, await asyncio.gather(*tasks)):
                check(answer, number)

    asyncio.run(main())
    all_slots_are_back(shared_host)


def test_apredict_does_not_block_the_loop_when_memory_is_full() -> None:
    with ModelHost(Doubles, shared_memory=8 << 20, max_batch_size=1, timeout=30) as host:
        large = np.ones((1, 1 << 18), np.int64)  # 2 MiB

        async def main() -> None:
            with stopped(host) as go_on:
                tasks = [asyncio.ensure_future(host.apredict(large * number)) for number in range(12)]
                small = asyncio.ensure_future(host.apredict(request(5)))
                cancelled = asyncio.ensure_future(host.apredict(large))
                for _ in range(20):
                    await asyncio.sleep(0.001)
                cancelled.cancel()
                with pytest.raises(RequestTimeoutError):
                    await asyncio.wait_for(host.apredict(request(6), timeout=0.05), 10)
                assert not any(task.done() for task in [*tasks, small])
                go_on()
                for number, answer in enumerate(await asyncio.gather(*tasks)):
                    assert answer.shape == large.shape and (answer == 2 * number).all()
                check(await small, 5)
                assert await asyncio.gather(cancelled, return_exceptions=True)

        asyncio.run(main())
        all_slots_are_back(host)


def test_a_large_reply_whose_caller_gives_up_while_it_is_copied_gives_its_memory_back() -> None:
    async def main() -> None:
        helpers = host._loops._collectors if host._loops else None
        assert helpers is not None
        free = threading.Event()
        for _ in range(8):
            helpers.submit(free.wait)  # so that the copy must wait
        try:
            task = asyncio.ensure_future(host.apredict(np.ones((1, 100), np.uint8), timeout=30))
            client = host._client
            assert client is not None
            while host.statistics().requests < 3:
                await asyncio.sleep(0.002)
            for _ in range(10):
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            free.set()
        all_slots_are_back(host)

    class Enlarges:
        def predict_batch(self, x: Any) -> Any:
            return np.zeros((len(x), 3 << 20), np.uint8)

    with ModelHost(Enlarges) as host:

        async def both() -> None:
            for _ in range(2):  # so that there is memory for such a reply
                assert (await host.apredict(np.ones((1, 100), np.uint8))).nbytes == 3 << 20
            await main()

        asyncio.run(both())


# --- memory ---------------------------------------------------------------------------------------------------------


def test_predict_waits_for_memory_in_order_and_says_so_when_it_times_out() -> None:
    with ModelHost(Doubles, shared_memory=4 << 20, max_batch_size=1, timeout=30) as host:
        large = np.ones((1, 1 << 17), np.int64)  # 1 MiB, 2 with its reply: one fits besides the small ones

        def call(number: int) -> None:
            assert (host.predict(large * number) == 2 * number).all()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(24)))
        with stopped(host), ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(host.predict, large, timeout=0.3) for _ in range(8)]
            errors = [call.exception(30) for call in calls]
        assert all(isinstance(error, RequestTimeoutError) for error in errors)
        assert any("shared_memory" in str(error) for error in errors)
        all_slots_are_back(host)
        call(3)
        with pytest.raises(RequestTooLargeError, match="shared_memory"):
            host.predict(np.ones((1, 1 << 20), np.int64))


def test_memory_of_a_call_that_gave_up_goes_to_who_waits_for_it(tmp_path: Path) -> None:
    large = np.ones((1, 5 << 16), np.int64)  # 2.5 MiB: two do not fit
    with ModelHost(Blocks, shared_memory=4 << 20)(str(tmp_path / "entered"), str(tmp_path / "gate")) as host:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(host.predict, large, timeout=2)
            wait_until((tmp_path / "entered").exists)
            second = pool.submit(host.predict, large, timeout=None)  # waits for the memory of the first
            assert isinstance(first.exception(30), RequestTimeoutError)
            (tmp_path / "gate").touch()
            try:
                assert (second.result(20) == 2).all()
            finally:
                if not second.done():
                    host.stop()


# --- giving up ------------------------------------------------------------------------------------------------------


def test_a_call_that_timed_out_leaves_no_wrong_answer_and_what_waited_is_never_run(tmp_path: Path) -> None:
    entered, gate, notes = (tmp_path / name for name in ("entered", "gate", "notes"))

    async def apredict(*numbers: int, **options: Any) -> Any:
        return await host.apredict(request(*numbers), **options)

    with ModelHost(Blocks, max_batch_size=100)(str(entered), str(gate), str(notes)) as host:
        with pytest.raises(RequestTimeoutError, match="the model has run it") as caught:
            host.predict(request(1), timeout=2)
        assert isinstance(caught.value, TimeoutError) and entered.exists()
        for number, ask in enumerate(
            [
                lambda n: host.predict(request(n), timeout=0.05),
                lambda n: asyncio.run(apredict(n, timeout=0.05)),
                lambda n: asyncio.run(asyncio.wait_for(apredict(n), 0.05)),
                lambda n: host.submit(request(n), timeout=0.05).result(30),
                lambda n: host.predict(request(n), timeout=0),
                lambda n: asyncio.run(apredict(n, timeout=0)),
                lambda n: host.submit(request(n), timeout=0).result(30),
            ]
        ):
            with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                ask(100 + number)
        with ThreadPoolExecutor(4) as pool:
            later = [pool.submit(host.predict, request(200 + number)) for number in range(4)]
            gate.touch()
            for number, call in enumerate(later):
                check(call.result(30), 200 + number)
        all_slots_are_back(host)
        statistics = host.statistics()
    assert sum(map(int, notes.read_text().split())) == 5  # the first, and the last four
    assert statistics.requests == 5


def test_the_hosts_timeout_holds_where_the_call_does_not_say(tmp_path: Path) -> None:
    with ModelHost(Blocks, timeout=0.05)(str(tmp_path / "entered"), str(tmp_path / "gate")) as host:
        with pytest.raises(RequestTimeoutError, match=r"no answer within \d\.\d+ s"):
            host.predict(request(1))
        with pytest.raises(RequestTimeoutError):
            asyncio.run(host.apredict(request(1)))
        with pytest.raises(RequestTimeoutError):
            host.submit(request(1)).result(10)
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(host.predict, request(2), timeout=None)
            wait_until(lambda: host.statistics().pending >= 1)
            (tmp_path / "gate").touch()
            check(patient.result(30), 2)


@pytest.mark.parametrize("timeout", [0, 0.0, 0.01])
def test_a_timeout_says_how_long_the_caller_waited(timeout: float, shared_host: ModelHost) -> None:
    check(shared_host.predict(request(1)), 1)

    async def ask() -> None:
        await shared_host.apredict(request(2), timeout=timeout)

    with stopped(shared_host):
        for call in (
            lambda: shared_host.predict(request(2), timeout=timeout),
            lambda: asyncio.run(ask()),
            lambda: shared_host.submit(request(2), timeout=timeout).result(10),
        ):
            with pytest.raises(RequestTimeoutError, match=r"no answer within \d\.\d+ s"):
                call()
    check(shared_host.predict(request(3)), 3)
    all_slots_are_back(shared_host)


INTERRUPTED = """
import asyncio, os, sys
import numpy as np
from batch_inference import ModelHost
from batch_inference.testing import Blocks

entered, gate, way = sys.argv[1:]
host = ModelHost(Blocks)(entered, gate)

def ask(number):
    x = np.array([[number]])
    if way == "predict":
        return host.predict(x)
    if way == "timeout":
        return host.predict(x, timeout=100)
    if way == "submit":
        return host.submit(x).result()
    return asyncio.run(host.apredict(x))

with host:
    try:
        ask(1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    open(gate, "w").close()
    for number in range(2, 20):
        assert ask(number).tolist() == [[2 * number]], number
    print(host.statistics().workers[0].restarts)
"""


@pytest.mark.parametrize("way", ["predict", "timeout", "submit", "apredict"])
def test_ctrl_c_while_waiting_leaves_no_wrong_answer_and_does_not_reach_the_worker(way: str, tmp_path: Path) -> None:
    entered = tmp_path / "entered"
    command = [sys.executable, "-c", INTERRUPTED, str(entered), str(tmp_path / "gate"), way]
    application = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )
    try:
        wait_until(lambda: entered.exists() or application.poll() is not None, 30)
        os.killpg(application.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        out, err = application.communicate(timeout=30)
    finally:
        application.kill()
        application.wait()
    assert (out, err, application.returncode) == ("interrupted\n0\n", "", 0)


@pytest.mark.parametrize("way", ["submit", "apredict"])
def test_a_first_call_that_stop_overtakes_is_refused_and_the_next_start_knows_nothing_of_it(way: str) -> None:
    def call(number: int) -> Any:
        if way == "submit":
            return host.submit(request(number)).result(20)
        return asyncio.run(host.apredict(request(number), timeout=20))

    host = ModelHost(Doubles)()
    make = "_make_futures" if way == "submit" else "_make_loops"
    for _ in range(2):
        host.start()
        original = getattr(host, make)
        setattr(host, make, lambda original=original: (host.stop(), original())[1])  # another thread's, just before
        with pytest.raises(HostClosedError, match="not started"):
            call(1)
        delattr(host, make)
    with host:
        check(call(2), 2)

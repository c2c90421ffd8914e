"""submit: futures that never block their caller."""

import asyncio
import sys
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import HostClosedError, ModelHost, OverloadedError, RequestTooLargeError
from batch_inference.testing import wait_until
from tests.process.models import Blocks, Doubles
from tests.process.test_callers import all_slots_are_back, check, request, stopped


def test_futures_hold_each_its_own_answer_whatever_thread_made_them(shared_host: ModelHost) -> None:
    def send(caller: int) -> dict[Future[Any], tuple[int, int]]:
        return {shared_host.submit(request(caller, number)): (caller, number) for number in range(300)}

    with ThreadPoolExecutor(8) as pool:
        futures = {future: numbers for sent in pool.map(send, range(8)) for future, numbers in sent.items()}
    for future in as_completed(futures, timeout=60):
        check(future.result(), *futures[future])
    assert len(futures) == 8 * 300
    all_slots_are_back(shared_host)


def test_a_cancelled_future_is_never_run_and_takes_nothing_from_the_others(tmp_path: Path) -> None:
    entered, gate, notes = (tmp_path / name for name in ("entered", "gate", "notes"))
    with ModelHost(Blocks, max_batch_size=100)(str(entered), str(gate), str(notes)) as host:
        running = host.submit(request(1))
        wait_until(entered.exists)
        futures = [host.submit(request(number)) for number in range(20)]
        for future in futures[::2]:
            assert future.cancel()
        assert running.cancel()  # its answer is dropped
        gate.touch()
        for number, future in enumerate(futures):
            if number % 2:
                check(future.result(30), number)
            else:
                assert future.cancelled()
                with pytest.raises(CancelledError):
                    future.result(0)
        all_slots_are_back(host)
    assert notes.read_text().split() == ["1", "10"]


def test_callbacks_run_and_may_use_the_host(shared_host: ModelHost) -> None:
    seen: list[Any] = []
    done = threading.Event()

    def second(future: Future[Any]) -> None:
        seen.append(future.result())
        done.set()

    def first(future: Future[Any]) -> None:
        seen.append(future.result())
        shared_host.submit(request(2)).add_done_callback(second)

    shared_host.submit(request(1)).add_done_callback(first)
    assert done.wait(30)
    assert [answer.tolist() for answer in seen] == [[[2]], [[4]]]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, RuntimeError])
def test_a_callback_that_would_end_its_thread_is_logged_and_later_futures_are_completed(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture, shared_host: ModelHost
) -> None:
    others: list[Any] = []

    def fail(future: Future[Any]) -> None:
        raise kind

    with stopped(shared_host) as go_on:  # until the callbacks are there
        future = shared_host.submit(request(1))
        future.add_done_callback(fail)
        future.add_done_callback(others.append)
        go_on()
        check(shared_host.submit(request(2)).result(30), 2)
    check(future.result(30), 1)
    assert others == [future]  # the callbacks after it are called as well
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info is not None and record.exc_info[0] is kind
    if kind is not RuntimeError:  # which Future logs, as ever
        assert record.name == "batch_inference"
        assert f"raised {kind.__name__}, which would have ended the thread" in record.message


def test_a_callback_that_exits_in_its_callers_own_thread_exits_there(shared_host: ModelHost) -> None:
    future = shared_host.submit(request(1))
    check(future.result(30), 1)
    with pytest.raises(SystemExit):
        future.add_done_callback(lambda future: sys.exit(1))


def test_submit_does_not_block_when_the_request_pipe_is_full(shared_host: ModelHost) -> None:
    with stopped(shared_host) as go_on:
        futures = [shared_host.submit(request(number)) for number in range(5000)]  # more than a pipe holds
        assert not any(future.done() for future in futures)
        go_on()
        for number, future in enumerate(futures):
            check(future.result(60), number)
    all_slots_are_back(shared_host)


def test_submit_refuses_at_once_what_there_is_no_memory_for() -> None:
    large = np.ones((1, 1 << 15), np.int64)  # 256 KiB
    with ModelHost(Doubles, shared_memory=4 << 20)() as host:
        futures = []
        with stopped(host) as go_on:
            with pytest.raises(OverloadedError, match="shared_memory"):
                for number in range(100):
                    futures.append(host.submit(large * number))
            assert len(futures) >= 4
            go_on()
            for number, future in enumerate(futures):
                assert (future.result(30) == 2 * number).all()
        all_slots_are_back(host)
        assert (host.submit(large).result(30) == 2).all()
        with pytest.raises(RequestTooLargeError):
            host.submit(np.ones((1, 1 << 20), np.int64))


def test_stop_answers_what_was_accepted(tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    host = ModelHost(Blocks)(str(entered), str(gate))
    host.start()
    futures = [host.submit(request(number)) for number in range(50)]
    wait_until(entered.exists)
    stopping = threading.Thread(target=host.stop)
    stopping.start()
    wait_until(lambda: refuses(host))
    gate.touch()
    for number, future in enumerate(futures):
        check(future.result(30), number)
    stopping.join()


def refuses(host: ModelHost) -> bool:
    try:
        host.submit(request(0), timeout=0)
    except HostClosedError:
        return True
    return False


def test_the_error_of_a_request_is_the_error_of_its_future() -> None:
    with ModelHost(Doubles)() as host:
        assert isinstance(host.submit("no tensor").exception(30), Exception)
        check(host.submit(request(1)).result(30), 1)

"""Workers that hang, in a batch or while they load, are killed; nobody else is, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from batch_inference import ConfigError, HostClosedError, ModelHost, RequestTimeoutError, WorkerDiedError
from batch_inference.policy import FixedDelay
from batch_inference.testing import Doubles
from tests.process.load import MANY, Load, value, worker_pid
from tests.process.models import Sleeps

IN_C, WITH_LOCK, STOPPED, FOR_A_WHILE = -1, -2, -3, -4
BATCH_TIMEOUT = 1.0


class Hangs(Doubles):
    """Never comes back from a batch with a negative number, in the way that it asks for."""

    def predict_batch(self, x: Any) -> Any:
        if (x == IN_C).any():
            time.sleep(1000)
        if (x == WITH_LOCK).any():
            ctypes.PyDLL(None).sleep(1000)  # the interpreter lock is held meanwhile
        if (x == STOPPED).any():
            os.kill(os.getpid(), signal.SIGSTOP)
        if (x == FOR_A_WHILE).any():
            time.sleep(0.6 * BATCH_TIMEOUT)
        return super().predict_batch(x)


@pytest.fixture(scope="module")
def shared_host() -> Iterator[ModelHost]:
    """The name tells conftest not to look for leaks before the module ends."""
    with ModelHost(Hangs, batch_timeout=BATCH_TIMEOUT, max_restarts=MANY)() as host:
        yield host


@pytest.mark.parametrize("way", [IN_C, WITH_LOCK, STOPPED])
def test_a_request_that_hangs_the_model_fails_and_its_batch_mates_are_answered(
    shared_host: ModelHost, way: int
) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(shared_host.predict, value(number)) for number in range(50)]
        culprit = pool.submit(shared_host.predict, value(way))
        calls += [pool.submit(shared_host.predict, value(number)) for number in range(50, 100)]
        error = culprit.exception(60)
        for number, call in enumerate(calls):
            assert call.result(60).tolist() == [[2 * number]]
    assert isinstance(error, WorkerDiedError)
    assert "hung for" in str(error) and f"batch_timeout={BATCH_TIMEOUT:g}" in str(error)
    assert shared_host.predict(value(3), timeout=30).tolist() == [[6]]


def test_who_gives_up_while_the_hung_worker_is_replaced_hears_of_it(shared_host: ModelHost) -> None:
    for timeout in (2.0, 4.0, 8.0):  # seconds are long or short, as the machine is busy
        with pytest.raises((RequestTimeoutError, WorkerDiedError)) as caught:
            shared_host.predict(value(IN_C), timeout=timeout)
        if "hung for" in str(caught.value):
            break
    assert "hung for" in str(caught.value), caught.value


def test_a_worker_that_was_idle_for_long_has_the_whole_batch_timeout(shared_host: ModelHost) -> None:
    pid = worker_pid(shared_host)
    for number in (0.3, 0.6, 1.5):
        threading.Event().wait(number * BATCH_TIMEOUT)
        answer = shared_host.predict(value(FOR_A_WHILE), timeout=30)
        assert answer.tolist() == [[2 * FOR_A_WHILE]] and worker_pid(shared_host) == pid


def test_an_answer_that_nobody_collects_is_no_hang(shared_host: ModelHost) -> None:
    pid = worker_pid(shared_host)

    async def busy() -> Any:
        task = asyncio.ensure_future(shared_host.apredict(value(FOR_A_WHILE)))
        while not shared_host.statistics().pending:
            await asyncio.sleep(0)
        time.sleep(3 * BATCH_TIMEOUT)  # the loop is blocked: the answer is there, and still counted as outstanding
        assert shared_host.statistics().pending == 1
        return await task

    assert asyncio.run(busy()).tolist() == [[2 * FOR_A_WHILE]]
    assert worker_pid(shared_host) == pid


def test_a_worker_under_load_is_no_hang() -> None:
    with ModelHost(Sleeps, batch_timeout=0.5)(0.1) as host, Load(host, 4) as load:
        pid = worker_pid(host)
        threading.Event().wait(2.0)
        load.stop()
        load.assert_clean()
        assert worker_pid(host) == pid


def test_a_worker_that_waits_for_company_is_no_hang() -> None:
    with ModelHost(Doubles, batch_timeout=0.5, policy=FixedDelay(2.0))() as host:
        pid = worker_pid(host)
        assert host.predict(value(1), timeout=30).tolist() == [[2]]
        assert worker_pid(host) == pid


def test_stop_ends_though_the_model_hangs() -> None:
    host = ModelHost(Hangs, batch_timeout=BATCH_TIMEOUT, max_batch_size=1)()
    host.start()
    futures = [host.submit(value(IN_C)) for _ in range(10)]
    started = time.monotonic()
    host.stop()
    assert time.monotonic() - started < 8 * BATCH_TIMEOUT
    for future in futures:
        with pytest.raises(HostClosedError, match="hung for"):
            future.result(0)


@pytest.mark.parametrize("wrong", [0, -1, "1", True])
def test_a_batch_timeout_that_cannot_work_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="batch_timeout"):
        ModelHost(Doubles, batch_timeout=wrong)


def test_a_batch_timeout_may_be_none_or_endless() -> None:
    for endless in (None, float("inf")):
        with ModelHost(Doubles, batch_timeout=endless, start_timeout=1e9)() as host:
            assert host.predict(value(1), timeout=30).tolist() == [[2]]

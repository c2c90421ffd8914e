"""Several workers, and none."""

import asyncio
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from batch_inference import (
    BatcherError,
    HostClosedError,
    ModelError,
    ModelHost,
    ModelLoadError,
    RequestTimeoutError,
    batching,
)
from batch_inference.batcher import ListBatcher
from batch_inference.testing import no_leaks, wait_until
from tests.process.models import Blocks, Echo, Inflates, Raises, WhoAmI
from tests.process.test_callers import all_slots_are_back, check, request

# --- num_workers=3 --------------------------------------------------------------------------------------------------


def test_requests_go_to_the_replica_with_least_to_do() -> None:
    with ModelHost(WhoAmI, num_workers=3, max_batch_size=1)(0.02) as host:
        pids = {worker.pid for worker in host.statistics().workers}
        assert len(pids) == 3 and os.getpid() not in pids
        with ThreadPoolExecutor(3) as pool:  # as many callers as workers: nobody waits behind another
            answers = list(pool.map(lambda n: host.predict(request(n)).item(), range(60)))
        counts = Counter(answers)
        assert set(counts) == pids and min(counts.values()) >= 15
        statistics = host.statistics()
        assert {worker.pid: worker.batches for worker in statistics.workers} == counts
        assert statistics.batches == statistics.requests == 60

        async def many() -> list[Any]:
            return await asyncio.gather(*[host.apredict(request(number)) for number in range(30)])

        assert len({answer.item() for answer in asyncio.run(many())}) == 3
        assert {host.submit(request(number)).result(30).item() for number in range(9)} == pids
        all_slots_are_back(host)


def test_a_replica_that_is_busy_gets_no_more_requests_than_it_must(tmp_path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"

    class BlocksOnNegative(Blocks):
        def predict_batch(self, x: Any) -> Any:
            return super().predict_batch(x) if (x < 0).any() else x * 2

    with ModelHost(BlocksOnNegative, num_workers=2)(str(entered), str(gate)) as host:
        blocked = host.submit(request(-1))
        wait_until(entered.exists)
        for number in range(20):  # each finds the other worker free
            check(host.predict(request(number), timeout=30), number)
        gate.touch()
        check(blocked.result(30), -1)


def test_stop_ends_all_replicas_and_replicas_that_fail_to_load_fail_the_start(tmp_path) -> None:
    class OnlyOne:
        def __init__(self) -> None:
            os.close(os.open(tmp_path / "taken", os.O_CREAT | os.O_EXCL))

        def predict_batch(self, x: Any) -> Any:
            return x

    with no_leaks(), pytest.raises(ModelLoadError, match="FileExistsError"):
        ModelHost(OnlyOne, num_workers=2).start()


# --- num_workers=0 --------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that has none of what worker processes need."""
    for name in ("memfd_create", "eventfd", "pidfd_open", "eventfd_read", "eventfd_write", "pipe2"):
        monkeypatch.delattr(os, name, raising=False)


def test_the_model_in_a_thread_gives_the_same_results_everywhere(bare_platform: None) -> None:
    @batching(num_workers=0, max_batch_size=16)
    class Local:
        def __init__(self, factor: int) -> None:
            self.factor = factor
            self.thread = threading.get_ident()

        def predict_batch(self, x: Any) -> Any:
            assert threading.get_ident() == self.thread
            return x * self.factor

    host = Local.host(2)
    with pytest.raises(HostClosedError):
        host.predict(request(1))
    with host:
        assert "thread" in repr(host)

        def call(caller: int) -> None:
            for number in range(100):
                check(host.predict(request(caller, number), timeout=30), caller, number)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(8)))

        async def many() -> None:
            answers = await asyncio.gather(*[host.apredict(request(number)) for number in range(200)])
            for number, answer in enumerate(answers):
                check(answer, number)

        for _ in range(3):
            asyncio.run(many())
        futures = [host.submit(request(number)) for number in range(200)]
        for number, future in enumerate(futures):
            check(future.result(30), number)
        large = np.ones((16, 1 << 18), "f")
        assert (host.predict(large) == 2).all()
        statistics = host.statistics()
        assert statistics.requests == 8 * 100 + 3 * 200 + 200 + 1 and statistics.state == "ready"
        assert 0 < statistics.batches < statistics.requests
        all_slots_are_back(host)
    with pytest.raises(HostClosedError):
        host.predict(request(1))
    with host:  # and again
        check(host.predict(request(4)), 4)


def test_the_model_in_a_thread_copies_in_and_out(bare_platform: None) -> None:
    class Subtracts:
        def __init__(self) -> None:
            self.output = np.zeros((1, 4))

        def predict_batch(self, x: Any) -> Any:
            x -= 1  # its own copy
            self.output[:] = x
            return self.output  # used again for the next call

    with ModelHost(Subtracts, num_workers=0) as host:
        x = np.full((1, 4), 5.0)
        first, second = host.predict(x), host.predict(x * 2)
        assert (x == 5).all() and (first == 4).all() and (second == 9).all()
        first[:] = 0  # a result is its caller's


def test_errors_of_a_model_in_a_thread_arrive_as_from_a_process(bare_platform: None) -> None:
    with ModelHost(Raises, num_workers=0)() as host:
        with pytest.raises(ValueError, match="negative input") as caught:
            host.predict(request(-1))
        assert "predict_batch" in str(caught.value.__cause__)
        check(host.predict(request(1)), 1)
    with ModelHost(Raises, num_workers=0)(error=CannotTravel()) as host:
        with pytest.raises((ModelError, CannotTravel)):
            host.predict(request(-1))
        check(host.predict(request(1)), 1)

    class Fails:
        def __init__(self) -> None:
            raise KeyError("weights")

        def predict_batch(self, x: Any) -> Any:
            return x

    with pytest.raises(ModelLoadError, match="weights") as load:
        ModelHost(Fails, num_workers=0).start()
    assert isinstance(load.value.__cause__, KeyError)

    class Short:
        def predict_batch(self, x: Any) -> Any:
            return x[:1]

    with ModelHost(Short, num_workers=0) as host, pytest.raises(BatcherError):
        host.predict(np.zeros((2, 1)))


class CannotTravel(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_in_a_thread_can_time_out_and_replies_may_be_of_any_size(bare_platform: None, tmp_path) -> None:
    with ModelHost(Blocks, num_workers=0)(str(tmp_path / "entered"), str(tmp_path / "gate")) as host:
        with pytest.raises(RequestTimeoutError):
            host.predict(request(1), timeout=0.05)
        with pytest.raises(RequestTimeoutError):
            host.submit(request(2), timeout=0.05).result(30)
        (tmp_path / "gate").touch()
        check(host.predict(request(3)), 3)
        all_slots_are_back(host)
    with ModelHost(Inflates, batcher=ListBatcher(), num_workers=0) as host:
        for size in 0, 10, 3 << 20, 3 << 20, 5:
            assert len(host.predict(size)) == size
    with ModelHost(Echo, num_workers=0) as host:
        assert host.predict({"a": ["text", None]}) == {"a": ["text", None]}


def test_a_host_in_a_thread_that_nobody_refers_to_any_more_ends_its_thread() -> None:
    with no_leaks():
        host = ModelHost(Raises, num_workers=0)()
        host.start()
        check(host.predict(request(1)), 1)
        del host

"""What host.statistics() says, and what a host looks like when it is printed."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from batch_inference import BatcherError, ModelHost, Statistics
from batch_inference.batcher import ListBatcher
from batch_inference.testing import wait_until
from tests.process.models import Blocks, Doubles, Raises, Sleeps
from tests.process.test_callers import check, request


def test_every_field_says_what_happened(tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    with ModelHost(Blocks, max_batch_size=16)(str(entered), str(gate)) as host:
        fresh = host.statistics()
        assert isinstance(fresh, Statistics)
        assert (fresh.requests, fresh.failed, fresh.batches, fresh.mean_batch, fresh.pending) == (0, 0, 0, 0.0, 0)
        assert fresh.waiting == fresh.running == fresh.transport == type(fresh.waiting)(0.0, 0.0, 0.0)
        assert fresh.state == "ready"

        first = host.submit(np.zeros((1, 2)))
        wait_until(entered.exists)
        rest = [host.submit(np.zeros((3, 2))) for _ in range(5)]
        assert host.statistics().pending == 6
        gate.touch()
        for future in [first, *rest]:
            future.result(30)
        wait_until(lambda: host.statistics().pending == 0)
        now = host.statistics()
        assert (now.requests, now.failed, now.batches, now.mean_batch) == (6, 0, 2, 8.0)
        assert 0 < now.running.p50 <= now.running.p90 <= now.running.p99 < 60
        assert 0 < now.waiting.p50 <= now.waiting.p90 <= now.waiting.p99 < 60
        assert 0 < now.transport.p50 <= now.transport.p99 < 10

        (worker,) = now.workers
        assert (worker.state, worker.restarts, worker.batches) == ("ready", 0, 2)
        assert psutil.Process(worker.pid).ppid() != os.getpid()  # it is the supervisor's
        actual = psutil.Process(worker.pid).memory_info().rss
        assert 0.5 * actual < worker.memory < 2 * actual and now.memory > worker.memory
    stopped = host.statistics()
    assert stopped.state == "stopped" and stopped.requests == 6 and stopped.batches == 2 and stopped.workers == ()
    with host:
        assert host.statistics().requests == 0  # since it started


def test_times_are_seconds() -> None:
    with ModelHost(Sleeps)(0.1) as host:
        for number in range(5):
            check(host.predict(request(number)), number)
        statistics = host.statistics()
        assert 0.08 < statistics.running.p50 < 10


def test_failed_requests_are_counted() -> None:
    with ModelHost(Raises)() as host:
        for number in range(4):
            check(host.predict(request(number)), number)
        for number in range(3):
            with pytest.raises(ValueError):
                host.predict(request(-1 - number))
        statistics = host.statistics()
        assert (statistics.requests, statistics.failed) == (7, 3)
    with ModelHost(Doubles, batcher=ListBatcher())() as host:
        with pytest.raises(BatcherError):
            host.predict()
        assert host.statistics().failed == 1


def test_the_value_is_frozen() -> None:
    with ModelHost(Doubles, num_workers=0)() as host:
        statistics = host.statistics()
        for value in statistics, statistics.waiting, statistics.workers[0]:
            for field in dataclasses.fields(value):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(value, field.name, 1)
        hash(statistics)


def test_a_host_that_was_never_started_has_statistics_too() -> None:
    assert ModelHost(Doubles).statistics() == Statistics()


def test_a_host_is_printed_with_its_model_its_state_and_its_workers() -> None:
    host = ModelHost(Doubles, num_workers=2, max_batch_size=8)()
    assert repr(host) == "<ModelHost of Doubles: stopped, 2 workers, max_batch_size=8>"
    with host:
        assert repr(host) == "<ModelHost of Doubles: ready, 2 workers, max_batch_size=8>"
    assert "stopped" in repr(host)
    with ModelHost(Doubles, num_workers=0)() as host:
        assert repr(host) == "<ModelHost of Doubles: ready, a thread of this process, max_batch_size=32>"

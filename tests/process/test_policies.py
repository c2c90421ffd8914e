"""Policies in a host that ends or changes its model, and policies that are broken."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from batch_inference import ModelHost
from batch_inference.policy import FixedDelay, Queue, Returning
from tests.process.models import Doubles
from tests.process.overloaded import WaitsForEver
from tests.process.test_callers import check, request


class Broken:
    """Raises in one of its methods, or answers what is no number of seconds."""

    def __init__(self, where: str) -> None:
        self.where = where

    def arrived(self, time: float, size: int) -> None:
        self._maybe("arrived")

    def ran(self, size: int, seconds: float) -> None:
        self._maybe("ran")

    def completed(self, time: float, requests: int) -> None:
        self._maybe("completed")

    def wait(self, queue: Any, now: float) -> Any:
        self._maybe("wait")
        return {"answer": "soon", "nan": float("nan")}.get(self.where, 1000.0)

    def _maybe(self, name: str) -> None:
        if self.where == name:
            raise RuntimeError(f"broken in {name}")


class BrokenHeir(Returning):
    """The library's own rule, changed for the worse."""

    def wait(self, queue: Queue, now: float) -> float:
        raise RuntimeError("broken in wait")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_host_that_stops_waits_for_no_more_requests(workers: int) -> None:
    with ModelHost(Doubles, policy=WaitsForEver(), num_workers=workers)() as host:
        futures = [host.submit(request(number)) for number in range(3)]
    for number, future in enumerate(futures):
        check(future.result(0), number)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_whose_successor_is_there_waits_for_no_more_requests(workers: int) -> None:
    with ModelHost(Doubles, policy=WaitsForEver(), num_workers=workers)() as host:
        future = host.submit(request(1))
        host.reload()
        check(future.result(30), 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", ["arrived", "wait", "answer", "nan", "ran", "completed"])
def test_a_policy_that_fails_harms_no_request(where: str, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "batch_inference"):
        with ModelHost(Doubles, policy=Broken(where), max_delay=0.05, num_workers=workers)() as host:
            for number in range(3):
                check(host.predict(request(number), timeout=30), number)
            assert host.statistics().failed == 0
            assert host.statistics().workers[0].restarts == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    name = "wait" if where in ("answer", "nan") else where
    assert f"Broken.{name} of the policy failed" in caplog.text


def test_a_fixed_delay_does_not_hold_up_the_end_of_a_host() -> None:
    with ModelHost(Doubles, policy=FixedDelay(1000))() as host:
        future = host.submit(np.ones((2, 1)))
    assert future.result(0).shape == (2, 1)


def test_a_policy_that_inherits_from_ours_may_fail_as_well() -> None:
    with ModelHost(Doubles, policy=BrokenHeir(), num_workers=0)() as host:
        check(host.predict(request(1), timeout=30), 1)
        check(host.predict(request(2), timeout=30), 2)

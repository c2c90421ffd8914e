"""Which timeouts a call may give."""

import asyncio
import math
from typing import Any

import pytest

from batch_inference import ConfigError, ModelHost, RequestTimeoutError
from tests.process.test_callers import check, request


@pytest.mark.parametrize("timeout", [None, 30, 1e8, 1e12, math.inf])
def test_long_timeouts_and_none_are_no_hindrance(shared_host: ModelHost, timeout: float | None) -> None:
    check(shared_host.predict(request(1), timeout=timeout), 1)
    check(shared_host.submit(request(2), timeout=timeout).result(30), 2)
    check(asyncio.run(shared_host.apredict(request(3), timeout=timeout)), 3)


@pytest.mark.parametrize("timeout", ["1", -1, math.nan, True])
def test_what_is_no_duration_is_refused_at_once(shared_host: ModelHost, timeout: Any) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        shared_host.predict(request(1), timeout=timeout)
    with pytest.raises(ConfigError, match="seconds"):
        shared_host.submit(request(1), timeout=timeout)


def test_a_timeout_of_nothing_has_passed(shared_host: ModelHost) -> None:
    with pytest.raises(RequestTimeoutError):
        shared_host.predict(request(1), timeout=0)
    check(shared_host.predict(request(2)), 2)

"""Which timeouts a call may give."""

import asyncio
import math
from typing import Any

import pytest

from batch_inference import ConfigError, ModelHost, RequestTimeoutError
from tests.process.models import Doubles
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
    def submit(x: Any, timeout: float) -> Any:
        return shared_host.submit(x, timeout=timeout).result(30)

    def apredict(x: Any, timeout: float) -> Any:
        return asyncio.run(shared_host.apredict(x, timeout=timeout))

    for predict in (shared_host.predict, submit, apredict):
        with pytest.raises(RequestTimeoutError, match="0 seconds leave no time for an answer") as caught:
            predict(request(1), timeout=0)
        assert "more arrives than" not in str(caught.value)
    check(shared_host.predict(request(2)), 2)


def test_options_without_a_practical_limit_are_no_hindrance() -> None:
    without = dict.fromkeys(("max_delay", "timeout", "start_timeout", "batch_timeout"), math.inf)
    largest = dict.fromkeys(("max_batch_size", "max_pending"), 2**63 - 1)
    with ModelHost(Doubles, **without, **largest)() as host:
        host.configure(max_delay=1e300)
        check(host.predict(request(1)), 1)
        check(host.submit(request(2)).result(30), 2)
        check(asyncio.run(host.apredict(request(3))), 3)
        host.reload()
        check(host.predict(request(4)), 4)

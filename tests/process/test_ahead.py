"""Large requests, which a worker copies into the open batch while it waits for more: nobody can tell from the answers.

The policy here waits for a full batch, so that whatever is there has been copied long before it runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

from batch_inference import ModelHost
from batch_inference.testing import wait_until
from tests.process.batcher_models import Refuses, Spoils
from tests.process.models import Doubles
from tests.process.overloaded import WaitsForEver
from tests.process.test_callers import all_slots_are_back

BATCH = 4


def image(number: int, rows: int = 1) -> Any:
    """588 KiB a row."""
    return np.full((rows, 3, 224, 224), number, np.float32)


def host_of(model: Any, workers: int = 1, limit: int = BATCH, **options: Any) -> ModelHost:
    return ModelHost(model, policy=WaitsForEver(), max_batch_size=limit, num_workers=workers, **options)()


def check(answer: Any, expected: float) -> None:
    assert answer.shape[1:] == (3, 224, 224) and (answer == expected).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_requests_that_come_one_by_one_get_their_own_answers(workers: int) -> None:
    with host_of(Doubles, workers) as host:
        for start in range(0, 5 * BATCH, BATCH):
            futures = [host.submit(image(start + number)) for number in range(BATCH)]
            for number, future in enumerate(futures):
                check(future.result(30), 2 * (start + number))
        assert host.statistics().batches == 5
        all_slots_are_back(host)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_request_that_was_given_up_leaves_its_place_to_the_next(workers: int) -> None:
    async def cancelled(number: int) -> None:
        pending = host.statistics().pending
        task = asyncio.ensure_future(host.apredict(image(number)))
        while host.statistics().pending == pending:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with host_of(Doubles, workers, limit=8) as host:
        for first, given_up in ((0, 0), (10, 1)):  # the oldest, or one in the middle
            futures = {number: host.submit(image(first + number)) for number in (0, 1)}
            assert futures.pop(given_up).cancel()
            asyncio.run(cancelled(first + 2))
            futures |= {number: host.submit(image(first + number)) for number in range(3, 8)}
            for number, future in futures.items():
                check(future.result(30), 2 * (first + number))
        assert (host.statistics().requests, host.statistics().batches) == (12, 2)
        all_slots_are_back(host)


def test_what_a_model_keeps_or_spoils_of_its_input_reaches_nobody() -> None:
    with host_of(Spoils) as host:
        for start in range(0, 6 * BATCH, BATCH):
            futures = [host.submit(image(start + number)) for number in range(BATCH)]
            for number, future in enumerate(futures):
                check(future.result(30), start + number)


def test_a_batch_that_fails_is_run_again_with_what_was_sent() -> None:
    with host_of(Refuses) as host:
        futures = {number: host.submit(image(number)) for number in (1, -1, 2, 3)}
        assert isinstance(futures.pop(-1).exception(30), ValueError)
        for number, future in futures.items():
            check(future.result(30), number)


def test_the_requests_of_an_open_batch_outlive_the_death_of_its_worker() -> None:
    with host_of(Doubles) as host:
        futures = [host.submit(image(number)) for number in range(BATCH - 1)]
        wait_until(lambda: host.statistics().pending == BATCH - 1)
        os.kill(host.statistics().workers[0].pid, signal.SIGKILL)
        futures.append(host.submit(image(BATCH - 1)))
        for number, future in enumerate(futures):
            check(future.result(30), 2 * number)
        all_slots_are_back(host)


def test_requests_of_several_rows_and_of_more_than_a_batch_are_joined_too() -> None:
    with host_of(Doubles, max_delay=0.05) as host:
        futures = [host.submit(image(number, rows)) for number, rows in enumerate((1, 2, 9, 3, 1, 1, 4, 2))]
        for number, (future, rows) in enumerate(zip(futures, (1, 2, 9, 3, 1, 1, 4, 2))):
            answer = future.result(30)
            assert len(answer) == rows
            check(answer, 2 * number)

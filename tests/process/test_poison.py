"""One bad request in a batch: it fails, and its neighbours do not notice."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import ItemErrors, ModelHost
from batch_inference.batcher import Batcher
from batch_inference.testing import Blocks, wait_until
from tests.process.test_callers import check, request

BATCH = 16


class Poisoned(Blocks):
    """Refuses negative numbers, by name, after it has spoilt its input."""

    def predict_batch(self, x: Any) -> Any:
        answer = super().predict_batch(x)
        bad = x[x < 0]
        x[...] = 1000
        if len(bad):
            raise ValueError(f"poison {bad[0]}")
        return answer


class Joined(Batcher):
    """A batcher that does not promise to copy: the model may be given what the next run needs."""

    def batch(self, requests: list[tuple[Any, ...]]) -> tuple[Any, Any]:
        return (requests[0][0] if len(requests) == 1 else np.concatenate([r[0] for r in requests])), len(requests)

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        return [batched_response[index : index + 1] for index in range(context)]


OneBatch = Callable[..., list["Future[Any]"]]


@pytest.fixture
def one_batch(tmp_path: Path) -> OneBatch:
    """Sends requests so that they share one batch: the model is held up by an earlier one meanwhile."""

    def send(host: ModelHost, numbers: list[int]) -> list["Future[Any]"]:
        first = host.submit(request(0))
        wait_until((tmp_path / "entered").exists)
        futures = [host.submit(request(number)) for number in numbers]
        (tmp_path / "gate").touch()
        check(first.result(30), 0)
        return futures

    return send


def files(tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "entered"), str(tmp_path / "gate")


@pytest.mark.parametrize("bad", [[5], [1, 2], [1, 8, 16], list(range(1, 16))])
@pytest.mark.parametrize("batcher", [None, Joined()])
def test_only_the_culprits_fail_each_with_its_own_error(
    tmp_path: Path, one_batch: OneBatch, bad: list[int], batcher: Batcher | None
) -> None:
    with ModelHost(Poisoned, batcher=batcher, max_batch_size=BATCH)(*files(tmp_path)) as host:
        numbers = [-n if n in bad else n for n in range(1, BATCH + 1)]
        for number, future in zip(numbers, one_batch(host, numbers)):
            if number < 0:
                error = future.exception(30)
                assert type(error) is ValueError and str(error) == f"poison {number}"
            else:
                check(future.result(30), number)
        statistics = host.statistics()
        assert (statistics.requests, statistics.failed) == (BATCH + 1, len(bad))
        check(host.predict(request(7)), 7)


def test_without_isolation_the_batch_fails_as_one(tmp_path: Path, one_batch: OneBatch) -> None:
    with ModelHost(Poisoned, max_batch_size=BATCH, isolate_errors=False)(*files(tmp_path)) as host:
        for future in one_batch(host, [1, -2, 3, 4]):
            assert str(future.exception(30)) == "poison -2"


def test_a_model_that_fails_for_everybody_is_not_run_again_and_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    class Broken:
        def predict_batch(self, x: Any) -> Any:
            with open(runs, "a") as file:
                file.write("x")
            raise RuntimeError("broken")

    with ModelHost(Broken, max_batch_size=8)() as host:
        rows = np.zeros((8, 1), np.int64)
        for _ in range(4):  # single requests that fill a batch: three make it hopeless
            with pytest.raises(RuntimeError):
                host.predict(rows)
        before = len(runs.read_text())
        futures = [host.submit(rows[:1]) for _ in range(16)]
        assert all(type(future.exception(30)) is RuntimeError for future in futures)
        assert len(runs.read_text()) - before <= len(futures), "batches were divided although everything fails"


def test_after_a_success_batches_are_divided_again(tmp_path: Path, one_batch: OneBatch) -> None:
    with ModelHost(Poisoned, max_batch_size=8)(*files(tmp_path)) as host:
        futures = one_batch(host, [-1, -2])
        assert [str(future.exception(30)) for future in futures] == ["poison -1", "poison -2"]
        for _ in range(3):
            with pytest.raises(ValueError):
                host.predict(request(-1))
        check(host.predict(request(1)), 1)
        (tmp_path / "gate").unlink()
        (tmp_path / "entered").unlink()
        good, bad = one_batch(host, [5, -6])
        check(good.result(30), 5)
        assert str(bad.exception(30)) == "poison -6"


class Names(Blocks):
    """Says itself which rows are negative."""

    def predict_batch(self, x: Any) -> Any:
        answer = super().predict_batch(x)
        bad = {int(row): ValueError(f"poison {x[row, 0]}") for row in np.flatnonzero(x[:, 0] < 0)}
        if bad:
            raise ItemErrors(bad, results=answer)
        return answer


def test_a_model_may_name_those_for_whom_it_failed(tmp_path: Path, one_batch: OneBatch) -> None:
    with ModelHost(Names, max_batch_size=BATCH)(*files(tmp_path), str(tmp_path / "runs")) as host:
        numbers = [1, -2, 3, -4, 5]
        for number, future in zip(numbers, one_batch(host, numbers)):
            if number < 0:
                error = future.exception(30)
                assert type(error) is ValueError and str(error) == f"poison {number}"
                assert "raise ItemErrors" in str(error.__cause__)
            else:
                check(future.result(30), number)
        assert (tmp_path / "runs").read_text().split() == ["1", "5"]
        assert host.statistics().failed == 2


class Small(Blocks):
    """Its memory holds four rows."""

    def predict_batch(self, x: Any) -> Any:
        answer = super().predict_batch(x)
        if len(x) > 4:
            raise MemoryError(f"no room for {len(x)} rows")
        return answer


def test_a_batch_too_large_for_the_memory_is_halved_and_the_statistics_show_what_was_learned(
    tmp_path: Path, one_batch: OneBatch
) -> None:
    with ModelHost(Small, max_batch_size=BATCH)(*files(tmp_path), str(tmp_path / "sizes")) as host:
        assert host.statistics().workers[0].size_limit is None
        for number, future in enumerate(one_batch(host, list(range(BATCH)))):
            check(future.result(30), number)
        assert (tmp_path / "sizes").read_text().split() == ["1", "16", "8", "4", "4", "4", "4"]
        assert host.statistics().workers[0].size_limit == 4 and host.statistics().failed == 0
        assert host.predict(np.ones((9, 2))).shape == (9, 2)  # in parts now

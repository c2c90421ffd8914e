"""The loop of the worker, over requests in memory and without a process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batch_inference import BatcherError, ItemErrors, ModelError, RequestTooLargeError, board
from batch_inference.batcher import Batcher, BucketSeqBatcher, ConcatBatcher, ListBatcher, MultiBatcher, SeqBatcher
from batch_inference.policy import FixedDelay
from tests.unit.worker_harness import ROW, Bench, Sent


class Watched:
    """Doubles its input; keeps each batch, and what the slots of the requests said while it ran."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.alone: list[list[int]] = []
        self.sent: list[Sent] = []

    def __call__(self, x: Any) -> Any:
        self.batches.append(x.ravel().tolist())
        self.alone.append([index for index, sent in enumerate(self.sent) if sent.runs_alone])
        return x * 2


def results(sent: list[Sent]) -> list[int]:
    return [int(request.result[0, 0]) for request in sent]


# --- requests under which a worker died -------------------------------------------------------------------------------


def test_a_request_under_which_a_worker_died_runs_alone_and_others_together_in_between() -> None:
    model = Watched()
    bench = Bench(model, max_batch_size=3)
    model.sent = [*bench.send_numbers(1, 2, tries=1), *bench.send_numbers(3, 4, 5, 6, 7)]
    bench.send_together()
    bench.run()
    assert model.batches == [[1], [3, 4, 5], [2], [6, 7]]
    assert model.alone == [[0], [], [1], []]
    assert results(model.sent) == [2, 4, 6, 8, 10, 12, 14]


def test_what_must_run_alone_does_not_wait_for_company() -> None:
    model = Watched()
    bench = Bench(model, policy=FixedDelay(1000))
    sent = bench.send_numbers(1, tries=2)
    bench.run()
    assert results(sent) == [2] and all(wait in (None, 0) for wait in bench.waits)


# --- when a batch is cut ----------------------------------------------------------------------------------------------


def test_an_eager_policy_is_not_asked_and_told_of_a_batch_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("arrived", "wait", "completed", "ran"):
        monkeypatch.setattr(FixedDelay, name, lambda self, *args, name=name: told.append(name))
    monkeypatch.setattr("batch_inference.worker.LEARNING_INTERVAL", 1000.0)
    bench = Bench(Watched(), policy=FixedDelay(0))
    sent = [request for number in range(5) for request in bench.send_numbers(number)]
    bench.run()
    assert results(sent) == [0, 2, 4, 6, 8] and told == ["ran"]


def test_a_batch_counts_as_full_when_no_more_fits_and_those_who_gave_up_do_not_fill_it() -> None:
    model = Watched()
    bench = Bench(model, max_batch_size=3)
    bench.send_numbers(1, 2, 3, 4)
    bench.send_numbers(5, 6)[0].give_up()
    bench.run()
    assert model.batches == [[1, 2, 3], [4, 6]]
    assert bench.cells[ROW + board.CUT_FULL] == bench.cells[ROW + board.CUT_NOTHING] == 1
    assert sum(bench.cells[ROW + board.WAITING : ROW + board.WAITING + board.BUCKETS]) == 5


@pytest.mark.parametrize("batcher", [ListBatcher(), SeqBatcher(0), ConcatBatcher(batch_sizes=[4, 32])])
def test_requests_run_alone_with_every_batcher(batcher: Batcher) -> None:
    sizes: list[int] = []

    def run(x: Any) -> Any:
        sizes.append(len(x))
        return x

    bench = Bench(run, batcher)
    sent = bench.send_numbers(1, 2, 3, tries=1)
    bench.run()
    assert len(sizes) == 3 and set(sizes) == {4 if batcher.__dict__.get("batch_sizes") else 1}
    assert all(request.done for request in sent)


def test_the_parts_of_a_request_that_must_run_alone_run_one_by_one_and_it_is_not_marked_in_between() -> None:
    model = Watched()
    bench = Bench(model, max_batch_size=4)
    model.sent = bench.send([(np.arange(10)[:, None],)], tries=1) + bench.send_numbers(20, 21)
    bench.send_together()
    bench.run()
    assert model.batches == [[0, 1, 2, 3], [20, 21], [4, 5, 6, 7], [8, 9]]
    assert model.alone == [[0], [], [0], [0]]
    assert model.sent[0].result.ravel().tolist() == [2 * n for n in range(10)]


def test_a_batch_of_one_is_marked_as_such_also_when_a_failed_batch_is_divided() -> None:
    model = Watched()

    def run(x: Any) -> Any:
        answer = model(x)
        if (x < 0).any():
            raise ValueError("negative")
        return answer

    bench = Bench(run)
    model.sent = bench.send_numbers(1, -2, 3, 4)
    bench.run()
    assert model.batches == [[1, -2, 3, 4], [1, -2], [1], [-2], [3, 4]]
    assert model.alone == [[], [], [0], [1], []]
    assert type(model.sent[1].error) is ValueError


class Looks(ListBatcher):
    """Looks at the slots from its hooks."""

    def __init__(self, sent: list[Sent]) -> None:
        self.sent = sent
        self.alone: list[list[int]] = []

    def look(self) -> None:
        self.alone.append([index for index, request in enumerate(self.sent) if request.runs_alone])

    def size(self, request: tuple[Any, ...]) -> int:
        self.look()
        return 1 if isinstance(request[0], str) else len(request[0])

    def split(self, request: tuple[Any, ...], limit: int) -> list[tuple[Any, ...]]:
        self.look()
        return [(item,) for item in request[0]]

    def join(self, responses: list[Any]) -> Any:
        return responses

    def batch(self, requests: list[tuple[Any, ...]]) -> tuple[Any, Any]:
        self.look()
        return super().batch(requests)


def test_a_request_is_marked_alone_while_hooks_look_at_it_and_not_while_it_waits() -> None:
    batcher = Looks([])
    bench = Bench(lambda texts: texts, batcher, max_batch_size=2)
    batcher.sent += bench.send([("one",), (["two", "three", "four"],)])
    bench.run()
    taken = [[0], [1], [1], [1], [1], [1]]  # size of both, split, and size of the three parts
    assert batcher.alone == [*taken, [], []]  # two batches of two
    assert [request.result for request in batcher.sent] == ["one", ["two", "three", "four"]]


def test_parts_that_are_none_are_an_error_of_the_batcher() -> None:
    class Empty(Looks):
        def split(self, request: tuple[Any, ...], limit: int) -> list[tuple[Any, ...]]:
            return []

    bench = Bench(lambda texts: texts, Empty([]), max_batch_size=2)
    (sent,) = bench.send([(["one", "two", "three"],)])
    bench.run()
    assert type(sent.error) is BatcherError and "split gave no parts" in str(sent.error)


# --- signs of life ----------------------------------------------------------------------------------------------------


def test_the_worker_gives_signs_of_life_with_each_look_and_each_attempt() -> None:
    seen: list[int] = []

    def run(x: Any) -> Any:
        seen.append(bench.cells[ROW + board.BEATS])
        if len(x) > 1:
            raise ValueError("too many")
        return x

    bench = Bench(run)
    sent = bench.send_numbers(1, 2)
    bench.run()
    assert [b - a for a, b in zip(seen, seen[1:])] == [1, 1]
    assert bench.cells[ROW + board.BEATS] > seen[-1]
    assert all(request.done for request in sent)


# --- rows that the model names ----------------------------------------------------------------------------------------


class Joined(Batcher):
    """With its own idea of size, in order."""

    def batch(self, requests: list[tuple[Any, ...]]) -> tuple[Any, Any]:
        return np.concatenate([request[0] for request in requests]), [len(request[0]) for request in requests]

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        return np.split(batched_response, np.cumsum(context)[:-1])

    def size(self, request: tuple[Any, ...]) -> int:
        return len(request[0])


class Parity(MultiBatcher):
    """Even and odd requests in calls of their own, and so not in order."""

    def batch(self, requests: list[tuple[Any, ...]]) -> tuple[list[Any], Any]:
        order = sorted(range(len(requests)), key=lambda index: int(requests[index][0].flat[0]) % 2)
        split = sum(int(request[0].flat[0]) % 2 == 0 for request in requests)
        columns = [order[:split], order[split:]]
        batched = [np.concatenate([requests[i][0] for i in column]) for column in columns if column]
        return batched, [(column, [len(requests[i][0]) for i in column]) for column in columns if column]

    def unbatch(self, batched_response: list[Any], context: Any) -> list[Any]:
        found = {}
        for output, (column, lengths) in zip(batched_response, context):
            found |= dict(zip(column, np.split(output, np.cumsum(lengths)[:-1])))
        return [found[index] for index in range(len(found))]


BATCHERS = {
    "concat": ConcatBatcher(),
    "fixed sizes": ConcatBatcher(batch_sizes=[64]),
    "seq": SeqBatcher(0, mask=False, trim=1),
    "bucket": BucketSeqBatcher(0, [8], pad_to_bucket=True, trim=1),
    "own": Joined(),
    "multi": Parity(),
}


@pytest.mark.parametrize("with_results", [True, False])
@pytest.mark.parametrize("name", BATCHERS)
def test_only_the_requests_whose_rows_the_model_names_fail(name: str, with_results: bool) -> None:
    runs = []

    def run(x: Any) -> Any:
        runs.append(x.copy())
        bad = {int(row): ValueError(f"bad {x[row, 0]}") for row in np.flatnonzero(x[:, 0] % 5 == 0)}
        if bad:
            raise ItemErrors(bad, results=x * 2 if with_results else None)
        return x * 2

    bench = Bench(run, BATCHERS[name], max_batch_size=1000)
    first, requests = 1, []
    for rows in (2, 1, 3, 2, 1, 1):
        requests.append((np.arange(first, first + rows)[:, None] * np.ones((1, 1 if name == "own" else 3), np.int64),))
        first += rows
    if name == "multi":
        requests = [(np.array([[number]]),) for number in (1, 5, 10, 2, 20, 3)]
    sent = bench.send(requests)
    bench.run()
    failed = 0
    for (x,), request in zip(requests, sent):
        bad = x[x[:, 0] % 5 == 0, 0].tolist()
        if bad:
            error, failed = request.error, failed + 1
            assert type(error) is ValueError and str(error) == f"bad {bad[0]}"
            assert "raise ItemErrors" in str(error.__cause__)
        else:
            assert request.result.tolist() == (x * 2).tolist()
    assert failed >= 2 and bench.cells[ROW + board.FAILED] == failed
    assert bench.cells[ROW + board.REQUESTS] == len(sent)
    if name != "multi":
        assert len(runs) == (1 if with_results else 2)


def test_items_of_lists_are_named_by_their_place() -> None:
    def run(texts: list[str]) -> list[str]:
        bad = {index: LookupError(text) for index, text in enumerate(texts) if text.startswith("bad")}
        if bad:
            raise ItemErrors(bad, results=[None if index in bad else text.upper() for index, text in enumerate(texts)])
        return [text.upper() for text in texts]

    class Weighty(ListBatcher):
        def size(self, request: Any) -> int:
            return len(request[0])

    bench = Bench(run, Weighty(), max_batch_size=1000)
    sent = bench.send([(text,) for text in ("one", "bad two", "three", "bad four")])
    bench.run()
    assert [request.result for request in sent[::2]] == ["ONE", "THREE"]
    assert [request.error.args for request in sent[1::2]] == [("bad two",), ("bad four",)]


def test_a_model_that_names_one_row_at_a_time_is_run_once_more_for_each() -> None:
    runs: list[int] = []

    def run(x: Any) -> Any:
        runs.append(len(x))
        bad = np.flatnonzero(x[:, 0] < 0)
        if len(bad):
            raise ItemErrors({bad[0]: ValueError(int(x[bad[0], 0]))})
        return x * 2

    bench = Bench(run)
    sent = bench.send_numbers(1, -2, 3, -4, -5, 6)
    bench.run()
    assert runs == [6, 5, 4, 3]
    assert [request.error.args[0] for request in sent if request.error] == [-2, -4, -5]


def test_after_rows_were_named_the_others_may_still_fail_for_another_reason_and_be_divided() -> None:
    def run(x: Any) -> Any:
        bad = np.flatnonzero(x[:, 0] < 0)
        if len(bad):
            raise ItemErrors({int(row): ValueError(f"named {x[row, 0]}") for row in bad})
        if (x == 7).any():
            raise RuntimeError("seven")
        return x * 2

    bench = Bench(run)
    sent = bench.send_numbers(1, -2, 3, 7, 5, -6)
    bench.run()
    said = [None if request.error is None else str(request.error) for request in sent]
    assert said == [None, "named -2", None, "seven", None, "named -6"]


def test_without_isolation_results_are_given_and_without_results_nothing_is_run_again() -> None:
    for with_results in (True, False):
        runs: list[int] = []

        def run(x: Any, with_results: bool = with_results, runs: list[int] = runs) -> Any:
            runs.append(len(x))
            raise ItemErrors({1: ValueError("named")}, results=x * 2 if with_results else None)

        bench = Bench(run, isolate_errors=False)
        sent = bench.send_numbers(1, 2, 3)
        bench.run()
        assert runs == [3] and type(sent[1].error) is ValueError
        if with_results:
            assert results(sent[::2]) == [2, 6]
        else:
            assert all(type(request.error) is ItemErrors for request in sent[::2])
            assert "row 1: ValueError: named" in str(sent[0].error)


@pytest.mark.parametrize(
    ("errors", "said"), [({3: ValueError()}, "row 3 of a batch of 3"), ({0: "x"}, "exception"), ({}, "names no row")]
)
def test_rows_named_wrongly_are_an_error_of_the_model_for_all(errors: dict[int, Any], said: str) -> None:
    def run(x: Any) -> Any:
        raise ItemErrors(errors)

    bench = Bench(run)
    sent = bench.send_numbers(1, 2, 3)
    bench.run()
    for request in sent:
        assert type(request.error) is BatcherError and said in str(request.error) and "Model." in str(request.error)


def test_results_of_the_wrong_length_are_an_error_for_all() -> None:
    def run(x: Any) -> Any:
        raise ItemErrors({0: ValueError()}, results=x[1:])

    bench = Bench(run)
    sent = bench.send_numbers(1, 2, 3)
    bench.run()
    assert all(type(request.error) is BatcherError for request in sent)


def test_a_named_part_fails_its_whole_request_and_nobody_else() -> None:
    def run(x: Any) -> Any:
        bad = np.flatnonzero(x[:, 0] == 9)
        if len(bad):
            raise ItemErrors({int(bad[0]): ValueError("nine")})
        return x * 2

    bench = Bench(run, max_batch_size=4)
    long, *others = bench.send([(np.arange(10)[:, None],), (np.array([[20]]),), (np.array([[21]]),)])
    bench.run()
    assert str(long.error) == "nine" and results(others) == [40, 42]


# --- memory that does not suffice -------------------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """As torch's, which is not imported here."""


OutOfMemoryError.__module__ = "torch.cuda"


class Holds:
    """Runs batches of so many rows at most, and none with a negative number."""

    def __init__(self, most: int, error: type[Exception] = MemoryError) -> None:
        self.most, self.error = most, error
        self.sizes: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.sizes.append(len(x))
        if len(x) > self.most or (x < 0).any():
            raise self.error("no room")
        return x * 2


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
def test_a_batch_for_which_memory_does_not_suffice_is_halved_and_later_ones_are_smaller(error: Any) -> None:
    model = Holds(5, error)
    bench = Bench(model)
    sent = bench.send_numbers(*range(16)) + bench.send_numbers(*range(16, 24))
    bench.run()
    assert results(sent) == [2 * n for n in range(24)]
    assert model.sizes == [16, 8, 4, 4, 4, 4, 4, 4]
    assert bench.cells[ROW + board.SIZE_LIMIT] == 4 and bench.cells[ROW + board.FAILED] == 0


def test_a_request_that_is_too_large_by_itself_gets_the_error_and_says_nothing_about_others() -> None:
    model = Holds(100, OutOfMemoryError)
    bench = Bench(model)
    sent = bench.send_numbers(*range(8), -8, *range(9, 16))
    bench.run()
    error = sent.pop(8).error
    assert isinstance(error, RuntimeError) and str(error).startswith("no room")
    assert results(sent) == [2 * n for n in range(16) if n != 8]
    assert model.sizes == [16, 8, 8, 4, 2, 1, 1, 2, 4]
    assert bench.cells[ROW + board.SIZE_LIMIT] == 0


def test_a_request_larger_than_what_memory_holds_is_split_once_that_is_known() -> None:
    model = Holds(4)
    bench = Bench(model)
    small = bench.send_numbers(*range(8))
    large = bench.send([(np.arange(9)[:, None],)])[0]
    bench.run()
    assert results(small) == [2 * n for n in range(8)] and large.result.ravel().tolist() == [2 * n for n in range(9)]
    assert model.sizes == [8, 4, 4, 4, 4, 1]


def test_a_request_that_cannot_be_split_is_tried_whole() -> None:
    class Whole(Joined):
        pass

    bench = Bench(Holds(4), Whole(), max_batch_size=8)
    small = bench.send_numbers(*range(8))
    fits, not_even = bench.send([(np.arange(6)[:, None],), (np.arange(9)[:, None],)])
    bench.run()
    assert results(small) == [2 * n for n in range(8)]
    assert type(fits.error) is MemoryError and type(not_even.error) is RequestTooLargeError


def test_the_learned_limit_is_forgotten_when_a_smaller_one_is_configured() -> None:
    model = Holds(8)
    bench = Bench(model)
    bench.send_numbers(*range(16))
    bench.then(lambda: board.write_limits(bench.cells, {"max_batch_size": 4}))
    bench.send_numbers(*range(4))
    bench.then(lambda: board.write_limits(bench.cells, {"max_batch_size": 32}))
    bench.then(lambda: setattr(model, "most", 32))
    sent = bench.send_numbers(*range(16))
    bench.run()
    assert model.sizes == [16, 8, 8, 4, 16]
    assert results(sent) == [2 * n for n in range(16)]


def test_without_isolation_a_batch_too_large_fails_as_one_and_is_not_run_again() -> None:
    model = Holds(2)
    bench = Bench(model, isolate_errors=False)
    sent = bench.send_numbers(1, 2, 3)
    bench.run()
    assert model.sizes == [3] and all(type(request.error) is MemoryError for request in sent)


def test_a_failed_run_leaves_nothing_in_memory_for_the_next() -> None:
    import weakref

    class Activation:
        pass

    alive: list[weakref.ref[Activation]] = []

    def run(x: Any) -> Any:
        assert not any(ref() for ref in alive), "the last run's variables are still held"
        activation = Activation()
        alive.append(weakref.ref(activation))
        if len(x) > 1:
            try:
                raise KeyError("inner")
            except KeyError as inner:
                raise MemoryError("no room") from inner
        return x * 2

    bench = Bench(run)
    sent = bench.send_numbers(1, 2, 3, 4)
    bench.run()
    assert results(sent) == [2, 4, 6, 8]


# --- whatever is raised -----------------------------------------------------------------------------------------------


class Odd(BaseException):
    pass


@pytest.mark.parametrize("raised", [GeneratorExit("gone"), Odd("odd")])
def test_what_is_raised_and_is_no_exception_arrives_by_name_and_the_worker_goes_on(raised: BaseException) -> None:
    def run(x: Any) -> Any:
        if (x < 0).any():
            raise raised
        return x * 2

    bench = Bench(run)
    sent = bench.send_numbers(1, -2, 3)
    bench.run()
    assert results(sent[::2]) == [2, 6]
    assert type(sent[1].error) is ModelError and type(raised).__name__ in str(sent[1].error)


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()])
def test_what_is_meant_to_end_the_process_ends_the_worker(raised: BaseException) -> None:
    def run(x: Any) -> Any:
        raise raised

    bench = Bench(run)
    sent = bench.send_numbers(1, 2)
    with pytest.raises(type(raised)):
        bench.run()
    assert not any(request.done for request in sent)


def test_requests_whose_callers_are_gone_are_not_run_again() -> None:
    sizes: list[int] = []

    def run(x: Any) -> Any:
        sizes.append(len(x))
        for request in sent[1:]:
            request.give_up()
        if len(x) > 1:
            raise ValueError("not together")
        return x * 2

    bench = Bench(run)
    sent = bench.send_numbers(1, 2, 3, 4)
    bench.run()
    assert sizes == [4, 1] and results(sent[:1]) == [2]

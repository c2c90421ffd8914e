"""Runs batches to their end, in the worker: after `Runner.run` each request of a batch has its reply.

    collate   merges the requests: rows are copied into a batch buffer here
    run       calls the model's predict_batch
    scatter   splits the outputs and writes each reply into its caller's own slot

An *attempt* is all three for some requests. When it fails, nobody of those whom it failed for has been answered, and
they are attempted again in parts: in halves when the memory did not suffice, without those whom the model named
(ItemErrors), or divided until the culprits are known.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batch_inference import board, tensors
from batch_inference.ahead import Ahead
from batch_inference.batcher.batcher import Batcher, model_arguments
from batch_inference.batcher.multi_batcher import MultiBatcher
from batch_inference.counting import add, bucket
from batch_inference.errors import BatcherError, ItemErrors
from batch_inference.isolation import Failure, Hope, blame, culprits
from batch_inference.speedups import in_c
from batch_inference.transport import codec
from batch_inference.transport.wire import ERROR
from batch_inference.waiting import Request, args_of

ENDS = (SystemExit, KeyboardInterrupt)
"""What ends the worker, wherever a model or a batcher raises it."""


class WrongOutputError(Exception):
    """The model returned something that cannot be divided among the requests: no single request is to blame."""

    def __init__(self, error: BatcherError) -> None:
        super().__init__(error)
        self.error = error  # what callers get


@dataclass
class Named:
    """The requests of which the model said that they failed."""

    errors: dict[int, Exception]  # by the index of the request
    raised: ItemErrors


class Runner:
    """Runs a model over batches, answers their requests, and counts in the cells from `row` on."""

    def __init__(
        self,
        model: Any,
        batcher: Batcher,
        isolates: bool,
        cells: memoryview[int],
        row: int,
        flush: Callable[[], None],
    ) -> None:
        self.ahead = Ahead(batcher)
        self._model = model
        self._batcher = batcher
        self._isolates = isolates
        self._cells = cells
        self._row = row
        self._flush = flush  # sends the wake-ups of the replies that were written
        self._hope = Hope()
        self._pads = type(batcher).padding is not Batcher.padding
        self._answered = 0  # requests of the present batch that got results
        cells[row + board.SIZE_LIMIT] = 0

    def run(self, batch: list[Request]) -> None:
        """Runs a batch until each of its requests has been answered."""
        self._answered = 0
        failure = self._attempt(batch)
        if failure is not None:
            self._settle(failure, len(batch))
        self._hope.saw(self._answered)

    # --- what becomes of those for whom an attempt failed ---------------------------------------------------------

    def _settle(self, failure: Failure[Request], attempted: int) -> bool:
        """Answers those whom an attempt has left; False if the memory did not suffice for one of them alone."""
        left = self._without_named(failure, attempted)
        if left is None:
            return True
        batch, error = left.items, left.error
        if not self._isolates or isinstance(error, WrongOutputError):
            self._fail(batch, error)
        elif tensors.out_of_memory(error) and len(batch) > 1:
            tensors.release_unused()
            return self._settle_halves(batch)
        elif not self._hope:
            self._fail(batch, error)
        else:
            for request, its_error in culprits(left, self._attempt_again):
                self._fail([request], its_error)
        return not tensors.out_of_memory(error)

    def _settle_halves(self, batch: Sequence[Request]) -> bool:
        """Of a batch for which the memory did not suffice. If it suffices for both, no later batch shall be larger than
        the larger of them; if not, the request that is too large by itself says nothing about others."""
        cells, cell = self._cells, self._row + board.SIZE_LIMIT
        middle = len(batch) // 2
        suffices, fits = True, 1
        for half in (batch[:middle], batch[middle:]):
            size = size_of(half)
            fits = max(fits, size)
            if len(half) > 1 and 0 < cells[cell] < size:  # known from the other half
                suffices &= self._settle_halves(half)
            elif (failure := self._attempt(half, again=True)) is not None:
                suffices &= self._settle(failure, len(half))
        if suffices:
            cells[cell] = min(cells[cell] or fits, fits)
        return suffices

    def _without_named(self, failure: Failure[Request], attempted: int) -> Failure[Request] | None:
        """Runs the others again when the model has named some that failed, and so on; returns those who are left."""
        left: Failure[Request] | None = failure
        while left is not None and isinstance(left.error, ItemErrors) and self._isolates:
            if len(left.items) == attempted:
                break  # none was named
            attempted = len(left.items)
            left = self._attempt(left.items, again=True)
        return left

    def _attempt_again(self, batch: Sequence[Request]) -> Failure[Request] | None:
        failure = self._attempt(batch, again=True)
        return None if failure is None else self._without_named(failure, len(batch))

    def _fail(self, batch: Sequence[Request], error: BaseException) -> None:
        encoded = codec.encode_error(error.error if isinstance(error, WrongOutputError) else error)
        answered = sum([request.answers for request in batch])
        self.count_failed(answered, answered)
        for request in batch:
            request.reply(encoded, ERROR)

    # --- an attempt -----------------------------------------------------------------------------------------------

    def _attempt(self, batch: Sequence[Request], again: bool = False) -> Failure[Request] | None:
        """One run. Answers the requests for which it ends well or whom the model names; returns the others."""
        if again:
            self._flush()  # what was answered so far
            batch = still_wanted(batch)
            if not batch:
                return None
            if len(batch) == 1:
                batch[0].runs(alone=True)
            add(self._cells, self._row + board.BEATS, 1)
        started = time.monotonic_ns()
        failure: Failure[Request] | None = None
        try:
            if again and not self._batcher.borrows:  # the model may have changed what it was given the last time
                for request in batch:
                    request.args = request.fresh_args(self._batcher.borrows)
            responses, context, named = self._call(batch)
            padding = self._batcher.padding(context) if self._pads else (0, 0)
        except ENDS:
            raise
        except BaseException as error:
            forget_locals(error)
            failure = Failure(batch, error)
            if len(batch) == 1:
                batch[0].runs(alone=False)
        else:
            if named is not None:
                forget_locals(named.raised)
                batch, responses, failure = self._fail_named(batch, responses, named)
            if responses is not None:
                self._count_batch(batch, time.monotonic_ns() - started, padding)
                self._answered += len(batch)
                reply_all(batch, responses, self._cells, self._row)
        return failure

    def _call(self, batch: Sequence[Request]) -> tuple[list[Any] | None, Any, Named | None]:
        """Collates, runs and splits: the responses, if there are any; the context; those whom the model named."""
        requests = args_of(batch)
        batched, context = self.ahead.finish(requests) or collate(self._batcher, requests)
        named = None
        try:
            outputs = call_model(self._model, self._batcher, batched)
            del batched
        except ItemErrors as raised:
            named = self._find_named(raised, requests, context)
            if raised.results is None:
                return None, context, named
            outputs = raised.results
        return self._unbatch(outputs, context, len(batch)), context, named

    def _find_named(self, raised: ItemErrors, requests: list[tuple[Any, ...]], context: Any) -> Named:
        """The requests that the rows which the model named belong to."""
        owners = self._batcher.owners(requests, context)
        if owners is None and len(requests) > 1:
            raise raised  # as an error of the batch
        try:
            errors = blame(raised, owners, len(requests))
        except BatcherError as error:
            raise self._wrong_output(error) from raised
        for failed in errors.values():
            if failed.__traceback__ is None:  # it was not raised itself
                failed.with_traceback(raised.__traceback__)
        return Named(errors, raised)

    def _unbatch(self, outputs: Any, context: Any, requests: int) -> list[Any]:
        try:
            responses = self._batcher.unbatch(outputs, context)
            if type(responses) is not list and not hasattr(responses, "__len__"):
                raise BatcherError(
                    f"{type(self._batcher).__name__}.unbatch must return a list with one response per request, got "
                    f"{type(responses).__name__}"
                )
            if len(responses) != requests:
                raise BatcherError(
                    f"{type(self._batcher).__name__}.unbatch gave {len(responses)} responses for {requests} requests: "
                    "it must give one per request, in their order"
                )
        except BatcherError as error:
            raise self._wrong_output(error) from error
        return responses

    def _wrong_output(self, error: BatcherError) -> WrongOutputError:
        return WrongOutputError(BatcherError(f"{type(self._model).__name__}.predict_batch: {error}"))

    def _fail_named(
        self, batch: Sequence[Request], responses: list[Any] | None, named: Named
    ) -> tuple[Sequence[Request], list[Any] | None, Failure[Request] | None]:
        """Answers those whom the model named. The others, with their responses or, if there are none, as a failure."""
        for index, error in named.errors.items():
            self._fail([batch[index]], error)
        others = [index for index in range(len(batch)) if index not in named.errors]
        batch = [batch[index] for index in others]
        if responses is None:
            return batch, None, Failure(batch, named.raised) if batch else None
        return batch, [responses[index] for index in others], None

    # --- counting: before the reply, so that its caller finds it counted ------------------------------------------

    def _count_batch(self, batch: Sequence[Request], nanoseconds: int, padding: tuple[int, int]) -> None:
        count_batch(self._cells, self._row, batch, nanoseconds)
        own, padded = padding
        if padded:
            add(self._cells, self._row + board.OWN, own, self._row + board.PADDED, padded)

    def count_failed(self, requests: int, answered: int = 0) -> None:
        add(self._cells, self._row + board.FAILED, requests, self._row + board.REQUESTS, answered)


@in_c
def reply_all(batch: Sequence[Request], responses: Sequence[Any], cells: Any, row: int) -> None:
    """Answers each request with its response, or with the error of encoding it, which is counted in a worker's row."""
    for request, response in zip(batch, responses):
        try:
            request.reply(codec.encode(response))
        except ENDS:
            raise
        except BaseException as error:
            add(cells, row + board.FAILED, 1)
            request.reply(codec.encode_error(error), ERROR)


@in_c
def count_batch(cells: Any, row: int, batch: Sequence[Request], nanoseconds: int) -> None:
    """Counts a batch that ran for so long, and its requests, in the row of a worker."""
    add(cells, row + board.BATCHES, 1, row + board.REQUESTS, sum([request.answers for request in batch]))
    add(cells, row + board.SIZE, size_of(batch), row + board.RUNNING + bucket(nanoseconds), len(batch))


def size_of(batch: Sequence[Request]) -> int:
    return sum([request.size for request in batch])


def still_wanted(batch: Sequence[Request]) -> Sequence[Request]:
    """Those for whose answer somebody waits, and whose slots are not their callers' again; drops the others."""
    now = time.monotonic_ns()
    wanted = []
    for request in batch:
        if request.unwanted(now):
            request.drop()
        else:
            wanted.append(request)
    return wanted


def forget_locals(error: BaseException) -> None:
    """Lets go of what the functions that failed had in their variables: the next run needs the memory."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        if (error_ := todo.pop()) is not None and id(error_) not in seen:
            seen.add(id(error_))
            traceback.clear_frames(error_.__traceback__)
            todo += [error_.__cause__, error_.__context__]


def collate(batcher: Batcher, requests: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    """What `batcher.batch` makes of the requests."""
    made = batcher.batch(requests)
    if type(made) is tuple and len(made) == 2:
        return made
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise BatcherError(
            f"{type(batcher).__name__}.batch must return a pair (batched_request, context), got {type(made).__name__}"
        )
    return made[0], made[1]


def call_model(model: Any, batcher: Batcher, batched: Any) -> Any:
    """What the model returns for what `batcher.batch` made: one call, or one for each of a MultiBatcher's batches."""
    if isinstance(batcher, MultiBatcher):
        return [model.predict_batch(*model_arguments(part)) for part in batched]
    return model.predict_batch(*batched) if type(batched) is tuple else model.predict_batch(*model_arguments(batched))

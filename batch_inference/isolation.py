"""Who is to blame when a batch fails: it is divided and run again until the culprits are known.

For k culprits among n requests this takes at most 2 k ceil(log2 n) + 1 further runs. A model that names the culprits
itself spares them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from batch_inference.errors import BatcherError, ItemErrors

Item = TypeVar("Item")

HOPELESS = 3
"""Batches in a row that fail for every member, after which dividing them pauses until one succeeds."""


@dataclass(frozen=True)
class Failure(Generic[Item]):
    """The items that an attempt has not settled, and why."""

    items: Sequence[Item]
    error: BaseException


Attempt = Callable[[Sequence[Item]], "Failure[Item] | None"]
"""Runs some items, which settles them, or all but those that it returns."""


def culprits(failure: Failure[Item], attempt: Attempt[Item], tried: bool = True) -> list[tuple[Item, BaseException]]:
    """The items of a failed batch that fail by themselves, each with its error; the others have been settled.

    A half that was not tried yet, but whose sibling was cleared, is known to hold a culprit: it is divided at once
    (`tried=False`), and run only when it is one item, since what failed may have been the batch, not a member of it.
    """
    items = failure.items
    if len(items) == 1:
        alone = failure if tried else attempt(items)
        return [] if alone is None else [(items[0], alone.error)]
    middle = len(items) // 2
    left, right = items[:middle], items[middle:]
    left_failure = attempt(left)
    if left_failure is None:
        return culprits(Failure(right, failure.error), attempt, tried=False)
    found = culprits(left_failure, attempt)
    right_failure = attempt(right)
    return found if right_failure is None else found + culprits(right_failure, attempt)


def blame(raised: ItemErrors, owners: Sequence[int] | None, items: int) -> dict[int, Exception]:
    """For each of so many items that owns a row which failed, the error of the first such row.

    `owners` has the index of an item for each row; None: all rows are those of the only item. BatcherError for what
    names no rows, rows that do not exist, or something else than exceptions.
    """
    by_row: dict[int, Exception] = {}
    for key, error in raised.errors.items():
        row = operator.index(key) if hasattr(key, "__index__") else -1
        if row < 0 or (owners is not None and row >= len(owners)):
            rows = "" if owners is None else f" of {len(owners)} rows"
            raise BatcherError(
                f"ItemErrors names row {key!r} of a batch{rows}: name rows by their index in what predict_batch got, "
                "counted from 0"
            )
        if not isinstance(error, Exception):
            raise BatcherError(f"ItemErrors must have an exception for each row, got {error!r} for row {row}")
        by_row[row] = error
    if not by_row:
        raise BatcherError("ItemErrors names no row: predict_batch must return its results when none failed")
    found: dict[int, Exception] = {}
    for row in sorted(by_row):
        owner = 0 if owners is None else owners[row]
        if not 0 <= owner < items:
            raise BatcherError(f"owners() of the batcher says that row {row} belongs to request {owner} of {items}")
        found.setdefault(owner, by_row[row])
    return found


class Hope:
    """Whether dividing failed batches is worth its runs: not while everything fails."""

    def __init__(self) -> None:
        self._hopeless = 0

    def __bool__(self) -> bool:
        return self._hopeless < HOPELESS

    def saw(self, answered: int) -> None:
        """A batch has ended, with results for so many of its requests."""
        self._hopeless = 0 if answered else self._hopeless + 1

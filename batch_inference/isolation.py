"""Who is to blame when a batch fails: it is divided and run again until the culprits are known.

For k culprits among n requests this takes at most 2 k ceil(log2 n) + 1 further runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

HOPELESS = 3
"""Batches in a row that fail for every member, after which dividing them pauses until one succeeds."""


def culprits(
    batch: Sequence[Item],
    error: Exception,
    attempt: Callable[[Sequence[Item]], Exception | None],
    tried: bool = True,
) -> list[tuple[Item, Exception]]:
    """The items of a failed batch that fail by themselves, each with its error; the others have succeeded.

    `attempt` runs some of the items, which settles them, or returns the error. A half that was not tried yet, but whose
    sibling was cleared, is known to hold a culprit: it is divided at once (`tried=False`), and run only when it is one
    item, since what failed may have been the batch, not a member of it.
    """
    if len(batch) == 1:
        alone = error if tried else attempt(batch)
        return [] if alone is None else [(batch[0], alone)]
    middle = len(batch) // 2
    left, right = batch[:middle], batch[middle:]
    left_error = attempt(left)
    if left_error is None:
        return culprits(right, error, attempt, tried=False)
    found = culprits(left, left_error, attempt)
    right_error = attempt(right)
    return found if right_error is None else found + culprits(right, right_error, attempt)


class Hope:
    """Whether dividing failed batches is worth its runs: not while everything fails."""

    def __init__(self) -> None:
        self._hopeless = 0

    def __bool__(self) -> bool:
        return self._hopeless < HOPELESS

    def saw(self, requests: int, failed: int) -> None:
        """A batch of so many requests has ended with so many failures."""
        self._hopeless = self._hopeless + 1 if failed == requests else 0

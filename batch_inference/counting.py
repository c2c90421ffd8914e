"""How a client and a worker count on their rows of the board."""

from __future__ import annotations

from typing import Any

from batch_inference.board import BUCKETS
from batch_inference.speedups import in_c


@in_c
def bucket(nanoseconds: int) -> int:
    """The histogram bucket of a duration: four per power of two, from 1 us to about an hour."""
    units = nanoseconds >> 10
    if units < 4:
        return units if units > 0 else 0
    exponent = units.bit_length() - 3
    return min(BUCKETS - 1, 4 * exponent + 4 + (units >> exponent & 3))


@in_c
def add(cells: Any, *pairs: int) -> None:
    """Adds to cells: `pairs` are the index of a cell, what to add to it, and so on."""
    for at in range(0, len(pairs), 2):
        cells[pairs[at]] += pairs[at + 1]

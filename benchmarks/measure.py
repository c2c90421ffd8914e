"""What a measurement is and how it is judged. Pure values: no clock, no I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

NOISY = 0.25
"""Cores kept busy by anyone else above which a round counts as disturbed."""


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of unsorted `values`; `share` in [0, 1]."""
    if not values:
        raise ValueError("no values")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be in [0, 1], got {share}")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Sample:
    """One round of one cell with the floor of the same round beside it."""

    value: float
    floor: float | None = None
    foreign: float = 0.0
    """Cores that processes other than the benchmark's kept busy meanwhile (the worse of value and floor)."""

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None


class Disturbed(Protocol):
    @property
    def foreign(self) -> float: ...


Measured = TypeVar("Measured", bound=Disturbed)


def quiet(samples: Sequence[Measured], at_least: int = 3) -> list[Measured]:
    """The samples of undisturbed rounds; where these are too few, the `at_least` least disturbed ones."""
    ordered = sorted(samples, key=lambda sample: sample.foreign)
    calm = sum(sample.foreign < NOISY for sample in ordered)
    return ordered[: max(calm, at_least)]


@dataclass(frozen=True)
class Goal:
    """A bound on the value, on its ratio to the floor, or on either: meeting one of them is enough."""

    limit: float | None = None
    times: float | None = None
    at_most: bool = False

    def met(self, value: float, ratio: float | None) -> bool:
        pairs = ((value, self.limit), (ratio, self.times))
        return any(
            (got <= bound if self.at_most else got >= bound)
            for got, bound in pairs
            if got is not None and bound is not None
        )

    def __str__(self) -> str:
        bounds = []
        if self.limit is not None:
            bounds.append(f"{self.limit:,.10g}")
        if self.times is not None:
            bounds.append(f"{self.times:g}x")
        return ("<= " if self.at_most else ">= ") + " or ".join(bounds)


@dataclass(frozen=True)
class Row:
    """One line of the final table."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    """None where there is nothing to meet."""
    rounds: int = 1
    foreign: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Round:
    """One contender in one cell, once."""

    number: int
    rate: float
    """Requests answered per second."""
    p50: float
    p99: float
    """Seconds."""
    cpu: float = 0.0
    """CPU seconds a request, over all processes."""
    batch: float = 0.0
    """Mean rows of a batch; 0 if unknown."""
    memory: float = 0.0
    """MiB of all processes together."""
    foreign: float = 0.0
    faults: int = 0
    error: str = ""


@dataclass(frozen=True)
class Cell:
    """Medians of the quiet rounds of one contender in one cell."""

    workload: str
    callers: int
    who: str
    rate: float
    p50: float
    p99: float
    cpu: float
    batch: float
    memory: float
    foreign: float
    rounds: int
    faults: int
    error: str = ""


def summary(workload: str, callers: int, who: str, rounds: Sequence[Round]) -> Cell:
    kept = quiet([got for got in rounds if got.rate] or rounds)

    def median(name: str) -> float:
        return statistics.median(getattr(got, name) for got in kept)

    values = {name: median(name) for name in ("rate", "p50", "p99", "cpu", "batch", "memory")}
    faults, error = sum(got.faults for got in rounds), next((got.error for got in rounds if got.error), "")
    return Cell(
        workload,
        callers,
        who,
        **values,
        foreign=max(got.foreign for got in kept),
        rounds=len(kept),
        faults=faults,
        error=error,
    )


Found = Row | Cell
"""What a benchmark gives back."""


def judge(
    name: str, unit: str, samples: Sequence[Sample], goal: Goal | None = None, note: str = "", faults: int = 0
) -> Row:
    """Medians over the quiet rounds; the ratio is taken round by round. Any wrong or missing answer fails the row."""
    kept = quiet(samples)
    value = statistics.median(sample.value for sample in kept)
    floors = [sample.floor for sample in kept if sample.floor is not None]
    ratios = [sample.ratio for sample in kept if sample.ratio is not None]
    ratio = statistics.median(ratios) if ratios else None
    met = None if goal is None else goal.met(value, ratio)
    if faults:
        met, note = False, f"{faults} wrong or missing answers; {note}".rstrip("; ")
    return Row(
        name=name,
        value=value,
        unit=unit,
        floor=statistics.median(floors) if floors else None,
        ratio=ratio,
        goal="" if goal is None else str(goal),
        met=met,
        rounds=len(kept),
        foreign=max(sample.foreign for sample in kept),
        note=note,
    )

"""Callers in a closed loop, as threads or as asyncio tasks.

Each caller sends values of its own, a new one with every request, and looks at the first and last element of
every answer: an answer that belongs to another caller, or to an earlier request, counts as wrong.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.machine import Meter

DRAIN = 5.0
"""Seconds a request may still take after the window before it counts as missing."""

Array = npt.NDArray[np.float32]


class Target(Protocol):
    """What the callers talk to: a host, or a stand-in with its two methods."""

    def predict(self, x: Any) -> Any: ...

    async def apredict(self, x: Any) -> Any: ...


@dataclass
class Load:
    """What came of one window."""

    requests: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    """CPU seconds of all processes concerned, the callers' own loop included."""
    foreign: float = 0.0
    wrong: int = 0
    missing: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def faults(self) -> int:
        return self.wrong + self.missing + len(self.errors)


class _Shared:
    """Between the callers and the one that ends the window. Counts are per caller: no lock, no lost increments."""

    def __init__(self, callers: int) -> None:
        self.stop = False
        self.counts = [0] * callers
        self.wrong = [0] * callers
        self.errors: list[str] = []

    def finish(self, load: Load, missing: int) -> Load:
        load.wrong, load.missing, load.errors = sum(self.wrong), missing, self.errors
        return load


class _Window:
    def __init__(self, shared: _Shared, pids: Iterable[int]) -> None:
        self._shared, self._meter, self._before = shared, Meter(pids), sum(shared.counts)

    def close(self) -> Load:
        meter = self._meter.stop()
        done = sum(self._shared.counts) - self._before
        self._shared.stop = True
        return Load(requests=done, seconds=meter.seconds, cpu=meter.own, foreign=meter.foreign)


def request(caller: int, shape: tuple[int, ...]) -> Array:
    return np.full(shape, caller, np.float32)


def _right(answer: Any, shape: tuple[int, ...], value: float) -> bool:
    """Two elements only: the check is inside the loop that is measured."""
    return bool(answer.shape == shape and answer.item(0) == value and answer.item(-1) == value)


def _thread(shared: _Shared, caller: int, predict: Callable[[Array], Any], shape: tuple[int, ...]) -> None:
    x, counts, value = request(caller, shape), shared.counts, caller
    try:
        while not shared.stop:
            value = value + 64 if value < 8_000_000 else caller  # float32 counts exactly up to 16.7 million
            x[0, 0] = x[0, -1] = value
            if not _right(predict(x), shape, value):
                shared.wrong[caller] += 1
            counts[caller] += 1
    except Exception as error:
        shared.errors.append(repr(error)[:300])


async def _task(shared: _Shared, caller: int, apredict: Callable[[Array], Any], shape: tuple[int, ...]) -> None:
    x, counts, value = request(caller, shape), shared.counts, caller
    try:
        while not shared.stop:
            value = value + 64 if value < 8_000_000 else caller
            x[0, 0] = x[0, -1] = value
            if not _right(await apredict(x), shape, value):
                shared.wrong[caller] += 1
            counts[caller] += 1
    except Exception as error:
        shared.errors.append(repr(error)[:300])


def threads(
    target: Target, callers: int, shape: tuple[int, ...], window: float, warm: float, pids: Iterable[int]
) -> Load:
    """`callers` threads, counted for `window` seconds after `warm` seconds."""
    shared = _Shared(callers)
    running = [
        threading.Thread(target=_thread, args=(shared, caller, target.predict, shape), daemon=True)
        for caller in range(callers)
    ]
    for thread in running:
        thread.start()
    time.sleep(warm)
    opened = _Window(shared, pids)
    time.sleep(window)
    load = opened.close()
    deadline = time.monotonic() + DRAIN
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    return shared.finish(load, sum(thread.is_alive() for thread in running))


def tasks(
    target: Target, callers: int, shape: tuple[int, ...], window: float, warm: float, pids: Iterable[int]
) -> Load:
    """The same as tasks of one event loop, which runs in this thread."""

    async def run() -> Load:
        shared = _Shared(callers)
        running = [asyncio.ensure_future(_task(shared, caller, target.apredict, shape)) for caller in range(callers)]
        await asyncio.sleep(warm)
        opened = _Window(shared, pids)
        await asyncio.sleep(window)
        load = opened.close()
        _, pending = await asyncio.wait(running, timeout=DRAIN)
        for task in pending:
            task.cancel()
        return shared.finish(load, len(pending))

    return asyncio.run(run())


def round_trips(target: Target, shape: tuple[int, ...], window: float, warm: float) -> tuple[list[float], int]:
    """Seconds of each request of one caller, and how many answers were wrong."""
    x, value, wrong = request(0, shape), 0, 0
    times: list[float] = []
    predict, clock = target.predict, time.perf_counter
    begin = clock() + warm
    end = begin + window
    while (before := clock()) < end:
        answer = predict(x)
        after = clock()
        wrong += not _right(answer, shape, value)
        if before >= begin:
            times.append(after - before)
        value = (value + 1) % 8_000_000
        x[0, 0] = x[0, -1] = value
    return times, wrong

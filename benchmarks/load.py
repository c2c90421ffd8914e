"""Callers in a closed loop, as threads or as asyncio tasks.

Each caller sends values of its own, a new one with every request, and looks at the first and last element of
every answer: an answer that belongs to another caller, or to an earlier request, counts as wrong.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.machine import Meter
from benchmarks.workloads import Work, burn, right

DRAIN = 10.0
"""Seconds a request may still take after the window before it counts as missing."""


class Target(Protocol):
    """What the callers talk to: a host, or a stand-in with its two methods."""

    def predict(self, x: Any) -> Any: ...

    async def apredict(self, x: Any) -> Any: ...


@dataclass(frozen=True)
class Plan:
    """One window: what how many callers send, for how long."""

    callers: int
    work: Work
    window: float
    warm: float
    """Seconds before the window opens."""
    pids: tuple[int, ...] = ()
    """Processes whose CPU time counts."""
    burn: int = 0
    """Iterations of pure Python before each request."""
    first: int = 0
    """Number of the first caller, for callers that are spread over processes."""
    counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Batches and rows of the model so far."""


@dataclass
class Load:
    """What came of one window."""

    seconds: float = 0.0
    cpu: float = 0.0
    """CPU seconds of all processes concerned, the callers' own loop included."""
    foreign: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds, of the requests answered in the window."""
    batches: int = 0
    rows: int = 0
    wrong: int = 0
    missing: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.latencies)

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def faults(self) -> int:
        return self.wrong + self.missing + len(self.errors)


class _Shared:
    """Between the callers and the one that ends the window. Lists are per caller: no lock, nothing lost."""

    def __init__(self, callers: int) -> None:
        self.stop = False
        self.latencies: list[list[float]] = [[] for _ in range(callers)]
        self.wrong = [0] * callers
        self.errors: list[str] = []

    def finish(self, load: Load, missing: int) -> Load:
        load.wrong, load.missing, load.errors = sum(self.wrong), missing, self.errors
        return load


class _Window:
    def __init__(self, shared: _Shared, plan: Plan) -> None:
        self._shared, self._counts = shared, plan.counts
        self._done = list(map(len, shared.latencies))
        self._before, self._meter = plan.counts(), Meter(plan.pids)

    def close(self) -> Load:
        meter = self._meter.stop()
        latencies = [
            latency for done, mine in zip(self._done, self._shared.latencies, strict=True) for latency in mine[done:]
        ]
        batches, rows = (after - before for after, before in zip(self._counts(), self._before, strict=True))
        self._shared.stop = True
        return Load(meter.seconds, meter.own, meter.foreign, latencies, batches, rows)


def _thread(shared: _Shared, index: int, predict: Callable[[Any], Any], plan: Plan) -> None:
    mine, clock, shape, iterations = shared.latencies[index], time.perf_counter, plan.work.answer, plan.burn
    try:
        for x, value in plan.work.stream(plan.first + index):
            if shared.stop:
                break
            if iterations:
                burn(iterations)
            before = clock()
            answer = predict(x)
            mine.append(clock() - before)
            if not right(answer, shape, value):
                shared.wrong[index] += 1
    except Exception as error:
        shared.errors.append(repr(error)[:300])


async def _task(shared: _Shared, index: int, apredict: Callable[[Any], Any], plan: Plan) -> None:
    mine, clock, shape, iterations = shared.latencies[index], time.perf_counter, plan.work.answer, plan.burn
    try:
        for x, value in plan.work.stream(plan.first + index):
            if shared.stop:
                break
            if iterations:
                burn(iterations)
            before = clock()
            answer = await apredict(x)
            mine.append(clock() - before)
            if not right(answer, shape, value):
                shared.wrong[index] += 1
    except Exception as error:
        shared.errors.append(repr(error)[:300])


def threads(target: Target, plan: Plan) -> Load:
    """Callers that are threads."""
    shared = _Shared(plan.callers)
    running = [
        threading.Thread(target=_thread, args=(shared, index, target.predict, plan), daemon=True)
        for index in range(plan.callers)
    ]
    for thread in running:
        thread.start()
    time.sleep(plan.warm)
    opened = _Window(shared, plan)
    time.sleep(plan.window)
    load = opened.close()
    deadline = time.monotonic() + DRAIN
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    return shared.finish(load, sum(thread.is_alive() for thread in running))


async def tasks_here(target: Target, plan: Plan) -> Load:
    """Callers that are tasks of the running event loop."""
    shared = _Shared(plan.callers)
    running = [asyncio.ensure_future(_task(shared, index, target.apredict, plan)) for index in range(plan.callers)]
    await asyncio.sleep(plan.warm)
    opened = _Window(shared, plan)
    await asyncio.sleep(plan.window)
    load = opened.close()
    _, pending = await asyncio.wait(running, timeout=DRAIN)
    for task in pending:
        task.cancel()
    return shared.finish(load, len(pending))


def tasks(target: Target, plan: Plan) -> Load:
    """Callers that are tasks of an event loop of their own, which runs in this thread."""
    return asyncio.run(tasks_here(target, plan))


def round_trips(target: Target, work: Work, window: float, warm: float) -> tuple[list[float], int]:
    """Seconds of each request of one caller, and how many answers were wrong."""
    wrong = 0
    times: list[float] = []
    predict, clock = target.predict, time.perf_counter
    begin = clock() + warm
    end = begin + window
    for x, value in work.stream(0):
        if (before := clock()) >= end:
            break
        answer = predict(x)
        after = clock()
        wrong += not right(answer, work.answer, value)
        if before >= begin:
            times.append(after - before)
    return times, wrong

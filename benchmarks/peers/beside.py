"""What is measured beside the contenders, in the same turns: what machine and model allow."""

from __future__ import annotations

import os
import statistics
import time

import numpy as np

from benchmarks.floors import COPIES, Pipe, copies_per_second
from benchmarks.machine import Meter, pinned, two_cores
from benchmarks.measure import Round, percentile
from benchmarks.workloads import MAX_BATCH, WORKLOADS, Rows, burn, compute

PIPE, COPY, MODEL, CALLERS = "pipe round trip", "four memcpys", "model alone", "callers alone"


class PipeBeside:
    """A bare round trip across cores; its rate is the inverse."""

    name = PIPE

    def __init__(self) -> None:
        self._pipe = Pipe()
        self._pipe.__enter__()

    def ready(self) -> None: ...

    def cell(self, number: int, callers: int, window: float, warm: float) -> Round:
        near, far = two_cores()
        with pinned({os.getpid(): near}):
            meter = Meter((os.getpid(), self._pipe.pid))
            times = self._pipe.times(window, far)
            median = statistics.median(times)
            return Round(number, 1 / median, median, percentile(times, 0.99), foreign=meter.stop().foreign)

    def close(self) -> None:
        self._pipe.__exit__(None, None, None)


class CopyBeside:
    """The copies that a large request cannot do without, between distinct buffers, half of them on either core."""

    name = COPY

    def ready(self) -> None: ...

    def cell(self, number: int, callers: int, window: float, warm: float) -> Round:
        meter = Meter((os.getpid(),))
        rate = copies_per_second(window, two_cores(), threads=callers) / COPIES
        return Round(number, rate, callers / rate, callers / rate, foreign=meter.stop().foreign)

    def close(self) -> None: ...


class ModelBeside:
    """The model on a batch of as many rows as there are callers, over and over, on the worker's core."""

    name = MODEL

    def __init__(self, workload: str) -> None:
        self._workload = workload

    def ready(self) -> None: ...

    def cell(self, number: int, callers: int, window: float, warm: float) -> Round:
        rows = min(callers, MAX_BATCH)
        work = WORKLOADS[self._workload].work
        assert isinstance(work, Rows)
        batch = np.ones((rows, *work.shape[1:]), np.float32)
        with pinned({os.getpid(): two_cores()[1]}):
            meter, times, end = Meter((os.getpid(),)), [], time.perf_counter() + window
            while (before := time.perf_counter()) < end:
                compute(self._workload, batch)
                times.append(time.perf_counter() - before)
            median = statistics.median(times)
            return Round(number, rows / median, median, percentile(times, 0.99), foreign=meter.stop().foreign)

    def close(self) -> None: ...


class CallersBeside:
    """What callers do by themselves, over and over, in one thread: threads of one process together do no more."""

    name = CALLERS

    def ready(self) -> None: ...

    def cell(self, number: int, callers: int, window: float, warm: float) -> Round:
        iterations = int(os.environ["BENCH_BURN"])
        with pinned({os.getpid(): two_cores()[0]}):
            meter, times, end = Meter((os.getpid(),)), [], time.perf_counter() + window
            while (before := time.perf_counter()) < end:
                burn(iterations)
                times.append(time.perf_counter() - before)
            rate = len(times) / sum(times)
            return Round(number, rate, statistics.median(times), percentile(times, 0.99), foreign=meter.stop().foreign)

    def close(self) -> None: ...


def beside(workload: str) -> list[PipeBeside | CopyBeside | ModelBeside | CallersBeside]:
    match workload:
        case "a":
            return [PipeBeside()]
        case "b":
            return [ModelBeside(workload)]
        case "d":
            return [CopyBeside()]
        case "e":
            return [CallersBeside()]
        case "e2":
            return [ModelBeside(workload), CallersBeside()]
        case _:
            return []

"""What a request costs when the model costs nothing. Each cell's floor is measured right beside it in every round.

Callers are held on one core and the worker (with its supervisor) on another, and so are the two ends of the pipe
that makes the floor: unpinned, every one of these figures jumps between two values.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import load
from benchmarks.floors import COPIES, LARGE, Pipe, copies_per_second
from benchmarks.machine import Meter, parent_of, pinned, two_cores
from benchmarks.measure import Goal, Row, Sample, judge, percentile
from benchmarks.options import Options
from benchmarks.report import log
from benchmarks.workloads import echo

TINY = (1, 16)
BIG = (1, LARGE // 4)


@dataclass
class Measured:
    """One cell in one round."""

    value: float
    foreign: float
    faults: int
    extra: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Bench:
    """A host under load, with the cores and the pipe of the run."""

    def __init__(self, target: load.Target, pids: tuple[int, ...], pipe: Pipe, options: Options) -> None:
        self.target, self.pids, self.pipe, self.options = target, pids, pipe, options
        self.near, self.far = two_cores()

    def everyone(self) -> tuple[int, ...]:
        return (os.getpid(), *self.pids)

    def one_thread(self, shape: tuple[int, ...]) -> Measured:
        meter = Meter(self.everyone())
        times, wrong = load.round_trips(self.target, echo(shape), self.options.window, self.options.warm)
        meter.stop()
        extra = {"p99": percentile(times, 0.99) * 1e6}
        return Measured(statistics.median(times) * 1e6, meter.foreign, wrong, extra)

    def many(self, how: Callable[..., load.Load], callers: int, shape: tuple[int, ...]) -> Measured:
        plan = load.Plan(callers, echo(shape), self.options.window, self.options.warm, self.everyone())
        done = how(self.target, plan)
        extra = {"CPU a request": done.cpu / done.requests * 1e6 if done.requests else 0.0}
        return Measured(done.rate, done.foreign, done.faults, extra, done.errors)

    def pipe_floor(self, rate: bool) -> tuple[float, float]:
        """(median round trip in us, or its inverse in 1/s; foreign load)"""
        meter = Meter((os.getpid(), self.pipe.pid))
        median = statistics.median(self.pipe.times(self.options.window / 2, self.far))
        return (1 / median if rate else median * 1e6), meter.stop().foreign

    def copy_floor(self) -> tuple[float, float]:
        meter = Meter((os.getpid(),))
        rate = copies_per_second(self.options.window / 2, (self.near, self.far)) / COPIES
        return rate, meter.stop().foreign


@dataclass(frozen=True)
class Cell:
    name: str
    title: str
    unit: str
    measure: Callable[[Bench], Measured]
    floor: Callable[[Bench], tuple[float, float]]
    goal: Goal | None
    default: bool = True


def _threads(callers: int, shape: tuple[int, ...]) -> Callable[[Bench], Measured]:
    return lambda bench: bench.many(load.threads, callers, shape)


def _tasks(callers: int, shape: tuple[int, ...]) -> Callable[[Bench], Measured]:
    return lambda bench: bench.many(load.tasks, callers, shape)


def _rate_of_pipe(bench: Bench) -> tuple[float, float]:
    return bench.pipe_floor(rate=True)


CELLS = (
    Cell(
        "one",
        "tiny, 1 thread: round trip",
        "us",
        lambda bench: bench.one_thread(TINY),
        lambda bench: bench.pipe_floor(rate=False),
        Goal(times=2.0, at_most=True),
    ),
    Cell("threads", "tiny, 8 threads", "/s", _threads(8, TINY), _rate_of_pipe, Goal(60_000, 2.7)),
    Cell("threads64", "tiny, 64 threads", "/s", _threads(64, TINY), _rate_of_pipe, Goal(50_000, 2.2)),
    Cell("tasks", "tiny, 64 asyncio tasks", "/s", _tasks(64, TINY), _rate_of_pipe, Goal(150_000, 6.5)),
    Cell("large", "4 MiB both ways, 8 threads", "/s", _threads(8, BIG), Bench.copy_floor, Goal(times=0.5)),
    # Not judged; named with --cells.
    Cell("onetask", "tiny, 1 asyncio task", "/s", _tasks(1, TINY), _rate_of_pipe, None, default=False),
    Cell("large1", "4 MiB both ways, 1 thread", "/s", _threads(1, BIG), Bench.copy_floor, None, default=False),
    Cell("largetasks", "4 MiB both ways, 8 tasks", "/s", _tasks(8, BIG), Bench.copy_floor, None, default=False),
)


def processes(host: Any) -> tuple[int, ...]:
    """Pids of a started host's workers and of their parents, the supervisor."""
    workers = [worker.pid for worker in host.statistics().workers]
    others = {*workers, *(parent_of(pid) for pid in workers)} - {os.getpid()}
    return tuple(sorted(others))


@contextmanager
def started_host() -> Iterator[tuple[load.Target, tuple[int, ...]]]:
    from batch_inference import ModelHost
    from benchmarks.models import Echo

    host = ModelHost(Echo)()
    host.start()
    try:
        yield host, processes(host)
    finally:
        host.stop()


def chosen(names: tuple[str, ...]) -> tuple[Cell, ...]:
    unknown = set(names) - {cell.name for cell in CELLS}
    if unknown:
        raise SystemExit(f"no cell named {', '.join(unknown)}; there are: {', '.join(cell.name for cell in CELLS)}")
    return tuple(cell for cell in CELLS if (cell.name in names if names else cell.default))


def measure(bench: Bench, cells: tuple[Cell, ...]) -> list[Row]:
    """All cells in turn, `rounds` times over: what drifts hits every cell alike."""
    samples: dict[str, list[Sample]] = {cell.name: [] for cell in cells}
    extras: dict[str, list[dict[str, float]]] = {cell.name: [] for cell in cells}
    faults = dict.fromkeys(samples, 0)
    for number in range(bench.options.rounds):
        for cell in cells:
            floor, beside = cell.floor(bench)
            got = cell.measure(bench)
            faults[cell.name] += got.faults
            samples[cell.name].append(Sample(got.value, floor, max(beside, got.foreign)))
            extras[cell.name].append(got.extra)
            more = "".join(f", {name} {value:.1f} us" for name, value in got.extra.items())
            log(
                f"  round {number + 1}: {cell.title}: {got.value:,.1f} {cell.unit}, floor {floor:,.1f}{more}, "
                f"others {max(beside, got.foreign):.2f} cores" + "".join(f"\n    {error}" for error in got.errors)
            )
    rows = []
    for cell in cells:
        of_cell = extras[cell.name]
        note = ", ".join(f"{name} {statistics.median(extra[name] for extra in of_cell):.1f} us" for name in of_cell[0])
        rows.append(judge(cell.title, cell.unit, samples[cell.name], cell.goal, note, faults[cell.name]))
    return rows


def run(options: Options) -> list[Row]:
    cells = chosen(options.cells)
    near, far = two_cores()
    with started_host() as (target, pids), Pipe() as pipe:
        # After the start: pinned callers would hand their one core down to the worker and its thread pools.
        with pinned({os.getpid(): near, pipe.pid: far, **dict.fromkeys(pids, far)}):
            return measure(Bench(target, pids, pipe, options), cells)

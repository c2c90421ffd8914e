"""When batches are cut: our rule beside the fixed delays that are its alternatives, on real workers.

The model sleeps A + B n seconds for n rows. Each policy has a host of its own; within a round every policy is measured
on the same cell, one after the other, so that what drifts hits all alike. The "floor" of a row is the best fixed
delay, chosen by its median over the rounds; the ratio is taken round by round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch_inference import ModelHost
from batch_inference.policy import FixedDelay
from benchmarks import load
from benchmarks.figure import Curves, available, draw
from benchmarks.machine import Meter
from benchmarks.measure import Goal, Row, Sample, judge
from benchmarks.models import Sleeps
from benchmarks.open_loop import poisson
from benchmarks.options import Options
from benchmarks.report import log
from benchmarks.transport import processes
from benchmarks.workloads import echo, request

OURS = "ours"
DELAYS = {"0 ms": 0.0, "0.2 ms": 0.2e-3, "1 ms": 1e-3, "5 ms": 5e-3, "10 ms": 10e-3}
DRAWN = ("0 ms", "1 ms", "5 ms", OURS)
PER_ROW = 20e-6
MAX_BATCH = 64
OPEN_BATCH = 16  # in the open loop, where one thread of Python makes all requests: it must keep up
SHAPE = (1, 4)
STAGGER = 10e-3  # callers that start together would share their batches for ever, whatever the policy
FIGURE = str(Path(__file__).parents[1] / "docs" / "figures" / "policy.svg")
SHARE_OF_WINDOW, ROUNDS = 0.4, 3  # there are many cells
GROUPS = ("tasks", "threads", "slow", "open", "step", "figure")

Values = dict[str, float]
"""What was measured, by policy."""


@dataclass(frozen=True)
class Cell:
    """A load. The goals are ratios to the best fixed delay and to delay 0."""

    how: str
    callers: int
    think: float
    of_best: float
    of_greedy: float | None = None
    of_bare_latency: float | None = None

    @property
    def title(self) -> str:
        thinking = f", think {self.think * 1e3:g} ms" if self.think else ""
        return f"{self.callers} {self.how}{thinking}"


def tasks() -> list[Cell]:
    best, greedy = {1: 0.95, 2: 1.03, 8: 1.1, 32: 1.1}, {2: 1.4, 8: 1.4, 32: 1.4}
    busy = [Cell("tasks", n, 0.0, goal, greedy.get(n), 1.05 if n == 1 else None) for n, goal in best.items()]
    return busy + [Cell("tasks", n, 5e-3, 0.95) for n in best]


def threads() -> list[Cell]:
    best = {1: 0.95, 2: 0.95, 8: 0.95, 32: 0.92}
    busy = [Cell("threads", n, 0.0, goal, None, 1.05 if n == 1 else None) for n, goal in best.items()]
    return busy + [Cell("threads", n, 5e-3, goal) for n, goal in best.items()]


def slow() -> list[Cell]:
    return [Cell("tasks", 2, 0.0, 0.95), Cell("tasks", 16, 0.0, 0.95)] + [
        Cell("threads", 2, 0.0, 0.95),
        Cell("threads", 16, 0.0, 0.92),
    ]


class Staggered:
    """A host whose callers do not all start at once, and think before they send again, each as long as it happens."""

    def __init__(self, host: ModelHost, think: float) -> None:
        self._host, self._think, self._random = host, think, random.Random(1)
        self._started: set[float] = set()

    def predict(self, x: Any) -> Any:
        if pause := self._pause(x):
            time.sleep(pause)
        return self._host.predict(x)

    async def apredict(self, x: Any) -> Any:
        if pause := self._pause(x):
            await asyncio.sleep(pause)
        return await self._host.apredict(x)

    def _pause(self, x: Any) -> float:
        caller = x.item(1)  # what `load` leaves alone in each request
        if caller not in self._started:
            self._started.add(caller)
            return self._random.uniform(0, STAGGER)
        return self._random.expovariate(1 / self._think) if self._think else 0.0


@dataclass
class Bench:
    """A host for each policy."""

    hosts: dict[str, ModelHost]
    pids: tuple[int, ...]
    rounds: int
    window: float
    warm: float
    faults: int = 0
    foreign: dict[str, float] = field(default_factory=dict)

    def closed(self, name: str, cell: Cell) -> float:
        """Replies per second."""
        target = Staggered(self.hosts[name], cell.think)
        how = load.tasks if cell.how == "tasks" else load.threads
        done = how(target, load.Plan(cell.callers, echo(SHAPE), self.window, self.warm, self.pids))
        self.faults += done.faults
        self.foreign[name] = done.foreign
        return done.rate

    def open(self, name: str, rate: float, seed: int) -> float:
        """Mean latency in ms."""
        meter = Meter(self.pids)
        latencies = poisson(self.hosts[name], SHAPE, rate, 2 * self.window, self.warm, seed)
        self.foreign[name] = meter.stop().foreign
        return statistics.fmean(latencies) * 1e3

    def repeat(self, title: str, names: Sequence[str], measure: Callable[[str, int], float]) -> list[Values]:
        """A measurement of each policy in each round, in another order each time."""
        rounds = []
        for number in range(self.rounds):
            order = [*names[number % len(names) :], *names[: number % len(names)]]
            got = {name: measure(name, number) for name in order}
            rounds.append(got | {"foreign": max(self.foreign.values(), default=0.0)})
            log(f"  round {number + 1}: {title}: " + ", ".join(f"{name} {got[name]:,.4g}" for name in names))
        return rounds

    def taken_faults(self) -> int:
        faults, self.faults = self.faults, 0
        return faults


@contextmanager
def started(options: Options, fixed: float, names: Sequence[str]) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        hosts = {}
        for name in names:
            policy = None if name == OURS else FixedDelay(DELAYS[name])
            host = ModelHost(Sleeps, max_batch_size=MAX_BATCH, policy=policy)(fixed, PER_ROW)
            hosts[name] = stack.enter_context(host)
        pids = (os.getpid(), *(pid for host in hosts.values() for pid in processes(host)))
        window = options.window * SHARE_OF_WINDOW
        yield Bench(hosts, pids, min(options.rounds, ROUNDS), window, min(options.warm, 0.4 * window))


# --- judging --------------------------------------------------------------------------------------------------------


def median(rounds: list[Values], name: str) -> float:
    return statistics.median(values[name] for values in rounds)


def compared(rounds: list[Values], floor: str) -> list[Sample]:
    return [Sample(values[OURS], values[floor], values["foreign"]) for values in rounds]


def closed_loop(bench: Bench, prefix: str, cell: Cell) -> list[Row]:
    title = f"{prefix}{cell.title}"
    rounds = bench.repeat(title, [*DELAYS, OURS], lambda name, _: bench.closed(name, cell))
    best = max(DELAYS, key=lambda name: median(rounds, name))
    greedy = statistics.median(values[OURS] / values["0 ms"] for values in rounds)
    note = f"best: {best}; {greedy:.2f} of 0 ms"
    faults = bench.taken_faults()
    rows = [judge(title, "/s", compared(rounds, best), Goal(times=cell.of_best), note, faults)]
    if cell.of_greedy is not None:
        goal = Goal(times=cell.of_greedy)
        rows.append(judge(f"{title}, against 0 ms", "/s", compared(rounds, "0 ms"), goal))
    if cell.of_bare_latency is not None:
        samples = [Sample(1e3 / v[OURS], 1e3 / v["0 ms"], v["foreign"]) for v in rounds]
        rows.append(judge(f"{title}, latency", "ms", samples, Goal(times=cell.of_bare_latency, at_most=True)))
    return rows


def open_loop(bench: Bench) -> list[Row]:
    rows = []
    for host in bench.hosts.values():
        host.configure(max_batch_size=OPEN_BATCH)
    capacity = bench.closed("0 ms", Cell("tasks", 4 * OPEN_BATCH, 0.0, 0.0))
    for share in (0.05, 0.2, 0.5, 0.8):
        title, rate = f"open loop, {share:.0%} of capacity", share * capacity
        rounds = bench.repeat(title, [*DELAYS, OURS], lambda name, number, rate=rate: bench.open(name, rate, number))  # type: ignore[misc]
        best = min(DELAYS, key=lambda name: median(rounds, name))
        note = f"best: {best}; {rate:,.0f} requests a second"
        rows.append(judge(title, "ms", compared(rounds, best), Goal(times=1.05, at_most=True), note))
    for host in bench.hosts.values():
        host.configure(max_batch_size=MAX_BATCH)
    return rows


# --- a step of the load ---------------------------------------------------------------------------------------------

FEW, MANY, BATCHES_TO_LEARN = 2, 64, 20


async def step(host: ModelHost, window: float) -> Values:
    """Replies per second: steadily with few and many callers, and from 20 batches on after a step up and one down."""
    wanted, count = FEW, 0
    running: set[asyncio.Task[None]] = set()

    async def call(number: int) -> None:
        nonlocal count
        x = request(number, SHAPE)
        while number < wanted:
            await host.apredict(x)
            count += 1

    async def rate() -> float:
        before, start = count, time.perf_counter()
        await asyncio.sleep(window)
        return (count - before) / (time.perf_counter() - start)

    async def change(callers: int) -> None:
        nonlocal wanted
        present, wanted = len(running), callers
        if callers < present:
            leaving, _ = await asyncio.wait(running, timeout=load.DRAIN, return_when=asyncio.FIRST_COMPLETED)
        running.difference_update({task for task in running if task.done()})
        running.update(asyncio.ensure_future(call(number)) for number in range(present, callers))
        goal = host.statistics().batches + BATCHES_TO_LEARN
        while host.statistics().batches < goal:
            await asyncio.sleep(0.001)
        running.difference_update({task for task in running if task.done()})

    values = {}
    await change(FEW)
    await asyncio.sleep(window)
    values["few"] = await rate()
    await change(MANY)
    values["up"] = await rate()
    await asyncio.sleep(window)
    values["many"] = await rate()
    await change(FEW)
    values["down"] = await rate()
    wanted = 0
    await asyncio.wait(running, timeout=load.DRAIN)
    return values


def steps(bench: Bench) -> list[Row]:
    up, down = [], []
    for number in range(bench.rounds):
        meter = Meter(bench.pids)
        got = asyncio.run(step(bench.hosts[OURS], bench.window))
        foreign = meter.stop().foreign
        up.append(Sample(got["up"], got["many"], foreign))
        down.append(Sample(got["down"], got["few"], foreign))
        log(f"  round {number + 1}: step: " + ", ".join(f"{name} {value:,.4g}" for name, value in got.items()))
    goal, note = Goal(times=0.95), f"from {BATCHES_TO_LEARN} batches after the step on; floor: steady"
    return [
        judge(f"step from {FEW} to {MANY} tasks", "/s", up, goal, note),
        judge(f"step from {MANY} to {FEW} tasks", "/s", down, goal, note),
    ]


# --- the figure -----------------------------------------------------------------------------------------------------


def curves(bench: Bench) -> Curves:
    """Throughput and mean latency over the number of callers, which are tasks that do not think."""
    found = Curves((1, 2, 4, 8, 16, 32, 64))
    for callers in found.callers:
        cell = Cell("tasks", callers, 0.0, 0.0)
        rounds = bench.repeat(f"figure, {cell.title}", DRAWN, lambda name, _, cell=cell: bench.closed(name, cell))  # type: ignore[misc]
        for name in DRAWN:
            found.throughput.setdefault(name, []).append(median(rounds, name))
    return found


def figure(bench: Bench) -> None:
    if available():
        draw(curves(bench), FIGURE)
        log(f"  {FIGURE}")
    else:
        log("  no figure: it takes matplotlib, the extra [bench]")


def run(options: Options) -> list[Row]:
    unknown = set(options.cells) - set(GROUPS)
    if unknown:
        raise SystemExit(f"no cells named {', '.join(unknown)}; there are: {', '.join(GROUPS)}")
    groups = options.cells or GROUPS
    rows: list[Row] = []
    if set(groups) - {"slow"}:
        with started(options, 2e-3, [*DELAYS, OURS]) as bench:
            for group, cells in (("tasks", tasks()), ("threads", threads())):
                for cell in cells if group in groups else ():
                    rows += closed_loop(bench, "", cell)
            if "open" in groups:
                rows += open_loop(bench)
            if "step" in groups:
                rows += steps(bench)
            if "figure" in groups and options.rounds > 1:
                figure(bench)
    if "slow" in groups:
        with started(options, 20e-3, [*DELAYS, OURS]) as bench:
            for cell in slow():
                rows += closed_loop(bench, "A = 20 ms, ", cell)
    return rows

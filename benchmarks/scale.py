"""Whether the cost of a request stays what it is: with more client processes, more workers, more requests waiting.

The cost is CPU time over all processes: requests per second say little where many processes share few cores. Beside it
stand what the bare path costs more with more processes, any Python when more processes take turns at it on one core,
and futures of plain Python when more of them wait.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import floors
from benchmarks.machine import Meter, pinned, two_cores
from benchmarks.measure import Found, Goal, Round, Row, Sample, judge
from benchmarks.models import Held
from benchmarks.options import Options
from benchmarks.peers.compare import described, started
from benchmarks.peers.contender import Contender, FailedError
from benchmarks.peers.roster import BARE, BY_NAME, OURS
from benchmarks.report import log
from benchmarks.transport import processes
from benchmarks.workloads import request

CLIENTS, CALLERS = (1, 2, 4, 8), 16
WORKERS, CLIENTS_OF_WORKERS = (1, 2, 4), 2
WAITING = (1_000, 10_000, 100_000)
TURNS, FUTURES = 40_000, 100_000  # a round, of all processes together
FLAT = Goal(times=1.2, at_most=True)


Case = tuple[str, int, int, int]
"""The name of a peer, its client processes, the callers of each, its workers."""


def rounds_of(cases: Sequence[Case], options: Options) -> dict[Case, list[Round]]:
    """Each in turn, round by round."""
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    made = [Contender(BY_NAME[name], "a", 0, clients, workers) for name, clients, _, workers in cases]
    with started(made) as running:
        if len(running) < len(made):
            raise FailedError("a host did not start")
        for turn in range(options.rounds):
            for case, contender in zip(cases, made):
                name, clients, callers, workers = case
                got = contender.cell(turn, clients * callers, options.window, options.warm)
                found[case].append(got)
                log(f"  {turn + 1} {name:18} {clients} x {callers} callers, {workers} workers {described(got)}")
    return found


def plain(numbers: Sequence[int], title: str, cost: Callable[[int], float], options: Options) -> Iterator[Row]:
    """A floor: what plain Python, without a host, costs with so many of something."""
    found: dict[int, list[Sample]] = {number: [] for number in numbers}
    for turn in range(options.rounds):
        taken = {number: cost(number) * 1e6 for number in numbers}
        log(f"  {turn + 1} us: " + ", ".join(f"{us:.1f} of {number:,}" for number, us in taken.items()) + f" {title}")
        for number, microseconds in taken.items():
            found[number].append(Sample(microseconds, taken[numbers[0]]))
    for number, samples in found.items():
        yield judge(f"{number:,} {title}", "us", samples)


def judged(found: dict[int, list[Round]], title: str, bare: dict[int, list[Round]] | None = None) -> Iterator[Row]:
    """The cost with more of something beside the cost with the fewest; and what `bare` makes of it."""
    fewest = min(found)
    for number, rounds in found.items():
        note = f"{statistics.median(got.rate for got in rounds):,.0f} requests/s"
        if bare is not None:
            its = judge("", "us", costs(bare[number], bare[fewest]))
            note += f"; the bare path {its.value:.3g} us, {its.ratio:.2f}"
        goal = FLAT if number != fewest else None
        faults = sum(got.faults for got in rounds)
        yield judge(f"7. {number:,} {title}, CPU a request", "us", costs(rounds, found[fewest]), goal, note, faults)


def costs(rounds: list[Round], fewest: list[Round]) -> list[Sample]:
    return [
        Sample(got.cpu * 1e6, base.cpu * 1e6, max(got.foreign, base.foreign))
        for got, base in zip(rounds, fewest, strict=True)
    ]


def waiting(count: int) -> Round:
    """`count` requests that all wait before the first of them is answered."""
    from batch_inference import ModelHost

    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "open"
        with ModelHost(Held, max_batch_size=64, max_pending=2 * max(WAITING))(str(gate)) as host:
            x = request(1, (1, 16))
            first = host.submit(x)
            pids = (os.getpid(), *processes(host))
            near, far = two_cores()
            with pinned({**dict.fromkeys(pids, far), os.getpid(): near}):
                meter = Meter(pids)
                futures = [host.submit(x) for _ in range(count)]
                gate.touch()
                for future in futures:
                    future.result()
                first.result()
                meter.stop()
    cost = meter.own / count
    return Round(0, count / meter.seconds, meter.seconds, meter.seconds, cpu=cost, foreign=meter.foreign)


def queues(options: Options) -> dict[int, list[Round]]:
    found: dict[int, list[Round]] = {count: [] for count in WAITING}
    for turn in range(options.rounds):
        for count in WAITING:
            got = waiting(count)
            found[count].append(got)
            log(f"  {turn + 1} {count:7,} waiting: {got.cpu * 1e6:6.1f} us CPU a request, {got.rate:,.0f}/s")
    return found


def run(options: Options) -> list[Found]:
    names, few = (OURS[0], BARE[0]), CLIENTS_OF_WORKERS
    clients = rounds_of([(name, number, CALLERS, 1) for number in CLIENTS for name in names], options)
    shares = [(OURS[0], few, CALLERS // number, 1) for number in WORKERS if number > 1]
    workers = rounds_of([*((name, few, CALLERS, number) for number in WORKERS for name in names), *shares], options)
    ours, bare = ({number: clients[name, number, CALLERS, 1] for number in CLIENTS} for name in names)
    rows = [*judged(ours, f"client processes x {CALLERS} threads", bare)]
    ours, bare = ({number: workers[name, few, CALLERS, number] for number in WORKERS} for name in names)
    rows += judged(ours, f"workers, {few} client processes x {CALLERS} threads", bare)
    for share in shares:
        number = CALLERS // share[2]
        title = f"the same {number} workers, beside one with {few} x {share[2]} threads, CPU a request"
        rows.append(judge(title, "us", costs(ours[number], workers[share])))
    rows += judged(queues(options), "requests waiting")
    near, _ = two_cores()
    title = f"processes x {CALLERS} threads, taking turns at plain Python, a turn"
    rows += plain(CLIENTS, title, lambda number: floors.turn(number, CALLERS, TURNS, near), options)
    with pinned({os.getpid(): near}):
        title = "futures of plain Python waiting, CPU each"
        rows += plain(WAITING, title, lambda number: floors.futures(number, FUTURES), options)
    return list(rows)

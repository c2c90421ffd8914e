"""Whether the cost of a request stays what it is: with more client processes, more workers, more requests waiting.

The cost is CPU time over all processes: requests per second say little where many processes share few cores. Beside it
stands what any Python costs more when more processes take turns at it on one core.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import floors
from benchmarks.machine import Meter, pinned, two_cores
from benchmarks.measure import Found, Goal, Round, Row, Sample, judge
from benchmarks.models import Held
from benchmarks.options import Options
from benchmarks.peers.compare import described, started
from benchmarks.peers.contender import Contender, FailedError
from benchmarks.peers.roster import BY_NAME, OURS
from benchmarks.report import log
from benchmarks.transport import processes
from benchmarks.workloads import request

CLIENTS, CALLERS = (1, 2, 4, 8), 16
WORKERS, CLIENTS_OF_WORKERS = (1, 2, 4), 2
WAITING = (1_000, 10_000, 100_000)
TURNS = 40_000  # a round, of all processes together
FLAT = Goal(times=1.2, at_most=True)


def rounds_of(
    made: dict[int, Contender], clients: dict[int, int], what: str, options: Options
) -> dict[int, list[Round]]:
    """Each contender in turn, round by round."""
    found: dict[int, list[Round]] = {number: [] for number in made}
    with started(list(made.values())) as running:
        if len(running) < len(made):
            raise FailedError("a host did not start")
        for turn in range(options.rounds):
            for number, contender in made.items():
                got = contender.cell(turn, CALLERS * clients[number], options.window, options.warm)
                found[number].append(got)
                log(f"  {turn + 1} {number} {what:17} {described(got)}")
    return found


def turns(options: Options) -> Iterator[Row]:
    """The floor: plain Python, without a host."""
    near, _ = two_cores()
    found: dict[int, list[Sample]] = {number: [] for number in CLIENTS}
    for count in range(options.rounds):
        taken = {number: floors.turn(number, CALLERS, TURNS, near) * 1e6 for number in CLIENTS}
        log(f"  {count + 1} us a turn: " + ", ".join(f"{us:.1f} of {number}" for number, us in taken.items()))
        for number, microseconds in taken.items():
            found[number].append(Sample(microseconds, taken[1]))
    for number, samples in found.items():
        yield judge(f"{number} processes x {CALLERS} threads, taking turns at plain Python, a turn", "us", samples)


def judged(found: dict[int, list[Round]], title: str) -> Iterator[Row]:
    """The cost with more of something beside the cost with the fewest."""
    fewest = min(found)
    for number, rounds in found.items():
        samples = [
            Sample(got.cpu * 1e6, base.cpu * 1e6, max(got.foreign, base.foreign))
            for got, base in zip(rounds, found[fewest], strict=True)
        ]
        note = f"{statistics.median(got.rate for got in rounds):,.0f} requests/s"
        goal = FLAT if number != fewest else None
        faults = sum(got.faults for got in rounds)
        yield judge(f"7. {number:,} {title}, CPU a request", "us", samples, goal, note, faults)


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


def hosts(numbers: Sequence[tuple[int, int]]) -> list[Contender]:
    return [Contender(BY_NAME[OURS[0]], "a", 0, clients, workers) for clients, workers in numbers]


def run(options: Options) -> list[Found]:
    clients = rounds_of(
        dict(zip(CLIENTS, hosts([(number, 1) for number in CLIENTS]))),
        {number: number for number in CLIENTS},
        "client processes",
        options,
    )
    workers = rounds_of(
        dict(zip(WORKERS, hosts([(CLIENTS_OF_WORKERS, number) for number in WORKERS]))),
        dict.fromkeys(WORKERS, CLIENTS_OF_WORKERS),
        "workers",
        options,
    )
    rows = [*judged(clients, f"client processes x {CALLERS} threads")]
    rows += judged(workers, f"workers, {CLIENTS_OF_WORKERS} client processes x {CALLERS} threads")
    rows += judged(queues(options), "requests waiting")
    rows += turns(options)
    return list(rows)

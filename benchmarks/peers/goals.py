"""What is to be reached, judged from one run. Pure: rounds in, rows out.

Against peers the floor of a row is the best of them, chosen by its median; the ratio is taken round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from benchmarks.measure import Goal, Round, Row, Sample, judge, quiet
from benchmarks.peers.beside import CALLERS, COPY, MODEL, PIPE
from benchmarks.peers.roster import BARE, HERE, OURS, PEERS, PROCESS
from benchmarks.report import number as written

Key = tuple[str, int, str]
Results = dict[Key, list[Round]]
"""Rounds by workload, callers, and who."""
THREADS, TASKS = OURS
OUT = tuple(peer.name for peer in PEERS if peer.where == PROCESS and peer.name not in OURS + BARE)
IN = tuple(peer.name for peer in PEERS if peer.where == HERE and peer.batches)


HOW = {THREADS: "threads", TASKS: "tasks"}
BARE_OF = dict(zip(OURS, BARE))


def spoken(callers: int, who: str) -> str:
    return f"{callers} {HOW[who] if callers > 1 else HOW[who][:-1]}"


def rate(got: Round) -> float:
    return got.rate


def median_rate(rounds: Iterable[Round]) -> float:
    kept = quiet([got for got in rounds if got.rate])
    return statistics.median(got.rate for got in kept) if kept else 0.0


def median_busy(rounds: Iterable[Round]) -> float:
    """Cores that all processes of a contender together kept busy."""
    return statistics.median(got.rate * got.cpu for got in quiet([got for got in rounds if got.rate]))


def pairs(ours: list[Round], theirs: list[Round] | None, value: Callable[[Round], float]) -> list[Sample]:
    """Rounds that both have; ours alone if there is nothing to be beside."""
    mine = [got for got in ours if got.rate]
    if theirs is None:
        return [Sample(value(got), foreign=got.foreign) for got in mine]
    floors = {got.number: got for got in theirs if got.rate}
    both = [(got, floors[got.number]) for got in mine if got.number in floors]
    return [Sample(value(got), value(floor), max(got.foreign, floor.foreign)) for got, floor in both]


class Judge:
    def __init__(self, results: Results) -> None:
        self._results = results
        self.rows: list[Row] = []

    def _add(
        self,
        title: str,
        goal: Goal,
        key: Key,
        beside: Key | None = None,
        value: Callable[[Round], float] = rate,
        unit: str = "/s",
        note: str = "",
    ) -> None:
        """A row for one cell beside another, and what the bare path makes of the same."""
        rounds = self._results.get(key, [])
        samples = pairs(rounds, self._beside(beside), value)
        if not samples:
            return
        bare = BARE_OF[key[2]]
        if beside is not None and beside[2] == key[2]:
            beside = (*beside[:2], bare)
        if others := pairs(self._results.get((*key[:2], bare), []), self._beside(beside), value):
            its = judge("", unit, others)
            note += f"; the bare path {written(its.value) if its.ratio is None else f'{its.ratio:.2f}'}"
        faults = sum(got.faults for got in rounds)
        self.rows.append(judge(title, unit, samples, goal, note.lstrip("; "), faults))

    def _beside(self, key: Key | None) -> list[Round] | None:
        return None if key is None else self._results.get(key, [])

    def against(self, number: int, key: Key, others: Iterable[str], goal: Goal, workload: str = "") -> None:
        """Requests per second beside the best of `others` in the same cell (or at `workload`, for the same callers)."""
        name, callers, who = key
        medians = {other: median_rate(self._results.get((workload or name, callers, other), [])) for other in others}
        best = max(medians, key=lambda other: medians[other], default="")
        if not best or not medians[best]:
            return
        note = f"beside {best}"
        if workload and key in self._results:
            note += f" in ({workload}); kept {median_busy(self._results[key]):.2f} cores busy"
        title = f"{number}. ({name}) {spoken(callers, who)}"
        self._add(title, goal, key, (workload or name, callers, best), note=note)

    def latency(self, number: int, key: Key, other: str, times: float) -> None:
        workload, callers, who = key
        title = f"{number}. ({workload}) one of our {HOW[who]}, p50"
        goal, beside = Goal(times=times, at_most=True), (workload, callers, other)
        self._add(title, goal, key, beside, lambda got: got.p50 * 1e6, "us", f"beside {other}")

    def cpu(self, number: int, key: Key, limit: float) -> None:
        workload, callers, who = key
        title = f"{number}. ({workload}) {spoken(callers, who)}, CPU a request"
        self._add(title, Goal(limit, at_most=True), key, value=lambda got: got.cpu * 1e6, unit="us")

    def fall_off(self, number: int, workload: str, few: int, many: int, who: str, share: float) -> None:
        title, note = f"{number}. ({workload}) {many} threads", f"beside {few} threads"
        self._add(title, Goal(times=share), (workload, many, who), (workload, few, who), note=note)


def judged(results: Results) -> list[Row]:
    """Rows for whatever of the goals the results have the cells of."""
    on = Judge(results)
    # 1: what leaves the process
    for key, times in {
        ("a", 8, THREADS): 4.0,
        ("a", 32, THREADS): 2.5,
        ("a", 64, THREADS): 2.5,
        ("a", 64, TASKS): 10.0,
        ("c", 1, THREADS): 5.0,
        ("c", 8, THREADS): 5.0,
        ("c", 32, THREADS): 4.0,
        ("d", 1, THREADS): 2.0,
        ("d", 8, THREADS): 1.5,
        ("d", 32, THREADS): 2.0,
    }.items():
        on.against(1, key, OUT, Goal(times=times))
    for who in OURS:
        on.cpu(1, ("a", 32, who), 30)
    # 2: what batches within the process, and what the model allows
    on.against(2, ("a", 64, TASKS), IN, Goal(times=1.0))
    of_model = {
        TASKS: {1: 0.9, 4: 0.9, 8: 0.9, 16: 0.86, 32: 0.83, 64: 0.83},
        THREADS: {1: 0.9, 4: 0.9, 8: 0.84, 16: 0.68, 32: 0.6, 64: 0.6},
    }
    for who, shares in of_model.items():
        for callers, share in shares.items():
            on.against(2, ("b", callers, who), (MODEL,), Goal(times=share))
    for callers in (1, 8, 32, 64):
        for who in OURS:
            same = tuple(peer.name for peer in PEERS if peer.name in IN and peer.how == HOW[who])
            on.against(2, ("b", callers, who), same, Goal(times=1.0))
    for callers in (8, 32, 64):
        on.against(2, ("e", callers, THREADS), (CALLERS,), Goal(times=0.94))
    for callers, times in ((8, 1.5), (32, 1.25)):
        on.against(2, ("e2", callers, THREADS), IN, Goal(times=times))
    for callers in (8, 32, 64):
        on.against(2, ("f2", callers, THREADS), (THREADS,), Goal(times=1.8), workload="e")
    # 3: one caller
    on.latency(3, ("a", 1, THREADS), PIPE, 2.0)
    on.latency(3, ("b", 1, THREADS), MODEL, 1.03)
    # 4: small requests
    on.against(4, ("a", 8, THREADS), (PIPE,), Goal(60_000, 2.7))
    on.against(4, ("a", 64, THREADS), (PIPE,), Goal(50_000, 2.2))
    on.against(4, ("a", 64, TASKS), (PIPE,), Goal(150_000, 6.5))
    # 5: large ones
    on.against(5, ("d", 8, THREADS), (COPY,), Goal(times=0.5))
    on.fall_off(5, "d", 8, 32, THREADS, 0.9)
    return on.rows

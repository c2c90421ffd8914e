"""The cells, in turns: within a round every contender is measured on the same load, each time in another order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from benchmarks.measure import Cell, Found, Round, summary
from benchmarks.options import Options
from benchmarks.peers import goals
from benchmarks.peers.beside import MODEL, beside
from benchmarks.peers.contender import Contender, FailedError
from benchmarks.peers.environments import installed
from benchmarks.peers.roster import BY_NAME, OURS, PEERS, Peer
from benchmarks.report import log
from benchmarks.workloads import WORKLOADS, iterations_per_ms

CALLERS = (1, 8, 32, 64)
MORE = {"b": (4, 16)}
"""Further numbers of callers, of us and of the model alone, that goals speak of."""
SHARE_OF_WINDOW = 0.5  # there are many cells


class Measured(Protocol):
    name: str

    def ready(self) -> None: ...

    def cell(self, number: int, callers: int, window: float, warm: float) -> Round: ...

    def close(self) -> None: ...


def chosen_peers(names: Sequence[str]) -> list[Peer]:
    unknown = set(names) - set(BY_NAME)
    if unknown:
        raise SystemExit(f"no peer named {', '.join(sorted(unknown))}; there are: {'; '.join(BY_NAME)}")
    wanted = [peer for peer in PEERS if not names or peer.name in names]
    absent = [peer.name for peer in wanted if not installed(peer)]
    if absent:
        log(f"  not installed, left out: {', '.join(absent)} (python -m benchmarks peers --install)")
    return [peer for peer in wanted if installed(peer)]


def chosen_workloads(names: Sequence[str]) -> list[str]:
    unknown = set(names) - set(WORKLOADS)
    if unknown:
        raise SystemExit(f"no workload named {', '.join(sorted(unknown))}; there are: {', '.join(WORKLOADS)}")
    return list(names or WORKLOADS)


def takes_part(peer: Peer, workload: str) -> bool:
    return peer.runs(workload, WORKLOADS[workload].processes)


@contextlib.contextmanager
def started(made: Sequence[Measured]) -> Iterator[list[Measured]]:
    """Those that got ready, stopped; all are closed in the end."""
    running: list[Measured] = []
    with contextlib.ExitStack() as stack:  # which goes on closing when it is interrupted at that
        for contender in made:
            stack.callback(contender.close)
        for contender in made:
            if isinstance(contender, Contender):
                stack.callback(contender.leave)  # all at once, before each is waited for
        for contender in made:
            try:
                contender.ready()
                running.append(contender)
            except FailedError as error:
                log(f"  {contender.name} did not start: {error}; see {getattr(contender, 'log', '')}")
        for contender in running:
            if isinstance(contender, Contender):
                contender.signal(signal.SIGSTOP)
        yield running


class Turns:
    """The rounds of one workload."""

    def __init__(self, workload: str, running: list[Measured], window: float, warm: float) -> None:
        self._workload, self._running = workload, {contender.name: contender for contender in running}
        self._window, self._warm = window, warm
        self._lost: set[str] = set()  # who did not answer is out until the next workload
        self.rounds: dict[tuple[int, str], list[Round]] = {}

    def names(self, callers: int) -> list[str]:
        few = (*OURS, MODEL)
        return [name for name in self._running if callers in CALLERS or name in few]

    def round(self, number: int) -> None:
        for callers in sorted({*CALLERS, *MORE.get(self._workload, ())}):
            names = self.names(callers)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                if name not in self._lost:
                    got = self._cell(number, name, callers)
                    self.rounds.setdefault((callers, name), []).append(got)
                    log(f"  {number + 1} {self._workload} {callers:3} {name:22} {described(got)}")

    def _cell(self, number: int, name: str, callers: int) -> Round:
        try:
            return self._running[name].cell(number, callers, self._window, self._warm)
        except FailedError as error:
            self._lost.add(name)
            return Round(number, 0.0, 0.0, 0.0, faults=1, error=str(error))


def described(got: Round) -> str:
    text = f"{got.rate:10,.0f}/s  p50 {got.p50 * 1e3:8.3f}  p99 {got.p99 * 1e3:8.3f} ms  CPU {got.cpu * 1e6:7.0f} us"
    text += f"  batch {got.batch:5.1f}  {got.memory:5.0f} MiB  others {got.foreign:.2f}"
    return text + (f"  {got.faults} FAULTS {got.error}" if got.faults else "")


def run(options: Options) -> list[Found]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is stopped is ended
    peers, results = chosen_peers(options.peers), goals.Results()
    out: set[str] = set()  # who did not start once
    burn = iterations_per_ms()
    os.environ["BENCH_BURN"] = str(burn)  # for the model beside
    for workload in chosen_workloads(options.cells):
        log(f"  {workload}: {WORKLOADS[workload].title}")
        contenders: list[Measured] = [
            Contender(peer, workload, burn, WORKLOADS[workload].processes)
            for peer in peers
            if takes_part(peer, workload) and peer.name not in out
        ]
        with started([*contenders, *beside(workload)]) as running:
            out |= {contender.name for contender in contenders if contender not in running}
            share = SHARE_OF_WINDOW * WORKLOADS[workload].lasts
            turns = Turns(workload, running, options.window * share, options.warm * share)
            for number in range(options.rounds):
                turns.round(number)
        for (callers, who), rounds in turns.rounds.items():
            results[workload, callers, who] = rounds
    cells: list[Cell] = [summary(*key, rounds) for key, rounds in results.items()]
    return [*cells, *goals.judged(results)]

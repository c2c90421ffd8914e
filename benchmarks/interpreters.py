"""This library under several interpreters, taking turns: say, 3.13 and 3.13t, which has no interpreter lock.

``python -m benchmarks interpreters --python PATH PATH ...``; each needs the packages that this library needs. The first
is what the others are set beside. A script that sets BATCH_INFERENCE_NO_EXTENSIONS and starts the same interpreter as
another shows what the extension gains.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator

from benchmarks.measure import Found, Round, Row, Sample, judge
from benchmarks.options import Options
from benchmarks.peers.compare import described, started
from benchmarks.peers.contender import Contender
from benchmarks.peers.environments import ROOT
from benchmarks.peers.goals import spoken
from benchmarks.peers.roster import BY_NAME, OURS
from benchmarks.report import log
from benchmarks.workloads import iterations_per_ms

CELLS = (("a", False), ("a", True), ("e", True))
"""Workloads, and whether their callers may use every core."""
CALLERS = (1, 8, 32)


def version_of(python: str) -> str:
    """As 3.13.15 or 3.13.15t without C."""
    code = "from benchmarks.report import interpreter; print(interpreter())"
    return subprocess.run((python, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def rows(workload: str, spread: bool, who: str, versions: dict[str, str], options: Options) -> Iterator[Row]:
    """`versions`: of each interpreter, by its path."""
    burn = iterations_per_ms()
    peers = [
        dataclasses.replace(BY_NAME[who], name=f"{who}, {version}", python=python)
        for python, version in versions.items()
    ]
    made = [Contender(peer, workload, burn, spread=spread) for peer in peers]
    found: dict[tuple[int, str], list[Round]] = {}
    with started(made):
        for number in range(options.rounds):
            for callers in CALLERS:
                turn = number % len(made)
                for contender in (*made[turn:], *made[:turn]):
                    got = contender.cell(number, callers, options.window / 2, options.warm / 2)
                    found.setdefault((callers, contender.name), []).append(got)
                    log(f"  {number + 1} {workload} {callers:3} {contender.name:22} {described(got)}")
    cores = "callers on every core" if spread else "callers on one core"
    for callers in CALLERS:
        for peer in peers:
            pairs = zip(found[callers, peer.name], found[callers, peers[0].name])
            samples = [Sample(got.rate, base.rate, max(got.foreign, base.foreign)) for got, base in pairs]
            title = f"({workload}) {spoken(callers, who)}, {cores}, {versions[peer.python]}"
            yield judge(title, "/s", samples, faults=sum(got.faults for got in found[callers, peer.name]))


def run(options: Options) -> list[Found]:
    if len(options.pythons) < 2:
        raise SystemExit("which interpreters? python -m benchmarks interpreters --python PATH PATH")
    versions = {python: version_of(python) for python in options.pythons}
    return [row for cell in CELLS for who in OURS for row in rows(*cell, who, versions, options)]

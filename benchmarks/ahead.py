"""Collating ahead: large requests that wait for others are copied into the open batch meanwhile. What does it gain?

The floor is the same host with a batcher of which the library does not know that it joins rows: it copies them when
the batch is cut. The model sleeps; its outputs are small.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from batch_inference import ModelHost
from batch_inference.batcher import ConcatBatcher
from benchmarks import load
from benchmarks.measure import Goal, Row, Sample, judge
from benchmarks.options import Options
from benchmarks.report import log
from benchmarks.transport import processes
from benchmarks.workloads import Rows

PIXELS = 3 * 224 * 224
IMAGES = Rows((1, PIXELS), (1, 2))  # 588 KiB each, of which the first and the last value come back
MAX_BATCH = 64
SECONDS, CALLERS = (2e-3, 20e-3), (1, 8, 32)


class Classifies:
    """Takes images and so many seconds, and gives the first and the last of their pixels."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def predict_batch(self, x: Any) -> Any:
        time.sleep(self._seconds)
        return x[:, :: PIXELS - 1].copy()


class AllAtOnce(ConcatBatcher):
    """The same batches, made when they are cut."""

    borrows = True
    by_shape = True

    def batch(self, requests: list[Any]) -> tuple[Any, Any]:
        return super().batch(requests)


def run(options: Options) -> list[Row]:
    rows = []
    for seconds in SECONDS:
        with contextlib.ExitStack() as stack:
            batchers = (ConcatBatcher(), AllAtOnce())
            hosts = [
                stack.enter_context(ModelHost(Classifies, batcher=batcher, max_batch_size=MAX_BATCH)(seconds))
                for batcher in batchers
            ]
            pids = (os.getpid(), *(pid for host in hosts for pid in processes(host)))
            for callers in CALLERS:
                rows.append(
                    compare(
                        f"{callers} thread{'s' * (callers > 1)}, model of {seconds * 1e3:g} ms",
                        callers,
                        hosts,
                        pids,
                        options,
                    )
                )
    return rows


def compare(title: str, callers: int, hosts: list[ModelHost], pids: tuple[int, ...], options: Options) -> Row:
    samples, faults = [], 0
    for number in range(options.rounds):
        done = {}
        for host in hosts if number % 2 else reversed(hosts):
            done[host] = load.threads(host, load.Plan(callers, IMAGES, options.window, options.warm, pids))
        ours, floor = (done[host] for host in hosts)
        samples.append(Sample(ours.rate, floor.rate, max(ours.foreign, floor.foreign)))
        faults += ours.faults + floor.faults
        log(f"  round {number + 1}: {title}: {ours.rate:,.4g}/s, all at once {floor.rate:,.4g}/s")
    return judge(title, "/s", samples, Goal(times=0.95), "floor: copied when the batch is cut", faults)

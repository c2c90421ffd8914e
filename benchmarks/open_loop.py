"""Requests that come when they come, whether or not the ones before were answered."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from typing import Any

from batch_inference import ModelHost
from benchmarks.load import DRAIN
from benchmarks.workloads import request


def poisson(host: ModelHost, shape: tuple[int, ...], rate: float, window: float, warm: float, seed: int) -> list[float]:
    """Seconds from when each request of the window was due until its answer was there."""
    source, x = random.Random(seed), request(0, shape)
    latencies: list[float] = []
    begin = time.perf_counter() + 0.01
    due, end = begin, begin + warm + window
    last: Future[Any] | None = None
    all_done = threading.Event()

    def note(due: float) -> None:
        latencies.append(time.perf_counter() - due)

    while due < end:
        pause = due - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        last = host.submit(x)
        if due >= begin + warm:
            last.add_done_callback(lambda _, due=due: note(due))  # type: ignore[misc]
        due += source.expovariate(rate)
    assert last is not None
    last.add_done_callback(lambda _: all_done.set())
    all_done.wait(DRAIN)
    return latencies

"""What this machine allows: round trips through a bare pipe, memcpy, an event loop without us; and how steady it is.

A pipe round trip is 6 us where both ends share a core and 40-50 us across two, because an idle core has to be
woken; left to itself the scheduler makes it either. So both ends are pinned, here and in the cells alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from benchmarks import load
from benchmarks.machine import Meter, pin, pinned, two_cores
from benchmarks.measure import Row, Sample, judge, percentile
from benchmarks.options import Options
from benchmarks.report import log
from benchmarks.workloads import burn, echo, request

LARGE = 4 << 20
"""Bytes of the large case, one way."""
COPIES = 4
"""Copies a large request cannot do without: into the slot, the batch, the reply slot, the answer."""

_ECHO = "import os,sys;r,w=map(int,sys.argv[1:])\nwhile b:=os.read(r,8):os.write(w,b)"
_STAMP = """
import os, sys, time
from batch_inference.awake import LONG, keep_awake
read, write = map(int, sys.argv[-2:])
ns = LONG if "kept" in sys.argv else 0
keep_awake(ns)
while os.read(read, 8):
    os.write(write, time.monotonic_ns().to_bytes(8, "little"))
    keep_awake(ns)
"""


Piped = TypeVar("Piped", bound="Pipe")


class Pipe:
    """A child process that sends back each 8 bytes it reads."""

    def __init__(self, *command: str) -> None:
        self._command = command or ("-S", "-c", _ECHO)

    def __enter__(self: Piped) -> Piped:
        far_read, self._write = os.pipe()
        self._read, far_write = os.pipe()
        command = (sys.executable, *self._command, str(far_read), str(far_write))
        self._child = subprocess.Popen(command, pass_fds=(far_read, far_write))
        os.close(far_read)
        os.close(far_write)
        self.pid = self._child.pid
        self.round_trip()  # it is up
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._write)
        self._child.wait()
        os.close(self._read)

    def round_trip(self) -> bytes:
        os.write(self._write, b"12345678")
        return os.read(self._read, 8)

    def times(self, window: float, core: int) -> list[float]:
        """Seconds of each round trip with the child on `core`; where this process runs is its own affair."""
        pin(self.pid, {core})
        clock, once = time.perf_counter, self.round_trip
        for _ in range(200):
            once()
        times: list[float] = []
        end = clock() + window
        while (before := clock()) < end:
            once()
            times.append(clock() - before)
        return times


class Sleeper(Pipe):
    """A child process that says at which time it has woken up, with the core kept awake meanwhile or not."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__("-c", _STAMP, "kept" if kept else "")

    def lateness(self, seconds: float, window: float) -> float:
        """Median seconds until it runs, when it has waited for `seconds` while this process computed."""
        times: list[float] = []
        end = time.perf_counter() + window
        while time.perf_counter() < end:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass
            before = time.monotonic_ns()
            times.append((int.from_bytes(self.round_trip(), "little") - before) / 1e9)
        return statistics.median(times)


def copies_per_second(window: float, cores: Sequence[int], threads: int = 8, size: int = LARGE) -> float:
    """memcpys of `size` bytes by `threads` threads together, each between two buffers of its own, spread over `cores`.

    The large case has half of its copies on the callers' core and half on the worker's.
    """
    stop = threading.Event()
    counts = [0] * threads

    def work(index: int) -> None:
        os.sched_setaffinity(0, {cores[index % len(cores)]})
        source, target = (np.full(size // 4, index, np.float32) for _ in range(2))
        while not stop.is_set():
            np.copyto(target, source)
            counts[index] += 1

    running = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    time.sleep(0.1)
    begin, before = time.perf_counter(), sum(counts)
    time.sleep(window)
    rate = (sum(counts) - before) / (time.perf_counter() - begin)
    stop.set()
    for thread in running:
        thread.join()
    return rate


class Loopback:
    """Answers at the end of each turn of the loop that asks: what is left are asyncio and the callers that measure."""

    def __init__(self) -> None:
        self._asked: list[tuple[asyncio.Future[Any], Any]] = []

    def predict(self, x: Any) -> Any:
        return x

    async def apredict(self, x: Any) -> Any:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if not self._asked:
            loop.call_soon(self._answer)
        self._asked.append((answer, x))
        return await answer

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        for answer, x in asked:
            answer.set_result(x)


def variety(x: Any) -> None:
    """Some 25 us of Python that, like a request, touches much code and little of it twice."""
    text = json.dumps(json.loads('{"rows": [1, 2, 3], "name": "x"}'))
    re.match(r"\w+", text.split(",")[-1])
    x.copy().tobytes()
    np.add(x, x)[0, :4].tolist()
    sorted(zip(range(8), text))


def _take_turns(core: int, mine: Sequence[Any], following: Sequence[Any], passed: Any, turns: int) -> None:
    os.sched_setaffinity(0, {core})

    def work(own: Any, following: Any) -> None:
        for _ in range(turns):
            own.acquire()
            variety(x)
            following.release()

    x = request(1, (1, 16))
    for _ in range(200):
        variety(x)
    threads = [threading.Thread(target=work, args=gates) for gates in zip(mine, following)]
    for thread in threads:
        thread.start()
    passed.release()
    for thread in threads:
        thread.join()
    passed.release()


def turn(processes: int, threads: int, turns: int, core: int) -> float:
    """Seconds of one turn of `variety`, when all threads of so many processes take turns at it on one core.

    The next turn is always another thread's, and that of another process where there is one.
    """

    def wait_for_all() -> None:
        if not all(passed.acquire(timeout=60) for _ in running):
            raise RuntimeError(f"of {processes} processes one did not come to its turn: is the machine overloaded?")

    context = multiprocessing.get_context("spawn")
    gates, passed = [context.Semaphore(0) for _ in range(processes * threads)], context.Semaphore(0)
    following = [*gates[1:], gates[0]]
    each = turns // len(gates)
    running = [
        context.Process(
            target=_take_turns,
            args=(core, gates[index::processes], following[index::processes], passed, each),
            daemon=True,
        )
        for index in range(processes)
    ]
    for process in running:
        process.start()
    wait_for_all()
    begin = time.perf_counter()
    gates[0].release()
    wait_for_all()
    seconds = time.perf_counter() - begin
    for process in running:
        process.join()
    return seconds / (each * len(gates))


def futures(waiting: int, count: int) -> float:
    """Seconds of CPU time that a future with an array takes, from being made to its result, when so many wait."""
    x = request(1, (1, 16))
    begin = time.process_time()
    for _ in range(count // waiting):
        asked = [(Future[Any](), x.copy()) for _ in range(waiting)]
        for future, argument in asked:
            future.set_result(argument * 2)
        for future, _ in asked:
            future.result()
        del asked, future, argument
    return (time.process_time() - begin) / count


def compute(seconds: float) -> None:
    """C code that touches a few KB and nothing else."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 200)


def after(wait: Callable[[float], object], seconds: float, window: float) -> float:
    """Median seconds that `variety` takes right after `wait(seconds)`."""
    x, times = request(1, (1, 16)), []
    end = time.perf_counter() + window
    while time.perf_counter() < end:
        wait(seconds)
        before = time.perf_counter()
        variety(x)
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def unsteadiness(window: float) -> float:
    """How many times as long the same pure Python takes in the slowest tenth of its runs as in the quickest."""
    times: list[float] = []
    end = time.perf_counter() + window
    while (before := time.perf_counter()) < end:
        burn(2000)
        times.append(time.perf_counter() - before)
    return percentile(times, 0.9) / percentile(times, 0.1)


def run(options: Options) -> list[Row]:
    near, far = two_cores()
    across: list[Sample] = []
    shared: list[Sample] = []
    large: list[Sample] = []
    loops: list[Sample] = []
    steady: list[Sample] = []
    computed: list[Sample] = []
    slept: list[Sample] = []
    woken: list[Sample] = []
    kept: list[Sample] = []
    with (
        Pipe() as pipe,
        Sleeper(kept=False) as asleep,
        Sleeper(kept=True) as awake,
        pinned({os.getpid(): near, pipe.pid: far, asleep.pid: far, awake.pid: far}),
    ):
        for number in range(options.rounds):
            log(f"floors: round {number + 1} of {options.rounds}")
            for core, samples in ((far, across), (near, shared)):
                meter = Meter((os.getpid(), pipe.pid))
                median = statistics.median(pipe.times(options.window / 2, core))
                samples.append(Sample(median * 1e6, foreign=meter.stop().foreign))
            meter = Meter((os.getpid(),))
            rate = copies_per_second(options.window / 2, (near, far)) / COPIES
            large.append(Sample(rate, foreign=meter.stop().foreign))
            done = load.tasks(Loopback(), load.Plan(64, echo((1, 16)), options.window, options.warm, (os.getpid(),)))
            loops.append(Sample(done.rate, foreign=done.foreign))
            meter = Meter((os.getpid(),))
            steady.append(Sample(unsteadiness(options.window), foreign=meter.stop().foreign))
            hot = after(compute, 0.0, options.window / 3) * 1e6
            for wait, samples in ((compute, computed), (time.sleep, slept)):
                samples.append(Sample(after(wait, 2e-3, options.window / 3) * 1e6, hot))
            for sleeper, samples in ((asleep, woken), (awake, kept)):
                soon, late = (sleeper.lateness(seconds, options.window / 3) * 1e6 for seconds in (50e-6, 2e-3))
                samples.append(Sample(late, soon))
    return [
        judge("pipe round trip, two cores", "us", across),
        judge("pipe round trip, one core", "us", shared),
        judge("4 memcpys of 4 MiB, 8 threads", "/s", large),
        judge("64 asyncio tasks, answered by their own loop", "/s", loops),
        judge("the same Python code, slowest tenth of runs over quickest", "x", steady),
        judge("Python code after 2 ms of C code in a few KB, beside at once", "us", computed),
        judge("Python code after 2 ms of sleep, beside at once", "us", slept),
        judge("woken after 2 ms, beside after 50 us", "us", woken),
        judge("the same, core kept awake", "us", kept),
    ]

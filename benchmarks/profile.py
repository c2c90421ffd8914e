"""Where the time of a tiny request goes.

cProfile on both sides, one caller: it makes every call dearer, so read it for the number of calls and for what is
called at all. Where py-spy is installed, samples of both sides under 8 threads and 64 tasks: read these for shares.
Where strace is, the system calls of a request.
"""

from __future__ import annotations

import asyncio
import collections
import cProfile
import os
import pstats
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import load
from benchmarks.machine import pinned, two_cores
from benchmarks.measure import Row
from benchmarks.options import Options
from benchmarks.report import log
from benchmarks.transport import TINY, processes, started_host
from benchmarks.workloads import echo, request

TOP = 25
CALLS = 2000


def print_stats(title: str, stats: pstats.Stats, calls: int) -> None:
    """Own time of each function in us a request, dearest first."""
    print(f"\n{title} (cProfile, {calls} requests; us and calls are per request)")
    print(f"{'own us':>8} {'with callees':>12} {'calls':>7}  function")
    table: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
    entries = sorted(table.items(), key=lambda item: -item[1][2])
    for (file, line, name), (_, count, own, total, _) in entries[:TOP]:
        place = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
        print(f"{own / calls * 1e6:8.2f} {total / calls * 1e6:12.2f} {count / calls:7.2f}  {place}")


def counted() -> None:
    """Calls and their cost on both sides, one thread that calls in a loop."""
    from batch_inference import ModelHost
    from benchmarks.models import ProfiledEcho

    near, far = two_cores()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worker"
        host = ModelHost(ProfiledEcho)(str(path))
        host.start()
        try:
            with pinned({os.getpid(): near, **dict.fromkeys(processes(host), far)}):
                x = request(1, TINY)
                for _ in range(200):
                    host.predict(x)
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(CALLS):
                    host.predict(x)
                profile.disable()
            host.predict(np.zeros((1, 1), np.float32))
            print_stats("the caller's side: predict in one thread", pstats.Stats(profile), CALLS)
            print_stats("the worker's side", pstats.Stats(str(path)), CALLS + 200)
            asynchronous = cProfile.Profile()

            async def loop() -> None:
                for _ in range(200):
                    await host.apredict(x)
                asynchronous.enable()
                for _ in range(CALLS // 64 + 1):
                    await asyncio.gather(*(host.apredict(x) for _ in range(64)))
                asynchronous.disable()

            asyncio.run(loop())
            print_stats("the caller's side: 64 asyncio tasks", pstats.Stats(asynchronous), (CALLS // 64 + 1) * 64)
        finally:
            host.stop()


def print_samples(title: str, raw: str) -> None:
    """Shares of the sampled lines, by the innermost Python frame."""
    own: collections.Counter[str] = collections.Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():  # the tool's own messages stand between
            own[stack.rpartition(";")[2]] += int(count)
    total = sum(own.values())
    print(f"\n{title} (py-spy, {total} samples)")
    for place, found in own.most_common(TOP):
        print(f"{100 * found / max(1, total):6.1f} %  {place}")


def attached(command: list[str], seconds: float) -> str:
    """What a tool attached to a process for a while says on stdout and stderr."""
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if command[0] == "strace":  # it watches until it is interrupted
        time.sleep(seconds)
        tool.send_signal(signal.SIGINT)
    return tool.communicate(timeout=seconds + 60)[0]


def sampled(seconds: float) -> None:
    near, far = two_cores()
    tools: list[list[str]] = []
    if shutil.which("py-spy"):
        length = str(max(1, round(seconds)))
        tools.append(["py-spy", "record", "--nonblocking", "-r", "400", "-d", length, "-f", "raw", "-o", "/dev/stdout"])
    if shutil.which("strace"):
        tools.append(["strace", "-c", "-f"])
    if not tools:
        log("  neither py-spy nor strace here: no samples, no system calls")
    with started_host() as (target, pids), pinned({os.getpid(): near, **dict.fromkeys(pids, far)}):
        for how, callers in ((load.threads, 8), (load.tasks, 64)):
            for tool in tools:
                for pid in (os.getpid(), *pids):
                    _under_load(target, how, callers, seconds, [*tool, "-p", str(pid)], pid)


def _under_load(
    target: load.Target,
    how: Callable[..., load.Load],
    callers: int,
    seconds: float,
    command: list[str],
    pid: int,
) -> None:
    found: list[str] = []
    watcher = threading.Thread(target=lambda: found.append(attached(command, seconds)))
    watcher.start()
    done = how(target, load.Plan(callers, echo(TINY), seconds + 1.5, 0.3))
    watcher.join()
    who = "callers" if pid == os.getpid() else f"process {pid} (worker or supervisor)"
    title = f"{who}, {callers} {how.__name__}, {done.rate:,.0f}/s while watched"
    if command[0] == "strace":
        print(f"\n{title} (strace -c)\n{found[0]}")
    else:
        print_samples(title, found[0])


def run(options: Options) -> list[Row]:
    counted()
    sampled(max(2.0, options.window))
    return []

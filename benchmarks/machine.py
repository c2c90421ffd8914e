"""Processes and cores: pinning, CPU time, memory. Linux only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator


def threads_of(pid: int) -> list[int]:
    """Thread ids of a process; empty if it is gone."""
    try:
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def pin(pid: int, cores: Iterable[int]) -> None:
    """Every thread a process has now; threads started later inherit it from the one that starts them."""
    wanted = set(cores)
    for tid in threads_of(pid):
        with contextlib.suppress(OSError):  # ended meanwhile
            os.sched_setaffinity(tid, wanted)


@contextlib.contextmanager
def pinned(placement: dict[int, int]) -> Iterator[None]:
    """Holds each process (pid -> core) on its core for the time of the block."""
    before = {pid: os.sched_getaffinity(pid) for pid in placement}
    for pid, core in placement.items():
        pin(pid, {core})
    try:
        yield
    finally:
        for pid, cores in before.items():
            pin(pid, cores)


def two_cores() -> tuple[int, int]:
    """The core for callers and the core for the worker: one and the same where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[min(1, len(cores) - 1)]


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The name, in parentheses, may hold spaces: read on from its end.
        return int(stat.read().rpartition(b")")[2].split()[1])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, ended ones included; 0 if it is gone."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2) / 1e9
    except OSError:
        return 0.0


def busy_seconds() -> float:
    """Core seconds this machine has been busy, whoever it was (10 ms ticks)."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    idle, waiting = ticks[3], ticks[4]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU used by some processes, and by everyone else beside them, from its making to `stop`."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._before = self._read()
        self.own = self.foreign = self.seconds = 0.0
        """CPU seconds of the processes; cores busy with anything else; wall-clock seconds."""

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), busy_seconds(), sum(map(cpu_seconds, self._pids))

    def stop(self) -> Meter:
        now = self._read()
        self.seconds, busy, self.own = (after - before for after, before in zip(now, self._before, strict=True))
        self.foreign = max(0.0, (busy - self.own) / self.seconds)
        return self


def tagged(tag: str) -> tuple[int, ...]:
    """Pids of all processes that were started with `tag` (NAME=VALUE) in their environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environ:
            if tag.encode() in environ.read().split(b"\0"):
                found.append(int(entry))
    return tuple(sorted(found))


def proportional(pid: int) -> float:
    """Memory of a process in MiB, shared pages divided among those that share them; 0 if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next((int(line.split()[1]) / 1024 for line in rollup if line.startswith("Pss:")), 0.0)
    return 0.0


def resident(pid: int) -> tuple[float, float]:
    """(resident, private) memory of a process in MiB; private is what would be free again if it ended."""
    total = private = 0
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        for line in rollup:
            if line.startswith("Rss:"):
                total = int(line.split()[1])
            elif line.startswith(("Private_Clean:", "Private_Dirty:")):
                private += int(line.split()[1])
    return total / 1024, private / 1024

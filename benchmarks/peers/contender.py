"""A peer at work on one workload: the processes of `serve`, placed on cores, stopped while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.machine import pin, proportional, tagged, two_cores
from benchmarks.measure import Round, percentile
from benchmarks.peers.environments import CACHE, ROOT, path_of_benchmarks, python_of
from benchmarks.peers.roster import HERE, Peer
from benchmarks.workloads import WORKLOADS

READY, ANSWER = 120.0, 20.0
"""Seconds that a start and an answer after the end of a window may take."""
_numbers = count()


class FailedError(Exception):
    """A contender that did not start or did not answer."""


class Served:
    """One process of `serve`."""

    def __init__(self, command: Iterable[str], environment: dict[str, str], log: Any) -> None:
        self.process = subprocess.Popen(
            tuple(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd=tempfile.gettempdir(),
            # Ctrl-C is ours alone. A server's processes share a session; with one each, Linux (sched_autogroup) would
            # have those on one core change places far more often.
            preexec_fn=os.setpgrp,
        )
        self._read = b""

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout
        end = time.monotonic() + timeout
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise FailedError(f"no answer within {timeout:.0f} s")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                raise FailedError("it ended")
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        if "fatal" in found:
            raise FailedError(found["fatal"])
        return found


class Contender:
    """Started by its making; to be used once `ready` has returned."""

    def __init__(
        self, peer: Peer, workload: str, burn: int, processes: int = 1, workers: int = 1, spread: bool = False
    ) -> None:
        """`spread`: the callers may use every core, as in some workloads."""
        self.name = peer.name
        self._peer, self._workload, self._processes = peer, workload, processes
        self._spread = spread or WORKLOADS[workload].spread or peer.where == HERE
        number = next(_numbers)
        self._tag = f"BENCH_TAG={os.getpid()}.{number}"
        handle, self._counts = tempfile.mkstemp(prefix="bench-counts-")
        os.close(handle)
        logs = CACHE / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{peer.adapter}.{workload}.log"
        with contextlib.suppress(FileNotFoundError):
            Path(self.log).unlink()
        self._environment = {
            **os.environ,
            "PYTHONPATH": path_of_benchmarks() if peer.environment else str(ROOT),
            "BENCH_TAG": self._tag.partition("=")[2],
            "BENCH_COUNTS": self._counts,
            "BENCH_BURN": str(burn),
            "BENCH_WAIT": str(peer.wait),
            "BENCH_WORKLOAD": workload,
            "BENCH_SHARED": "yes" if processes > 1 else "",
            "BENCH_WORKERS": str(workers),
        }
        self._served = [self._serve()]

    def _serve(self, *address: str) -> Served:
        command = (python_of(self._peer), "-m", "benchmarks.peers.serve", self._peer.adapter, self._workload, *address)
        with open(self.log, "ab") as log:
            return Served(command, self._environment, log)

    def ready(self) -> None:
        """Waits for the model, then for the other client processes.

        Raises:
            FailedError: it did not start; its log says more.
        """
        address = self._served[0].receive(READY)["ready"]
        self._served += [self._serve(address) for _ in range(self._processes - 1)]
        for served in self._served[1:]:
            served.receive(READY)

    def pids(self) -> tuple[int, ...]:
        return tagged(self._tag)

    def place(self, pids: Iterable[int]) -> None:
        """Callers on the first core, the model on the second; both, where they are one process."""
        near, far = two_cores()
        callers = {near, far} if self._spread else {near}
        clients = {served.process.pid for served in self._served}
        for pid in pids:
            pin(pid, callers if pid in clients else {far})

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def cell(self, number: int, callers: int, window: float, warm: float) -> Round:
        """One window with so many callers; the others' processes are stopped meanwhile.

        Raises:
            FailedError: no answer; the contender is of no further use.
        """
        self.signal(signal.SIGCONT)
        pids = self.pids()
        self.place(pids)
        asked = []
        for index, served in enumerate(self._served):
            share = callers // self._processes + (index < callers % self._processes)
            if share:
                served.send({"callers": share, "first": index * 16, "window": window, "warm": warm, "pids": pids})
                asked.append(served)
        found = [served.receive(warm + window + ANSWER) for served in asked]
        memory = sum(map(proportional, pids))
        self.signal(signal.SIGSTOP)
        return merged(number, found, memory)

    def leave(self) -> None:
        """Asks its processes to end."""
        self.signal(signal.SIGCONT)
        for served in self._served:
            with contextlib.suppress(OSError):
                served.process.stdin.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """Returns when its processes have ended, by themselves or not."""
        self.leave()
        end = time.monotonic() + 4
        while self.pids() and time.monotonic() < end:
            for served in self._served:
                served.process.poll()
            time.sleep(0.05)
        self.signal(signal.SIGKILL)  # only what carries our tag
        for served in self._served:
            served.process.wait()
            served.process.stdout.close()  # type: ignore[union-attr]
        os.unlink(self._counts)


def merged(number: int, found: list[dict[str, Any]], memory: float) -> Round:
    """Answers of the client processes as one; CPU time and batches are everybody's already in the first."""
    latencies = [latency for one in found for latency in one["latencies"]]
    rate = sum(len(one["latencies"]) / one["seconds"] for one in found)
    errors = [error for one in found for error in one["errors"]]
    first = found[0]
    return Round(
        number=number,
        rate=rate,
        p50=percentile(latencies, 0.5) if latencies else 0.0,
        p99=percentile(latencies, 0.99) if latencies else 0.0,
        cpu=first["cpu"] / first["seconds"] / rate if rate else 0.0,
        batch=first["rows"] / first["batches"] if first["batches"] else 0.0,
        memory=memory,
        foreign=first["foreign"],
        faults=sum(one["wrong"] + one["missing"] + len(one["errors"]) for one in found),
        error=errors[0] if errors else "",
    )

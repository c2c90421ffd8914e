"""The least Python that brings requests to a model in another process and back, called from threads.

A slot of shared memory and a pipe for each caller, a pipe of slot numbers to each worker, which runs what waits. There
is no policy, no growth, no fault, one shape, one array: it can serve nobody, and shows what this machine allows.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.peers.adapters import base
from benchmarks.workloads import WORKLOADS

SLOTS, PROCESSES = 128, 8
RETURNING = {"b": 1e-3}
"""Seconds that the worker waits for as many requests as it answered last: its callers come back at once. Where they
do something else first, waiting for them gains nothing."""


class Slots:
    """Request and reply of each slot, as arrays in shared memory."""

    def __init__(self, workload: str, fd: int) -> None:
        work = WORKLOADS[workload].work
        each = [-(-4 * int(np.prod(shape)) // 64) * 64 for shape in (work.shape, work.answer)]
        os.truncate(fd, SLOTS * sum(each))
        memory = mmap.mmap(fd, SLOTS * sum(each))
        starts = range(0, len(memory), sum(each))
        self.requests = [np.ndarray(work.shape, np.float32, memory, start) for start in starts]
        self.replies = [np.ndarray(work.answer, np.float32, memory, start + each[0]) for start in starts]


def serve(workload: str, together: bool, memory: int, requests: int, *wakes: int) -> None:
    """The worker. Wakes the caller of each slot by the slot's pipe, or all of a batch `together` by the first."""
    slots, model = Slots(workload, memory), base.Model(workload)
    buffer = np.empty((base.MAX_BATCH, *WORKLOADS[workload].work.shape[1:]), np.float32)
    answered, wait = 0, RETURNING.get(workload, 0.0)
    while waiting := os.read(requests, base.MAX_BATCH):
        end = time.monotonic() + wait
        while wait and len(waiting) < answered and (left := end - time.monotonic()) > 0:
            if select.select([requests], [], [], left)[0]:
                waiting += os.read(requests, base.MAX_BATCH - len(waiting))
        batch = buffer[: len(waiting)]
        np.concatenate([slots.requests[slot] for slot in waiting], out=batch)
        result = model.predict_batch(batch)
        for row, slot in enumerate(waiting):
            slots.replies[slot][:] = result[row : row + 1]
            if not together:
                os.write(wakes[slot], b"1")
        if together:
            os.write(wakes[0], waiting)
        answered = len(waiting)


class Adapter(base.Adapter):
    def start(self) -> None:
        if not self.address:
            self.begin(together=False)
            self.predict(base.row(self.workload))
            parts, write = os.pipe()
            os.write(write, bytes(range(PROCESSES)))
            fds = (self._memory, parts, *self.wakes, *self.requests)
            self.address = ",".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in fds)
        else:
            self._memory, parts, *pipes = (os.open(path, os.O_RDWR) for path in self.address.split(","))
            self.wakes, self.requests = pipes[:SLOTS], pipes[SLOTS:]
            self.slots = Slots(self.workload, self._memory)
        if os.environ["BENCH_SHARED"]:
            (part,) = os.read(parts, 1)
            self.free = list(range(part, SLOTS, PROCESSES))

    def begin(self, together: bool) -> None:
        self._memory = os.memfd_create("bare")
        self.slots = Slots(self.workload, self._memory)
        pipes = [os.pipe() for _ in range(1 if together else SLOTS)]
        self.wakes, writing = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
        self.requests, self._workers = [], []
        for _ in range(int(os.environ["BENCH_WORKERS"])):
            reading, requests = os.pipe()
            fds = (self._memory, reading, *writing)
            call = f"bare.serve({self.workload!r}, {together}, {', '.join(map(str, fds))})"
            code = f"from benchmarks.peers.adapters import bare; {call}"
            self._workers.append(subprocess.Popen((sys.executable, "-c", code), pass_fds=fds))
            os.close(reading)
            self.requests.append(requests)
        for fd in writing:
            os.close(fd)
        self.free = list(range(SLOTS))

    def predict(self, x: Any) -> Any:
        slot = self.free.pop()
        self.slots.requests[slot][:] = x
        os.write(self.requests[slot // PROCESSES % len(self.requests)], bytes((slot,)))
        os.read(self.wakes[slot], 1)
        answer = self.slots.replies[slot].copy()
        self.free.append(slot)
        return answer

    def stop(self) -> None:
        for requests in self.requests:
            os.close(requests)

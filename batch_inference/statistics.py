"""What a host counts, as values, and the board on which its processes count it.

The *board* is one shared segment that every process of a host maps. Each cell (8 bytes) has one writing process, so
counting needs no lock and costs no message, and reading works while a worker is busy or hangs. Each process has rows
of its own:

    row 0                      supervisor: per worker its pid, state and number of restarts; and the limits in force,
                               written by whoever configures the host
    rows 1 .. MAX_WORKERS      workers: counters, and histograms of waiting and running times
    then one row               what clients counted that have left
    then MAX_CLIENTS rows      clients: outstanding requests per worker, and a histogram of the time a reply takes back
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Limits = dict[str, Any]
"""max_batch_size, max_delay and max_pending, which may change while the host runs; or some of them."""

MAX_WORKERS = 64
MAX_CLIENTS = 1024
ROW = 512  # cells
BOARD_SIZE = (2 + MAX_WORKERS + MAX_CLIENTS) * ROW * 8

WORKER_PID, WORKER_STATE, WORKER_RESTARTS, WORKER_CELLS = 0, 1, 2, 4
MAX_BATCH_SIZE, MAX_DELAY, MAX_PENDING = range(MAX_WORKERS * WORKER_CELLS + 1, MAX_WORKERS * WORKER_CELLS + 4)
CLIENT_ROWS = MAX_WORKERS * WORKER_CELLS  # in row 0: one more than the highest row that a client has had
REQUESTS, FAILED, BATCHES, SIZE, WAITING, RUNNING = 0, 1, 2, 3, 16, 16 + 128
CUT_FULL, CUT_NOTHING, CUT_MAX_DELAY, CUT_DEADLINE, CUT_KIND, OWN, PADDED = range(4, 11)
BEATS, SIZE_LIMIT = 11, 12  # signs of life; and the most that its memory has been found to hold (0: no limit is known)
OUTSTANDING, TRANSPORT = 0, MAX_WORKERS
BUCKETS = 128
DEPARTED_ROW = 1 + MAX_WORKERS

STATES = ("stopped", "starting", "ready", "restarting", "failed")
STOPPED, STARTING, READY, RESTARTING, FAILED_STATE = range(5)


def write_limits(cells: memoryview[int], limits: Limits) -> None:
    """Puts limits in force on the board (row 0), where workers and clients read them for each batch or request."""
    if "max_batch_size" in limits:
        cells[MAX_BATCH_SIZE] = limits["max_batch_size"]
    if "max_pending" in limits:
        cells[MAX_PENDING] = limits["max_pending"]
    if "max_delay" in limits:
        cells[MAX_DELAY] = 0 if limits["max_delay"] is None else 1 + int(limits["max_delay"] * 1e9)


def max_delay_of(cells: Sequence[int]) -> float | None:
    """The max_delay in force, in seconds."""
    return (cells[MAX_DELAY] - 1) / 1e9 if cells[MAX_DELAY] else None


def worker_row(index: int) -> int:
    """The board index of the first cell of worker `index`."""
    return (1 + index) * ROW


def client_row(row: int) -> int:
    """The board index of the first cell of the client with row number `row`."""
    return (DEPARTED_ROW + 1 + row) * ROW


def outstanding(cells: Sequence[int], index: int) -> int:
    """How many requests worker `index` has, of all clients."""
    start = client_row(0) + OUTSTANDING + index
    return sum(cells[start : start + cells[CLIENT_ROWS] * ROW : ROW])


def bucket(nanoseconds: int) -> int:
    """The histogram bucket of a duration: four per power of two, from 1 us to about an hour."""
    units = nanoseconds >> 10
    if units < 4:
        return units if units > 0 else 0
    exponent = units.bit_length() - 3
    return min(BUCKETS - 1, 4 * exponent + 4 + (units >> exponent & 3))


def bucket_bounds(index: int) -> tuple[int, int]:
    """The durations in ns, from and below, that `bucket` puts into bucket `index`."""
    if index < 4:
        return index << 10, (index + 1) << 10
    exponent, part = index // 4 - 1, index % 4
    return (4 + part) << exponent + 10, (5 + part) << exponent + 10


@dataclass(frozen=True)
class Percentiles:
    """Seconds that half, nine tenths and 99 of 100 requests stayed below, exact to an eighth; 0 before the first."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, counts: Sequence[int]) -> Percentiles:
        return cls(*(_percentile(counts, share) for share in (0.5, 0.9, 0.99)))


def _percentile(counts: Sequence[int], share: float) -> float:
    wanted, seen = share * sum(counts), 0
    for index, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            low, high = bucket_bounds(index)
            return (low + high) / 2e9
    return 0.0


@dataclass(frozen=True)
class Cuts:
    """How many batches were cut, by the reason for not waiting longer."""

    full: int = 0
    """max_batch_size was reached."""
    nothing_to_wait_for: int = 0
    """The policy expected nothing to gain from waiting."""
    max_delay: int = 0
    """The oldest request had waited `max_delay`."""
    deadline: int = 0
    """A request was close to its deadline."""
    kind: int = 0
    """Requests of another kind were waiting too."""


@dataclass(frozen=True)
class WorkerStatistics:
    """One worker. `memory` is its resident memory in bytes, 0 when it is not running. `size_limit` is the largest size
    of a batch that is still tried, learned from batches for which memory ran out; None if none ever did."""

    pid: int
    state: str
    restarts: int
    batches: int
    memory: int
    size_limit: int | None = None


@dataclass(frozen=True)
class Statistics:
    """What a host did since it started, over all its processes. Durations are seconds, memory is bytes."""

    state: str = "stopped"
    """"ready" while at least one worker is; else "starting", "restarting", "failed" or "stopped"."""
    requests: int = 0
    """Requests that were answered, failed ones included."""
    failed: int = 0
    """Requests that were answered with an error."""
    batches: int = 0
    """Calls of predict_batch."""
    mean_batch: float = 0.0
    """Mean size of a batch: rows, for the tensor batchers."""
    cuts: Cuts = field(default_factory=Cuts)
    """Why batches were cut when they were."""
    padding: float = 0.0
    """The share of what the model was given that was padding, for the batchers that pad."""
    pending: int = 0
    """Requests that are waiting or running now, over all client processes."""
    waiting: Percentiles = field(default_factory=Percentiles)
    """From the call until the batch of the request starts."""
    running: Percentiles = field(default_factory=Percentiles)
    """From the start of a batch until its outputs are there: collating, the model, splitting."""
    transport: Percentiles = field(default_factory=Percentiles)
    """From the writing of a reply until its caller has woken up."""
    memory: int = 0
    """Resident memory of the workers and of the supervisor."""
    workers: tuple[WorkerStatistics, ...] = ()


def read_board(cells: Sequence[int], supervisor_pid: int) -> Statistics:
    """The statistics of a host. Workers that were replaced by others count in the sums, and are not listed."""
    records, waiting, running = [], [0] * BUCKETS, [0] * BUCKETS
    totals = [0] * (PADDED + 1)
    for index in range(MAX_WORKERS):
        row, at = worker_row(index), index * WORKER_CELLS
        if not cells[at + WORKER_STATE] and not cells[row + REQUESTS]:
            continue
        totals = [total + cells[row + cell] for cell, total in enumerate(totals)]
        waiting = [a + b for a, b in zip(waiting, cells[row + WAITING : row + WAITING + BUCKETS])]
        running = [a + b for a, b in zip(running, cells[row + RUNNING : row + RUNNING + BUCKETS])]
        if not cells[at + WORKER_STATE]:
            continue
        pid = cells[at + WORKER_PID]
        records.append(
            WorkerStatistics(
                pid=pid,
                state=STATES[cells[at + WORKER_STATE]],
                restarts=cells[at + WORKER_RESTARTS],
                batches=cells[row + BATCHES],
                memory=_resident_memory(pid),
                size_limit=cells[row + SIZE_LIMIT] or None,
            )
        )
    transport, pending = [0] * BUCKETS, 0
    for number in range(-1, cells[CLIENT_ROWS]):  # -1: those that have left
        row = client_row(number)
        pending += sum(cells[row + OUTSTANDING : row + OUTSTANDING + MAX_WORKERS])
        transport = [a + b for a, b in zip(transport, cells[row + TRANSPORT : row + TRANSPORT + BUCKETS])]
    return Statistics(
        state=_host_state([record.state for record in records]),
        requests=totals[REQUESTS],
        failed=totals[FAILED],
        batches=totals[BATCHES],
        cuts=Cuts(*totals[CUT_FULL : CUT_KIND + 1]),
        padding=1 - totals[OWN] / totals[PADDED] if totals[PADDED] else 0.0,
        mean_batch=totals[SIZE] / totals[BATCHES] if totals[BATCHES] else 0.0,
        pending=pending,
        waiting=Percentiles.of(waiting),
        running=Percentiles.of(running),
        transport=Percentiles.of(transport),
        memory=sum(record.memory for record in records) + _resident_memory(supervisor_pid),
        workers=tuple(records),
    )


def _host_state(states: list[str]) -> str:
    for state in ("ready", "restarting", "starting", "failed"):
        if state in states:
            return state
    return "stopped"


def _resident_memory(pid: int) -> int:
    if not pid:
        return 0
    import psutil

    if pid == os.getpid():
        return 0  # a worker that is a thread of this process
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0

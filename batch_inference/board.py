"""The board on which the processes of a host count, and where its limits stand.

It is one shared segment that every process of the host maps. Each cell (8 bytes) has one writing process, so
counting needs no lock and costs no message, and reading works while a worker is busy or hangs. Each process has rows
of its own:

    row 0                      supervisor: per worker its pid, state and number of restarts; and the limits in force,
                               written by whoever configures the host
    rows 1 .. MAX_WORKERS      workers: counters, and histograms of waiting and running times
    then one row               what clients counted that have left
    then MAX_CLIENTS rows      clients: outstanding requests per worker, and a histogram of the time a reply takes back
"""

from __future__ import annotations

from collections.abc import Sequence
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


def bucket_bounds(index: int) -> tuple[int, int]:
    """The durations in ns, from and below, that `counting.bucket` puts into bucket `index`."""
    if index < 4:
        return index << 10, (index + 1) << 10
    exponent, part = index // 4 - 1, index % 4
    return (4 + part) << exponent + 10, (5 + part) << exponent + 10


def any_ready(cells: Sequence[int]) -> bool:
    """Whether the supervisor says that a worker is ready."""
    return READY in cells[WORKER_STATE : MAX_WORKERS * WORKER_CELLS : WORKER_CELLS]

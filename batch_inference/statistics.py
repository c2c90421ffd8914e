"""What a host counts, as values, read from its board."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from batch_inference import board


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
            low, high = board.bucket_bounds(index)
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
    records, waiting, running = [], [0] * board.BUCKETS, [0] * board.BUCKETS
    totals = [0] * (board.PADDED + 1)
    for index in range(board.MAX_WORKERS):
        row, at = board.worker_row(index), index * board.WORKER_CELLS
        if not cells[at + board.WORKER_STATE] and not cells[row + board.REQUESTS]:
            continue
        totals = [total + cells[row + cell] for cell, total in enumerate(totals)]
        waiting = [a + b for a, b in zip(waiting, cells[row + board.WAITING : row + board.WAITING + board.BUCKETS])]
        running = [a + b for a, b in zip(running, cells[row + board.RUNNING : row + board.RUNNING + board.BUCKETS])]
        if not cells[at + board.WORKER_STATE]:
            continue
        pid = cells[at + board.WORKER_PID]
        records.append(
            WorkerStatistics(
                pid=pid,
                state=board.STATES[cells[at + board.WORKER_STATE]],
                restarts=cells[at + board.WORKER_RESTARTS],
                batches=cells[row + board.BATCHES],
                memory=_resident_memory(pid),
                size_limit=cells[row + board.SIZE_LIMIT] or None,
            )
        )
    transport, pending = [0] * board.BUCKETS, 0
    for number in range(-1, cells[board.CLIENT_ROWS]):  # -1: those that have left
        row = board.client_row(number)
        pending += sum(cells[row + board.OUTSTANDING : row + board.OUTSTANDING + board.MAX_WORKERS])
        start = row + board.TRANSPORT
        transport = [a + b for a, b in zip(transport, cells[start : start + board.BUCKETS])]
    return Statistics(
        state=_host_state([record.state for record in records]),
        requests=totals[board.REQUESTS],
        failed=totals[board.FAILED],
        batches=totals[board.BATCHES],
        cuts=Cuts(*totals[board.CUT_FULL : board.CUT_KIND + 1]),
        padding=1 - totals[board.OWN] / totals[board.PADDED] if totals[board.PADDED] else 0.0,
        mean_batch=totals[board.SIZE] / totals[board.BATCHES] if totals[board.BATCHES] else 0.0,
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

"""What callers see of each fault at each place: what the tests cause for real, and what docs/faults.md shows."""

from __future__ import annotations

from typing import NamedTuple

RAISE = "raises an exception"
UNPICKLABLE = "raises one that cannot be pickled"
EXIT = "`os._exit`"
KILL = "SIGKILL"
SEGFAULT = "SIGSEGV"
STOP = "SIGSTOP, or hangs"
CALLER_GONE = "the caller is killed"

ANSWERED = "answered"
OWN_ERROR = "its exception"
MODEL_ERROR = "`ModelError`"
DIED = "`WorkerDiedError`"
NOT_LOADED = "`ModelLoadError`"
NOBODY = "nobody asks"
ENDS = "all ends"


class Outcome(NamedTuple):
    """What becomes of the request to blame, of those in its batch, and of those that wait meanwhile."""

    culprit: str
    mates: str = ANSWERED
    waiting: str = ANSWERED


OF_A_REQUEST = {
    RAISE: Outcome(OWN_ERROR),
    UNPICKLABLE: Outcome(MODEL_ERROR),
    EXIT: Outcome(DIED),
    KILL: Outcome(DIED),
    SEGFAULT: Outcome(DIED),
    STOP: Outcome(DIED),
    CALLER_GONE: Outcome(NOBODY),
}

LOADING, LOADING_AGAIN, IDLE = "loading", "loading again", "idle"
TAKING, DECODING, COLLATING, RUNNING, SCATTERING, ENCODING = (
    "taking",
    "decoding",
    "collating",
    "running",
    "scattering",
    "encoding",
)

WORKER: dict[str, dict[str, Outcome]] = {
    # The culprit is the one who starts the host.
    LOADING: dict.fromkeys((RAISE, UNPICKLABLE, EXIT, KILL, SEGFAULT, STOP), Outcome(NOT_LOADED))
    | {CALLER_GONE: Outcome(ENDS)},
    # No request is to blame: all that were sent before the worker died wait for the load after this one.
    LOADING_AGAIN: dict.fromkeys(OF_A_REQUEST, Outcome(ANSWERED)) | {CALLER_GONE: Outcome(NOBODY)},
    TAKING: OF_A_REQUEST,
    DECODING: OF_A_REQUEST,
    COLLATING: OF_A_REQUEST,
    RUNNING: OF_A_REQUEST,
    SCATTERING: OF_A_REQUEST,
    ENCODING: OF_A_REQUEST,
    # A thread of the model strikes when all have been answered. Those who ask then are answered.
    IDLE: dict.fromkeys(OF_A_REQUEST, Outcome(ANSWERED)) | {CALLER_GONE: Outcome(NOBODY)},
}

JOINING, BATCH_RUNS, WORKER_RESTARTS = "a client joins", "a batch runs", "a worker restarts"
SUPERVISOR_KILLED, SUPERVISOR_TERMINATED, SUPERVISOR_STOPPED = "SIGKILL", "SIGTERM", "SIGSTOP, later SIGCONT"

SUPERVISOR: dict[str, dict[str, str]] = {
    place: dict.fromkeys((SUPERVISOR_KILLED, SUPERVISOR_TERMINATED, SUPERVISOR_STOPPED), ANSWERED)
    for place in (JOINING, IDLE, BATCH_RUNS, WORKER_RESTARTS)
}


def markdown(table: dict[str, dict[str, str]]) -> str:
    """A table with a row for each place and a column for each fault."""
    faults = list(next(iter(table.values())))
    lines = [["while", *faults], ["---"] * (len(faults) + 1)]
    lines += [[place, *[row[fault] for fault in faults]] for place, row in table.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def culprits() -> dict[str, dict[str, str]]:
    """The part of the table of workers that differs from cell to cell."""
    return {place: {fault: outcome.culprit for fault, outcome in row.items()} for place, row in WORKER.items()}

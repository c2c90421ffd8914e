"""What adapters have in common."""

from __future__ import annotations

import os
import socket
from typing import Any

from benchmarks.workloads import MAX_BATCH, WORKLOADS, Model, Tokens

__all__ = ["MAX_BATCH", "Adapter", "Model", "free_port", "pairs", "row", "wait_ms"]


class Adapter:
    """A peer in its callers' process: `start`, then `predict` from threads or `apredict` from tasks, then `stop`.

    Args:
        workload: the name of the only workload that will come.
        address: of a model that another process started; empty: start it.
    """

    how = "threads"

    def __init__(self, workload: str, address: str = "") -> None:
        self.workload, self.address = workload, address

    def start(self) -> Any:
        """For callers that are tasks, a coroutine."""

    def predict(self, x: Any) -> Any: ...

    async def apredict(self, x: Any) -> Any: ...

    def stop(self) -> None: ...


def pairs(workload: str) -> bool:
    """Whether requests are pairs of token ids and mask."""
    return isinstance(WORKLOADS[workload].work, Tokens)


def row(workload: str) -> Any:
    """A request."""
    return next(WORKLOADS[workload].work.stream(1))[0]


def wait_ms() -> float:
    return float(os.environ["BENCH_WAIT"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

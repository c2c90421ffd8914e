"""This library, called from threads."""

from __future__ import annotations

import os
from typing import Any

from batch_inference import ModelHost, connect
from batch_inference.batcher import Batcher, BucketSeqBatcher, ConcatBatcher
from benchmarks.peers.adapters import base
from benchmarks.workloads import BUCKETS


def batcher(workload: str) -> Batcher:
    return BucketSeqBatcher(padding_tokens=[0, 0], buckets=list(BUCKETS)) if base.pairs(workload) else ConcatBatcher()


class Adapter(base.Adapter):
    def start(self) -> None:
        if self.address:
            self.host = connect(self.address)  # started
        else:
            # Only who is to be joined has a name, and a lock file with it.
            named = {"name": f"bench-{os.getpid()}"} if os.environ["BENCH_SHARED"] else {}
            self.address = named.get("name", "")
            workers = int(os.environ["BENCH_WORKERS"])
            options: dict[str, Any] = {"batcher": batcher(self.workload), "max_batch_size": base.MAX_BATCH}
            self.host = ModelHost(base.Model, num_workers=workers, **options, **named)(self.workload)
            self.host.start()
        self.predict = self._pair if base.pairs(self.workload) else self.host.predict  # type: ignore[method-assign]

    def _pair(self, x: Any) -> Any:
        return self.host.predict(*x)

    def stop(self) -> None:
        self.host.stop()

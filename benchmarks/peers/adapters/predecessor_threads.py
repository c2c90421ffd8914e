"""batch-inference 1.0 from the package index, the model in a thread of this process, called from threads."""

from __future__ import annotations

from typing import Any

from batch_inference import ModelHost
from batch_inference.batcher.bucket_seq_batcher import BucketSeqBatcher
from batch_inference.batcher.concat_batcher import ConcatBatcher
from benchmarks.peers.adapters import base
from benchmarks.workloads import BUCKETS


def options(workload: str) -> dict[str, Any]:
    batcher = (
        BucketSeqBatcher(padding_tokens=[0, 0], buckets=list(BUCKETS)) if base.pairs(workload) else ConcatBatcher()
    )
    return {"batcher": batcher, "max_batch_size": base.MAX_BATCH, "wait_ms": int(base.wait_ms())}


class Adapter(base.Adapter):
    def start(self) -> None:
        self._host = ModelHost(model_obj=base.Model(self.workload), **options(self.workload))
        self._host.start()
        self.predict = self._pair if base.pairs(self.workload) else self._host.predict  # type: ignore[method-assign]

    def _pair(self, x: Any) -> Any:
        return self._host.predict(*x)

    def stop(self) -> None:
        self._host.stop()

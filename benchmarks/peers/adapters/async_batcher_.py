"""async-batcher: tasks, the model in a thread of an executor."""

from __future__ import annotations

from typing import Any

from async_batcher.batcher import AsyncBatcher

from benchmarks.peers.adapters import base


class Batcher(AsyncBatcher):  # type: ignore[misc]
    def __init__(self, model: base.Model, **options: Any) -> None:
        super().__init__(**options)
        self._model = model

    def process_batch(self, batch: Any) -> Any:
        return self._model.predict_list(batch)


class Adapter(base.Adapter):
    how = "tasks"

    async def start(self) -> None:
        latency = base.wait_ms() / 1000
        batcher = Batcher(base.Model(self.workload), max_batch_size=base.MAX_BATCH, max_queue_time=latency)
        self.apredict = batcher.process  # type: ignore[method-assign]

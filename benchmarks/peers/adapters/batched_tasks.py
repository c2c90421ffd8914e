"""mixedbread's batched, called from tasks; it runs the model in a thread."""

from __future__ import annotations

from typing import Any

import batched

from benchmarks.peers.adapters import base


class Adapter(base.Adapter):
    how = "tasks"

    async def start(self) -> None:
        model = base.Model(self.workload)

        @batched.aio.dynamically(batch_size=base.MAX_BATCH, timeout_ms=base.wait_ms())
        def predict(batch: Any) -> Any:
            return model.predict_list(batch)

        self.apredict = predict  # type: ignore[method-assign]

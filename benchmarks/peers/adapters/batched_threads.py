"""mixedbread's batched, called from threads."""

from __future__ import annotations

import batched

from benchmarks.peers.adapters import base


class Adapter(base.Adapter):
    def start(self) -> None:
        model = base.Model(self.workload)
        self.predict = batched.dynamically(  # type: ignore[method-assign]
            model.predict_list, batch_size=base.MAX_BATCH, timeout_ms=base.wait_ms()
        )

    def stop(self) -> None:
        self.predict.shutdown()  # type: ignore[attr-defined]

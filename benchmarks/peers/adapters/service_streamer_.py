"""service-streamer: a process behind two multiprocessing queues."""

from __future__ import annotations

from typing import Any

from service_streamer import ManagedModel, Streamer

from benchmarks.peers.adapters import base


class Managed(ManagedModel):
    def init_model(self, workload: str) -> None:
        self._model = base.Model(workload)

    def predict(self, batch: Any) -> Any:
        return self._model.predict_list(batch)


class Adapter(base.Adapter):
    def start(self) -> None:
        latency = base.wait_ms() / 1000
        arguments = (self.workload,)
        self._streamer = Streamer(Managed, base.MAX_BATCH, latency, worker_num=1, model_init_args=arguments)
        self._streamer._wait_for_worker_ready(60)

    def predict(self, x: Any) -> Any:
        return self._streamer.predict([x])[0]

    def stop(self) -> None:
        self._streamer.destroy_workers()

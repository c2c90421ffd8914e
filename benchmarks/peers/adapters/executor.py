"""concurrent.futures.ProcessPoolExecutor with one worker; no batching."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.peers.adapters import base

_model: base.Model


def load(workload: str) -> None:
    global _model
    _model = base.Model(workload)


def work(x: Any) -> Any:
    return _model.predict_list([x])[0]


class Adapter(base.Adapter):
    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=load, initargs=(self.workload,))
        self.predict(base.row(self.workload))

    def predict(self, x: Any) -> Any:
        return self._executor.submit(work, x).result()

    def stop(self) -> None:
        self._executor.shutdown(wait=False)

"""The model in the callers' process, one caller at a time."""

from __future__ import annotations

import threading
from typing import Any

from benchmarks.peers.adapters import base


class Adapter(base.Adapter):
    def start(self) -> None:
        self._model, self._lock = base.Model(self.workload), threading.Lock()

    def predict(self, x: Any) -> Any:
        with self._lock:
            return self._model.predict_list([x])[0]

"""No model and nobody to ask: what callers could do if answers cost nothing."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.adapters import base


class Adapter(base.Adapter):
    def start(self) -> None:
        self.address = "nowhere"

    def predict(self, x: Any) -> Any:
        return x * 2

"""BentoML, JSON with base64 over HTTP: its batchable API."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import bentoml

from benchmarks.peers.adapters import base, http, text


class Adapter(http.Adapter):
    path = "/predict"

    def encode(self, x: Any) -> bytes:
        return json.dumps({"x": [text.pack(x)]}).encode()

    def decode(self, body: bytes) -> Any:
        return text.unpack(json.loads(body)[0])


@bentoml.service(  # type: ignore[untyped-decorator]
    workers=1, traffic={"timeout": 30}, logging={"access": {"enabled": False}}, metrics={"enabled": False}
)
class Served:
    def __init__(self) -> None:
        self._model = base.Model(os.environ["BENCH_WORKLOAD"])

    # Its dispatcher has no delay to set: it learns one, within this bound.
    @bentoml.api(batchable=True, batch_dim=0, max_batch_size=base.MAX_BATCH, max_latency_ms=10000)  # type: ignore[untyped-decorator]
    def predict(self, x: list[str]) -> list[str]:
        return [text.pack(y) for y in self._model.predict_list([text.unpack(item) for item in x])]


if __name__ == "__main__":
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    command = os.path.join(os.path.dirname(sys.executable), "bentoml")
    served = "benchmarks.peers.adapters.bentoml_:Served"
    os.execv(command, [command, "serve", served, "--host", "127.0.0.1", "--port", sys.argv[1]])

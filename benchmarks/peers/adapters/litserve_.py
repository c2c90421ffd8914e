"""LitServe, JSON with base64 over HTTP."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import litserve
import numpy as np

from benchmarks.peers.adapters import base, http, text


class Adapter(http.Adapter):
    path = "/predict"

    def encode(self, x: Any) -> bytes:
        return json.dumps({"x": text.pack(x)}).encode()

    def decode(self, body: bytes) -> Any:
        return text.unpack(json.loads(body)["x"])


class Served(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: Any) -> None:
        self._model = base.Model(os.environ["BENCH_WORKLOAD"])

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # an annotation would be taken for a schema
        return text.unpack(request["x"])

    def batch(self, inputs: Any) -> Any:
        return np.concatenate(inputs)

    def predict(self, x: Any) -> Any:
        return self._model.predict_batch(x)

    def unbatch(self, output: Any) -> Any:
        return [output[index : index + 1] for index in range(len(output))]

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        return {"x": text.pack(output)}


if __name__ == "__main__":
    api = Served(max_batch_size=base.MAX_BATCH, batch_timeout=base.wait_ms() / 1000)
    served = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=30, disable_openapi_url=True)
    served.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="warning", generate_client_file=False
    )

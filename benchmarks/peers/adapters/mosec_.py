"""mosec, msgpack over HTTP."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgpack
import numpy as np
from mosec import Server, Worker
from mosec.mixin import MsgpackMixin

from benchmarks.peers.adapters import base, http


class Adapter(http.Adapter):
    kind = "application/msgpack"

    def encode(self, x: Any) -> bytes:
        packed: bytes = msgpack.packb({"d": x.data.cast("B"), "s": x.shape})
        return packed

    def decode(self, body: bytes) -> Any:
        found = msgpack.unpackb(body)
        return np.frombuffer(found["d"], np.float32).reshape(found["s"])


class Served(MsgpackMixin, Worker):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._model = base.Model(os.environ["BENCH_WORKLOAD"])

    def forward(self, data: Any) -> Any:
        requests = [np.frombuffer(item["d"], np.float32).reshape(item["s"]) for item in data]
        return [{"d": y.tobytes(), "s": y.shape} for y in self._model.predict_list(requests)]


if __name__ == "__main__":
    large, port = str(64 << 20), sys.argv[1]
    sys.argv = ["served", "--address", "127.0.0.1", "--port", port, "--timeout", "20000", "--max-request-size", large]
    sys.argv += ["--log-level", "warning"]
    server = Server()
    server.append_worker(Served, num=1, max_batch_size=base.MAX_BATCH, max_wait_time=int(base.wait_ms()))
    server.run()

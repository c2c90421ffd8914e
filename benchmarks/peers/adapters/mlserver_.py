"""MLServer, the V2 protocol over HTTP: JSON with base64."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput

from benchmarks.peers.adapters import base, http, text


def settings_of(port: str) -> Path:
    """The folder that the server on this port is set by."""
    return Path(tempfile.gettempdir()) / f"bench-mlserver-{port}"


class Adapter(http.Adapter):
    path = "/v2/models/served/infer"

    def encode(self, x: Any) -> bytes:
        sent = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [text.pack(x)]}
        return json.dumps({"inputs": [sent]}).encode()

    def decode(self, body: bytes) -> Any:
        return text.unpack(json.loads(body)["outputs"][0]["data"][0])

    def stop(self) -> None:
        shutil.rmtree(settings_of(self.address), ignore_errors=True)


class Served(MLModel):  # type: ignore[misc]
    async def load(self) -> bool:
        self._model = base.Model(os.environ["BENCH_WORKLOAD"])
        return True

    async def predict(self, payload: Any) -> Any:
        answers = self._model.predict_list([text.unpack(item) for item in payload.inputs[0].data])
        data = [text.pack(answer) for answer in answers]
        output = ResponseOutput(name="y", shape=[len(data), 1], datatype="BYTES", data=data)
        return InferenceResponse(model_name=self.name, outputs=[output])


if __name__ == "__main__":
    ports = {"http_port": int(sys.argv[1]), "grpc_port": base.free_port(), "metrics_port": base.free_port()}
    settings = {"host": "127.0.0.1", "parallel_workers": 1, "debug": False, **ports}
    model = {
        "name": "served",
        "implementation": "benchmarks.peers.adapters.mlserver_.Served",
        "max_batch_size": base.MAX_BATCH,
        "max_batch_time": base.wait_ms() / 1000,  # 0 would turn its batching off
    }
    folder = settings_of(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, content in (("settings", settings), ("model-settings", model)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    command = os.path.join(os.path.dirname(sys.executable), "mlserver")
    os.execv(command, [command, "start", str(folder)])

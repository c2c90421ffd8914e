"""TorchRL's inference server in a process of its own, a slot of shared memory for each caller."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.modules.inference_server import ProcessInferenceServer, ProcessSlotTransport

from benchmarks.peers.adapters import base
from benchmarks.workloads import WORKLOADS

CALLERS = 64


class Policy:
    def __init__(self, workload: str) -> None:
        self._model = base.Model(workload)

    def __call__(self, batch: Any) -> Any:
        return TensorDict({"y": torch.from_numpy(self._model.predict_batch(batch["x"].numpy()))}, batch.batch_size)


class Factory:
    def __init__(self, workload: str) -> None:
        self._workload = workload

    def __call__(self) -> Policy:
        return Policy(self._workload)


class Adapter(base.Adapter):
    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        work = WORKLOADS[self.workload].work
        shapes = ("x", base.row(self.workload).shape[1:]), ("y", work.answer[1:])
        specs = [TensorDict({name: torch.zeros(shape)}) for name, shape in shapes]
        transport = ProcessSlotTransport(*specs, num_slots=CALLERS, ctx=context)
        self._server = ProcessInferenceServer(
            policy_factory=Factory(self.workload),
            transport=transport,
            mp_context=context,
            max_batch_size=base.MAX_BATCH,
        )
        self._clients = [transport.client() for _ in range(CALLERS)]
        self._numbers, self._mine = itertools.count(), threading.local()
        self._server.start()
        for _ in range(8):  # a new process is slow at first
            self.predict(base.row(self.workload))

    def predict(self, x: Any) -> Any:
        client = getattr(self._mine, "client", None)
        if client is None:
            client = self._mine.client = self._clients[next(self._numbers) % CALLERS]
        return client(TensorDict({"x": torch.from_numpy(x[0])}))["y"].numpy()[None]

    def stop(self) -> None:
        self._server.shutdown()

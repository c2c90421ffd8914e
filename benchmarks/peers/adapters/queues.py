"""multiprocessing.Queue there, another one back, a thread that hands out the answers; no batching."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import threading
from typing import Any

from benchmarks.peers.adapters import base


def work(requests: Any, answers: Any, workload: str) -> None:
    model = base.Model(workload)
    while (item := requests.get()) is not None:
        number, x = item
        answers.put((number, model.predict_list([x])[0]))


class Adapter(base.Adapter):
    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, self._answers = context.Queue(), context.Queue()
        self._worker = context.Process(target=work, args=(self._requests, self._answers, self.workload), daemon=True)
        self._worker.start()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._collect, daemon=True).start()
        self.predict(base.row(self.workload))

    def _collect(self) -> None:
        while True:
            number, y = self._answers.get()
            self._waiting.pop(number).put(y)

    def predict(self, x: Any) -> Any:
        number, mine = next(self._numbers), queue.SimpleQueue[Any]()
        self._waiting[number] = mine
        self._requests.put((number, x))
        return mine.get()

    def stop(self) -> None:
        self._requests.put(None)
        self._worker.join(2)

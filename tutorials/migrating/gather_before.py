"""An asyncio application that gathers calls in threads, so that its loop goes on: no batching."""

import asyncio
import threading

from model import Scorer


class Service:
    def __init__(self):
        self.model = Scorer()
        self.lock = threading.Lock()

    async def predict(self, x):
        return await asyncio.to_thread(self.locked, x)

    def locked(self, x):
        with self.lock:
            return self.model.predict_batch(x)

    def close(self):
        pass

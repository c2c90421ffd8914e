"""The tasks that are gathered share batches; no threads."""

from model import Scorer

from batch_inference import ModelHost


class Service:
    def __init__(self):
        self.host = ModelHost(Scorer, max_batch_size=32)
        self.host.start()  # in an application that is asynchronous throughout: async with host

    async def predict(self, x):
        return await self.host.apredict(x)

    def close(self):
        self.host.stop()

"""The lock has gone: the model has a process of its own, which takes all that wait at once."""

from model import Scorer

from batch_inference import ModelHost


class Service:
    def __init__(self):
        self.host = ModelHost(Scorer, max_batch_size=32)
        self.host.start()

    def predict(self, x):
        return self.host.predict(x)

    def close(self):
        self.host.stop()

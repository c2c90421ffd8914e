"""Queue, thread, delay, concatenation, division and error handling are the library's."""

from model import Scorer

from batch_inference import ModelHost


class Service:
    def __init__(self):
        self.host = ModelHost(Scorer, max_batch_size=32)  # no delay to choose
        self.host.start()

    def predict(self, x):
        return self.host.predict(x)

    def close(self):
        self.host.stop()  # answers what was accepted first

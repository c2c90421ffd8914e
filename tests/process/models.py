"""Models that the process tests share. Workers import this module, so it imports nothing heavy."""

import logging
import os
import time

import numpy as np

from batch_inference import batching
from batch_inference.batcher import ListBatcher
from batch_inference.testing import Blocks, Dies, Doubles, Raises

__all__ = [
    "Affine",
    "Blocks",
    "Describes",
    "Dies",
    "Doubles",
    "Echo",
    "Inflates",
    "Large",
    "Raises",
    "SeesShapes",
    "Sleeps",
    "WhoAmI",
]


@batching
class Affine:
    """x * scale + offset."""

    def __init__(self, scale=1.0, *, offset=0.0):
        self.scale = scale
        self.offset = offset

    def predict_batch(self, x):
        return x * self.scale + self.offset


@batching(ListBatcher())
class Echo:
    """Each request comes back as it is."""

    def predict_batch(self, values):
        return values


class Describes:
    """Says what arrives: the type of its argument, for each request."""

    def predict_batch(self, values):
        return [type(value).__name__ for value in values]


class Sleeps:
    """Twice its input, after `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def predict_batch(self, x):
        time.sleep(self.seconds)
        return x * 2


class WhoAmI:
    """For each row, the id of the process that answers and a number of its environment; waits a little."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def predict_batch(self, x):
        time.sleep(self.seconds)
        return np.full((len(x), 1), os.getpid())


class Inflates:
    """A reply of as many bytes as the request's number says."""

    def predict_batch(self, sizes):
        return [np.full(int(size), int(size) % 251, np.uint8) for size in sizes]


class Large(Doubles):
    """Twice its input, with so many bytes of weights."""

    def __init__(self, size):
        super().__init__()
        self.weights = np.ones(size, np.uint8)


class Logs:
    """Logs, prints and forks as the request says."""

    def predict_batch(self, orders):
        return [getattr(self, order)() for order in orders]

    def info(self):
        logging.getLogger("tests.model").info("hello %s", "there")
        return os.getpid()


class SeesShapes:
    """Each row's result is the list of all shapes of batches so far, as an array [32, 2] filled up with zeros."""

    def __init__(self):
        self.seen = []

    def predict_batch(self, x):
        if x.shape not in self.seen:
            self.seen.append(x.shape)
        shapes = np.zeros((32, 2), np.int64)
        shapes[: len(self.seen)] = self.seen
        return np.broadcast_to(shapes, (len(x), *shapes.shape))

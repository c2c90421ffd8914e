"""A model with many small layers: a call on one row costs almost what a call on many does."""

import numpy as np


class Scorer:
    def __init__(self, width=64, layers=200):
        random = np.random.default_rng(0)
        self.layers = [random.standard_normal((width, width), np.float32) / width**0.5 for _ in range(layers)]

    def predict_batch(self, x):  # [rows, 64] in and out
        if x.shape[-1] != 64:
            raise ValueError(f"64 numbers per row, got {x.shape[-1]}")
        for weights in self.layers:
            x = np.tanh(x @ weights)
        return x

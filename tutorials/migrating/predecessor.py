"""A program written for the package batch-inference 1.0. It runs unchanged with either package.

The arguments are those of the measurement: requests and callers. Prints requests/s and the largest error.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from model import Scorer

from batch_inference import batching
from batch_inference.batcher.concat_batcher import ConcatBatcher


@batching(batcher=ConcatBatcher(tensor="np"), max_batch_size=32)
class Model(Scorer):
    pass


if __name__ == "__main__":
    requests, callers = int(sys.argv[1]), int(sys.argv[2])
    inputs = np.random.default_rng(0).standard_normal((requests, 1, 64), np.float32)
    host = Model.host()
    host.start()
    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(host.predict, inputs[:callers]))  # warm-up
        start = time.perf_counter()
        answers = list(pool.map(host.predict, inputs))
        seconds = time.perf_counter() - start
    host.stop()
    print(requests / seconds, np.abs(np.concatenate(answers) - Scorer().predict_batch(np.concatenate(inputs))).max())

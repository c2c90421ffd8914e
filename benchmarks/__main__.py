"""``python -m benchmarks [names]``: runs benchmarks, prints one table."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Sequence

from benchmarks import page
from benchmarks.measure import Found, Row
from benchmarks.options import Options
from benchmarks.peers.environments import install
from benchmarks.report import log, machine, record, table, write_lines

DEFAULT = {
    "transport": "round trips and rates of a model without cost, pipe and memcpy floors beside them",
    "startup": "host.start(), import time, memory of the processes",
    "batchers": "collate and scatter beside plain numpy",
}
EXTRA = {
    "ahead": "large requests copied into the open batch while it waits, and all at once when it is cut",
    "interpreters": "us under several interpreters (--python), say one without the interpreter lock",
    "floors": "what the machine allows: pipe round trip, memcpy",
    "policy": "when batches are cut: our rule beside fixed delays (about five minutes; draws the figure of the docs)",
    "peers": "us beside our peers, on the same work (about 40 minutes; with --quick 15)",
    "scale": "cost of a request with more client processes, more workers, more requests waiting",
    "page": "writes docs/benchmarks.md and its figures anew from docs/benchmarks.json",
    "profile": "where the time of one request goes, caller's side and worker's side",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = {**DEFAULT, **EXTRA}
    listing = "\n".join(f"  {name:<12} {text}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of batch_inference.",
        epilog=f"benchmarks (default: {', '.join(DEFAULT)}):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run, or 'list'")
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="rounds of each cell (default %(default)s)")
    parser.add_argument("--window", type=float, default=Options.window, help="seconds a cell (default %(default)s)")
    parser.add_argument("--cells", default="", help="only these cells, with commas between (transport, policy, peers)")
    parser.add_argument("--quick", action="store_true", help="three short rounds: all of it in less than 20 minutes")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME", help="only these peers")
    parser.add_argument("--python", nargs="+", default=[], metavar="PATH", help="the interpreters to compare")
    parser.add_argument("--install", nargs="*", metavar="NAME", help="make the environments of peers, all or these")
    parser.add_argument("--publish", action="store_true", help="into docs/benchmarks.json, .md and the figures")
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
        print("\n".join(f"{name:<12} {text}" for name, text in {**DEFAULT, **EXTRA}.items()))
        return 0
    if parsed.install is not None:
        return install(parsed.install)
    options = Options(
        parsed.rounds,
        parsed.window,
        cells=tuple(filter(None, parsed.cells.split(","))),
        peers=tuple(parsed.peers),
        pythons=tuple(parsed.python),
    )
    if parsed.quick:
        options = dataclasses.replace(options, rounds=3, window=0.4, warm=0.2)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(parsed.out, "a", encoding="utf-8")) if parsed.out else None
        if out:
            write_lines(out, [machine()])
        for name in parsed.names or list(DEFAULT):
            log(f"{name}: {({**DEFAULT, **EXTRA})[name]}")
            found: list[Found] = importlib.import_module(f"benchmarks.{name}").run(options)
            rows += [one for one in found if isinstance(one, Row)]
            if parsed.publish:
                page.publish(name, found, machine(), options)
            if out:
                write_lines(out, [record(name, one) for one in found])
    if rows:
        print(table(rows))
    if parsed.publish:
        page.write()
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Rows to a table a person reads and to JSON lines a program reads."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from batch_inference import speedups
from benchmarks.measure import Found, Row

HEADS = ("", "value", "floor", "ratio", "goal", "", "note")


def log(text: str) -> None:
    """Progress, on stderr: stdout carries only the table."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    mark = {None: "", True: "ok", False: "MISSED"}[row.met]
    note = row.note
    if row.foreign >= 0.25:
        note = f"{note}; disturbed: others kept {row.foreign:.1f} cores busy".lstrip("; ")
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    return (row.name, f"{number(row.value)} {row.unit}", number(row.floor), ratio, row.goal, mark, note)


def table(rows: Sequence[Row]) -> str:
    lines = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]

    def aligned(line: Sequence[str]) -> str:
        # Names and notes are read from the left, numbers from the right.
        parts = [
            text.ljust(width) if column in (0, len(HEADS) - 1) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join(aligned(line) for line in lines)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "")
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "kind": "machine",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": model,
        "cores": cores,
        "kernel": platform.release().partition("-")[0],
        "python": interpreter(),
        "numpy": np.__version__,
        "commit": _commit(),
    }


def interpreter() -> str:
    """That of this process, as 3.13.15t, and whether the library's extension was not built for it."""
    return platform.python_version() + sys.abiflags + ("" if speedups.built else " without C")


def _commit() -> str:
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_lines(out: IO[str], records: Iterable[dict[str, Any]]) -> None:
    for record in records:
        out.write(json.dumps(record) + "\n")
    out.flush()


def record(benchmark: str, found: Found) -> dict[str, Any]:
    return {"kind": type(found).__name__.lower(), "benchmark": benchmark, **dataclasses.asdict(found)}

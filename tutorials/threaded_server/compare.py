"""Starts each of the servers in turn, loads it, and says what it did and how much memory it took.

Exit status: 0 if all servers gave the same answers and no request failed, 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import load
import matplotlib
import numpy as np
import psutil
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SENTENCES = HERE.parent / "bert_embedding" / "sentences.txt"

TOLERANCE = 1e-5  # padding and batch size change the order of float32 sums, so the last digits may differ
CHECKED = 8  # sentences whose answers are compared between the servers
START_TIMEOUT = 120  # seconds; gunicorn, too, gives a process so long to load

SERVERS = {
    "flask": "Flask, threads",
    "gunicorn": "gunicorn, one model",
    "fastapi": "FastAPI, asyncio",
    "per_process": "gunicorn, a model per process",
}


@dataclass(frozen=True)
class Result:
    load: load.Load
    memory: float  # MiB of all processes of the server, shared pages counted once (PSS)
    with_torch: int  # of them, processes that hold torch, and so the model
    answers: np.ndarray  # [CHECKED, 384]

    @property
    def rate(self) -> float:
        return len(self.load.latencies) / self.load.seconds

    def percentile(self, percent: float) -> float:
        """A latency in milliseconds."""
        return float(np.percentile(self.load.latencies, percent)) * 1e3


def command(server: str, port: int, processes: int, threads: int) -> list[str]:
    gunicorn = [sys.executable, "-m", "gunicorn", "-b", f"127.0.0.1:{port}", "-w", str(processes)]
    gunicorn += ["--threads", str(threads), "--log-level", "warning", "--timeout", str(START_TIMEOUT)]
    return {
        "flask": [sys.executable, "flask_server.py", str(port)],
        "gunicorn": [*gunicorn, "gunicorn_server:app"],
        "fastapi": [
            sys.executable,
            "-m",
            "uvicorn",
            "--port",
            str(port),
            "--log-level",
            "warning",
            "fastapi_server:app",
        ],
        "per_process": [*gunicorn, "model_per_process:app"],
    }[server]


@contextlib.contextmanager
def running(server: str, processes: int, threads: int) -> Iterator[tuple[int, str]]:
    """A server, once it answers: its port, and a folder that only its processes have in their environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # As many compute threads as cores, less one for the server's processes, among the processes with a model.
    cores = len(os.sched_getaffinity(0))
    compute = max(1, cores // processes if server == "per_process" else cores - 1)
    started = command(server, port, processes, threads)
    # Named hosts meet in XDG_RUNTIME_DIR: in one of its own this server joins no other that happens to run here.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": str(compute), "XDG_RUNTIME_DIR": folder}
        process = subprocess.Popen(started, cwd=HERE, env=environment, stdout=log, stderr=log)
        try:
            wait_until_it_answers(process, port)
            yield port, folder
        except BaseException:
            log.seek(0)
            print(f"{' '.join(started)} said:\n{log.read()[-5000:]}", file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)  # as Ctrl-C: Flask's own server knows no SIGTERM
            process.wait(60)


def wait_until_it_answers(process: subprocess.Popen, port: int) -> None:
    """SystemExit if the server ends, or does not answer within START_TIMEOUT."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            load.embed(port, ["Are you there?"])
            return
        except (OSError, EOFError) as error:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit status {process.returncode}") from None
            if time.monotonic() > deadline:
                raise SystemExit(f"the server did not answer within {START_TIMEOUT} s: {error}") from None
            time.sleep(0.1)


def memory(folder: str) -> tuple[float, int]:
    """MiB of the processes that have `folder` in their environment, and how many of them have torch loaded."""
    pss, with_torch = 0.0, 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or somebody else's
            if process.environ().get("XDG_RUNTIME_DIR") == folder:
                pss += process.memory_full_info().pss / 2**20
                with_torch += any("libtorch" in region.path for region in process.memory_maps())
    return pss, with_torch


def measure(server: str, texts: list[str], arguments: argparse.Namespace) -> Result:
    with running(server, arguments.processes, arguments.threads) as (port, folder):
        load.run(port, texts, arguments.callers, arguments.seconds / 5)  # warm-up, not counted
        seen = load.run(port, texts, arguments.callers, arguments.seconds)
        return Result(seen, *memory(folder), answers=np.array(load.embed(port, texts[:CHECKED])))


def show(console: Console, results: dict[str, Result]) -> None:
    table = Table()
    table.add_column("")
    for title in ("requests/s", "latency p50", "latency p99", "memory", "models"):
        table.add_column(title, justify="right")
    for server, result in results.items():
        latencies = [f"{result.percentile(percent):.0f} ms" for percent in (50, 99)]
        numbers = [f"{result.rate:.0f}", *latencies, f"{result.memory:.0f} MiB", str(result.with_torch)]
        table.add_row(SERVERS[server], *numbers)
    console.print(table)


def plot(file: Path, results: dict[str, Result]) -> None:
    matplotlib.use("svg")
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 2.4), sharey=True, layout="constrained")
    columns = {
        "requests/s": [result.rate for result in results.values()],
        "latency, median and 99 % (ms)": [result.percentile(50) for result in results.values()],
        "memory (MiB)": [result.memory for result in results.values()],
    }
    names = [SERVERS[server] for server in results]
    colours = ["tab:grey" if server == "per_process" else "tab:blue" for server in results]
    for axis, (title, values) in zip(axes, columns.items()):
        axis.barh(names, values, color=colours)
        axis.set_title(title, fontsize="medium")
    for row, result in enumerate(results.values()):
        axes[1].plot([result.percentile(50), result.percentile(99)], [row, row], color="black", linewidth=1)
    axes[0].invert_yaxis()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="(default: all)")
    parser.add_argument("--callers", type=int, default=32, help="HTTP connections that ask at once (default: 32)")
    parser.add_argument("--seconds", type=float, default=10, help="how long each server is measured (default: 10)")
    parser.add_argument("--processes", type=int, default=4, help="of gunicorn (default: 4)")
    parser.add_argument("--threads", type=int, default=8, help="of each of them (default: 8)")
    parser.add_argument(
        "--sentences", type=Path, default=SENTENCES, help="one per line (default: the file of bert_embedding)"
    )
    parser.add_argument(
        "--figure", type=Path, default=Path(".cache") / "threaded_server.svg", help="(default: %(default)s)"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server that runs as well
    console = Console(highlight=False)
    texts = [line for line in arguments.sentences.read_text("utf-8").splitlines() if line]
    console.print(
        f"{arguments.callers} callers, {arguments.seconds:g} s each; {os.cpu_count()} cores for all processes"
    )
    results = {}
    for server in arguments.servers:
        results[server] = measure(server, texts, arguments)
        console.print(f"  {SERVERS[server]}: {len(results[server].load.latencies)} answers")
    show(console, results)
    plot(arguments.figure, results)
    console.print(f"Drawn in {arguments.figure}")

    first = next(iter(results.values())).answers
    difference = max(float(np.abs(result.answers - first).max()) for result in results.values())
    errors = [error for result in results.values() for error in result.load.errors]
    console.print(f"Largest difference between the servers' answers: {difference:.1e}, allowed {TOLERANCE:.0e}.")
    if errors:
        console.print(f"{len(errors)} requests failed, the first with {errors[0]}", style="red")
    return 0 if difference <= TOLERANCE and not errors else 1


if __name__ == "__main__":
    sys.exit(main())

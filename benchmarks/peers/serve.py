"""``python -m benchmarks.peers.serve ADAPTER WORKLOAD [ADDRESS]``, in a peer's environment.

With an address it is one more client process of a model that another such process started. Says on stdout that it is
ready, then reads one JSON command a line and answers each with one line.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import traceback
from typing import IO, Any

from benchmarks import load
from benchmarks.workloads import WORKLOADS, Counts


def plan(command: dict[str, Any], workload: str, counts: Counts) -> load.Plan:
    described = WORKLOADS[workload]
    return load.Plan(
        callers=command["callers"],
        work=described.work,
        window=command["window"],
        warm=command["warm"],
        pids=tuple(command["pids"]),
        burn=int(os.environ["BENCH_BURN"]) if described.burns else 0,
        first=command["first"],
        counts=counts.read,
    )


def answer(done: load.Load) -> dict[str, Any]:
    latencies = [round(latency, 7) for latency in done.latencies]
    return {**vars(done), "latencies": latencies}


def commands() -> Any:
    for line in sys.stdin:
        yield json.loads(line)


def serve(adapter: Any, workload: str, say: Any) -> None:
    counts = Counts(os.environ["BENCH_COUNTS"])
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    if adapter.how == "tasks":
        loop.run_until_complete(adapter.start())
    else:
        adapter.start()
    say({"ready": adapter.address})
    for command in commands():
        planned = plan(command, workload, counts)
        if adapter.how == "tasks":
            say(answer(loop.run_until_complete(load.tasks_here(adapter, planned))))
        else:
            say(answer(load.threads(adapter, planned)))
    if adapter.how != "tasks":
        adapter.stop()


def main() -> None:
    name, workload, *address = sys.argv[1:]
    # What a library prints to stdout goes to the log.
    out: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=out, flush=True)

    try:
        module = importlib.import_module(f"benchmarks.peers.adapters.{name}")
        serve(module.Adapter(workload, *address), workload, say)
    except Exception as error:
        traceback.print_exc()
        say({"fatal": repr(error)[:300]})
    finally:
        # Neither threads of a library nor callers without an answer may keep us; the other end ends what we started.
        sys.stderr.flush()
        threading.Timer(2.0, os._exit, (0,)).start()


if __name__ == "__main__":
    main()

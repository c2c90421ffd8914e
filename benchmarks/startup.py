"""What it costs to have the library at all: import, start of a host, memory of its processes.

Everything is measured in fresh interpreters, ours and the yardstick's in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.measure import Goal, Row, Sample, judge
from benchmarks.options import Options
from benchmarks.report import log

_IMPORT = """
import sys, time
begin = time.perf_counter()
{statement}
print(time.perf_counter() - begin)
"""

_BARE = """
import numpy, os, json
from benchmarks.machine import resident
print(json.dumps(resident(os.getpid())))
"""

_HOST = """
import json, os, time
import numpy
from benchmarks.machine import resident
bare = resident(os.getpid())
from batch_inference import ModelHost
from benchmarks.models import Echo
from benchmarks.machine import parent_of
host = ModelHost(Echo)()
begin = time.perf_counter()
host.start()
start = time.perf_counter() - begin
x = numpy.ones((1, 16), "f")
for _ in range(100):
    host.predict(x)
client = resident(os.getpid())
worker = host.statistics().workers[0].pid
found = {"client": client, "bare": bare, "worker": resident(worker),
         "supervisor": resident(parent_of(worker)), "start": start}
begin = time.perf_counter()
host.stop()
found["stop"] = time.perf_counter() - begin
print(json.dumps(found))
"""


def python(code: str) -> Any:
    """The JSON value a fresh interpreter prints. As on a machine in use, its modules have been compiled before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=120, env=environment)
    if done.returncode:
        raise RuntimeError(f"benchmark process failed:\n{done.stderr}")
    return json.loads(done.stdout)


def run(options: Options) -> list[Row]:
    rounds = options.rounds + 2  # short ones
    ours_imported = "from batch_inference import *"  # all of it: most is imported when it is first asked for
    imports: list[Sample] = []
    hosts: list[dict[str, Any]] = []
    bares: list[float] = []
    python(_HOST)  # compiles everything, and fills the page cache
    for number in range(rounds):
        ours, numpy = (python(_IMPORT.format(statement=each)) * 1e3 for each in (ours_imported, "import numpy"))
        imports.append(Sample(ours, numpy))
        hosts.append(python(_HOST))
        bares.append(python(_BARE)[0])
        log(
            f"  round {number + 1}: import {ours:.0f} ms (numpy {numpy:.0f}), start {hosts[-1]['start']:.3f} s, "
            f"stop {hosts[-1]['stop']:.3f} s"
        )

    def seconds(name: str) -> list[Sample]:
        return [Sample(host[name]) for host in hosts]

    def memory(name: str) -> list[Sample]:
        return [Sample(host[name][0], bare) for host, bare in zip(hosts, bares, strict=True)]

    def added(name: str) -> list[Sample]:
        return [Sample(host[name][0] - bare) for host, bare in zip(hosts, bares, strict=True)]

    client = [Sample(host["client"][0] - host["bare"][0]) for host in hosts]
    return [
        judge("6. import batch_inference, beside numpy", "ms", imports, Goal(times=1.4, at_most=True)),
        judge("6. host.start(), model without cost", "s", seconds("start"), Goal(limit=0.6, at_most=True)),
        judge("host.stop()", "s", seconds("stop")),
        judge("worker, resident (floor: bare numpy)", "MiB", memory("worker")),
        judge("6. worker over bare numpy", "MiB", added("worker"), Goal(limit=15, at_most=True)),
        judge("6. supervisor, resident", "MiB", memory("supervisor"), Goal(limit=15, at_most=True)),
        judge("6. caller's process, added by the library", "MiB", client, Goal(limit=5, at_most=True)),
    ]

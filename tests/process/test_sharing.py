"""One model for several processes: batches are shared, memory is there once, and clients come and go.

BATCH_INFERENCE_CLIENTS=seconds lets them come and go for longer than the first hundred take.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import ModelHost, connect
from batch_inference.testing import Blocks, Doubles, wait_until
from batch_inference.transport.handshake import close_all
from tests.process.conftest import environment
from tests.process.load import kill, supervisor_pid, value, worker_pid
from tests.process.models import Sleeps
from tests.process.test_forks import Child

SECONDS = float(os.environ.get("BATCH_INFERENCE_CLIENTS", "0"))
MB = 1 << 20

pytestmark = [
    pytest.mark.timeout(120 + 3 * SECONDS),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),  # of Python 3.12 and later
]


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Names of our own, in a folder with a short path: a unix socket's may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="bi-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


def test_what_four_processes_have_sent_runs_as_one_batch(tmp_path: Path) -> None:
    entered, gate, notes = (tmp_path / name for name in ("entered", "gate", "notes"))
    with ModelHost(Blocks, name="shared")(str(entered), str(gate), str(notes)) as host:
        first = host.submit(value(0))
        wait_until(entered.exists, 20, "the worker is busy")
        children = [Child(lambda number=number: host.predict(value(number)).tolist()) for number in range(1, 5)]
        wait_until(lambda: host.statistics().pending == 5, 30, "each of the four has sent its request")
        gate.touch()
        assert [child.result() for child in children] == [[[2 * number]] for number in range(1, 5)]
        assert first.result(timeout=20).tolist() == [[0]]
        assert notes.read_text().split() == ["1", "4"]


def test_four_processes_with_one_caller_each_come_to_share_their_batches() -> None:
    calls = 60
    with ModelHost(Sleeps, name="shared")(0.02) as host:

        def child(number: int) -> bool:
            return all(host.predict(value(number, call)).tolist() == [[2 * number, 2 * call]] for call in range(calls))

        children = [Child(lambda number=number: child(number)) for number in range(4)]
        assert all(child.result(90) for child in children)
        statistics = host.statistics()
        assert statistics.requests == 4 * calls
        assert statistics.mean_batch > 2.0, statistics  # without sharing 1; at best 4, until the first has ended


def proportional_memory(pid: int) -> int:
    """Bytes of a process, what it shares with n others counted as 1/n."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


SERVER = """
import sys
import numpy as np
from batch_inference import ModelHost
from tests.process.models import Large

with ModelHost(Large, name="shared")(int(sys.argv[1])) as host:
    assert host.predict(np.ones((1, 1))).tolist() == [[2]]
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_models_memory_is_there_once_for_four_server_processes() -> None:
    size = 200 * MB
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        for _ in range(4)
    ]
    try:
        for server in servers:
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        host = connect("shared")
        worker, supervisor = worker_pid(host), supervisor_pid(host)
        of_servers = [proportional_memory(server.pid) for server in servers]
        all_of_it = sum(of_servers) + proportional_memory(worker) + proportional_memory(supervisor)
        found = f"{[of // MB for of in of_servers]} MB in the servers, {all_of_it // MB} MB together"
        print(found)
        assert size < all_of_it < 2 * size, found
        assert max(of_servers) < size // 2, found
        host.stop()
    finally:
        for server in servers:
            server.communicate(timeout=30)


def test_a_hundred_clients_come_and_go_and_nothing_of_them_is_left() -> None:
    source = random.Random(6)

    def client(number: int, end: str) -> list[Any]:
        host = connect("shared")
        answers = [host.predict(value(number), timeout=60).tolist() for _ in range(3)]
        futures = [host.submit(np.full((1, 1 << source.randrange(16)), number)) for _ in range(4)]
        if end == "stop":
            assert [future.result(timeout=60)[0, 0] for future in futures] == [2 * number] * 4
            host.stop()
        elif end == "kill":  # with requests of its own under way
            kill(os.getpid())
        return answers

    with ModelHost(Doubles, name="shared")() as host:
        worker, supervisor = worker_pid(host), supervisor_pid(host)
        host.predict(value(0))
        Child(lambda: client(0, "stop")).result()
        before = {pid: held(pid) for pid in (worker, supervisor)}
        number, until, present = 0, time.monotonic() + SECONDS, []
        while number < 100 or time.monotonic() < until:
            number += 1
            end = source.choice(["stop", "leave", "kill"])
            present.append((number, end, Child(lambda number=number, end=end: client(number, end))))
            if len(present) >= source.randrange(1, 9):
                leaves(*present.pop(source.randrange(len(present))))
            assert host.predict(value(-number)).tolist() == [[-2 * number]]
        for one in present:
            leaves(*one)
        for pid, (descriptors, mappings, memory) in before.items():
            wait_until(lambda pid=pid, most=descriptors: held(pid)[0] <= most, 20, f"{before[pid]}, now {held(pid)}")
            assert held(pid)[1] <= mappings + 2 and held(pid)[2] < memory + 30 * MB, (before[pid], held(pid))
        assert (worker_pid(host), supervisor_pid(host)) == (worker, supervisor)
        assert host.statistics().pending == 0
        print(f"{number} clients; (descriptors, mappings, memory) before {before}, after {list(map(held, before))}")


def leaves(number: int, end: str, child: Child) -> None:
    if end == "kill":
        child.ended(90)
    else:
        assert child.result(90) == [[[2 * number]]] * 3


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, mappings of shared memory, and bytes of resident memory of a process."""
    with open(f"/proc/{pid}/maps") as file:
        mappings = file.read().count("memfd:batch_inference")
    return len(os.listdir(f"/proc/{pid}/fd")), mappings, proportional_memory(pid)


def test_processes_that_start_a_host_at_the_same_moment_get_one() -> None:
    for round_ in range(4):
        gates = [os.pipe() for _ in range(2)]
        joined, join = os.pipe()

        def start(name: str = f"moment-{round_}", gates: Any = gates, join: int = join) -> tuple[int, int]:
            for _, opener in gates:
                os.close(opener)
            host = ModelHost(Doubles, name=name, linger=0.0)()
            os.read(gates[0][0], 1)  # nothing, once it opens
            with host:
                found = worker_pid(host), supervisor_pid(host)
                assert host.predict(value(3)).tolist() == [[6]]
                os.write(join, b"j")
                os.read(gates[1][0], 1)
            return found

        children = [Child(start) for _ in range(4)]
        os.close(gates[0][1])
        os.close(join)
        assert all(os.read(joined, 1) for _ in children), "one ended before it had joined"
        os.close(gates[1][1])
        assert len({child.result(90) for child in children}) == 1
        close_all([joined, gates[0][0], gates[1][0]])


def test_threads_that_call_at_once_take_one_descriptor_each(tmp_path: Path) -> None:
    """In the client, in the supervisor and in the worker: docs/many-processes.md says how many there are."""
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    with ModelHost(Blocks, name="shared")(str(entered), str(gate)) as host:
        pids = os.getpid(), supervisor_pid(host), worker_pid(host)
        before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        with ThreadPoolExecutor(32) as pool:
            together = threading.Barrier(32)
            answers = pool.map(lambda number: (together.wait(), host.predict(value(number)))[1][0, 0], range(32))
            wait_until(lambda: host.statistics().pending == 32, 30, "all 32 wait")
            gate.touch()
            assert list(answers) == [2 * number for number in range(32)]
        more = [len(os.listdir(f"/proc/{pid}/fd")) - count for pid, count in zip(pids, before)]
        assert max(more) <= 32 + 8 + 2, more  # they are made eight at a time; two for the memory

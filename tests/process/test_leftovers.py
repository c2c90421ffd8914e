"""However an application ends, within seconds no process, socket or shared memory of its host is left."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import ModelHost
from batch_inference.testing import Doubles, alive, no_leaks, wait_until
from batch_inference.transport import handshake
from tests.process import faulty
from tests.process.conftest import environment
from tests.process.load import kill, supervisor_pid, value, worker_pid

SECONDS = 5  # within which everything must be gone


class Marked:
    """A script in a process whose environment, which all its descendants inherit, holds a mark of its own."""

    def __init__(self, source: str, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "BATCH_INFERENCE_TEST_MARK": self.mark},
        )

    def read_line(self, timeout: float = 30.0) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout)[0], "the application says nothing"
        return self.process.stdout.readline().strip()

    def descendants(self) -> dict[int, str]:
        """Who lives with our mark, whatever has become of its parents; the application itself not."""
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if pid != self.process.pid and self.mark.encode() in file.read() and alive(pid):
                        with open(f"/proc/{pid}/cmdline") as command:
                            found[pid] = command.read().replace("\0", " ")
            except OSError:
                pass  # gone meanwhile
        return found

    def end(self, timeout: float = 30.0) -> int:
        """Its exit code."""
        try:
            self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
            self.process.communicate()
        return self.process.returncode


def assert_gone(application: Marked) -> None:
    wait_until(lambda: not application.descendants(), SECONDS, f"{application.descendants()} end")


APPLICATION = """
import os, signal, sys, threading
import numpy as np
from batch_inference import ModelHost
from batch_inference.testing import Doubles

host = ModelHost(Doubles)()
host.start()
host.predict(np.ones((1, 1)))
print("ready", flush=True)
sys.stdin.readline()
way = sys.argv[1]
if way == "sys.exit":
    sys.exit(3)
elif way == "exception":
    raise ValueError("on purpose")
elif way == "exit in a thread":
    thread = threading.Thread(target=lambda: (host.predict(np.ones((1, 1))), os._exit(3)))
    thread.start()
    thread.join()
elif way == "os._exit":
    os._exit(3)
elif way == "exec":
    os.execv("/bin/true", ["/bin/true"])
elif way.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, way))
"""


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("normally", 0),
        ("sys.exit", 3),
        ("exception", 1),
        ("os._exit", 3),
        ("exit in a thread", 3),
        ("exec", 0),
        ("SIGTERM", -signal.SIGTERM),
        ("SIGINT", -signal.SIGINT),
        ("SIGKILL", -signal.SIGKILL),
        ("SIGSEGV", -signal.SIGSEGV),
    ],
)
def test_an_application_that_ends_without_stop_leaves_nothing(way: str, code: int) -> None:
    application = Marked(APPLICATION, way)
    assert application.read_line() == "ready"
    assert len(application.descendants()) == 2  # supervisor and worker
    assert application.process.stdin is not None
    application.process.stdin.write("go\n")
    application.process.stdin.flush()
    assert application.end() == code
    assert_gone(application)


def test_an_application_killed_at_any_moment_of_its_start_leaves_nothing() -> None:
    source, applications = random.Random(3), []
    for _ in range(8):
        application = Marked(APPLICATION, "normally")
        application.process.stdout and select.select([application.process.stdout], [], [], source.uniform(0.1, 1.2))
        application.process.kill()
        application.end()
        applications.append(application)
    for application in applications:
        assert_gone(application)


BUSY = """
import signal, sys, time
import numpy as np
from batch_inference import ModelHost

class Model:
    def predict_batch(self, x):
        print("running", flush=True)
        time.sleep(1000)

host = ModelHost(Model)()
host.start()
futures = [host.submit(np.ones((1, 1))) for _ in range(3)]
while host.statistics().waiting.p50 == 0:
    time.sleep(0.01)
print("busy", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("way", ["killed", "ended"])
def test_a_worker_in_the_middle_of_a_long_batch_ends_with_its_application(way: str) -> None:
    application = Marked(BUSY)
    assert application.read_line() == "busy"
    if way == "killed":
        application.process.kill()
    started = time.monotonic()
    application.end()
    assert_gone(application)
    assert time.monotonic() - started < 2 * SECONDS


def test_processes_that_a_model_has_forked_end_with_the_worker(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with ModelHost(faulty.Forks)(str(file)) as host:
        for _ in range(2):
            wait_until(file.exists, 10)
            forked = [int(pid) for pid in file.read_text().split()]
            file.unlink()
            assert all(map(alive, forked))
            kill(worker_pid(host))
            wait_until(lambda forked=forked: not any(map(alive, forked)), SECONDS, f"{forked} end")
        assert host.predict(value(1), timeout=20).tolist() == [[2]]
        wait_until(file.exists, 10)
        forked = [int(pid) for pid in file.read_text().split()]
    wait_until(lambda: not any(map(alive, forked)), SECONDS, f"{forked} end")


def test_a_host_that_is_garbage_collected_leaves_nothing() -> None:
    with no_leaks():
        host: Any = ModelHost(Doubles)()
        host.start()
        assert host.predict(value(1)).tolist() == [[2]]
        assert host.submit(value(1)).result(timeout=10).tolist() == [[2]]
        pids, gone = (worker_pid(host), supervisor_pid(host)), weakref.ref(host)
        del host
        gc.collect()
        assert gone() is None
        wait_until(lambda: not any(map(alive, pids)), SECONDS)


def test_a_host_in_a_reference_cycle_leaves_nothing() -> None:
    class Service:
        def __init__(self) -> None:
            self.me = self
            self.host = ModelHost(Doubles)()
            self.host.start()

    with no_leaks():
        service = Service()
        pids = worker_pid(service.host), supervisor_pid(service.host)
        futures = [service.host.submit(value(number)) for number in range(50)]
        del service
        gc.collect()
        for number, future in enumerate(futures):
            if future.exception(timeout=10) is None:
                assert future.result().tolist() == [[2 * number]]
        wait_until(lambda: not any(map(alive, pids)), SECONDS)


def test_a_host_that_fails_to_start_leaves_nothing() -> None:
    from batch_inference import ModelLoadError

    host = ModelHost(faulty.LoadsWithThread)()
    for _ in range(2):
        with no_leaks(), pytest.raises(ModelLoadError):
            host.start()


NAMED = """
import os, sys
import numpy as np
from batch_inference import ModelHost
from batch_inference.testing import Doubles

with ModelHost(Doubles, name=sys.argv[1], linger=0.2)() as host:
    host.predict(np.ones((1, 1)))
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("last", ["killed", "stopped"])
def test_a_named_host_ends_when_its_last_application_has_gone(last: str) -> None:
    name = f"leftovers-{uuid.uuid4().hex}"
    first, second = Marked(NAMED, name), None
    try:
        assert first.read_line() == "ready"
        second = Marked(NAMED, name)
        assert second.read_line() == "ready"
        assert len(first.descendants()) == 2 and not second.descendants()
        first.process.kill()
        first.end()
        assert os.path.exists(handshake.named_address(name))
        assert len(first.descendants()) == 2
        if last == "killed":
            second.process.kill()
        second.end()
        assert_gone(first)
    finally:
        for application in (first, second):
            if application is not None:
                application.process.kill()
                application.end()
    wait_until(lambda: not os.path.exists(handshake.named_address(name)), SECONDS, "no socket file is left")


def test_after_a_kill_of_everything_the_next_start_takes_the_name_over() -> None:
    name = f"leftovers-{uuid.uuid4().hex}"
    application = Marked(NAMED, name)
    assert application.read_line() == "ready"
    for pid in [application.process.pid, *application.descendants()]:
        kill(pid)
    application.end()
    assert_gone(application)
    assert os.path.exists(handshake.named_address(name))  # nobody was there to remove it
    with ModelHost(Doubles, name=name, linger=0.0)() as host:
        assert host.predict(np.ones((1, 1)))[0, 0] == 2
    wait_until(lambda: not os.path.exists(handshake.named_address(name)), SECONDS, "no socket file is left")

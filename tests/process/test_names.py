"""Named hosts: several processes share one model."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from batch_inference import ConfigError, HostClosedError, ModelHost, connect
from batch_inference.testing import alive, no_leaks, wait_until
from tests.process.conftest import environment
from tests.process.models import Affine, Doubles
from tests.process.test_callers import all_slots_are_back, check, request


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Names of our own, in a folder with a short path: a unix socket's may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="bi-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


class Other:
    """A process of its own that runs Python code; it says "ready" and ends when its standard input does."""

    def __init__(self, code: str) -> None:
        code = f"import os, sys\n{code}\nprint('ready', os.getpid(), worker(), flush=True)\nsys.stdin.read()\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREPARE + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        word, _, worker = self.process.stdout.readline().split()
        assert word == "ready"
        self.worker = int(worker)

    def end(self) -> str:
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return str(out)


PREPARE = """
import numpy as np
from batch_inference import ModelHost, connect

def worker():
    return host.statistics().workers[0].pid
"""
STARTS = "from tests.process.models import Doubles\nhost = ModelHost(Doubles, name='shared')()\nhost.start()"
CONNECTS = "host = connect('shared')\nassert host.predict(np.ones((1, 2))).tolist() == [[2, 2]]"


def worker_of(host: ModelHost) -> int:
    return host.statistics().workers[0].pid


def test_processes_that_start_a_host_of_one_name_share_its_worker() -> None:
    with ModelHost(Doubles, name="shared")() as host:
        others = [Other(STARTS) for _ in range(2)]
        assert {other.worker for other in others} == {worker_of(host)}
        check(host.predict(request(1)), 1)
        assert "named 'shared'" in repr(host)
        for other in others:
            other.end()
        check(host.predict(request(2)), 2)
        all_slots_are_back(host)


def test_a_process_without_the_class_connects_by_name_and_the_host_outlives_who_started_it(
    runtime_directory: str,
) -> None:
    first = Other(STARTS)
    with no_leaks():
        host = connect("shared")
        assert worker_of(host) == first.worker
        check(host.predict(request(1)), 1)
        third = Other(CONNECTS)
        first.end()
        for number in range(20):
            check(host.predict(request(number)), number)
        assert worker_of(host) == third.worker == first.worker
        third.end()
        host.stop()
    with pytest.raises(HostClosedError):
        host.predict(request(1))
    wait_until(lambda: not alive(first.worker), 10, "the worker lingers for a second only")
    wait_until(
        lambda: not [name for name in os.listdir(f"{runtime_directory}/batch_inference") if name.endswith("sock")]
    )


def test_the_worker_lingers_for_the_next_process() -> None:
    host = ModelHost(Doubles, name="shared", linger=60)()
    host.start()
    pid = worker_of(host)
    host.stop()
    assert alive(pid)
    second = ModelHost(Doubles, name="shared", linger=60)()
    second.start()
    assert worker_of(second) == pid
    check(second.predict(request(1)), 1)
    second.stop()
    os.kill(parent_of(pid), 15)  # it would linger for a minute
    wait_until(lambda: not alive(pid), 10)


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_nobody_serves_a_name_that_nobody_started() -> None:
    with pytest.raises(HostClosedError, match="nobody|no host"):
        connect("nobody")


def test_a_host_of_the_same_name_with_another_model_or_other_options_is_refused() -> None:
    with ModelHost(Doubles, name="shared", max_batch_size=8)():
        for other in (
            ModelHost(Doubles, name="shared", max_batch_size=9)(),
            ModelHost(Affine, name="shared", max_batch_size=8)(),
        ):
            with no_leaks(), pytest.raises(ConfigError, match="max_batch_size is '?8|model is .*Doubles"):
                other.start()
        with ModelHost(Doubles, name="shared", max_batch_size=8)() as same:
            check(same.predict(request(1)), 1)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x" * 61, "a b", 3])
def test_names_that_cannot_be_file_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="name"):
        ModelHost(Doubles, name=name)
    if name:
        with pytest.raises(ConfigError, match="name"):
            connect(name)


def test_a_started_host_travels_by_pickle_to_another_process() -> None:
    import pickle

    with ModelHost(Doubles)() as host:
        code = f"""
import pickle
host = pickle.loads({pickle.dumps(host)!r})
assert host.predict(np.ones((1, 2))).tolist() == [[2, 2]]
"""
        other = Other(code)
        assert other.worker == worker_of(host)
        other.end()
        assert np.array_equal(host.predict(np.ones(3)), np.full(3, 2.0))

"""Named hosts: several processes share one model."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from batch_inference import ConfigError, HostClosedError, ModelHost, RequestTimeoutError, TransportError, connect
from batch_inference.testing import alive, no_leaks, parent_of, wait_until
from tests.process.conftest import environment
from tests.process.models import Affine, Doubles
from tests.process.test_callers import all_slots_are_back, check, request
from tests.process.test_forks import Child

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # of Python 3.12 and later


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


def test_nobody_serves_a_name_that_nobody_started() -> None:
    with pytest.raises(HostClosedError, match="nobody|no host"):
        connect("nobody")


def test_a_host_of_the_same_name_with_another_model_or_other_options_is_refused() -> None:
    class Mine:
        def predict_batch(self, x: Any) -> Any:
            return x

    with ModelHost(Affine, name="shared", max_batch_size=8)(2.0):
        for other, difference in (
            (ModelHost(Affine, name="shared", max_batch_size=9)(2.0), "max_batch_size is 8 there and 9 here"),
            (ModelHost(Affine, name="shared", max_batch_size=8)(3.0), r"model arguments is 2\.0 there and 3\.0 here"),
            (ModelHost(Doubles, name="shared", max_batch_size=8)(2.0), "model is .*Affine there and .*Doubles here"),
            (ModelHost(Mine, name="shared", max_batch_size=8)(2.0), "source is .* there and .*file is .*/models.py"),
            (
                ModelHost(model_obj=Affine(), name="shared", max_batch_size=8)(2.0),
                "model is .*Affine there and an instance of .*Affine here",
            ),
        ):
            with no_leaks(), pytest.raises(ConfigError, match=difference):
                other.start()
        with ModelHost(Affine, name="shared", max_batch_size=8)(2.0) as same:
            check(same.predict(request(1)), 1)


def test_each_process_chooses_its_own_timeouts_and_memory() -> None:
    with ModelHost(Doubles, name="shared", timeout=30)() as host:
        with ModelHost(Doubles, name="shared", timeout=0.0, start_timeout=50, shared_memory=1 << 24)() as other:
            assert worker_of(other) == worker_of(host)
            with pytest.raises(RequestTimeoutError):
                other.predict(request(1))
        joined = connect("shared", timeout=20, shared_memory=1 << 24)
        check(joined.predict(request(2)), 2)
        joined.stop()
        check(host.predict(request(3)), 3)


def test_who_connects_cannot_choose_what_is_the_hosts() -> None:
    with pytest.raises(ConfigError, match="connect.. cannot choose linger, max_batch_size"):
        connect("shared", max_batch_size=3, linger=2, timeout=1)
    with pytest.raises(TypeError, match="unknown option"):
        connect("shared", max_size=3)


def test_a_host_that_was_joined_by_name_says_so_and_cannot_be_started_once_it_is_stopped() -> None:
    with ModelHost(Doubles, name="shared")():
        joined = connect("shared")
        assert repr(joined) == "<ModelHost that was joined named 'shared': ready>"
        joined.stop()
        assert "stopped" in repr(joined)
        with no_leaks(), pytest.raises(HostClosedError, match="connect.. again"):
            joined.start()


def test_a_host_whose_limits_were_changed_takes_the_forked_and_the_new_process_as_before() -> None:
    with ModelHost(Doubles, name="shared", max_batch_size=8)() as host:
        host.configure(max_batch_size=4)
        assert Child(lambda: host.predict(np.ones((1, 1)), timeout=20).tolist()).result() == [[2]]
        with ModelHost(Doubles, name="shared", max_batch_size=8)() as other:
            check(other.predict(request(1)), 1)
            host.stop()
            host.start()  # joins the other's
        check(host.predict(request(2)), 2)


def test_a_host_whose_limits_were_changed_is_reloaded_to_what_others_start_it_with() -> None:
    with ModelHost(Affine, name="shared", max_batch_size=8)(2.0) as host:
        host.configure(max_batch_size=4)
        host.reload(3.0)
        with ModelHost(Affine, name="shared", max_batch_size=8)(3.0) as other:
            assert other.predict(np.ones((1, 1))).tolist() == [[3]]


def test_a_host_that_was_joined_is_left_at_the_end_of_a_with() -> None:
    async def joined_by_a_task() -> None:
        async with connect("shared") as joined:
            check(await joined.apredict(request(3)), 3)

    with ModelHost(Doubles, name="shared")() as host:
        with connect("shared") as joined:
            check(joined.predict(request(1)), 1)
        with pytest.raises(HostClosedError):
            joined.predict(request(1))
        asyncio.run(joined_by_a_task())
        check(host.predict(request(2)), 2)


def test_no_host_starts_in_a_directory_that_others_may_enter(runtime_directory: str) -> None:
    os.mkdir(f"{runtime_directory}/batch_inference")
    os.chmod(f"{runtime_directory}/batch_inference", 0o750)
    with no_leaks(), pytest.raises(TransportError, match="mode 0700, it is drwxr-x---"):
        ModelHost(Doubles, name="shared")().start()
    with no_leaks(), pytest.raises(TransportError, match="mode 0700"):
        connect("shared")


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

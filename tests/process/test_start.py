"""What start() waits for and raises, and what a worker finds when it starts."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from batch_inference import BatchInferenceError, ConfigError, HostClosedError, ModelHost, ModelLoadError
from batch_inference.batcher import ListBatcher
from batch_inference.errors import RemoteTraceback
from batch_inference.testing import Doubles, alive, wait_until
from tests.process.conftest import environment

ONE = np.ones((1, 2), "f")


class Loads(Doubles):
    """Writes its process id to a file, then does what it is told to while it loads."""

    def __init__(self, pid_file=None, then=None):
        super().__init__()
        if pid_file is not None:
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
        if then is not None:
            then()


def fail():
    print("about to fail")
    raise OSError(5, "no such weights")


def exit_3():
    print("about to exit", flush=True)
    os._exit(3)


def leave():
    raise SystemExit("leaving")


def die(number):
    return lambda: os.kill(os.getpid(), number)


def hang():
    time.sleep(1000)


def test_start_returns_when_the_model_is_ready(tmp_path) -> None:
    with ModelHost(Loads)(str(tmp_path / "pid")) as host:
        worker = host.statistics().workers[0]
        assert (tmp_path / "pid").read_text() == str(worker.pid) and worker.state == "ready"
        assert worker.pid != os.getpid()


def test_a_constructor_that_raises_is_a_model_load_error_with_the_remote_traceback(tmp_path) -> None:
    host = ModelHost(Loads)(str(tmp_path / "pid"), then=fail)
    with pytest.raises(ModelLoadError, match="no such weights") as caught:
        host.start()
    assert "Traceback" not in str(caught.value)  # which is shown once
    assert "in fail" in str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(HostClosedError):
        host.predict(ONE)
    with pytest.raises(ModelLoadError):  # the second one is no other error
        host.start()


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (exit_3, "exited with code 3"),
        (leave, "leaving"),
        (die(signal.SIGKILL), "SIGKILL"),
        (die(signal.SIGSEGV), "SIGSEGV"),
    ],
)
def test_a_process_that_dies_while_it_loads_is_a_model_load_error_that_says_how(then, said: str) -> None:
    host = ModelHost(Loads)(then=then)
    with pytest.raises(ModelLoadError, match=said) as caught:
        host.start()
    if then is exit_3:
        assert "about to exit" in str(caught.value)  # its last lines


def test_a_start_that_takes_too_long_is_given_up_and_leaves_no_process(tmp_path) -> None:
    host = ModelHost(Loads, start_timeout=1.5)(str(tmp_path / "pid"), then=hang)
    with pytest.raises(ModelLoadError, match=r"start_timeout=1\.5"):
        host.start()
    if (tmp_path / "pid").exists():  # it may not have come so far
        pid = int((tmp_path / "pid").read_text() or 0)
        wait_until(lambda: not pid or not alive(pid), 5)


def test_a_model_that_cannot_be_unpickled_in_the_worker_is_a_model_load_error() -> None:
    class Unpicklable(Doubles):
        def __reduce__(self):
            return int, ("not a number",)

    with pytest.raises(ModelLoadError, match="not a number"):
        ModelHost(model_obj=Unpicklable()).start()


def test_a_failed_start_can_be_followed_by_one_that_works(tmp_path) -> None:
    marker = tmp_path / "marker"

    class NeedsFile(Doubles):
        def __init__(self):
            super().__init__()
            marker.read_text()

    host = ModelHost(NeedsFile)()
    with pytest.raises(ModelLoadError, match="FileNotFoundError"):
        host.start()
    marker.touch()
    with host:
        assert host.predict(ONE).tolist() == [[2, 2]]


# --- what the worker finds ------------------------------------------------------------------------------------------

# numpy's BLAS reads it when it is loaded, so the worker must have had it before.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class Finds:
    """The environment, the working directory and the place of the worker, as they are while the model is loaded."""

    def __init__(self):
        with open("/proc/self/environ") as file:  # as it was when the process began, before anything was imported
            found = dict(entry.partition("=")[::2] for entry in file.read().split("\0"))
        self.found = [found.get(name) for name in VARIABLES]
        self.found += [os.getcwd(), os.getpid()]

    def predict_batch(self, requests):
        return [self.found for _ in requests]


def test_thread_counts_and_devices_are_set_before_the_worker_imports_anything(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    with ModelHost(Finds, batcher=ListBatcher()) as host:
        omp, mkl, cuda, cwd, _ = host.predict("")
        assert 1 <= int(omp) == int(mkl) <= cores and cuda is None and cwd == os.getcwd()
    with ModelHost(Finds, batcher=ListBatcher(), threads=7, devices=["cuda:1"]) as host:
        assert host.predict("")[:3] == ["7", "7", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what the user has set holds
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-abc")
    with ModelHost(Finds, batcher=ListBatcher(), devices=[0, "cuda:2", "cpu"]) as host:
        seen = set()
        for _ in range(30):
            omp, _, cuda, *_ = host.predict("")
            seen.add((omp, cuda))
        assert seen == {("3", "4"), ("3", "GPU-abc"), ("3", "")}
    with pytest.raises(ConfigError, match="device 3 does not exist"):
        ModelHost(Finds, devices=[3]).start()


def test_platforms_without_the_means_are_told_to_use_num_workers_0(monkeypatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(ConfigError, match=r"num_workers=0") as caught:
        ModelHost(Doubles).start()
    assert isinstance(caught.value, BatchInferenceError) and "memfd_create" in str(caught.value)


def test_an_application_with_open_files_far_above_1023_can_host_a_model() -> None:
    """select() takes no descriptor above 1023; the worker's are low, the application uses poll."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("not enough descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
    try:
        with ModelHost(Doubles) as host:
            assert host.predict(ONE).tolist() == [[2, 2]]
            assert host.submit(ONE).result(30).tolist() == [[2, 2]]
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CLOSED = """
import os, sys
import numpy as np
from batch_inference import ModelHost
from batch_inference.testing import Doubles

with ModelHost(Doubles) as host:
    assert host.predict(np.ones(2)).tolist() == [2, 2]
    assert host.submit(np.ones(2)).result(30).tolist() == [2, 2]
open(sys.argv[1], "w").close()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_an_application_without_standard_descriptors_can_host_a_model(closed: str, tmp_path) -> None:
    """As daemons are: descriptors of ours may then have the numbers 0 to 2."""
    (tmp_path / "script.py").write_text(CLOSED)
    command = f"exec '{sys.executable}' '{tmp_path}/script.py' '{tmp_path}/done' {closed}"
    subprocess.run(["bash", "-c", command], env=environment(), timeout=60, check=True)
    assert (tmp_path / "done").exists()


# --- signals ----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
from batch_inference import HostClosedError, ModelHost
from batch_inference.testing import wait_until

class Hangs:
    def __init__(self, started):
        open(started, "w").close()
        threading.Event().wait()
    def predict_batch(self, x): return x

class Doubles:
    def predict_batch(self, x): return x * 2

def handle(number, frame):
    host.stop()
    host.stop()
    print("stopped", flush=True)
    if how == "exits":
        sys.exit(7)

def interrupt():
    wait_until(lambda: os.path.exists("started"), 30)
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    how = sys.argv[1]
    signal.signal(signal.SIGTERM, handle)
    host = ModelHost(Hangs)("started")
    threading.Thread(target=interrupt).start()
    try:
        host.start()
    except HostClosedError as error:
        print(error, flush=True)
    print(host, flush=True)
    with ModelHost(Doubles)() as other:
        print(other.predict(np.ones(1)), flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("exits", 7)])
def test_stop_in_a_signal_handler_ends_a_start_that_it_interrupts(how: str, code: int, run_script) -> None:
    done = run_script(INTERRUPTED, how, code=code)
    lines = done.stdout.splitlines()
    assert lines[0] == "stopped" and not done.stderr
    if how == "returns":
        assert "stopped, by a signal handler" in lines[1] and ": stopped," in lines[2] and len(lines) == 4


# --- processes that a worker starts -----------------------------------------------------------------------------------

STARTS_AT_ITS_TOP = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import numpy as np
from batch_inference import ModelHost

def started(depth):
    if depth == 0:
        return [host.ready]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return [host.ready, *pool.submit(started, depth - 1).result()]

class Starts:
    def __init__(self):
        self.seen = started(2)
    def predict_batch(self, x):
        return [self.seen] * len(x)

host = ModelHost(Starts)()
host.start()
"""


def test_a_module_that_starts_a_host_does_not_start_another_in_what_its_model_spawns(run_script, tmp_path) -> None:
    (tmp_path / "app.py").write_text(STARTS_AT_ITS_TOP)
    done = run_script("import app, numpy as np\nprint(app.host.predict(np.ones((1, 1))))\napp.host.stop()\n")
    assert done.stdout == "[[False, False, False]]\n"


SPAWNED = """
import multiprocessing, sys
import numpy as np
from batch_inference import ModelHost
from batch_inference.batcher import ListBatcher

class Wrapped:
    def __init__(self, number): self.number = number

class Own(Exception): pass

class Model:
    def predict_batch(self, items):
        if items[0] is None: raise Own("none")
        return [Wrapped(2 * item.number) for item in items]

def child():
    with ModelHost(Model, batcher=ListBatcher())() as host:
        answer = host.predict(Wrapped(21))
        assert type(answer) is Wrapped, type(answer)
        try:
            host.predict(None)
        except Own as error:
            print(answer.number, error, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_classes_of_a_script_travel_also_from_its_multiprocessing_children(method: str, run_script) -> None:
    assert run_script(SPAWNED, method).stdout == "42 none\n"


IN_DEVELOPMENT = """
import asyncio
import numpy as np
from batch_inference import ModelHost
from batch_inference.testing import Raises

if __name__ == "__main__":
    for workers in (0, 1):
        with ModelHost(Raises, num_workers=workers)() as host:
            x = np.ones((1, 1))
            host.predict(x), host.submit(x).result(), asyncio.run(host.apredict(x))
            try:
                asyncio.run(host.apredict(-x))
            except ValueError:
                host.reload()
"""


def test_pythons_development_mode_finds_nothing(run_script, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    assert run_script(IN_DEVELOPMENT).stderr == ""

"""Real servers of several processes over one model: their workers are killed and recycled under load."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from batch_inference import ModelHost, connect
from batch_inference.testing import Doubles, alive, wait_until
from tests.process.conftest import environment
from tests.process.load import kill, value, worker_pid
from tests.process.test_forks import Child

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Names of our own, in a folder with a short path: a unix socket's may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="bi-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        monkeypatch.setenv("BATCH_INFERENCE_TEST_LOADS", f"{path}/loads")
        monkeypatch.setenv("BATCH_INFERENCE_TEST_MARK", uuid.uuid4().hex)
        yield Path(path)


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


class Server:
    """A server process that listens at a unix socket, and the processes that come from it."""

    def __init__(self, folder: Path, *command: str, start: str = "import") -> None:
        self.path = str(folder / "http")
        self.output = folder / "output"
        self._file = open(self.output, "w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *(part.format(path=self.path) for part in command)],
            stdout=self._file,
            stderr=self._file,
            env={**environment(), "BATCH_INFERENCE_TEST_START": start},
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends it; nothing that came from it may be left."""
        try:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
            if error is None:
                wait_until(lambda: not self.descendants(), 20, f"{self.descendants()} end")
        finally:
            self.process.kill()
            self.process.wait()
            self._file.close()
            if error is not None:
                print(self.output.read_text())

    @staticmethod
    def descendants() -> dict[int, str]:
        """Who lives with the mark of this test, whatever has become of its parents; the test itself not."""
        mark, found = os.environ["BATCH_INFERENCE_TEST_MARK"].encode(), {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if pid != os.getpid() and mark in file.read() and alive(pid):
                        with open(f"/proc/{pid}/cmdline") as command:
                            found[pid] = command.read().replace("\0", " ")
            except OSError:
                pass  # gone meanwhile
        return found

    def ask(self, number: int, path: str = "/") -> tuple[int, int]:
        """The answer to a request and the process that gave it."""
        connection = Connection(self.path)
        try:
            connection.request("GET", f"{path}?{number}")
            response = connection.getresponse()
            body = response.read().decode()
            assert response.status == 200, f"{response.status} {body}"
            answer, pid = body.split()
            return int(answer), int(pid)
        finally:
            connection.close()

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            try:
                return self.ask(1)[0] == 2
            except OSError:
                return False

        wait_until(answers, 60, "the server answers")


class Users:
    """Threads that ask a server in a closed loop; a request whose server process died under it is sent again."""

    def __init__(self, server: Server, threads: int = 8, path: str = "/") -> None:
        self.pids: dict[int, int] = {}  # answers of each process
        self.broken = 0
        self.failed: list[BaseException | str] = []
        self._server, self._path = server, path
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(index,), daemon=True) for index in range(threads)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
        assert not self.failed, self.failed[:3]

    def _ask(self, index: int) -> None:
        number = index << 20
        while not self._stop.is_set():
            number += 1
            try:
                answer, pid = self._server.ask(number, self._path)
            except (OSError, http.client.HTTPException):  # the process that had taken it is dead
                with self._lock:
                    self.broken += 1
                self._stop.wait(0.01)
                continue
            except BaseException as error:
                self.failed.append(error)
                return
            with self._lock:
                self.pids[pid] = self.pids.get(pid, 0) + 1
            if answer != 2 * number:
                self.failed.append(f"{answer} for {number}")

    def wait_for_more(self, answers: int) -> None:
        goal = sum(self.pids.values()) + answers
        wait_until(lambda: sum(self.pids.values()) >= goal or self.failed, 60, f"{answers} more answers")
        assert not self.failed, self.failed[:3]

    def wait_for_another(self) -> None:
        """Until a process answers that has answered nobody before."""
        before = set(self.pids)
        wait_until(lambda: set(self.pids) - before or self.failed, 60, "another process answers")
        assert not self.failed, self.failed[:3]


def loads(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "loads").read_text().split()]


GUNICORN = ["gunicorn", "--bind", "unix:{path}", "--workers", "4", "--graceful-timeout", "5", "--timeout", "60"]
RECYCLING = ["--max-requests", "150", "--max-requests-jitter", "50"]


@pytest.mark.parametrize("preload", [False, True], ids=["each imports", "preload"])
@pytest.mark.parametrize(
    ("worker", "application"),
    [("sync", "wsgi"), ("gthread", "wsgi"), ("uvicorn_worker.UvicornWorker", "asgi")],
    ids=["sync", "gthread", "uvicorn"],
)
def test_gunicorn_with_four_processes_that_are_killed_and_recycled(
    folder: Path, worker: str, application: str, preload: bool
) -> None:
    command = [*GUNICORN, *RECYCLING, "--worker-class", worker, f"tests.process.server_apps:{application}"]
    command += ["--threads", "3"] if worker == "gthread" else []
    command += ["--preload"] if preload else []
    with Server(folder, *command) as server:
        server.wait_until_it_answers()
        host = connect("servers")
        with Users(server) as users:
            for _ in range(2):
                users.wait_for_more(40)
                kill(next(pid for pid in users.pids if alive(pid)))
                users.wait_for_another()
            users.wait_for_more(100)
        assert len(users.pids) >= 4
        assert loads(folder) == [worker_pid(host)]
        host.stop()


def test_flasks_threaded_server_whose_model_is_killed(folder: Path) -> None:
    with Server(folder, "tests.process.server_apps", "{path}", start="main") as server:
        server.wait_until_it_answers()
        host = connect("servers")
        with Users(server, 12) as users:
            users.wait_for_more(50)
            kill(worker_pid(host))
            users.wait_for_more(100)
            wait_until(lambda: len(loads(folder)) == 2, 20)
            users.wait_for_more(50)
        assert users.broken == 0 and len(users.pids) == 1
        assert loads(folder)[1:] == [worker_pid(host)]
        host.stop()


def test_fastapi_under_uvicorn_with_two_processes_one_of_which_is_killed(folder: Path) -> None:
    command = ["uvicorn", "--uds", "{path}", "--workers", "2", "--factory", "tests.process.server_apps:fastapi"]
    with Server(folder, *command, start="lifespan") as server:
        server.wait_until_it_answers()
        host = connect("servers")
        with Users(server, 4) as users, Users(server, 4, path="/threaded") as others:
            users.wait_for_more(50)
            kill(next(iter(users.pids)))
            users.wait_for_another()
            others.wait_for_more(50)
        assert loads(folder) == [worker_pid(host)]
        host.stop()


# --- without a server -----------------------------------------------------------------------------------------------


def test_an_event_loop_for_each_call_as_asgiref_makes_it() -> None:
    from asgiref.sync import async_to_sync

    with ModelHost(Doubles)() as host:
        predict: Any = async_to_sync(host.apredict)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda number: int(predict(value(number))[0, 0]), range(200)))
        assert answers == [2 * number for number in range(200)]


def test_a_forked_process_for_each_job_as_rq_makes_it(folder: Path) -> None:
    """Some are killed while their request runs; the next job, and the parent, do not notice."""
    with ModelHost(Doubles, name="jobs")() as host:
        worker = worker_pid(host)
        for number in range(12):
            if number % 4 == 3:
                victim = os.fork()
                if not victim:
                    host.submit(np.full((1000, 10), number))
                    kill(os.getpid())
                os.waitpid(victim, 0)
            assert Child(lambda number=number: host.predict(value(number), timeout=60).tolist()).result() == [
                [2 * number]
            ]
        assert host.predict(value(99)).tolist() == [[198]]
        assert worker_pid(host) == worker
        wait_until(lambda: host.statistics().pending == 0, 10)


def test_a_pool_of_forked_processes_that_are_replaced_as_celery_makes_it(folder: Path) -> None:
    import multiprocessing

    global shared
    with ModelHost(Doubles, name="tasks")() as shared:
        worker = worker_pid(shared)
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=5) as pool:
            answers = pool.map(task, range(60), chunksize=1)
            pool.close()
            pool.join()
        assert [answer for answer, _ in answers] == [2 * number for number in range(60)]
        assert len({pid for _, pid in answers}) >= 12
        assert worker_pid(shared) == worker


shared: Any = None


def task(number: int) -> tuple[int, int]:
    return int(shared.predict(value(number), timeout=60)[0, 0]), os.getpid()

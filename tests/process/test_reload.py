"""Hosts that change their model while they serve: nothing is lost, and a model that does not load changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import ConfigError, HostClosedError, ModelHost, ModelLoadError, connect
from batch_inference.testing import alive, wait_until
from tests.process.load import MANY, kill, supervisor_pid, value, worker_pid
from tests.process.models import Affine

DIES = "dies"


class Multiplies:
    """Its input times `factor`. Notes loads and closes in `notes`, with its process; does not load before `gate` is."""

    def __init__(self, factor: Any, notes: str | None = None, gate: str | None = None) -> None:
        self._notes = notes
        if gate is not None:
            self._note(f"loading {os.getpid()}")
            while not os.path.exists(gate):
                time.sleep(0.005)
        if factor == DIES:
            print("no such weights")
            os._exit(7)
        self._factor = float(factor)
        self._note(f"loaded {os.getpid()}")

    def predict_batch(self, x: Any) -> Any:
        if (x < 0).any():
            time.sleep(0.5)
        return x * self._factor

    def close(self) -> None:
        self._note(f"closed {os.getpid()}")

    def _note(self, text: str) -> None:
        if self._notes is not None:
            with open(self._notes, "a") as file:
                file.write(text + "\n")


class Calls:
    """Threads that call `host.predict` with rising numbers, and keep for each answer the factor that it shows."""

    def __init__(self, host: ModelHost, threads: int = 8) -> None:
        self.factors: list[list[float]] = [[] for _ in range(threads)]
        self.errors: list[BaseException] = []
        self._host = host
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(n,), daemon=True) for n in range(threads)]

    def __enter__(self) -> Calls:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for_all(self, factor: float) -> None:
        """Until each thread has got an answer with that factor."""
        wait_until(lambda: all(seen[-1:] == [factor] for seen in self.factors), 30, f"{factor}; {self.errors[:2]}")

    def wait_for_more(self) -> None:
        """Until each thread has sent another request and got its answer."""
        goals = [len(seen) + 2 for seen in self.factors]
        wait_until(lambda: all(len(seen) >= goal for seen, goal in zip(self.factors, goals)), 30, str(self.errors[:2]))

    def assert_changes(self, *factors: float) -> None:
        """Nobody got an error, and everybody these factors, each as long as it was the host's."""
        assert not self.errors
        for seen in self.factors:
            assert [factor for at, factor in enumerate(seen) if not at or seen[at - 1] != factor] == list(factors)

    def _call(self, caller: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                answer = self._host.predict(np.full((1, 2), caller * 1e6 + number))
            except BaseException as error:
                self.errors.append(error)
                return
            self.factors[caller].append(float(answer[0, 0] / (caller * 1e6 + number)))


def wait_for_one_worker(host: ModelHost) -> None:
    wait_until(lambda: len(host.statistics().workers) == 1, 20, "the old worker has ended")


def lines(path: Path, what: str) -> list[int]:
    """The processes that noted `what`."""
    try:
        noted = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [int(line.split()[1]) for line in noted if line.startswith(what + " ")]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_reload_under_load_loses_nothing_and_each_caller_sees_one_change(workers: int, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with ModelHost(Multiplies, num_workers=workers)(2, str(notes)) as host, Calls(host) as calls:
        calls.wait_for_all(2)
        host.reload(3, notes=str(notes))
        assert host.predict(value(1)).tolist() == [[3]]
        calls.wait_for_all(3)
        asyncio.run(host.areload(4, notes=str(notes)))
        assert host.submit(value(1)).result(20).tolist() == [[4]]
        calls.wait_for_all(4)
        wait_until(lambda: len(lines(notes, "closed")) == 2 * max(1, workers), 20, "the old models are closed")
        assert len(lines(notes, "loaded")) == 3 * max(1, workers)
        wait_until(lambda: len(host.statistics().workers) == max(1, workers), 10)
        answered = sum(len(seen) for seen in calls.factors)
        assert host.ready and host.statistics().requests >= answered
    calls.assert_changes(2, 3, 4)
    with host:  # what it was changed to is what it is
        assert host.predict(value(1)).tolist() == [[4]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_new_model_that_does_not_load_keeps_the_old_one(workers: int) -> None:
    with ModelHost(Multiplies, num_workers=workers)(2) as host, Calls(host) as calls:
        calls.wait_for_all(2)
        with pytest.raises(ModelLoadError, match="could not convert string to float: 'no number'"):
            host.reload("no number")
        if workers:
            with pytest.raises(ModelLoadError, match=r"exited with code 7(.|\n)*no such weights"):
                host.reload(DIES)
        assert host.predict(value(1)).tolist() == [[2]]
        host.reload(5)
        calls.wait_for_all(5)
    calls.assert_changes(2, 5)


def test_a_new_model_that_never_loads_is_given_up_after_start_timeout(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with ModelHost(Multiplies, start_timeout=8)(2) as host:
        with pytest.raises(ModelLoadError, match="start_timeout=8"):
            host.reload(3, str(notes), str(tmp_path / "never"))
        (loading,) = lines(notes, "loading")
        wait_until(lambda: not alive(loading), 10)
        assert host.predict(value(1)).tolist() == [[2]]


def test_the_change_is_between_two_batches(tmp_path: Path) -> None:
    """What runs or waits when the new model is ready is answered by the old one, which then ends."""
    notes = tmp_path / "notes"
    with ModelHost(Multiplies, max_batch_size=1)(2, str(notes)) as host:
        host.reload(2, str(notes))
        wait_for_one_worker(host)
        old = worker_pid(host)
        slow = [host.submit(-value(number)) for number in range(1, 4)]  # half a second each
        (tmp_path / "gate").touch()
        host.reload(3, str(notes), str(tmp_path / "gate"))
        assert host.predict(value(1), timeout=20).tolist() == [[3]]
        assert {future.result(20)[0, 0] / -number for number, future in enumerate(slow, 1)} <= {2.0, 3.0}
        wait_until(lambda: old in lines(notes, "closed") and not alive(old), 20)


def error_of_reload(host: ModelHost, *arguments: Any) -> BaseException | None:
    """Without the traceback, which would keep the client beyond the test."""
    try:
        host.reload(*arguments)
    except Exception as error:
        return error.with_traceback(None)
    return None


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Any]:
    """A host under load whose reload waits at its gate: (host, calls, the call of reload, process that loads, gate)."""
    notes, gate = tmp_path / "notes", tmp_path / "gate"
    with ModelHost(Multiplies, max_restarts=MANY)(2) as host:
        with Calls(host, 4) as calls, ThreadPoolExecutor(1) as pool:
            calls.wait_for_all(2)
            call = pool.submit(error_of_reload, host, 3, str(notes), str(gate))
            wait_until(lambda: lines(notes, "loading"), 30)
            yield host, calls, call, lambda: lines(notes, "loading")[-1], gate
            gate.touch()
            call.result(30)


def test_the_old_worker_dies_while_the_new_one_loads(loading: Any) -> None:
    host, calls, call, _, gate = loading
    for victim in range(2):
        pid = min(worker.pid for worker in host.statistics().workers if worker.state == "ready")
        kill(pid)
        wait_until(lambda pid=pid: not alive(pid), 10)
        calls.wait_for_more()
        wait_until(lambda: sum(w.state == "ready" for w in host.statistics().workers) == 1, 20, str(victim))
    gate.touch()
    assert call.result(30) is None
    calls.wait_for_all(3)
    assert not calls.errors


def test_the_new_worker_dies_while_it_loads(loading: Any) -> None:
    host, calls, call, new, gate = loading
    kill(new())
    error = call.result(30)
    assert isinstance(error, ModelLoadError) and "SIGKILL" in str(error)
    calls.wait_for_all(2)
    gate.touch()
    host.reload(4)
    calls.wait_for_all(4)
    calls.assert_changes(2, 4)


def test_the_supervisor_dies_while_the_new_worker_loads(loading: Any) -> None:
    host, calls, call, new, gate = loading
    old, first = supervisor_pid(host), new()
    kill(old)
    wait_until(lambda: not alive(first), 20)
    wait_until(lambda: new() != first, 30, "the next supervisor is told of the reload")
    calls.wait_for_all(2)
    gate.touch()
    assert call.result(30) is None
    calls.wait_for_all(3)
    calls.assert_changes(2, 3)


def test_a_second_reload_at_the_same_time_is_refused(loading: Any) -> None:
    host, _, call, _, gate = loading
    with pytest.raises(ModelLoadError, match="already"):
        host.reload(4)
    gate.touch()
    assert call.result(30) is None
    assert host.predict(value(1)).tolist() == [[3]]


def test_the_model_in_a_thread_is_changed_again_and_again_while_old_ones_have_work() -> None:
    with ModelHost(Multiplies, num_workers=0, max_batch_size=1)(1) as host:
        slow = []
        for factor in range(2, 6):
            slow.append(host.submit(-value(factor)))  # half a second
            host.reload(factor)
            assert host.predict(value(1)).tolist() == [[factor]]
        assert [future.result(20)[0, 0] for future in slow] == [-2 * 1, -3 * 2, -4 * 3, -5 * 4]


def test_a_host_is_stopped_while_the_new_worker_loads(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    host = ModelHost(Multiplies)(2)
    host.start()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(host.reload, 3, str(notes), str(tmp_path / "never"))
        wait_until(lambda: lines(notes, "loading"), 30)
        host.stop()
        with pytest.raises(HostClosedError):
            call.result(30)
    with host:
        assert host.predict(value(1)).tolist() == [[2]]


def test_after_a_reload_deaths_of_worker_and_supervisor_bring_the_new_model_back() -> None:
    with ModelHost(Multiplies, max_restarts=MANY)(2) as host, Calls(host, 4) as calls:
        calls.wait_for_all(2)
        host.reload(3)
        wait_for_one_worker(host)  # the old one ends after reload() has returned
        for victim in (worker_pid, supervisor_pid, worker_pid):
            pid = victim(host)
            kill(pid)
            wait_until(lambda pid=pid: not alive(pid), 10)
            calls.wait_for_more()
    calls.assert_changes(2, 3)


def test_other_processes_of_a_named_host_follow_and_later_ones_may_know_the_old_or_the_new_arguments() -> None:
    name = f"reload-{os.getpid()}"
    first = ModelHost(Multiplies, name=name)(2)
    with first:
        child = os.fork()
        if not child:
            os._exit(follow(first))
        wait_until(lambda: first.statistics().requests >= 2, 30)
        first.reload(3)
        assert os.waitpid(child, 0)[1] == 0
        for arguments in (2, 3):
            with ModelHost(Multiplies, name=name)(arguments) as other:
                assert other.predict(value(1)).tolist() == [[3]]
        with pytest.raises(ConfigError, match="model arguments"):
            ModelHost(Multiplies, name=name)(4).start()
        joined = connect(name)
        assert joined.predict(value(1)).tolist() == [[3]]
        with pytest.raises(ConfigError, match="without having its model"):
            joined.reload(5)
        joined.stop()
        kill(supervisor_pid(first), signal.SIGKILL)
        assert first.predict(value(1), timeout=30).tolist() == [[3]]


def follow(host: ModelHost) -> int:
    """0 once the answers have changed from the old model's to the new one's."""
    try:
        until, seen = time.monotonic() + 30, []
        while 3 not in seen and time.monotonic() < until:
            seen.append(int(host.predict(value(1), timeout=20)[0, 0]))
        return 0 if seen[0] == 2 and seen[-1] == 3 else 1
    except BaseException:
        return 2


def test_reloading_takes_a_started_host_with_a_class() -> None:
    with pytest.raises(HostClosedError):
        ModelHost(Multiplies)(2).reload(3)
    with ModelHost(model_obj=Multiplies(2)) as host:
        with pytest.raises(ConfigError, match="instance"):
            host.reload(3)
        host.reload()
        assert host.predict(value(1)).tolist() == [[2]]


def test_a_reload_that_another_process_has_overtaken_is_refused_and_not_taken_for_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="bi-") as folder:  # a socket's path may have 107 characters
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        with ModelHost(Affine, name="shared")(2.0) as host, ModelHost(Affine, name="shared")(2.0) as other:
            assert other._client is not None
            monkeypatch.setattr(other._client.link, "_take_config", os.close)  # it has not heard of the other's yet
            host.reload(3.0)
            with pytest.raises(ModelLoadError, match="at the same time"):
                other.reload(4.0)
            assert other.predict(np.ones((1, 1))).tolist() == [[3]]

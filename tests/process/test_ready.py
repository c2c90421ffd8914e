"""What host.ready and host.healthy say, and what they stay true through."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batch_inference import ModelHost, WorkerDiedError
from batch_inference.testing import Dies, Doubles, wait_until
from tests.process import faulty
from tests.process.load import kill, supervisor_pid, value, worker_pid


def state(host: ModelHost) -> tuple[bool, bool]:
    return host.ready, host.healthy


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_host_is_ready_and_healthy_from_start_to_stop(workers: int) -> None:
    host = ModelHost(Doubles, num_workers=workers)()
    for _ in range(2):
        assert state(host) == (False, False)
        host.start()
        assert state(host) == (True, True)
        host.stop()
    assert state(host) == (False, False)


def test_while_the_only_worker_loads_again_the_host_is_healthy_and_not_ready(tmp_path: Path) -> None:
    with ModelHost(faulty.Reloads)(str(tmp_path)) as host:
        kill(worker_pid(host))
        second = wait_until(lambda: [name for name in os.listdir(tmp_path) if name.startswith("2 ")], 20)
        wait_until(lambda: state(host) == (False, True), 10)
        kill(int(second[0].split()[1]))
        wait_until(lambda: state(host) == (True, True), 20)
        kill(supervisor_pid(host))
        wait_until(lambda: state(host) == (False, True), 10)
        wait_until(lambda: state(host) == (True, True), 20)


@pytest.mark.parametrize(("most", "allowed"), [(0, "no restart"), (1, "1 restart within a minute")])
def test_a_host_that_has_given_up_is_neither_until_it_is_started_again(
    most: int, allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = ModelHost(Doubles, max_restarts=most)()
    host.start()
    for _ in range(most):
        pid = worker_pid(host)
        kill(pid)
        wait_until(lambda pid=pid: worker_pid(host) != pid and state(host) == (True, True), 20)
    kill(worker_pid(host))
    wait_until(lambda: state(host) == (False, False), 20)
    with pytest.raises(WorkerDiedError, match=f"SIGKILL.*, and max_restarts={most} allows {allowed}: the host"):
        host.predict(value(1))
    assert host.statistics().workers[0].restarts == most
    host.stop()
    said = [record.getMessage().rpartition("; ")[2] for record in caplog.records]
    assert said == ["it is started again"] * most + ["the host gives up, see max_restarts"]
    with host:
        assert state(host) == (True, True)


def test_in_a_forked_process_looking_joins_the_host() -> None:
    with ModelHost(Doubles)() as host:
        child = os.fork()
        if not child:
            os._exit(0 if host.ready and host.healthy and host.predict(value(2)).tolist() == [[4]] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert state(host) == (True, True)


# --- requests that kill workers, at the default max_restarts ----------------------------------------------------------


def test_killers_one_after_the_other_do_not_take_the_host_down() -> None:
    with ModelHost(Dies)() as host:
        for number in range(1, 4):
            with pytest.raises(WorkerDiedError, match="with it alone"):
                host.predict(-value(number), timeout=60)
            assert host.predict(value(number), timeout=60).tolist() == [[2 * number]]
        assert state(host) == (True, True)


@pytest.mark.parametrize("workers", [1, 2])
def test_killers_at_once_do_not_take_the_host_down(workers: int) -> None:
    with ModelHost(Dies, num_workers=workers)() as host, ThreadPoolExecutor(10) as pool:
        killers = [pool.submit(host.predict, -value(number), timeout=60) for number in (1, 2)]
        others: list[Any] = [pool.submit(host.predict, value(number), timeout=60) for number in range(50)]
        for killer in killers:
            assert "with it alone" in str(killer.exception(60))
        assert [other.result(60).tolist() for other in others] == [[[2 * number]] for number in range(50)]
        wait_until(lambda: state(host) == (True, True), 20)


def test_where_nothing_may_run_twice_only_the_running_batch_fails(tmp_path: Path) -> None:
    once = tmp_path / "died"
    with ModelHost(Dies, retry=False, max_batch_size=1)(once=str(once)) as host, ThreadPoolExecutor(4) as pool:
        killer = pool.submit(host.predict, -value(1), timeout=60)
        others = [pool.submit(host.predict, value(number), timeout=60) for number in range(20)]
        with pytest.raises(WorkerDiedError, match="retry=False"):
            killer.result(60)
        assert [other.result(60).tolist() for other in others] == [[[2 * number]] for number in range(20)]

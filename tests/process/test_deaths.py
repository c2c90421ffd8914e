"""Workers, supervisors and applications die, and nobody waits in vain or gets a wrong answer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import HostClosedError, ModelHost, ModelLoadError, RequestTimeoutError, WorkerDiedError
from batch_inference.batcher import ListBatcher
from batch_inference.testing import Blocks, Dies, Doubles, alive, no_leaks, parent_of, wait_until
from tests.process import faulty
from tests.process.conftest import environment
from tests.process.load import MANY, Application, Load, kill, supervisor_pid, value, worker_pid
from tests.process.models import Inflates

SECONDS = float(os.environ.get("BATCH_INFERENCE_KILL_SECONDS", "6"))  # 60 for a good look


def test_no_answer_is_wrong_or_missing_while_the_worker_is_killed_at_random() -> None:
    source, kills = random.Random(1), 0
    with ModelHost(Doubles, max_restarts=MANY)() as host, Load(host, 16) as load:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            load.wait_for_more(source.randint(1, 500))
            kill(worker_pid(host))
            kills += 1
        load.wait_for_all()
        load.stop()
        pending = host.statistics().pending
    print(f"{kills} kills, {load.answered} answers, {len(load.wrong)} wrong, {load.hung} hung")
    load.assert_clean()
    assert kills >= SECONDS / 2 and pending == 0


def test_killing_the_worker_every_second_fails_no_request() -> None:
    kills, until = 0, time.monotonic() + max(8.0, SECONDS)
    with ModelHost(Doubles, max_restarts=MANY)() as host, Load(host, 32) as load:
        while time.monotonic() < until:
            next_kill = time.monotonic() + 1.0
            load.wait_for_more()
            kill(worker_pid(host))
            kills += 1
            threading.Event().wait(max(0.0, next_kill - time.monotonic()))
        load.wait_for_all(60)
        load.stop()
        restarts = host.statistics().workers[0].restarts
    print(f"{kills} kills, {restarts} restarts, {load.answered} answers, {len(load.errors)} failed, {load.hung} hung")
    load.assert_clean()


# --- a model that ends its process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("falls") / "tries"


@pytest.fixture(scope="module")
def shared_host(tries: Path) -> Iterator[ModelHost]:
    """The name tells conftest not to look for leaks before the module ends."""
    with ModelHost(faulty.Falls, max_restarts=MANY)(str(tries)) as host:
        yield host


@pytest.mark.parametrize(
    ("way", "how", "last_words"),
    [
        (faulty.EXIT, "exited with code 7", f"last words before {faulty.EXIT}"),
        (faulty.SEGFAULT, "killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        (faulty.SYS_EXIT, "exited with code 5", f"last words before {faulty.SYS_EXIT}"),
        (faulty.INTERRUPT, "exited with code 1", "KeyboardInterrupt"),
        (faulty.EXIT_WITH_THREAD, "exited with code 5", f"last words before {faulty.EXIT_WITH_THREAD}"),
        (faulty.BABBLE, "exited with code 8", "模型坏了😀"),
    ],
)
def test_a_request_under_which_the_worker_dies_alone_fails_and_the_next_one_succeeds(
    shared_host: ModelHost, tries: Path, way: int, how: str, last_words: str
) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        shared_host.predict(value(way), timeout=30)
    assert how in str(caught.value)
    assert last_words in str(caught.value)
    assert tries.read_text().split().count(str(way)) == 2
    assert shared_host.predict(value(3), timeout=30).tolist() == [[6]]


def test_those_who_waited_with_it_are_answered(shared_host: ModelHost) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(shared_host.predict, value(number), timeout=30) for number in range(100)]
        culprit = pool.submit(shared_host.predict, value(faulty.EXIT), timeout=30)
        assert isinstance(culprit.exception(), WorkerDiedError)
    for number, answer in enumerate(answers):
        assert answer.result().tolist() == [[2 * number]]
    assert shared_host.predict(value(3), timeout=30).tolist() == [[6]]


def test_a_model_that_starts_a_thread_and_then_fails_to_load_says_so_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match="no weights"):
        ModelHost(faulty.LoadsWithThread)().start()
    assert time.monotonic() - started < 10


def test_when_max_restarts_is_exceeded_all_callers_get_the_error_and_later_ones_at_once(tmp_path: Path) -> None:
    host = ModelHost(Blocks, max_restarts=2)(str(tmp_path / "entered"), str(tmp_path / "gate"))
    host.start()
    supervisor = supervisor_pid(host)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(host.predict, value(number)) for number in range(8)]
        futures = [host.submit(value(number)) for number in range(8)]
        kills = 0
        while host.healthy:  # a request that ran alone each time is to blame for three of them, which count as one
            kills += 1
            wait_until((tmp_path / "entered").exists, 20)
            (tmp_path / "entered").unlink()
            last = worker_pid(host)
            kill(last)
            wait_until(lambda: (tmp_path / "entered").exists() or not host.healthy, 20)
        assert 3 <= kills <= 5
        for call in [*calls, *futures]:
            assert isinstance(call.exception(timeout=20), WorkerDiedError)
    with pytest.raises(WorkerDiedError, match="max_restarts"):
        host.predict(value(1))
    with pytest.raises(WorkerDiedError, match="max_restarts"):
        asyncio.run(host.apredict(value(1)))
    with pytest.raises(WorkerDiedError, match="max_restarts"):
        host.submit(value(1))
    wait_until(lambda: not alive(supervisor), 10, "the supervisor ends by itself")
    assert host.statistics().state == "failed"
    host.stop()
    (tmp_path / "gate").touch()
    host.start()
    assert host.predict(value(4), timeout=20).tolist() == [[8]]
    host.stop()


def test_a_worker_killed_while_it_loads_again_is_started_again(tmp_path: Path) -> None:
    with ModelHost(faulty.Reloads)(str(tmp_path)) as host:
        kill(worker_pid(host))
        second = wait_until(lambda: [name for name in os.listdir(tmp_path) if name.startswith("2 ")], 20)
        kill(int(second[0].split()[1]))
        assert host.predict(value(5), timeout=30).tolist() == [[10]]


def test_large_replies_arrive_whole_while_the_worker_is_killed() -> None:
    size, source = 3 << 20, random.Random(2)
    with ModelHost(faulty.Large, batcher=ListBatcher(), max_restarts=MANY)(size) as host:
        stop, answers, wrong = threading.Event(), [0] * 4, []

        def call(index: int) -> None:
            while not stop.is_set():
                number = random.randrange(251)
                reply = host.predict(value(number)[0], timeout=60)
                if reply.shape != (size,) or reply[0] != number or not (reply == number).all():
                    wrong.append(reply)
                answers[index] += 1

        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call, index) for index in range(4)]
            for _ in range(4):
                goal = sum(answers) + source.randint(1, 30)
                wait_until(lambda goal=goal: sum(answers) >= goal or any(c.done() for c in calls), 30)
                kill(worker_pid(host))
            stop.set()
            for done in calls:
                done.result(timeout=60)
        assert not wrong


def test_one_of_three_workers_is_killed_and_the_others_go_on() -> None:
    with ModelHost(Doubles, num_workers=3, max_restarts=MANY)() as host, Load(host, 12) as load:
        for index in (0, 1, 2, 0):
            victim = worker_pid(host, index)
            kill(victim)
            load.wait_for_all()
        load.stop()
        load.assert_clean()
        wait_until(lambda: all(w.state == "ready" for w in host.statistics().workers), 20)
        assert host.statistics().pending == 0


def test_a_stopped_worker_delays_its_callers_and_no_longer() -> None:
    with ModelHost(Doubles)() as host:
        pid = worker_pid(host)
        kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RequestTimeoutError):
                host.predict(value(1), timeout=0.2)
            waiting = host.submit(value(2))
        finally:
            kill(pid, signal.SIGCONT)
        assert waiting.result(timeout=20).tolist() == [[4]]
        assert host.predict(value(3), timeout=20).tolist() == [[6]]
        wait_until(lambda: host._client is not None and host._client.idle, 10, "all slots are back")


# --- the supervisor ---------------------------------------------------------------------------------------------------


def test_after_the_death_of_the_supervisor_another_is_elected_and_all_are_answered() -> None:
    with ModelHost(Doubles)() as host, Load(host, 16) as load:
        for _ in range(3):
            load.wait_for_all()
            worker = worker_pid(host)
            supervisor = parent_of(worker)
            kill(supervisor)
            wait_until(lambda s=supervisor, w=worker: not alive(s) and not alive(w), 10, "the worker dies as well")
            load.wait_for_all()
            assert supervisor_pid(host) != supervisor
        load.stop()
        load.assert_clean()


def test_a_worker_that_dies_while_it_loads_under_a_new_supervisor_is_restarted(tmp_path: Path) -> None:
    with ModelHost(faulty.Reloads)(str(tmp_path)) as host:
        kill(supervisor_pid(host))
        second = wait_until(lambda: [name for name in os.listdir(tmp_path) if name.startswith("2 ")], 20)
        kill(int(second[0].split()[1]))
        assert host.predict(value(5), timeout=30).tolist() == [[10]]


def test_a_worker_that_was_stopped_while_its_interpreter_starts_dies_with_its_supervisor() -> None:
    with ModelHost(Doubles, max_restarts=MANY)() as host:
        first = worker_pid(host)
        supervisor = parent_of(first)
        kill(first)

        def next_one() -> int:
            pid = host.statistics().workers[0].pid
            return pid if pid != first else 0

        second = wait_until(next_one, 20)
        kill(second, signal.SIGSTOP)
        kill(supervisor)
        wait_until(lambda: not alive(second), 10)
        assert host.predict(value(1), timeout=30).tolist() == [[2]]


def test_a_stop_during_the_election_of_a_supervisor_is_quick() -> None:
    for _ in range(3):
        host = ModelHost(Doubles)()
        with no_leaks():
            host.start()
            kill(supervisor_pid(host))
            started = time.monotonic()
            host.stop()
            assert time.monotonic() - started < 10


def test_while_the_supervisor_is_stopped_requests_go_on() -> None:
    with ModelHost(Doubles)() as host, Load(host, 8) as load:
        load.wait_for_all()  # so that the worker has heard of the channels on which it wakes them
        supervisor = supervisor_pid(host)
        kill(supervisor, signal.SIGSTOP)
        try:
            load.wait_for_all()
            grows = host.submit(np.ones((1, 1 << 20)))  # more memory than there is: the worker must hear of it first
        finally:
            kill(supervisor, signal.SIGCONT)
        assert grows.result(timeout=20).sum() == 2 << 20
        load.wait_for_all()
        load.stop()
        load.assert_clean()
        assert supervisor_pid(host) == supervisor


# --- several applications ---------------------------------------------------------------------------------------------


@pytest.fixture
def applications() -> Iterator[list[Application]]:
    """Three applications that use one host, the one that started it first."""
    name, found = f"deaths-{os.getpid()}-{time.monotonic_ns()}", []
    try:
        for number in range(3):
            found.append(Application(name, 2, 1000 * number, environment()))
            if number != 1:  # the first is there before the others, which come together
                found[0].wait_until_ready()
        for application in found:
            application.wait_until_ready()
        yield found
    finally:
        for application in found:
            application.kill()


def finish(applications: list[Application]) -> None:
    for application in applications:
        counts = application.finish()
        assert counts["answers"] > 0 and not counts["wrong"] and not counts["errors"] and not counts["hung"], counts


def test_one_of_three_applications_is_killed_and_the_others_go_on(applications: list[Application]) -> None:
    worker = applications[1].wait_until_ready()
    mapped = segments(worker)
    applications[1].process.kill()
    for other in (applications[0], applications[2]):
        other.ask("more")
    wait_until(lambda: segments(worker) < mapped, 10, "the memory of the killed application is unmapped in the worker")
    assert applications[0].wait_until_ready() == worker
    finish([applications[0], applications[2]])


def test_the_application_that_started_the_host_is_killed_and_the_others_go_on(applications: list[Application]) -> None:
    worker = applications[0].wait_until_ready()
    applications[0].process.kill()
    for other in applications[1:]:
        other.ask("more")
        assert other.wait_until_ready() == worker
    finish(applications[1:])
    wait_until(lambda: not alive(worker), 5, "the worker ends when the last application has left")


def test_after_the_death_of_the_supervisor_all_applications_go_on_with_one_new_one(
    applications: list[Application],
) -> None:
    old, worker = int(applications[0].ask("supervisor")), applications[0].wait_until_ready()
    kill(old)
    wait_until(lambda: not alive(old) and not alive(worker), 10, "the worker dies as well")
    for application in applications:
        application.ask("more")
    new = {application.ask("supervisor") for application in applications}
    assert len(new) == 1 and str(old) not in new
    finish(applications)


def segments(pid: int) -> int:
    with open(f"/proc/{pid}/maps") as file:
        return sum("memfd:batch_inference" in line for line in file)


def test_a_killed_application_whose_requests_run_leaves_no_memory_in_the_worker(tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    name = f"running-{os.getpid()}"
    with ModelHost(Blocks, name=name, linger=0.1)(str(entered), str(gate)) as host:
        worker = worker_pid(host)
        mine = host.submit(value(1))
        wait_until(entered.exists, 10)
        before = segments(worker)
        child = os.fork()
        if not child:
            try:
                futures = [host.submit(np.ones((1, 1000))) for _ in range(10)]
                (tmp_path / "sent").touch()
                futures[0].result(timeout=60)
            finally:
                os._exit(1)
        wait_until((tmp_path / "sent").exists, 20)
        kill(child)
        os.waitpid(child, 0)
        gate.touch()
        assert mine.result(timeout=20).tolist() == [[2]]
        assert host.predict(value(2), timeout=20).tolist() == [[4]]
        wait_until(lambda: segments(worker) <= before, 10, "the memory of the child is unmapped in the worker")
        assert worker_pid(host) == worker
        wait_until(lambda: host.statistics().pending == 0, 5)


# --- start and stop ---------------------------------------------------------------------------------------------------


def test_stop_answers_all_who_wait(tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    host = ModelHost(Blocks, max_batch_size=4)(str(entered), str(gate))
    host.start()

    async def tasks() -> list[Any]:
        return await asyncio.gather(*[host.apredict(value(number)) for number in range(200, 220)])

    with ThreadPoolExecutor(10) as pool:
        threads = [pool.submit(host.predict, value(number)) for number in range(8)]
        loop = pool.submit(asyncio.run, tasks())
        futures = [host.submit(value(number)) for number in range(100, 110)]
        wait_until(lambda: host.statistics().pending == 8 + 20 + 10, 20)
        stopping = threading.Thread(target=host.stop)
        stopping.start()

        def refused() -> bool:
            try:
                host.submit(value(0)).cancel()
            except HostClosedError:
                return True
            return False

        wait_until(refused, 10, "a stopping host takes no more requests")
        gate.touch()
        for number, done in [*enumerate(threads), *enumerate(futures, 100)]:
            assert done.result(timeout=20).tolist() == [[2 * number]]
        assert [answer.tolist() for answer in loop.result(timeout=20)] == [[[2 * n]] for n in range(200, 220)]
    stopping.join(20)
    assert not stopping.is_alive()
    host.stop()  # a second time does nothing


@pytest.mark.parametrize("size", [10, 2 << 20])
def test_stop_answers_the_tasks_of_a_loop_that_is_busy(size: int) -> None:
    """Their replies are there, unread, when stop() takes the loop's channel away."""
    for _ in range(3):
        host = ModelHost(faulty.Large, batcher=ListBatcher())(size)
        host.start()

        async def calls(host: ModelHost = host) -> list[Any]:
            await host.apredict(value(1)[0])
            tasks = [asyncio.ensure_future(host.apredict(value(number)[0])) for number in range(20)]
            while host.statistics().pending + sum(task.done() for task in tasks) < 20:  # until all are sent
                await asyncio.sleep(0)
            stopping = threading.Thread(target=host.stop)
            stopping.start()
            stopping.join(30)  # the loop is blocked until the host has stopped
            assert not stopping.is_alive()
            return await asyncio.wait_for(asyncio.gather(*tasks), 20)

        for number, answer in enumerate(asyncio.run(calls())):
            assert answer.shape == (size,) and (answer == number).all()


def test_close_of_the_model_is_called_on_stop(tmp_path: Path) -> None:
    host = ModelHost(faulty.Closes)(str(tmp_path / "closed"))
    for lines in (1, 2):
        host.start()
        host.stop()
        assert len((tmp_path / "closed").read_text().split()) == lines


def test_started_and_stopped_many_times_a_host_keeps_nothing() -> None:
    host = ModelHost(Doubles)()
    with no_leaks():
        for number in range(int(os.environ.get("BATCH_INFERENCE_STARTS", "5"))):
            with no_leaks():
                host.start()
                assert host.predict(value(number)).tolist() == [[2 * number]]
                assert host.submit(value(number)).result(timeout=20).tolist() == [[2 * number]]
                assert asyncio.run(host.apredict(value(number))).tolist() == [[2 * number]]
                host.stop()


def test_of_two_threads_that_start_a_host_at_once_one_is_refused() -> None:
    host = ModelHost(Doubles)()
    together = threading.Barrier(2)

    def start() -> str:
        together.wait(10)
        try:
            host.start()
        except HostClosedError:
            return "refused"
        return "started"

    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(start), pool.submit(start)]
        assert sorted(outcome.result(timeout=30) for outcome in outcomes) == ["refused", "started"]
    assert host.predict(value(1)).tolist() == [[2]]
    host.stop()


def test_the_worker_outlives_the_thread_that_started_it() -> None:
    host = ModelHost(Doubles)()
    thread = threading.Thread(target=host.start)
    thread.start()
    thread.join(30)
    worker = worker_pid(host)
    wait_until(lambda: not thread.is_alive(), 5)
    for number in range(3):
        assert host.predict(value(number), timeout=20).tolist() == [[2 * number]]
    assert worker_pid(host) == worker
    host.stop()


def test_submitting_with_timeouts_never_fails_by_itself() -> None:
    """The thread that completes futures takes a deadline off its list while submit still looks at it."""
    with ModelHost(Doubles)() as host, ThreadPoolExecutor(8) as pool:

        def call(caller: int) -> None:
            for number in range(300):
                assert host.submit(value(caller, number), timeout=30).result().tolist() == [[2 * caller, 2 * number]]

        for done in [pool.submit(call, caller) for caller in range(8)]:
            done.result(timeout=60)


# --- an application that takes the exit statuses of all its children ------------------------------------------------

STEALS = """
import os, signal, sys, time
import numpy as np
from batch_inference import ModelHost, WorkerDiedError
from batch_inference.testing import Dies, wait_until, alive
from tests.process.load import Load, supervisor_pid, worker_pid

def steal(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, steal if sys.argv[1] == "steal" else signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with ModelHost(Dies, max_restarts=100)(signal.SIGSEGV) as host:
    try:
        host.predict(-np.ones((1, 1)), timeout=30)
    except WorkerDiedError as error:
        assert "SIGSEGV" in str(error), error
    else:
        raise SystemExit("no error")
    with Load(host, 4) as load:
        old = supervisor_pid(host)
        os.kill(old, signal.SIGKILL)
        load.wait_for_all()
        os.kill(worker_pid(host), signal.SIGKILL)
        load.wait_for_all()
    load.assert_clean()
print("done")
"""


@pytest.mark.parametrize("way", ["steal", "ignore"])
def test_exit_statuses_that_the_application_takes_or_ignores_change_nothing(run_script: Any, way: str) -> None:
    assert run_script(STEALS, way).stdout.split() == ["done"]


def test_a_death_in_the_first_batch_is_survived(tmp_path: Path) -> None:
    with ModelHost(Dies)(once=str(tmp_path / "died")) as host:
        assert host.predict(-value(4), timeout=30).tolist() == [[-8]]


# --- more replies and requests than pipes hold ------------------------------------------------------------------------

MANY_REQUESTS = 10_000  # a loop's pipe holds the wake-ups of 8,192 replies, a worker's pipe 2,048 requests


def leave_replies_unread(host: ModelHost, meanwhile: Any) -> bool:
    """Whether tasks get the right replies though their loop did not run from the first to the end of `meanwhile`."""

    async def calls() -> bool:
        worker, before = worker_pid(host), host.statistics().requests
        kill(worker, signal.SIGSTOP)
        try:
            tasks = [asyncio.ensure_future(host.apredict(value(number))) for number in range(MANY_REQUESTS)]
            while host.statistics().pending < MANY_REQUESTS:
                await asyncio.sleep(0.01)
        finally:
            kill(worker, signal.SIGCONT)
        wait_until(lambda: host.statistics().requests == before + MANY_REQUESTS, 30)
        meanwhile(worker)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return [answer.tolist() for answer in answers] == [[[2 * number]] for number in range(MANY_REQUESTS)]

    return asyncio.run(calls())


def test_requests_beyond_the_size_of_a_pipe_survive_the_death_of_a_worker_that_read_none() -> None:
    with ModelHost(Doubles, max_batch_size=256)() as host:
        for victim in (worker_pid, supervisor_pid):
            pid, worker = victim(host), worker_pid(host)
            kill(worker, signal.SIGSTOP)
            futures = [host.submit(value(number)) for number in range(MANY_REQUESTS)]
            kill(pid)
            kill(worker, signal.SIGCONT)
            for number, future in enumerate(futures):
                assert future.result(timeout=60).tolist() == [[2 * number]]


def test_replies_whose_wake_ups_did_not_fit_a_pipe_survive_the_death_of_the_worker() -> None:
    with ModelHost(Doubles, max_batch_size=256)() as host:

        def die(worker: int) -> None:
            kill(worker)
            wait_until(lambda: worker_pid(host) != worker, 20)

        assert leave_replies_unread(host, die)


def test_an_application_that_is_killed_with_more_replies_unread_than_fit_hurts_nobody() -> None:
    with ModelHost(Doubles, max_batch_size=256, name=f"unread-{os.getpid()}", linger=0.0)() as host:
        worker = worker_pid(host)
        child = os.fork()
        if not child:
            try:
                host.predict(value(1), timeout=20)
                leave_replies_unread(host, lambda worker: kill(os.getpid()))
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        for number in range(20):
            assert host.predict(value(number), timeout=20).tolist() == [[2 * number]]
        assert worker_pid(host) == worker


def test_replies_too_large_for_their_slots_arrive_though_the_supervisor_was_stopped() -> None:
    """They go by way of the supervisor, and the worker must go on writing when nothing else wakes it."""
    with ModelHost(Inflates, batcher=ListBatcher())() as host:
        small = [host.submit(np.int64(10)) for _ in range(600)]  # so that there is memory for as many
        assert all(len(future.result(timeout=30)) == 10 for future in small)
        supervisor, sizes = supervisor_pid(host), range(1 << 16, (1 << 16) + 600)
        kill(supervisor, signal.SIGSTOP)
        try:
            futures = [host.submit(np.int64(size)) for size in sizes]
            wait_until(lambda: host.statistics().requests == 1200, 30)
        finally:
            kill(supervisor, signal.SIGCONT)
        for size, future in zip(sizes, futures):
            reply = future.result(timeout=30)
            assert len(reply) == size and (reply == size % 251).all()


def test_nobody_is_told_that_there_is_no_room_while_there_is() -> None:
    """Slots of many sizes are cut, put together and added by many threads at once."""
    with ModelHost(Doubles, max_batch_size=256)() as host, ThreadPoolExecutor(12) as pool:

        def call(caller: int) -> None:
            source = random.Random(caller)
            for number in range(100):
                x = np.full((1, source.choice([1, 10, 1000, 5000, 50_000])), caller * 1000.0 + number)
                reply = host.submit(x).result(timeout=30) if caller % 2 else host.predict(x, timeout=30)
                assert np.array_equal(reply, 2 * x)

        for done in [pool.submit(call, caller) for caller in range(12)]:
            done.result(timeout=60)

"""Random faults under load: python -m tests.soak [minutes] [--seed N] [--processes N] [--workers N].

Some application processes call one named host, each from threads, event loops and futures, every caller with values
of its own. Part of the calls time out or are cancelled, raise, are more than the host takes, or kill or stop the worker
under them. Meanwhile this process kills workers, supervisors and applications at random, stops them, and has the model
reloaded. At the end it prints what happened; the exit status is 0 if every request ended in its own answer or in an
error that it may end in, nobody hangs and nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from typing import Any

import numpy as np

from batch_inference import (
    BatchInferenceError,
    ModelHost,
    ModelLoadError,
    OverloadedError,
    RequestTimeoutError,
    WorkerDiedError,
)
from batch_inference.testing import alive, parent_of
from tests.process.load import MANY, kill

THREADS, LOOPS, TASKS, SUBMITTERS = 8, 2, 12, 1
BATCH_TIMEOUT = 4.0  # seconds
HUNG = 90.0  # seconds without an answer
MAX_PENDING = 300
SUPERVISOR_DEATHS = 3  # a minute; a client gives up at five
MARK = "BATCH_INFERENCE_SOAK"
RAISES, KILLS, STOPS = -1.0, -2.0, -3.0
POISON = {RAISES: "raises", KILLS: "kills", STOPS: "stops"}


class Model:
    """Twice its input; a batch takes up to a few milliseconds. A row whose first number is negative is poison."""

    def __init__(self, loads: bool = True) -> None:
        if not loads:
            raise OSError("no weights")

    def predict_batch(self, x: Any) -> Any:
        if random.random() < 0.3:
            time.sleep(random.random() * 0.004)
        if (x[:, 0] == RAISES).any():
            raise ValueError("poison")
        if (x[:, 0] == KILLS).any():
            os._exit(9)
        if (x[:, 0] == STOPS).any():
            os.kill(os.getpid(), signal.SIGSTOP)
        return x * 2


def make_host(name: str, workers: int) -> ModelHost:
    return ModelHost(
        Model,
        name=name,
        num_workers=workers,
        max_restarts=MANY,
        max_pending=MAX_PENDING,
        batch_timeout=BATCH_TIMEOUT,
        linger=0.5,
    )()


def make_request(source: random.Random, caller: int, number: int) -> Any:
    shape = (source.randint(1, 4), source.choice([1, 1, 1, 50, 2000, 200_000 if source.random() < 0.05 else 2]))
    request = np.full(shape, caller * 1_000_000.0 + number)
    request[0, 0] += 0.5
    chance = source.random()
    if chance < 0.01:
        request[0, 0] = RAISES
    elif chance < 0.0103:
        request[0, 0] = KILLS
    elif chance < 0.0104:
        request[0, 0] = STOPS
    return request


def allowed(request: Any, error: BaseException, hurried: bool) -> bool:
    """Whether a request may end in an error; `hurried`: it had a timeout, or was cancelled."""
    poison = POISON.get(request[0, 0])
    if isinstance(error, ValueError) and poison == "raises":
        return str(error) == "poison"
    if isinstance(error, WorkerDiedError):  # the kills that come from outside may hit the same request three times
        return poison in ("kills", "stops") or "SIGKILL" in str(error)
    return hurried and isinstance(error, (RequestTimeoutError, asyncio.CancelledError))


# --- an application ---------------------------------------------------------------------------------------------------


class Application:
    def __init__(self, host: ModelHost, first: int) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._host = host
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._thread, args=(first + n,)) for n in range(THREADS)]
        self._threads += [threading.Thread(target=self._loop, args=(first + 100 * n,)) for n in range(1, LOOPS + 1)]
        self._threads += [threading.Thread(target=self._submitter, args=(first + 900 + n,)) for n in range(SUBMITTERS)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def finish(self) -> None:
        self._stop.set()
        deadline = time.monotonic() + HUNG
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.counts["hung"] = sum(thread.is_alive() for thread in self._threads)
        client: Any = self._host._client
        deadline = time.monotonic() + 30
        while not client.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        self.counts["leaked"] = 0 if client.idle else client.arena.mapped - client.arena.free

    def reload(self, loads: bool) -> str:
        try:
            self._host.reload(*(() if loads else (False,)))
        except BatchInferenceError as error:
            if loads or not isinstance(error, ModelLoadError):
                return f"refused: {error}".replace("\n", " ")[:200]
            return "kept the old model"
        return "changed the model" if loads else "wrong: a model that cannot be loaded was"

    def _count(self, what: str, note: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if note and len(self.notes) < 20:
                self.notes.append(note[:700])

    def _check(self, request: Any, answer: Any) -> None:
        # A worker that a request stopped goes on when the worker happens to be paused and continued from outside.
        answerable = request[0, 0] >= 0 or request[0, 0] == STOPS
        if isinstance(answer, np.ndarray) and np.array_equal(answer, 2 * request) and answerable:
            self._count("answers")
        else:
            self._count("wrong", f"{request.ravel()[:2]} {request.shape} -> {np.ravel(answer)[:2]} {np.shape(answer)}")

    def _failed(self, request: Any, error: BaseException, hurried: bool) -> None:
        if not allowed(request, error, hurried):
            self._count("lost", f"{request[0, 0]}: {error!r}")
            return
        poison = POISON.get(request[0, 0])
        self._count(f"{type(error).__name__}{f' ({poison})' if poison else ''}")

    def _thread(self, caller: int) -> None:
        source, number = random.Random(caller), 0
        while not self._stop.is_set():
            number += 1
            request = make_request(source, caller, number)
            hurried = number % 20 == 0
            try:
                answer = self._host.predict(request, timeout=source.random() * 0.05 if hurried else None)
            except Exception as error:
                self._failed(request, error, hurried)
            else:
                self._check(request, answer)

    def _submitter(self, caller: int) -> None:
        source, number, pending = random.Random(caller), 0, deque()
        while not self._stop.is_set() or pending:
            if not self._stop.is_set():
                number += 1
                request = make_request(source, caller, number)
                hurried = number % 20 == 0
                try:
                    future = self._host.submit(request, timeout=source.random() * 0.1 if hurried else None)
                except OverloadedError:  # it was not accepted
                    self._count("overloaded")
                    time.sleep(0.01)
                    continue
                pending.append((request, future, hurried))
                if number % 7 == 0 and future.cancel():
                    self._count("cancelled")
                    pending.pop()
            if len(pending) > MAX_PENDING or self._stop.is_set() and pending:
                request, future, hurried = pending.popleft()
                try:
                    answer = future.result(timeout=HUNG)
                except Exception as error:
                    self._failed(request, error, hurried)
                else:
                    self._check(request, answer)

    def _loop(self, first: int) -> None:
        async def task(caller: int) -> None:
            source, number = random.Random(caller), 0
            while not self._stop.is_set():
                number += 1
                request = make_request(source, caller, number)
                hurried = number % 20 == 0 or number % 11 == 0
                call = asyncio.ensure_future(
                    self._host.apredict(request, timeout=source.random() * 0.05 if number % 20 == 0 else None)
                )
                if number % 11 == 0:
                    asyncio.get_running_loop().call_later(source.random() * 0.01, call.cancel)
                try:
                    answer = await call
                except (Exception, asyncio.CancelledError) as error:
                    self._failed(request, error, hurried)
                else:
                    self._check(request, answer)

        async def tasks() -> None:
            await asyncio.gather(*[task(first + number) for number in range(TASKS)])

        asyncio.run(tasks())


def run_application(name: str, workers: int, first: int) -> None:
    faulthandler.enable()
    with make_host(name, workers) as host:
        print("ready", flush=True)
        application = Application(host, first)
        for line in sys.stdin:
            if line.strip() == "finish":
                break
            print(application.reload(line.strip() == "reload"), flush=True)
        application.finish()
        print(json.dumps({"counts": application.counts, "notes": application.notes[:5]}), flush=True)
        if application.counts["hung"]:
            faulthandler.dump_traceback()
            os._exit(1)


# --- the faults -------------------------------------------------------------------------------------------------------


class Soak:
    def __init__(self, processes: int, workers: int, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._source = random.Random(seed)
        self._name = f"soak-{os.getpid()}"
        self._workers = workers
        self._mark = os.environ[MARK] = uuid.uuid4().hex
        self._started = 0
        self._elections: deque[float] = deque()
        self._host = make_host(self._name, workers)  # to look at its statistics
        self._host.start()
        self._applications = [self._start() for _ in range(processes)]

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._source.random())
            faults, weights = zip(
                (self.kill_worker, 10),
                (self.pause_worker, 3),
                (self.stop_worker, 2),
                (self.kill_supervisor, 2),
                (self.pause_supervisor, 1),
                (self.kill_application, 1),
                (self.reload, 3),
                (self.reload_in_vain, 1),
            )
            chosen = self._source.choices(faults, weights)[0]
            if chosen():
                self.faults[chosen.__name__.replace("_", " ")] += 1

    def finish(self) -> None:
        for application in self._applications:
            try:
                output, _ = application.communicate("finish\n", timeout=3 * HUNG)
                report = json.loads(output.splitlines()[-1])
            except (subprocess.TimeoutExpired, ValueError, IndexError, BrokenPipeError):
                hangs = application.poll() is None
                if hangs:
                    application.send_signal(signal.SIGABRT)  # its faulthandler says where
                self.counts["hung" if hangs else "failed to start"] += 1
                continue
            for line in output.splitlines()[:-1]:
                if line != "ready":
                    self.faults[f"reloads that {line}" if not line.startswith("refused") else "reloads refused"] += 1
                    if line.startswith("wrong"):
                        self.counts["wrong"] += 1
                    if line.startswith("refused"):
                        self.notes.append(line)
            self.counts.update(report["counts"])
            self.notes = report["notes"] + self.notes
        self._host.stop()
        deadline = time.monotonic() + 10
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.counts["processes left"] = len(self.left())

    def left(self) -> list[int]:
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if self._mark.encode() in file.read() and alive(pid) and pid != os.getpid():
                        found.append(pid)
            except OSError:
                pass
        return found

    def kill_worker(self) -> bool:
        pid = self._worker()
        if pid:
            kill(pid)
        return bool(pid)

    def pause_worker(self) -> bool:
        return self._stop_for_a_while(self._worker())

    def stop_worker(self) -> bool:
        """For good: it is killed after batch_timeout."""
        pid = self._worker()
        if pid:
            kill(pid, signal.SIGSTOP)
        return bool(pid)

    def kill_supervisor(self) -> bool:
        now = time.monotonic()
        while self._elections and self._elections[0] < now - 60:
            self._elections.popleft()
        pid = self._supervisor()
        if not pid or len(self._elections) >= SUPERVISOR_DEATHS:
            return False
        self._elections.append(now)
        kill(pid)
        return True

    def pause_supervisor(self) -> bool:
        return self._stop_for_a_while(self._supervisor())

    def kill_application(self) -> bool:
        index = self._source.randrange(len(self._applications))
        self._applications[index].kill()
        self._applications[index].communicate()
        self._applications[index] = self._start()
        return True

    def reload(self) -> bool:
        return self._ask("reload")

    def reload_in_vain(self) -> bool:
        return self._ask("reload what does not load")

    def _ask(self, what: str) -> bool:
        application = self._source.choice(self._applications)
        assert application.stdin is not None
        try:
            application.stdin.write(what + "\n")
            application.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _stop_for_a_while(self, pid: int) -> bool:
        if pid:
            kill(pid, signal.SIGSTOP)
            time.sleep(self._source.random() * 0.3)
            kill(pid, signal.SIGCONT)
        return bool(pid)

    def _worker(self) -> int:
        """Mostly one that serves: a reload in which one dies while it loads is given up."""
        workers = self._host.statistics().workers
        if self._source.random() < 0.9:
            workers = tuple(worker for worker in workers if worker.state == "ready") or workers
        return self._source.choice(workers).pid if workers else 0

    def _supervisor(self) -> int:
        return parent_of(self._worker())

    def _start(self) -> subprocess.Popen[str]:
        self._started += 1
        first = 1000 * self._started
        command = [sys.executable, "-m", "tests.soak", "application", self._name, str(self._workers), str(first)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0])
    parser.add_argument("minutes", nargs="?", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    soak = Soak(options.processes, options.workers, options.seed)
    soak.run(60 * options.minutes)
    soak.finish()
    bad_names = ("wrong", "lost", "hung", "failed to start", "leaked", "processes left")
    bad = {name: soak.counts.pop(name, 0) for name in bad_names}
    print(f"{'requests':16}{sum(soak.counts.values()) + bad['wrong'] + bad['lost']}")
    print(f"{'answers':16}{soak.counts.pop('answers', 0)}")
    for name, count in bad.items():
        print(f"{name:16}{count}")
    for title, counts in (("ended otherwise", soak.counts), ("faults", soak.faults)):
        print(f"{title}: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    for note in soak.notes[:10]:
        print(note)
    return 1 if any(bad.values()) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["application"]:
        run_application(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())

"""Random deaths under load: python -m tests.soak [minutes] [--seed N] [--processes N] [--workers N].

Some application processes call one named host, each from threads, event loops and futures, every caller with values
of its own; part of the calls time out or are cancelled. Meanwhile this process kills and stops workers, supervisors
and applications at random. At the end it prints what happened; the exit status is 0 if every request ended in its own
answer or in an error of ours, nobody hangs and nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
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

from batch_inference import BatchInferenceError, ModelHost, OverloadedError
from batch_inference.testing import alive
from tests.process.load import MANY, kill, parent_of

THREADS, LOOPS, TASKS, SUBMITTERS = 6, 2, 12, 1
HUNG = 60.0  # seconds without an answer
SUPERVISOR_DEATHS = 3  # a minute; a client gives up at five
MARK = "BATCH_INFERENCE_SOAK"


class Model:
    """Twice its input; a batch takes up to a few milliseconds."""

    def predict_batch(self, x: Any) -> Any:
        if random.random() < 0.3:
            time.sleep(random.random() * 0.004)
        return x * 2


def make_host(name: str, workers: int) -> ModelHost:
    return ModelHost(Model, name=name, num_workers=workers, max_restarts=MANY, linger=0.5)()


def make_request(source: random.Random, caller: int, number: int) -> Any:
    shape = (source.randint(1, 4), source.choice([1, 1, 1, 50, 2000, 200_000 if source.random() < 0.05 else 2]))
    request = np.full(shape, caller * 1_000_000.0 + number)
    request[0, 0] += 0.5
    return request


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
        deadline = time.monotonic() + 10
        while not client.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        self.counts["leaked"] = 0 if client.idle else client.arena.mapped - client.arena.free

    def _count(self, what: str, note: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if note:
                self.notes.append(note[:500])

    def _check(self, request: Any, answer: Any) -> None:
        if isinstance(answer, np.ndarray) and np.array_equal(answer, 2 * request):
            self._count("answers")
        else:
            self._count("wrong", f"{request.ravel()[:2]} {request.shape} -> {np.ravel(answer)[:2]} {np.shape(answer)}")

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, (BatchInferenceError, asyncio.CancelledError)) and not isinstance(error, OverloadedError):
            self._count(type(error).__name__, "" if "Timeout" in type(error).__name__ else str(error))
        else:
            self._count("lost", repr(error))

    def _thread(self, caller: int) -> None:
        source, number = random.Random(caller), 0
        while not self._stop.is_set():
            number += 1
            request = make_request(source, caller, number)
            try:
                answer = self._host.predict(request, timeout=source.random() * 0.05 if number % 20 == 0 else None)
            except Exception as error:
                self._failed(error)
            else:
                self._check(request, answer)

    def _submitter(self, caller: int) -> None:
        source, number, pending = random.Random(caller), 0, deque()
        while not self._stop.is_set() or pending:
            if not self._stop.is_set():
                number += 1
                request = make_request(source, caller, number)
                try:
                    future = self._host.submit(request, timeout=source.random() * 0.1 if number % 20 == 0 else None)
                except Exception as error:
                    self._failed(error)
                    continue
                pending.append((request, future))
                if number % 7 == 0 and future.cancel():
                    self._count("cancelled")
                    pending.pop()
            if len(pending) > 20 or self._stop.is_set() and pending:
                request, future = pending.popleft()
                try:
                    answer = future.result(timeout=HUNG)
                except Exception as error:
                    self._failed(error)
                else:
                    self._check(request, answer)

    def _loop(self, first: int) -> None:
        async def task(caller: int) -> None:
            source, number = random.Random(caller), 0
            while not self._stop.is_set():
                number += 1
                request = make_request(source, caller, number)
                call = asyncio.ensure_future(
                    self._host.apredict(request, timeout=source.random() * 0.05 if number % 20 == 0 else None)
                )
                if number % 11 == 0:
                    asyncio.get_running_loop().call_later(source.random() * 0.01, call.cancel)
                try:
                    answer = await call
                except (Exception, asyncio.CancelledError) as error:
                    self._failed(error)
                else:
                    self._check(request, answer)

        async def tasks() -> None:
            await asyncio.gather(*[task(first + number) for number in range(TASKS)])

        asyncio.run(tasks())


def run_application(name: str, workers: int, first: int) -> None:
    with make_host(name, workers) as host:
        print("ready", flush=True)
        application = Application(host, first)
        sys.stdin.readline()
        application.finish()
        counts = {"counts": application.counts, "notes": application.notes[:5]}
        print(json.dumps(counts), flush=True)
        if application.counts["hung"]:
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
            fault = self._source.choices(
                [self.kill_worker, self.stop_worker, self.kill_supervisor, self.stop_supervisor, self.kill_application],
                [10, 3, 2, 1, 1],
            )[0]
            if fault():
                self.faults[fault.__name__.replace("_", " ")] += 1

    def finish(self) -> None:
        for application in self._applications:
            try:
                output, _ = application.communicate("\n", timeout=3 * HUNG)
                report = json.loads(output.splitlines()[-1])
            except (subprocess.TimeoutExpired, ValueError, IndexError):
                application.kill()
                self.counts["hung" if application.returncode is None else "failed to start"] += 1
                continue
            self.counts.update(report["counts"])
            self.notes += report["notes"]
        self._host.stop()
        deadline = time.monotonic() + 5
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

    def stop_worker(self) -> bool:
        return self._stop_for_a_while(self._worker())

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

    def stop_supervisor(self) -> bool:
        return self._stop_for_a_while(self._supervisor())

    def kill_application(self) -> bool:
        index = self._source.randrange(len(self._applications))
        self._applications[index].kill()
        self._applications[index].communicate()
        self._applications[index] = self._start()
        return True

    def _stop_for_a_while(self, pid: int) -> bool:
        if pid:
            kill(pid, signal.SIGSTOP)
            time.sleep(self._source.random() * 0.3)
            kill(pid, signal.SIGCONT)
        return bool(pid)

    def _worker(self) -> int:
        return self._source.choice(self._host.statistics().workers).pid

    def _supervisor(self) -> int:
        try:
            return parent_of(self._worker())
        except OSError:
            return 0

    def _start(self) -> subprocess.Popen[str]:
        self._started += 1
        first = 1000 * self._started
        command = [sys.executable, "-m", "tests.soak", "application", self._name, str(self._workers), str(first)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0])
    parser.add_argument("minutes", nargs="?", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    soak = Soak(options.processes, options.workers, options.seed)
    soak.run(60 * options.minutes)
    soak.finish()
    print(f"{'answers':16}{soak.counts.pop('answers', 0)}")
    names = ("wrong", "lost", "hung", "failed to start", "leaked", "processes left")
    bad = {name: soak.counts.pop(name, 0) for name in names}
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

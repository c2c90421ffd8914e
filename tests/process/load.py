"""Callers that send distinct values in a closed loop and count what comes back; as a program, an application.

    python -m tests.process.load NAME THREADS

starts or joins the host NAME of Doubles, says "ready", calls until its standard input closes, and prints its counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

import numpy as np

from batch_inference import ModelHost
from batch_inference.testing import Doubles, parent_of, wait_until

MANY = 1_000_000  # max_restarts for tests that kill a lot


def value(*numbers: int) -> Any:
    return np.array([numbers], np.int64)


class Load:
    """Threads that call `host.predict` until told to stop, each with values of its own."""

    def __init__(self, host: ModelHost, threads: int = 16, first: int = 0) -> None:
        self.answers = [0] * threads
        self.wrong: list[str] = []
        self.errors: list[BaseException] = []
        self.hung = 0
        self._host = host
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(index, first), daemon=True) for index in range(threads)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self, timeout: float = 30.0) -> None:
        self._stop.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.hung = sum(thread.is_alive() for thread in self._threads)

    @property
    def answered(self) -> int:
        return sum(self.answers)

    def wait_for_more(self, answers: int = 1, timeout: float = 30.0) -> None:
        """Until that many more have come."""
        goal = self.answered + answers
        wait_until(lambda: self.answered >= goal, timeout, f"{answers} more answers; errors: {self.errors[:3]}")

    def wait_for_all(self, timeout: float = 30.0) -> None:
        """Until every thread has got one more answer to a request that it sent after now."""
        goals = [answers + 2 for answers in self.answers]
        wait_until(
            lambda: all(has >= goal for has, goal in zip(self.answers, goals)),
            timeout,
            f"two more answers for each caller; errors: {self.errors[:3]}",
        )

    def assert_clean(self) -> None:
        assert not self.wrong and not self.errors and not self.hung, (self.wrong[:3], self.errors[:3], self.hung)

    def _call(self, index: int, first: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                answer = self._host.predict(value(first + index, number))
            except BaseException as error:
                self.errors.append(error)
                return
            if answer.tolist() != [[2 * (first + index), 2 * number]]:
                self.wrong.append(f"{answer.tolist()} for {first + index}, {number}")
            self.answers[index] += 1


def worker_pid(host: ModelHost, index: int = 0, timeout: float = 20.0) -> int:
    """The process of a worker, once it is ready."""

    def ready() -> int:
        worker = host.statistics().workers[index]
        return worker.pid if worker.state == "ready" else 0

    return int(wait_until(ready, timeout, "a worker is ready"))


def supervisor_pid(host: ModelHost) -> int:
    """The process that started the worker; a worker that has just died may still be listed as ready."""
    return int(wait_until(lambda: parent_of(worker_pid(host)), 20, "a worker is ready and alive"))


def kill(pid: int, how: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        pass


class Application:
    """The program of this module, as a process to be killed or to be asked for its counts."""

    def __init__(self, name: str, threads: int = 2, first: int = 0, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.load", name, str(threads), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_until_ready(self) -> int:
        """The process id of its worker."""
        return int(self.ask("worker"))

    def ask(self, what: str) -> str:
        """`worker`, `supervisor`, or `more`: answers once each caller has got new answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        timer = threading.Timer(40, self.process.kill)  # then readline ends
        timer.start()
        answer = self.process.stdout.readline().strip()
        timer.cancel()
        timer.join()
        assert answer and not answer.startswith("error"), f"{what}: {answer or 'the application ended'}"
        return answer

    def finish(self) -> dict[str, int]:
        """Its counts: answers, wrong, errors, hung."""
        output, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        counts: dict[str, int] = json.loads(output)
        return counts

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def main(name: str, threads: int, first: int) -> None:
    with ModelHost(Doubles, name=name, max_restarts=MANY, linger=0.2)() as host, Load(host, threads, first) as load:
        for line in sys.stdin:
            try:
                if line.strip() == "worker":
                    print(worker_pid(host), flush=True)
                elif line.strip() == "supervisor":
                    print(supervisor_pid(host), flush=True)
                else:
                    load.wait_for_all()
                    print("yes", flush=True)
            except Exception as error:
                print(f"error {error!r}", flush=True)
        load.stop()
    counts = {"answers": load.answered, "wrong": len(load.wrong), "errors": len(load.errors), "hung": load.hung}
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

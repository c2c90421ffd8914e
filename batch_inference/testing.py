"""What tests of applications may use: a check that nothing is left behind, and models that misbehave on purpose.

    def test_my_service_survives_a_dead_worker(tmp_path):
        with no_leaks(), ModelHost(Dies)(once=str(tmp_path / "died")) as host:
            assert host.predict(-np.ones(1)) == -2

Nothing here is needed by an application that runs.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Blocks", "Dies", "Doubles", "Raises", "Resources", "alive", "no_leaks", "parent_of", "wait_until"]


# --- leaks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """What this process holds: each field maps an identity to a name for messages."""

    processes: dict[int, str]
    """Children and their children, zombies included, by process id."""
    descriptors: dict[int, str]
    """Open descriptors, with what each one refers to."""
    threads: dict[int, str]
    """Python's threads, by native id."""
    shared: dict[str, str]
    """Entries of /dev/shm."""
    mappings: dict[str, str]
    """Mappings of our memfds, by address."""

    @classmethod
    def now(cls) -> Resources:
        return cls(_processes(), _descriptors(), _threads(), _shared(), _mappings())

    def more_than(self, before: Resources) -> list[str]:
        """What is here and was not there, as lines of text; empty for nothing.

        Descriptors and mappings are counted by what they refer to, since a number may be closed and given out again.
        """
        found = [f"process {pid}: {name}" for pid, name in self.processes.items() if pid not in before.processes]
        found += [f"thread {name}" for ident, name in self.threads.items() if ident not in before.threads]
        found += [f"/dev/shm/{name}" for name in self.shared if name not in before.shared]
        found += _more("descriptor", self.descriptors, before.descriptors)
        found += _more("mapping", self.mappings, before.mappings)
        return found


@contextmanager
def no_leaks(timeout: float = 5.0) -> Iterator[None]:
    """AssertionError if the block leaves a process, descriptor, thread, /dev/shm entry or mapping more than before.

    What ends by itself has `timeout` seconds to do so. An exception of the block passes unchecked.
    """
    before = Resources.now()
    yield
    assert_no_more_than(before, timeout)


def assert_no_more_than(before: Resources, timeout: float = 5.0) -> None:
    """AssertionError that names what this process holds and did not hold `before`, `timeout` seconds from now on."""
    deadline = time.monotonic() + timeout
    while True:
        gc.collect()
        more = Resources.now().more_than(before)
        if not more:
            return
        if time.monotonic() > deadline:
            raise AssertionError("left behind: " + "; ".join(more))
        time.sleep(0.02)


def _more(kind: str, now: dict[Any, str], before: dict[Any, str]) -> list[str]:
    excess = Counter(now.values()) - Counter(before.values())
    return [f"{kind} {name} ({count} more)" for name, count in excess.items()]


def _processes() -> dict[int, str]:
    import psutil

    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())[-200:] or child.name()
        except psutil.ZombieProcess:
            found[child.pid] = "zombie"
        except psutil.Error:
            pass  # gone meanwhile
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one of listdir itself
        found[int(name)] = target if target.startswith("/") else target.split(":[")[0]
    return found


def _threads() -> dict[int, str]:
    return {thread.native_id or 0: thread.name for thread in threading.enumerate()}


def _shared() -> dict[str, str]:
    try:
        # Semaphores come and go with other programs that use multiprocessing; this library has none.
        return {name: name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    except OSError:
        return {}


def _mappings() -> dict[str, str]:
    found = {}
    with open("/proc/self/maps") as file:
        for line in file:
            address, *_, path = line.split(maxsplit=5)
            if path.startswith("/memfd:batch_inference"):
                found[address] = path.strip()
    return found


# --- waiting ------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any], timeout: float = 10.0, what: str = "") -> Any:
    """Polls until `condition()` is true and returns what it gave; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {timeout} s: {what or condition}")
        time.sleep(0.005)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs, whoever its parent is; a zombie does not."""
    return _state_and_parent(pid)[0] not in "ZX"


def parent_of(pid: int) -> int:
    """The parent of a process, which may be a zombie; 0 if there is no such process."""
    return _state_and_parent(pid)[1]


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


# --- models that misbehave ----------------------------------------------------------------------------------------


class Doubles:
    """A model without faults: twice its input. Notes, if told where, the size of each batch, a line each."""

    def __init__(self, notes: str | None = None) -> None:
        self._notes = notes

    def predict_batch(self, x: Any) -> Any:
        if self._notes is not None:
            with open(self._notes, "a") as file:
                file.write(f"{len(x)}\n")
        return x * 2


class Raises(Doubles):
    """Raises `error` when its batch holds a negative number."""

    def __init__(self, error: BaseException | None = None, notes: str | None = None) -> None:
        super().__init__(notes)
        self._error = error

    def predict_batch(self, x: Any) -> Any:
        doubled = super().predict_batch(x)
        if (x < 0).any():
            raise self._error or ValueError("negative input")
        return doubled


class Dies(Doubles):
    """Dies when its batch holds a negative number: by signal `how`, or by os._exit(-how) for a negative one.

    With `once`, a path, it does so for the first one only; the file marks that it has happened.
    """

    def __init__(self, how: int = signal.SIGKILL, once: str | None = None) -> None:
        super().__init__()
        self._how = how
        self._once = once

    def predict_batch(self, x: Any) -> Any:
        if (x < 0).any() and self._first():
            if self._how < 0:
                os._exit(-self._how)
            os.kill(os.getpid(), self._how)
        return super().predict_batch(x)

    def _first(self) -> bool:
        if self._once is None:
            return True
        try:
            os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Blocks(Doubles):
    """Creates the file `entered` with its first batch, and runs none before the file `gate` exists."""

    def __init__(self, entered: str, gate: str, notes: str | None = None) -> None:
        super().__init__(notes)
        self._entered = entered
        self._gate = gate

    def predict_batch(self, x: Any) -> Any:
        with open(self._entered, "a"):
            pass
        while not os.path.exists(self._gate):
            time.sleep(0.002)
        return super().predict_batch(x)

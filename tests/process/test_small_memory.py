"""As in a container: 64 MB of /dev/shm and a memory cgroup of 512 MB, and more callers than fit well.

Skipped, with the reason, where this process may not make a cgroup.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_inference.testing import wait_until
from tests.process.conftest import environment

LIMIT = 512 << 20
CALLERS, ROUNDS = 64, 8

APPLICATION = f"""
import os, threading
import numpy as np
from batch_inference import ModelHost
from batch_inference.testing import Doubles

wrong, answered = [], []

def call(caller):
    for number in range({ROUNDS}):
        x = np.full((1, 1 << 18), caller * {ROUNDS} + number, np.float32)
        y = host.predict(x)
        (answered if y.shape == x.shape and (y == 2 * x).all() else wrong).append(number)

with ModelHost(Doubles)() as host:
    threads = [threading.Thread(target=call, args=(caller,)) for caller in range({CALLERS})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    restarts = sum(worker.restarts for worker in host.statistics().workers)
shm = os.statvfs("/dev/shm")
print(len(answered), len(wrong), restarts, shm.f_blocks * shm.f_frsize >> 20)
"""

# To be run by sh, with a command as arguments: within a cgroup, and with a /dev/shm of its own.
ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


def parents() -> Iterator[Path]:
    """Folders that a memory cgroup may be made in: of cgroup v1, then v2; this process's own first."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for root, name in ((Path("/sys/fs/cgroup/memory"), "memory"), (Path("/sys/fs/cgroup"), "")):
        for folder in (root / own.get(name, "/").lstrip("/"), root):
            if (folder / "cgroup.procs").exists():
                yield folder


def limited(folder: Path) -> bool:
    """Sets the limits of a new cgroup, swap included; False where memory cannot be limited there."""
    for limit, swap, most in (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", LIMIT),
        ("memory.max", "memory.swap.max", 0),
    ):
        if (folder / limit).exists():
            (folder / limit).write_text(str(LIMIT))
            with contextlib.suppress(OSError):  # kernels that do not count swap
                (folder / swap).write_text(str(most))
            return True
    return False


@contextlib.contextmanager
def made(folder: Path) -> Iterator[Path]:
    """A cgroup, removed when its processes have ended."""
    folder.mkdir()
    try:
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), 20, "the cgroup is empty")
        folder.rmdir()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 512 MB."""
    refused = []
    for parent in parents():
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(made(parent / f"batch_inference-{os.getpid()}"))
            except OSError as error:
                refused.append(str(error))
                continue
            if limited(folder):
                yield folder
                return
            refused.append(f"{parent} does not limit memory")
    pytest.skip(f"no memory cgroup can be made here: {'; '.join(refused) or 'there are none'}")


def killed(folder: Path) -> int:
    """How many processes of the cgroup the kernel has killed because memory was short."""
    events = folder / "memory.events"
    text = (events if events.exists() else folder / "memory.oom_control").read_text()
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])


def test_nothing_is_killed_or_wrong_in_512_mb_with_a_small_dev_shm(cgroup: Path) -> None:
    command = [sys.executable, "-c", APPLICATION]
    small = subprocess.run(["unshare", "-m", "sh", "-c", SMALL_SHM, "sh", "true"], capture_output=True).returncode == 0
    if small:
        command = ["unshare", "-m", "sh", "-c", SMALL_SHM, "sh", *command]
    done = subprocess.run(
        ["sh", "-c", ENTER, "sh", str(cgroup), *command], capture_output=True, text=True, timeout=100, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    answered, wrong, restarts, shm = map(int, done.stdout.split())
    assert (answered, wrong, restarts) == (CALLERS * ROUNDS, 0, 0)
    assert shm == 64 or not small
    assert killed(cgroup) == 0

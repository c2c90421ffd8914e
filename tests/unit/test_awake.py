"""The thread that keeps a core awake: that there is one, when it ticks, and that it is in nobody's way."""

import os
import subprocess
import sys

import pytest

from batch_inference import awake, speedups

pytestmark = pytest.mark.skipif(not speedups.built, reason="the extension was not built")

TOOLS = """
import os, signal, time
from pathlib import Path
from batch_inference.awake import LONG, MOMENT, keep_awake

TASKS = Path("/proc/thread-self").resolve().parent

def thread():
    found = [task for task in TASKS.iterdir() if (task / "comm").read_text() == "batch-awake\\n"]
    assert len(found) <= 1, found
    return found[0] if found else None

def status(task, field):
    return next(line.split()[1] for line in (task / "status").read_text().splitlines() if line.startswith(field + ":"))

def ticks(task):
    return int(status(task, "voluntary_ctxt_switches"))

def until(true, what):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.001)

def started():
    keep_awake(LONG)
    until(thread, "there is no thread")
    return thread()

def asleep(task):
    "Until it has not run for a while."
    while True:
        before = ticks(task)
        time.sleep(0.05)
        if ticks(task) == before:
            return before
"""


def run(script: str) -> None:
    """In a process of its own: there is one such thread for a process, and it stays."""
    subprocess.run([sys.executable, "-c", TOOLS + script], check=True, timeout=60)


def test_ticks_as_long_as_it_is_asked_to_and_no_longer() -> None:
    run("""
assert thread() is None  # until somebody waits
task = started()
before = asleep(task)
keep_awake(30 * 10**9)  # on a core that is busy it may not come to tick within LONG
until(lambda: ticks(task) >= before + 4, "it does not tick")
keep_awake(0)
asleep(task)
keep_awake(LONG)
asleep(task)
""")


def test_is_in_nobodys_way_and_hears_no_signal() -> None:
    run("""
task = started()
assert os.sched_getscheduler(int(task.name)) == os.SCHED_IDLE
blocked = int(status(task, "SigBlk"), 16)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM):
    assert blocked >> number - 1 & 1, number
signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert not int(status(TASKS / str(os.getpid()), "SigBlk"), 16)  # as it was
""")


def test_ticks_rarely_where_waits_never_end_in_time() -> None:
    run("""
task = started()
def wait_in_vain():
    keep_awake(LONG)
    time.sleep(0.01)
    keep_awake(MOMENT)
for _ in range(40):
    wait_in_vain()
before = ticks(task)
for _ in range(60):
    wait_in_vain()
assert ticks(task) - before < 400, ticks(task) - before  # of some 2,000
keep_awake(0)
""")


def test_ticks_rarely_where_nobody_waits_as_long_as_a_tick() -> None:
    run("""
task = started()
end = time.monotonic() + 0.2
while time.monotonic() < end:
    keep_awake(LONG)
before, end = ticks(task), time.monotonic() + 0.5
while time.monotonic() < end:
    keep_awake(LONG)
assert ticks(task) - before < 1000, ticks(task) - before  # of some 3,300
""")


def test_a_forked_child_has_its_own() -> None:
    run("""
task = started()
child = os.fork()
if not child:
    TASKS = Path("/proc/thread-self").resolve().parent
    assert thread() is None
    other = started()
    before = ticks(other)
    keep_awake(LONG)
    until(lambda: ticks(other) > before, "the child's does not tick")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_follows_who_waits_from_core_to_core() -> None:
    run("""
for core in sorted(os.sched_getaffinity(0))[:2] * 2:
    os.sched_setaffinity(0, {core})  # of this thread
    task = started()
    def moved():
        keep_awake(LONG)
        return os.sched_getaffinity(int(task.name)) == {core}
    until(moved, f"it is not on core {core}")
""")


def test_without_the_extension_nothing_is_done() -> None:
    assert speedups.in_python["keep_awake"](awake.LONG) is None

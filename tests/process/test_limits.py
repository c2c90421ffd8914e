"""Where a limit of the processes is reached (ulimit -n, ulimit -f), callers are told which, and what to do about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.conftest import ROOT, environment

CROWD = """
import os, sys, threading
from collections import Counter
import numpy as np
from batch_inference import BatchInferenceError, ModelHost
from tests.process.overloaded import Gated

folder, threads, said = sys.argv[1], 60, Counter()
host, all_sent = ModelHost(Gated)(folder), threading.Semaphore(0)

def call():
    try:
        assert host.predict(np.ones((1, 1), int), timeout=30).item() == 2
        said["answered"] += 1
    except BatchInferenceError as error:
        said[f"{type(error).__name__}: {error}"] += 1
    finally:
        all_sent.release()

with host:
    callers = [threading.Thread(target=call) for _ in range(threads)]
    for caller in callers:
        caller.start()
    all_sent.acquire()  # one at least was refused: the gate is shut
    os.mkdir(folder + "/gate")  # which takes no descriptor
    for caller in callers:
        caller.join()
    try:
        print(host.predict(np.ones((1, 1), int), timeout=30).item())
    except BatchInferenceError as error:
        print(type(error).__name__)
for what, times in said.items():
    print(times, what)
assert sum(said.values()) == threads
"""

LATE = """
import asyncio, os
import numpy as np
from batch_inference import BatchInferenceError, ModelHost
from batch_inference.testing import Doubles

ONE = np.ones((1, 1), int)
with ModelHost(Doubles)() as host:
    loop = asyncio.new_event_loop()
    ways = (lambda: host.submit(ONE).result(30), lambda: loop.run_until_complete(host.apredict(ONE)))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    for send in ways:
        try:
            send()
        except BatchInferenceError as error:
            print(type(error).__name__, error)
    for fd in held:
        os.close(fd)
    print(*[send().item() for send in ways])
    loop.close()
"""

START = """
import numpy as np
from batch_inference import BatchInferenceError, ModelHost
from batch_inference.testing import Doubles

try:
    with ModelHost(Doubles) as host:
        print(host.predict(np.ones((1, 1), int), timeout=30).item())
except BatchInferenceError as error:
    print(type(error).__name__, error)
"""


def run(script: str, limit: str, *arguments: str) -> str:
    """What a script prints that is run under a limit."""
    command = ["bash", "-c", f'{limit} && exec "$0" "$@"', sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_callers_for_whom_no_descriptor_is_left_are_told_so_and_the_others_are_answered(tmp_path: Path) -> None:
    answer, *said = run(CROWD, "ulimit -Sn 40", str(tmp_path)).splitlines()
    assert answer == "2" and len(said) == 2  # the host goes on
    assert any(line.endswith(" answered") for line in said)
    assert any(
        "TransportError: this process has no descriptor left: RLIMIT_NOFILE allows it 40" in line for line in said
    )


def test_ways_to_send_that_are_first_used_when_no_descriptor_is_left_say_so_and_work_later() -> None:
    *refused, answered = run(LATE, "ulimit -Sn 60").splitlines()
    assert len(refused) == 2 and answered == "2 2"
    assert all("TransportError this process has no descriptor left" in line for line in refused)


def test_a_supervisor_without_a_descriptor_says_so_and_no_other_is_elected(tmp_path: Path) -> None:
    answer, *said = run(CROWD, "ulimit -n 40", str(tmp_path)).splitlines()
    assert answer == "TransportError"
    told = "the supervisor of the host has dropped this process: the supervisor process has no descriptor left"
    assert any(told in line for line in said) and "out-of-memory" not in str(said)


@pytest.mark.parametrize("most", range(12, 30, 3))
def test_a_host_for_which_there_are_too_few_descriptors_says_so_when_it_starts(most: int) -> None:
    said = run(START, f"ulimit -n {most}")
    assert said == "2\n" or "has no descriptor left: RLIMIT_NOFILE allows it" in said, said


def test_a_limit_of_files_that_leaves_no_room_for_shared_memory_is_named_at_once() -> None:
    said = run(START, "ulimit -f 1000")
    assert "TransportError the supervisor process cannot start: " in said and "RLIMIT_FSIZE" in said

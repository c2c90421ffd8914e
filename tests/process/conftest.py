"""Every process test ends as it began: no process, descriptor, thread, mapping or /dev/shm entry more than before.

Tests that share the host of their module are checked together, when the module ends: the host may keep what
they made it open.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from batch_inference import ModelHost
from batch_inference.testing import Resources, assert_no_more_than
from tests.process.models import Doubles

ROOT = Path(__file__).parents[2]
PATIENCE = 20.0  # seconds for what ends by itself, on a machine that is busy with something else
FAILED = pytest.StashKey[bool]()
SHARED = {"shared_host"}  # fixtures with a host that outlives the test


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind_by_the_module() -> Iterator[None]:
    before = Resources.now()
    yield
    assert_no_more_than(before, PATIENCE)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if SHARED & set(request.fixturenames):
        yield
        return
    before = Resources.now()
    yield
    if not request.node.stash.get(FAILED, False):  # the traceback of one that failed holds what it used
        assert_no_more_than(before, PATIENCE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="module")
def shared_host() -> Iterator[ModelHost]:
    """A started host of Doubles, for all tests of the module that leave it as it was."""
    with ModelHost(Doubles, max_batch_size=64)() as host:
        yield host


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(tmp_path: Path) -> Run:
    """Runs Python code as a script of its own, in an empty folder; the test fails unless its exit code is `code`."""

    def run(source: str, *arguments: str, code: int = 0, **options: object) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / "script.py"
        script.write_text(source, encoding="utf-8")
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment(), **options
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def environment() -> dict[str, str]:
    """The environment for an application in a process of its own, which finds the library and the tests."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }

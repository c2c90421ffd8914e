"""Cores and memory, by affinity and cgroup limits: from files as cgroup v1 and v2 have them."""

import os
from pathlib import Path

import psutil
import pytest

from batch_inference import machine


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A place for cgroup files; the process is in /outer/inner of cgroup v2."""
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    place(monkeypatch, "0::/outer/inner\n")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    return tmp_path


def place(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    original = machine._read
    monkeypatch.setattr(
        machine, "_read", lambda path: text.strip() if path == Path("/proc/self/cgroup") else original(path)
    )


def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_without_limits_the_affinity_and_the_machines_memory_count(cgroup: Path) -> None:
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    assert machine.usable_memory() == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("inner", "outer", "cores"),
    [
        ("max 100000", None, 16),
        ("400000 100000", None, 4),
        ("max 100000", "250000 100000", 2),
        ("400000 100000", "50000 100000", 1),
        ("9900000 100000", None, 16),
        ("", None, 16),
        ("nonsense", None, 16),
    ],
)
def test_a_cpu_quota_on_any_level_binds(
    inner: str, outer: str | None, cores: int, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sixteen_cores(monkeypatch)
    (cgroup / "outer" / "inner" / "cpu.max").write_text(inner + "\n")
    if outer is not None:
        (cgroup / "outer" / "cpu.max").write_text(outer + "\n")
    assert machine.usable_cores() == cores


def test_a_cpu_quota_of_cgroup_v1_binds(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen_cores(monkeypatch)
    place(monkeypatch, "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n1:name=systemd:/x\n")
    folder = cgroup / "cpu,cpuacct" / "docker" / "abc"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.usable_cores() == 16
    (folder / "cpu.cfs_quota_us").write_text("300000\n")
    assert machine.usable_cores() == 3
    memory = cgroup / "memory" / "docker" / "abc"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("1000000\n")
    assert machine.usable_memory() == 1_000_000


def test_a_memory_limit_on_any_level_binds(cgroup: Path) -> None:
    (cgroup / "outer" / "inner" / "memory.max").write_text("max\n")
    assert machine.usable_memory() == psutil.virtual_memory().total
    (cgroup / "outer" / "memory.max").write_text("123456789\n")
    assert machine.usable_memory() == 123_456_789


def test_a_machine_without_these_files_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.usable_cores() == (os.cpu_count() or 1)
    assert machine.usable_memory() == psutil.virtual_memory().total

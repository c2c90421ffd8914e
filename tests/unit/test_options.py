"""Options: checked at once, frozen, and what becomes of devices and threads."""

import dataclasses
import pickle
from typing import Any

import pytest

from batch_inference.batcher import ConcatBatcher, ListBatcher
from batch_inference.errors import ConfigError
from batch_inference.options import LONGEST, THREAD_VARIABLES, Options, visible_device, worker_environment


def test_defaults_are_those_of_the_documentation() -> None:
    options = Options()
    assert isinstance(options.batcher, ConcatBatcher) and options.worker_count == 1
    expected = {
        "max_batch_size": 32, "timeout": None, "start_timeout": 600, "max_restarts": 5, "linger": 1.0, "name": None,
        "devices": None, "num_workers": None, "threads": None, "shared_memory": None,
    }  # fmt: skip
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("max_batch_size", [0, -1, 1.5, "32", None, True]),
        ("num_workers", [-1, 0.5, "2", True]),
        ("threads", [0, -1, "2"]),
        ("max_restarts", [-1, None, 0.5]),
        ("shared_memory", [0, 1000, "1G"]),
        ("timeout", [-1, "1", float("nan"), True]),
        ("start_timeout", [-1, None, "1"]),
        ("linger", [-0.1, None]),
        ("devices", ["cuda:0", 0, [None], [1.5]]),
        ("name", ["", "a/b", "..", 3, "x" * 61, "a\0b", "é\n"]),
        ("batcher", [ConcatBatcher, "concat", 3]),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(ConfigError, match=name):
            Options(**{name: value})
        with pytest.raises(ValueError):
            Options().replace(**{name: value})


@pytest.mark.parametrize("longer", [float("inf"), 1e300, 10**400, 1e9 + 1], ids=["inf", "1e300", "10**400", "1e9 + 1"])
def test_durations_that_nobody_lives_to_see_the_end_of_are_cut_to_one_that_fits_everywhere(longer: float) -> None:
    names = ("max_delay", "timeout", "start_timeout", "batch_timeout", "linger")
    options = Options(**dict.fromkeys(names, longer))  # type: ignore[arg-type]
    changed = Options().replace(**dict.fromkeys(names, longer))
    assert {getattr(each, name) for name in names for each in (options, changed)} == {LONGEST}


@pytest.mark.parametrize("name", ["max_batch_size", "max_pending", "max_restarts", "shared_memory", "threads"])
def test_counts_are_refused_beyond_the_largest_that_a_cell_takes(name: str) -> None:
    Options(**{name: 2**63 - 1})
    for value in 2**63, 10**30, 10**5000:
        with pytest.raises(ConfigError, match=f"{name} may be 9223372036854775807 at most"):
            Options(**{name: value})


def test_no_more_workers_are_taken_than_there_are_places_for() -> None:
    assert Options(num_workers=64).worker_count == Options(devices=["cpu"] * 64).worker_count == 64
    with pytest.raises(ConfigError, match="num_workers asks for 65 workers, and a host has 64 at most"):
        Options(num_workers=65)
    with pytest.raises(ConfigError, match="devices, .* asks for 65 workers, and a host has 64 at most"):
        Options().replace(devices=["cpu"] * 65)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("num_workers", [None, 0, 1, 7]),
        ("timeout", [None, 0, 0.5, float("inf")]),
        ("devices", [None, [0, "cuda:1"], ("cpu",), [0, 0]]),
        ("name", [None, "bert", "bert-2.0_x", "x" * 60]),
        ("batcher", [None, ListBatcher()]),
    ],
)
def test_right_values_are_taken(name: str, right: list[Any]) -> None:
    for value in right:
        Options(**{name: value})


def test_options_are_frozen_and_picklable_and_unknown_ones_are_type_errors() -> None:
    options = Options(max_batch_size=3, devices=[0, 1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_batch_size = 4  # type: ignore[misc]
    back = pickle.loads(pickle.dumps(options))
    assert back.max_batch_size == 3 and back.devices == (0, 1)
    with pytest.raises(TypeError, match="batch_size.*max_batch_size"):
        options.replace(batch_size=3)


def test_one_worker_per_device() -> None:
    assert Options(devices=[0, 1, "cpu"]).worker_count == 3
    assert Options(devices=[0, 0], num_workers=2).worker_count == 2
    with pytest.raises(ConfigError, match="num_workers=3.*names 2"):
        Options(devices=[0, 1], num_workers=3)


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        (1, None, "1"),
        ("1", None, "1"),
        ("cuda:2", None, "2"),
        ("cpu", None, ""),
        ("cpu", "0,1", ""),
        (0, "4,5", "4"),
        ("cuda:1", " 4 , GPU-abc ", "GPU-abc"),
        ("GPU-xyz", "4,5", "GPU-xyz"),
        ("MIG-1", None, "MIG-1"),
    ],
)
def test_devices_are_counted_among_those_the_application_may_see(device: Any, visible: Any, expected: str) -> None:
    assert visible_device(device, visible) == expected


def test_a_device_that_is_not_there_is_refused() -> None:
    for visible in "", "3", "3,":
        with pytest.raises(ConfigError, match="does not exist"):
            visible_device(1, visible)


def test_threads_are_shared_out_and_what_the_user_exported_holds() -> None:
    found = worker_environment(Options(num_workers=3), 0, {}, cores=8)
    assert found == dict.fromkeys(THREAD_VARIABLES, "2")
    assert worker_environment(Options(num_workers=9), 0, {}, cores=8)["OMP_NUM_THREADS"] == "1"
    exported = worker_environment(Options(), 0, {"OMP_NUM_THREADS": "5"}, cores=8)
    assert "OMP_NUM_THREADS" not in exported and exported["MKL_NUM_THREADS"] == "8"
    asked = worker_environment(Options(threads=3), 0, {"OMP_NUM_THREADS": "5"}, cores=8)
    assert asked["OMP_NUM_THREADS"] == "3"
    on_device = worker_environment(Options(devices=["cpu", "cuda:1"]), 1, {}, cores=8)
    assert on_device["CUDA_VISIBLE_DEVICES"] == "1"

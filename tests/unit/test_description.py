"""Hosts of one name are compared by words that are the same in every process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import ModelHost
from batch_inference.batcher import ConcatBatcher, ListBatcher, MultiBatcher, SeqBatcher
from batch_inference.description import Description, describe, difference, words
from batch_inference.options import CLIENT_OPTIONS, Options
from batch_inference.policy import FixedDelay
from batch_inference.testing import Doubles, Raises


def of(model: type = Doubles, *args: Any, options: Options | None = None, **kwargs: Any) -> Description:
    return describe(model, None, args, kwargs, options or Options())


@dataclass
class Settings:
    layers: int
    path: Path


class Colour(Enum):
    RED = 1


class Opaque:
    def __init__(self) -> None:
        self.inside = object()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ("é", "'é'"),
        ([1, ("a", 2)], "[1, ['a', 2]]"),
        ({"b", "a", "c"}, "{'a', 'b', 'c'}"),
        ({"k": [1]}, "{'k': [1]}"),
        ({"b": {2: "x", 1: "y"}, "a": 0}, "{'a': 0, 'b': {1: 'y', 2: 'x'}}"),  # equal dicts may differ in their order
        (Path("/models/x"), "'/models/x'"),
        (np.zeros((2, 3), np.float32), "numpy.ndarray of float32 [2, 3]"),
        (FixedDelay, "batch_inference.policy.FixedDelay"),
    ],
)
def test_values_in_words(value: Any, expected: str) -> None:
    assert words(value) == expected


def test_objects_in_words_bear_no_addresses() -> None:
    assert words(Settings(3, Path("/x"))).endswith("Settings(layers=3, path='/x')")
    assert words(Colour.RED).endswith("Colour.RED")
    assert words(Opaque()).endswith("Opaque()") and "0x" not in words([Opaque(), lambda x: x], opened=2)
    cycle: list[Any] = []
    opaque = Opaque()
    opaque.inside = opaque
    cycle.append(opaque)
    assert words(cycle, opened=2).count("Opaque") == 3


def test_what_is_the_same_in_every_process_is_the_same() -> None:
    code = (
        "from tests.unit.test_description import *\n"
        "print(of(Doubles, {'a', 'b', 'c'}, options=Options(batcher=SeqBatcher(0), warmup=(np.ones(3),))))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[2]
        ).stdout
        for _ in range(3)
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (of(Raises), "model"),
        (of(Doubles, "notes"), "model arguments"),
        (of(Doubles, notes="x"), "model arguments"),
        (of(options=Options(max_batch_size=3)), "max_batch_size"),
        (of(options=Options(batcher=ListBatcher())), "batcher"),
        (of(options=Options(batcher=ConcatBatcher(batch_sizes=[1, 2, 32]))), "batcher"),
        (of(options=Options(policy=FixedDelay(0.5))), "policy"),
        (of(options=Options(linger=3)), "linger"),
        (of(options=Options(num_workers=2)), "num_workers"),
    ],
)
def test_what_differs_is_named(other: Description, named: str) -> None:
    found = difference(of(), other)
    assert f"{named} is {of()[named]} there and {other[named]} here" in found
    assert difference(other, other) == "" and difference(of(), None) == ""


class Divided(MultiBatcher):
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


def test_settings_of_batchers_and_policies_within_others_are_compared() -> None:
    one, two = (of(options=Options(batcher=Divided([SeqBatcher(token)]))) for token in (0, 1))
    assert "batcher" in difference(one, two)
    one, two = (of(options=Options(policy=FixedDelay(seconds))) for seconds in (0.1, 0.2))
    assert "policy" in difference(one, two)


def test_what_each_process_chooses_for_itself_is_not_compared() -> None:
    own = Options(name="x", timeout=3, start_timeout=9, shared_memory=1 << 30)
    assert difference(of(), of(options=own)) == ""
    assert not set(CLIENT_OPTIONS) & set(of())


def test_a_class_of_the_same_name_with_other_source_differs_and_the_files_are_shown(tmp_path: Path) -> None:
    found = []
    for folder, source in ("a", "return x"), ("b", "return -x"), ("c", "return x"):
        file = tmp_path / folder / "model.py"
        file.parent.mkdir()
        file.write_text(f"class Model:\n    def predict_batch(self, x):\n        {source}\n")
        code = (
            f"import sys; sys.path.insert(0, {str(file.parent)!r}); from model import Model; import json\n"
            "from tests.unit.test_description import *; print(json.dumps(of(Model)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        found.append(json.loads(done.stdout))
    text = difference(found[0], found[1])
    assert "source is 3 lines" in text and f"{tmp_path}/a/model.py there and {tmp_path}/b/model.py here" in text
    assert difference(found[0], found[2]) == ""  # the same source in another place


def test_a_class_without_source_is_compared_by_all_else() -> None:
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("class Model:\n    def predict_batch(self, x):\n        return x", namespace)
    assert "source" not in of(namespace["Model"])
    assert difference(of(namespace["Model"]), of(namespace["Model"])) == ""


def test_long_descriptions_are_shortened_and_still_compared() -> None:
    one, two = of(Doubles, "x" * 100_000 + "a"), of(Doubles, "x" * 100_000 + "b")
    assert len(str(one)) < 10_000 and "model arguments" in difference(one, two)


def test_hosts_without_a_name_describe_nothing() -> None:
    assert ModelHost(Doubles)()._description((), {}) == {}
    assert ModelHost(Doubles, name="x")()._description((), {})["model"] == "batch_inference.testing.Doubles"

"""docs/batchers.md says what each batcher does to each kind of value; here it is held to that, cell by cell."""

from __future__ import annotations

import dataclasses
import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference.batcher import (
    Batcher,
    BucketSeqBatcher,
    ConcatBatcher,
    ListBatcher,
    SeqBatcher,
    model_arguments,
)
from batch_inference.errors import BatcherError

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

PAGE = Path(__file__).parents[2] / "docs" / "batchers.md"


def table(name: str) -> list[tuple[str, str, str]]:
    """(row label, batcher's name, cell) of the table after the comment of that name."""
    text = PAGE.read_text("utf-8").split(f"<!-- table: {name} -->\n\n")[1]
    lines = text[: text.index("\n\n")].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells = []
    for label, *row in rows:
        for names, cell in zip(header[1:], row, strict=True):
            cells += [(label, batcher, cell) for batcher in re.split(r", ", names)]
    return cells


@dataclasses.dataclass
class Picture:
    pixels: bytes


def arrays() -> list[Any]:
    values: list[Any] = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.int64)]
    return values if torch is None else [*values, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)]


ARGUMENTS: dict[str, Callable[[], list[Any]]] = {
    "numpy array, torch tensor": arrays,
    "the same, `None` in `padding_tokens`": arrays,
    "int, float, bool, complex, numpy scalar": lambda: [7, 0.5, True, 1j, np.float32(2), np.bool_(False)],
    "None": lambda: [None],
    "dict or other Mapping of these": lambda: [{"a": x, "b": 1} for x in arrays()] + [UserDict(a=arrays()[0], b=1)],
    "tuple or list that holds tensors": lambda: [(x, 1) for x in arrays()] + [[x, 1] for x in arrays()],
    "array of dates, fixed strings, records, objects": lambda: [
        np.array([["2020-01-01", "2021-01-01"]] * 2, "M8[D]"),
        np.array([["a", "b"]] * 2),
        np.array([[b"a", b"b"]] * 2),
        np.zeros((2, 3), [("x", "i4"), ("y", "f8")]),
        np.array([[None, 1]] * 2),
    ],
    "list of numbers": lambda: [[1, 2], (1.0, 2.0), []],
    "string, bytes": lambda: ["text", b"text"],
    "image, dataclass, other object": lambda: [Picture(b"123"), object()],
    "0-d tensor": lambda: [np.array(1.0), *([] if torch is None else [torch.tensor(1.0)])],
    "masked array": lambda: [np.ma.masked_array(np.ones((2, 3)), np.eye(2, 3))],
}


def batcher_of(name: str, *, token: Any = 9) -> Batcher:
    makers: dict[str, Callable[[], Batcher]] = {
        "ConcatBatcher": ConcatBatcher,
        "SeqBatcher": lambda: SeqBatcher([0, token]),
        "BucketSeqBatcher": lambda: BucketSeqBatcher([0, token], [4, 8]),
        "ListBatcher": ListBatcher,
    }
    return makers[name]()


def plain(value: Any) -> Any:
    return value if isinstance(value, (np.ndarray, int, float, bool)) or value is None else value.float().numpy()


def is_joined(got: Any, value: Any, padded: bool) -> bool:
    """Twice two rows one after the other; padded with one 9 if `padded`."""
    single = plain(value)
    if padded:
        single = np.concatenate([single, np.full((2, 1), 9, single.dtype)], axis=1)
    same_framework = isinstance(got, np.ndarray) == isinstance(value, np.ndarray) and got.dtype == value.dtype
    return same_framework and np.array_equal(plain(got)[:2], single)


def longer(value: Any) -> Any:
    """The same kind of argument with sequences one element longer."""
    if isinstance(value, (dict, UserDict)):
        return type(value)({key: longer(item) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(longer(item) for item in value)
    if isinstance(value, np.ndarray):
        return np.ones((2, 4), value.dtype)
    return torch.ones(2, 4, dtype=value.dtype) if torch is not None and isinstance(value, torch.Tensor) else value


def check_argument(batcher: Batcher, cell: str, value: Any) -> None:
    padded = "padded" in cell
    other = longer(value) if padded else value
    beside = np.ones((2, 1)) if torch is None or not any_torch(value) else torch.ones(2, 1)
    requests = [(beside, value), (beside, other)]
    if cell == "refused":
        with pytest.raises(BatcherError):
            batcher.kind(requests[0])
            batcher.size(requests[0])
        return
    assert batcher.kind(requests[0]) == batcher.kind(requests[1])
    got = model_arguments(batcher.batch(requests)[0])[1]
    if cell == "list entry":
        assert type(got) is list and got[0] is value and got[1] is other
    elif cell in ("joined", "padded and joined"):
        assert is_joined(got, value, padded)
    elif cell == "one entry per row":
        assert got.tolist() == [value] * 4
    elif cell == "None":
        assert got is None
    elif cell.startswith("dict"):
        assert type(got) is dict and is_joined(got["a"], value["a"], padded) and got["b"].tolist() == [1] * 4
    else:
        assert cell.startswith("same") and type(got) is type(value)
        assert is_joined(got[0], value[0], padded) and got[1].tolist() == [1] * 4


def any_torch(value: Any) -> bool:
    if isinstance(value, (dict, UserDict)):
        return any(map(any_torch, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(any_torch, value))
    return torch is not None and isinstance(value, torch.Tensor)


@pytest.mark.parametrize(("label", "name", "cell"), table("arguments"))
def test_arguments(label: str, name: str, cell: str) -> None:
    token = None if "padding_tokens" in label else 9
    if "dict" in label:
        token = {"a": 9, "b": None}
    elif "tuple" in label:
        token = [9, None]
    for value in ARGUMENTS[label]():
        check_argument(batcher_of(name, token=token), cell, value)


def test_the_table_of_arguments_is_whole() -> None:
    assert {label for label, *_ in table("arguments")} == set(ARGUMENTS)
    assert {name for _, name, _ in table("arguments")} >= {"ConcatBatcher", "SeqBatcher", "ListBatcher"}


Y, Z = np.arange(3.0), np.arange(6).reshape(3, 2)
OUTPUTS: dict[str, list[Any]] = {
    "tensor": [Y, Z] if torch is None else [Y, Z, torch.arange(3)],
    "tuple of tensors": [(Y, Z)],
    "list of tensors": [[Y, Z, Y]],
    "list of anything else": [["a", "b", "c"], [1, None, {}], [(Y,), (Z,), ()]],
    "dict or other Mapping of these": [{"y": Y, "w": ["a", "b", "c"]}, UserDict(y=Y, w=["a", "b", "c"])],
    "None, number, string": [None, 3, 1.5, "abc"],
    "fewer or more rows than went in": [Y[:2], np.ones((4, 2)), ["a", "b"], [], {"y": Y[:2]}, {"y": list("abcd")}],
}


def check_output(batcher: Batcher, cell: str, output: Any) -> None:
    """Three requests of one row."""
    requests = [(np.full((1, 2), index),) for index in range(3)]
    _, context = batcher.batch(requests)
    if cell == "refused":
        with pytest.raises(BatcherError, match="got"):
            batcher.unbatch(output, context)
        return
    for index, got in enumerate(batcher.unbatch(output, context)):
        rows = slice(index, index + 1)
        if cell in ("its row", "its entry"):
            assert got is output[index] or bool((got == output[index]).all())
        elif cell == "its rows":
            assert type(got) is type(output) and got.tolist() == output[rows].tolist()
        elif cell in ("tuple, each its rows", "list, each its rows"):
            assert type(got).__name__ == cell.split(",")[0]
            assert [part.tolist() for part in got] == [part[rows].tolist() for part in output]
        elif cell == "list of its rows' entries":
            assert got == output[rows]
        elif cell == "dict, each its rows":
            assert type(got) is dict and got["y"].tolist() == [Y[index]] and got["w"] == ["abc"[index]]
        else:
            assert cell == "dict, each its entry" and got == {"y": Y[index], "w": "abc"[index]}


@pytest.mark.parametrize(("label", "name", "cell"), table("outputs"))
def test_outputs(label: str, name: str, cell: str) -> None:
    for output in OUTPUTS[label]:
        check_output(batcher_of(name), cell, output)


def test_the_table_of_outputs_is_whole() -> None:
    assert {label for label, *_ in table("outputs")} == set(OUTPUTS)

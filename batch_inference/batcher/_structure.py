"""What the tensor batchers share: the kind of an argument, and taking a model's output apart row by row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from .. import tensors
from ..errors import BatcherError

_SCALARS: Final = (bool, int, float, complex, np.generic)
_INT64: Final = range(-(2**63), 2**63)


class RowCounter:
    """The number of rows of one request, checked argument by argument."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = -1

    def add(self, shape: Sequence[int]) -> None:
        if not shape:
            raise BatcherError(
                "an argument is a 0-d tensor, which has no batch dimension: send x.reshape(1), or a Python number"
            )
        if self.count < 0:
            self.count = shape[0]
        elif self.count != shape[0]:
            raise BatcherError(
                f"the arguments of one request must have equally many rows (first dimension): got {self.count} "
                f"and {shape[0]}"
            )


def kind_of(value: Any, rows: RowCounter) -> Hashable:
    """What `value` must have in common with another request's to be batched with it."""
    if tensors.is_tensor(value):
        if isinstance(value, np.ma.MaskedArray):
            raise BatcherError("masked arrays cannot be batched: send their data and mask as two arguments")
        tensors.check_sendable(value)
        rows.add(value.shape)
        return value.dtype, tuple(value.shape[1:])
    if value is None:
        return None
    if isinstance(value, Mapping):
        return dict, tuple([(key, kind_of(item, rows)) for key, item in value.items()])
    if isinstance(value, _SCALARS):
        if isinstance(value, int) and value not in _INT64:
            raise BatcherError("an integer argument does not fit 64 bits")
        return value.dtype if isinstance(value, np.generic) else type(value)
    if isinstance(value, (tuple, list)) and any(map(_holds_tensor, value)):
        return type(value), tuple([kind_of(item, rows) for item in value])
    raise BatcherError(
        f"an argument is {_name(value)}, which has no rows to batch: send numpy arrays (np.asarray(x)) or torch tensors, "
        "or use ListBatcher, whose model gets a list with one entry per request"
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    return tensors.is_tensor(value)


def first_tensor(request: Any) -> Any:
    """The tensor that gives a request its number of rows."""
    for value in request.values() if isinstance(request, Mapping) else request:
        if tensors.is_tensor(value):
            return value
        if isinstance(value, (tuple, list, Mapping)):
            try:
                return first_tensor(value)
            except BatcherError:
                continue
    raise BatcherError(
        "the request holds no tensor, so it has no rows to batch: send at least one numpy array or torch tensor with a "
        "batch dimension, or use ListBatcher"
    )


Merge = Callable[[Sequence[Any], Any], Any]


def merge(values: Sequence[Any], path: Any, merge_tensors: Merge, counts: Sequence[int], like: Any) -> Any:
    """Merge the same argument of all requests of a batch; `path` says where in the request it is."""
    first = values[0]
    if tensors.is_tensor(first):
        return merge_tensors(values, path)
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {
            key: merge([value[key] for value in values], (*path, key), merge_tensors, counts, like) for key in first
        }
    if isinstance(first, (tuple, list)):
        merged = [
            merge(column, (*path, index), merge_tensors, counts, like)
            for index, column in enumerate(zip(*values, strict=True))
        ]
        return _rebuild(first, merged)
    return tensors.per_row(values, counts, like)


def _rebuild(like: Any, items: list[Any]) -> Any:
    if isinstance(like, list):
        return items
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)


def scatter(output: Any, counts: Sequence[int]) -> list[Any]:
    """Take a model's output apart: ``counts[i]`` rows for request i. Slices share the output's memory."""
    return _scatter(output, counts, sum(counts), "")


def _scatter(output: Any, counts: Sequence[int], total: int, where: str) -> list[Any]:
    if tensors.is_tensor(output):
        if not output.shape or output.shape[0] != total:
            raise wrong_rows(total, f"{_name(output)} of shape {tuple(output.shape)}", where)
        output = tensors.on_host(output)
        parts = []
        position = 0
        for count in counts:
            end = position + count
            parts.append(output[position:end])
            position = end
        return parts
    if isinstance(output, Mapping):
        fields = [_scatter(item, counts, total, f"{where}[{key!r}]") for key, item in output.items()]
        return [dict(zip(output, parts, strict=True)) for parts in _transposed(fields, counts)]
    if isinstance(output, list) and not (output and all(map(tensors.is_tensor, output))):
        if len(output) != total:
            raise wrong_rows(total, f"a list of {len(output)} items", where)
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        return [output[end - count : end] for end, count in zip(ends, counts, strict=True)]
    if isinstance(output, (tuple, list)):
        fields = [_scatter(item, counts, total, f"{where}[{index}]") for index, item in enumerate(output)]
        return [_rebuild(output, list(parts)) for parts in _transposed(fields, counts)]
    raise wrong_rows(total, _name(output), where)


def _transposed(fields: list[list[Any]], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    return list(zip(*fields, strict=True)) if fields else [()] * len(counts)


def wrong_rows(expected: int, got: str, where: str = "") -> BatcherError:
    place = f"output{where}" if where else "the output"
    return BatcherError(
        f"{place} of predict_batch must have {expected} rows, as many as the batch that went in: got {got}. "
        "Return a tensor, or a tuple, list or dict of tensors, whose first dimension is the batch; or a list with one "
        "item per row"
    )


def _name(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"

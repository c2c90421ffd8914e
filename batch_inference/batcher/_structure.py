"""What the tensor batchers share: walking a request's arguments, and taking a model's output apart and together again.

An argument is a tensor, a number, None, or a tuple, list or mapping of these. Its place in the request is a *path*: the
index of the argument, then keys and indexes below it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from .. import tensors
from ..errors import BatcherError

Path = tuple[Any, ...]

_NUMBERS: Final = (bool, int, float, complex, np.number, np.bool_)
_INT64: Final = range(-(2**63), 2**63)


# --- requests ---------------------------------------------------------------------------------------------------


def leaves(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The tensors of a request, or of one of its arguments, in order, each with its path."""
    found: list[tuple[Path, Any]] = []
    _collect(value, path, found)
    return found


def _collect(value: Any, path: Path, found: list[tuple[Path, Any]]) -> None:
    if type(value) in tensors.PLAIN:
        found.append((path, value))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _collect(item, (*path, index), found)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, (*path, key), found)
    elif tensors.is_tensor(value):
        found.append((path, value))


def first_tensor(value: Any) -> Any:
    """The first tensor of a request, or None."""
    if type(value) in tensors.PLAIN:
        return value
    if isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            tensor = first_tensor(item)
            if tensor is not None:
                return tensor
        return None
    return value if tensors.is_tensor(value) else None


def map_tensors(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same structure with every tensor replaced; mappings become dicts."""
    if tensors.is_tensor(value):
        return function(path, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function, (*path, key)) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return rebuild(value, [map_tensors(item, function, (*path, index)) for index, item in enumerate(value)])
    return value


def rebuild(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """`items` as a tuple, list or named tuple like `like`."""
    if isinstance(like, list):
        return items
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)


def row_count(request: Any) -> int:
    """The rows of the request's first tensor."""
    tensor = first_tensor(request)
    if tensor is None:
        sent = ", ".join(map(name_of, request)) if request else "no arguments"
        raise BatcherError(
            f"the request holds no tensor, so it has no rows to batch; it was {sent}. Send at least one numpy array or "
            "torch tensor with a batch dimension, such as np.asarray(x)[None]; or use batcher=ListBatcher(), whose "
            "model gets a list with one entry per request"
        )
    if not tensor.shape:
        raise zero_dimensional()
    return int(tensor.shape[0])


def zero_dimensional() -> BatcherError:
    return BatcherError(
        "an argument is a 0-d tensor, which has no batch dimension: send x.reshape(1), or a Python number"
    )


def place(root: str, path: Path) -> str:
    """``argument 0['input_ids']``, ``output['logits']``."""
    if root == "argument":
        root, path = f"argument {path[0]}", path[1:]
    return root + "".join([f"[{key!r}]" for key in path])


class KindFinder:
    """Finds what the arguments of one request must have in common with another's to be batched with them, and checks
    on the way that its tensors have equally many rows."""

    def __init__(self, rows: int, tensor_kind: Callable[[Any, Path], Hashable]) -> None:
        self._rows = rows
        self._tensor_kind = tensor_kind

    def kind(self, value: Any, path: Path) -> Hashable:
        if type(value) in tensors.PLAIN:
            return self._checked(value, path)
        if value is None:
            return None
        if isinstance(value, _NUMBERS):
            if isinstance(value, int) and value not in _INT64:
                raise BatcherError(f"{place('argument', path)} is an integer of more than 64 bits")
            return str(value.dtype) if isinstance(value, np.generic) else type(value).__name__
        if type(value) is dict or isinstance(value, Mapping):
            return dict, frozenset([(key, self.kind(item, (*path, key))) for key, item in value.items()])
        if isinstance(value, (tuple, list)) and first_tensor(value) is not None:
            return (type(value), *[self.kind(item, (*path, index)) for index, item in enumerate(value)])
        if tensors.is_tensor(value):
            if isinstance(value, np.ma.MaskedArray):
                raise BatcherError(f"{place('argument', path)} is a masked array: send its data and its mask instead")
            return self._checked(value, path)
        raise BatcherError(
            f"{place('argument', path)} is {name_of(value)}, which has no rows to batch: send numpy arrays "
            "(np.asarray(x)) or torch tensors, or use ListBatcher, whose model gets a list with one entry per request"
        )

    def _checked(self, value: Any, path: Path) -> Hashable:
        shape = value.shape
        if not shape:
            raise zero_dimensional()
        if shape[0] != self._rows:
            raise BatcherError(
                "all tensors of one request must have equally many rows (their first dimension): the first has "
                f"{self._rows}, {place('argument', path)} has {shape[0]}"
            )
        return self._tensor_kind(value, path)


class Merger:
    """Merges the same argument of all requests of one batch: tensors with `merge_tensors`, numbers into a tensor with
    one entry per row."""

    def __init__(
        self, requests: Sequence[Any], counts: Sequence[int], rows: int, merge_tensors: Callable[[Any, Path], Any]
    ) -> None:
        self._requests = requests
        self._counts = counts
        self._rows = rows
        self._merge_tensors = merge_tensors

    def merge(self, values: Sequence[Any], path: Path) -> Any:
        first = values[0]
        if tensors.is_tensor(first):
            return self._merge_tensors(values, path)
        if first is None:
            return None
        if isinstance(first, Mapping):
            return {key: self.merge([value[key] for value in values], (*path, key)) for key in first}
        if isinstance(first, (tuple, list)):
            columns = enumerate(zip(*values, strict=True))
            return rebuild(first, [self.merge(column, (*path, index)) for index, column in columns])
        return tensors.per_row(values, self._counts, self._rows, first_tensor(self._requests[0]))


# --- outputs ----------------------------------------------------------------------------------------------------


def scatter(output: Any, counts: list[int], rows: int) -> list[Any]:
    """Take a model's output of `rows` rows apart: ``counts[i]`` of them for request i; further rows are padding and
    dropped. Slices share the output's memory."""
    if (parts := tensors.parts(output, counts, rows)) is not None:
        return parts
    slices = []
    start = 0
    for count in counts:
        end = start + count
        slices.append(slice(start, end))
        start = end
    return _scatter(output, slices, rows, ())


def _scatter(output: Any, slices: list[slice], rows: int, path: Path) -> list[Any]:
    if tensors.is_tensor(output):
        shape = output.shape
        if not shape or shape[0] != rows:
            raise wrong_rows(rows, f"{name_of(output)} of shape {tuple(shape)}", path)
        output = tensors.on_host(output)
        return [output[part] for part in slices]
    if type(output) is tuple or is_fields(output):
        fields = [_scatter(item, slices, rows, (*path, index)) for index, item in enumerate(output)]
        parts: Any = zip(*fields, strict=True) if fields else [()] * len(slices)
        return list(parts) if type(output) is tuple else [rebuild(output, list(part)) for part in parts]
    if isinstance(output, list):
        if len(output) != rows:
            raise wrong_rows(rows, f"a list of {len(output)} items", path)
        return [output[part] for part in slices]
    if isinstance(output, Mapping):
        fields = [_scatter(item, slices, rows, (*path, key)) for key, item in output.items()]
        parts = zip(*fields, strict=True) if fields else [()] * len(slices)
        return [dict(zip(output, part, strict=True)) for part in parts]
    raise wrong_rows(rows, name_of(output), path)


def is_fields(output: Any) -> bool:
    """Whether an output is several fields side by side: any tuple, or a list of nothing but tensors."""
    if isinstance(output, tuple):
        return True
    return isinstance(output, list) and len(output) > 0 and all(map(tensors.is_tensor, output))


def join(parts: Sequence[Any]) -> Any:
    """The inverse of `scatter`."""
    first = parts[0]
    if tensors.is_tensor(first):
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise BatcherError(
                "a request larger than max_batch_size was run in parts, and the parts of its response differ in shape: "
                f"{sorted(shapes)}. If the model's output follows the padded length, use trim="
            )
        return tensors.concat(parts)
    if isinstance(first, Mapping):
        return {key: join([part[key] for part in parts]) for key in first}
    if is_fields(first):
        return rebuild(first, [join(column) for column in zip(*parts, strict=True)])
    return [item for part in parts for item in part]


def wrong_rows(expected: int, got: str, path: Path) -> BatcherError:
    return BatcherError(
        f"{place('output', path)} of predict_batch must have {expected} rows, as many as the batch that went in: got "
        f"{got}. Return a tensor, or a tuple, list or dict of tensors, whose first dimension is the batch; or a list "
        "with one item per row (tensors of different lengths: each in a tuple of its own). If a request was sent "
        "without a batch dimension, its first dimension was taken for it: send x[None]"
    )


def name_of(value: Any) -> str:
    if value is None:
        return "None"
    if type(value) is np.ndarray:
        return "an array"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"

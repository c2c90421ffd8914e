"""ListBatcher: the model gets lists with one entry per request, for strings, images and other objects."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from .. import tensors
from ..errors import BatcherError
from .batcher import Batcher, Request


class ListBatcher(Batcher):
    """Gives the model one list per argument, with one entry per request; the model returns a list with one entry per
    request. It may also return a tensor with one row per request, or a dict of such lists and tensors."""

    def batch(self, requests: list[Request]) -> tuple[Any, Any]:
        return tuple([list(column) for column in zip(*requests, strict=True)]), len(requests)

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        return _entries(batched_response, context, "")

    def owners(self, requests: list[Request], context: Any) -> Sequence[int]:
        """An entry each, whatever `size` counts."""
        return range(len(requests))

    def kind(self, request: Request) -> Hashable:
        """The number of arguments."""
        if not request:
            raise BatcherError("predict() was called without arguments: there is nothing to batch")
        return len(request)


def _entries(output: Any, expected: int, where: str) -> list[Any]:
    if isinstance(output, Mapping):
        columns = [_entries(value, expected, f"{where}[{key!r}]") for key, value in output.items()]
        rows = zip(*columns, strict=True) if columns else [()] * expected
        return [dict(zip(output, row, strict=True)) for row in rows]
    if isinstance(output, list) or (tensors.is_tensor(output) and len(output.shape)):
        if len(output) == expected:
            return list(output if isinstance(output, list) else tensors.on_host(output))
        got = f"{len(output)} entries"
    else:
        got = "None" if output is None else f"an object of type {type(output).__name__}"
    place = f"output{where}" if where else "the output"
    raise BatcherError(
        f"{place} of predict_batch must be a list of {expected} entries, one per request of the batch: got {got}"
    )

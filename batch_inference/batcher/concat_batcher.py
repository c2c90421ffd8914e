"""ConcatBatcher: join the tensors of the requests on their first dimension."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from .. import tensors
from . import _structure
from .batcher import Batcher, Request


class ConcatBatcher(Batcher):
    """Concatenates each argument on the first dimension; the model's output is cut at the same rows.

    Arguments are tensors, or tuples, lists and mappings of them (mappings reach the model as dicts). A Python number
    becomes an array with one entry per row, None stays None. Requests that differ in framework, dtype, trailing shape
    or structure form batches of their own.
    """

    borrows = True

    def batch(self, requests: list[Request]) -> tuple[Any, Any]:
        size = self.size
        counts = [size(request) for request in requests]
        like = None
        merged = []
        for index, column in enumerate(zip(*requests, strict=True)):
            if type(column[0]) is np.ndarray:
                merged.append(self._merge(column, (index,)))
                continue
            if like is None:
                like = _structure.first_tensor(requests[0])
            merged.append(_structure.merge(column, (index,), self._merge, counts, like))
        return tuple(merged), counts

    def _merge(self, column: Sequence[Any], path: tuple[Any, ...]) -> Any:
        return tensors.concat(column)

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        return _structure.scatter(batched_response, context)

    def size(self, request: Request) -> int:
        """The number of rows of the request's first tensor."""
        if request and type(request[0]) is np.ndarray and request[0].ndim:
            return request[0].shape[0]
        shape = _structure.first_tensor(request).shape
        rows = _structure.RowCounter()
        rows.add(shape)
        return rows.count

    def kind(self, request: Request) -> Hashable:
        """Framework, dtype, trailing shape and structure of every argument."""
        kinds: list[Hashable] = []
        rows = _structure.RowCounter()
        for value in request:
            if type(value) is np.ndarray:
                shape = value.shape
                rows.add(shape)
                kinds.append((value.dtype, shape[1:]))
            else:
                kinds.append(_structure.kind_of(value, rows))
        return tuple(kinds)

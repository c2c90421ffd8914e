"""ConcatBatcher: join the tensors of the requests on their first dimension, and cut the output at the same rows."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import tensors
from ..errors import BatcherError, ConfigError, RequestTooLargeError
from . import _options, _structure
from ._structure import Path
from .batcher import Batcher, Request


@dataclass(slots=True)
class Layout:
    """How the requests of one batch lie in it: the context of the tensor batchers."""

    counts: list[int]  # rows of each request, in order
    rows: int  # rows of the batch, padding rows included
    lengths: list[int] | None = None  # of each request's first padded argument
    length: int = 0  # what those were padded to
    target: int = 0  # the length to pad to, if it does not depend on the batch


class ConcatBatcher(Batcher):
    """Concatenates each argument on the first dimension; the model's output is cut at the same rows.

    Arguments are tensors, or tuples, lists and mappings of them (mappings reach the model as dicts). A Python number
    becomes a tensor with one entry per row; None stays None. Requests that differ in framework, dtype, trailing shape
    or structure form batches of their own.

    `batch_sizes`, ascending, is for models compiled for fixed shapes: each batch is rounded up to the next of them with
    copies of its first row, whose results are dropped.

    `tensor` ("np" or "pt") is accepted for programs written for the older package; what arrives decides.
    """

    borrows = True
    by_shape = True
    batch_sizes: tuple[int, ...] = ()
    _only_joins = False  # rows of tensors are copied as they are, and nothing else

    def __init__(self, *, batch_sizes: Sequence[int] | None = None, tensor: str | None = None) -> None:
        super().__init__()
        if batch_sizes is not None:
            self.batch_sizes = _options.ascending("batch_sizes", batch_sizes)
        if tensor not in (None, "np", "pt"):
            raise ConfigError(f"tensor must be 'np' or 'pt', got {tensor!r}; it may be left out")
        self._only_joins = not self.batch_sizes and inherits(self, "_layout", "_merge_tensors")

    def batch(self, requests: list[Request]) -> tuple[Any, Any]:
        if self._only_joins and (small := tensors.joined_columns(requests)) is not None:
            merged, counts, rows = small
            return merged, Layout(counts, rows)
        layout = self._layout(requests)
        if tensors.PLAIN.issuperset(
            map(type, requests[0])
        ):  # then the others are as well, being of one kind: no structure to walk
            columns = enumerate(zip(*requests))
            return tuple([self._merge_tensors(column, (index,), layout) for index, column in columns]), layout

        return self._merge(requests, layout, lambda column, path: self._merge_tensors(column, path, layout)), layout

    def batch_begun(self, requests: list[Request], begun: Mapping[Path, Any], done: int) -> tuple[Any, Any]:
        """`batch`, where the rows of the first `done` requests have been copied ahead.

        `begun` holds a tensor for each path, with those rows first and room for more. Only for batchers that inherit
        `batch` as it is here.
        """
        layout = self._layout(requests)
        if not done or layout.rows > min([len(tensor) for tensor in begun.values()]):
            return self.batch(requests)
        filled = sum(layout.counts[:done])

        def complete(column: Sequence[Any], path: Path) -> Any:
            end = tensors.append(begun[path], filled, column[done:]) if done < len(column) else filled
            return tensors.completed(begun[path], end, layout.rows)

        return self._merge(requests, layout, complete), layout

    def _merge(
        self, requests: list[Request], layout: Layout, merge_tensors: Callable[[Sequence[Any], Path], Any]
    ) -> tuple[Any, ...]:
        merger = _structure.Merger(requests, layout.counts, layout.rows, merge_tensors)
        return tuple([merger.merge(column, (index,)) for index, column in enumerate(zip(*requests, strict=True))])

    def _layout(self, requests: list[Request]) -> Layout:
        first = requests[0]
        if first and type(first[0]) in tensors.PLAIN and first[0].shape:  # the same for all, as they are of one kind
            counts = [request[0].shape[0] for request in requests]
        else:
            counts = [_rows(request) for request in requests]
        rows = sum(counts)
        return Layout(counts, self._padded_rows(rows) if self.batch_sizes else rows)

    def _merge_tensors(self, column: Sequence[Any], path: Path, layout: Layout) -> Any:
        return tensors.concat(column, layout.rows if self.batch_sizes else None)

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        return _structure.scatter(batched_response, context.counts, context.rows)

    def owners(self, requests: list[Request], context: Any) -> Sequence[int]:
        """The rows of each request, in order; rows of padding are copies of the first request's first."""
        counts = context.counts
        owners = [index for index, count in enumerate(counts) for _ in range(count)]
        return owners + [0] * (context.rows - len(owners))

    def size(self, request: Request) -> int:
        """The number of rows of the request's first tensor."""
        return _rows(request)

    def kind(self, request: Request) -> Hashable:
        """Framework, dtype, trailing shape and structure of every argument."""
        kinds: list[Hashable] = []
        count = -1
        for value in request:
            if type(value) not in tensors.PLAIN:
                break
            shape = value.shape
            if not shape or (shape[0] != count and count >= 0):
                break
            count = shape[0]
            kinds.append((value.dtype, shape[1:]))
        else:
            if kinds:
                return tuple(kinds)
        return self._general_kind(request)

    def _general_kind(self, request: Request) -> Hashable:
        """The kind of a request that is not just tensors side by side, or of one that is wrong."""
        tensor = _structure.first_tensor(request)
        rows = tensor.shape[0] if tensor is not None and tensor.shape else 0
        find = _structure.KindFinder(rows, self._tensor_kind).kind
        kinds = tuple([find(value, (index,)) for index, value in enumerate(request)])
        _structure.row_count(request)
        return kinds

    def _tensor_kind(self, value: Any, path: Path) -> Hashable:
        return value.dtype, tuple(value.shape[1:])

    def split(self, request: Request, limit: int) -> list[Request]:
        """Cut the request into requests of as many rows as the limit allows."""
        rows = _rows(request)
        step = rows * limit // max(self.size(request), 1)
        if step < 1:
            raise RequestTooLargeError(
                f"one row of a request of size {self.size(request)} is larger than max_batch_size={limit}: raise "
                "max_batch_size, or send shorter rows"
            )
        return [_part(request, slice(start, start + step)) for start in range(0, rows, step)]

    def join(self, responses: list[Any]) -> Any:
        return _structure.join(responses)

    def _padded_rows(self, rows: int) -> int:
        sizes = self.batch_sizes
        if not sizes:
            return rows
        if rows > sizes[-1]:
            raise BatcherError(
                f"a batch of {rows} rows is larger than the largest of batch_sizes, {sizes[-1]}: set max_batch_size to "
                "at most that, or add larger batch_sizes"
            )
        return sizes[bisect.bisect_left(sizes, rows)]

    def check_limit(self, max_batch_size: int) -> None:
        """ConfigError if batches may get larger than the largest of `batch_sizes`."""
        most = self._most_rows(max_batch_size)
        if self.batch_sizes and most > self.batch_sizes[-1]:
            raise ConfigError(
                f"max_batch_size={max_batch_size} allows batches of {most} rows, but batch_sizes ends at "
                f"{self.batch_sizes[-1]}: lower max_batch_size or add larger batch_sizes"
            )

    def _most_rows(self, max_batch_size: int) -> int:
        """The most rows a batch may have; 0 if a subclass counts something else than rows."""
        return max_batch_size if inherits(self, "size") else 0

    def padding(self, context: Any) -> tuple[int, int]:
        if context.lengths is None:
            return (sum(context.counts), context.rows) if self.batch_sizes else (0, 0)
        own = [count * length for count, length in zip(context.counts, context.lengths, strict=True)]
        return sum(own), context.rows * context.length

    def warmup_requests(self, sample: Request, limit: int | None = None) -> Iterator[list[Request]]:
        """One batch for each of `batch_sizes`, the largest first: what it allocates serves the others."""
        for rows in self._reachable_sizes(limit) or [_rows(sample)]:
            yield [self._with_rows(sample, rows)]

    def _reachable_sizes(self, most: int | None) -> list[int]:
        """The `batch_sizes` that batches of at most `most` rows are rounded up to, largest first."""
        sizes = self.batch_sizes
        if sizes and most is not None:
            sizes = sizes[: bisect.bisect_left(sizes, most) + 1]
        return list(reversed(sizes))

    def _with_rows(self, sample: Request, rows: int) -> Request:
        """`sample` with `rows` rows, all like its first."""
        resized: Request = _structure.map_tensors(tuple(sample), lambda _, tensor: tensors.concat([tensor[:1]], rows))
        return resized


def inherits(batcher: ConcatBatcher, *names: str) -> bool:
    """Whether a batcher, which may be of a subclass, has these from ConcatBatcher."""
    return all(getattr(type(batcher), name) is getattr(ConcatBatcher, name) for name in names)


def _part(request: Request, rows: slice) -> Request:
    part: Request = _structure.map_tensors(tuple(request), lambda _, tensor: tensor[rows])
    return part


def _rows(request: Request) -> int:
    if request:
        first = request[0]
        if type(first) in tensors.PLAIN and (shape := first.shape):
            return shape[0]  # type: ignore[no-any-return]
    return _structure.row_count(request)

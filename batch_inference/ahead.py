"""Collating ahead: a worker that waits for more requests copies those that are there into the batch that is open.

While it waits it has nothing else to do, so this needs no thread, takes nobody's interpreter lock, and copies nothing
that would not have to be copied before the batch runs. When the batch is cut, only the rows that came last are missing.

What is cut decides, not what was copied: a request that nobody waits for any more has left its queue, and the rows from
its place on are written again. Requests keep the arguments that they came with, from which a batch can be run again.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Any

from batch_inference import buffers, tensors
from batch_inference.batcher import ConcatBatcher
from batch_inference.batcher._structure import Path, leaves
from batch_inference.batcher.batcher import Batcher
from batch_inference.batcher.concat_batcher import inherits
from batch_inference.waiting import Request

MOST_RESERVED = 256 << 20  # bytes of address space for an open batch: room for max_batch_size rows, used or not


def joins_rows(batcher: Batcher) -> bool:
    """Whether batches of this batcher are the rows of its requests, one after the other, and the limit counts them."""
    return isinstance(batcher, ConcatBatcher) and inherits(
        batcher, "batch", "size", "kind", "borrows", "_merge_tensors"
    )


class Ahead:
    """The batch that is open: the rows of the requests at the head of a queue, as far as they have been copied."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher if isinstance(batcher, ConcatBatcher) and joins_rows(batcher) else None
        self._copied: list[tuple[Any, ...]] = []  # the arguments of those requests, in order
        self._columns: dict[Path, Any] = {}  # a tensor with room for the rows of all arguments at that place
        self._room = self._filled = 0  # rows

    def copy(self, queue: deque[Request], limit: int) -> float:
        """Copies the rows of requests that wait, if they are worth it; the seconds that this took."""
        if self._batcher is None:
            return 0.0
        started = time.monotonic()
        try:
            self._copy(queue, limit)
        except Exception:  # MemoryError, say: the batcher meets with it again when the batch is cut, and it is reported
            self._clear()
        return time.monotonic() - started

    def finish(self, requests: list[tuple[Any, ...]]) -> tuple[Any, Any] | None:
        """What the batcher makes of `requests`, some of which have been copied; None if it has to do all of it."""
        copied, columns = self._copied, self._columns
        if self._batcher is None or not copied:
            return None
        self._clear()  # the model may keep or change what it is given: a second run begins with the arguments again
        same = [ours is theirs for ours, theirs in zip(copied, requests)]
        done = same.index(False) if False in same else len(same)
        return self._batcher.batch_begun(requests, columns, done)

    def _copy(self, queue: deque[Request], limit: int) -> None:
        if not self._copied or self._copied[0] is not queue[0].args:
            self._begin(queue[0].args, limit)
        for request in islice(queue, len(self._copied), None):
            if self._filled + request.size > self._room:
                break
            filled = self._filled
            for path, tensor in leaves(request.args):
                self._filled = tensors.append(self._columns[path], filled, [tensor])
            self._copied.append(request.args)

    def _begin(self, args: tuple[Any, ...], limit: int) -> None:
        self._clear()
        found = leaves(args)
        size = sum([tensor.nbytes for _, tensor in found])
        rows = found[0][1].shape[0]
        if size >= buffers.WORTH_POOLING and size * limit <= MOST_RESERVED * rows:
            self._room = limit
            self._columns = {path: tensors.empty((limit, *tensor.shape[1:]), tensor) for path, tensor in found}

    def _clear(self) -> None:
        self._copied, self._columns = [], {}
        self._room = self._filled = 0

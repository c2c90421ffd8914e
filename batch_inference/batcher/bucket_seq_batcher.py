"""BucketSeqBatcher: pad sequences together with others of similar length only."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from .. import tensors
from ..errors import ConfigError
from . import _options, _structure
from ._options import PaddingTokens, Trim
from ._structure import Path
from .batcher import Request
from .concat_batcher import Layout
from .seq_batcher import SeqBatcher


class BucketSeqBatcher(SeqBatcher):
    """A SeqBatcher whose batches hold requests of one bucket of lengths, each bucket filling on its own.

    `buckets`, ascending, are the largest lengths of the buckets, ``[16, 32, 64]``; longer requests share one more. What
    counts is the longest padded argument of a request. The other options are those of SeqBatcher.

    `pad_to_bucket=True` pads to the bucket's length instead of the longest of the batch, so that a compiled model sees
    few shapes. Then the size of a request is rows x bucket length: ``max_batch_size`` bounds the elements of a batch.
    """

    borrows = True
    by_shape = True
    buckets: tuple[int, ...] = ()
    pad_to_bucket = False

    def __init__(
        self,
        padding_tokens: PaddingTokens,
        buckets: Sequence[int],
        *,
        pad_to_bucket: bool = False,
        dim: int = -1,
        padding_side: str = "right",
        pad_to_multiple_of: int | None = None,
        mask: bool | str = False,
        trim: Trim = None,
        batch_sizes: Sequence[int] | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(
            padding_tokens,
            dim=dim,
            padding_side=padding_side,
            pad_to_multiple_of=pad_to_multiple_of,
            mask=mask,
            trim=trim,
            batch_sizes=batch_sizes,
            tensor=tensor,
        )
        self.buckets = _options.ascending("buckets", buckets)
        self.pad_to_bucket = pad_to_bucket

    def kind(self, request: Request) -> Hashable:
        """The bucket, and what makes the kind for SeqBatcher."""
        kind = super().kind(request)
        return bisect.bisect_left(self.buckets, self._longest(request)), kind

    def size(self, request: Request) -> int:
        """The number of rows; with `pad_to_bucket`, rows x bucket length (own length, if longer than all buckets)."""
        rows = super().size(request)
        return rows * self._bucket_length(self._longest(request)) if self.pad_to_bucket else rows

    def _bucket_length(self, length: int) -> int:
        index = bisect.bisect_left(self.buckets, length)
        return self.buckets[index] if index < len(self.buckets) else length

    def _layout(self, requests: list[Request]) -> Layout:
        layout = super()._layout(requests)
        if self.pad_to_bucket:
            longest = max(map(self._longest, requests))
            if longest <= self.buckets[-1]:
                layout.target = self._bucket_length(longest)
        return layout

    def check_limit(self, max_batch_size: int) -> None:
        """ConfigError if `max_batch_size`, which counts padded elements here, is too small for one row."""
        if self.pad_to_bucket and max_batch_size < self.buckets[-1] and type(self).size is BucketSeqBatcher.size:
            raise ConfigError(
                f"max_batch_size={max_batch_size} is less than the last bucket, {self.buckets[-1]}: with pad_to_bucket "
                "it counts rows x bucket length, so that one row of that bucket must fit"
            )
        super().check_limit(max_batch_size)

    def _most_rows(self, max_batch_size: int) -> int:
        if type(self).size is not BucketSeqBatcher.size:
            return 0
        return max_batch_size // self.buckets[0] if self.pad_to_bucket else max_batch_size

    def warmup_requests(self, sample: Request, limit: int | None = None) -> Iterator[list[Request]]:
        """With `pad_to_bucket`, one batch for each bucket and each of `batch_sizes`, the largest first."""
        if not self.pad_to_bucket:
            yield from super().warmup_requests(sample, limit)
            return
        for length in reversed(self.buckets):
            most = None if limit is None else max(limit // length, 1)
            resized = self._with_length(sample, length)
            sizes = self._reachable_sizes(most)
            if not sizes:
                yield [resized]
            for rows in sizes:
                yield [self._with_rows(resized, rows)]

    def _with_length(self, sample: Request, length: int) -> Request:
        """`sample` with every padded argument cut or padded to `length`."""

        def resize(path: Path, tensor: Any) -> Any:
            token = self._token(path)
            return tensor if token is None else tensors.resize(tensor, self._axis(tensor, path), length, token)

        resized: Request = _structure.map_tensors(tuple(sample), resize)
        return resized

"""SeqBatcher: pad sequences to the longest of the batch, then join them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from .. import tensors
from ..errors import BatcherError, ConfigError
from . import _options, _structure
from ._options import PaddingTokens, Trim
from ._structure import Path
from .batcher import Request
from .concat_batcher import ConcatBatcher, Layout


class SeqBatcher(ConcatBatcher):
    """Pads one dimension of each argument to the longest of the batch, and concatenates.

    `padding_tokens`: one per argument, in order; None leaves that argument as it is. For a dict argument, a dict with
    an entry for each of its tensors (at top level if that dict is the only argument). One number serves all arguments.
    `dim`: the dimension that is padded; it cannot be the first, which is the batch.
    `padding_side`: "right", or "left" as generating models like it.
    `pad_to_multiple_of`: round the padded length up.
    `mask=True` gives the model one more argument, after the others: the attention mask, int64 [rows, length], 1 for
    elements that a caller sent and 0 for padding. A string instead is the key under which it joins the first dict
    argument, in place of what was there.
    `trim`: the dimension of the output that follows the padded length, cut back to each request's own length (that of
    its first padded argument). For a tuple, list or dict of outputs, a list or dict says it for each: ``[1, None]``.
    """

    borrows = True
    by_shape = True

    def __init__(
        self,
        padding_tokens: PaddingTokens,
        *,
        dim: int = -1,
        padding_side: str = "right",
        pad_to_multiple_of: int | None = None,
        mask: bool | str = False,
        trim: Trim = None,
        batch_sizes: Sequence[int] | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(batch_sizes=batch_sizes, tensor=tensor)
        self.padding_tokens: list[Any] | int | float = _options.padding_tokens_of(padding_tokens)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim == 0:
            raise ConfigError(f"dim must be a dimension other than 0, which is the batch: got {dim!r}")
        if padding_side not in ("right", "left"):
            raise ConfigError(f"padding_side must be 'right' or 'left', got {padding_side!r}")
        if pad_to_multiple_of is not None and (not isinstance(pad_to_multiple_of, int) or pad_to_multiple_of < 1):
            raise ConfigError(f"pad_to_multiple_of must be a positive integer, got {pad_to_multiple_of!r}")
        if not isinstance(mask, (bool, str)):
            raise ConfigError(f"mask must be True, False or the key of a dict argument, got {mask!r}")
        _options.check_trim(trim)
        self.dim = dim
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of
        self.mask = mask
        self.trim = trim

    # --- requests

    def batch(self, requests: list[Request]) -> tuple[Any, Any]:
        merged, layout = super().batch(requests)
        if self.mask is not False:
            merged = self._with_mask(merged, requests, layout)
        return merged, layout

    def _merge_tensors(self, column: Sequence[Any], path: Path, layout: Layout) -> Any:
        token = self._token(path)
        if token is None:
            return super()._merge_tensors(column, path, layout)
        axis = self._axis(column[0], path)
        lengths = [value.shape[axis] for value in column]
        length = self._padded_length(max(lengths), layout)
        if layout.lengths is None:
            layout.lengths, layout.length = lengths, length
        left = self.padding_side == "left"
        return tensors.pad_concat(column, axis, length, token, left=left, rows=layout.rows)

    def _padded_length(self, longest: int, layout: Layout) -> int:
        if layout.target:
            return layout.target
        multiple = self.pad_to_multiple_of
        return -(-longest // multiple) * multiple if multiple else longest

    def _with_mask(self, merged: tuple[Any, ...], requests: list[Request], layout: Layout) -> tuple[Any, ...]:
        if layout.lengths is None:
            raise BatcherError("mask needs a padded argument, but the request holds none: see padding_tokens")
        mask = tensors.length_mask(
            layout.lengths,
            layout.counts,
            length=layout.length,
            left=self.padding_side == "left",
            rows=layout.rows,
            like=_structure.first_tensor(requests[0]),
        )
        if self.mask is True:
            return (*merged, mask)
        for argument in merged:
            if isinstance(argument, dict):
                argument[self.mask] = mask
                return merged
        raise BatcherError(
            f"mask={self.mask!r} names a key of a dict argument, but the request has none: use mask=True"
        )

    def kind(self, request: Request) -> Hashable:
        """As for ConcatBatcher, but without the dimension that is padded."""
        kinds: list[Hashable] = []
        count = -1
        dim = self.dim
        for value, token in self._flat(request):
            shape = value.shape
            if not shape or (shape[0] != count and count >= 0):
                break
            count = shape[0]
            if token is None:
                kinds.append((value.dtype, shape[1:]))
                continue
            axis = dim if dim > 0 else len(shape) + dim
            if not 0 < axis < len(shape) or not tensors.can_hold(value.dtype, token):
                break
            kinds.append((value.dtype, shape[1:axis], shape[axis + 1 :]))
        else:
            if kinds:
                return tuple(kinds)
        return self._general_kind(request)

    def _flat(self, request: Request) -> list[tuple[Any, Any]]:
        """(tensor, padding token) of each argument, if the request is just tensors side by side; else nothing."""
        tokens = self.padding_tokens
        if type(tokens) is not list or len(tokens) < len(request):
            return []
        pairs = []
        for value, token in zip(request, tokens):
            if type(value) not in tensors.PLAIN or type(token) in (dict, list):
                return []
            pairs.append((value, token))
        return pairs

    def _tensor_kind(self, value: Any, path: Path) -> Hashable:
        token = self._token(path)
        if token is None:
            return super()._tensor_kind(value, path)
        axis = self._axis(value, path)
        if not tensors.can_hold(value.dtype, token):
            raise BatcherError(
                f"{_structure.place('argument', path)} is a tensor of {value.dtype}, which cannot be padded with "
                f"{token!r}: see padding_tokens"
            )
        shape = value.shape
        return value.dtype, tuple(shape[1:axis]), tuple(shape[axis + 1 :])

    def _token(self, path: Path) -> Any:
        """The padding token of the tensor at `path`; None if it is not to be padded."""
        token: Any = self.padding_tokens
        for key in path:
            if token is None or isinstance(token, (int, float)):
                break
            try:
                token = token[key]
            except (LookupError, TypeError):
                raise BatcherError(
                    f"padding_tokens has no entry for {_structure.place('argument', path)}: give its padding token, or "
                    "None to leave it unpadded"
                ) from None
        if token is None or isinstance(token, (int, float)):
            return token
        raise BatcherError(f"padding_tokens has {token!r} for {_structure.place('argument', path)}, which is a tensor")

    def _axis(self, value: Any, path: Path) -> int:
        dimensions = len(value.shape)
        axis = self.dim if self.dim > 0 else dimensions + self.dim
        if not 0 < axis < dimensions:
            if not dimensions:
                raise _structure.zero_dimensional()
            raise BatcherError(
                f"{_structure.place('argument', path)} of shape {tuple(value.shape)} has no dimension {self.dim} to "
                "pad besides the batch: give None for it in padding_tokens, or set dim"
            )
        return axis

    def _longest(self, request: Request) -> int:
        """The length of the request's longest padded argument."""
        longest = -1
        dim = self.dim
        for value, token in self._flat(request):
            if token is not None:
                shape = value.shape
                axis = dim if dim > 0 else len(shape) + dim
                if not 0 < axis < len(shape):
                    break
                if shape[axis] > longest:
                    longest = shape[axis]
        if longest >= 0:
            return longest
        for path, tensor in _structure.leaves(request):
            if self._token(path) is not None:
                longest = max(longest, tensor.shape[self._axis(tensor, path)])
        if longest < 0:
            raise BatcherError("the request holds no argument to pad: see padding_tokens")
        return longest

    # --- outputs

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        responses = super().unbatch(batched_response, context)
        if self.trim is None or context.lengths is None:
            return responses
        return [
            self._trimmed(response, self.trim, length, context.length, ())
            for response, length in zip(responses, context.lengths, strict=True)
        ]

    def _trimmed(self, output: Any, trim: Trim, own: int, padded: int, path: Path) -> Any:
        if trim is None:
            return output
        if tensors.is_tensor(output):
            return self._cut(output, trim, own, padded, path)
        if isinstance(output, dict):
            return {
                key: self._trimmed(item, _below(trim, key), own, padded, (*path, key)) for key, item in output.items()
            }
        if _structure.is_fields(output):
            items = [
                self._trimmed(item, _below(trim, index), own, padded, (*path, index))
                for index, item in enumerate(output)
            ]
            return _structure.rebuild(output, items)
        return output

    def _cut(self, output: Any, trim: Trim, own: int, padded: int, path: Path) -> Any:
        shape = tuple(output.shape)
        axis = trim + len(shape) if isinstance(trim, int) and trim < 0 else trim
        if not isinstance(axis, int) or not 0 < axis < len(shape) or shape[axis] != padded:
            raise BatcherError(
                f"{_structure.place('output', path)} of predict_batch has shape {shape} per request: it cannot be "
                f"trimmed by trim={trim!r}, expected {padded} in that dimension, the padded length of the batch. For "
                "outputs of several kinds say which to trim: trim=[1, None] or trim={'last_hidden_state': 1}"
            )
        part = slice(padded - own, padded) if self.padding_side == "left" else slice(own)
        return output[(slice(None),) * axis + (part,)]


def _below(trim: Trim, key: Any) -> Trim:
    """The part of `trim` that speaks of one field."""
    if isinstance(trim, Mapping):
        part: Trim = trim.get(key)
        return part
    if isinstance(trim, (tuple, list)):
        return trim[key] if isinstance(key, int) and key < len(trim) else None
    return trim

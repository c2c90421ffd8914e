"""Checks of the batchers' options, so that a mistake is named where it was made and not in the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError

PaddingTokens = Sequence[Any] | Mapping[str, Any] | float
Trim = int | Sequence[Any] | Mapping[str, Any] | None


def ascending(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """The values as a tuple; ConfigError unless they are positive integers, each larger than the one before."""
    numbers = tuple(values)
    if not numbers:
        raise ConfigError(f"{name} is empty: give at least one number")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 1:
            raise ConfigError(f"{name} must hold positive integers, got {number!r}")
    if any(after <= before for before, after in zip(numbers, numbers[1:])):
        raise ConfigError(f"{name} must be ascending, without duplicates: got {list(numbers)}")
    return tuple(map(int, numbers))


def padding_tokens_of(padding_tokens: PaddingTokens) -> Any:
    if isinstance(padding_tokens, Mapping):
        padding_tokens = [padding_tokens]
    if isinstance(padding_tokens, (str, bytes)) or padding_tokens is None:
        raise ConfigError(f"padding_tokens must hold one number or None for each argument, got {padding_tokens!r}")
    if isinstance(padding_tokens, (int, float, np.number)):
        _check_token(padding_tokens)
        return _plain(padding_tokens)
    for token in padding_tokens:
        _check_token(token)
    if not any(map(_pads, padding_tokens)):
        raise ConfigError(
            f"padding_tokens={padding_tokens!r} leaves every argument unpadded: use ConcatBatcher for that, or give a "
            "number for the arguments that are to be padded"
        )
    return _plain(list(padding_tokens))


def _leaves(option: Any) -> Iterator[Any]:
    """What stands in the mappings, tuples and lists of an option that is nested as its arguments are."""
    if isinstance(option, (Mapping, tuple, list)):
        for item in option.values() if isinstance(option, Mapping) else option:
            yield from _leaves(item)
    else:
        yield option


def _check_token(token: Any) -> None:
    for leaf in _leaves(token):
        if leaf is not None and not isinstance(leaf, (int, float, np.number)):
            raise ConfigError(f"padding_tokens must hold numbers or None, got {leaf!r}")


def _pads(token: Any) -> bool:
    return any(leaf is not None for leaf in _leaves(token))


def _plain(token: Any) -> Any:
    """Tokens as Python numbers, whatever they came as (torch and numpy scalars weigh on every batch)."""
    if isinstance(token, Mapping):
        return {key: _plain(item) for key, item in token.items()}
    if isinstance(token, (tuple, list)):
        return [_plain(item) for item in token]
    return token.item() if isinstance(token, np.number) else token


def check_trim(trim: Trim) -> None:
    for leaf in _leaves(trim):
        if leaf is not None and (isinstance(leaf, bool) or not isinstance(leaf, int) or leaf == 0):
            raise ConfigError(f"trim must be a dimension other than 0, which is the batch: got {leaf!r}")

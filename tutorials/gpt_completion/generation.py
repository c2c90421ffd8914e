"""Generating for many rows at once: left padding, a KV cache, a token per row and step, rows that leave when finished.

Runs in the worker process. Each row has settings of its own. What a row gets does not depend on the others, apart from
the last digits of floating-point sums, which depend on the shape of the batch and can decide between two tokens
that are equally likely to seven digits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The settings of all rows, side by side: each tensor has one entry, or row, per row of the batch."""

    max_new_tokens: Tensor
    temperature: Tensor  # 0: greedy
    stop: Tensor  # the token after which the row is finished; -1: none
    chances: Tensor  # [rows, steps] of [0, 1): what a sampled row takes for its dice, see `dice`

    def select(self, rows: Tensor) -> Settings:
        return Settings(self.max_new_tokens[rows], self.temperature[rows], self.stop[rows], self.chances[rows])


def dice(seeds: Sequence[int], steps: int) -> np.ndarray:
    """[rows, steps] numbers of [0, 1) that depend on nothing but the seed of their row, so that a request samples the
    same tokens in whichever batch it runs."""
    return np.stack([np.random.default_rng(int(seed)).random(steps) for seed in seeds])


def next_tokens(logits: Tensor, temperature: Tensor, chance: Tensor) -> Tensor:
    """[rows] tokens from [rows, vocabulary] logits: the most likely one where the temperature is 0, elsewhere the one
    at which the probabilities, summed up in the order of the vocabulary, exceed `chance`."""
    tokens = logits.argmax(dim=-1)
    sampled = temperature > 0
    if bool(sampled.any()):
        scaled = logits[sampled].double() / temperature[sampled, None]
        sums = scaled.softmax(dim=-1).cumsum(dim=-1)
        threshold = chance[sampled, None] * sums[:, -1:]  # the last sum is 1, but for rounding
        tokens[sampled] = torch.searchsorted(sums, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens


def positions(mask: Tensor) -> Tensor:
    """[rows, length] position of each token, counted from its row's first; padding, which nobody looks at, gets 0."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


@torch.inference_mode()
def generate(model: Any, ids: Tensor, mask: Tensor, settings: Settings) -> list[list[int]]:
    """The new tokens of each row, its stop token included. `ids` and `mask`: [rows, length], padded on the left."""
    answers: list[list[int]] = [[] for _ in range(len(ids))]
    rows = list(range(len(ids)))  # which answer each row of the tensors belongs to
    cache = transformers.DynamicCache(config=model.config)
    forward = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    position = positions(mask)
    step = 0
    while rows:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, **forward).logits[:, -1]
        tokens = next_tokens(logits, settings.temperature, settings.chances[:, step])
        step += 1
        for row, token in zip(rows, tokens.tolist()):
            answers[row].append(token)

        stay = ((tokens != settings.stop) & (step < settings.max_new_tokens)).nonzero()[:, 0]
        if len(stay) < len(rows):  # those that are finished cost nothing from here on
            rows = [rows[index] for index in stay.tolist()]
            if not rows:
                break
            cache.batch_select_indices(stay)
            tokens, mask, position, settings = tokens[stay], mask[stay], position[stay], settings.select(stay)
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        position = position[:, -1:] + 1
    return answers


def cache_argument(model: Any) -> str:
    """The name under which the model takes its KV cache: it changed from one release of transformers to another."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

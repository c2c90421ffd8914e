"""A budget of tokens: a batch holds many short texts or few long ones, and texts beyond the budget go in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from batch_inference.batcher import Batcher


class TokenBudget(Batcher):
    """predict(ids): int64 [tokens]  ->  predict_batch(ids [n, longest], lengths [n]); max_batch_size is the budget.

    The memory of a model call depends on n x longest. A text counts as the next power of two, and only texts of one
    such length share a batch: so rows x longest never exceeds the budget.
    """

    borrows = True

    def batch(self, requests):
        lengths = np.array([len(ids) for (ids,) in requests])
        padded = np.zeros((len(requests), lengths.max()), np.int64)
        for row, (ids,) in zip(padded, requests):
            row[: len(ids)] = ids
        return (padded, lengths), lengths

    def unbatch(self, batched_response, context):
        return [row[:length] for row, length in zip(batched_response, context)]

    def size(self, request):
        return 1 << (len(request[0]) - 1).bit_length()

    def kind(self, request):
        if not len(request[0]):
            raise ValueError("an empty text")
        return self.size(request)

    def split(self, request, limit):  # for a text that counts more than the budget
        step = 1 << (limit.bit_length() - 1)  # the largest power of two within it
        (ids,) = request
        return [(ids[start : start + step],) for start in range(0, len(ids), step)]

    def join(self, responses):
        return np.concatenate(responses)

    def padding(self, context):  # for host.statistics().padding
        return int(context.sum()), int(context.max()) * len(context)


class Surprise:
    """A score for each token, from that token alone: in this toy it makes no difference where a text is cut."""

    def __init__(self, words: int = 1000, width: int = 64, layers: int = 12) -> None:
        torch.manual_seed(0)
        hidden = [layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(torch.nn.Embedding(words, width), *hidden, torch.nn.Linear(width, 1))

    @torch.inference_mode()
    def predict_batch(self, ids: Any, lengths: Any) -> Any:
        return self.layers(torch.from_numpy(ids))[..., 0].numpy()

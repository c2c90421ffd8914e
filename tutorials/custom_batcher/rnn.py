"""Sequences for an RNN: sorted by length, packed, and back in the callers' order."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from batch_inference.batcher import Batcher


class PackingBatcher(Batcher):
    """predict(steps): float32 [steps, features]  ->  predict_batch(PackedSequence), which returns another one."""

    def batch(self, requests):
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index][0]))  # the longest first
        packed = pack_sequence([torch.from_numpy(requests[index][0]) for index in order])
        return packed, order  # a PackedSequence is a tuple, but not a plain one: it is one argument

    def unbatch(self, batched_response, context):
        padded, lengths = pad_packed_sequence(batched_response, batch_first=True)
        responses = [None] * len(context)
        for index, row, length in zip(context, padded.numpy(), lengths):
            responses[index] = row[:length]
        return responses


class Tagger:
    """A GRU and a linear layer: one score per step and tag."""

    def __init__(self, features: int = 8, tags: int = 4) -> None:
        torch.manual_seed(0)
        self.gru = torch.nn.GRU(features, 32)
        self.linear = torch.nn.Linear(32, tags)

    @torch.inference_mode()
    def predict_batch(self, packed: PackedSequence) -> Any:
        hidden, _ = self.gru(packed)
        return PackedSequence(self.linear(hidden.data), hidden.batch_sizes)

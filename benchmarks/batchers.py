"""Collate and scatter of the built-in batchers beside what plain numpy needs for the same, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import Meter
from benchmarks.measure import Goal, Row, Sample, judge, percentile
from benchmarks.options import Options
from benchmarks.report import log

REQUESTS = 32
Ids = npt.NDArray[np.int64]
Pair = tuple[Ids, Ids]


def pairs(lengths: list[int]) -> list[Pair]:
    """One request a length: token ids and mask, [1, length] each."""
    return [(np.full((1, length), index), np.ones((1, length), np.int64)) for index, length in enumerate(lengths)]


def numpy_concat(requests: list[Pair]) -> list[Any]:
    ids = np.concatenate([request[0] for request in requests])
    np.concatenate([request[1] for request in requests])
    return [ids[index : index + 1] for index in range(len(requests))]


def numpy_pad(requests: list[Pair]) -> list[Any]:
    longest = max(request[0].shape[1] for request in requests)

    def padded(column: int) -> Ids:
        return np.concatenate([np.pad(r[column], ((0, 0), (0, longest - r[column].shape[1]))) for r in requests])

    ids = padded(0)
    padded(1)
    return [ids[index : index + 1] for index in range(len(requests))]


def ours(batcher: Any) -> Callable[[list[Pair]], list[Any]]:
    """What the worker does with a batch, but for the model, which gives back its first argument."""

    def once(requests: list[Pair]) -> list[Any]:
        batch, context = batcher.batch(requests)
        answers: list[Any] = batcher.unbatch(batch[0], context)
        return answers

    return once


def microseconds(once: Callable[[list[Pair]], list[Any]], requests: list[Pair], window: float) -> float:
    """Median time of one batch."""
    clock = time.perf_counter
    for _ in range(20):
        once(requests)
    times: list[float] = []
    end = clock() + window
    while (before := clock()) < end:
        once(requests)
        times.append(clock() - before)
    return percentile(times, 0.5) * 1e6


def check(answers: list[Any], requests: list[Pair]) -> None:
    for index, ((ids, _), answer) in enumerate(zip(requests, answers, strict=True)):
        if not np.array_equal(answer[:, : ids.shape[1]], ids):
            raise AssertionError(f"request {index} got the answer {answer}")


def run(options: Options) -> list[Row]:
    from batch_inference.batcher import ConcatBatcher, SeqBatcher

    equal = pairs([64] * REQUESTS)
    mixed = pairs([4 + 61 * index % 125 for index in range(REQUESTS)])
    cells = (
        ("concat: 32 pairs of [1,64] int64", ours(ConcatBatcher()), numpy_concat, equal, Goal(times=3, at_most=True)),
        (
            "seq: 32 pairs of 4-128 tokens (np.pad + concatenate)",
            ours(SeqBatcher(padding_tokens=[0, 0])),
            numpy_pad,
            mixed,
            Goal(times=0.1, at_most=True),
        ),
    )
    samples: dict[str, list[Sample]] = {name: [] for name, *_ in cells}
    for number in range(options.rounds):
        for name, batcher, plain, requests, _ in cells:
            check(batcher(requests), requests)
            meter = Meter((os.getpid(),))
            value, floor = (microseconds(once, requests, options.window / 4) for once in (batcher, plain))
            samples[name].append(Sample(value, floor, meter.stop().foreign))
            log(f"  round {number + 1}: {name}: {value:.1f} us, numpy {floor:.1f} us")
    return [judge(name, "us", samples[name], goal) for name, _, _, _, goal in cells]

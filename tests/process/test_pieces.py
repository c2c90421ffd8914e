"""The requests of one turn of an event loop leave in pieces, so that the worker begins while the loop goes on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from batch_inference import ModelHost
from batch_inference.local import Lane
from batch_inference.transport.wire import DESCRIPTOR


class Doubles:
    def predict_batch(self, x: np.ndarray) -> np.ndarray:
        return x * 2


async def burst(host: ModelHost, count: int) -> list[float]:
    answers = await asyncio.gather(*(host.apredict(np.full((1, 2), number, np.float32)) for number in range(count)))
    return [float(answer[0, 0]) for answer in answers]


@pytest.mark.parametrize(
    ("count", "pieces"), [(1, [1]), (3, [3]), (4, [4]), (8, [4, 4]), (13, [4, 4, 5]), (64, [4, 4, 8, 16, 32])]
)
def test_half_of_what_waits_leaves_at_once(count: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Lane.send

    def counting(lane: Lane, descriptors: bytes) -> None:
        sent.append(len(descriptors) // DESCRIPTOR.size)
        send(lane, descriptors)

    monkeypatch.setattr(Lane, "send", counting)
    with ModelHost(Doubles, num_workers=0)() as host:
        host.predict(np.ones((1, 2), np.float32))  # memory is mapped from here on
        sent.clear()
        assert asyncio.run(burst(host, count)) == [2.0 * number for number in range(count)]
    assert sent == pieces

"""How to test a batcher: its hooks alone, then through a host, with a bad request among the others.

python -m pytest tutorials/custom_batcher. With num_workers=0 the same code runs without starting a process.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from images import ImageBatcher, ImageModel
from rnn import PackingBatcher, Tagger
from tokens import Surprise, TokenBudget

from batch_inference import ModelHost
from batch_inference.batcher.batcher import model_arguments
from batch_inference.testing import no_leaks


def some_images():
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (3, *random.integers(65, 97, 2)), np.uint8) for _ in range(12)]


def some_steps():
    random = np.random.default_rng(0)
    return [random.standard_normal((random.integers(1, 30), 8), np.float32) for _ in range(12)]


def some_texts():
    random = np.random.default_rng(0)
    return [random.integers(0, 1000, random.integers(17, 33)) for _ in range(12)]


CASES = [
    pytest.param(ImageBatcher(), ImageModel, some_images(), 1 << 16, np.zeros((1, 5, 5), np.uint8), id="images"),
    pytest.param(PackingBatcher(), Tagger, some_steps(), 8, np.zeros((3, 7), np.float32), id="rnn"),
    pytest.param(TokenBudget(), Surprise, some_texts(), 128, np.zeros(0, np.int64), id="tokens"),
]
equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def run(batcher, model, requests):
    """What the worker does with a batch, without a worker."""
    batched, context = batcher.batch([(request,) for request in requests])
    return batcher.unbatch(model.predict_batch(*model_arguments(batched)), context)


@pytest.mark.parametrize(("batcher", "model", "sent", "limit", "bad"), CASES)
def test_a_batch_gives_what_each_request_gives_alone(batcher, model, sent, limit, bad):
    built = model()
    together = run(batcher, built, sent)
    assert len(together) == len(sent)
    for request, response in zip(sent, together):
        equal(response, run(batcher, built, [request])[0])


@pytest.mark.parametrize(("batcher", "model", "sent", "limit", "bad"), CASES)
def test_a_host_batches_and_a_bad_request_fails_alone(batcher, model, sent, limit, bad):
    built = model()
    with no_leaks(), ModelHost(model, batcher=batcher, max_batch_size=limit, num_workers=0) as host:
        futures = [host.submit(request) for request in [*sent, bad]]
        with pytest.raises((ValueError, RuntimeError)):
            futures.pop().result(60)
        for request, future in zip(sent, futures):
            equal(future.result(60), run(batcher, built, [request])[0])
        assert host.statistics().mean_batch > 1


def test_a_text_beyond_the_budget_goes_in_pieces():
    text = np.arange(500)
    with ModelHost(Surprise, batcher=TokenBudget(), max_batch_size=100, num_workers=0) as host:
        equal(host.predict(text), run(TokenBudget(), Surprise(), [text])[0])

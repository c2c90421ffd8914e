"""Models compiled for fixed shapes: every shape is run before the host is ready, and no other one comes later."""

import threading

import numpy as np
import pytest

from batch_inference import ConfigError, ModelHost
from batch_inference.batcher import BucketSeqBatcher, ConcatBatcher
from tests.process.models import SeesShapes


def shapes_seen(host: ModelHost, row: np.ndarray) -> set[tuple[int, ...]]:
    """All shapes that the model was called with, this call's included."""
    return {tuple(shape) for shape in host.predict(row)[0].tolist() if shape[0]}


def test_every_shape_is_run_before_the_host_is_ready(capfd: pytest.CaptureFixture[str]) -> None:
    batcher = BucketSeqBatcher([0], buckets=[8, 16], pad_to_bucket=True, batch_sizes=[1, 2, 4])
    row = np.ones((1, 5), np.int64)
    with ModelHost(SeesShapes, batcher=batcher, max_batch_size=4 * 8, warmup=(row,))() as host:
        seen = shapes_seen(host, row)
        assert {(1, 8), (2, 8), (4, 8), (1, 16), (2, 16)} <= seen  # no batch may hold more than 32 tokens
        many = [threading.Thread(target=host.predict, args=(np.ones((1, n), np.int64),)) for n in range(1, 17)]
        for thread in many:
            thread.start()
        for thread in many:
            thread.join()
        assert shapes_seen(host, row) == seen, "a shape came that the warm-up had not run"
        assert 0 < host.statistics().padding < 1
    assert "warm-up 1 of" in capfd.readouterr().err


def test_padding_rows_never_reach_a_caller() -> None:
    with ModelHost(SeesShapes, batcher=ConcatBatcher(batch_sizes=[4]), max_batch_size=4)() as host:
        assert host.predict(np.ones((3, 5))).shape[0] == 3
        assert host.statistics().padding == 0.25


def test_a_warmup_that_is_no_tuple_of_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write \(x,\)"):
        ModelHost(SeesShapes, warmup=np.ones((1, 5)))

"""Requests and replies of all sizes, memory that is sealed, and replies that do not fit their slot."""

import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from batch_inference import ModelHost, RequestTooLargeError, TransportError
from batch_inference.batcher import ListBatcher
from batch_inference.testing import wait_until
from tests.process.models import Echo, Inflates
from tests.process.test_callers import all_slots_are_back, check, request

GIB = 1 << 30


def test_requests_from_0_bytes_to_32_mib_come_back_as_they_were() -> None:
    with Echo.host() as host:
        sizes = [0, 1, 3, 63, 64, 65, 960, 4095, 4096, 4097, 65_537, (1 << 20) - 200, 1 << 20, 9_999_999, 32 << 20]
        for size in [*sizes, *reversed(sizes)]:
            x = np.arange(size, dtype=np.uint32).view(np.uint8)[:size] if size < 1 << 20 else np.full(size, 7, np.uint8)
            answer = host.predict(x)
            assert answer.dtype == x.dtype and answer.shape == x.shape and np.array_equal(answer, x)
            assert answer.flags.owndata or answer.base is not x
        assert host.predict(()) == () and host.predict(b"") == b"" and host.predict("") == ""
        assert host.predict(b"x" * 5_000_000) == b"x" * 5_000_000
        all_slots_are_back(host)


def test_what_arrives_is_the_models_own_and_what_comes_back_the_callers() -> None:
    class Keeps:
        """Changes its input, keeps it, and returns what it kept."""

        def __init__(self) -> None:
            self.kept: list[Any] = []

        def predict_batch(self, x: Any) -> Any:
            x += 1
            self.kept.append(x)
            return np.stack([kept[0] for kept in self.kept[-1:]])

    with ModelHost(Keeps, max_batch_size=1) as host:
        x = np.zeros((1, 100_000))
        answers = [host.predict(x + number) for number in range(5)]
        assert (x == 0).all()
        for number, answer in enumerate(answers):
            assert (answer == number + 1).all()
            answer[:] = -1  # writable, and nobody else's


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 10 * GIB, reason="needs 10 GiB of free memory")
def test_a_request_of_1_gib() -> None:
    class Ends:
        def predict_batch(self, values: Any) -> Any:
            return [(len(value), value[:2].tolist(), value[-2:].tolist()) for value in values]

    x = np.zeros(GIB, np.uint8)
    x[0], x[-1] = 3, 4
    with ModelHost(Ends, batcher=ListBatcher(), shared_memory=3 * GIB) as host:
        assert host.predict(x) == (GIB, [3, 0], [0, 4])
        assert host.predict(x[:100]) == (100, [3, 0], [0, 0])
        all_slots_are_back(host)


def test_replies_that_do_not_fit_come_beside_the_slot_and_the_next_fit_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from batch_inference.client import Client

    beside = []
    original = Client.reply_elsewhere
    monkeypatch.setattr(
        Client, "reply_elsewhere", lambda self, *args: (beside.append(args[-1]), original(self, *args))[-1]
    )

    def ask(size: int) -> None:
        answer = host.predict(size)
        assert len(answer) == size and (answer == size % 251).all()
        answer[:] = 1  # its caller's own

    with ModelHost(Inflates, batcher=ListBatcher()) as host:
        for size in 10, 5_000_000, 5_000_000, 4_999_999, 10, 5_000_000:
            ask(size)
        assert len(beside) == 1 and beside[0] > 5_000_000
        for size in 20_000_000, 20_000_000, 100:
            ask(size)
        assert len(beside) == 2
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, [10, 30_000_000] * 8))
        all_slots_are_back(host)


def test_a_reply_larger_than_all_shared_memory_still_comes() -> None:
    with ModelHost(Inflates, batcher=ListBatcher(), shared_memory=1 << 20) as host:
        for _ in range(3):
            assert len(host.predict(4 << 20)) == 4 << 20
        all_slots_are_back(host)


def test_memory_stays_within_its_bound_and_serves_one_size_after_another() -> None:
    bound = 8 << 20
    with ModelHost(Inflates, batcher=ListBatcher(), shared_memory=bound) as host:
        client = host._client
        assert client is not None
        for size in 10, 100_000, 900_000, 3_000_000, 10, 1_500_000, 3_000_000:
            for _ in range(3):
                assert len(host.predict(size)) == size
            assert client.arena.mapped <= bound
        all_slots_are_back(host)
    with ModelHost(Echo, shared_memory=bound) as host:
        for size in 1_000, 100_000, 300_000, 1_000_000, 3_000_000, 1_000, 600_000, 3_000_000:
            assert len(host.predict(np.zeros(size, np.uint8), timeout=60)) == size
        with pytest.raises(RequestTooLargeError, match="raise shared_memory"):
            host.predict(np.zeros(bound, np.uint8))
        assert len(host.predict(np.zeros(3_000_000, np.uint8), timeout=60)) == 3_000_000


def test_segments_can_be_neither_shrunk_nor_unsealed(shared_host: ModelHost) -> None:
    check(shared_host.predict(request(1)), 1)
    client = shared_host._client
    assert client is not None and client.arena.segments
    for segment in client.arena.segments:
        seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_SEAL
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 0)


def test_a_worker_refuses_memory_that_could_be_cut_short_and_serves_the_others(shared_host: ModelHost) -> None:
    """A second client of the same worker offers a segment without seals; it is dropped, and nobody else notices."""
    from batch_inference.host import _rejoin
    from batch_inference.transport.segment import Segment

    def unsealed(size: int) -> Segment:
        fd = os.memfd_create("batch_inference", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return Segment(mmap.mmap(fd, size), fd)

    other = _rejoin(shared_host._address(), shared_host._options, now=True)
    try:
        client = other._client
        assert client is not None
        client.arena._make = unsealed
        with pytest.raises(TransportError, match="has dropped this process: a segment that is not sealed"):
            other.predict(request(1), timeout=30)
        for number in range(5):
            check(shared_host.predict(request(number), timeout=30), number)
        assert shared_host.statistics().workers[0].restarts == 0
    finally:
        other.stop()
    wait_until(lambda: shared_host.statistics().pending == 0)

"""Requests copied into the open batch: whatever is dropped or added meanwhile, the batch is what the batcher makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_inference import ahead, buffers, tensors
from batch_inference.ahead import Ahead
from batch_inference.batcher import BucketSeqBatcher, ConcatBatcher, ListBatcher, SeqBatcher
from batch_inference.batcher.batcher import Batcher

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

LIMIT = 16


@pytest.fixture(autouse=True, scope="module")
def small_requests_are_worth_it() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "WORTH_POOLING", 64)
        yield


def queue_of(*requests: tuple[Any, ...]) -> deque[Any]:
    return deque([SimpleNamespace(args=args, size=ConcatBatcher().size(args)) for args in requests])


def numbered(number: int, rows: int = 1, make: Any = np.full) -> tuple[Any, ...]:
    return (make((rows, 4, 4), float(number)), {"mask": make((rows,), number), "none": None}, number)


def bits(batched: Any) -> Any:
    if tensors.is_tensor(batched):
        return type(batched), batched.dtype, tuple(batched.shape), np.asarray(batched).tobytes()
    if isinstance(batched, dict):
        return {key: bits(value) for key, value in batched.items()}
    return tuple(bits(value) for value in batched) if isinstance(batched, tuple) else batched


def assert_as_made_at_once(batcher: ConcatBatcher, made: Any, requests: list[tuple[Any, ...]]) -> None:
    batched, context = made
    expected, expected_context = batcher.batch(requests)
    assert bits(batched) == bits(expected)
    assert context == expected_context
    for request in requests:
        assert not np.shares_memory(np.asarray(batched[0]), np.asarray(request[0]))


KINDS = [np.full] if torch is None else [np.full, torch.full]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("batcher", [ConcatBatcher(), ConcatBatcher(batch_sizes=[4, LIMIT])])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_batch_is_what_the_batcher_makes_at_once(batcher: ConcatBatcher, make: Any, data: st.DataObject) -> None:
    copying = Ahead(batcher)
    queue: deque[Any] = deque()
    kept: list[tuple[Any, Any]] = []
    for number in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["arrives", "arrives", "copy", "drop", "cut"]))
        if step == "arrives":
            queue += queue_of(numbered(number, data.draw(st.integers(1, 3)), make))
        elif queue and step == "copy":
            copying.copy(queue, LIMIT)
        elif queue and step == "drop":  # nobody waits for it any more
            del queue[data.draw(st.integers(0, len(queue) - 1))]
        elif queue and step == "cut":
            cut = data.draw(st.integers(1, min(len(queue), LIMIT // 3)))
            requests = [queue.popleft().args for _ in range(cut)]
            made = copying.finish(requests)
            if made is not None:
                assert_as_made_at_once(batcher, made, requests)
                kept.append((made[0][0], bits(made[0][0])))  # as a model may
    for batched, its_bits in kept:
        assert bits(batched) == its_bits


def test_only_what_came_after_the_last_copy_is_copied_when_the_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, queue = Ahead(ConcatBatcher()), queue_of(numbered(1), numbered(2))
    assert copying.copy(queue, LIMIT) > 0
    queue += queue_of(numbered(3))
    copied: list[int] = []
    original = tensors.append
    monkeypatch.setattr(
        tensors, "append", lambda out, filled, values: (copied.append(len(values)), original(out, filled, values))[1]
    )
    requests = [request.args for request in queue]
    assert_as_made_at_once(ConcatBatcher(), copying.finish(requests), requests)
    assert copied[:2] == [1, 1]  # of each of the two tensors


def test_a_second_run_of_the_same_requests_is_made_of_their_arguments_again() -> None:
    copying, queue = Ahead(ConcatBatcher()), queue_of(numbered(1), numbered(2))
    copying.copy(queue, LIMIT)
    requests = [request.args for request in queue]
    made = copying.finish(requests)
    assert made is not None
    made[0][0][...] = -1
    assert copying.finish(requests) is None
    assert [request[0].flat[0] for request in requests] == [1, 2]


def test_a_batch_larger_than_the_room_for_it_is_made_at_once() -> None:
    copying, queue = Ahead(ConcatBatcher()), queue_of(numbered(1, 2), numbered(2, 2), numbered(3, 2))
    copying.copy(queue, 4)
    requests = [request.args for request in queue]  # the limit was raised meanwhile
    assert_as_made_at_once(ConcatBatcher(), copying.finish(requests), requests)


def test_what_goes_wrong_is_left_to_the_batcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any) -> Any:
        raise MemoryError

    copying, queue = Ahead(ConcatBatcher()), queue_of(numbered(1))
    monkeypatch.setattr(tensors, "empty", no_memory)
    copying.copy(queue, LIMIT)
    assert copying.finish([queue[0].args]) is None


def test_small_requests_and_batches_of_a_size_out_of_all_proportion_are_not_copied_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = (np.zeros((1, 1)),), numbered(1)
    for args, limit in ((small, LIMIT), (large, ahead.MOST_RESERVED)):
        copying, queue = Ahead(ConcatBatcher()), queue_of(args)
        copying.copy(queue, limit)
        assert copying.finish([args]) is None


class OwnBatch(ConcatBatcher):
    borrows = True

    def batch(self, requests: list[Any]) -> tuple[Any, Any]:
        return super().batch(requests)


class OwnSize(ConcatBatcher):
    def size(self, request: Any) -> int:
        return 1


class OwnKind(ConcatBatcher):
    def kind(self, request: Any) -> Any:
        return None


@pytest.mark.parametrize(
    "batcher",
    [ListBatcher(), SeqBatcher([0]), BucketSeqBatcher([0], [4]), OwnBatch(), OwnSize(), OwnKind()],
    ids=lambda batcher: type(batcher).__name__,
)
def test_only_batches_that_join_rows_are_begun(batcher: Batcher) -> None:
    copying, queue = Ahead(batcher), queue_of(numbered(1))
    assert copying.copy(queue, LIMIT) == 0
    assert copying.finish([queue[0].args]) is None

"""The pool of batch buffers: memory is used again, and never while somebody still has something of it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from batch_inference import buffers, tensors

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

BIG = (512, 512)  # a mebibyte of float32


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture(autouse=True)
def fresh_pool() -> None:
    buffers.pool.bases.clear()
    buffers.pool.starts.clear()


def test_in_steady_state_one_buffer_is_reused() -> None:
    like = np.zeros(1, np.float32)
    first = tensors.empty(BIG, like)
    where = address(first)
    del first
    for _ in range(10):
        again = tensors.empty(BIG, like)
        assert address(again) == where
        del again
    assert len(buffers.pool.bases) == 1


def test_a_smaller_batch_and_another_dtype_reuse_the_buffer() -> None:
    array = tensors.empty(BIG, np.zeros(1, np.float32))
    where = address(array)
    del array
    array = tensors.empty((300, 100), np.zeros(1, np.float64))
    assert address(array) == where and array.dtype == np.float64 and array.shape == (300, 100)


def test_buffers_in_use_at_once_are_distinct_and_both_reused() -> None:
    like = np.zeros(1, np.float32)
    seen = set()
    for _ in range(10):
        pair = tensors.empty(BIG, like), tensors.empty((100, 512), like)
        assert not np.shares_memory(*pair)
        seen |= {address(pair[0]), address(pair[1])}
        del pair
    assert len(seen) <= 3 and len(buffers.pool.bases) == 2


def keeps(name: str, array: np.ndarray) -> object:
    """What a model might keep of its input."""
    if name == "the array":
        return array
    if name == "a slice":
        return array[3:5]
    if name == "a slice of a reshaped view":
        return array.reshape(-1)[7:].view(np.int32)[::2]
    if name == "a memoryview":
        return memoryview(array)
    if name == "a torch tensor":
        return torch.from_numpy(array)
    if name == "a slice of a torch tensor":
        return torch.from_numpy(array)[3:5].view(-1)[5:]
    return torch.from_numpy(array).detach().numpy()[1:]


KEPT = [
    "the array",
    "a slice",
    "a slice of a reshaped view",
    "a memoryview",
    pytest.param("a torch tensor", marks=needs_torch),
    pytest.param("a slice of a torch tensor", marks=needs_torch),
    pytest.param("an array of a torch tensor", marks=needs_torch),
]


@pytest.mark.parametrize("name", KEPT)
def test_what_a_model_keeps_is_never_overwritten(name: str) -> None:
    like = np.zeros(1, np.float32)
    array = tensors.empty(BIG, like)
    array[...] = 1
    kept = keeps(name, array)
    before = bytes(np.ascontiguousarray(np.asarray(kept)))
    del array
    for _ in range(2 * buffers.MAX_BUFFERS):
        other = tensors.empty(BIG, like)
        other[...] = 2
        assert not np.shares_memory(other, np.asarray(kept))
        del other
    assert bytes(np.ascontiguousarray(np.asarray(kept))) == before
    del kept
    assert len(buffers.pool.bases) == 2


def test_a_model_that_keeps_everything_costs_no_more_buffers_than_the_bound() -> None:
    like = np.zeros(1, np.float32)
    kept = []
    for number in range(3 * buffers.MAX_BUFFERS):
        array = tensors.empty((200, 200), like)
        array[...] = number
        kept.append(array)
        assert len(buffers.pool.bases) <= buffers.MAX_BUFFERS
    assert all((array == number).all() for number, array in enumerate(kept))


def test_growing_batches_replace_the_small_buffer() -> None:
    for rows in range(40, 400, 20):
        tensors.empty((rows, 512), np.zeros(1, np.float32))
        assert len(buffers.pool.bases) == 1


@needs_torch
def test_torch_batches_come_from_the_pool_too() -> None:
    values = [torch.full((64, 64), float(i), dtype=torch.bfloat16) for i in range(32)]
    first = tensors.concat(values)
    assert len(buffers.pool.bases) == 1
    where, kept = first.data_ptr(), first[5:6]
    assert first.data_ptr() % 64 == 0
    del first
    second = tensors.concat(values)
    assert second.data_ptr() != where and torch.equal(kept, values[0][5:6])
    del kept
    assert tensors.concat(values).data_ptr() == where


def test_large_arrays_are_aligned_and_own_dtypes_with_objects_are_not_pooled() -> None:
    assert address(tensors.empty(BIG, np.zeros(1, np.float32))) % 64 == 0
    objects = tensors.empty(BIG, np.array([None]))
    assert objects.dtype == object and len(buffers.pool.bases) == 1


def test_each_thread_has_buffers_of_its_own() -> None:
    where = [address(tensors.empty(BIG, np.zeros(1, np.float32)))]
    mine = list(buffers.pool.bases)
    thread = threading.Thread(target=lambda: where.append(len(buffers.pool.bases)))
    thread.start()
    thread.join()
    assert where[1] == 0 and len(mine) == 1


def test_buffers_that_nobody_uses_are_released_and_others_stay() -> None:
    used = tensors.empty((1 << 16,), np.zeros(0, np.float64))
    used[:] = 7
    tensors.empty((1 << 17,), np.zeros(0, np.float64))  # free at once
    tensors.release_unused()
    assert len(buffers.pool.bases) == 1 and (used == 7).all()

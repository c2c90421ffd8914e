"""Random requests through a real worker, many at once, so that they are batched with each other in whatever way: each
caller gets what the same model would have answered it alone, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batch_inference import BatcherError, ModelHost
from batch_inference.batcher import BucketSeqBatcher, ConcatBatcher, ListBatcher, SeqBatcher, model_arguments
from tests.process.batcher_models import Everything, Point, Same, Sequences, Spoils

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

SETTINGS = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def shared_host() -> Iterator[dict[str, ModelHost]]:
    hosts = {
        "concat": ModelHost(Everything, batcher=ConcatBatcher(), max_batch_size=8),
        "fixed": ModelHost(Everything, batcher=ConcatBatcher(batch_sizes=[1, 4, 8]), max_batch_size=8),
        "spoils": ModelHost(Spoils, max_batch_size=8),
        "seq": ModelHost(Sequences, batcher=seq_batcher(), max_batch_size=8),
        "list": ModelHost(Same, batcher=ListBatcher(), max_batch_size=8),
    }
    for host in hosts.values():
        host.start()
    yield hosts
    for host in hosts.values():
        host.stop()


def seq_batcher() -> SeqBatcher:
    return BucketSeqBatcher([0, -1.0], [4, 16], mask=True, trim={"ids": 1}, padding_side="left")


def alone(batcher: Any, model: Any, request: tuple) -> Any:
    batched, context = batcher.batch([request])
    return batcher.unbatch(model.predict_batch(*model_arguments(batched)), context)[0]


def same(got: Any, expected: Any) -> bool:
    """Equal in structure, framework, dtype, shape and bits."""
    if isinstance(expected, np.ndarray):
        alike = type(got) is np.ndarray and got.dtype == expected.dtype and got.shape == expected.shape
        return alike and (
            got.tolist() == expected.tolist() if got.dtype.hasobject else got.tobytes() == expected.tobytes()
        )
    if torch is not None and isinstance(expected, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == expected.dtype and torch.equal(raw(got), raw(expected))
    if isinstance(expected, dict):
        return type(got) is dict and got.keys() == expected.keys() and all(same(got[k], expected[k]) for k in expected)
    if isinstance(expected, (tuple, list)):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    return type(got) is type(expected) and (got == expected or got != got)


def raw(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


NUMPY = st.sampled_from([np.dtype(c) for c in ("?", "u1", "i4", "i8", ">i8", "f2", "f4", "f8", ">f4", "c8", "g")])
OTHER = st.sampled_from(
    [np.dtype(c) for c in ("M8[s]", "m8[D]", "U3", "S2", "O")] + [np.dtype([("a", "i1"), ("b", "f8")])]
)
TORCH = ["bfloat16", "float16", "float32", "int64", "bool", "complex64", "float8_e4m3fn", "uint8"]


@st.composite
def tensors(draw: st.DrawFn, rows: int, dims: int = 2) -> Any:
    shape = (rows, *draw(hnp.array_shapes(min_dims=0, max_dims=dims, min_side=0, max_side=3)))
    kind = draw(st.integers(0, 9))
    count = int(np.prod(shape))
    numbers = (np.arange(count) * draw(st.integers(1, 9)) % 2 ** draw(st.integers(1, 7))).reshape(shape)
    if kind < 3 and torch is not None:
        return torch.from_numpy(numbers).to(getattr(torch, draw(st.sampled_from(TORCH))))
    dtype = draw(OTHER if kind == 9 else NUMPY)
    if dtype.names:
        array = np.zeros(shape, dtype)
        array["a"] = numbers
    else:
        array = numbers.astype("i8" if dtype.kind in "Mm" else dtype).astype(dtype)
    layout = draw(st.integers(0, 4))
    if not dtype.isnative:
        pass  # numpy's own pickle makes strided ones native, where they travel beside an object
    elif layout == 1:
        array = np.asfortranarray(array)
    elif layout == 2:
        array = array[::-1]
    elif layout == 3 and array.ndim > 1:
        array = array[:, ::-2]
    elif layout == 4:
        array.flags.writeable = False
    return array


def arguments(rows: int) -> st.SearchStrategy[Any]:
    number = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.none())
    leaf = tensors(rows)
    nested = st.one_of(
        leaf,
        st.dictionaries(st.sampled_from("abc"), st.one_of(leaf, number), min_size=1, max_size=3),
        st.tuples(leaf, number),
        st.lists(leaf, min_size=1, max_size=2),
    )
    return st.one_of(nested, number)


@st.composite
def requests(draw: st.DrawFn) -> tuple:
    rows = draw(st.integers(0, 5))
    return (draw(tensors(rows)), *draw(st.lists(arguments(rows), max_size=2)))


def ask(host: ModelHost, batch: list[tuple]) -> list[Any]:
    futures = [host.submit(*request) for request in batch]
    return [future.result(timeout=60) for future in futures]


@pytest.mark.parametrize("name", ["concat", "fixed"])
@SETTINGS
@given(batch=st.lists(requests(), min_size=1, max_size=12))
def test_each_gets_its_own_rows(shared_host: dict[str, ModelHost], name: str, batch: list[tuple]) -> None:
    twice = [request for request in batch for _ in range(2)]  # so that there is company of the same kind
    for request, answer in zip(twice, ask(shared_host[name], twice), strict=True):
        assert same(answer, alone(ConcatBatcher(), Everything(), request))


def test_a_request_larger_than_a_batch_is_answered_whole(shared_host: dict[str, ModelHost]) -> None:
    x = np.arange(90.0).reshape(30, 3)
    for request in [(x,), (x, {"a": x[:, :1], "t": 0.5}), (x[:9], [x[:9]])]:
        for answer in ask(shared_host["concat"], [request] * 3):
            assert same(answer, alone(ConcatBatcher(), Everything(), request))


@SETTINGS
@given(values=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 10_000)), min_size=1, max_size=20))
def test_a_model_that_spoils_and_keeps_its_input_hurts_nobody(
    shared_host: dict[str, ModelHost], values: list[tuple[int, int]]
) -> None:
    sent = [np.full((rows, 9000), value) for rows, value in values]  # large enough for the reused buffers
    for x, (rows, value), answer in zip(sent, values, ask(shared_host["spoils"], [(x,) for x in sent]), strict=True):
        assert answer.shape == (rows, 9000) and (answer == value).all() and (x == value).all()
        answer += 1  # the caller's own, and writable


def test_the_caller_may_change_its_array_after_submit(shared_host: dict[str, ModelHost]) -> None:
    x, futures = np.zeros((1, 3)), []
    for number in range(200):
        x[...] = number
        futures.append(shared_host["concat"].submit(x))
    assert [future.result(timeout=60)["0"][0, 0] for future in futures] == list(range(200))


@SETTINGS
@given(shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=16))
def test_sequences_come_back_in_their_own_length(
    shared_host: dict[str, ModelHost], shapes: list[tuple[int, int]]
) -> None:
    batch = [(np.full((rows, n), 5), np.full((rows, 2, n), i, "f4")) for i, (rows, n) in enumerate(shapes)]
    for index, (request, answer) in enumerate(zip(batch, ask(shared_host["seq"], batch), strict=True)):
        assert same(answer["ids"], request[0])
        assert answer["lengths"].tolist() == [request[0].shape[1]] * len(request[0])
        assert set(np.unique(answer["features"])) <= {index, -1.0}


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(),
        st.binary(),
        tensors(2),
        st.builds(Point, st.integers(), st.text()),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@SETTINGS
@given(values=st.lists(VALUES, min_size=1, max_size=12))
def test_lists_of_anything_come_back_as_they_were(shared_host: dict[str, ModelHost], values: list[Any]) -> None:
    answers = ask(shared_host["list"], [(value,) for value in values])
    assert all(map(same, answers, values))


BAD: list[tuple] = [
    ("text",),
    (np.array(1.0),),
    (np.ones((1, 2)), np.ones((2, 2))),
    (1, 2),
    (),
    (np.ones((1, 2)), 2**70),
    (np.ones((1, 2)), [1, 2]),
]


def test_a_bad_request_fails_alone(shared_host: dict[str, ModelHost]) -> None:
    good = (np.ones((1, 2)), 3)
    futures = [shared_host["concat"].submit(*request) for bad in BAD for request in (good, bad, good)]
    for index, future in enumerate(futures):
        if index % 3 == 1:
            with pytest.raises(BatcherError):
                future.result(timeout=60)
        else:
            assert future.result(timeout=60)["1"].tolist() == [3]

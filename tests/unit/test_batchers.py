"""What the batchers do to requests and to a model's output, without a worker."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batch_inference.batcher import (
    Batcher,
    BucketSeqBatcher,
    ConcatBatcher,
    ListBatcher,
    MultiBatcher,
    SeqBatcher,
    model_arguments,
)
from batch_inference.errors import BatcherError, ConfigError, RequestTooLargeError

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def run(batcher: Batcher, requests: list, model=lambda *arguments: arguments[0]) -> list:
    """What the worker does with one batch."""
    batched, context = batcher.batch(requests)
    return batcher.unbatch(model(*model_arguments(batched)), context)


def same(got: Any, expected: Any) -> bool:
    """Equal in structure, framework, dtype, shape and values."""
    if isinstance(expected, np.ndarray):
        return (
            type(got) is np.ndarray
            and got.dtype == expected.dtype
            and got.shape == expected.shape
            and got.tobytes() == expected.tobytes()
        )
    if torch is not None and isinstance(expected, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(expected, dict):
        return type(got) is dict and got.keys() == expected.keys() and all(same(got[k], expected[k]) for k in expected)
    if isinstance(expected, (tuple, list)):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    return bool(got == expected)


# --- Batcher


class Doubler(Batcher):
    def __init__(self):
        super().__init__()

    def batch(self, requests):
        return (np.concatenate([request[0] for request in requests]),), [len(request[0]) for request in requests]

    def unbatch(self, batched_response, unbatch_ctx):
        ends = np.cumsum(unbatch_ctx)
        return [batched_response[end - count : end] for end, count in zip(ends, unbatch_ctx)]


class WithoutInit(Doubler):
    def __init__(self, state):
        self.state = state


@pytest.mark.parametrize("batcher", [Doubler(), WithoutInit(3)], ids=["with super().__init__()", "without"])
def test_a_users_subclass_has_the_default_hooks(batcher: Batcher) -> None:
    requests = [(np.ones((2, 3)),), (np.zeros((1, 3)),)]
    assert same(run(batcher, requests, lambda x: 2 * x), [np.full((2, 3), 2.0), np.zeros((1, 3))])
    assert batcher.size(requests[0]) == 1 and batcher.kind(requests[0]) is None
    assert list(batcher.warmup_requests(requests[0])) == [[requests[0]]]
    assert batcher.padding(None) == (0, 0)
    with pytest.raises(RequestTooLargeError, match=r"size 1 is larger than max_batch_size=0.*split"):
        batcher.split(requests[0], 0)
    batcher.check_limit(32)


def test_the_base_class_asks_for_batch_and_unbatch() -> None:
    class Half(Batcher):
        pass

    for call in (lambda: Half().batch([]), lambda: Half().unbatch(None, None), lambda: Half().join([])):
        with pytest.raises(NotImplementedError, match="Half has"):
            call()


def test_only_who_copies_borrows() -> None:
    class Replaced(ConcatBatcher):
        def batch(self, requests):
            return requests[0], None

    class Mixin:
        def batch(self, requests):
            return requests[0], None

    class Mixed(Mixin, ConcatBatcher):
        pass

    class OnlyUnbatch(SeqBatcher):
        def unbatch(self, batched_response, context):
            return super().unbatch(batched_response, context)

    class Promised(ConcatBatcher):
        borrows = True

        def batch(self, requests):
            return super().batch(requests)

    assert ConcatBatcher.borrows and SeqBatcher.borrows and BucketSeqBatcher.borrows
    assert OnlyUnbatch.borrows and Promised.borrows
    assert not (Batcher.borrows or Doubler.borrows or ListBatcher.borrows or MultiBatcher.borrows)
    assert not (Replaced.borrows or Mixed.borrows or type("Below", (Replaced,), {}).borrows)
    assert not pickle.loads(cloudpickle.dumps(Replaced)).borrows


@pytest.mark.parametrize(
    "batcher",
    [
        ConcatBatcher(batch_sizes=[1, 4]),
        SeqBatcher(0),
        SeqBatcher({"a": 0, "b": None}, mask="m"),
        BucketSeqBatcher([0, None], [16, 32], pad_to_bucket=True, trim=[1, None]),
        ListBatcher(),
        Doubler(),
    ],
    ids=lambda batcher: type(batcher).__name__,
)
def test_batchers_travel_by_pickle(batcher: Batcher) -> None:
    for dumps in (pickle.dumps, cloudpickle.dumps):
        copy = pickle.loads(dumps(batcher))
        assert type(copy) is type(batcher) and vars(copy) == vars(batcher)


def test_model_arguments() -> None:
    x = np.ones(2)
    assert model_arguments((x, 1)) == (x, 1)
    assert model_arguments([[1, 2], [3]]) == ([1, 2], [3])
    assert model_arguments(x)[0] is x and model_arguments({"a": 1}) == ({"a": 1},)


# --- batchers of programs written for the older package


class TokenListBatcher(Batcher):
    """Python lists of token ids, padded by hand, and their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = 0

    def batch(self, requests):
        longest = max(len(request[0]) for request in requests)
        ids = [request[0] + [self.pad] * (longest - len(request[0])) for request in requests]
        masks = [[1] * len(request[0]) + [0] * (longest - len(request[0])) for request in requests]
        return [ids, masks], None

    def unbatch(self, batched_responses, unbatch_ctx):
        return batched_responses


def test_a_batcher_that_returns_lists_of_ids_and_masks() -> None:
    def model(ids, masks):
        assert [len(row) for row in ids] == [len(row) for row in masks] == [3, 3]
        return [[i for i, m in zip(row, mask) if m] + [9] for row, mask in zip(ids, masks)]

    assert run(TokenListBatcher(), [([1, 2, 3],), ([4],)], model) == [[1, 2, 3, 9], [4, 9]]


@needs_torch
@pytest.mark.parametrize("alone", [False, True], ids=["with another argument", "as the only argument"])
def test_a_batcher_that_sorts_packs_and_restores_order(alone: bool) -> None:
    from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

    class Packing(Batcher):
        def batch(self, requests):
            order = sorted(range(len(requests)), key=lambda i: -requests[i][0].size)
            packed = pack_sequence([torch.from_numpy(requests[i][0][0]) for i in order])
            labels = torch.from_numpy(np.concatenate([requests[i][1] for i in order]))
            return (packed if alone else (packed, labels)), order

        def unbatch(self, batched_responses, unbatch_ctx):
            responses = [None] * len(unbatch_ctx)
            for position, index in enumerate(unbatch_ctx):
                responses[index] = batched_responses[position]
            return responses

    def model(packed, labels=None):
        assert isinstance(packed, PackedSequence)
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        return [row.sum() for row in padded.numpy()]

    rng = np.random.default_rng(0)
    requests = [(rng.random((1, n)), np.ones((1, 1))) for n in (3, 9, 1, 5)]
    for got, (x, _) in zip(run(Packing(), requests, model), requests):
        assert abs(got - x.sum()) < 1e-9


def test_the_older_keywords_are_accepted() -> None:
    ConcatBatcher(tensor="pt")
    SeqBatcher(padding_tokens=[0, 0], tensor="np")
    BucketSeqBatcher(padding_tokens=[0, 0], buckets=[1024, 2048, 4096], tensor="pt")
    with pytest.raises(ConfigError, match="'np' or 'pt'"):
        ConcatBatcher(tensor="tf")


# --- ConcatBatcher: properties

DTYPES = st.sampled_from([np.dtype(c) for c in ("?", "u1", "i4", "i8", ">i8", "f2", "f4", "f8", "c8", "M8[s]", "U3")])


@st.composite
def batches(draw: st.DrawFn) -> list[tuple]:
    """Requests of one kind, with one to three arguments, some of them nested."""
    columns = []
    for _ in range(draw(st.integers(1, 3))):
        columns.append(
            (
                draw(DTYPES),
                draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
                draw(st.integers(0, 3)),
            )
        )
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.integers(0, 4))
        arguments: list[Any] = []
        for dtype, shape, structure in columns:
            array = np.empty((rows, *shape), dtype)
            raw = draw(st.integers(0, 100))
            array[...] = (np.arange(array.size).reshape(array.shape) + raw).astype("i8" if dtype.kind == "M" else dtype)
            arguments.append([array, {"a": array, "b": (array,)}, [array, array], (array, None)][structure])
        requests.append(tuple(arguments))
    return requests


@settings(max_examples=150, deadline=None)
@given(batches(), st.booleans())
def test_concat_and_unbatch_give_back_what_went_in(requests: list[tuple], fixed: bool) -> None:
    batcher = ConcatBatcher(batch_sizes=[1, 2, 4, 8, 24] if fixed else None)
    assert len({batcher.kind(request) for request in requests}) == 1

    def model(*arguments):
        return tuple(without_none(argument) for argument in arguments)

    total = sum(batcher.size(request) for request in requests)
    batched, context = batcher.batch(requests)
    rows = {len(leaf) for leaf in leaves(batched)}
    assert rows == {min(size for size in [1, 2, 4, 8, 24] if size >= total) if fixed else total}
    together = batcher.unbatch(model(*batched), context)
    for request, response in zip(requests, together, strict=True):
        assert same(response, model(*request))
        assert same(run(batcher, [request], model)[0], response)  # a batch of one gives the same


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 5))
def test_split_and_join_are_inverse(requests: list[tuple], limit: int) -> None:
    batcher = ConcatBatcher()
    for request in requests:
        rows = batcher.size(request)
        if rows > limit:
            parts = batcher.split(request, limit)
            assert len(parts) == -(-rows // limit) and all(batcher.size(part) <= limit for part in parts)
            assert {batcher.kind(part) for part in parts} == {batcher.kind(request)}
            responses = [run(batcher, [part], lambda *a: tuple(map(without_none, a)))[0] for part in parts]
            assert same(batcher.join(responses), tuple(map(without_none, request)))


def leaves(value: Any) -> list:
    if isinstance(value, np.ndarray):
        return [value]
    if value is None:
        return []
    return [leaf for item in (value.values() if isinstance(value, dict) else value) for leaf in leaves(item)]


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(without_none(item) for item in value if item is not None)
    return value


# --- ConcatBatcher: cases


def test_what_does_not_fit_together_is_of_another_kind() -> None:
    x = np.ones((1, 3), np.float32)
    requests: list[tuple] = [
        (x,),
        (x.astype(np.float64),),
        (x.astype(">f4"),),
        (np.ones((1, 4), np.float32),),
        (np.ones((1, 3, 1), np.float32),),
        (x, x),
        ({"a": x},),
        ({"b": x},),
        ({"a": x, "b": x},),
        ([x],),
        ((x,),),
        (x, 1),
        (x, 1.0),
        (x, True),
        (x, None),
        (x, np.float32(1)),
    ]
    if torch is not None:
        requests += [(torch.ones(1, 3),), (torch.ones(1, 3, dtype=torch.bfloat16),)]
    batcher = ConcatBatcher()
    assert len({batcher.kind(request) for request in requests}) == len(requests)
    assert batcher.kind(({"a": x, "b": 1},)) == batcher.kind((OrderedDict(b=2, a=x[[0, 0]]),))
    assert batcher.kind((x, 1)) == batcher.kind((x[[0, 0]], -5))


def test_every_mapping_reaches_the_model_as_a_dict() -> None:
    requests = [
        (UserDict(a=np.ones((1, 2)), b=np.zeros((1, 3))),),
        (OrderedDict(b=np.ones((2, 3)), a=np.ones((2, 2))),),
    ]

    def model(inputs):
        assert type(inputs) is dict and inputs["a"].shape == (3, 2) and inputs["b"].shape == (3, 3)
        return inputs

    first, second = run(ConcatBatcher(), requests, model)
    assert same(first, {"a": np.ones((1, 2)), "b": np.zeros((1, 3))})
    assert same(second, {"a": np.ones((2, 2)), "b": np.ones((2, 3))})


def test_numbers_become_one_entry_per_row() -> None:
    batcher = ConcatBatcher(batch_sizes=[8])
    requests = [
        (np.ones((2, 3)), 0.5, {"k": 7}, True, np.float32(2)),
        (np.ones((0, 3)), 0.1, {"k": 8}, False, np.float32(3)),
        (np.ones((1, 3)), 2.5, {"k": 9}, False, np.float32(4)),
    ]
    requests[0][2]["x"] = requests[1][2]["x"] = requests[2][2]["x"] = None  # None stays None
    assert len({batcher.kind(request) for request in requests}) == 1
    (_, temperature, top, flag, half), _ = batcher.batch(requests)
    assert same(temperature, np.array([0.5, 0.5, 2.5] + [0.5] * 5))
    assert same(top["k"], np.array([7, 7, 9] + [7] * 5)) and top["x"] is None
    assert same(flag, np.array([True, True, False] + [True] * 5))
    assert same(half, np.array([2, 2, 4] + [2] * 5, np.float32))


@needs_torch
def test_numbers_beside_torch_tensors_become_torch_tensors() -> None:
    batcher = ConcatBatcher()
    x = torch.ones(2, 3)
    (_, temperature, k, flag, z), _ = batcher.batch(
        [(x, 0.5, 3, True, np.float64(1)), (x[:1], 1.5, 4, False, np.float64(2))]
    )
    assert same(temperature, torch.tensor([0.5, 0.5, 1.5]))
    assert same(k, torch.tensor([3, 3, 4])) and same(flag, torch.tensor([True, True, False]))
    assert same(z, torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64))


@needs_torch
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "bool", "int64", "float32", "complex64"])
def test_torch_stays_torch(name: str) -> None:
    dtype = getattr(torch, name)
    values = [torch.arange(n * 6).reshape(n, 2, 3).to(dtype) for n in (1, 0, 3)]
    for sizes in (None, [8]):
        batcher = ConcatBatcher(batch_sizes=sizes)
        for got, value in zip(run(batcher, [(v,) for v in values]), values):
            assert got.dtype == dtype and torch.equal(
                got.float() if "8" in name else got, value.float() if "8" in name else value
            )


@needs_torch
def test_outputs_are_detached() -> None:
    layer = torch.nn.Linear(3, 2)
    for response in run(ConcatBatcher(), [(torch.ones(1, 3),), (torch.ones(2, 3),)], layer):
        assert not response.requires_grad


def test_the_batch_does_not_share_memory_with_its_requests() -> None:
    x = np.ones((1, 3))
    (batched,), _ = ConcatBatcher().batch([(x,)])
    assert not np.shares_memory(batched, x)


Pair = namedtuple("Pair", "first second")


def test_outputs_of_every_structure() -> None:
    batcher = ConcatBatcher()
    requests = [(np.zeros((2, 1)),), (np.zeros((0, 1)),), (np.zeros((1, 1)),)]
    y, z = np.arange(3.0), np.arange(6).reshape(3, 2)
    words = ["a", "b", "c"]
    outputs: list[tuple[Any, list]] = [
        (y, [y[:2], y[2:2], y[2:]]),
        ((y, z), [(y[:2], z[:2]), (y[2:2], z[2:2]), (y[2:], z[2:])]),
        ([y, z], [[y[:2], z[:2]], [y[2:2], z[2:2]], [y[2:], z[2:]]]),
        ({"y": y}, [{"y": y[:2]}, {"y": y[2:2]}, {"y": y[2:]}]),
        (UserDict(y=y), [{"y": y[:2]}, {"y": y[2:2]}, {"y": y[2:]}]),
        (words, [["a", "b"], [], ["c"]]),
        ([{"box": y}, {"box": z}, {}], [[{"box": y}, {"box": z}], [], [{}]]),
        ([1, None, "x"], [[1, None], [], ["x"]]),
        (
            {"w": words, "n": ({"y": y},)},
            [
                {"w": ["a", "b"], "n": ({"y": y[:2]},)},
                {"w": [], "n": ({"y": y[2:2]},)},
                {"w": ["c"], "n": ({"y": y[2:]},)},
            ],
        ),
        ((), [(), (), ()]),
        ({}, [{}, {}, {}]),
    ]
    for output, expected in outputs:
        got = run(batcher, requests, lambda x, output=output: output)
        assert same(got, expected), output
        if len(output):
            assert same(batcher.join(got), dict(output) if isinstance(output, UserDict) else output)
    pairs = run(batcher, requests, lambda x: Pair(y, z))
    assert isinstance(pairs[0], Pair) and same(pairs[0].second, z[:2])


@pytest.mark.parametrize("counts", [[1], [1, 1, 1]], ids=["alone", "three"])
def test_the_shape_of_a_result_does_not_depend_on_the_batch(counts: list[int]) -> None:
    requests = [(np.ones((n, 2)),) for n in counts]
    assert run(ConcatBatcher(), requests, lambda x: ["w"] * len(x))[0] == ["w"]
    assert run(ConcatBatcher(), requests, lambda x: [x, x])[0][1].shape == (1, 2)
    assert run(ConcatBatcher(), requests, lambda x: {"a": x})[0]["a"].shape == (1, 2)


WRONG_OUTPUTS = [
    (None, "must have 3 rows.*got None"),
    (np.zeros((2, 5)), r"must have 3 rows.*got an array of shape \(2, 5\)"),
    (np.zeros((4, 5)), r"must have 3 rows.*shape \(4, 5\)"),
    (np.float64(3.0), "got a float64"),
    (np.array(3.0), r"an array of shape \(\)"),
    (7, "got an int"),
    ("abc", "got a str"),
    (["a", "b"], "got a list of 2 items"),
    ([], "got a list of 0 items"),
    ((np.zeros(3), np.zeros(2)), r"output\[1\] of predict_batch must have 3 rows.*shape \(2,\)"),
    ({"a": np.zeros(3), "b": {"c": np.zeros(1)}}, r"output\['b'\]\['c'\] of predict_batch must have 3 rows"),
    ({"a": np.zeros(3), "b": None}, r"output\['b'\].*got None"),
    ([np.zeros(1), np.zeros(2), np.zeros(5)], r"output\[0\].*tensors of different lengths: each in a tuple"),
    (("a", "b", "c"), r"output\[0\].*got a str"),
]


@pytest.mark.parametrize(("output", "text"), WRONG_OUTPUTS, ids=[text for _, text in WRONG_OUTPUTS])
def test_a_wrong_output_is_named(output: Any, text: str) -> None:
    for counts in ([3], [1, 2], [1, 1, 1]):
        with pytest.raises(BatcherError, match=text):
            run(ConcatBatcher(), [(np.ones((n, 2)),) for n in counts], lambda *_: output)


BAD_REQUESTS: list[tuple[tuple, str]] = [
    ((), "holds no tensor"),
    ((1, 2.0), "holds no tensor"),
    (("text",), "argument 0 is a str.*ListBatcher"),
    ((np.ones((1, 2)), b"x"), "argument 1 is a bytes"),
    ((np.ones((1, 2)), [1, 2]), "argument 1 is a list"),
    ((np.array(1.0),), "0-d tensor"),
    ((np.ones(2), np.array(1.0)), "0-d tensor"),
    ((np.ones((2, 1)), np.ones((3, 1))), "the first has 2, argument 1 has 3"),
    ((np.ones((2, 1)), {"x": [np.ones((3, 1))]}), r"argument 1\['x'\]\[0\] has 3"),
    ((np.ones((2, 1)), 2**63), "argument 1 is an integer of more than 64 bits"),
    ((np.ma.ones((2, 1)),), "argument 0 is a masked array"),
    ((np.ones((2, 1)), {"x": object()}), r"argument 1\['x'\] is an object"),
]


@pytest.mark.parametrize(("request_", "text"), BAD_REQUESTS, ids=[text for _, text in BAD_REQUESTS])
@pytest.mark.parametrize("batcher", [ConcatBatcher(), SeqBatcher([None, 0, 0])], ids=lambda b: type(b).__name__)
def test_a_bad_request_is_refused_by_itself(batcher: Batcher, request_: tuple, text: str) -> None:
    with pytest.raises(BatcherError, match=text):
        batcher.kind(request_)
        batcher.size(request_)


# --- fixed shapes and limits


def test_batches_are_rounded_up_with_copies_of_the_first_row() -> None:
    batcher = ConcatBatcher(batch_sizes=[1, 2, 4, 8])
    requests = [(np.full((1, 2), value), value) for value in (5, 6, 7)]
    (x, numbers), context = batcher.batch(requests)
    assert x[:, 0].tolist() == numbers.tolist() == [5, 6, 7, 5]
    assert batcher.padding(context) == (3, 4)
    assert [r.tolist() for r in batcher.unbatch(x[:, 0], context)] == [[5], [6], [7]]
    assert batcher.unbatch(["a", "b", "c", "d"], context) == [["a"], ["b"], ["c"]]
    with pytest.raises(BatcherError, match="must have 4 rows"):
        batcher.unbatch(x[:3], context)
    assert batcher.batch([(np.ones((0, 2)), 1)])[0][0].tolist() == [[0, 0]]
    with pytest.raises(BatcherError, match="batch of 9 rows is larger than the largest of batch_sizes, 8"):
        batcher.batch([(np.ones((9, 2)), 1)])
    assert ConcatBatcher().padding(ConcatBatcher().batch([(np.ones((9, 2)),)])[1]) == (0, 0)


def test_limits_that_contradict_the_shapes_are_refused() -> None:
    ConcatBatcher().check_limit(1000)
    ConcatBatcher(batch_sizes=[1, 8]).check_limit(8)
    with pytest.raises(ConfigError, match="max_batch_size=9 allows batches of 9 rows, but batch_sizes ends at 8"):
        ConcatBatcher(batch_sizes=[1, 8]).check_limit(9)
    budget = BucketSeqBatcher([0], [16, 64], pad_to_bucket=True, batch_sizes=[1, 8])
    budget.check_limit(128)
    with pytest.raises(ConfigError, match="allows batches of 10 rows"):
        budget.check_limit(160)
    with pytest.raises(ConfigError, match="less than the last bucket, 64"):
        budget.check_limit(32)

    class Tokens(SeqBatcher):
        def size(self, request):
            return request[0].size

    Tokens([0], batch_sizes=[1, 8]).check_limit(8192)


def test_a_subclass_that_counts_something_else_is_split_by_it() -> None:
    class Tokens(ConcatBatcher):
        def size(self, request):
            return request[0].size

    request = (np.arange(40).reshape(10, 4), {"t": 1.5})
    parts = Tokens().split(request, 13)
    assert [part[0].shape[0] for part in parts] == [3, 3, 3, 1] and parts[3][1] == {"t": 1.5}
    with pytest.raises(RequestTooLargeError, match="one row of a request of size 40.*max_batch_size=3"):
        Tokens().split(request, 3)


def test_parts_that_differ_in_shape_cannot_be_joined() -> None:
    with pytest.raises(BatcherError, match="differ in shape.*trim="):
        SeqBatcher([0]).join([np.ones((1, 3)), np.ones((1, 4))])


def test_warmup_runs_every_shape_once() -> None:
    sample = (np.arange(6).reshape(2, 3), {"mask": np.ones((2, 3))}, 0.5)

    def shapes(batcher: Batcher, *limit: int) -> list[tuple]:
        return [batcher.batch(requests)[0][0].shape for requests in batcher.warmup_requests(sample, *limit)]

    assert shapes(ConcatBatcher()) == [(2, 3)]
    assert shapes(ConcatBatcher(batch_sizes=[1, 4, 8])) == [(8, 3), (4, 3), (1, 3)]
    assert shapes(ConcatBatcher(batch_sizes=[1, 4, 8]), 3) == [(4, 3), (1, 3)]
    tokens = [0, {"mask": 0}, None]
    assert shapes(SeqBatcher(tokens, batch_sizes=[1, 4])) == [(4, 3), (1, 3)]
    bucketed = BucketSeqBatcher(tokens, [2, 8], pad_to_bucket=True)
    assert shapes(bucketed) == [(2, 8), (2, 2)]
    fixed = BucketSeqBatcher(tokens, [2, 8], pad_to_bucket=True, batch_sizes=[1, 4])
    assert shapes(fixed) == [(4, 8), (1, 8), (4, 2), (1, 2)]
    assert shapes(fixed, 8) == [(1, 8), (4, 2), (1, 2)]
    assert shapes(BucketSeqBatcher(tokens, [2, 8], batch_sizes=[1, 4])) == [(4, 3), (1, 3)]


@pytest.mark.parametrize("values", [[], [2, 1], [1, 1], [0, 1], [-1], [1.5], [True], ["a"]], ids=str)
def test_unordered_sizes_and_buckets_are_refused(values: list) -> None:
    with pytest.raises(ConfigError, match="buckets"):
        BucketSeqBatcher([0], buckets=values)
    with pytest.raises(ConfigError, match="batch_sizes"):
        ConcatBatcher(batch_sizes=values)


# --- SeqBatcher


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple]:
    counts = [(draw(st.integers(0, 3)), draw(st.integers(0, 9))) for _ in range(draw(st.integers(1, 6)))]
    return [
        (
            np.arange(1, rows * length + 1).reshape(rows, length),
            np.full((rows, 2, length + 1), 0.5),
            np.full((rows, 4), index),
        )
        for index, (rows, length) in enumerate(counts)
    ]


@settings(max_examples=150, deadline=None)
@given(
    sequences(),
    st.sampled_from(["right", "left"]),
    st.sampled_from([None, 4]),
    st.booleans(),
    st.sampled_from([None, [1, 5, 20]]),
)
def test_padded_sequences_come_back_trimmed(requests, side, multiple, bucketed, sizes) -> None:
    options: dict[str, Any] = {"padding_side": side, "pad_to_multiple_of": multiple, "mask": True, "batch_sizes": sizes}
    tokens = [-7, 0.25, None]
    if bucketed:
        batcher: SeqBatcher = BucketSeqBatcher(tokens, [4, 9], pad_to_bucket=True, trim=[1, -1], **options)
    else:
        batcher = SeqBatcher(tokens, trim={"ids": 1, "mask": 1}, **options)

    def model(ids, features, labels, mask):
        assert ids.shape == mask.shape and mask.dtype == np.int64
        assert total == 0 or ((ids == -7) == (mask == 0)).all() and not (labels >= len(requests)).any()
        if multiple and not bucketed:
            assert ids.shape[1] % multiple == 0
        return (ids, ids.astype("f4")) if bucketed else {"ids": ids, "mask": mask, "labels": labels}

    groups: dict[Any, list[tuple]] = {}
    for request in requests:
        groups.setdefault(batcher.kind(request), []).append(request)
    assert bucketed or len(groups) == 1
    for group in groups.values():
        total = sum(len(request[0]) for request in group)
        for request, response in zip(group, run(batcher, group, model), strict=True):
            ids = response[0] if bucketed else response["ids"]
            assert same(ids, request[0])
            if bucketed:
                assert same(response[1], request[0].astype("f4"))
            else:
                assert (response["mask"] == 1).all() and same(response["labels"], request[2])


def test_padding_in_numbers() -> None:
    requests = [(np.ones((2, 3), int),), (np.ones((1, 5), int),)]
    batcher = SeqBatcher([0], batch_sizes=[4])
    batched, context = batcher.batch(requests)
    assert batched[0].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5] + [[1, 1, 1, 0, 0]]
    assert batcher.padding(context) == (11, 20)


def test_other_dimensions_and_sides() -> None:
    requests = [(np.ones((1, 2, 3)),), (np.ones((1, 4, 3)),)]
    batcher = SeqBatcher([9], dim=1, padding_side="left", mask=True)
    (x, mask), _ = batcher.batch(requests)
    assert x.shape == (2, 4, 3) and (x[0, :2] == 9).all() and (x[0, 2:] == 1).all()
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_dict_arguments_and_a_mask_among_them() -> None:
    batcher = SeqBatcher({"ids": 1, "types": 0, "label": None}, mask="attention_mask", trim={"hidden": 1})
    requests = [(UserDict(ids=np.full((1, n), 5), types=np.full((1, n), 3), label=np.array([[n, n]])),) for n in (2, 4)]
    assert batcher.kind(requests[0]) == batcher.kind(requests[1])

    def model(inputs):
        assert inputs["ids"].tolist() == [[5, 5, 1, 1], [5, 5, 5, 5]] and inputs["types"].tolist()[0] == [3, 3, 0, 0]
        assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
        return {"hidden": inputs["ids"][..., None], "pooled": inputs["label"]}

    first, second = run(batcher, requests, model)
    assert first["hidden"].shape == (1, 2, 1) and second["hidden"].shape == (1, 4, 1)
    assert first["pooled"].tolist() == [[2, 2]]
    assert [
        len(part)
        for part in batcher.split(({"ids": np.ones((5, 2)), "types": np.ones((5, 2)), "label": np.ones((5, 2))},), 2)
    ] == [1, 1, 1]


def test_one_token_for_all_arguments() -> None:
    batcher = SeqBatcher(0)
    (x, inner, k), _ = batcher.batch([(np.ones((1, n)), {"a": [np.ones((1, n + 1))]}, 5) for n in (1, 3)])
    assert x.shape == (2, 3) and inner["a"][0].shape == (2, 4) and k.tolist() == [5, 5]


@needs_torch
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["int64", "float32", "bfloat16"])
def test_torch_sequences(side: str, name: str) -> None:
    dtype = getattr(torch, name)
    batcher = SeqBatcher([3, 0], padding_side=side, mask=True, trim=1, batch_sizes=[8])
    requests = [(torch.ones(n, length, dtype=dtype), torch.ones(n, length)) for n, length in ((1, 2), (2, 5), (0, 4))]
    assert len({batcher.kind(request) for request in requests}) == 1

    def model(ids, other, mask):
        assert ids.dtype == dtype and mask.dtype == torch.int64 and ids.shape == mask.shape == (8, 5)
        assert ((ids == 3) == (mask == 0)).all()
        return ids

    for (ids, _), response in zip(requests, run(batcher, requests, model)):
        assert same(response, ids)


SEQ_ERRORS: list[tuple[SeqBatcher, tuple, str]] = [
    (SeqBatcher([0]), (np.ones((1, 2)), np.ones((1, 2))), "no entry for argument 1"),
    (SeqBatcher([0, 0]), (np.ones((1, 2)), np.ones(1)), r"argument 1 of shape \(1,\) has no dimension -1 to pad"),
    (SeqBatcher({"a": 0}), ({"a": np.ones((1, 2)), "b": np.ones((1, 2))},), r"no entry for argument 0\['b'\]"),
    (SeqBatcher([{"a": 0}]), (np.ones((1, 2)),), r"\{'a': 0\} for argument 0, which is a tensor"),
    (SeqBatcher([-100]), (np.ones((1, 2), np.uint8),), "uint8, which cannot be padded with -100"),
    (SeqBatcher([0.5]), (np.ones((1, 2), np.int64),), "int64, which cannot be padded with 0.5"),
    (BucketSeqBatcher([None, 0], [4]), (np.ones((1, 2)),), "holds no argument to pad"),
]


@pytest.mark.parametrize(("batcher", "request_", "text"), SEQ_ERRORS, ids=[text for *_, text in SEQ_ERRORS])
def test_requests_that_padding_tokens_do_not_fit(batcher: SeqBatcher, request_: tuple, text: str) -> None:
    with pytest.raises(BatcherError, match=text):
        batcher.kind(request_)


def test_a_mask_by_name_needs_a_dict() -> None:
    (inputs,), _ = SeqBatcher(0, mask="m").batch([({"a": np.ones((1, n))},) for n in (1, 2)])
    assert inputs["m"].tolist() == [[1, 0], [1, 1]]
    with pytest.raises(BatcherError, match="use mask=True"):
        SeqBatcher(0, mask="m").batch([(np.ones((1, 2)),)])


def test_more_padding_tokens_than_arguments_do_no_harm() -> None:
    assert run(SeqBatcher([0, 0]), [(np.ones((1, 2)),)])[0].shape == (1, 2)


@pytest.mark.parametrize(
    ("trim", "output", "text"),
    [
        (1, np.ones((2, 7)), r"shape \(1, 7\) per request: it cannot be trimmed by trim=1, expected 3"),
        (1, (np.ones((2, 3)), np.ones(2)), r"output\[1\].*trim=\[1, None\]"),
        ([-2], [np.ones((2, 3))], r"output\[0\].*trim=-2"),
    ],
)
def test_outputs_that_cannot_be_trimmed(trim: Any, output: Any, text: str) -> None:
    with pytest.raises(BatcherError, match=text):
        run(SeqBatcher([0], trim=trim), [(np.ones((1, 2)),), (np.ones((1, 3)),)], lambda x: output)


def test_trim_leaves_lists_of_items_alone() -> None:
    assert run(SeqBatcher([0], trim=1), [(np.ones((1, 2)),), (np.ones((1, 3)),)], lambda x: ["a", "b"]) == [
        ["a"],
        ["b"],
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"padding_tokens": [None]}, "leaves every argument unpadded"),
        ({"padding_tokens": []}, "leaves every argument unpadded"),
        ({"padding_tokens": None}, "one number or None"),
        ({"padding_tokens": "0"}, "one number or None"),
        ({"padding_tokens": ["0"]}, "numbers or None"),
        ({"padding_tokens": [0], "dim": 0}, "dim must be"),
        ({"padding_tokens": [0], "padding_side": "both"}, "'right' or 'left'"),
        ({"padding_tokens": [0], "pad_to_multiple_of": 0}, "positive integer"),
        ({"padding_tokens": [0], "trim": 0}, "trim must be"),
        ({"padding_tokens": [0], "trim": {"a": "b"}}, "trim must be"),
        ({"padding_tokens": [0], "mask": 1}, "mask must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SeqBatcher(**options)


def test_numpy_numbers_are_fine_as_tokens() -> None:
    assert SeqBatcher([np.int64(3), np.float32(0.5)]).padding_tokens == [3, 0.5]


# --- BucketSeqBatcher


def test_the_bucket_is_part_of_the_kind() -> None:
    batcher = BucketSeqBatcher(padding_tokens=[0], buckets=[3, 5])
    kinds = [batcher.kind((np.ones((1, 1, n)),)) for n in (1, 3, 4, 5, 6, 600)]
    assert kinds[0] == kinds[1] and kinds[2] == kinds[3] and kinds[4] == kinds[5] and len(set(kinds)) == 3
    (x,), _ = batcher.batch([(np.ones((1, 1, 4)),), (np.ones((2, 1, 2)),)])
    assert x.shape == (3, 1, 4)
    assert batcher.size((np.ones((2, 1, 2)),)) == 2


def test_pad_to_bucket_makes_few_shapes_and_size_a_budget() -> None:
    batcher = BucketSeqBatcher([0, 0], [16, 32], pad_to_bucket=True)
    short = (np.ones((2, 3)), np.ones((2, 20)))
    assert batcher.size(short) == 2 * 32
    (x, y), context = batcher.batch([short])
    assert x.shape == y.shape == (2, 32)
    assert batcher.padding(context) == (6, 64)
    long = (np.ones((1, 40)), np.ones((1, 3)))
    assert batcher.size(long) == 40
    (x, y), _ = batcher.batch([long])
    assert x.shape == (1, 40) and y.shape == (1, 3)
    parts = batcher.split((np.ones((5, 3)), np.ones((5, 20))), 64)
    assert [len(part[0]) for part in parts] == [2, 2, 1]
    with pytest.raises(RequestTooLargeError):
        batcher.split(long, 39)


# --- ListBatcher and MultiBatcher


def test_lists_of_anything() -> None:
    batcher = ListBatcher()
    assert run(batcher, [("a",), ("bc",)], lambda texts: [len(text) for text in texts]) == [1, 2]
    assert run(batcher, [("a", 1), ("b", None)], lambda a, b: list(zip(a, b))) == [("a", 1), ("b", None)]
    assert same(run(batcher, [("a",), ("b",)], lambda a: np.eye(2)), [np.array([1.0, 0]), np.array([0, 1.0])])
    got = run(batcher, [("a",), ("b",)], lambda a: {"n": [1, 2], "e": np.eye(2)})
    assert got[1]["n"] == 2 and same(got[1]["e"], np.array([0, 1.0]))
    assert run(batcher, [("a",)], lambda a: {}) == [{}]
    assert batcher.kind(("a",)) == batcher.kind((1,)) != batcher.kind(("a", 1)) and batcher.size(("a",)) == 1


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (["x"], "list of 2 entries.*got 1 entries"),
        (np.ones(3), "got 3 entries"),
        (None, "got None"),
        (("x", "y"), "type tuple"),
        ("xy", "type str"),
        (np.array(1), "type ndarray"),
        ({"a": [1, 2], "b": [1]}, r"output\['b'\]"),
    ],
)
def test_wrong_lists_are_named(output: Any, text: str) -> None:
    with pytest.raises(BatcherError, match=text):
        run(ListBatcher(), [("a",), ("b",)], lambda texts: output)


def test_a_call_without_arguments_has_nothing_to_batch() -> None:
    with pytest.raises(BatcherError, match="without arguments"):
        ListBatcher().kind(())


def test_multi_batcher_calls_the_model_once_for_each_part() -> None:
    class EvenOdd(MultiBatcher):
        def batch(self, requests):
            groups = [[i for i, (n,) in enumerate(requests) if n % 2 == odd] for odd in (0, 1)]
            groups = [group for group in groups if group]
            return [([requests[i][0] for i in group],) for group in groups], groups

        def unbatch(self, batched_response, context):
            pairs = [pair for group, out in zip(context, batched_response) for pair in zip(group, out)]
            return [response for _, response in sorted(pairs)]

    batcher = EvenOdd()
    batched, context = batcher.batch([(3,), (4,), (5,)])
    outputs = [[10 * n for n in numbers] for (numbers,) in map(model_arguments, batched)]
    assert batcher.unbatch(outputs, context) == [30, 40, 50]
    with pytest.raises(NotImplementedError, match="MultiBatcher has no batch"):
        MultiBatcher().batch([])

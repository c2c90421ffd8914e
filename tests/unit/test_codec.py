"""Values to bytes and back."""

import pickle
import threading
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batch_inference.errors import BatcherError, ModelError, RemoteTraceback, TransportError
from batch_inference.transport import codec


def journey(value: Any, *, lend: bool = False, offset: int = 128) -> Any:
    encoded = codec.encode(value)
    memory = bytearray(b"\xaa" * (offset + len(encoded) + 64))
    codec.write(encoded, memory, offset)
    assert memory[:offset] == b"\xaa" * offset and memory[offset + len(encoded) :] == b"\xaa" * 64, "wrote outside"
    return codec.decode(memory, offset, len(encoded), lend=lend)


def same(one: Any, other: Any) -> bool:
    if isinstance(other, np.ndarray):
        kept = one.dtype == other.dtype and one.shape == other.shape and type(one) is np.ndarray
        return bool(kept and one.tobytes() == other.tobytes())
    if isinstance(other, dict):
        return type(one) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)  # fmt: skip
plain = st.recursive(
    arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ),
    max_leaves=6,
)
anything = st.recursive(
    st.one_of(arrays, st.none(), st.integers(), st.text(max_size=20), st.binary(max_size=20), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(plain, st.booleans())
def test_plain_values_come_back_as_they_were(value: Any, lend: bool) -> None:
    assert same(journey(value, lend=lend), value)
    assert same(journey((value,), lend=lend), (value,))


@settings(max_examples=150, deadline=None)
@given(anything)
def test_other_values_come_back_as_they_were(value: Any) -> None:
    assert same(journey((value,)), (value,))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(24).reshape(2, 3, 4)[:, ::2, ::-1],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.broadcast_to(np.float32(3), (4, 5)),
        np.arange(40_000)[::2],
        np.float64(1.5),
        np.array("2020-01-01", "M8[D]"),
        np.array(["a", "bc"]),
        np.array([1, "a", None], object),
        np.zeros(3, [("a", "i4"), ("b", "f8")]),
        np.ma.masked_array([1, 2, 3], [0, 1, 0]),
        {1: np.ones(2)},
        ({"a": 1, "b": [np.ones(3), "text"]}, 3.5),
        b"bytes" * 100_000,
        bytearray(b"bytes"),
        "text",
        None,
        (),
        [],
        {},
        ((), [[]]),
        {"a": {}},
        range(5),
        frozenset([1]),
    ],
    ids=repr,
)
def test_unusual_values_come_back_equal(value: Any) -> None:
    back = journey(value)
    assert type(back) is type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        assert np.array_equal(back, value) and back.dtype == value.dtype
    else:
        assert same(back, value)


def test_mappings_become_dicts_and_keep_their_order() -> None:
    for value in UserDict(b=np.ones(1), a=np.ones(2)), OrderedDict(b=np.ones(1), a=np.ones(2)):
        back = journey((value,))[0]
        assert type(back) is dict and list(back) == ["b", "a"]
    assert journey((UserDict(a="text"),)) == ({"a": "text"},)


def test_what_is_decoded_is_owned_and_writable_unless_it_is_lent() -> None:
    x = np.arange(6.0)
    for value in x, (x,), {"a": [x]}, (x, "pickled"), np.arange(100_000):
        for leaf in leaves(journey(value)):
            leaf += 1
    memory = bytearray(1024)
    codec.write(codec.encode((x,)), memory, 0)
    (lent,) = codec.decode(memory, 0, 1024, lend=True)
    (owned,) = codec.decode(memory, 0, 1024)
    lent[0] = 99
    assert codec.decode(memory, 0, 1024)[0][0] == 99 and owned[0] == 0


def leaves(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [leaf for part in parts for leaf in leaves(part)]


def test_torch_stays_torch() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.float16),
        torch.zeros(0, 4),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, requires_grad=True),
        torch.tensor([True, False]),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
        torch.ones(50_000),
    ):
        for value in tensor, (tensor, np.ones(2)), (tensor, "text"):
            back = journey(value)
            back = back[0] if isinstance(back, tuple) else back
            assert back.dtype == tensor.dtype and back.shape == tensor.shape
            assert torch.equal(back.to(torch.complex64), tensor.detach().to(torch.complex64)) and not back.requires_grad
    with pytest.raises(TypeError, match="sparse"):
        codec.encode((torch.ones(2, 2).to_sparse(),))


def test_tensors_lie_at_multiples_of_64_bytes() -> None:
    encoded = codec.encode((np.ones(3, np.uint8), np.ones(5)))
    memory = bytearray(len(encoded))
    codec.write(encoded, memory, 0)
    lent = codec.decode(memory, 0, len(encoded), lend=True)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    assert [(x.ctypes.data - start) % 64 for x in lent] == [0, 0]


def test_many_layouts_are_remembered_up_to_a_bound() -> None:
    for size in range(6000):
        x = np.zeros(size % 5500, np.uint8)
        assert len(journey((x,))[0]) == len(x)
    assert max(len(codec._by_value), len(codec._by_header)) <= codec._REMEMBERED


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=4, max_size=40), st.integers(0, 200))
def test_bytes_that_are_no_value_are_an_error_and_read_nothing_beyond(data: bytes, claimed: int) -> None:
    memory = bytearray(data + bytes(300))
    try:
        codec.decode(memory, 0, claimed)
    except (TransportError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError):
        pass
    except Exception as error:  # whatever unpickling raises; but nothing else
        assert memory[:4] == b"\xff\xff\xff\xff", error


def test_a_header_that_claims_more_than_there_is_is_refused() -> None:
    encoded = codec.encode((np.ones(100),))
    memory = bytearray(len(encoded))
    codec.write(encoded, memory, 0)
    for length in 0, 3, 60, len(encoded) - 1:
        with pytest.raises(TransportError, match="overwritten"):
            codec.decode(memory, 0, length)


def test_what_cannot_travel_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        codec.encode((threading.Lock(),))


# --- errors ---------------------------------------------------------------------------------------------------------


def error_journey(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        encoded = codec.encode_error(raised)
    memory = bytearray(len(encoded))
    codec.write(encoded, memory, 0)
    return codec.decode_error(memory, 0, len(encoded))


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("text")
        self.lock = threading.Lock()


def test_errors_keep_their_type_and_get_the_remote_traceback_as_their_cause() -> None:
    for error in (
        ValueError("a", 3),
        KeyError("k"),
        BatcherError("rows"),
        OSError(2, "no", "file"),
        ExceptionGroupLike("x"),
    ):
        back = error_journey(error)
        assert type(back) is type(error) and back.args == error.args and str(back) == str(error)
        assert isinstance(back.__cause__, RemoteTraceback) and "in error_journey" in str(back.__cause__)


class ExceptionGroupLike(Exception):
    pass


def test_errors_that_cannot_travel_become_model_errors() -> None:
    back = error_journey(Locked())
    assert type(back) is ModelError and "Locked: text" in str(back) and "in error_journey" in str(back)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Unsettable(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"no {name}")


class Causeless(Exception):
    __cause__ = property(lambda self: None)  # type: ignore[assignment]


def test_errors_whose_class_forbids_setting_attributes_keep_their_type() -> None:
    for error in Frozen(7), Unsettable("a"), Causeless("b"):
        back = error_journey(error)
        assert type(back) is type(error) and back.args == error.args
        assert isinstance(back, Causeless) or isinstance(back.__cause__, RemoteTraceback)
        if isinstance(back, Frozen):
            assert back.code == 7


def test_each_decoding_makes_an_error_of_its_own() -> None:
    encoded = codec.encode_error(ValueError("x"))
    memory = bytearray(len(encoded))
    codec.write(encoded, memory, 0)
    one, other = (codec.decode_error(memory, 0, len(encoded)) for _ in range(2))
    assert one is not other and one.__cause__ is not other.__cause__

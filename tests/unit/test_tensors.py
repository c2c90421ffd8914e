"""Tensors as bytes and back, bit by bit, and the pool of batch buffers."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batch_inference import tensors

try:
    import torch
except ImportError:  # the tests of torch values are skipped without it
    torch = None  # type: ignore[assignment]

pytestmark = pytest.mark.filterwarnings("ignore:.*(ComplexHalf|quantize|Sparse CSR|nested tensors):UserWarning")
needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

NUMPY_DTYPES = [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"] + [np.dtype(code) for code in (">i2", ">f4", ">c16")]
TORCH_DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()


def arrays(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    """Arrays of every layout: C and F order, strided, reversed, read-only, 0-d and empty."""

    @st.composite
    def draw_array(draw: st.DrawFn) -> np.ndarray:
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        count = int(np.prod(shape)) * dtype.itemsize
        data = draw(st.binary(min_size=count, max_size=count))
        if dtype.kind == "b":
            data = bytes(byte & 1 for byte in data)
        array = np.frombuffer(bytearray(data), dtype).reshape(shape)
        layout = draw(st.sampled_from(["C", "F", "reversed", "strided", "read-only", "transposed"]))
        if layout == "F":
            array = np.asfortranarray(array)
        elif layout == "reversed" and array.ndim:
            array = array[::-1]
        elif layout == "strided" and array.ndim:
            array = array[..., ::2]
        elif layout == "transposed":
            array = array.T
        elif layout == "read-only":
            array.flags.writeable = False
        return array

    return draw_array()


def bits(value: np.ndarray) -> bytes:
    return value.tobytes()


def torch_bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def room(size: int) -> bytearray:
    return bytearray(b"\xee" * (size + 64))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_numpy_arrays_come_back_bit_by_bit(dtype: np.dtype, data: st.DataObject) -> None:
    array = data.draw(arrays(dtype))
    spec = tensors.spec(array)
    assert spec == ("numpy", dtype.str, array.shape)
    assert tensors.nbytes(spec) == array.nbytes
    offset = data.draw(st.sampled_from([0, 8, 64]))
    memory = room(array.nbytes)
    tensors.write(array, memory, offset)
    assert memory[:offset] == b"\xee" * offset
    assert memory[offset + array.nbytes :] == b"\xee" * (64 - offset)
    for back in (tensors.view(spec, memory, offset), tensors.copy(spec, memory, offset)):
        assert back.dtype == array.dtype and back.shape == array.shape
        assert bits(back) == bits(array)
        assert back.flags.writeable


@needs_torch
@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5), (2, 3, 4)], ids=str)
def test_torch_tensors_come_back_bit_by_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(size, dtype=torch.int64).mul(37).remainder(2 if name == "bool" else 251).to(torch.uint8)
    value = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    spec = tensors.spec(value)
    assert spec == ("torch", name, shape)
    assert tensors.nbytes(spec) == size
    memory = room(size)
    tensors.write(value, memory, 16)
    for back in (tensors.view(spec, memory, 16), tensors.copy(spec, memory, 16)):
        assert back.dtype == dtype and tuple(back.shape) == shape
        assert torch_bits(back) == torch_bits(value)


@needs_torch
def test_torch_layouts_and_history_stay_behind() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    values = [
        base.transpose(0, 2),
        base[:, ::2],
        base.clone().requires_grad_(),
        torch.nn.Parameter(base),
        base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.complex(base, base).conj(),
        torch.complex(base, base).conj().imag,
        base.to(torch.bfloat16).transpose(0, 1),
        torch.from_numpy(np.zeros((0, 3), np.float32)[::-1].copy()).to(torch.bfloat16),
        torch.from_numpy(np.ndarray((0,), np.float32)).to(torch.bfloat16),
    ]
    for value in values:
        spec = tensors.spec(value)
        assert spec is not None
        memory = room(tensors.nbytes(spec))
        tensors.write(value, memory, 0)
        back = tensors.copy(spec, memory, 0)
        assert torch.equal(back, value.detach()) and back.dtype == value.dtype
        assert back.is_contiguous() and not back.requires_grad and not back.is_conj() and not back.is_neg()


def test_large_values_and_mmap_memory() -> None:
    array = np.arange(3 * 40_000, dtype=np.float32).reshape(3, 40_000)[:, ::-1]
    with mmap.mmap(-1, array.nbytes + 4096) as memory:
        spec = tensors.spec(array)
        assert spec is not None
        tensors.write(array, memory, 4096)
        assert np.array_equal(tensors.copy(spec, memory, 4096), array)
        small = np.arange(5)
        tensors.write(small, memory, 0)
        assert np.array_equal(tensors.copy(("numpy", small.dtype.str, (5,)), memory, 0), small)


def test_a_view_shares_the_memory_and_a_copy_does_not() -> None:
    memory = bytearray(64)
    spec = ("numpy", "<i4", (4,))
    view, copy = tensors.view(spec, memory, 0), tensors.copy(spec, memory, 0)
    memory[0] = 7
    assert view[0] == 7 and copy[0] == 0


def test_what_is_more_than_raw_bytes_has_no_spec() -> None:
    others = [
        np.array(["a"]),
        np.array([b"a"]),
        np.array([None]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "i4")]),
        np.ma.masked_array([1], [True]),
        np.float32(1),
        1,
        "x",
        None,
        [np.zeros(1)],
    ]
    assert [tensors.spec(value) for value in others] == [None] * len(others)
    assert tensors.spec(np.zeros(2, np.int64)) is not None


def test_a_memory_map_is_sent_as_an_array(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert tensors.spec(mapped) == ("numpy", "<i8", (6,))


def test_is_tensor_and_framework() -> None:
    assert tensors.is_tensor(np.zeros(1)) and tensors.is_tensor(np.ma.zeros(1))
    assert not any(map(tensors.is_tensor, [1, "x", None, [1], np.float32(1)]))
    assert tensors.framework(np.zeros(1)) == "numpy"
    with pytest.raises(TypeError, match="got list"):
        tensors.framework([1])
    if torch is not None:
        assert tensors.is_tensor(torch.zeros(1)) and tensors.framework(torch.zeros(1)) == "torch"


@needs_torch
def test_tensors_that_cannot_be_sent_are_refused_by_name() -> None:
    plain = torch.zeros(2, 2)
    cases = {
        "a meta tensor": torch.empty(2, device="meta"),
        "a quantised tensor": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        "a sparse tensor": plain.to_sparse(),
        "to_dense": plain.to_sparse_csr(),
        "a nested tensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    }
    for text, value in cases.items():
        assert tensors.spec(value) is None
        with pytest.raises(TypeError, match=text):
            tensors.check_sendable(value)
    tensors.check_sendable(plain)
    tensors.check_sendable(np.zeros(1))


def test_numpy_work_imports_no_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from batch_inference import tensors\n"
        "from batch_inference.batcher import SeqBatcher\n"
        "spec = tensors.spec(np.ones((1, 3))); m = bytearray(64); tensors.write(np.ones((1, 3)), m, 0)\n"
        "tensors.copy(spec, m, 0); tensors.view(spec, m, 0); tensors.is_tensor(1); tensors.check_sendable(1)\n"
        "b = SeqBatcher([0], mask=True); r = (np.ones((1, 3)),); b.kind(r), b.size(r), b.unbatch(*b.batch([r, r]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- joining


def test_concat_keeps_byte_order_and_structured_layout() -> None:
    for dtype in (">i8", [("a", "i1"), ("b", ">f8")], "M8[ns]", "U3", "S2", object):
        value = np.zeros((2, 3), dtype)
        for rows in (None, 5):
            joined = tensors.concat([value, value], rows)
            assert joined.dtype == value.dtype and joined.shape == (rows or 4, 3)
            assert np.array_equal(joined[:4], np.concatenate([value, value]))


def test_concat_never_shares_memory() -> None:
    for shape in ((1, 4), (400, 400)):
        value = np.ones(shape)
        assert not np.shares_memory(tensors.concat([value]), value)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shape", [(1, 3), (2, 30_000), (1, 3, 4), (2, 300, 100)], ids=str)
@pytest.mark.parametrize("name", ["numpy", *[pytest.param(t, marks=needs_torch) for t in ("float32", "bfloat16")]])
def test_pad_concat_equals_np_pad(left: bool, shape: tuple[int, ...], name: str) -> None:
    for axis in range(1, len(shape)):
        arrays = []
        for extra in (0, 2, 5):
            longer = list(shape)
            longer[axis] += extra
            arrays.append(np.arange(np.prod(longer), dtype=np.float32).reshape(longer) % 128)
        length = shape[axis] + 6
        expected = []
        for array in arrays:
            gap = length - array.shape[axis]
            pads = [(0, 0)] * array.ndim
            pads[axis] = (gap, 0) if left else (0, gap)
            expected.append(np.pad(array, pads, constant_values=-1))
        rows = 3 * shape[0]
        values = arrays if name == "numpy" else [torch.from_numpy(a).to(getattr(torch, name)) for a in arrays]
        joined = tensors.pad_concat(values, axis, length, -1, left=left, rows=rows + 2)
        if name != "numpy":
            assert joined.dtype == values[0].dtype
            joined = joined.to(torch.float32).numpy()
        assert np.array_equal(joined[:rows], np.concatenate(expected))
        assert (joined[rows:] == joined[0]).all()


def test_can_hold() -> None:
    cases = [("i8", -100, True), ("u1", -1, False), ("u1", 256, False), ("i4", 0.5, False), ("f4", float("-inf"), True)]
    cases += [("?", 1, True), ("?", 2, False), ("U3", 0, False), ("c8", 0, True), ("i4", float("inf"), False)]
    assert [tensors.can_hold(np.dtype(code), number) for code, number, _ in cases] == [fits for *_, fits in cases]
    if torch is not None:
        cases = [("int64", -100, True), ("uint8", -1, False), ("bfloat16", 0.5, True), ("bool", 2, False)]
        assert [tensors.can_hold(getattr(torch, t), n) for t, n, _ in cases] == [fits for *_, fits in cases]


@needs_torch
def test_out_of_memory_is_known_whoever_raises_it() -> None:
    class Own(torch.cuda.OutOfMemoryError):
        pass

    for error in (MemoryError(), torch.cuda.OutOfMemoryError("CUDA"), Own("mine")):
        assert tensors.out_of_memory(error)
    for error in (RuntimeError("CUDA out of memory"), type("OutOfMemoryError", (Exception,), {})()):
        assert not tensors.out_of_memory(error)

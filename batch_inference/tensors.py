"""Everything that has to know which framework a tensor belongs to: its identity, its bytes, its batch buffers.

This is the only file that names a framework. numpy is imported; torch is not, until a torch value is really there:
a value can only be a torch tensor when somebody else imported torch (`sys.modules`), or when one arrived by wire.

A *spec* is what travels beside the raw bytes: ``(framework, dtype name, shape)``. numpy dtypes are named by
``dtype.str`` (``"<f4"``), torch dtypes as torch prints them (``"bfloat16"``); the two sets of names are disjoint.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from . import buffers
from .speedups import in_c

Spec = tuple[str, str, tuple[int, ...]]

# Below this, bytes() of a value and one slice assignment beat building a second array; above, np.copyto, which
# also releases the GIL.
_LARGE: Final = 32 * 1024

_ndarray: Final = np.ndarray
ARRAY: Final[Any] = np.ndarray


def _plain_dtypes() -> dict[np.dtype[Any], str]:
    """The numpy dtypes whose raw bytes say everything: numbers and bool, in both byte orders."""
    dtypes = [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"]
    swapped = [dtype.newbyteorder("S") for dtype in dtypes if dtype.itemsize > 1]
    return {dtype: dtype.str for dtype in dtypes + swapped}


_NUMPY_NAMES: Final = _plain_dtypes()
_NUMPY_DTYPES: Final = {name: dtype for dtype, name in _NUMPY_NAMES.items()}
_NATIVE: Final = frozenset([dtype for dtype in _NUMPY_NAMES if dtype.isnative])
_ITEM_SIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in _NUMPY_DTYPES.items()}


PLAIN: Final[set[type]] = {np.ndarray}
"""The exact types of nearly all tensors, for quick checks; torch.Tensor is among them once one was seen."""


class _Torch:
    """torch and the tables made from it, built on first need."""

    def __init__(self) -> None:
        import torch

        self.module: Any = torch
        PLAIN.add(torch.Tensor)
        self.strided = torch.strided
        self.tensor_types = (torch.Tensor, torch.nn.Parameter)
        self.names: dict[Any, str] = {}
        self.dtypes: dict[str, Any] = {}
        quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            name = str(dtype).removeprefix("torch.")
            if name not in quantised:
                self.names[dtype] = name
                self.dtypes[name] = dtype
                _ITEM_SIZES[name] = dtype.itemsize
        shared = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
        self.numpy_dtypes = {self.dtypes[name]: np.dtype(name) for name in shared.split()}


_torch_tables: _Torch | None = None


def _torch() -> _Torch:
    global _torch_tables
    if _torch_tables is None:
        _torch_tables = _Torch()
    return _torch_tables


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)  # None while another thread is still importing torch
    if tensor is None or not isinstance(value, tensor):
        return False
    _torch()
    return True


# --- identity ---------------------------------------------------------------------------------------------------


def is_tensor(value: Any) -> bool:
    """True for a numpy array or a torch tensor, subclasses included. Never imports torch."""
    return type(value) in PLAIN or isinstance(value, _ndarray) or _is_torch(value)


def framework(value: Any) -> str:
    """``"numpy"`` or ``"torch"``; TypeError for anything else."""
    if isinstance(value, _ndarray):
        return "numpy"
    if _is_torch(value):
        return "torch"
    raise TypeError(f"expected a numpy array or a torch tensor, got {type(value).__name__}")


_COMMON: Final = frozenset({str, bytes, bool, int, float, complex, type(None), tuple, list, dict})
"""Types that are no tensors, asked for so often that it pays to know them."""


def spec(value: Any) -> Spec | None:
    """The identity of a tensor whose raw bytes say everything, else None (other types, object and structured dtypes,
    dates, strings, array subclasses, sparse or quantised tensors ...)."""
    kind = type(value)
    if kind is _ndarray or kind is np.memmap:
        try:  # not get(), see codec.encode
            return ("numpy", _NUMPY_NAMES[value.dtype], value.shape)
        except KeyError:
            return None
    if kind in _COMMON:
        return None
    if kind in PLAIN or (torch_is_loaded() and _is_torch(value)):
        return _torch_spec(value)
    return None


def _torch_spec(value: Any) -> Spec | None:
    tables = _torch()
    name = tables.names.get(value.dtype)
    if (
        name is None
        or type(value) not in tables.tensor_types
        or value.layout is not tables.strided
        or value.is_meta
        or value.is_nested
    ):
        return None
    return ("torch", name, tuple(value.shape))


def nbytes(spec: Spec) -> int:
    """The number of raw bytes of a tensor of this spec."""
    size = _ITEM_SIZES.get(spec[1])
    if size is None:
        _torch()
        size = _ITEM_SIZES[spec[1]]
    return size * math.prod(spec[2])


def numpy_dtype(spec: Spec) -> np.dtype[Any] | None:
    """The dtype of a numpy array of this spec; None for a tensor of another framework."""
    return _NUMPY_DTYPES[spec[1]] if spec[0] == "numpy" else None


def exact_types() -> set[type]:
    """The types of tensors that this process can hold, subclasses not among them."""
    if torch_is_loaded():
        _torch()
    return PLAIN


def torch_is_loaded() -> bool:
    """Whether this process imported torch: if not, no value here holds a torch tensor."""
    return "torch" in sys.modules


def check_sendable(value: Any) -> None:
    """TypeError for tensors that cannot be copied to another process as they are: sparse, nested, quantised, meta."""
    if not _is_torch(value):
        return
    module = _torch().module
    if value.is_meta:
        what, remedy = "a meta tensor, which has no data", "send a tensor that holds values"
    elif value.is_quantized:
        what, remedy = f"a quantised tensor ({value.dtype})", "send x.dequantize(), or x.int_repr() with its scale"
    elif value.is_nested:
        what, remedy = "a nested tensor", "send its parts one by one, or x.to_padded_tensor(0.0)"
    elif value.layout is not module.strided:
        what, remedy = f"a sparse tensor ({value.layout})", "send x.to_dense(), or its indices and values"
    else:
        return
    raise TypeError(f"cannot send {what} to a model: {remedy}")


# --- bytes ------------------------------------------------------------------------------------------------------


def write(value: Any, memory: Any, offset: int) -> None:
    """Write the raw C-order bytes of a tensor into writable `memory` at `offset`. Any strides; CUDA tensors are copied
    to the host; autograd history stays behind."""
    array = value if isinstance(value, _ndarray) else _as_numpy(value)
    size = array.nbytes
    if size < _LARGE:
        memory[offset : offset + size] = array.tobytes()
    else:
        np.copyto(np.ndarray(array.shape, array.dtype, memory, offset), array)


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """A torch tensor's values on the host as an array: itself where numpy has the dtype, else its raw bytes."""
    tables = _torch()
    shared = value.dtype in tables.numpy_dtypes
    try:
        if shared:
            array: np.ndarray[Any, Any] = value.numpy()
            return array
    except (RuntimeError, TypeError):  # autograd history, another device, a lazy conjugation or sign
        pass
    value = on_host(value).resolve_conj().resolve_neg()
    if shared:
        array = value.numpy()
        return array
    if not value.numel():  # of unpredictable strides, which view may refuse
        return np.empty(0, np.uint8)
    array = value.contiguous().reshape(-1).view(tables.module.uint8).numpy()
    return array


def view(spec: Spec, memory: Any, offset: int) -> Any:
    """A tensor that shares `memory` (a writable buffer) from `offset` on; the tensor keeps the buffer alive."""
    framework, name, shape = spec
    if framework == "numpy":
        return np.ndarray(shape, _NUMPY_DTYPES[name], memory, offset)
    tables = _torch()
    dtype = tables.dtypes[name]
    if 0 in shape:  # numpy gives empty arrays strides that torch stumbles over
        return tables.module.empty(shape, dtype=dtype, device="cpu")
    numpy_dtype = tables.numpy_dtypes.get(dtype)
    if numpy_dtype is not None:
        return tables.module.from_numpy(np.ndarray(shape, numpy_dtype, memory, offset))
    raw = np.ndarray((nbytes(spec),), np.uint8, memory, offset)
    return tables.module.from_numpy(raw).view(dtype).view(shape)


def copy(spec: Spec, memory: Any, offset: int) -> Any:
    """Like `view`, but the tensor owns its memory and is writable."""
    if spec[0] == "numpy":
        return np.ndarray(spec[2], _NUMPY_DTYPES[spec[1]], memory, offset).copy()
    return view(spec, np.ndarray((nbytes(spec),), np.uint8, memory, offset).copy(), 0)


def pickles_as_sent(value: Any) -> bool:
    """Whether pickle keeps the dtype and bytes of a tensor that has a spec: it makes strided big-endian arrays native,
    and knows torch tensors only by way of torch's own files."""
    return isinstance(value, _ndarray) and (value.dtype.isnative or value.flags.c_contiguous)


def has_tobytes(spec: Spec) -> bool:
    """Whether ``value.tobytes()`` gives the raw C-order bytes of a tensor of this spec."""
    return spec[0] == "numpy"


def reader(spec: Spec, at: int, *, lend: bool) -> Callable[[Any, int], Any]:
    """`view` (with `lend`) or `copy` for one spec, `at` bytes on: a function of memory and offset that looks nothing
    up."""
    if spec[0] != "numpy":
        read = view if lend else copy
        return lambda memory, offset: read(spec, memory, offset + at)
    shape, dtype = spec[2], _NUMPY_DTYPES[spec[1]]
    if lend:
        return lambda memory, offset: np.ndarray(shape, dtype, memory, offset + at)
    return lambda memory, offset: np.ndarray(shape, dtype, memory, offset + at).copy()


# --- batches ---------------------------------------------------------------------------------------------------------


def empty(shape: Sequence[int], like: Any) -> Any:
    """An uninitialised tensor of `shape` with the framework, dtype and device of `like`, from this thread's batch
    buffers if it is large. It is the receiver's for as long as anything refers to it."""
    if isinstance(like, _ndarray):
        size = like.dtype.itemsize * math.prod(shape)
        if size < buffers.WORTH_POOLING or like.dtype not in _NUMPY_NAMES:
            return np.empty(shape, like.dtype)
        return buffers.array(shape, like.dtype, size)
    module = _torch().module
    size = like.dtype.itemsize * math.prod(shape)
    if size < buffers.WORTH_POOLING or like.device.type != "cpu":
        return module.empty(tuple(shape), dtype=like.dtype, device=like.device)
    return module.from_numpy(buffers.array((size,), np.dtype(np.uint8), size)).view(like.dtype).view(tuple(shape))


def concat(values: Sequence[Any], rows: int | None = None) -> Any:
    """Join tensors of one kind (framework, dtype, trailing shape) on the first dimension, by copying each row once.
    The result never shares memory with `values`, also when there is only one.

    `rows` asks for a result of that many rows: those beyond the last value are copies of the first row.
    """
    first = values[0]
    total = sum(map(len, values))
    if rows is None and type(first) is _ndarray and first.dtype in _NATIVE:
        if total * first.nbytes < buffers.WORTH_POOLING * len(first):
            return first.copy() if len(values) == 1 else np.concatenate(values)
    out = empty((rows or total, *first.shape[1:]), first)
    return completed(out, append(out, 0, values), rows or total)


@in_c
def joined_columns(requests: list[Any]) -> tuple[tuple[Any, ...], list[int], int] | None:
    """Requests of numpy arrays side by side, argument by argument joined on the first dimension; the rows of each
    request, and of all. None if that takes more than copying bytes. In Python nothing is quicker than step by step."""
    return None


@in_c
def parts(array: Any, counts: list[int], rows: int) -> list[Any] | None:
    """A numpy array of so many rows cut into parts of `counts` rows, which share its memory; what is over is dropped.

    None if it is no such array, or in Python, if slices are as quick.
    """
    if type(array) is _ndarray and counts.count(1) == len(counts) == rows and array.shape[:1] == (rows,):
        return list(array[:, None])  # one row each: what slices would give, without making them
    return None


def append(out: Any, filled: int, values: Sequence[Any]) -> int:
    """Copy tensors of one kind into `out`, of which the first `filled` rows are taken; the number that then are."""
    end: int = filled + sum([value.shape[0] for value in values])
    if isinstance(out, _ndarray):
        # With out=, numpy keeps the byte order, and the layout of structured dtypes, which promotion would not.
        np.concatenate(values, out=out[filled:end], casting="equiv")
    else:
        module = _torch().module
        with module.no_grad():
            module.cat(tuple(values), out=out[filled:end])
    return end


def completed(out: Any, filled: int, rows: int) -> Any:
    """The first `rows` rows of `out`: those that are filled, then copies of the first."""
    out = out[:rows] if rows < out.shape[0] else out
    _repeat_first(out, filled)
    return out


def _repeat_first(out: Any, filled: int) -> None:
    """Fill the rows after `filled` with row 0: values that a model can take, unlike made-up ones."""
    if filled < out.shape[0]:
        out[filled:] = out[:1] if filled else 0


def pad_concat(values: Sequence[Any], axis: int, length: int, fill: float, *, left: bool, rows: int) -> Any:
    """Join tensors that differ in the length of dimension `axis`, each filled up to `length` with `fill`, at its end or
    on its left. Rows beyond the last value are copies of the first row."""
    first = values[0]
    shape = list(first.shape)
    shape[0], shape[axis] = rows, length
    out = empty(shape, first)
    if isinstance(first, _ndarray):
        filled = _fill_padded(out, values, axis, length, fill, left)
    elif first.dtype in _torch().numpy_dtypes and first.device.type == "cpu":
        # The same memory through numpy: its slice assignment takes a quarter of torch's time.
        filled = _fill_padded(out.numpy(), [_as_numpy(value) for value in values], axis, length, fill, left)
    else:
        with _torch().module.no_grad():
            filled = _fill_padded(out, values, axis, length, fill, left)
    _repeat_first(out, filled)
    return out


def _fill_padded(out: Any, values: Sequence[Any], axis: int, length: int, fill: float, left: bool) -> int:
    """Copy `values` into `out` and pad; the number of rows filled."""
    all_at_once = out.nbytes < buffers.WORTH_POOLING  # one fill of everything, rather than one per value
    if all_at_once:
        out[...] = fill
    middle = (slice(None),) * (axis - 1)
    start = 0
    for value in values:
        shape = value.shape
        own = shape[axis]
        end = start + shape[0]
        data, gap = (slice(length - own, length), slice(0, length - own)) if left else (slice(own), slice(own, length))
        if axis == 1:
            out[start:end, data] = value
        else:
            out[(slice(start, end), *middle, data)] = value
        if own < length and not all_at_once:
            out[(slice(start, end), *middle, gap)] = fill
        start = end
    return start


@functools.lru_cache(maxsize=256)
def can_hold(dtype: Any, number: float) -> bool:
    """Whether a tensor of this dtype can hold the number: a float type any, an integer type what is in its range."""
    if isinstance(dtype, np.dtype):
        if dtype.kind in "fcb":
            return dtype.kind != "b" or number in (0, 1)
        if dtype.kind not in "iu":
            return False
        limits: Any = np.iinfo(dtype)
    elif dtype.is_floating_point or dtype.is_complex:
        return True
    else:
        module = _torch().module
        if dtype is module.bool:
            return number in (0, 1)
        limits = module.iinfo(dtype)
    return math.isfinite(number) and number == int(number) and limits.min <= number <= limits.max


def length_mask(lengths: Sequence[int], counts: Sequence[int], *, length: int, left: bool, rows: int, like: Any) -> Any:
    """An int64 mask [rows, length] in the framework of `like`: 1 where a row holds its request's own elements."""
    own = _with_first_repeated(np.repeat(np.asarray(lengths, np.int64), counts), rows)[:, None]
    positions = np.arange(length)
    mask = (positions >= length - own if left else positions < own).astype(np.int64)
    return mask if isinstance(like, _ndarray) else _torch().module.from_numpy(mask)


def per_row(values: Sequence[Any], counts: Sequence[int], rows: int, like: Any) -> Any:
    """One number per request as a 1-d tensor with one entry per row, in the framework of `like`."""
    column = _with_first_repeated(np.repeat(np.array(values), counts), rows)
    if isinstance(like, _ndarray):
        return column
    module = _torch().module
    if isinstance(values[0], np.generic) or not isinstance(values[0], (float, complex)):
        return module.from_numpy(column)
    # torch's own default for a Python float is float32, which keeps the model's arithmetic in float32.
    return module.from_numpy(column).to(module.tensor(values[0]).dtype)


def _with_first_repeated(column: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    missing = rows - len(column)
    if not missing:
        return column
    return np.concatenate([column, np.repeat(column[:1] if len(column) else np.zeros(1, column.dtype), missing)])


def on_host(value: Any) -> Any:
    """The tensor without autograd history and in host memory: one transfer for a whole batch, not one a slice."""
    if isinstance(value, _ndarray):
        return value
    if value.requires_grad:
        value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    return value


def resize(value: Any, axis: int, length: int, fill: float) -> Any:
    """The tensor with dimension `axis` cut or padded to `length`."""
    if value.shape[axis] > length:
        return value[(slice(None),) * axis + (slice(length),)]
    return pad_concat([value], axis, length, fill, left=False, rows=value.shape[0])


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the memory of host or device does not suffice. Needs no torch to know torch's."""
    return isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "torch"
        for kind in type(error).__mro__
    )


def release_unused() -> None:
    """Gives back memory that is kept for later: garbage in circles, free batch buffers, torch's cache."""
    gc.collect()
    buffers.release_unused()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

"""Values to bytes in a slot and back.

Plain values, that is tensors in tuples, lists and dicts of any depth, are written as a *header* that names the
structure, dtypes and shapes, followed by the raw bytes of each tensor, 64-byte aligned:

    header length (4 bytes) | header | padding | tensor bytes | padding | tensor bytes ...

A server sees the same few shapes over and over, so both sides remember: a header is made, and read, once per layout.
Everything else (strings, images, objects, dtypes that are not raw numbers) goes through pickle protocol 5, whose large
buffers travel beside the pickle instead of inside it:

    0xFFFFFFFF (4 bytes) | number of buffers (4) | pickle length (8) | buffer lengths (8 each) | pickle | buffer | ...

Only processes of one user on one machine read these bytes; nothing that came over a network is decoded here.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from batch_inference import tensors
from batch_inference.errors import BatchInferenceError, ModelError, RemoteTraceback, TransportError
from batch_inference.transport.wire import align

Memory = mmap.mmap | bytearray

_LEAF = None  # the template of a tensor; containers are (name, keys or None, templates)
_PICKLED = 0xFFFF_FFFF
_U32 = struct.Struct("=I")
_PICKLE_HEAD = struct.Struct("=IIQ")
_REMEMBERED = 4096  # layouts per direction; forgotten all at once when there are more


class Encoded:
    """A value ready to be written: `size` bytes, by `write(memory, offset)`."""

    __slots__ = ("size", "_layout", "_leaves")

    def __init__(self, layout: _Layout, leaves: tuple[Any, ...] | list[Any]) -> None:
        self._layout = layout
        self._leaves = leaves
        self.size = layout.size

    def write(self, memory: Memory, offset: int) -> None:
        layout = self._layout
        memory[offset : offset + layout.head_size] = layout.head
        for leaf, at in zip(self._leaves, layout.offsets):
            tensors.write(leaf, memory, offset + at)


class _Pickled:
    """The same for a value that goes through pickle."""

    __slots__ = ("size", "_parts")

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        size = 0
        for part in parts:
            size = align(size) + len(part)
        self.size = size

    def write(self, memory: Memory, offset: int) -> None:
        at = 0
        for part in self._parts:
            at = align(at)
            memory[offset + at : offset + at + len(part)] = part
            at += len(part)


class _Layout:
    """Where everything lies in the bytes of a plain value of one structure, with given dtypes and shapes."""

    __slots__ = ("template", "specs", "offsets", "head", "head_size", "size", "single", "flat")

    def __init__(self, template: Any, specs: tuple[tensors.Spec, ...]) -> None:
        header = pickle.dumps((template, specs), protocol=5)
        self.template = template
        self.specs = specs
        self.head = _U32.pack(len(header)) + header
        self.head_size = len(self.head)
        self.offsets = []
        self.size = self.head_size
        for spec in specs:
            self.offsets.append(align(self.size))
            self.size = align(self.size) + tensors.nbytes(spec)
        self.single = template is _LEAF
        self.flat = not self.single and template[0] == "tuple" and all(part is _LEAF for part in template[2])


_by_value: dict[Any, _Layout] = {}
_by_header: dict[bytes, _Layout] = {}


def encode(value: Any) -> Encoded | _Pickled:
    """Prepares `value` for writing; TypeError for what cannot travel (sparse and quantised tensors)."""
    if type(value) is tuple:  # a request: the arguments of predict
        specs: Any = tuple(map(tensors.spec, value))
        layout = _by_value.get(specs)
        if layout is not None:
            return Encoded(layout, value)
        if specs and None not in specs:
            return Encoded(_remember(specs, ("tuple", None, (_LEAF,) * len(specs)), specs), value)
    elif (spec := tensors.spec(value)) is not None:
        layout = _by_value.get(spec)
        if layout is None:
            layout = _remember(spec, _LEAF, (spec,))
        return Encoded(layout, (value,))
    leaves: list[Any] = []
    try:
        template = _flatten(value, leaves)
    except _NotPlainError:
        return _pickled(value)
    specs = tuple(map(tensors.spec, leaves))
    layout = _by_value.get((template, specs))
    if layout is None:
        layout = _remember((template, specs), template, specs)
    return Encoded(layout, leaves)


def decode(memory: Memory, offset: int, length: int, *, lend: bool = False) -> Any:
    """The value whose `length` bytes start at `offset`.

    Its tensors own their memory, or with `lend=True`, those of a plain value are views of `memory`.
    TransportError when the bytes are not what `encode` writes.
    """
    (head,) = _U32.unpack_from(memory, offset)
    if head == _PICKLED:
        return _unpickle(memory, offset, length)
    if head + 4 > length:
        raise TransportError(f"an encoded value of {length} bytes claims a header of {head}: the slot was overwritten")
    header = bytes(memory[offset + 4 : offset + 4 + head])
    layout = _by_header.get(header)
    if layout is None:
        layout = _learn(header)
    if layout.size > length:
        raise TransportError(f"an encoded value of {length} bytes claims {layout.size}: the slot was overwritten")
    read: Callable[[tensors.Spec, Memory, int], Any] = tensors.view if lend else tensors.copy
    if layout.single:
        return read(layout.specs[0], memory, offset + layout.offsets[0])
    leaves = [read(spec, memory, offset + at) for spec, at in zip(layout.specs, layout.offsets)]
    return tuple(leaves) if layout.flat else _build(layout.template, iter(leaves))


def _remember(key: Any, template: Any, specs: Any) -> _Layout:
    if len(_by_value) >= _REMEMBERED:
        _by_value.clear()
    layout = _by_value[key] = _Layout(template, specs)
    return layout


def _learn(header: bytes) -> _Layout:
    if len(_by_header) >= _REMEMBERED:
        _by_header.clear()
    try:
        template, specs = pickle.loads(header)
        layout = _by_header[header] = _Layout(template, specs)
    except Exception as error:
        raise TransportError(
            f"the header of an encoded value cannot be read ({error}): the slot was overwritten"
        ) from error
    return layout


class _NotPlainError(Exception):
    pass


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """The structure of `value`, hashable; appends its tensors to `leaves`. _NotPlainError if it holds anything else."""
    if tensors.spec(value) is not None:
        leaves.append(value)
        return _LEAF
    kind = type(value)
    if kind is tuple or kind is list:
        if value:
            return (kind.__name__, None, tuple([_flatten(part, leaves) for part in value]))
    elif isinstance(value, Mapping) and value and all(type(key) is str for key in value):
        return ("dict", tuple(value), tuple([_flatten(part, leaves) for part in value.values()]))
    raise _NotPlainError


def _build(template: Any, leaves: Any) -> Any:
    if template is _LEAF:
        return next(leaves)
    name, keys, parts = template
    built = [_build(part, leaves) for part in parts]
    if name == "dict":
        return dict(zip(keys, built))
    return tuple(built) if name == "tuple" else built


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, for classes and functions of __main__, with tensors as raw buffers on the host."""

    def reducer_override(self, obj: Any) -> Any:
        spec = tensors.spec(obj)
        if spec is None and tensors.is_tensor(obj):
            tensors.check_sendable(obj)
        elif spec is not None and spec[0] == "torch":
            memory = bytearray(tensors.nbytes(spec))
            tensors.write(obj, memory, 0)
            return _rebuild, (spec, pickle.PickleBuffer(memory))
        return super().reducer_override(obj)


def _rebuild(spec: tensors.Spec, memory: bytearray) -> Any:
    return tensors.view(spec, memory, 0)


def _pickled(value: Any) -> _Pickled:
    if type(value) is tuple:
        value = tuple(dict(v) if isinstance(v, Mapping) and type(v) is not dict else v for v in value)
    buffers: list[pickle.PickleBuffer] = []
    data = b""
    if "torch" not in sys.modules:  # the quick way: the C pickler, which knows no classes of __main__
        try:
            data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        except Exception:
            pass  # cloudpickle may still know how; if not, its error is the better one
    if not data or b"__main__" in data:
        buffers.clear()
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        data = stream.getvalue()
    raw = [buffer.raw() for buffer in buffers]
    head = _PICKLE_HEAD.pack(_PICKLED, len(raw), len(data)) + struct.pack(f"={len(raw)}Q", *map(len, raw))
    return _Pickled([head + data, *raw])


def _unpickle(memory: Memory, offset: int, length: int) -> Any:
    try:
        _, count, size = _PICKLE_HEAD.unpack_from(memory, offset)
        lengths = struct.unpack_from(f"={count}Q", memory, offset + _PICKLE_HEAD.size)
        start = _PICKLE_HEAD.size + 8 * count
        data = bytes(memory[offset + start : offset + start + size])
        at, buffers = start + size, []
        for n in lengths:
            at = align(at)
            buffers.append(bytearray(memory[offset + at : offset + at + n]))
            at += n
        if at > length:
            raise TransportError(f"an encoded value of {length} bytes claims {at}: the slot was overwritten")
    except (struct.error, OverflowError, MemoryError) as error:
        raise TransportError(f"an encoded value cannot be read ({error}): the slot was overwritten") from error
    return pickle.loads(data, buffers=buffers)


def encode_error(error: BaseException) -> Encoded | _Pickled:
    """An exception with its traceback as text, in whatever form can be read back in another process."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled = cloudpickle.dumps(error)
        if type(pickle.loads(pickled)) is not type(error):
            pickled = None
    except Exception:
        pickled = None
    try:
        message = str(error)
    except Exception as broken:
        message = f"<its __str__ raised {type(broken).__name__}>"
    return _pickled((pickled, kind, message, text))


def decode_error(memory: Memory, offset: int, length: int) -> BaseException:
    """The exception to raise in the caller, with the remote traceback as its cause."""
    pickled, kind, message, text = decode(memory, offset, length)
    error: BaseException | None = None
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception:
            error = None
    if not isinstance(error, BaseException):
        error = ModelError(
            f"{kind}: {message}\nThe exception itself cannot be passed between processes (its class cannot be "
            "pickled, or "
            f"is not importable here), so this stands for it. Remote traceback:\n{text}"
        )
    if not (isinstance(error, BatchInferenceError) and error.__cause__ is not None):
        error.__cause__ = RemoteTraceback(text)
    return error

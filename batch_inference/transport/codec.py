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

import contextlib
import copyreg
import io
import mmap
import pickle
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle

from batch_inference import by_value, tensors
from batch_inference.errors import BatchInferenceError, ModelError, RemoteTraceback, TransportError
from batch_inference.speedups import in_c
from batch_inference.transport.wire import align

Memory = mmap.mmap | bytearray

_LEAF = None  # the template of a tensor; containers are (name, keys or None, templates)
_REQUEST_OF_ONE = ("tuple", None, (_LEAF,))
_PICKLED = 0xFFFF_FFFF
_U32 = struct.Struct("=I")
_PICKLE_HEAD = struct.Struct("=IIQ")
_REMEMBERED = 4096  # layouts per direction; forgotten all at once when there are more


class Pieces(Protocol):
    """A value whose bytes are copied straight to their places."""

    def __len__(self) -> int: ...
    def write(self, memory: Memory, offset: int) -> None: ...


Encoded = bytes | Pieces
"""A value ready to be written; one of few bytes is put together already. `len` gives the bytes it takes."""


def write(encoded: Encoded, memory: Memory, offset: int) -> None:
    if type(encoded) is bytes:
        memory[offset : offset + len(encoded)] = encoded
    else:
        encoded.write(memory, offset)  # type: ignore[union-attr]


class _Large:
    """A plain value with large tensors, or with some that must be converted."""

    __slots__ = ("_layout", "_leaves")

    def __init__(self, layout: Layout, leaves: Sequence[Any]) -> None:
        self._layout = layout
        self._leaves = leaves

    def __len__(self) -> int:
        return self._layout.size

    def write(self, memory: Memory, offset: int) -> None:
        layout = self._layout
        memory[offset : offset + len(layout.head)] = layout.head
        for leaf, at in zip(self._leaves, layout.offsets):
            tensors.write(leaf, memory, offset + at)


class _Pickled:
    """A value that goes through pickle."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        size = 0
        for part in self._parts:
            size = align(size) + len(part)
        return size

    def write(self, memory: Memory, offset: int) -> None:
        at = 0
        for part in self._parts:
            at = align(at)
            memory[offset + at : offset + at + len(part)] = part
            at += len(part)


class Layout:
    """Where everything lies in the bytes of a plain value of one structure, with given dtypes and shapes.

    There is one object per layout that arrives, so it can stand for structure, dtypes and shapes as a key. For a numpy
    array, or a request of one, `only` is its dtype, its shape, where its bytes start, and whether it is a request.
    """

    __slots__ = ("template", "offsets", "head", "size", "view", "copy", "small", "prefix", "only", "_fillers")

    def __init__(self, template: Any, specs: tuple[tensors.Spec, ...]) -> None:
        header = pickle.dumps((template, specs), protocol=5)
        self.template = template
        self.head = _U32.pack(len(header)) + header
        self.size = len(self.head)
        self.offsets: list[int] = []
        fillers = []  # what comes before each tensor
        for spec in specs:
            start = align(self.size)
            fillers.append(bytes(start - self.size) if self.offsets else self.head.ljust(start, b"\0"))
            self.offsets.append(start)
            self.size = start + tensors.nbytes(spec)
        self.small = self.size <= _SMALL and all(map(tensors.has_tobytes, specs))  # put together before it is written
        self._fillers = fillers
        self.prefix = fillers[0] if len(specs) == 1 else None  # of the bytes of the only tensor
        self.only = None
        if (dtype := tensors.numpy_dtype(specs[0])) is not None and template in (_LEAF, _REQUEST_OF_ONE):
            self.only = dtype, specs[0][2], self.offsets[0], template is not _LEAF
        self.view = self._reader(specs, lend=True)
        self.copy = self._reader(specs, lend=False)

    def _reader(self, specs: tuple[tensors.Spec, ...], *, lend: bool) -> Callable[[Memory, int], Any]:
        """A function of memory and offset that gives the value there, as views or with memory of its own."""
        readers = [tensors.reader(spec, at, lend=lend) for spec, at in zip(specs, self.offsets)]
        template, first = self.template, readers[0]
        if template is _LEAF:
            return first
        if template == _REQUEST_OF_ONE:
            return lambda memory, offset: (first(memory, offset),)
        if template[0] == "tuple" and all(part is _LEAF for part in template[2]):
            return lambda memory, offset: tuple([read(memory, offset) for read in readers])
        return lambda memory, offset: _build(template, iter([read(memory, offset) for read in readers]))

    def encode(self, leaves: Sequence[Any]) -> Encoded:
        if not self.small:
            return _Large(self, leaves)
        return b"".join([part for filler, leaf in zip(self._fillers, leaves) for part in (filler, leaf.tobytes())])


_SMALL = 1 << 14

_by_value: dict[Any, Layout] = {}
_array_prefixes: dict[Any, bytes] = {}  # the two commonest values, a small array and
_call_prefixes: dict[Any, bytes] = {}  # a request of one, are their bytes after these
_by_header: dict[bytes, Layout] = {}
_latest: Layout | None = None  # the last that was read: most often the next one too


@in_c
def encode(value: Any) -> Encoded:
    """Prepares `value` for writing; TypeError for what cannot travel (sparse and quantised tensors)."""
    if type(value) is tensors.ARRAY:  # mostly a reply
        try:  # not get(): without the interpreter lock it takes a lock, and threads would take turns at it
            return _array_prefixes[value.dtype, value.shape] + value.tobytes()  # type: ignore[no-any-return]
        except KeyError:
            pass
    return encode_any(value)


def encode_any(value: Any) -> Encoded:
    """The same, and it is remembered how values of this layout are encoded."""
    if type(value) is tuple:  # tensors side by side are told by their specs alone
        specs: Any = tuple(map(tensors.spec, value))
        try:
            layout = _by_value[specs]
        except KeyError:
            pass
        else:
            return layout.encode(value)
        if specs and None not in specs:
            return _remember(specs, ("tuple", None, (_LEAF,) * len(specs)), specs, value).encode(value)
    if (spec := tensors.spec(value)) is not None:
        layout = _by_value.get(spec) or _remember(spec, _LEAF, (spec,), value)
        return layout.encode((value,))
    leaves: list[Any] = []
    try:
        template = _flatten(value, leaves)
    except _NotPlainError:
        return _pickled(value)
    specs = tuple(map(tensors.spec, leaves))
    layout = _by_value.get((template, specs)) or _remember((template, specs), template, specs, value)
    return layout.encode(leaves)


def prefix_of(value: Any) -> bytes | None:
    """What comes before the bytes of a numpy array, or of a request of one; None if it does not travel as it is."""
    request = type(value) is tuple
    spec = tensors.spec(value[0] if request else value)
    if spec is None:
        return None
    key, template = ((spec,), _REQUEST_OF_ONE) if request else (spec, _LEAF)
    return (_by_value.get(key) or _remember(key, template, (spec,), value)).prefix


@in_c
def encode_request(args: tuple[Any, ...]) -> Encoded:
    """`encode` for the arguments of a request; TypeError that names the one that cannot travel."""
    if len(args) == 1 and type(array := args[0]) is tensors.ARRAY:
        try:
            return _call_prefixes[array.dtype, array.shape] + array.tobytes()  # type: ignore[no-any-return]
        except KeyError:
            pass
    return encode_any_request(args)


def encode_any_request(args: tuple[Any, ...]) -> Encoded:
    """The same, and it is remembered how requests of this layout are encoded."""
    try:
        return encode_any(args)
    except Exception as error:
        for index, argument in enumerate(args):
            try:
                encode(argument)
            except Exception:
                raise TypeError(
                    f"argument {index} of the request, of type {type(argument).__name__}, cannot be sent to the worker "
                    f"process: {error}. Send numpy arrays, tensors or other things that pickle; what the model always "
                    "needs is made in its __init__"
                ) from error
        raise


@in_c
def decode(memory: Memory, offset: int, length: int, *, lend: bool = False) -> Any:
    """The value whose `length` bytes start at `offset`.

    Its tensors own their memory, or with `lend=True`, those of a plain value are views of `memory`.
    TransportError when the bytes are not what `encode` writes.
    """
    layout = layout_at(memory, offset, length)
    if layout is None:
        return unpickle(memory, offset, length)
    return layout.view(memory, offset) if lend else layout.copy(memory, offset)


def layout_at(memory: Memory, offset: int, length: int) -> Layout | None:
    """The layout of the plain value at `offset`; None if it was pickled. TransportError as for `decode`."""
    global _latest
    layout = _latest
    if layout is None or memory[offset : offset + len(layout.head)] != layout.head:
        (head,) = _U32.unpack_from(memory, offset)
        if head == _PICKLED:
            return None
        if head + 4 > length:
            raise TransportError(
                f"an encoded value of {length} bytes claims a header of {head}: the slot was overwritten"
            )
        header = bytes(memory[offset + 4 : offset + 4 + head])
        _latest = layout = _by_header.get(header) or _learn(header)
    if layout.size > length:
        raise TransportError(f"an encoded value of {length} bytes claims {layout.size}: the slot was overwritten")
    return layout


def _remember(key: Any, template: Any, specs: Any, value: Any) -> Layout:
    if len(_by_value) >= _REMEMBERED:
        for remembered in (_by_value, _array_prefixes, _call_prefixes):
            remembered.clear()
    layout = _by_value[key] = Layout(template, specs)
    if layout.small and layout.prefix is not None:
        if type(value) is tensors.ARRAY:
            _array_prefixes[value.dtype, value.shape] = layout.prefix
        elif type(value) is tuple and type(value[0]) is tensors.ARRAY:
            _call_prefixes[value[0].dtype, value[0].shape] = layout.prefix
    return layout


def _learn(header: bytes) -> Layout:
    if len(_by_header) >= _REMEMBERED:
        _by_header.clear()
    try:
        template, specs = pickle.loads(header)
        layout = _by_header[header] = Layout(template, specs)
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
    elif (kind is dict or isinstance(value, Mapping)) and value and all(type(key) is str for key in value):
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
        return _reduce(obj) if tensors.is_tensor(obj) else super().reducer_override(obj)


def _reduce(tensor: Any) -> Any:
    """A tensor by its spec and bytes, where pickle would change it; TypeError for one that cannot be sent."""
    spec = tensors.spec(tensor)
    if spec is None:
        tensors.check_sendable(tensor)
    elif not tensors.pickles_as_sent(tensor):
        memory = bytearray(tensors.nbytes(spec))
        tensors.write(tensor, memory, 0)
        return _rebuild, (spec, pickle.PickleBuffer(memory))
    return tensor.__reduce_ex__(5)


_reducers: dict[type, Any] = {}


def _current_reducers() -> dict[type, Any]:
    """copyreg's, and ours for tensors; made anew when torch or a module that registers more was imported since."""
    global _reducers
    types = tensors.exact_types()
    if len(_reducers) != len(types) + len(copyreg.dispatch_table):
        _reducers = {**copyreg.dispatch_table, **dict.fromkeys(types, _reduce)}
    return _reducers


def _rebuild(spec: tensors.Spec, memory: bytearray) -> Any:
    return tensors.view(spec, memory, 0)


def _pickled(value: Any) -> Encoded:
    if type(value) is tuple:
        value = tuple(dict(v) if isinstance(v, Mapping) and type(v) is not dict else v for v in value)
    buffers: list[pickle.PickleBuffer] = []
    try:  # the quick way: the C pickler, which knows no classes of __main__
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=5, buffer_callback=buffers.append)
        pickler.dispatch_table = _current_reducers()
        pickler.dump(value)
        data = stream.getvalue()
    except Exception:
        data = b""  # cloudpickle may still know how; if not, its error is the better one
    if not data or any(name in data for name in by_value.SCRIPT_NAMES):
        by_value.prepare()
        buffers.clear()
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        data = stream.getvalue()
    raw = [buffer.raw() for buffer in buffers]
    head = _PICKLE_HEAD.pack(_PICKLED, len(raw), len(data)) + struct.pack(f"={len(raw)}Q", *map(len, raw))
    return _Pickled([head + data, *raw])


def unpickle(memory: Memory, offset: int, length: int) -> Any:
    """The pickled value whose `length` bytes start at `offset`. TransportError as for `decode`."""
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


def encode_error(error: BaseException) -> Encoded:
    """An exception with its traceback as text, in whatever form can be read back in another process."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pickled = None
    if isinstance(error, Exception):  # others, such as CancelledError, would mean something else where they are raised
        pickled = _pickled_error(error, error) or _pickled_error(_Frozen(error), error)
    try:
        message = str(error)
    except BaseException as broken:
        message = f"<its __str__ raised {type(broken).__name__}>"
    return _pickled((pickled, kind, message, text))


def _pickled_error(value: Any, error: Exception) -> bytes | None:
    """`value`, pickled, if what is read back is such an error; None if not."""
    by_value.prepare()
    try:
        pickled = cloudpickle.dumps(value)
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except BaseException:
        return None


class _Frozen:
    """An exception whose class forbids what pickle does on its way back, to set attributes: frozen dataclasses do."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _thaw, self._error.__reduce_ex__(5)


def _thaw(make: Callable[..., Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = make(*args)
    vars(error).update(attributes)
    return error


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
            "pickled, is not importable here, or is no subclass of Exception), so this stands for it. Remote "
            f"traceback:\n{text}"
        )
    if not (isinstance(error, BatchInferenceError) and error.__cause__ is not None):
        with contextlib.suppress(Exception):  # its class may forbid even this
            BaseException.__setattr__(error, "__cause__", RemoteTraceback(text))
    return error

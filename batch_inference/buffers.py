"""Batch buffers: memory that is used again for the next batch, unless the model kept something of it.

A fresh large array costs two to three times the copy that fills it, as the kernel has to find and clear its pages. So
each thread keeps a few base buffers. A base is *free* when only the list here refers to it: every array, slice, memory
view or torch tensor made from it holds a reference to it. One that a model kept is thereby left to the model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

# Smaller arrays come from malloc, which hands the same warm pages out again by itself.
WORTH_POOLING: Final = 64 * 1024
MAX_BUFFERS: Final = 16
_ALIGNMENT: Final = 64


class _Pool(threading.local):
    """The base buffers of one thread, least recently used first."""

    def __init__(self) -> None:
        self.bases: list[np.ndarray[Any, Any]] = []
        self.starts: list[int] = []  # where in each base the first aligned byte is


pool: Final = _Pool()


def array(shape: Sequence[int], dtype: np.dtype[Any], size: int) -> np.ndarray[Any, Any]:
    """An uninitialised array of `size` bytes, 64-byte aligned, that nobody else uses as long as anything refers to it.
    `dtype` must not hold objects."""
    bases, starts = pool.bases, pool.starts
    index = _free(bases, size + _ALIGNMENT)
    if index >= 0:
        base, start = bases.pop(index), starts.pop(index)
    else:
        base = np.empty(size + size // 4 + _ALIGNMENT, np.uint8)
        start = -base.ctypes.data % _ALIGNMENT
    if _REUSE:
        bases.append(base)
        starts.append(start)
    return np.ndarray(tuple(shape), dtype, base, start)


def _references(objects: list[Any], index: int) -> int:
    return sys.getrefcount(objects[index])


# What _references says of an object that only the list refers to. Measured, as interpreters differ.
_UNSHARED: Final = _references([object()], 0)
# Without the interpreter lock a count says nothing about other threads: then each batch gets fresh memory.
_REUSE: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()


def _free(bases: list[np.ndarray[Any, Any]], size: int) -> int:
    """The smallest free base of at least `size` bytes, by index; -1 if there is none, with room made for a new one."""
    fitting, small = -1, -1
    for index in range(len(bases)):
        if _references(bases, index) != _UNSHARED:
            continue
        capacity = len(bases[index])
        if capacity >= size:
            if fitting < 0 or capacity < len(bases[fitting]):
                fitting = index
        elif small < 0 or capacity > len(bases[small]):
            small = index
    if fitting < 0 and (small >= 0 or len(bases) >= MAX_BUFFERS):
        # A free one that is too small goes first: so there are only as many buffers as are in use at once.
        del bases[max(small, 0)], pool.starts[max(small, 0)]
    return fitting


def release_unused() -> None:
    """Lets go of this thread's free base buffers."""
    used = [index for index in range(len(pool.bases)) if _references(pool.bases, index) != _UNSHARED]
    pool.bases[:] = [pool.bases[index] for index in used]
    pool.starts[:] = [pool.starts[index] for index in used]

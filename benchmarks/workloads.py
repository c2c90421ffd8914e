"""The work that we and our peers are measured on: what callers send, what the model does with it, what must come back.

The model runs wherever a contender puts it, so everything here needs numpy only. It counts its batches and rows in a
small file that all processes map; the environment says where (see `peers.contender`).
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_BATCH = 64
"""Rows in a batch at most, for everyone."""
BUCKETS = (16, 32, 64, 96, 128)
FIXED, PER_ROW, PER_TOKEN = 2e-3, 20e-6, 0.3e-6
STEP = 128
"""Values of one caller are so far apart: no two callers ever send the same."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """One float32 array a request; the first and the last element of the answer are `factor` times those sent."""

    shape: tuple[int, ...]
    answer: tuple[int, ...]
    factor: int = 1

    def stream(self, caller: int) -> Iterator[tuple[Any, int]]:
        """Requests of one caller, each with a value of its own, and the value that must come back."""
        x = request(caller, self.shape)
        ends = x.reshape(-1)
        value = caller
        while True:
            value = value + STEP if value < 8_000_000 else caller  # float32 counts exactly up to 16.7 million
            ends[0] = ends[-1] = value
            yield x, value * self.factor


@dataclass(frozen=True)
class Tokens:
    """Ids and mask, [1, length] int64 each, of 4 to 128 tokens; the answer is a float32 row with twice the first id."""

    answer: tuple[int, ...] = (1, 16)

    def stream(self, caller: int) -> Iterator[tuple[Any, int]]:
        lengths = [4 + 61 * (8 * caller + index) % 125 for index in range(8)]
        pairs = [(np.full((1, length), caller, np.int64), np.ones((1, length), np.int64)) for length in lengths]
        for number, pair in enumerate(itertools.cycle(pairs)):
            value = caller + STEP * (number % 60_000)
            pair[0][0, 0] = value
            yield pair, 2 * value


Work = Rows | Tokens


def echo(shape: tuple[int, ...]) -> Rows:
    """For a model that gives back what it gets."""
    return Rows(shape, shape)


def request(caller: int, shape: tuple[int, ...]) -> Array:
    return np.full(shape, caller, np.float32)


def right(answer: Any, shape: tuple[int, ...], value: int) -> bool:
    """Two elements only: the check is inside the loop that is measured."""
    return bool(answer.shape == shape and answer.item(0) == value and answer.item(-1) == value)


@dataclass(frozen=True)
class Workload:
    name: str
    """In a word or two, for figures."""
    title: str
    work: Work
    burns: bool = False
    """Whether callers burn 1 ms of pure Python before each request (it does not count as latency)."""
    processes: int = 1
    """Processes that the callers are spread over."""
    spread: bool = False
    """Whether callers may use every core, not only the first."""
    lasts: float = 1.0
    """Windows are so many times longer: for slow requests."""


def _rows(*shape: int, answer: tuple[int, ...] | None = None) -> Rows:
    return Rows((1, *shape), (1, *(answer or shape)), factor=2)


WORKLOADS = {
    "a": Workload("no cost", "[1,16] float32, a model without cost", _rows(16)),
    "b": Workload("2 ms", "[1,256], a model that takes 2 ms + 20 us a row", _rows(256)),
    "c": Workload("600 KB in", "a 600 KB image in, 4 KB out", _rows(3, 224, 224, answer=(1000,))),
    "d": Workload("4 MiB both ways", "4 MiB in, 4 MiB out", _rows(1 << 20), lasts=2),
    "e": Workload("busy callers", "as (b), each caller burns 1 ms of pure Python a request", _rows(256), burns=True),
    "e2": Workload(
        "busy callers and model", "as (e), and the model holds the GIL for 4 ms a batch", _rows(256), burns=True
    ),
    "f": Workload("4 processes", "as (b), callers spread over 4 processes", _rows(256), processes=4),
    "f2": Workload(
        "4 processes, busy", "as (e), callers spread over 4 processes and all cores", _rows(256), True, 4, spread=True
    ),
    "g": Workload("mixed lengths", "token pairs of length 4-128, 2 ms + 0.3 us a token, padding included", Tokens()),
}


def burn(iterations: int) -> int:
    """Pure Python that holds the interpreter lock."""
    total = 0
    for number in range(iterations):
        total += number & 7
    return total


def iterations_per_ms() -> int:
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        burn(20_000)
        best = min(best, time.perf_counter() - begin)
    return max(1, int(20_000 * 1e-3 / best))


class Counts:
    """Batches and rows of a model, in a file. One writer; readers may be anywhere."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            file.truncate(16)
            self._map = mmap.mmap(file.fileno(), 16)

    def read(self) -> tuple[int, int]:
        batches, rows = struct.unpack_from("qq", self._map)
        return batches, rows

    def add(self, rows: int) -> None:
        batches, before = self.read()
        struct.pack_into("qq", self._map, 0, batches + 1, before + rows)


class Model:
    """The model of a workload."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: Counts | None = None  # opened by the process that runs it

    def predict_batch(self, x: Array, mask: Array | None = None) -> Array:
        if self._counts is None:
            self._counts = Counts(os.environ["BENCH_COUNTS"])
        self._counts.add(len(x))
        return compute(self._name, x)

    def predict_list(self, requests: Sequence[Any]) -> list[Array]:
        """For peers that hand over a list and leave merging to the model."""
        if isinstance(WORKLOADS[self._name].work, Tokens):
            longest = max(ids.shape[1] for ids, _ in requests)
            columns = (
                [np.pad(pair[i], ((0, 0), (0, longest - pair[i].shape[1]))) for pair in requests] for i in (0, 1)
            )
            y = self.predict_batch(*map(np.concatenate, columns))
        else:
            y = self.predict_batch(np.concatenate(requests) if len(requests) > 1 else requests[0])
        return [y[index : index + 1] for index in range(len(requests))]


def compute(name: str, x: Array) -> Array:
    if name in ("b", "e", "f", "f2"):
        time.sleep(FIXED + PER_ROW * len(x))
    elif name == "e2":
        burn(4 * int(os.environ["BENCH_BURN"]))
    elif name == "c":
        flat = x.reshape(len(x), -1)
        y = np.repeat(flat.mean(axis=1, dtype=np.float32)[:, None], 1000, axis=1)
        y[:, 0], y[:, -1] = 2 * flat[:, 0], 2 * flat[:, -1]
        return y
    elif name == "g":
        time.sleep(FIXED + PER_TOKEN * x.size)
        return np.repeat(2 * x[:, :1], 16, axis=1).astype(np.float32)
    return x * 2

"""A model, a batcher and values that strike in a named way when a marked request reaches a named place.

Workers import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any, NoReturn

from batch_inference.batcher import ListBatcher
from batch_inference.testing import alive
from tests.faults import table

BATCH = 3
"""max_batch_size of the hosts here: so many requests of weight 1, or one of this weight."""


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Item:
    """A request: what comes back is twice its number. Strikes at `place`, once there is a file `gate`; it says that it
    is there with a file of the name `here(gate)`."""

    def __init__(
        self, number: int, weight: int = 1, place: str = "", fault: str = "", gate: str = "", caller: int = 0
    ) -> None:
        self.number = number
        self.weight = weight
        self.place = place
        self.fault = fault
        self.gate = gate
        self.caller = caller

    def __reduce__(self) -> Any:
        return arrive, (self.number, self.weight, self.place, self.fault, self.gate, self.caller)

    def reaches(self, place: str) -> None:
        if place == self.place:
            strike(self.fault, self.gate, self.caller, f"strike of {self.number}")


def arrive(*fields: Any) -> Item:
    """How a request is unpickled, which happens in the worker."""
    item = Item(*fields)
    item.reaches(table.DECODING)
    return item


class Reply:
    """What a request that strikes while it is encoded gets."""

    def __init__(self, item: Item) -> None:
        self.item = item

    def __reduce__(self) -> Any:
        self.item.reaches(table.ENCODING)
        return int, (2 * self.item.number,)


class Strikes(ListBatcher):
    def size(self, request: tuple[Item, ...]) -> int:
        request[0].reaches(table.TAKING)
        return request[0].weight

    def kind(self, request: tuple[Item, ...]) -> int:
        return request[0].weight

    def batch(self, requests: list[tuple[Item, ...]]) -> tuple[Any, Any]:
        for (item,) in requests:
            item.reaches(table.COLLATING)
        return [[item for (item,) in requests]], [item for (item,) in requests]

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        for item in context:
            item.reaches(table.SCATTERING)
        return list(batched_response)


class Struck:
    """Strikes at its load number `load` as `fault` says; counts its loads in the folder `loads`."""

    def __init__(self, loads: str = "", load: int = 0, fault: str = "", gate: str = "", caller: str = "") -> None:
        if loads:
            number = 1 + len(os.listdir(loads))
            with open(os.path.join(loads, f"{number} {os.getpid()}"), "w"):
                pass
            if number == load:
                pid = 0
                if caller:
                    with open(caller) as file:
                        pid = int(file.read())
                strike(fault, gate, pid, f"strike of load {number}")

    def predict_batch(self, items: list[Item]) -> list[Any]:
        for item in items:
            item.reaches(table.RUNNING)
            if item.place == table.IDLE:
                threading.Thread(target=item.reaches, args=(table.IDLE,), daemon=True).start()
        return [Reply(item) if item.place == table.ENCODING else 2 * item.number for item in items]


def here(gate: str) -> str:
    return f"{gate}.here"


def strike(fault: str, gate: str, caller: int, text: str) -> None:
    """Waits for the gate to open, and does what `fault` says; nothing, if that is empty."""
    with open(here(gate), "w"):
        pass
    while not os.path.exists(gate):
        time.sleep(0.002)
    if fault == table.CALLER_GONE:
        os.kill(caller, signal.SIGKILL)
        while alive(caller):
            time.sleep(0.002)
    elif fault:
        fall(fault, text)


def fall(fault: str, text: str) -> NoReturn:
    if fault == table.RAISE:
        raise ValueError(text)
    if fault == table.UNPICKLABLE:
        raise LockedError(text)
    if fault == table.EXIT:
        os._exit(7)
    if fault == table.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == table.SEGFAULT:
        ctypes.string_at(0)
    elif fault == table.STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1)

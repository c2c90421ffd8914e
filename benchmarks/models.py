"""Models that cost nothing or only time, so that what is measured is the library."""

from __future__ import annotations

import os
import time
from typing import Any


class Echo:
    """Gives back the batch it gets."""

    def predict_batch(self, x: Any) -> Any:
        return x


class ProfiledEcho(Echo):
    """The same under cProfile, which is turned on in the thread that builds the model: the worker's own loop.

    A request whose rows have one element makes it write what it found to `path`.
    """

    def __init__(self, path: str) -> None:
        import cProfile

        self._path = path
        self._profile = cProfile.Profile()
        self._profile.enable()

    def predict_batch(self, x: Any) -> Any:
        if x.shape[1:] == (1,):
            self._profile.disable()
            self._profile.dump_stats(self._path)
        return x


class Sleeps:
    """Gives back the batch it gets after `fixed + rows * per_row` seconds, in which it uses no CPU."""

    def __init__(self, fixed: float, per_row: float) -> None:
        self._fixed = fixed
        self._per_row = per_row

    def predict_batch(self, x: Any) -> Any:
        time.sleep(self._fixed + self._per_row * len(x))
        return x


class Held(Echo):
    """Gives back nothing until there is a file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open = False

    def predict_batch(self, x: Any) -> Any:
        while not self._open and not os.path.exists(self._path):
            time.sleep(0.001)
        self._open = True
        return x

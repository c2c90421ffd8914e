"""Models that show what a batcher gave them. Workers import this module, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Point:
    x: int
    label: str


class Everything:
    """Gives back all it gets, but for what has no rows."""

    def predict_batch(self, *arguments):
        return {str(index): kept(argument) for index, argument in enumerate(arguments) if argument is not None}


class Spoils:
    """Gives back its input, which it then spoils, and keeps what it gave the last time."""

    def __init__(self):
        self.kept = []

    def predict_batch(self, x):
        answer = x.copy()
        x[...] = -1
        self.kept = [*self.kept[-20:], x]
        return answer


class Refuses(Spoils):
    """The same, but for batches with a negative number, which it spoils as well."""

    def predict_batch(self, x):
        bad = (x < 0).any()
        answer = super().predict_batch(x)
        if bad:
            raise ValueError("negative input")
        return answer


class Sequences:
    def predict_batch(self, ids, features, mask):
        return {"ids": ids * mask, "features": features, "lengths": mask.sum(1)}


class Same:
    def predict_batch(self, values):
        return values


def kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return type(value)(kept(item) for item in value if item is not None)
    return value

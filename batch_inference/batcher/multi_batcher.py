"""MultiBatcher: several model calls for one batch of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .batcher import Batcher, Request


class MultiBatcher(Batcher):
    """Base for batchers that divide the requests they get into several model calls.

    `batch` returns a list of batched requests, each as `Batcher.batch` would return one; the model is called once for
    each, in order, and `unbatch` gets the list of what it returned.
    """

    def batch(self, requests: list[Request]) -> tuple[list[Any], Any]:
        """Merge requests into ``(list of batched requests, context)``."""
        raise NotImplementedError(f"{type(self).__name__} has no batch()")

    def unbatch(self, batched_response: list[Any], context: Any) -> list[Any]:
        """One response per request, in the order of the requests, from the responses to the batched requests."""
        raise NotImplementedError(f"{type(self).__name__} has no unbatch()")

    def owners(self, requests: list[Request], context: Any) -> Sequence[int] | None:
        """Not known: a row is one of any of several calls."""
        return None

"""The base of all batchers: how requests become one model call and its result becomes their responses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ..errors import RequestTooLargeError

Request = tuple[Any, ...]


class Batcher:
    """How requests are batched. Subclass it and write `batch` and `unbatch`; every hook runs in the worker process.

    A *request* is the tuple of the arguments of one ``host.predict(...)`` call. The other hooks have defaults that
    suit a model for which every request is one item and any two requests fit together.
    """

    borrows = False
    """True promises that `batch` copies everything it uses, so that it may be lent views of the callers' memory."""

    by_shape = False
    """True promises that `size` and `kind` depend on nothing but the structure, dtypes and shapes of a request."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that brings its own `batch` does not inherit the promise of the one it replaces."""
        super().__init_subclass__(**options)
        owner = next(parent for parent in cls.__mro__ if "batch" in vars(parent))
        if cls.borrows and "borrows" not in vars(owner):
            cls.borrows = False
        if cls.by_shape and {"size", "kind"} & set(vars(cls)) and "by_shape" not in vars(cls):
            cls.by_shape = False

    def batch(self, requests: list[Request]) -> tuple[Any, Any]:
        """Merge requests into ``(batched_request, context)``.

        A plain tuple or list as `batched_request` gives the arguments of ``predict_batch(*batched_request)``; anything
        else is its only argument. `context` is whatever `unbatch` needs to know.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch()")

    def unbatch(self, batched_response: Any, context: Any) -> list[Any]:
        """Divide what the model returned into one response per request, in the order of the requests."""
        raise NotImplementedError(f"{type(self).__name__} has no unbatch()")

    def size(self, request: Request) -> int:
        """What the request counts towards ``max_batch_size``."""
        return 1

    def kind(self, request: Request) -> Hashable:
        """Only requests of equal kind share a batch."""
        return None

    def split(self, request: Request, limit: int) -> list[Request]:
        """Divide a request larger than `limit` into requests of at most `limit`, in order."""
        raise RequestTooLargeError(
            f"a request of size {self.size(request)} is larger than max_batch_size={limit}, and {type(self).__name__} "
            "has no split() to divide it: send smaller requests, raise max_batch_size, or give the batcher split() "
            "and join()"
        )

    def join(self, responses: list[Any]) -> Any:
        """The response to a request that was split, from the responses to its parts."""
        raise NotImplementedError(f"{type(self).__name__} has split() but no join()")

    def owners(self, requests: list[Request], context: Any) -> Sequence[int] | None:
        """For each row of the batch that `batch` made of `requests`, the index of the request that it belongs to: for a
        model that says which rows failed (ItemErrors). The default: `size(request)` rows each, in order. None, where
        that is not known, has the batch divided until the requests are found."""
        return [index for index, request in enumerate(requests) for _ in range(self.size(request))]

    def check_limit(self, max_batch_size: int) -> None:
        """ConfigError if batches of up to `max_batch_size` are not what this batcher was made for."""

    def padding(self, context: Any) -> tuple[int, int]:
        """``(elements that callers sent, elements the model was given)`` of a batch, for the statistics; (0, 0) where
        nothing is padded."""
        return 0, 0

    def warmup_requests(self, sample: Request, limit: int | None = None) -> Iterator[list[Request]]:
        """The batches to run before the host reports ready, made from one sample request; none larger than batches
        get under ``max_batch_size=limit``."""
        yield [sample]


def model_arguments(batched_request: Any) -> tuple[Any, ...]:
    """The positional arguments of predict_batch for what `batch` returned: see there. A subclass of tuple or list, such
    as torch's PackedSequence, is one argument."""
    if type(batched_request) is tuple:
        return batched_request
    if type(batched_request) is list:
        return tuple(batched_request)
    return (batched_request,)

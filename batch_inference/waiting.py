"""What waits in a worker: requests, queued by kind, from which batches are cut.

Only requests of one kind share a batch. The next batch is of the kind whose head has waited longest, so that no kind
starves.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from batch_inference.batcher.batcher import Batcher
from batch_inference.errors import BatcherError, RequestTooLargeError
from batch_inference.policy import Queue
from batch_inference.speedups import in_c
from batch_inference.transport import codec
from batch_inference.transport.incoming import Incoming
from batch_inference.transport.wire import OK

REMEMBERED = 4096  # layouts
ALONE = object()
"""The kind of requests under which a worker died: each is a batch of its own."""
ONE = -1
"""A limit on the size of a batch that lets one request through."""


class Request(Protocol):
    """A request that waits in the worker: an Incoming, or a Part of one."""

    args: tuple[Any, ...]
    size: int
    kind: Hashable
    arrived: int  # CLOCK_MONOTONIC in ns, as is
    deadline: int  # 0 for none

    @property
    def answers(self) -> int:
        """How many calls it stands for in the statistics."""
        ...

    def unwanted(self, now: int) -> bool: ...
    def claim(self, now: int, alone: bool) -> bool: ...
    def runs(self, alone: bool) -> None: ...
    def reply(self, encoded: codec.Encoded, status: int = OK) -> None: ...
    def drop(self) -> None: ...
    def fresh_args(self, lend: bool) -> tuple[Any, ...]: ...


class Part:
    """One of the requests that a request larger than a batch was split into."""

    __slots__ = ("args", "size", "kind", "arrived", "deadline", "answers", "_whole", "_index")

    def __init__(self, whole: Whole, index: int, args: tuple[Any, ...], size: int, kind: Hashable) -> None:
        self.args = args
        self.size = size
        self.kind = kind
        self.arrived = whole.incoming.arrived
        self.deadline = whole.incoming.deadline
        self.answers = int(index == 0)
        self._whole = whole
        self._index = index

    def unwanted(self, now: int) -> bool:
        return self._whole.over or self._whole.incoming.unwanted(now)

    def claim(self, now: int, alone: bool) -> bool:
        return not self._whole.over and self._whole.incoming.claim(now, alone)

    def runs(self, alone: bool) -> None:
        self._whole.incoming.runs(alone)

    def reply(self, encoded: codec.Encoded, status: int = OK) -> None:
        self._whole.settle(self._index, encoded, status)

    def drop(self) -> None:
        self._whole.drop()

    def fresh_args(self, lend: bool) -> tuple[Any, ...]:
        return self._whole.split(self._whole.incoming.fresh_args(lend))[self._index]


class Whole:
    """A request that was split: answered when its last part is, failed when its first part fails."""

    def __init__(self, incoming: Incoming, batcher: Batcher, limit: int) -> None:
        self.incoming = incoming
        self.over = False  # from then on the slot, and so the memory of parts that still wait, is the caller's again
        self._batcher = batcher
        self._limit = limit  # that it is split by
        self._responses: list[Any] = []
        self._missing = 0

    def split(self, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        parts = self._batcher.split(args, self._limit)
        if not parts:
            raise BatcherError(
                f"{type(self._batcher).__name__}.split gave no parts: it must divide a request into some"
            )
        return parts

    def parts(self, args: tuple[Any, ...]) -> list[Part]:
        """The requests to run in its place."""
        asked = [(part, *ask(self._batcher, part)) for part in self.split(args)]
        self._responses, self._missing = [None] * len(asked), len(asked)
        alone = self.incoming.alone
        return [
            Part(self, index, part, size, ALONE if alone else kind) for index, (part, size, kind) in enumerate(asked)
        ]

    def settle(self, index: int, encoded: codec.Encoded, status: int) -> None:
        if self.over:
            return
        if status != OK:
            self.over = True
            self.incoming.reply(encoded, status)
            return
        self._responses[index] = decoded(encoded)
        self._missing -= 1
        if self._missing:
            self.incoming.runs(alone=False)
        else:
            self.incoming.reply(codec.encode(self._batcher.join(self._responses)))
            self.over = True

    def drop(self) -> None:
        if not self.over:
            self.over = True
            self.incoming.drop()


def own_copy(response: Any) -> Any:
    """A copy that stays right when the model uses the memory of what it returned again."""
    return decoded(codec.encode(response))


def decoded(encoded: codec.Encoded) -> Any:
    memory = bytearray(len(encoded))
    codec.write(encoded, memory, 0)
    return codec.decode(memory, 0, len(memory), lend=True)


def ask(batcher: Batcher, args: tuple[Any, ...]) -> tuple[int, Hashable]:
    """Size and kind of a request, by the batcher's hooks; BatcherError when they are none."""
    size, kind = batcher.size(args), batcher.kind(args)
    try:
        size = operator.index(size)
    except TypeError:
        raise BatcherError(f"{type(batcher).__name__}.size must return a whole number, got {size!r}") from None
    try:
        hash(kind)
    except TypeError:
        raise BatcherError(f"{type(batcher).__name__}.kind must return something hashable, got {kind!r}") from None
    return size, kind


class Intake:
    """Makes requests of what arrives, by the hooks of a batcher.

    A batcher whose size and kind depend on nothing but structure, dtypes and shapes is asked once for each layout.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._known: dict[codec.Layout | None, tuple[int, Hashable]] = {}
        self._remembers = batcher.by_shape

    def sort(self, arrived: list[Incoming], start: int, limit: int, queues: dict[Hashable, deque[Request]]) -> int:
        """Queues what arrived, from index `start` on, as long as its layout is known and its size within `limit`; the
        index of the first request that takes more."""
        return sort_known(arrived, start, limit, queues, self._known, self._batcher.borrows, ALONE)

    def requests(self, incoming: Incoming, limit: int, most: int) -> Sequence[Request]:
        """The request that arrived, in parts if it is larger than a batch may be: `limit`, which was learned, or `most`
        for one that cannot be divided by it. Runs code of callers and batchers, which may raise, or end the process."""
        args, layout = incoming.decode(self._batcher.borrows, takes=True)
        size, kind = self._known.get(layout) or self._ask(incoming, args, layout)
        if size > limit:
            incoming.take()
            try:
                return Whole(incoming, self._batcher, limit).parts(args)
            except RequestTooLargeError:
                if size > most:
                    return Whole(incoming, self._batcher, most).parts(args)
            finally:
                incoming.rest()
        incoming.args, incoming.size, incoming.kind = args, size, ALONE if incoming.alone else kind
        return (incoming,)

    def _ask(self, incoming: Incoming, args: tuple[Any, ...], layout: codec.Layout | None) -> tuple[int, Hashable]:
        incoming.take()
        known = ask(self._batcher, args)
        incoming.rest()
        if layout is not None and self._remembers:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[layout] = known
        return known


@in_c
def sort_known(
    arrived: list[Incoming],
    start: int,
    limit: int,
    queues: dict[Hashable, deque[Request]],
    known: dict[codec.Layout | None, tuple[int, Hashable]],
    lend: bool,
    alone: Hashable,
) -> int:
    """See `Intake.sort`. `alone` is the kind of what must run alone. In Python nothing is quicker than `requests`."""
    return start


@in_c
def cut(queue: deque[Request], limit: int, now: int) -> tuple[list[Request], int]:
    """See `Waiting.cut`; the batch and its size."""
    batch: list[Request] = []
    size, alone = 0, len(queue) == 1
    while queue and not (batch and size + queue[0].size > limit):
        request = queue.popleft()
        if request.claim(now, alone):
            size += request.size
            batch.append(request)
        else:
            request.drop()
    if len(batch) == 1 and not alone:
        batch[0].runs(alone=True)
    return batch, size


class Waiting:
    """The queues of a worker, one for each kind that waits."""

    def __init__(self) -> None:
        self.queues: dict[Hashable, deque[Request]] = {}
        self._alone_last = False

    def add(self, request: Request) -> None:
        queue = self.queues.get(request.kind)
        if queue is None:
            queue = self.queues[request.kind] = deque()
        queue.append(request)

    def oldest(self) -> deque[Request]:
        """The queue of the kind whose head has waited longest; that of requests that must run alone has every other
        turn at most, as full batches help more callers."""
        if len(self.queues) == 1:
            return next(iter(self.queues.values()))
        queues = [queue for kind, queue in self.queues.items() if not (kind is ALONE and self._alone_last)]
        return min(queues, key=lambda queue: queue[0].arrived)

    def cut(self, queue: deque[Request], limit: int, now: int) -> tuple[list[Request], int]:
        """Takes the next batch from `queue`, in order of arrival, at most `limit` in size or one request, and marks its
        requests as claimed at `now` (in ns). Returns its size as well.

        Requests that nobody waits for any more never enter it.
        """
        self._alone_last = limit == ONE
        kind = queue[0].kind
        made = cut(queue, limit, now)
        if not queue:
            del self.queues[kind]
        return made


def summary(queue: deque[Request], limit: int) -> Queue | None:
    """What a policy may know of a queue; None when it fills a batch of size `limit`."""
    found = summed(queue, limit)
    return None if found is None else Queue(*found)


@in_c
def summed(queue: deque[Request], limit: int) -> tuple[int, int, float, float | None] | None:
    """See `summary`; the fields of a Queue."""
    size, deadline = 0, 0
    for request in queue:
        size += request.size
        if size >= limit:
            return None
        if request.deadline and not 0 < deadline < request.deadline:
            deadline = request.deadline
    return len(queue), size, queue[0].arrived / 1e9, deadline / 1e9 if deadline else None


@in_c
def arrivals(requests: Sequence[Request]) -> tuple[list[float], list[int]]:
    """When requests were sent, in seconds, and their sizes."""
    return [request.arrived / 1e9 for request in requests], [request.size for request in requests]


@in_c
def args_of(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [request.args for request in requests]

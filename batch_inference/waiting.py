"""What waits in a worker: requests, queued by kind, from which batches are cut.

Only requests of one kind share a batch. The next batch is of the kind whose head has waited longest, so that no kind
starves.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Hashable
from typing import Any

from batch_inference.batcher.batcher import Batcher
from batch_inference.errors import BatcherError, RequestTooLargeError
from batch_inference.policy import Queue
from batch_inference.transport import codec
from batch_inference.transport.inbox import Incoming
from batch_inference.transport.wire import ERROR

REMEMBERED = 4096  # layouts
ALONE = object()
"""The kind of requests under which a worker died: each is a batch of its own."""
ONE = -1
"""A limit on the size of a batch that lets one request through."""


class Request:
    """A request that waits in the worker."""

    __slots__ = ("incoming", "args", "size", "kind")

    answers = 1  # how many calls it stands for in the statistics

    def __init__(self, incoming: Incoming, args: tuple[Any, ...], size: int, kind: Hashable) -> None:
        self.incoming = incoming
        self.args = args
        self.size = size
        self.kind = kind

    def reply(self, response: Any) -> None:
        self.incoming.reply(codec.encode(response))

    def fail(self, encoded_error: Any) -> None:
        self.incoming.reply(encoded_error, ERROR)

    def unwanted(self, now: int) -> bool:
        return self.incoming.unwanted(now)

    def drop(self) -> None:
        self.incoming.drop()

    def fresh_args(self, batcher: Batcher) -> tuple[Any, ...]:
        """The arguments as they were sent, for another run."""
        return self.incoming.decode(batcher.borrows)[0]


class Part(Request):
    """One of the requests that a request larger than a batch was split into."""

    __slots__ = ("answers", "_whole", "_index")

    def __init__(self, whole: Whole, index: int, args: tuple[Any, ...], size: int, kind: Hashable) -> None:
        super().__init__(whole.incoming, args, size, kind)
        self.answers = int(index == 0)
        self._whole = whole
        self._index = index

    def reply(self, response: Any) -> None:
        self._whole.settle(self._index, response)

    def fail(self, encoded_error: Any) -> None:
        self._whole.fail(encoded_error)

    def unwanted(self, now: int) -> bool:
        return self._whole.over or self.incoming.unwanted(now)

    def drop(self) -> None:
        self._whole.drop()

    def fresh_args(self, batcher: Batcher) -> tuple[Any, ...]:
        return batcher.split(super().fresh_args(batcher), self._whole.limit)[self._index]


class Whole:
    """A request that was split: answered when its last part is, failed when its first part fails."""

    def __init__(self, incoming: Incoming, batcher: Batcher, parts: int, limit: int) -> None:
        self.incoming = incoming
        self.limit = limit  # that it was split by
        self.over = False  # from then on the slot, and so the memory of parts that still wait, is the caller's again
        self._batcher = batcher
        self._responses: list[Any] = [None] * parts
        self._missing = parts

    def settle(self, index: int, response: Any) -> None:
        if self.over:
            return
        self._responses[index] = own_copy(response)
        self._missing -= 1
        if self._missing:
            self.incoming.runs(alone=False)
        else:
            self.incoming.reply(codec.encode(self._batcher.join(self._responses)))
            self.over = True

    def fail(self, encoded_error: Any) -> None:
        if not self.over:
            self.over = True
            self.incoming.reply(encoded_error, ERROR)

    def drop(self) -> None:
        if not self.over:
            self.over = True
            self.incoming.drop()


def own_copy(response: Any) -> Any:
    """A copy that stays right when the model uses the memory of what it returned again."""
    encoded = codec.encode(response)
    memory = bytearray(encoded.size)
    encoded.write(memory, 0)
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
        self._known: dict[codec.Layout, tuple[int, Hashable]] = {}
        self._remembers = batcher.by_shape

    def requests(self, incoming: Incoming, limit: int, most: int) -> list[Request]:
        """The request that arrived, in parts if it is larger than a batch may be: `limit`, which was learned, or `most`
        for one that cannot be divided by it. Runs code of callers and batchers, which may raise, or end the process."""
        batcher = self._batcher
        args, layout = incoming.decode(batcher.borrows, takes=True)
        known = None if layout is None else self._known.get(layout)
        if known is None:
            incoming.take()
            known = ask(batcher, args)
            incoming.rest()
            if layout is not None and self._remembers:
                if len(self._known) >= REMEMBERED:
                    self._known.clear()
                self._known[layout] = known
        size, kind = known
        if incoming.alone:
            kind = ALONE
        if size > limit:
            incoming.take()
            try:
                return self._parts(incoming, args, limit)
            except RequestTooLargeError:
                if size > most:
                    return self._parts(incoming, args, most)
            finally:
                incoming.rest()
        return [Request(incoming, args, size, kind)]

    def _parts(self, incoming: Incoming, args: tuple[Any, ...], limit: int) -> list[Request]:
        batcher = self._batcher
        parts = batcher.split(args, limit)
        if not parts:
            raise BatcherError(f"{type(batcher).__name__}.split gave no parts: it must divide a request into some")
        whole = Whole(incoming, batcher, len(parts), limit)
        asked = [(part, *ask(batcher, part)) for part in parts]
        return [
            Part(whole, index, part, size, ALONE if incoming.alone else kind)
            for index, (part, size, kind) in enumerate(asked)
        ]


class Waiting:
    """The queues of a worker, one for each kind that waits."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Request]] = {}
        self._alone_last = False

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, request: Request) -> None:
        queue = self._queues.get(request.kind)
        if queue is None:
            queue = self._queues[request.kind] = deque()
        queue.append(request)

    @property
    def kinds(self) -> int:
        """How many kinds wait."""
        return len(self._queues)

    def oldest(self) -> deque[Request]:
        """The queue of the kind whose head has waited longest; that of requests that must run alone has every other
        turn at most, as full batches help more callers."""
        if len(self._queues) == 1:
            return next(iter(self._queues.values()))
        queues = [queue for kind, queue in self._queues.items() if not (kind is ALONE and self._alone_last)]
        return min(queues, key=lambda queue: queue[0].incoming.arrived)

    def cut(self, queue: deque[Request], limit: int, now: int) -> list[Request]:
        """Takes the next batch from `queue`, in order of arrival, at most `limit` in size or one request.

        Requests that nobody waits for any more (at `now`, in ns) never enter it.
        """
        self._alone_last = limit == ONE
        batch: list[Request] = []
        size = 0
        while queue:
            request = queue[0]
            if request.unwanted(now):
                queue.popleft().drop()
                continue
            size += request.size
            if batch and size > limit:
                break
            batch.append(queue.popleft())
        if not queue:
            self._queues = {kind: waiting for kind, waiting in self._queues.items() if waiting}
        return batch


def summary(queue: deque[Request], limit: int) -> Queue | None:
    """What a policy may know of a queue; None when it fills a batch of size `limit`."""
    size, deadline = 0, 0
    for request in queue:
        size += request.size
        if size >= limit:
            return None
        if request.incoming.deadline and not 0 < deadline < request.incoming.deadline:
            deadline = request.incoming.deadline
    return Queue(len(queue), size, queue[0].incoming.arrived / 1e9, deadline / 1e9 if deadline else None)

"""What a task of an event loop waits for while its request is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from typing import Any

from batch_inference.speedups import in_c
from batch_inference.transport.slot import Slot


@in_c
class Awaited:
    """The outcome of one request, for the one task that awaits it: a future as tasks know it (`asyncio.isfuture`).

    With asyncio's own each task that is to go on is put on the loop's list first, which takes as long as all else that
    a request needs in its loop. Here whoever finds that replies have come goes on with their tasks itself: `settle`
    for all of them, so that their slots are free again, then `resume`, which must not be called in a task. Where that
    is not certain, `resume_soon`, `set_result`, `set_exception` and `cancel` go by the loop's list.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_cancelled",
        "_context",
        "_error",
        "_loop",
        "_reply",
        "_settled",
        "_wake",
        "slot",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, slot: Slot) -> None:
        self.slot = slot
        self._loop = loop
        self._wake: Callable[[Awaited], object] | None = None  # goes on with the task
        self._context: Context | None = None  # of the task
        self._settled = False
        self._reply: Any = None
        self._error: BaseException | None = None
        self._cancelled: tuple[Any, ...] | None = None  # the arguments of the error, which is made anew each time
        self._asyncio_future_blocking = False

    def settle(self, collect: Callable[[Slot], Any]) -> None:
        """The outcome is what `collect` returns or raises, unless there is one already."""
        try:
            outcome: tuple[Any, BaseException | None] = collect(self.slot), None
        except BaseException as error:
            outcome = None, for_future(error)
        if not self._settled:
            self._settled = True
            self._reply, self._error = outcome

    def resume(self) -> None:
        """Goes on with the task, at once. Raises what asyncio does not keep from its loop, such as SystemExit."""
        wake, context = self._wake, self._context
        self._wake = self._context = None
        if wake is not None and context is not None:
            context.run(wake, self)

    def resume_soon(self) -> None:
        """The same in the loop's next turn; from a task as well."""
        wake, context = self._wake, self._context
        self._wake = self._context = None
        if wake is not None:
            self._loop.call_soon(wake, self, context=context)

    def set_result(self, reply: Any) -> None:
        self._settled, self._reply = True, reply
        self.resume_soon()

    def set_exception(self, error: BaseException) -> None:
        self._settled, self._error = True, error
        self.resume_soon()

    # --- what tasks use -------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Awaited, None, Any]:
        while not self._settled:
            if self._wake is not None:
                raise RuntimeError("one task awaits a request, and no more")
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def add_done_callback(self, wake: Callable[[Awaited], object], /, *, context: Context | None = None) -> None:
        self._wake, self._context = wake, copy_context() if context is None else context
        if self._settled:
            self.resume_soon()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return self._settled

    def result(self) -> Any:
        if not self._settled:
            raise asyncio.InvalidStateError("the request has no outcome yet")
        if self._cancelled is not None:
            raise asyncio.CancelledError(*self._cancelled)
        if self._error is not None:
            raise self._error
        return self._reply

    def cancel(self, msg: object = None) -> bool:
        if self._settled:
            return False
        self._settled, self._cancelled = True, () if msg is None else (msg,)
        self.resume_soon()
        return True


def for_future(error: BaseException) -> BaseException:
    """`error`, or what stands for it where a future or a coroutine cannot hold it; without a traceback, whose frames
    would hold whatever holds the error."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"the model raised StopIteration: {error}")
    return error.with_traceback(None)

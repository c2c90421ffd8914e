"""What a task awaits while its request is under way, in C and in Python, under asyncio's tasks in C and in Python."""

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from batch_inference import awaited, speedups

SLOT: Any = object()
here: "contextvars.ContextVar[str]" = contextvars.ContextVar("here", default="outside")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(params=[asyncio.Task, asyncio.tasks._PyTask])  # type: ignore[attr-defined]
def start(request: Any, loop: asyncio.AbstractEventLoop) -> Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]:
    """Starts a task, and runs it until it waits."""

    def begin(coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = request.param(coroutine, loop=loop)
        turn(loop)
        return task

    return begin


@pytest.fixture(params={awaited.Awaited, speedups.in_python["Awaited"]})
def kind(request: Any) -> Any:
    return request.param


def turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(asyncio.sleep(0))


async def outcome(of: Any) -> Any:
    return await of


def test_a_task_goes_on_at_once_in_its_own_context(kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)

    async def ask() -> Any:
        here.set("in the task")
        reply = await one
        return reply, here.get(), asyncio.current_task(loop)

    task = start(ask())
    assert asyncio.isfuture(one) and one.get_loop() is loop and one.slot is SLOT and not one.done()
    one.settle(lambda slot: (slot,))
    assert one.done() and not task.done()
    one.resume()
    assert task.done() and task.result() == ((SLOT,), "in the task", task) and here.get() == "outside"
    one.resume()  # once is all


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError("its"), GeneratorExit()])
def test_a_task_goes_on_with_the_error_itself(error: Any, kind: Any, loop: Any, start: Any) -> None:
    def fail(_: Any) -> Any:
        raise error

    one, raised = kind(loop, SLOT), []

    async def ask() -> None:
        try:
            await one
        except BaseException as its:
            raised.append(its)

    task = start(ask())
    one.settle(fail)
    one.resume()
    assert task.done() and raised == [error]


def test_an_error_that_no_coroutine_can_raise_is_another(kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)
    task = start(outcome(one))
    one.settle(lambda _: next(iter(())))
    one.resume()
    with pytest.raises(RuntimeError, match="the model raised StopIteration"):
        task.result()


@pytest.mark.parametrize("reply", [None, (), (1, 2), StopIteration(3), ValueError, ValueError("a reply")])
@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_any_reply_is_a_reply(reply: Any, when: str, kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)
    if when == "before":
        one.settle(lambda _: reply)
        task = start(outcome(one))
    else:
        task = start(outcome(one))
        one.set_result(reply)
        assert not task.done()
        turn(loop)
    assert task.result() is reply
    assert list(iterated(one)) == [] and one.result() is reply


def iterated(one: Any) -> Iterator[Any]:
    """As `await` does where it cannot send."""
    iterator = one.__await__()
    while True:
        try:
            yield next(iterator)
        except StopIteration as stop:
            assert stop.value is one.result()
            return


def test_a_task_may_settle_anothers_request(kind: Any, loop: Any, start: Any) -> None:
    one, other = kind(loop, SLOT), kind(loop, SLOT)
    task, failed = start(outcome(one)), start(outcome(other))

    async def answer() -> None:
        one.set_result(3)
        other.set_exception(ValueError("mine"))
        assert not task.done()

    start(answer())
    assert task.result() == 3
    with pytest.raises(ValueError, match="mine"):
        failed.result()


@pytest.mark.parametrize("message", [(), ("why",)])
def test_a_cancelled_task_ends_and_what_comes_later_is_nobodys(message: Any, kind: Any, loop: Any, start: Any) -> None:
    one, collected = kind(loop, SLOT), []
    task = start(outcome(one))
    assert task.cancel(*message) and one.done() and not task.done()
    one.settle(collected.append)  # its slot is freed all the same
    one.resume()
    assert collected == [SLOT] and not task.done()
    with pytest.raises(asyncio.CancelledError) as raised:
        loop.run_until_complete(task)
    assert raised.value.args == message
    assert not one.cancel()


def test_a_task_that_is_cancelled_after_its_reply_came_is_cancelled(kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)
    task = start(outcome(one))
    one.settle(lambda _: 1)
    task.cancel()
    one.resume()
    assert task.cancelled()


def test_a_task_that_is_to_be_cancelled_does_not_wait(kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)

    async def ask() -> Any:
        task = asyncio.current_task()
        assert task is not None and task.cancel()
        await one

    task = start(ask())
    turn(loop)
    assert task.cancelled() and one.done()


def test_a_timeout_ends_the_wait(kind: Any, loop: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        loop.run_until_complete(asyncio.wait_for(outcome(kind(loop, SLOT)), 0.001))


def test_a_task_of_another_loop_is_told(kind: Any, loop: Any, start: Any) -> None:
    other = asyncio.new_event_loop()
    task = start(outcome(kind(other, SLOT)))
    other.close()
    turn(loop)
    with pytest.raises(RuntimeError, match="attached to a different loop"):
        task.result()


def test_one_task_awaits_a_request(kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)
    first, second = start(outcome(one)), start(outcome(one))
    with pytest.raises(RuntimeError, match="one task awaits a request, and no more"):
        second.result()
    with pytest.raises(asyncio.InvalidStateError, match="no outcome yet"):
        one.result()
    one.settle(lambda _: 1)
    one.resume()
    assert first.result() == 1


def test_what_is_awaited_too_late_goes_on(kind: Any, loop: Any) -> None:
    one, called = kind(loop, SLOT), []
    one.settle(lambda _: 1)
    one.add_done_callback(lambda future: called.append((future.result(), here.get())))
    turn(loop)
    assert called == [(1, "outside")]


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_loop_passes(end: Any, kind: Any, loop: Any, start: Any) -> None:
    one = kind(loop, SLOT)

    async def ask() -> None:
        await one
        raise end

    task = start(ask())
    one.settle(lambda _: 1)
    with pytest.raises(end):
        one.resume()
    assert here.get() == "outside" and isinstance(task.exception(), end)


def test_a_task_and_what_it_awaits_are_forgotten_together(kind: Any, loop: Any, start: Any) -> None:
    class Kept:
        pass

    kept = Kept()
    forgotten = weakref.ref(kept)
    loop.set_exception_handler(lambda *_: None)  # that the task was pending
    start(waits_with(kept, kind(loop, SLOT)))
    del kept
    gc.collect()
    assert forgotten() is None


async def waits_with(kept: Any, one: Any) -> None:
    await one


def test_bad_arguments_are_refused(kind: Any, loop: Any) -> None:
    one = kind(loop, SLOT)
    for call in (
        lambda: kind(loop),
        lambda: one.add_done_callback(),
        lambda: one.add_done_callback(print, context=None, more=1),
        lambda: one.add_done_callback(print, other=None),
        lambda: one.cancel(1, 2),
    ):
        with pytest.raises(TypeError):
            call()

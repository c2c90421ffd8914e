"""What callers see when the model raises."""

import asyncio
import concurrent.futures
import dataclasses
import pickle
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_inference import BatcherError, ItemErrors, ModelError, ModelHost
from batch_inference.errors import RemoteTraceback
from batch_inference.testing import wait_until
from tests.process.models import Blocks, Raises
from tests.process.test_callers import all_slots_are_back, check, request

HUGE = 20_000_000


class Detailed(Exception):
    """With an argument list of its own, which survives the journey."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail

    def __reduce__(self) -> Any:
        return _detailed, (self.code, self.detail)


def _detailed(code: int, detail: str) -> Detailed:
    return Detailed(code, detail=detail)


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Stubborn(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class Vicious(Exception):
    """Ends whoever tries to pickle it or to show it."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __reduce__(self) -> Any:
        raise SystemExit(3)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Forbids that its attributes are set, __cause__ and __traceback__ among them."""

    code: int


class RaisesMany:
    """Raises what the number of the request stands for."""

    def predict_batch(self, x: Any) -> Any:
        number = int(x.max())
        if number == 1:
            raise ValueError("one")
        if number == 2:
            raise Detailed(7, detail="two")
        if number == 3:
            raise Locked("three")
        if number == 4:
            raise Stubborn(1, 2)
        if number == 5:
            raise Mute
        if number == 6:
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise RuntimeError("outer") from error
        if number == 7:

            class Local(LookupError):
                pass

            raise Local("seven")
        if number == 8:
            raise StopIteration("eight")
        if number == 9:
            raise Vicious
        if number == 10:
            raise asyncio.CancelledError("ten")
        if number == 11:
            raise GeneratorExit("eleven")
        if number == 12:
            raise ValueError("x" * HUGE)
        if number == 13:
            raise Frozen(13)
        if number == 14:
            raise ItemErrors({0: Frozen(14)})
        if number == 15:
            raise ItemErrors({0: Frozen(15)}, results=x)
        return x * 2


@pytest.fixture(scope="module")
def shared_host() -> Iterator[ModelHost]:
    with ModelHost(RaisesMany) as host:
        yield host


WAYS = {
    "predict": lambda host, x: host.predict(x),
    "submit": lambda host, x: host.submit(x).result(30),
    "apredict": lambda host, x: asyncio.run(host.apredict(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_arrives_as_its_own_type_with_the_remote_traceback_as_its_cause(
    way: str, shared_host: ModelHost
) -> None:
    with pytest.raises(ValueError, match="^one$") as caught:
        WAYS[way](shared_host, request(1))
    assert type(caught.value) is ValueError and isinstance(caught.value.__cause__, RemoteTraceback)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in predict_batch" in shown and 'raise ValueError("one")' in shown
    with pytest.raises(Detailed) as detailed:
        WAYS[way](shared_host, request(2))
    assert (detailed.value.code, detailed.value.detail) == (7, "two")
    check(WAYS[way](shared_host, request(-3)), -3)
    all_slots_are_back(shared_host)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [13, 14, 15])
def test_an_exception_of_a_class_that_is_frozen_arrives_as_itself(
    way: str, number: int, shared_host: ModelHost
) -> None:
    with pytest.raises(Frozen) as caught:
        WAYS[way](shared_host, request(number))
    assert caught.value.code == number and "in predict_batch" in str(caught.value.__cause__)
    check(shared_host.predict(request(-1)), -1)


NO_TRAVELLERS = [
    (3, "Locked: three"),
    (4, "Stubborn: 1"),
    (5, "Mute"),
    (9, "Vicious"),
    (10, "CancelledError: ten"),
    (11, "GeneratorExit: eleven"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("number", "named"), NO_TRAVELLERS)
def test_an_exception_that_cannot_travel_arrives_as_a_model_error_with_its_text(
    way: str, number: int, named: str, shared_host: ModelHost
) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        WAYS[way](shared_host, request(number))
    assert "in predict_batch" in str(caught.value)
    pickle.loads(pickle.dumps(caught.value))
    check(shared_host.predict(request(-1)), -1)  # the worker survived
    assert shared_host.statistics().workers[0].restarts == 0


def test_causes_within_the_model_and_exceptions_of_local_classes_arrive(shared_host: ModelHost) -> None:
    with pytest.raises(RuntimeError, match="outer") as caught:
        shared_host.predict(request(6))
    assert "KeyError" in str(caught.value.__cause__) and "direct cause" in str(caught.value.__cause__)
    with pytest.raises(LookupError, match="seven") as local:
        shared_host.predict(request(7))
    assert type(local.value).__name__ == "Local"


@pytest.mark.parametrize("way", WAYS)
def test_stop_iteration_reaches_its_caller_as_an_error(way: str, shared_host: ModelHost) -> None:
    with pytest.raises((StopIteration, RuntimeError), match="eight"):
        WAYS[way](shared_host, request(8))
    check(shared_host.predict(request(-1)), -1)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_with_a_huge_message_arrives_whole(way: str, shared_host: ModelHost) -> None:
    with pytest.raises(ValueError) as caught:
        WAYS[way](shared_host, request(12))
    assert len(str(caught.value)) == HUGE
    check(shared_host.predict(request(-1)), -1)


class RaisesWhenOpen(Blocks):
    def predict_batch(self, x: Any) -> Any:
        super().predict_batch(x)
        if len(x) > 1:
            raise ValueError("a whole batch")
        return x * 2


def test_every_caller_of_a_batch_gets_an_exception_of_its_own(tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    with ModelHost(Raises, max_batch_size=64)(ValueError("no")) as host, ThreadPoolExecutor(32) as pool:
        errors = list(pool.map(lambda n: capture(host, -1 - n), range(200)))
    assert len({id(error) for error in errors}) == 200
    assert len({id(error.__cause__) for error in errors}) == 200
    assert {(type(error), str(error)) for error in errors} == {(ValueError, "no")}

    host = ModelHost(RaisesWhenOpen, isolate_errors=False)(str(entered), str(gate))
    with host, ThreadPoolExecutor(8) as pool:
        first = pool.submit(host.predict, request(1))
        wait_until(entered.exists)
        rest = [host.submit(request(number)) for number in range(2, 9)]
        gate.touch()
        check(first.result(30), 1)
        failures = [future.exception(30) for future in rest]
        assert all(type(failure) is ValueError for failure in failures)
        assert len({id(failure) for failure in failures}) == 7
        assert host.statistics().failed == 7 and host.statistics().requests == 8


def capture(host: ModelHost, number: int) -> BaseException:
    try:
        host.predict(request(number))
    except ValueError as error:
        return error
    raise AssertionError("it should have failed")


def test_a_wrong_number_of_rows_is_an_error_that_names_both_and_never_a_shifted_result() -> None:
    class Short:
        def predict_batch(self, x: Any) -> Any:
            return x[:-1]

    class Nothing:
        def predict_batch(self, x: Any) -> Any:
            return None

    with ModelHost(Short) as host, pytest.raises(BatcherError, match=r"Short.*(4.*3|3.*4)"):
        host.predict(np.zeros((4, 2)))
    with ModelHost(Nothing) as host, pytest.raises(BatcherError, match="Nothing.*None"):
        host.predict(np.zeros((4, 2)))


def test_what_cannot_be_sent_is_an_error_of_its_caller_alone(shared_host: ModelHost) -> None:
    for value in threading.Lock(), (x for x in ()):
        with pytest.raises(TypeError):
            shared_host.predict(value)
    check(shared_host.predict(request(-1)), -1)
    all_slots_are_back(shared_host)


def test_a_reply_that_cannot_be_sent_is_an_error_of_its_caller_alone() -> None:
    from batch_inference.batcher import ListBatcher

    class Returns:
        def predict_batch(self, values: Any) -> Any:
            return [threading.Lock() if value == "lock" else value for value in values]

    with ModelHost(Returns, batcher=ListBatcher()) as host:
        with pytest.raises(TypeError, match="lock"):
            host.predict("lock")
        assert host.predict("text") == "text"
        assert host.statistics().failed == 1


class RaisesFirst:
    """Raises an exception of a type with a message too long for a slot."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def predict_batch(self, x: Any) -> Any:
        raise self.kind("first" + "x" * HUGE)


@pytest.mark.parametrize(
    "kind", [StopIteration, concurrent.futures.CancelledError, concurrent.futures.InvalidStateError]
)
def test_what_no_future_can_hold_reaches_a_task_also_when_its_text_does_not_fit_the_slot(kind: type[Exception]) -> None:
    async def call() -> None:
        await asyncio.wait_for(host.apredict(request(1), timeout=20), 25)

    with ModelHost(RaisesFirst)(kind) as host:
        for _ in range(3):
            with pytest.raises(RuntimeError if kind is StopIteration else kind, match="first"):
                asyncio.run(call())
        all_slots_are_back(host)

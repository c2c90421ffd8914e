"""What newcomers do wrong is answered by a message that says what to do instead."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from batch_inference import BatcherError, ConfigError, HostClosedError, ModelHost, connect
from batch_inference.batcher import Batcher
from batch_inference.testing import Doubles
from tests.process.test_callers import check, request


def test_an_instance_in_place_of_the_class_is_told_of_model_obj() -> None:
    with pytest.raises(ConfigError, match="model_obj="):
        ModelHost(Doubles())  # type: ignore[arg-type]


def test_arguments_of_the_model_in_the_wrong_call_are_told_of_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"ModelHost\(Model\)\(\.\.\.\)"):
        ModelHost(Doubles, "notes")
    with pytest.raises(TypeError, match=r"unknown option k: .*ModelHost\(Model\)\(\.\.\.\)"):
        ModelHost(Doubles, k=3)


def test_a_number_as_policy_is_told_of_fixed_delay() -> None:
    with pytest.raises(ConfigError, match="FixedDelay"):
        ModelHost(Doubles, policy=0.005)


def test_connecting_to_nobody_names_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(HostClosedError, match="no host named 'nobody'"):
        connect("nobody")


@pytest.fixture(scope="module")
def doubles() -> Iterator[ModelHost]:
    with ModelHost(Doubles, num_workers=0)() as host:
        yield host


def test_an_argument_by_name_is_told_to_come_by_position(doubles: ModelHost) -> None:
    with pytest.raises(TypeError, match=r"predict\(\) takes .* by position, got x by name: write host.predict\(x\)"):
        doubles.predict(x=request(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write host.submit\(x\)"):
        doubles.submit(x=request(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write host.apredict\(x\)"):
        asyncio.run(doubles.apredict(x=request(1)))  # type: ignore[arg-type]


def test_an_argument_that_cannot_travel_is_named(doubles: ModelHost) -> None:
    with pytest.raises(TypeError, match="argument 1 of the request, of type dict, .*lock") as caught:
        doubles.predict(request(1), {"lock": threading.Lock()})
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("sent", "named"), [(([1, 2],), "a list"), (("text",), "a str"), ((), "no arguments")])
def test_a_request_without_a_tensor_is_told_what_to_send(doubles: ModelHost, sent: Any, named: str) -> None:
    with pytest.raises(BatcherError, match=rf"it was {named}\. .*np\.asarray\(x\)\[None\].*ListBatcher"):
        doubles.predict(*sent)


def test_a_request_without_a_batch_dimension_is_told_of_it() -> None:
    class Sums:
        def predict_batch(self, x: Any) -> Any:
            return x.sum(axis=-1)

    with ModelHost(Sums, num_workers=0) as host, pytest.raises(BatcherError, match=r"send x\[None\]"):
        host.predict(np.ones(4))


class Careless(Batcher):
    """Its hooks return what `wrong` says, the rest is right."""

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    def size(self, request: tuple[Any, ...]) -> Any:
        return self.wrong.get("size", np.int64(1))

    def kind(self, request: tuple[Any, ...]) -> Any:
        return self.wrong.get("kind")

    def batch(self, requests: list[tuple[Any, ...]]) -> Any:
        return self.wrong.get("batch", (requests[0][0], None))

    def unbatch(self, batched_response: Any, context: Any) -> Any:
        return self.wrong.get("unbatch", [batched_response])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": "large"}, "Careless.size must return a whole number, got 'large'"),
        ({"kind": []}, r"Careless.kind must return something hashable, got \[\]"),
        ({"kind": ([],)}, "Careless.kind must return something hashable"),
        ({"batch": np.zeros(2)}, r"Careless.batch must return a pair \(batched_request, context\), got ndarray"),
        ({"batch": (1, 2, 3)}, "Careless.batch must return a pair"),
        ({"unbatch": 5}, "Careless.unbatch must return a list with one response per request, got int"),
    ],
)
def test_a_hook_that_returns_nonsense_is_named(wrong: dict[str, Any], message: str) -> None:
    with ModelHost(Doubles, batcher=Careless(**wrong), num_workers=0)() as host:
        with pytest.raises(BatcherError, match=message):
            host.predict(request(1))


def test_a_size_that_is_a_numpy_integer_will_do() -> None:
    with ModelHost(Doubles, batcher=Careless(), num_workers=0)() as host:
        check(host.predict(request(4)), 4)

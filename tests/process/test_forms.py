"""All the ways to make a host, start it and stop it."""

import asyncio
import pickle
from collections import UserDict

import numpy as np
import pytest

from batch_inference import (
    ConfigError,
    HostClosedError,
    ModelHost,
    batching,
)
from batch_inference.batcher import ConcatBatcher, ListBatcher
from batch_inference.testing import no_leaks
from tests.process.models import Affine, Describes, Doubles

ONE = np.ones((1, 2), "f")


class Plain:
    """Not decorated."""

    def __init__(self, factor=2):
        self.factor = factor

    def predict_batch(self, x):
        return x * self.factor


# --- decorator forms ------------------------------------------------------------------------------------------------


def test_every_form_of_the_decorator_returns_the_same_class_with_its_options() -> None:
    for decorate, size in [
        (batching, 32),
        (batching(), 32),
        (batching(ConcatBatcher()), 32),
        (batching(batcher=ConcatBatcher(), max_batch_size=7), 7),
        (batching(max_batch_size=7), 7),
        (batching(ConcatBatcher(), max_batch_size=7), 7),
    ]:

        class Model(Plain):
            """A class of its own for each form."""

        assert decorate(Model) is Model
        assert f"max_batch_size={size}" in repr(Model.host())


def test_hosts_made_by_the_decorator_build_the_model_with_their_arguments() -> None:
    with Affine.host(3.0, offset=1.0) as host:
        assert host.predict(ONE).tolist() == [[4, 4]]


def test_a_subclass_hosts_itself_with_the_options_of_its_parent() -> None:
    class Shifted(Affine):
        def predict_batch(self, x):
            return super().predict_batch(x) + 100

    with Shifted.host(2.0) as host:
        assert host.predict(ONE).tolist() == [[102, 102]]


# --- ModelHost forms ------------------------------------------------------------------------------------------------


def test_any_class_can_be_hosted_with_and_without_arguments() -> None:
    with ModelHost(Plain) as host:
        assert host.predict(ONE).tolist() == [[2, 2]]
    with ModelHost(Plain, batcher=ConcatBatcher(), max_batch_size=4)(factor=5) as host:
        assert host.predict(ONE).tolist() == [[5, 5]]


def test_options_of_model_host_override_those_of_the_decorator() -> None:
    @batching(ListBatcher(), max_batch_size=3, timeout=5)
    class Model(Plain):
        def predict_batch(self, values):
            return [type(value).__name__ for value in values]

    assert "max_batch_size=9" in repr(ModelHost(Model, max_batch_size=9))
    with ModelHost(Model, max_batch_size=9) as host:
        assert host.predict("text") == "str"  # still the decorator's batcher
    assert "max_batch_size=3" in repr(Model.host())


def test_an_instance_can_be_hosted() -> None:
    with ModelHost(model_obj=Plain(7)) as host:
        assert host.predict(ONE).tolist() == [[7, 7]]


def test_a_class_nested_in_a_function_travels_by_value_with_what_it_captures() -> None:
    factor = np.array([1.0, 10.0], "f")

    class Nested:
        def predict_batch(self, x):
            return x * factor

    for host in ModelHost(Nested), ModelHost(model_obj=Nested()):
        with host:
            assert host.predict(ONE).tolist() == [[1, 10]]


def test_mappings_reach_the_model_as_dicts() -> None:
    with ModelHost(Describes, batcher=ListBatcher()) as host:
        assert host.predict({"ids": ONE}) == "dict"
        assert host.predict(UserDict(ids=ONE)) == "dict"
        assert host.predict(UserDict(text="a string, which goes through pickle")) == "dict"


def test_keyword_tensors_are_given_as_one_dict_and_results_come_back_as_a_dict() -> None:
    class Model:
        def predict_batch(self, inputs):
            return {"sum": inputs["a"] + inputs["b"], "a": inputs["a"]}

    with ModelHost(Model) as host:
        result = host.predict(UserDict(a=ONE, b=ONE * 2))
        assert type(result) is dict
        assert result["sum"].tolist() == [[3, 3]] and result["a"].tolist() == [[1, 1]]


# --- start and stop -------------------------------------------------------------------------------------------------


def test_a_host_is_an_async_context_manager_and_starts_and_stops_without_blocking() -> None:
    async def main() -> None:
        async with ModelHost(Doubles)() as host:
            assert (await host.apredict(ONE)).tolist() == [[2, 2]]
        with pytest.raises(HostClosedError):
            await host.apredict(ONE)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count())
        await host.astart()
        assert turns > 10  # a start takes a quarter of a second at least
        assert (await host.apredict(ONE)).tolist() == [[2, 2]]
        await host.astop()
        counting.cancel()

    asyncio.run(main())


def test_a_host_answers_only_between_start_and_stop_and_may_be_started_again() -> None:
    host = ModelHost(Doubles)()
    for _ in range(2):
        for ask in host.predict, host.submit, lambda x: asyncio.run(host.apredict(x)):
            with pytest.raises(HostClosedError, match="not started") as caught:
                ask(ONE)
            assert isinstance(caught.value, RuntimeError)
        with no_leaks():
            host.start()
            with pytest.raises(RuntimeError, match="started already"):
                host.start()
            assert host.predict(ONE).tolist() == [[2, 2]]
            assert host.submit(ONE).result(10).tolist() == [[2, 2]]
            assert asyncio.run(host.apredict(ONE)).tolist() == [[2, 2]]
            host.stop()
    host.stop()  # a second one does nothing


def test_a_host_is_stopped_when_its_block_raises() -> None:
    with pytest.raises(KeyError):
        with ModelHost(Doubles)() as host:
            raise KeyError
    with pytest.raises(HostClosedError):
        host.predict(ONE)


def test_a_host_that_nobody_refers_to_any_more_ends_its_processes() -> None:
    with no_leaks():
        host = ModelHost(Doubles)()
        host.start()
        assert host.predict(ONE).tolist() == [[2, 2]]
        del host


def test_a_host_that_was_not_started_travels_by_pickle() -> None:
    host = pickle.loads(pickle.dumps(Affine.host(3.0)))
    with host:
        assert host.predict(ONE).tolist() == [[3, 3]]


# --- what cannot work -----------------------------------------------------------------------------------------------


class NoMethod:
    pass


class NotCallable:
    predict_batch = 3


class Async:
    async def predict_batch(self, x):
        return x


class AsyncGenerator:
    async def predict_batch(self, x):
        yield x


class Generator:
    def predict_batch(self, x):
        yield x


@pytest.mark.parametrize("model", [NoMethod, NotCallable, Async, AsyncGenerator, Generator])
def test_a_class_without_a_plain_predict_batch_is_refused_at_once(model: type) -> None:
    for make in (lambda: ModelHost(model), lambda: batching(model), lambda: batching()(model)):
        with pytest.raises(ConfigError, match=f"{model.__name__}.*predict_batch"):
            make()
    with pytest.raises(ConfigError, match="predict_batch"):
        ModelHost(model_obj=model())


def test_an_unknown_option_is_a_type_error_that_lists_the_options() -> None:
    for make in (
        lambda: ModelHost(Plain, max_batchsize=3),
        lambda: batching(max_batchsize=3),
        lambda: batching(ConcatBatcher(), max_batchsize=3),
    ):
        with pytest.raises(TypeError, match="max_batchsize.*max_batch_size"):
            make()


def test_model_host_takes_a_class_or_an_instance() -> None:
    for arguments in {}, {"model_cls": Plain, "model_obj": Plain()}:
        with pytest.raises(ConfigError, match="model_cls.*model_obj"):
            ModelHost(**arguments)
    with pytest.raises(ConfigError, match="decorates a class"):
        batching()(lambda x: x)


def test_what_is_not_a_batcher_is_refused() -> None:
    for batcher in ConcatBatcher, "concat", object():
        with pytest.raises(ConfigError, match="batcher"):
            ModelHost(Plain, batcher=batcher)
    with pytest.raises(ConfigError, match=r"did you mean ConcatBatcher\(\)\?"):
        ModelHost(Plain, batcher=ConcatBatcher)


def test_what_cannot_travel_to_the_worker_is_named(run_script) -> None:
    import threading

    lock = threading.Lock()

    class Captures:
        def predict_batch(self, x):
            with lock:
                return x

    with pytest.raises(ConfigError, match="'lock'"):
        ModelHost(Captures).start()
    with pytest.raises(ConfigError, match="argument 'factor'"):
        ModelHost(Plain)(factor=lock).start()
    with pytest.raises(ConfigError, match="argument 0"):
        ModelHost(Plain)(lock).start()
    with pytest.raises(ConfigError, match="'factor'"):
        ModelHost(model_obj=Plain(lock)).start()
    done = run_script(
        """
import threading
from batch_inference import ConfigError, ModelHost
some_global = threading.Lock()
class Model:
    def predict_batch(self, x):
        with some_global:
            return x
try:
    ModelHost(Model).start()
except ConfigError as error:
    print(error)
"""
    )
    assert "'some_global'" in done.stdout and "lock" in done.stdout

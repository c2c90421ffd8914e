"""What an application holds: ModelHost, the decorator `batching`, and `connect`. Delegation only.

The modules that do the work are imported at start: a process that only imports the class of a model needs none of them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from batch_inference import board
from batch_inference.errors import BatchInferenceError, ConfigError, HostClosedError, ModelLoadError
from batch_inference.options import CLIENT_OPTIONS, LONGEST, Options, check_seconds, in_worker, worker_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

    from batch_inference.batcher.batcher import Batcher
    from batch_inference.client import Client
    from batch_inference.futures import Futures
    from batch_inference.loops import Loops
    from batch_inference.payload import Recipe
    from batch_inference.statistics import Statistics

Model = TypeVar("Model", bound=type)


class _Unset:
    def __repr__(self) -> str:
        return "<the host's timeout>"


_UNSET: Any = _Unset()
Joins = tuple[str, "int | None", "dict[str, str] | None"]
"""A host to join: its address, the payload to start it with again, and the description that it must fit."""
MOMENT = 0.5  # seconds, for what is on its way
LOOK_INTERVAL = 0.2  # seconds between looks, while a model loads, at whether a signal handler has called stop()
_hosts: weakref.WeakSet[ModelHost] = weakref.WeakSet()


class ModelHost:
    """Runs a model in a worker process of its own and batches the requests of all callers.

    Args:
        model_cls: a class with a method `predict_batch`; it is built in the worker, with the arguments of the call
            ``ModelHost(model_cls, ...)(*args, **kwargs)``.
        model_obj: in its place, an instance, which is pickled and sent to the worker.
        batcher: how requests become one batch; a ConcatBatcher by default.
        max_batch_size: the most that one batch may hold, as the sum of ``batcher.size(request)``.
        options: the other fields of `Options`, by name. They override those of the class's decorator.

    Raises:
        ConfigError: for a model or an option that cannot work.
        TypeError: for an option that does not exist.
    """

    def __init__(
        self,
        model_cls: type | None = None,
        model_obj: Any = None,
        batcher: Batcher | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if (model_cls is None) == (model_obj is None):
            raise ConfigError(
                "ModelHost takes either model_cls, a class, or model_obj, an instance of one. The arguments that the "
                "model is built with go into a second call: ModelHost(Model)(...)"
            )
        check_model(model_cls if model_cls is not None else type(model_obj))
        given = {"batcher": batcher, "max_batch_size": max_batch_size}
        options |= {name: value for name, value in given.items() if value is not None}
        base: Options = getattr(model_cls or type(model_obj), _OPTIONS_ATTRIBUTE, None) or Options()
        self._options = base.replace(**options)
        self._model_cls = model_cls
        self._model_obj = model_obj
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._given = self._options  # what other processes of the name must fit, whatever configure() changes
        self._client: Client | None = None
        self._loops: Loops | None = None
        self._futures: Futures | None = None
        self._parts: dict[str, Any] = {}  # the two, where the finalizer can reach them
        self._lock = threading.RLock()  # reentrant, as a signal handler may call stop() in the middle of start()
        self._started = self._starting = False
        self._joins: Joins | None = None  # the host to join after a fork
        self._last: Statistics | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _hosts.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> ModelHost:
        """Gives the arguments that the model is built with, in the worker. Returns the host itself."""
        self._args, self._kwargs = args, kwargs
        return self

    def __repr__(self) -> str:
        state = self.statistics().state if self._client is not None else "not joined yet" if self._joins else "stopped"
        name = f" named {self._options.name!r}" if self._options.name else ""
        if self._model() is type(None):
            return f"<ModelHost that was joined{name}: {state}>"
        model = self._model()
        workers = self._options.worker_count
        where = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "a thread of this process"
        size = self._options.max_batch_size
        return f"<ModelHost of {model.__qualname__}{name}: {state}, {where}, max_batch_size={size}>"

    # --- start and stop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the worker and waits until its model is ready.

        Does nothing in a worker process that imports the module which calls it.

        Raises:
            ModelLoadError: the model's constructor raised, its process died, or `start_timeout` passed.
            ConfigError: the model cannot be sent to another process, or the platform lacks what that takes.
            HostClosedError: the host is started already, or a signal handler stopped it (a RuntimeError).
        """
        if in_worker():
            return
        with self._lock:
            if self._started or self._starting:
                raise HostClosedError("the host is started already: stop() it first, or use it as it is")
            if self._model() is type(None):
                raise HostClosedError(
                    "this process has joined the host without having its model, and has left it: connect() again, or "
                    "unpickle it again"
                )
            self._starting = True
            try:
                self._take_when_ready(self._open())
                self._started = True
                if not self._starting:
                    self.stop(drain=False)
                    raise self._stopped_meanwhile()
            finally:
                self._starting = False

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Refuses new requests, answers those that were accepted, and ends the workers. Does nothing when not started.

        With `drain=False`, or after `timeout` seconds, requests that have no answer yet fail with HostClosedError.
        Interrupted by Ctrl-C while it waits for answers, it ends at once in the same way. It waits as long as batches
        are served: a model that hangs is killed after `batch_timeout`, and then the requests that are left fail with
        HostClosedError.
        """
        with self._lock:
            self._starting = False  # in a signal handler, in the middle of start(), which then gives up
            if not self._started:
                return
            self._started = False
            client, parts = self._client, self._parts
            self._client = self._loops = self._futures = self._joins = None
            self._parts = {}
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
            if client is not None:
                self._last = client.link.statistics()
                close(client, parts, drain, timeout)

    async def astart(self) -> None:
        """`start`, without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.start)

    async def astop(self, drain: bool = True, timeout: float | None = None) -> None:
        """`stop`, without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.stop, drain, timeout)

    def reload(self, *args: Any, **kwargs: Any) -> None:
        """Changes to a model that is built with these arguments, while the host serves; no request is lost.

        Without arguments the present ones are used again, for a model that reads what has changed. The new model loads
        beside the old one, in as many processes, so there must be memory for both. When all are ready, new requests go
        to them, and the old ones end when they have answered what they have. Returns when the requests of this process
        go to the new model; other processes of a named host follow at once. Later starts use these arguments too.

        Raises:
            ModelLoadError: the new model does not load, or another reload is under way. The old one goes on.
            ConfigError: this process only joined the host and has no model to send, or the arguments cannot be sent.
            HostClosedError: the host is not started (a RuntimeError).
        """
        client = self._client or self._join_again()
        if self._model() is type(None):
            raise ConfigError("this process joined the host without having its model: reload() where the class is")
        if self._model_obj is not None and (args or kwargs):
            raise ConfigError("the host was given an instance, which takes no arguments: give it a class to reload")
        if not args and not kwargs:
            args, kwargs = self._args, self._kwargs
        link: Any = client.link
        recipe = self._recipe(args, kwargs)
        if self._options.worker_count:
            from batch_inference import payload

            link.reload(payload.surroundings() | {"reloaded": self._description(args, kwargs)}, payload.dump(recipe))
        else:
            link.reload(recipe)
        self._args, self._kwargs = args, kwargs

    async def areload(self, *args: Any, **kwargs: Any) -> None:
        """`reload`, without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.reload, *args, **kwargs)

    def __enter__(self) -> ModelHost:
        if not self._joined():
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> ModelHost:
        if not self._joined():
            await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.astop()

    # --- requests -------------------------------------------------------------------------------------------------

    def predict(self, *args: Any, timeout: float | None = _UNSET, block: bool = True, **named: NoReturn) -> Any:
        """Sends one request and waits for its result; from any number of threads.

        Args:
            args: the arguments of the model for this request, such as a tensor of shape [rows, ...].
            timeout: seconds; None is no limit; left out, the host's `timeout`.
            block: whether to wait, within the timeout, for room when `max_pending` requests are pending or the shared
                memory is full; if not, OverloadedError at once.

        Raises:
            RequestTimeoutError: no result within `timeout`.
            WorkerDiedError: the worker died twice while it ran this request alone, or the host has given up.
            HostClosedError: the host is not started (a RuntimeError).
            TypeError: an argument was given by name, or cannot be sent to another process.
            Exception: whatever the model raised, with the worker's traceback as its cause.
        """
        if named:
            raise by_position("predict", named)
        client = self._client
        if client is None:
            client = self._join_again()
        return client.predict(args, self._options.timeout if timeout is _UNSET else _limit(timeout), block)

    def submit(self, *args: Any, timeout: float | None = _UNSET, **named: NoReturn) -> Future[Any]:
        """Sends one request; the future holds its result or its error. Never blocks.

        Callbacks of the future run in a thread that completes all futures of the host: they should be short. What one
        of them raises is logged, sys.exit() too.

        Raises:
            OverloadedError: `max_pending` requests are pending, or the shared memory is full.
            HostClosedError: the host is not started (a RuntimeError).
        """
        if named:
            raise by_position("submit", named)
        futures = self._futures
        if futures is None:
            if self._client is None:
                self._join_again()
            futures = self._make_futures()
        return futures.submit(args, self._options.timeout if timeout is _UNSET else _limit(timeout))

    async def apredict(self, *args: Any, timeout: float | None = _UNSET, block: bool = True, **named: NoReturn) -> Any:
        """`predict` for asyncio: any number of tasks, in any number of event loops. Never blocks the loop."""
        if named:
            raise by_position("apredict", named)
        loops = self._loops
        if loops is None:
            if self._client is None:
                if self._joins is not None:
                    import asyncio

                    await asyncio.to_thread(self._join_again)
                self._join_again()
            loops = self._make_loops()
        timeout = self._options.timeout if timeout is _UNSET else _limit(timeout)
        return await loops.side().predict(args, timeout, block)

    def configure(
        self, *, max_batch_size: int | None = None, max_delay: float | None = _UNSET, max_pending: int | None = None
    ) -> None:
        """Changes limits of a started host, for all its workers and clients from the next batch on.

        Raises:
            ConfigError: a value cannot work.
            HostClosedError: the host is not started.
        """
        changes: dict[str, Any] = {"max_batch_size": max_batch_size, "max_pending": max_pending}
        changes = {name: value for name, value in changes.items() if value is not None}
        if max_delay is not _UNSET:
            changes["max_delay"] = max_delay
        client = self._client or self._join_again()
        self._options = self._options.replace(**changes)
        client.link.configure({name: getattr(self._options, name) for name in changes})  # as they were taken

    @property
    def ready(self) -> bool:
        """Whether a worker is ready for requests: False before start(), while the model loads, and after stop().

        In a forked process, which joins the host when it first uses it, looking is using.
        """
        client = self._used()
        return client is not None and client.ready

    @property
    def healthy(self) -> bool:
        """Whether requests can be answered, now or once a worker has been restarted.

        False once the host has given up (`max_restarts`, or the model does not load any more), until stop() and
        start(). False, too, while it is not started. In a forked process looking is using.
        """
        client = self._used()
        return client is not None and client.healthy

    def _used(self) -> Client | None:
        """The client; None when there is none and there can be none."""
        if self._client is None and self._joins is not None:
            with contextlib.suppress(BatchInferenceError):
                return self._join_again()
        return self._client

    def statistics(self) -> Statistics:
        """What the host did since it started, over all processes that use it. After stop(), its last state.

        In a forked process looking is using.
        """
        client = self._used()
        if client is not None:
            return client.link.statistics()
        import dataclasses

        from batch_inference.statistics import Statistics

        return dataclasses.replace(self._last or Statistics(), state="stopped", workers=(), memory=0, pending=0)

    # --- forks and pickles ----------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        """A started host unpickles, in a process of this machine, as a client of it; one not started as itself."""
        if self._started and self._options.worker_count:
            return _rejoin, (self._address(), self._options)
        return _restore, (self._model_cls, self._model_obj, self._options, self._args, self._kwargs)

    def _address(self) -> str:
        if self._joins is not None:
            return self._joins[0]
        assert self._client is not None
        return str(self._client.link.address)  # type: ignore[attr-defined]

    def _forked(self) -> None:
        """In the child of a fork: the parent's connection is the parent's; ours is made on first use."""
        client, self._client = self._client, None
        self._loops = self._futures = None
        self._parts = {}
        self._lock = threading.RLock()
        self._starting = False
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if client is None:
            return
        if not self._options.worker_count:
            self._started = False
            return
        link: Any = client.link
        self._joins = (link.address, link.config, link.description)
        link.forget()
        client.forget()

    def _join_again(self) -> Client:
        if self._joins is None and self._client is None:  # at once, also while another thread starts or stops
            raise HostClosedError(self._why_closed())
        with self._lock:
            if self._client is not None:
                return self._client
            if self._joins is None:
                raise HostClosedError(self._why_closed())
            address, config, description = self._joins
            client = self._new_client(address, None if config is None else os.dup(config), description)
            self._take(client)  # ready or not: requests wait for the model within their own timeouts
            self._joins = None
            if config is not None:
                os.close(config)
            if board.any_ready(client.link.cells):  # and we are about to hear of it
                client.wait_until_ready(1, time.monotonic() + MOMENT)
            return client

    def _stopped_meanwhile(self) -> HostClosedError:
        return HostClosedError("the host was stopped, by a signal handler, while it started: start() it again")

    def _why_closed(self) -> str:
        if in_worker():
            return (
                "this module is being imported by its own model's worker process, where the host is not started: call "
                "predict from functions, or under if __name__ == '__main__', not while the module is imported"
            )
        return "the host is not started: call start() first, or use `with host:`; a stopped host may be started again"

    # --- inside ---------------------------------------------------------------------------------------------------

    def _open(self) -> Client:
        """A client with the worker starting up."""
        from batch_inference import payload
        from batch_inference.transport import handshake
        from batch_inference.transport.scarce import explained

        options, recipe = self._options, self._recipe(self._args, self._kwargs)
        if not options.worker_count:
            return self._new_local_client(recipe)
        check_platform()
        address = handshake.named_address(options.name) if options.name else handshake.random_address()
        description = self._description(self._args, self._kwargs)
        settings = payload.surroundings() | {
            "python": sys.executable,
            "flags": subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            "workers": options.worker_count,
            "environments": environments(options),
            "max_restarts": options.max_restarts,
            "start_timeout": options.start_timeout,
            "batch_timeout": options.batch_timeout,
            "retry": options.retry,
            "revision": 0,
            "reloaded": None,
            "limits": options.limits(),
            "linger": options.linger if options.name else 0.0,
            "description": description,
        }
        content = payload.dump(recipe)
        with explained():
            config = payload.pack(settings, content)
        return self._new_client(address, config, description)

    def _recipe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
        from batch_inference.payload import Recipe

        options = self._options
        assert options.batcher is not None and options.policy is not None
        return Recipe(
            model_cls=self._model_cls,
            model_obj=self._model_obj,
            args=args,
            kwargs=kwargs,
            batcher=options.batcher,
            policy=copy.deepcopy(options.policy),
            max_batch_size=options.max_batch_size,
            isolate_errors=options.isolate_errors,
            warmup=options.warmup,
        )

    def _description(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        """What another process of this name must fit; nobody else can find a host without a name."""
        if not self._options.name:
            return {}
        from batch_inference.description import describe

        return describe(self._model_cls, self._model_obj, args, kwargs, self._given)

    def _joined(self) -> bool:
        """Whether connect() or unpickling has started it already."""
        return self._started and self._model() is type(None)

    def _model(self) -> type:
        """The model's class; NoneType where this process only joined a host."""
        return self._model_cls or type(self._model_obj)

    def _new_client(self, address: str, config: int | None, description: dict[str, str] | None) -> Client:
        from batch_inference.client import Client
        from batch_inference.link import Link
        from batch_inference.transport.scarce import explained

        def make_link(events: Client) -> Link:
            link = Link(address, config, description, events)
            link.open()
            return link

        with explained():
            return Client(shared_memory(self._options), make_link)

    def _new_local_client(self, recipe: Any) -> Client:
        from batch_inference.client import Client
        from batch_inference.local import LocalLink

        client = Client(shared_memory(self._options), lambda events: LocalLink(recipe, self._options.limits(), events))
        client.link.open()  # type: ignore[attr-defined]
        return client

    def _take_when_ready(self, client: Client) -> None:
        """Makes `client` ours once its model is ready; leaves the host otherwise."""
        try:
            self._wait_until_ready(client)
        except BaseException:
            client.close(drain=False)
            raise
        self._take(client)

    def _take(self, client: Client) -> None:
        self._parts = {}
        self._client = client
        self._finalizer = weakref.finalize(self, close, client, self._parts, False)

    def _wait_until_ready(self, client: Client) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        while not client.wait_until_ready(client.link.worker_count, min(deadline, time.monotonic() + LOOK_INTERVAL)):
            if not (self._starting or self._started):
                raise self._stopped_meanwhile()
            if time.monotonic() < deadline:
                continue
            raise ModelLoadError(
                f"the model was not ready within start_timeout={self._options.start_timeout} s: is it very large, does "
                "it download its weights, or does its constructor wait for something? Raise start_timeout if it needs "
                "longer"
            )

    def _make_futures(self) -> Futures:
        from batch_inference.transport.scarce import explained

        with explained():  # a module that is loaded takes a descriptor as well
            from batch_inference.futures import Futures

        with self._lock:
            if self._client is None:  # another thread has stopped the host
                raise HostClosedError(self._why_closed())
            if self._futures is None:
                self._futures = self._parts["futures"] = Futures(self._client)
            return self._futures

    def _make_loops(self) -> Loops:
        from batch_inference.transport.scarce import explained

        with explained():
            from batch_inference.loops import Loops

        with self._lock:
            if self._client is None:  # another thread has stopped the host
                raise HostClosedError(self._why_closed())
            if self._loops is None:
                self._loops = self._parts["loops"] = Loops(self._client)
            return self._loops


def _limit(timeout: float | None) -> float | None:
    """A caller's `timeout`, which is checked; None when it is as good as none."""
    if timeout is None:
        return None
    check_seconds("timeout", timeout)
    return timeout if timeout <= LONGEST else None


def by_position(method: str, named: dict[str, Any]) -> TypeError:
    names = ", ".join(named)
    return TypeError(
        f"{method}() takes the model's arguments by position, got {names} by name: write host.{method}({names}), or "
        "send a dict as one argument"
    )


def close(client: Client, parts: dict[str, Any], drain: bool = True, timeout: float | None = None) -> None:
    """Ends a client with what hangs on it."""
    try:
        client.close(drain, timeout)
    finally:
        for part in parts.values():
            part.close()


_OPTIONS_ATTRIBUTE = "__batching_options__"


@overload
def batching(model_cls: Model, /) -> Model: ...
@overload
def batching(batcher: Batcher | None = None, /, **options: Any) -> Callable[[Model], Model]: ...
def batching(argument: Any = None, /, **options: Any) -> Any:
    """Adds to a model class a classmethod `host(*args, **kwargs)`: a ModelHost that builds it with these arguments.

    Used as ``@batching``, ``@batching()``, ``@batching(ConcatBatcher())`` or
    ``@batching(batcher=..., max_batch_size=32)``; the options are those of ModelHost. Returns the same class.

    Raises:
        ConfigError: the class has no callable, synchronous, non-generator `predict_batch`, or an option cannot work.
        TypeError: for an option that does not exist.
    """
    if isinstance(argument, type):
        return _decorate(argument, Options().replace(**options))
    if argument is not None:
        options = {"batcher": argument} | options
    chosen = Options().replace(**options)
    return lambda model_cls: _decorate(model_cls, chosen)


def _decorate(model_cls: Any, options: Options) -> Any:
    if not isinstance(model_cls, type):
        raise ConfigError(f"@batching decorates a class with a method predict_batch, got {model_cls!r}")
    check_model(model_cls)
    setattr(model_cls, _OPTIONS_ATTRIBUTE, options)
    model_cls.host = classmethod(host_of)  # type: ignore[attr-defined]
    return model_cls


def host_of(cls: type, *args: Any, **kwargs: Any) -> ModelHost:
    """A ModelHost of this model, not started; the arguments are the model's."""
    return ModelHost(cls)(*args, **kwargs)


def connect(name: str, **options: Any) -> ModelHost:
    """Joins the named host that runs on this machine, from a process that does not have the model's class.

    Args:
        name: as given to the host where it was started.
        options: `timeout`, `start_timeout` and `shared_memory` of this process; the others are the host's.

    Returns a started host; stop() it to leave, or use it as ``with connect(name) as host:``.

    Raises:
        HostClosedError: nobody serves the name.
        ConfigError: an option that is not this process's to choose, or one that cannot work.
    """
    from batch_inference.transport import handshake

    checked = Options(name=name).replace(**options)
    if foreign := set(options) - set(CLIENT_OPTIONS):
        raise ConfigError(
            f"connect() cannot choose {', '.join(sorted(foreign))}, which the host has from whoever started it: leave "
            "it out; max_batch_size, max_delay and max_pending can be changed with configure()"
        )
    try:
        return _rejoin(handshake.named_address(name), checked, now=True)
    except HostClosedError as error:
        raise HostClosedError(
            f"no host named {name!r} is running for this user: start it in a process that has the model's class "
            f"({error})"
        ) from None


def check_model(model_cls: type) -> None:
    """ConfigError unless instances have a callable, synchronous, non-generator predict_batch."""
    if not isinstance(model_cls, type):
        raise ConfigError(f"ModelHost takes the model's class, got {model_cls!r}: pass an instance as model_obj=")
    method = getattr(model_cls, "predict_batch", None)
    what = None
    if not callable(method):
        what = "has no method predict_batch"
    elif inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        what = "has an async predict_batch: the worker runs one batch at a time, write it as a plain def"
    elif inspect.isgeneratorfunction(method):
        what = "has a generator as predict_batch: it must return the whole batch's outputs"
    if what:
        raise ConfigError(f"{model_cls.__qualname__} {what}")


def check_platform() -> None:
    """ConfigError where this platform lacks what worker processes need."""
    missing = [name for name in ("memfd_create", "eventfd", "pidfd_open") if not hasattr(os, name)]
    if missing:
        raise ConfigError(
            f"worker processes need Linux 5.3 or later (os.{', os.'.join(missing)}), this is {sys.platform}: use "
            "num_workers=0, which runs the model in a thread of this process"
        )


def environments(options: Options) -> list[dict[str, str]]:
    from batch_inference import machine

    cores = machine.usable_cores()
    return [worker_environment(options, index, dict(os.environ), cores) for index in range(options.worker_count)]


def shared_memory(options: Options) -> int:
    from batch_inference import machine

    return options.shared_memory or machine.usable_memory() // 2


def _restore(model_cls: type | None, model_obj: Any, options: Options, args: Any, kwargs: Any) -> ModelHost:
    host = ModelHost.__new__(ModelHost)
    host._options, host._model_cls, host._model_obj = options, model_cls, model_obj
    host._args, host._kwargs = args, kwargs
    host._reset()
    return host


def _rejoin(address: str, options: Options, now: bool = False) -> ModelHost:
    host = _restore(None, None, options, (), {})
    host._joins, host._started = (address, None, None), True
    if now:
        try:
            host._wait_until_ready(host._join_again())
        except BaseException:
            host.stop(drain=False)
            raise
    return host


def _after_fork() -> None:
    for host in list(_hosts):
        host._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

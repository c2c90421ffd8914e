"""The options of a host: frozen, validated at once, picklable."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batch_inference import board
from batch_inference.errors import ConfigError

if TYPE_CHECKING:
    from batch_inference.batcher.batcher import Batcher
    from batch_inference.policy import Policy

Device = int | str
"""An index ("the n-th of the devices I may see"), "cuda:1", "cpu", or an identifier that CUDA_VISIBLE_DEVICES takes."""

LONGEST = 1e9
"""Seconds, some 31 years: a longer duration limits nobody, and this one still fits wherever nanoseconds are counted."""

LARGEST = (1 << 63) - 1
"""The largest count that a cell of 64 bits takes, signed or not."""

LIMITS = ("max_batch_size", "max_delay", "max_pending")

CLIENT_OPTIONS = ("name", "timeout", "start_timeout", "shared_memory")
"""Those that each process of a named host chooses for itself; all others are the host's."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class Options:
    """How a host runs its model. Durations are seconds, memory is bytes; None leaves the choice to the library.

    A duration of more than 1e9 s, infinity too, is no limit in practice.
    """

    batcher: Batcher | None = None
    """How requests become one batch; None is ConcatBatcher()."""
    max_batch_size: int = 32
    """The most that one batch may hold, as the sum of `batcher.size(request)`: rows, for the tensor batchers."""
    max_delay: float | None = None
    """A ceiling on the wait of the oldest request for a fuller batch; None lets the policy decide, 0 runs at once."""
    max_pending: int = 10_000
    """The most requests that may be waiting or running, over all client processes (see OverloadedError). Threads that
    send at the same moment, and processes that do, may exceed it by a few each."""
    policy: Policy | None = None
    """When to cut a batch; None is `policy.Returning()`, which learns it."""
    isolate_errors: bool = True
    """Whether a batch that fails is divided and run again, so that only the requests to blame fail. False for a model
    with side effects: then the batch fails as one."""
    warmup: tuple[Any, ...] | None = None
    """Sample arguments of predict: each shape that the batcher can make of them is run before the host is ready."""
    num_workers: int | None = None
    """Worker processes with the model, 64 at most; None is one, or one per entry of `devices`. 0: a thread of this
    process."""
    devices: Sequence[Device] | None = None
    """One device per worker, the only one that worker sees."""
    threads: int | None = None
    """Compute threads per worker; None is the usable cores divided by the number of workers."""
    timeout: float | None = None
    """How long predict, apredict and a submitted future may take where the call does not say; None is no limit."""
    start_timeout: float = 600.0
    """How long the model may take to load, also when a worker is restarted."""
    batch_timeout: float | None = 600.0
    """How long a worker that has work may show no sign of life, so how long one model call may take, before it is
    killed; None is no limit."""
    retry: bool = True
    """Whether the requests of a batch under which the worker died are run again, each alone. False for a model with
    side effects: they fail with WorkerDiedError."""
    max_restarts: int = 5
    """Restarts of dead workers per minute, after which the host gives up."""
    shared_memory: int | None = None
    """The most shared memory each client process maps for its requests; None is half of what machine or cgroup has."""
    name: str | None = None
    """Hosts of the same name in processes of the same user share their workers."""
    linger: float = 1.0
    """How long the workers of a named host stay after the last client has gone."""

    def __post_init__(self) -> None:
        _check_count("max_batch_size", self.max_batch_size, 1)
        _check_count("num_workers", self.num_workers, 0, optional=True)
        _check_count("threads", self.threads, 1, optional=True)
        _check_count("max_pending", self.max_pending, 1)
        _check_count("max_restarts", self.max_restarts, 0)
        _check_count("shared_memory", self.shared_memory, 1 << 20, optional=True)
        self._take_seconds("max_delay", optional=True)
        self._take_seconds("timeout", optional=True)
        self._take_seconds("start_timeout")
        self._take_seconds("batch_timeout", optional=True)
        if self.batch_timeout == 0:
            raise ConfigError("batch_timeout must be more than 0 seconds, or None for no limit, got 0")
        self._take_seconds("linger")
        self._check_batcher()
        self._check_policy()
        self._check_devices()
        if self.worker_count > board.MAX_WORKERS:
            what = "num_workers" if self.devices is None else "devices, with one worker each,"
            raise ConfigError(
                f"{what} asks for {self.worker_count} workers, and a host has {board.MAX_WORKERS} at most: ask for "
                "fewer, or start several hosts and share the requests out among them"
            )
        self._check_name()

    def _take_seconds(self, name: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        check_seconds(name, value, optional=optional)
        if value is not None and value > LONGEST:
            object.__setattr__(self, name, LONGEST)

    def _check_batcher(self) -> None:
        from batch_inference.batcher.batcher import Batcher

        if self.batcher is None:
            from batch_inference.batcher.concat_batcher import ConcatBatcher

            object.__setattr__(self, "batcher", ConcatBatcher())
        elif isinstance(self.batcher, type) or not isinstance(self.batcher, Batcher):
            hint = f"did you mean {self.batcher.__name__}()?" if isinstance(self.batcher, type) else "subclass Batcher"
            raise ConfigError(f"batcher must be an instance of Batcher, got {self.batcher!r}: {hint}")
        assert self.batcher is not None
        self.batcher.check_limit(self.max_batch_size)
        if self.warmup is not None and not isinstance(self.warmup, tuple):
            raise ConfigError(f"warmup must be a tuple of sample arguments of predict, got {self.warmup!r}: write (x,)")

    def _check_policy(self) -> None:
        if self.policy is None:
            from batch_inference.policy import Returning

            object.__setattr__(self, "policy", Returning())
        missing = [
            name for name in ("arrived", "ran", "completed", "wait") if not callable(getattr(self.policy, name, None))
        ]
        if missing or isinstance(self.policy, type):
            raise ConfigError(
                "policy must be an object with the methods of batch_inference.policy.Policy, such as "
                f"FixedDelay(0.005), got {self.policy!r}"
            )

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if isinstance(self.devices, (str, int)) or not all(isinstance(d, (int, str)) for d in self.devices):
            raise ConfigError(
                f"devices must be a list with one device per worker, such as [0, 1], got {self.devices!r}"
            )
        object.__setattr__(self, "devices", tuple(self.devices))
        if self.num_workers is not None and self.num_workers != len(self.devices):
            raise ConfigError(
                f"num_workers={self.num_workers} does not fit devices={list(self.devices)!r}, which names "
                f"{len(self.devices)}: leave num_workers out, or name a device for each worker (it may repeat)"
            )

    def _check_name(self) -> None:
        if self.name is None:
            return
        allowed = isinstance(self.name, str) and self.name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        if not allowed or self.name.startswith(".") or len(self.name) > 60:
            raise ConfigError(
                f"name must be 1 to 60 letters, digits, '-', '_' or '.', not starting with '.', got {self.name!r}"
            )

    @property
    def worker_count(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        return 1 if self.devices is None else len(self.devices)

    def replace(self, **changes: Any) -> Options:
        """A copy with some options changed; TypeError for an option that does not exist."""
        unknown = set(changes) - {field.name for field in dataclasses.fields(self)}
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(self))
            raise TypeError(
                f"unknown option {', '.join(sorted(unknown))}: the options are {known}. The arguments that the model "
                "is built with go to Model.host(...), or into a second call: ModelHost(Model)(...)"
            )
        return dataclasses.replace(self, **changes)

    def limits(self) -> dict[str, Any]:
        """Those options that may change while the host runs."""
        return {name: getattr(self, name) for name in LIMITS}


def worker_environment(options: Options, index: int, environ: dict[str, str], cores: int) -> dict[str, str]:
    """The environment variables to set for worker `index`: they must stand before anything heavy is imported.

    A thread count that the user exported is respected unless the `threads` option says otherwise.
    """
    settings: dict[str, str] = {}
    count = str(options.threads or max(1, cores // max(1, options.worker_count)))
    for variable in THREAD_VARIABLES:
        if options.threads is not None or variable not in environ:
            settings[variable] = count
    if options.devices is not None:
        settings["CUDA_VISIBLE_DEVICES"] = visible_device(
            options.devices[index % len(options.devices)], environ.get("CUDA_VISIBLE_DEVICES")
        )
    return settings


def visible_device(device: Device, visible: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows only `device`, counted among those the application may see."""
    name = str(device)
    if name == "cpu":
        return ""
    number = name.removeprefix("cuda:")
    if not number.isdigit():
        return name  # GPU-<uuid>, MIG-<uuid>
    if visible is None:
        return number
    seen = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if int(number) >= len(seen):
        raise ConfigError(
            f"device {device!r} does not exist: CUDA_VISIBLE_DEVICES={visible!r} shows this process {len(seen)} of them"
        )
    return seen[int(number)]


def in_worker() -> bool:
    """True in a worker process of this library, where a module may be imported that starts a host at its top level; and
    in those that the model starts with multiprocessing, which import it as well."""
    worker, here = os.environ.get(WORKER_VARIABLE), str(os.getpid())
    if worker is None or worker == here:
        return worker is not None
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    if parent is None or str(parent.pid) != worker:
        return False
    os.environ[WORKER_VARIABLE] = here  # for its own children
    return True


WORKER_VARIABLE = "BATCH_INFERENCE_WORKER_PID"


def _check_count(name: str, value: int | None, least: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if value > LARGEST:
        raise ConfigError(f"{name} may be {LARGEST} at most, which is what 64 bits hold: give a smaller number")


def check_seconds(name: str, value: float | None, *, optional: bool = False) -> None:
    """ConfigError unless `value` is a duration in seconds (or None, if that is allowed)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{name} must be a number of seconds, 0 or more, got {value!r}")

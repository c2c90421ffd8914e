"""batch_inference hosts a deep-learning model in a worker process and batches the single requests of many callers.

host:    batching, ModelHost, connect
values:  Statistics (what host.statistics() returns)
models:  ItemErrors (what predict_batch may raise to say which rows failed)
errors:  BatchInferenceError and those below it
"""

from typing import TYPE_CHECKING, Any

from batch_inference.errors import (
    BatcherError,
    BatchInferenceError,
    ConfigError,
    HostClosedError,
    ItemErrors,
    ModelError,
    ModelLoadError,
    OverloadedError,
    RequestTimeoutError,
    RequestTooLargeError,
    TransportError,
    WorkerDiedError,
)

__version__ = "0.1.0"

__all__ = [
    "BatchInferenceError",
    "BatcherError",
    "ConfigError",
    "HostClosedError",
    "ItemErrors",
    "ModelError",
    "ModelHost",
    "ModelLoadError",
    "OverloadedError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "Statistics",
    "TransportError",
    "WorkerDiedError",
    "batching",
    "connect",
]

# The supervisor process imports this package too, and has no use for these: they are imported on first use.
_MODULES = ("host", "options", "statistics")
_HOMES = {"ModelHost": "host", "batching": "host", "connect": "host", "Statistics": "statistics"}

if TYPE_CHECKING:
    from batch_inference.host import ModelHost, batching, connect
    from batch_inference.statistics import Statistics
else:  # a type checker that saw this would take every name for one of ours

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *__all__})

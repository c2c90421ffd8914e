"""batch_inference hosts a deep-learning model in a worker process and batches the single requests of many callers.

host:    batching, ModelHost, connect
values:  Statistics (what host.statistics() returns)
models:  ItemErrors (what predict_batch may raise to say which rows failed)
errors:  BatchInferenceError and those below it
"""

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
from batch_inference.host import ModelHost, batching, connect
from batch_inference.statistics import Statistics

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

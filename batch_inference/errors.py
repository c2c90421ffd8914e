"""Every public error of the library.

Each message says what happened, the likely cause and the next step. An error raised by the user's own model or batcher
reaches the caller as itself; these are for everything else. ItemErrors is the one that models raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BatchInferenceError(Exception):
    """Base of every error that the library raises on its own account."""


class ConfigError(BatchInferenceError, ValueError):
    """The host was given something that cannot work: an option, a model class, a value that cannot travel."""


class HostClosedError(BatchInferenceError, RuntimeError):
    """The host was not started yet, or was stopped: you did it."""


class WorkerDiedError(BatchInferenceError):
    """The worker process died under this request, too often to try again: it happened."""


class OverloadedError(BatchInferenceError):
    """The host cannot take one more request now; the same request may succeed later."""


class RequestTimeoutError(BatchInferenceError, TimeoutError):
    """The request was not answered within its timeout. Its answer, should it still come, is dropped."""


class ModelLoadError(BatchInferenceError):
    """The model could not be built in its worker process."""


class ModelError(BatchInferenceError):
    """The model raised an exception that cannot travel between processes; its text holds type and traceback."""


class BatcherError(BatchInferenceError):
    """A batcher or the model's output broke the rules of batching, such as a wrong number of rows."""


class RequestTooLargeError(BatchInferenceError):
    """The request is larger than the host can take in one piece."""


class TransportError(BatchInferenceError):
    """Bytes between the processes were not what they should be, or a process of the host cannot be reached."""


class ItemErrors(Exception):
    """Raised by predict_batch to say which rows of its batch failed: ``ItemErrors({3: ValueError("no face")})``.

    `errors` has an exception for each row that failed. A row is an index on the first dimension of the tensors that
    predict_batch got, or, under a ListBatcher, into its lists. A request any of whose rows failed gets the exception of
    the first of them. `results` is what predict_batch would have returned, with anything in the rows that failed: the
    other requests are answered from it. Without it they are run again.

    Where they may not be run again (`isolate_errors=False`, and no `results`), they get the ItemErrors itself.
    """

    def __init__(self, errors: Mapping[int, Exception], results: Any = None) -> None:
        if not isinstance(errors, Mapping):
            raise TypeError(f"ItemErrors takes a dict from rows to exceptions, got {type(errors).__name__}")
        super().__init__(errors)
        self.errors = dict(errors)
        self.results = results

    def __str__(self) -> str:
        shown = [f"row {row}: {type(error).__name__}: {error}" for row, error in list(self.errors.items())[:8]]
        return f"{len(self.errors)} rows of the batch failed ({'; '.join(shown)}{', ...' * (len(self.errors) > 8)})"

    def __reduce__(self) -> Any:
        return ItemErrors, (self.errors,)


class RemoteTraceback(Exception):
    """The traceback text of another process: the cause of a re-raised exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'

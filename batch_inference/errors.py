"""Every public error of the library.

Each message says what happened, the likely cause and the next step. An error raised by the user's own model or batcher
reaches the caller as itself; these are for everything else.
"""


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


class RemoteTraceback(Exception):
    """The traceback text of another process: the cause of a re-raised exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'

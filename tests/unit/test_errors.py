"""The public errors: what they are, and that they travel."""

import pickle

import pytest

import batch_inference
from batch_inference import errors

PUBLIC = [getattr(batch_inference, name) for name in batch_inference.__all__ if name.endswith("Error")]
BUILTIN = {
    errors.ConfigError: ValueError,
    errors.HostClosedError: RuntimeError,
    errors.RequestTimeoutError: TimeoutError,
}


def test_every_error_of_the_module_is_public() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type)} - {errors.RemoteTraceback}
    assert set(PUBLIC) == defined and len(PUBLIC) == 11


@pytest.mark.parametrize("kind", PUBLIC)
def test_errors_take_one_message_and_survive_pickling(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.BatchInferenceError) and issubclass(kind, BUILTIN.get(kind, Exception))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(kind("what happened"), protocol))
        assert type(back) is kind and str(back) == "what happened"
    assert (kind.__doc__ or "").strip()


def test_a_remote_traceback_shows_its_text() -> None:
    error = pickle.loads(pickle.dumps(errors.RemoteTraceback("Traceback ...")))
    assert "Traceback ..." in str(error)

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
    defined = {
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    defined -= {errors.RemoteTraceback, errors.ItemErrors}
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


def test_item_errors_say_what_failed_and_travel_without_the_results() -> None:
    error = errors.ItemErrors({row: ValueError(f"bad {row}") for row in range(9)}, results=[1, 2])
    assert "9 rows" in str(error) and "row 3: ValueError: bad 3" in str(error) and str(error).endswith("...)")
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error) and back.errors[8].args == ("bad 8",) and back.results is None
    with pytest.raises(TypeError, match="dict from rows to exceptions, got list"):
        errors.ItemErrors([ValueError()])  # type: ignore[arg-type]

"""What a named host runs, in words, so that a process that joins it can be told how its own differs.

Compared are the model's qualified name, its source, its arguments and the options of the host. Words and not pickles:
those of two equal objects differ, and say nothing to a person. Applications describe; the supervisor only compares, so
what describing takes is imported there.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_inference.options import Options

Description = dict[str, str]

SOURCE = "source"
"""Compared where both have it: in an interactive session there is none."""
WHERE = "file"
"""Shown with a source that differs, and not compared: the same source may lie in two places."""
_LONGEST = 1000  # characters of one entry


def describe(
    model_cls: type | None, model_obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Description:
    """What is compared when a host of this name runs already. The state of a `model_obj` is not."""
    import dataclasses

    from batch_inference.options import CLIENT_OPTIONS

    model = model_cls or type(model_obj)
    described = {
        "model": _name(model) if model_cls else f"an instance of {_name(model)}",
        "model arguments": ", ".join(
            [*map(words, args), *(f"{name}={words(kwargs[name])}" for name in sorted(kwargs))]
        ),
        **_source(model),
    }
    for field in dataclasses.fields(options):
        if field.name not in CLIENT_OPTIONS:
            described[field.name] = words(getattr(options, field.name), opened=2)
    return {name: _shorten(text) for name, text in described.items()}


def difference(there: Description, here: Description | None) -> str:
    """What sets a host that a client describes apart from the one that runs; empty for nothing.

    None is a client that joins whatever there is. Here is where the client is.
    """
    if here is None:
        return ""
    names = [name for name in sorted({*there, *here} - {WHERE, SOURCE}) if there.get(name) != here.get(name)]
    if SOURCE in there and SOURCE in here and there[SOURCE] != here[SOURCE]:
        names += [SOURCE, WHERE]
    return "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names)


def words(value: Any, opened: int = 0) -> str:
    """`value` in words that are the same in every process.

    Plain values and containers of them are written out, as are dataclasses; of a tensor dtype and shape; of another
    object the type, and down to a depth of `opened` its attributes.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)) and not isinstance(value, enum.Enum):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(words(item, opened) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(words(item, opened) for item in value))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{words(key)}: {words(item, opened)}' for key, item in value.items()))}}}"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if hasattr(value, "__qualname__"):  # a class, a function
        return _name(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{_name(type(value))} of {value.dtype} {list(value.shape)}"
    import dataclasses

    attributes = getattr(value, "__dict__", {}) if opened or dataclasses.is_dataclass(value) else {}
    inside = [f"{name}={words(attributes[name], max(0, opened - 1))}" for name in sorted(attributes)]
    return f"{_name(type(value))}({', '.join(inside)})"


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{thing.__qualname__}"


def _source(model: type) -> Description:
    """A digest of the class's source and where it stands; nothing where there is none, as in an interactive session."""
    import hashlib
    import inspect

    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):
        return {}
    digest = hashlib.sha256(source.encode(errors="replace")).hexdigest()
    lines = source.count("\n")
    return {SOURCE: f"{lines} lines ({digest[:12]})", WHERE: str(inspect.getsourcefile(model))}


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    import hashlib

    return f"{text[:_LONGEST]} ... ({hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]})"

"""Which classes and functions run in C: those with a twin in `_speedups`, where that could be built.

What each does stands in Python, at its decorator, and works without it. BATCH_INFERENCE_NO_EXTENSIONS=1 in the
environment has everything run in Python, as it does in interpreters without a global lock.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, TypeVar

Defined = TypeVar("Defined")


def _load() -> Any:
    if os.environ.get("BATCH_INFERENCE_NO_EXTENSIONS"):
        return None
    try:
        return importlib.import_module("batch_inference._speedups")
    except ImportError:
        return None  # there was no C compiler when the package was installed


_speedups = _load()
built = _speedups is not None

in_python: dict[str, Any] = {}
"""What `in_c` was given, by name."""


def in_c(defined: Defined) -> Defined:
    """The class or function of the same name in C, which does the same, if there is one."""
    in_python[defined.__name__] = defined  # type: ignore[attr-defined]
    twin: Defined = getattr(_speedups, defined.__name__, defined)  # type: ignore[attr-defined]
    return twin

"""Classes and functions of the application's script travel by value, so that the script is not run again in a worker.

cloudpickle does that for `__main__`. A child of multiprocessing (spawn, forkserver) imports the script under a name of
its own, and would send names that no worker can import.
"""

from __future__ import annotations

import sys

SCRIPT_NAMES = (b"__main__", b"__mp_main__")
"""What a pickle contains that names something of the script."""


def prepare() -> None:
    """Has cloudpickle treat the script of a child of multiprocessing as it does `__main__`."""
    script = sys.modules.get("__mp_main__")
    if script is not None:
        import cloudpickle

        if script.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(script)

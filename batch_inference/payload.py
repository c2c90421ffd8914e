"""What a worker process is made from: settings in JSON, then the pickled model class, its arguments and the batcher.

It is written once into a sealed memfd, which the supervisor keeps for restarts, and every client for electing a new
supervisor. Only the worker unpickles it. Classes of `__main__` and of functions travel by value, so the application's
script is not run again in the worker.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from batch_inference.errors import ConfigError

if TYPE_CHECKING:
    from batch_inference.batcher.batcher import Batcher
    from batch_inference.policy import Policy

Settings = dict[str, Any]
_SIZE = struct.Struct("=Q")


def pack(settings: Settings, content: bytes) -> int:
    """A memfd that holds both; the caller owns the descriptor."""
    head = json.dumps(settings).encode()
    import fcntl

    fd = os.memfd_create("batch_inference_payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(_SIZE.pack(len(head)) + head)
            file.write(content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_settings(fd: int) -> Settings:
    (size,) = _SIZE.unpack(os.pread(fd, _SIZE.size, 0))
    settings: Settings = json.loads(os.pread(fd, size, _SIZE.size))
    return settings


def read_content(fd: int) -> bytes:
    (size,) = _SIZE.unpack(os.pread(fd, _SIZE.size, 0))
    start = _SIZE.size + size
    parts, end = [], os.fstat(fd).st_size
    while start < end:
        parts.append(os.pread(fd, end - start, start))
        start += len(parts[-1])
    return b"".join(parts)


def enter(fd: int) -> None:
    """Lets a fresh interpreter import the application's modules; comes before any heavy import."""
    settings = read_settings(fd)
    sys.path[:] = settings["path"]
    sys.argv[:] = settings["argv"]
    try:
        os.chdir(settings["cwd"])
    except OSError as error:
        print(
            f"batch_inference: the worker runs in / because {settings['cwd']} cannot be entered: {error}",
            file=sys.stderr,
        )
        os.chdir("/")


def surroundings() -> Settings:
    """The part of the settings that says where this process finds its modules and what it logs."""
    import logging

    try:
        cwd = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the current directory of this process, in which the worker is to run as well, does not exist any more: it "
            "was probably deleted, or moved by a deployment; os.chdir() to one that does before the host starts"
        ) from error
    root = logging.getLogger()
    levels = {"": root.level} | {
        name: logger.level
        for name, logger in root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {"path": [entry or cwd for entry in sys.path], "cwd": cwd, "argv": sys.argv[:1], "levels": levels}


class Recipe(NamedTuple):
    """How a worker gets its model: a class and the arguments to build it with, or an instance."""

    model_cls: type | None
    model_obj: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batcher: Batcher
    policy: Policy
    max_batch_size: int
    isolate_errors: bool
    warmup: tuple[Any, ...] | None

    def build(self) -> Any:
        return self.model_obj if self.model_cls is None else self.model_cls(*self.args, **self.kwargs)


def close_model(model: Any) -> None:
    """Calls the model's close(), if it has one."""
    close = getattr(model, "close", None)
    if callable(close):
        close()


def load(fd: int) -> Recipe:
    """What `dump` has pickled: runs the application's code, so only in the worker."""
    import cloudpickle

    recipe: Recipe = cloudpickle.loads(read_content(fd))
    return recipe


def dump(recipe: Recipe) -> bytes:
    """Pickles a recipe. ConfigError that names what in it cannot travel."""
    try:
        return _pickled(recipe)
    except Exception as error:
        culprits = {"the model class": recipe.model_cls, "model_obj": recipe.model_obj}
        culprits |= {f"model argument {index}": value for index, value in enumerate(recipe.args)}
        culprits |= {f"model argument {name!r}": value for name, value in recipe.kwargs.items()}
        culprits["the batcher"] = recipe.batcher
        raise ConfigError(
            f"the model cannot be sent to its worker process: {_blame(culprits)} ({type(error).__name__}: {error}). "
            "Create such things in the model's __init__, which runs in the worker, or move the class to a module, "
            "which the worker imports"
        ) from error


def _pickled(recipe: Recipe) -> bytes:
    import cloudpickle

    from batch_inference import by_value

    by_value.prepare()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle, which says "<dynamic-code>" where it was written, with the file: tracebacks then show lines."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                make, args = self.dispatch_table[CodeType](obj)[:2]
                return code_from_file, (make, args, obj.co_filename)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    Pickler(stream, protocol=5).dump(recipe)
    return stream.getvalue()


def code_from_file(make: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    """What a function's code is unpickled with."""
    return make(*args).replace(co_filename=filename)


def _blame(culprits: dict[str, Any]) -> str:
    for name, value in culprits.items():
        if _travels(value):
            continue
        for function in _functions(value):
            for captured, content in _captured(function):
                if not _travels(content):
                    return f"{name} uses {captured!r} (in {function.__qualname__}), a {type(content).__name__}"
        for attribute, content in getattr(value, "__dict__", {}).items():
            if not callable(content) and not _travels(content):
                return f"{name} has {attribute!r}, a {type(content).__name__}"
        return f"{name} cannot be pickled"
    return "it cannot be pickled"


def _travels(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value, protocol=5)
    except Exception:
        return False
    return True


def _functions(value: Any) -> list[Any]:
    owner = value if isinstance(value, type) else type(value)
    found = []
    for attribute in list(vars(owner).values()) + [value]:
        function = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
        if hasattr(function, "__code__"):
            found.append(function)
    return found


def _captured(function: Any) -> list[tuple[str, Any]]:
    """The globals and outer variables that a function uses, by name."""
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found = [(name, function.__globals__[name]) for name in names]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:
            pass  # not assigned yet
    return found

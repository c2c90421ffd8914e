"""What the kernel refuses because a limit of the process is reached, in words."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from batch_inference.errors import TransportError

with contextlib.suppress(ImportError):  # not a POSIX system, where there are no worker processes either
    import resource  # now: without a descriptor nothing can be imported


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """TransportError, with the limit and what to do about it, in place of an OSError that says that one is reached."""
    try:
        yield
    except OSError as error:
        why = explanation(error)
        if why is None:
            raise
        raise TransportError(why) from error


def explanation(error: BaseException, who: str = "this process") -> str | None:
    """Which limit `error` says is reached, and what to do about it; None for another error. `who` is this process."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        return no_descriptor(who)
    if number == errno.ENFILE:
        return f"no descriptor is left on this machine ({error}): raise fs.file-max, or look for who has so many"
    if number == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return (
            f"{who} may make no files of more than {most} bytes (RLIMIT_FSIZE, ulimit -f), and shared memory counts as "
            "one: raise that limit where the process is started"
        )
    return None


def no_descriptor(who: str = "this process") -> str:
    """What to say and to do where no descriptor is left for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    further = f"up to {hard} with resource.setrlimit, and further " if soft < hard else ""
    return (
        f"{who} has no descriptor left: RLIMIT_NOFILE allows it {soft}, and each thread that waits for an answer, each "
        f"event loop, connection and open file takes some. Raise the limit ({further}where the application is started, "
        "with ulimit -n or LimitNOFILE), or use fewer threads"
    )

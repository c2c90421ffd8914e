"""What we ask of the kernel about processes: starting and reaping them, dying together, orphans, exit status in words.

Loaded by every process of a host, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from batch_inference.errors import TransportError

_launched: list[subprocess.Popen[bytes]] = []  # supervisors that this process started, until they are reaped


def start_supervisor(python: str, listener: socket.socket, config: int) -> subprocess.Popen[bytes]:
    """Starts a supervisor that listens on the socket `listener`, which is closed here. TransportError if it cannot."""
    import fcntl

    reap()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Not 0 to 2, which they may have in an application that closed its standard descriptors, as daemons do.
    fds = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (listener.fileno(), config))
    code = f"import sys; sys.path.append({root!r}); from batch_inference.supervisor import main; main{fds}"
    try:
        process = subprocess.Popen(
            [python, "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # which says nothing about the interpreter
        raise TransportError(f"the Python interpreter {python} cannot be started: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)
        listener.close()
    _launched.append(process)
    return process


def reap() -> None:
    """Takes note of supervisors that this process started and that have ended."""
    _launched[:] = [process for process in _launched if process.poll() is None]


def reap_later(pid: int) -> None:
    """Leaves no zombie of a supervisor that goes on without this process, if it was this one that started it."""
    for process in [process for process in _launched if process.pid == pid]:
        _launched.remove(process)
        threading.Thread(target=process.wait, name="batch_inference-reaper", daemon=True).start()


def become_supervisor() -> None:
    """Detaches from the application's terminal output, and adopts what workers leave behind when they die."""
    import ctypes
    import resource

    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an application that ignores it would hide how its workers died
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:  # else the application had closed one of them
        os.close(null)


def dies_with_us() -> Callable[[], None]:
    """For a child to call between fork and exec: asks the kernel to kill it when we end, however that happens.

    Before its first instruction, since a process that is stopped while it starts would stay otherwise. Of this process,
    which must have one thread only.
    """
    import ctypes

    PR_SET_PDEATHSIG, prctl, parent = 1, ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we were quicker
            os._exit(1)

    return ask


def become_worker() -> None:
    """Asks the kernel to end short waits on time."""
    import ctypes

    PR_SET_TIMERSLACK = 29
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns: a wait of 100 us shall not take 150


def end(error: BaseException) -> NoReturn:
    """Ends this process as `error` would, and says where in the model it was raised, a SystemExit too."""
    import traceback

    at = error.__traceback__
    while (
        at is not None and at.tb_next is not None and at.tb_frame.f_globals["__name__"].startswith("batch_inference.")
    ):
        at = at.tb_next
    traceback.print_exception(type(error), error, at)
    code = error.code if isinstance(error, SystemExit) else 1
    leave(code if isinstance(code, int) else int(code is not None))


def leave(code: int) -> NoReturn:
    """Ends this process at once: threads that a model left running must not keep it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def describe_exit(code: int) -> str:
    """What an exit status says, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ": out of memory, or somebody killed it" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def kill_orphans(session: int | None) -> None:
    """Ends what a dead worker left behind: as subreaper we inherit it. None: whatever worker it came from."""
    killed = True
    while killed:  # then their children are ours
        killed = False
        try:
            with open("/proc/thread-self/children") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            return  # a kernel without CONFIG_PROC_CHILDREN
        for pid in children:
            try:
                if session is None or os.getsid(pid) == session:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    killed = True
            except OSError:
                pass  # gone already

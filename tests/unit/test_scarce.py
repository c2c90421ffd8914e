"""Limits of the process that are reached, in words."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batch_inference.errors import TransportError
from batch_inference.transport import handshake, segment
from batch_inference.transport.channel import PipeChannel, ThreadChannel
from batch_inference.transport.handshake import Connection, ConnectionLostError
from batch_inference.transport.scarce import explained, explanation


@pytest.fixture
def take_all() -> Iterator[Callable[[], None]]:
    """Takes all the descriptors that this process may have; few more than it has."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()

    def take() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
        try:
            while True:
                taken.append(os.dup(0))
        except OSError as error:
            assert error.errno == errno.EMFILE

    yield take
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    handshake.close_all(taken)


@pytest.mark.parametrize("make", [lambda: segment.create(1 << 20), lambda: ThreadChannel(0), lambda: PipeChannel(0)])
def test_what_needs_a_descriptor_says_that_there_is_none(make: Callable[[], Any], take_all: Callable[[], None]) -> None:
    take_all()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(TransportError, match=f"this process has no descriptor left: .* allows it {soft}") as caught:
        make()
    assert f"up to {hard} with resource.setrlimit" in str(caught.value) and isinstance(caught.value.__cause__, OSError)


def test_a_message_whose_descriptors_find_no_place_says_so(take_all: Callable[[], None]) -> None:
    ours, theirs = map(Connection, handshake.pair())
    theirs.send({"type": "x"}, [0])
    take_all()
    with pytest.raises(ConnectionLostError, match="cut short: who was to receive it has no descriptor left"):
        ours.receive()
    ours.close()
    theirs.close()


def test_the_limit_of_a_files_size_holds_for_shared_memory_and_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, before[1]))
    try:
        with pytest.raises(TransportError, match=r"no files of more than 102400 bytes \(RLIMIT_FSIZE, ulimit -f\)"):
            segment.create(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_other_errors_pass_as_they_are() -> None:
    for error in PermissionError(errno.EPERM, "no"), ValueError("x"), TransportError("y"):
        assert explanation(error) is None
        with pytest.raises(type(error)) as caught, explained():
            raise error
        assert caught.value is error
    assert "a worker process has no descriptor" in str(explanation(OSError(errno.EMFILE, "x"), "a worker process"))
    assert "fs.file-max" in str(explanation(OSError(errno.ENFILE, "x")))

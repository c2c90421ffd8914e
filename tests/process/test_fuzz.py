"""Rubbish from clients: 10,000 cases, determined by seeds. Worker and supervisor stay up and answer good clients.

More, and others, with BATCH_INFERENCE_FUZZ=seed:cases, such as 7:100000.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batch_inference import ModelHost
from batch_inference.testing import Doubles, wait_until
from batch_inference.transport import handshake
from batch_inference.transport.wire import VERSION
from tests.process.load import supervisor_pid, value, worker_pid
from tests.process.rogue import VOCABULARY, Intruder, Rogue, Rubbish

SEED, CASES = map(int, os.environ.get("BATCH_INFERENCE_FUZZ", "6:10000").split(":"))
EVERY = 50  # cases between two looks at whether all is well

pytestmark = pytest.mark.timeout(60 + CASES // 20)


class Tidies(Doubles):
    """Collects garbage when it sees zeros: an error's traceback may hold requests, and so memory, until then."""

    def predict_batch(self, x: Any) -> Any:
        if not x.any():
            gc.collect()
        return super().predict_batch(x)


@contextmanager
def unharmed(path: Path) -> Iterator[tuple[str, Rubbish, Callable[[int], None]]]:
    """The address of a host, rubbish, and a check that the host is as well as ever, given the number of the case."""
    mark = path / "unpickled"
    with ModelHost(Tidies)() as host:
        worker, supervisor = worker_pid(host), supervisor_pid(host)
        client: Any = host._client

        def check(case: int) -> None:
            if case % EVERY == 0:
                assert host.predict(value(case, -case), timeout=30).tolist() == [[2 * case, -2 * case]]
                assert (worker_pid(host), supervisor_pid(host)) == (worker, supervisor), f"one died, case {case}"

        check(0)
        before = [descriptors(pid) for pid in (worker, supervisor)]
        yield client.link.address, Rubbish(SEED, str(mark)), check
        check(0)
        for pid, most in zip((worker, supervisor), before):
            wait_until(lambda pid=pid, most=most: descriptors(pid) <= most, 20, "descriptors are given back")
        assert host.statistics().workers[0].restarts == 0
    assert not mark.exists()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_rubbish_in_place_of_a_greeting(tmp_path: Path) -> None:
    with unharmed(tmp_path) as (address, rubbish, check):
        for case in range(CASES * 7 // 20):
            rogue = Rogue(address)
            rogue.send(rubbish.packet(), [rubbish.fd() for _ in range(rubbish.random.choice([0, 0, 1, 3]))])
            assert rogue.is_dropped()
            rogue.close()
            check(case)


def test_rubbish_from_a_client_that_has_been_welcomed(tmp_path: Path) -> None:
    hello = json.dumps({"type": "hello", "version": VERSION}).encode()
    with unharmed(tmp_path) as (address, rubbish, check):
        for case in range(CASES * 7 // 20):
            rogue = Rogue(address)
            rogue.send(hello)
            if rubbish.random.random() < 0.8:
                packet = json.dumps(rubbish.message(["segment", "channels"] * 3 + VOCABULARY)).encode()
            else:
                packet = rubbish.packet()
            rogue.send(packet, [rubbish.fd() for _ in range(rubbish.random.choice([0, 1, 1, 1, 3]))])
            assert rogue.is_dropped()
            rogue.close()
            check(case)


def test_rubbish_in_descriptors_slots_and_requests(tmp_path: Path) -> None:
    with unharmed(tmp_path) as (address, rubbish, check):
        cases = bursts = 0
        while cases < CASES * 3 // 10:
            intruder = Intruder(address, rubbish)
            for _ in range(200):
                cases += intruder.burst()
                bursts += 1
                check(bursts)
            intruder.close()


@pytest.mark.parametrize("seals", ["none", "sealable"])
def test_a_client_with_a_segment_that_could_be_cut_short_is_dropped(tmp_path: Path, seals: str) -> None:
    with unharmed(tmp_path) as (address, _, _):
        rogue = Rogue(address)
        rogue.join()
        fd = os.memfd_create("rogue", os.MFD_ALLOW_SEALING if seals == "sealable" else 0)
        os.ftruncate(fd, 1 << 20)
        rogue.send(json.dumps({"type": "segment"}).encode(), [fd])
        rogue.sock.settimeout(20)
        told = json.loads(rogue.sock.recv(1000))
        assert told["type"] == "dropped" and "not sealed" in told["why"]
        assert rogue.sock.recv(100) == b""  # closed, though we have said no goodbye
        rogue.close()


def test_a_burst_cut_short_in_the_middle_of_those_of_good_clients_loses_none(tmp_path: Path) -> None:
    """The worker finds the descriptors that lie between the places where they should."""
    with ModelHost(Doubles)() as host:
        client: Any = host._client
        rubbish = Rubbish(SEED, str(tmp_path / "unpickled"))
        intruder = Intruder(client.link.address, rubbish)
        for number in range(64):
            first = bytes(number % 32) if number < 32 else rubbish.random.randbytes(number % 32)
            intruder.write(first)
            futures = [host.submit(value(number, index)) for index in range(5)]
            intruder.write(bytes(32 - len(first)))  # all of it together are whole descriptors, those in between are not
            assert [future.result(timeout=20).tolist() for future in futures] == [
                [[2 * number, 2 * index]] for index in range(5)
            ]
        intruder.close()
        assert host.statistics().workers[0].restarts == 0


# --- other users ----------------------------------------------------------------------------------------------------

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try")


def as_nobody(function: Callable[[], str]) -> str:
    """What `function` returns in a child process of the user nobody."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            answer = function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


@as_root
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_of_another_user_is_refused_and_nothing_it_sends_is_read(tmp_path: Path) -> None:
    with unharmed(tmp_path) as (address, rubbish, _):
        greetings = [json.dumps({"type": "hello", "version": VERSION}).encode(), *rubbish.pickled]

        def greet() -> str:
            import socket

            refused = 0
            for greeting in greetings:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.connect(address)
                    sock.settimeout(20)
                    try:
                        sock.send(greeting)
                        sock.recv(100)
                    except (BrokenPipeError, ConnectionResetError):  # so the kernel says what was sent was not read
                        refused += 1
            return f"{refused} refused"

        assert as_nobody(greet) == f"{len(greetings)} refused"


@as_root
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_of_another_user_does_not_come_near_a_named_host(tmp_path: Path) -> None:
    def come() -> str:
        try:
            return str(handshake.connect(address))
        except PermissionError:
            return "refused"

    with ModelHost(Doubles, name=f"fuzz-{os.getpid()}")() as host:
        client: Any = host._client
        address = client.link.address
        assert as_nobody(come) == "refused"
        assert host.predict(value(1)).tolist() == [[2]]


@as_root
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_client_trusts_no_host_of_another_user() -> None:
    address = handshake.random_address()
    told, tell = os.pipe()

    def serve() -> str:
        import select
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            os.write(tell, b"listening")
            assert select.select([listener], [], [], 20)[0]
            sock, _ = listener.accept()
            sock.settimeout(20)
            return f"heard {sock.recv(100)!r}"

    import threading

    heard: list[str] = []
    thread = threading.Thread(target=lambda: heard.append(as_nobody(serve)))
    thread.start()
    assert os.read(told, 9) == b"listening"
    with pytest.raises(handshake.TransportError, match="served by user 65534"):
        handshake.connect(address)
    thread.join()
    handshake.close_all([told, tell])
    assert heard == ["heard b''"]

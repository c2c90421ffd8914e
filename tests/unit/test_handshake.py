"""Control connections, addresses and elections."""

import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_inference.errors import TransportError
from batch_inference.transport import handshake, segment
from batch_inference.transport.handshake import Connection, ConnectionLostError

Pair = tuple[Connection, Connection]


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = map(Connection, handshake.pair())
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bi-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


# --- connections ----------------------------------------------------------------------------------------------------


def test_messages_keep_their_boundaries_and_bring_their_descriptors(pair: Pair) -> None:
    near, far = pair
    assert far.receive() is None
    reading, writing = os.pipe()
    near.send({"type": "one", "text": "é\0\n"}, [reading, writing])
    near.send({"type": "two"})
    message, fds = received(far)
    assert message == {"type": "one", "text": "é\0\n"} and len(fds) == 2
    os.write(fds[1], b"x")
    assert os.read(reading, 1) == b"x"  # the same pipe
    assert not os.get_inheritable(fds[0])
    handshake.close_all([reading, writing, *fds])
    assert received(far) == ({"type": "two"}, [])


def received(connection: Connection) -> tuple[dict[str, object], list[int]]:
    found = connection.receive()
    assert found is not None
    return found


def test_sending_never_blocks_and_what_waited_comes_in_order_with_its_descriptors(pair: Pair) -> None:
    near, far = pair
    null = os.open(os.devnull, os.O_RDONLY)
    for number in range(2000):
        near.send({"type": "n", "number": number}, [null] if number % 100 == 0 else [])
    os.close(null)  # duplicates wait
    assert near.unsent
    for number in range(2000):
        near.flush()
        message, fds = received(far)
        assert message["number"] == number and len(fds) == (number % 100 == 0)
        handshake.close_all(fds)
    assert not near.unsent


def test_what_waited_is_closed_with_the_connection(pair: Pair) -> None:
    near, _ = pair
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(500):
        near.send({"type": "n", "filler": "x" * 4000}, [null])
    os.close(null)
    assert near.unsent


def test_a_peer_that_reads_nothing_is_given_up_in_the_end(pair: Pair) -> None:
    near, _ = pair
    with pytest.raises(ConnectionLostError, match="unread"):
        for _ in range(handshake.MAX_QUEUED + 5000):
            near.send({"type": "n"})


def test_flush_until_waits_for_room_and_no_longer_than_it_may(pair: Pair) -> None:
    near, far = pair
    while not near.unsent:
        near.send({"type": "n", "filler": "x" * 4000})
    near.flush_until(time.monotonic() + 0.05)
    assert near.unsent
    for _ in range(50):
        near.send({"type": "n", "filler": "x" * 4000})
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if handshake.readable(far.fileno(), 0.01):
                far.receive()

    reader = threading.Thread(target=read)
    reader.start()
    near.flush_until(time.monotonic() + 30)
    over.set()
    reader.join()
    assert not near.unsent


def test_the_end_of_the_peer_is_an_error(pair: Pair) -> None:
    near, far = pair
    far.close()
    with pytest.raises(ConnectionLostError):
        near.receive()
    with pytest.raises(ConnectionLostError):
        near.send({"type": "n"})
    near.flush_until(time.monotonic() + 1)


@pytest.mark.parametrize("data", [b"no json", b"[1]", b"{}", b'{"type": 3}', b'"type"', b"\xff\xfe", b"[" * 60_000])
def test_bytes_that_are_no_message_are_an_error_and_leave_no_descriptor_open(data: bytes) -> None:
    ours, theirs = handshake.pair()
    null = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(theirs, [data], [null])
    os.close(null)
    connection = Connection(ours)
    with pytest.raises(ConnectionLostError):
        connection.receive()
    connection.close()
    theirs.close()


def test_more_descriptors_than_a_message_may_bring_are_an_error_and_leave_none_open() -> None:
    ours, theirs = handshake.pair()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(handshake.MAX_DESCRIPTORS + 1)]
    socket.send_fds(theirs, [b'{"type": "n"}'], fds)
    handshake.close_all(fds)
    connection = Connection(ours)
    with pytest.raises(ConnectionLostError, match="cut short"):
        connection.receive()
    connection.close()
    theirs.close()


def test_a_message_that_is_too_long_is_the_senders_mistake(pair: Pair) -> None:
    with pytest.raises(ValueError):
        pair[0].send({"type": "n", "text": "x" * handshake.MAX_MESSAGE})


@pytest.mark.parametrize("text", ["x" * 100_000, "é" * 100_000, "\n" * 100_000, "\0" * 100_000, "short", ""])
def test_long_texts_are_shortened_until_a_message_can_carry_them(text: str, pair: Pair) -> None:
    short = handshake.shorten(text)
    if len(text) < 100:
        assert short == text
    else:
        assert short[:100] == text[:100] and short[-100:] == text[-100:] and "left out" in short
    pair[0].send({"type": "n", "one": short, "two": short})
    assert received(pair[1])[0]["one"] == short


def test_readable_sees_data_and_waits_no_longer_than_it_may() -> None:
    reading, writing = os.pipe()
    assert not handshake.readable(reading, 0.0) and not handshake.readable(reading, 0.01)
    assert not handshake.readable(reading, -1.0)
    os.write(writing, b"x")
    assert handshake.readable(reading, 0.0)
    handshake.close_all([reading, writing])


# --- addresses and elections ----------------------------------------------------------------------------------------


def test_one_of_many_is_elected_and_the_others_connect(runtime: Path) -> None:
    for address in handshake.random_address(), handshake.named_address("host"):
        found: list[tuple[socket.socket, bool]] = []
        together = threading.Barrier(8)

        def run(address: str = address, together: threading.Barrier = together, found: list = found) -> None:
            together.wait()
            found.append(handshake.connect_or_listen(address, time.monotonic() + 20))

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(listens for _, listens in found) == 1 and len(found) == 8
        for sock, _ in found:
            sock.close()


def test_a_socket_left_by_a_killed_supervisor_is_replaced(runtime: Path) -> None:
    address = handshake.named_address("host")
    first, listens = handshake.connect_or_listen(address, time.monotonic() + 5)
    assert listens and os.path.exists(address)
    first.close()  # the path stays
    assert handshake.connect(address) is None
    second, listens = handshake.connect_or_listen(address, time.monotonic() + 5)
    assert listens
    client = handshake.connect(address)
    assert client is not None and handshake.peer(client) == (os.getpid(), os.geteuid())
    client.close()
    second.close()
    handshake.unlink(address)
    assert not os.path.exists(address) and os.path.exists(f"{address}.lock")  # the lock's file is never unlinked


def test_nobody_serves_an_address_that_nobody_bound(runtime: Path) -> None:
    assert handshake.connect(handshake.random_address()) is None
    assert handshake.connect(handshake.named_address("nobody")) is None


def test_the_runtime_directory_is_its_users_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = handshake.runtime_directory()
    assert path == str(runtime / "batch_inference") and stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert handshake.runtime_directory() == path
    os.chmod(path, 0o755)
    with pytest.raises(TransportError, match="0700"):
        handshake.runtime_directory()
    os.rmdir(path)
    os.symlink(tempfile.gettempdir(), path)
    with pytest.raises(TransportError):
        handshake.runtime_directory()
    os.unlink(path)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert handshake.runtime_directory() == str(runtime / f"batch_inference-{os.geteuid()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_that_another_user_made_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    path = runtime / "batch_inference-0"
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(TransportError, match="of user 65534"):
        handshake.named_address("host")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))  # nor is XDG_RUNTIME_DIR believed that is somebody else's
    with pytest.raises(TransportError, match="of user 65534"):
        handshake.named_address("host")


def test_a_path_too_long_for_a_socket_is_refused_with_a_way_out(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("x" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(TransportError, match="shorter name"):
        handshake.named_address("n" * 30)


def test_who_finds_no_place_in_the_queue_waits_for_one(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = handshake.random_address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(0)
        first = handshake.connect(address)
        monkeypatch.setattr(handshake, "CONNECT_TIMEOUT", 0.05)
        with pytest.raises(TransportError, match="is it stopped"):
            handshake.connect(address)
        monkeypatch.setattr(handshake, "CONNECT_TIMEOUT", 30.0)
        found: list[socket.socket | None] = []
        thread = threading.Thread(target=lambda: found.append(handshake.connect(address)))
        thread.start()
        accepted = [listener.accept()[0] for _ in range(2)]
        thread.join(30)
        for sock in [first, *found, *accepted]:
            assert sock is not None
            sock.close()


# --- segments -------------------------------------------------------------------------------------------------------


def test_segments_are_shared_zeroed_and_sealed() -> None:
    ours = segment.create(8192)
    theirs = segment.attach(os.dup(ours.fd))
    assert ours.memory[:] == bytes(8192)
    ours.words[3] = 7
    assert theirs.words[3] == 7 and theirs.size == 8192
    with pytest.raises(PermissionError):
        os.ftruncate(ours.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(ours.fd, 16384)
    ours.discard()
    assert theirs.words[3] == 0
    ours.close()
    ours.close()


@pytest.mark.parametrize("size", [0, 1, 63, 100, 4097])
def test_memory_of_a_size_that_is_no_segments_is_refused_and_its_descriptor_closed(size: int) -> None:
    import fcntl

    fd = os.memfd_create("batch_inference", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(TransportError, match=f"{size} bytes"):
        segment.attach(fd)


def test_memory_that_is_not_sealed_is_refused_and_its_descriptor_closed() -> None:
    for flags in 0, os.MFD_ALLOW_SEALING:
        fd = os.memfd_create("batch_inference", flags)
        os.ftruncate(fd, 4096)
        with pytest.raises(TransportError, match="sealed"):
            segment.attach(fd)
    with pytest.raises(TransportError, match="sealed"):
        segment.attach(os.open(os.devnull, os.O_RDWR))

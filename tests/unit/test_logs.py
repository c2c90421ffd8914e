"""Log records between processes: here both ends are in one."""

import json
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from batch_inference import logs
from batch_inference.testing import wait_until

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    near.setblocking(False)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def seen() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, logger = Keeps(), logging.getLogger("unit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def record(message: object = "hello %s", *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("unit.deep", logging.WARNING, "/a/file.py", 12, message, args, None, "function")
    made.__dict__.update(fields)
    return made


def test_a_record_arrives_as_it_was_made(seen: list[logging.LogRecord]) -> None:
    made = record("hello %s", "there", tenant="a", odd={1, 2}, process=4711)
    logs.deliver(json.loads(logs.pack_record(made)))
    (found,) = seen
    assert found.getMessage() == "hello there" and found.tenant == "a" and found.process == 4711  # type: ignore[attr-defined]
    for name in "name", "levelno", "levelname", "pathname", "lineno", "funcName", "created", "msecs", "threadName":
        assert getattr(found, name) == getattr(made, name)


def test_tracebacks_arrive_as_text(seen: list[logging.LogRecord]) -> None:
    try:
        raise KeyError("inside")
    except KeyError as error:
        made = record("failed", exc_info=(KeyError, error, error.__traceback__))
    logs.deliver(json.loads(logs.pack_record(made)))
    assert "KeyError: 'inside'" in logging.Formatter().format(seen[0])


def test_levels_of_the_application_hold_for_what_arrives(seen: list[logging.LogRecord]) -> None:
    logging.getLogger("unit").setLevel(logging.ERROR)
    logs.deliver(json.loads(logs.pack_record(record())))
    assert seen == []


def test_any_record_fits_into_one_datagram(sockets: Sockets) -> None:
    near, far = sockets
    handler = logs.DatagramHandler(far)
    for made in record("x" * 500_000), record("é" * 500_000), record("%s", "\0" * 500_000):
        handler.handle(made)
        assert json.loads(near.recv(1 << 16))["name"] == "unit.deep"


def test_a_burst_waits_for_its_reader_and_arrives_whole(sockets: Sockets) -> None:
    near, far = sockets
    near.setblocking(True)
    handler = logs.DatagramHandler(far)
    found: list[str] = []

    def read() -> None:
        while len(found) < 500:
            found.append(json.loads(near.recv(1 << 16))["msg"])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(500):
        handler.handle(record(str(number)))
    reader.join(30)
    assert found == [str(number) for number in range(500)]


@pytest.mark.timeout(60)
def test_while_nobody_reads_only_one_record_waits(sockets: Sockets) -> None:
    near, far = sockets
    handler = logs.DatagramHandler(far)
    for number in range(1000):  # if each waited, 1000 s
        handler.handle(record(str(number)))
    count = 0
    with pytest.raises(BlockingIOError):
        while near.recv(1 << 16):
            count += 1
    assert 0 < count < 1000
    handler.handle(record("heard again"))
    assert b"heard again" in near.recv(1 << 16)


def test_a_relay_delivers_in_order_and_ends_with_what_it_has(seen: list[logging.LogRecord]) -> None:
    relay = logs.Relay()
    relay.close()  # nothing came: there is no thread
    for number in range(100):
        relay.put({"type": "log", "record": json.loads(logs.pack_record(record(str(number))))})
    relay.close()
    assert [found.getMessage() for found in seen] == [str(number) for number in range(100)]
    wait_until(lambda: not [thread for thread in threading.enumerate() if "batch_inference-logs" in thread.name])


def test_output_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    relay = logs.Relay()
    relay.put({"type": "output", "text": "printed\n" + "x" * 10_000})
    relay.close()
    assert capfd.readouterr().err == "printed\n" + "x" * 10_000

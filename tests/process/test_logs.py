"""Log records and output of the worker, in the application."""

import copy
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from batch_inference import ModelHost
from batch_inference.batcher import ListBatcher
from batch_inference.logs import Relay
from batch_inference.testing import wait_until
from tests.process.conftest import Run

NAME = "tests.model"


def log_in_child(text: str) -> None:
    logging.getLogger(f"{NAME}.child").warning(text)


class Logs:
    """Logs what it is asked to."""

    def __init__(self) -> None:
        logging.getLogger(NAME).info("loading")

    def predict_batch(self, orders: Any) -> Any:
        return [getattr(self, order)(*arguments) for order, *arguments in orders]

    def log(self, level: int, text: str, name: str = NAME) -> int:
        logging.getLogger(name).log(level, "%s", text)
        return os.getpid()

    def burst(self, count: int) -> None:
        for number in range(count):
            logging.getLogger(NAME).info("record %d of the burst", number)

    def exception(self) -> None:
        try:
            raise KeyError("inside")
        except KeyError:
            logging.getLogger(NAME).exception("it failed", extra={"tenant": "a", "odd": object()})

    def fork(self) -> int:
        pid = os.fork()
        if not pid:
            log_in_child("from os.fork")
            os._exit(0)
        os.waitpid(pid, 0)
        return pid

    def process(self) -> int:
        child = multiprocessing.get_context("fork").Process(target=log_in_child, args=["from multiprocessing"])
        child.start()
        child.join()
        return child.pid or 0

    def close(self) -> None:
        logging.getLogger(NAME).info("closing")
        print("closed", flush=True)


class Collects(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(copy.copy(record))
        record.msg, record.args = ascii(record.getMessage()), None  # for pytest: not every text of ours can be shown

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def handler() -> Iterator[Collects]:
    """On the logger of the model, which logs from INFO on."""
    handler, logger = Collects(), logging.getLogger(NAME)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_records_reach_the_applications_handlers_as_they_were_made(handler: Collects) -> None:
    with ModelHost(Logs, batcher=ListBatcher())() as host:
        before = time.time()
        pid = host.predict(("log", logging.ERROR, "hello"))
        host.predict(("log", logging.DEBUG, "below the level"))
        host.predict(("log", logging.INFO, "in a child", f"{NAME}.deep.child"))
        host.predict(("exception",))
        wait_until(lambda: len(handler.records) == 4)
        assert pid == host.statistics().workers[0].pid != os.getpid()
    assert handler.texts() == ["loading", "hello", "in a child", "it failed", "closing"]
    hello, child, failed = handler.records[1:4]
    assert (hello.levelno, hello.levelname, hello.name, hello.process) == (logging.ERROR, "ERROR", NAME, pid)
    assert before <= hello.created <= time.time() and hello.funcName == "log" and hello.lineno > 0
    assert hello.pathname == __file__ and hello.module == "test_logs"
    assert child.name == f"{NAME}.deep.child"
    assert "KeyError: 'inside'" in logging.Formatter().format(failed) and failed.tenant == "a"  # type: ignore[attr-defined]


def test_the_death_of_a_worker_is_a_warning_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with ModelHost(Logs, batcher=ListBatcher())() as host:
        pid = host.predict(("log", logging.DEBUG, "nothing"))
        os.kill(pid, signal.SIGKILL)
        assert host.predict(("log", logging.DEBUG, "nothing"), timeout=60) != pid
        wait_until(lambda: bool(caplog.records))
    (record,) = [record for record in caplog.records if record.name == "batch_inference"]
    assert record.levelno == logging.WARNING
    assert (
        record.getMessage()
        == f"worker 0 (process {pid}) was killed by SIGKILL: out of memory, or somebody killed it; it is started again"
    )


def test_records_of_processes_that_the_model_forks_arrive_with_their_own_process_id(handler: Collects) -> None:
    with ModelHost(Logs, batcher=ListBatcher())() as host:
        pids = [host.predict(("fork",)), host.predict(("process",))]
        wait_until(lambda: len(handler.records) == 3)
    found = [(record.getMessage(), record.process, record.name, record.levelname) for record in handler.records[1:3]]
    assert found == [
        ("from os.fork", pids[0], f"{NAME}.child", "WARNING"),
        ("from multiprocessing", pids[1], f"{NAME}.child", "WARNING"),
    ]


def test_a_burst_of_records_arrives_whole_and_in_order(handler: Collects) -> None:
    with ModelHost(Logs, batcher=ListBatcher())() as host:
        host.predict(("burst", 2000))
    texts = [text for text in handler.texts() if "burst" in text]
    assert texts == [f"record {number} of the burst" for number in range(2000)]


def test_a_burst_arrives_whole_at_an_application_that_is_slow_to_read(
    handler: Collects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Relay.put

    def slowly(relay: Relay, message: dict[str, Any]) -> None:
        time.sleep(0.0003)
        put(relay, message)

    monkeypatch.setattr(Relay, "put", slowly)
    with ModelHost(Logs, batcher=ListBatcher())() as host:
        host.predict(("burst", 4000))
        wait_until(lambda: "record 3999 of the burst" in handler.texts(), 60)
    texts = [text for text in handler.texts() if "burst" in text]
    assert texts == [f"record {number} of the burst" for number in range(4000)]


def test_long_records_are_cut_and_no_record_stops_the_worker(handler: Collects) -> None:
    with ModelHost(Logs, batcher=ListBatcher())() as host:
        host.predict(("log", logging.INFO, "x" * 1_000_000))
        host.predict(("log", logging.INFO, "é\udcff\0"))
        host.predict(("log", logging.INFO, "the next"))
        wait_until(lambda: "the next" in handler.texts())
    assert 1000 < len(handler.texts()[1]) < 1_000_000 and handler.texts()[1].startswith("xxx")


def test_levels_set_in_the_application_hold_in_the_worker(handler: Collects) -> None:
    class Levels:
        def predict_batch(self, names: Any) -> Any:
            return [logging.getLogger(name).getEffectiveLevel() for name in names]

    root, other = logging.getLogger(), logging.getLogger("tests.other")
    before = root.level
    try:
        root.setLevel(logging.ERROR)
        other.setLevel(logging.DEBUG)
        with ModelHost(Levels, batcher=ListBatcher())() as host:
            levels = [host.predict(name) for name in ("", NAME, f"{NAME}.x", "tests.other", "elsewhere")]
        assert levels == [logging.ERROR, logging.INFO, logging.INFO, logging.DEBUG, logging.ERROR]
    finally:
        root.setLevel(before)
        other.setLevel(logging.NOTSET)


def test_a_handler_that_raises_hurts_nobody(handler: Collects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    broken = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        raise RuntimeError("no disk")

    monkeypatch.setattr(broken, "emit", emit)
    logger = logging.getLogger(f"{NAME}.broken")
    logger.addHandler(broken)
    try:
        with ModelHost(Logs, batcher=ListBatcher())() as host:
            host.predict(("log", logging.INFO, "one", f"{NAME}.broken"))
            host.predict(("log", logging.INFO, "two"))
            wait_until(lambda: "two" in handler.texts())
    finally:
        logger.removeHandler(broken)


PRINTS = """
import os, subprocess, sys
from batch_inference import ModelHost
from batch_inference.batcher import ListBatcher

class Prints:
    def __init__(self):
        print("printed while loading")
    def predict_batch(self, values):
        print("printed with print")
        print("printed to stderr", file=sys.stderr)
        os.write(1, b"written to descriptor 1\\n")
        subprocess.run(["echo", "echoed by a child"])
        sys.stdout.write("no newline at the end")
        return values
    def close(self):
        print(", printed while closing")

with ModelHost(Prints, batcher=ListBatcher()) as host:
    host.predict(1)
print("the application's own output")
"""


def test_what_the_worker_prints_goes_to_the_applications_stderr(run_script: Run) -> None:
    done = run_script(PRINTS)
    assert done.stdout == "the application's own output\n"
    for line in (
        "printed while loading\n",
        "printed with print\n",
        "printed to stderr\n",
        "written to descriptor 1\n",
        "echoed by a child\n",
        "no newline at the end, printed while closing\n",
    ):
        assert line in done.stderr, done.stderr


def test_importing_and_using_the_library_configures_no_logging(run_script: Run) -> None:
    done = run_script(
        """
import logging
import batch_inference
from batch_inference import ModelHost
from batch_inference.testing import Doubles
import numpy as np
with ModelHost(Doubles)() as host:
    host.predict(np.ones(2))
root = logging.getLogger()
assert root.handlers == [] and root.level == logging.WARNING and not logging.root.filters
assert not [name for name, logger in root.manager.loggerDict.items() if getattr(logger, "handlers", [])]
print(logging.raiseExceptions, logging.lastResort.level)
"""
    )
    assert (done.stdout, done.stderr) == ("True 30\n", "")


def test_without_any_configuration_warnings_of_the_worker_appear_on_stderr_once(run_script: Run) -> None:
    done = run_script(
        """
import logging
from batch_inference import ModelHost
from batch_inference.batcher import ListBatcher

class Warns:
    def predict_batch(self, values):
        logging.getLogger("m").warning("careful")
        logging.getLogger("m").info("not shown")
        return values

with ModelHost(Warns, batcher=ListBatcher()) as host:
    host.predict(1)
"""
    )
    assert done.stderr == "careful\n"


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")
def test_records_of_a_model_in_a_thread_need_no_journey(handler: Collects) -> None:
    with ModelHost(Logs, batcher=ListBatcher(), num_workers=0)() as host:
        assert host.predict(("log", logging.INFO, "near")) == os.getpid()
    assert handler.texts() == ["loading", "near", "closing"]

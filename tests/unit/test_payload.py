"""What a worker is made from."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from batch_inference import payload
from batch_inference.batcher import ConcatBatcher
from batch_inference.errors import ConfigError
from batch_inference.payload import Recipe

LOCK = threading.Lock()


class Model:
    def __init__(self, factor: Any = 2, *, offset: Any = 0) -> None:
        self.factor = factor
        self.offset = offset

    def predict_batch(self, x: Any) -> Any:
        return x * self.factor + self.offset


def recipe(model_cls: Any = Model, model_obj: Any = None, args: Any = (), kwargs: Any = None) -> Recipe:
    fields: dict[str, Any] = dict.fromkeys(Recipe._fields)
    fields |= {"model_cls": model_cls, "model_obj": model_obj, "args": args, "kwargs": kwargs or {}}
    return Recipe(**fields | {"batcher": ConcatBatcher(), "max_batch_size": 8})


def test_settings_and_content_come_back_and_large_ones_whole() -> None:
    content = os.urandom(3_000_000)
    fd = payload.pack({"a": [1, "é"], "b": None}, content)
    try:
        assert payload.read_settings(fd) == {"a": [1, "é"], "b": None}
        assert payload.read_content(fd) == content
        assert payload.read_settings(fd) == {"a": [1, "é"], "b": None}  # any number of times
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_settings_that_are_no_json_leave_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError):
        payload.pack({"a": object()}, b"")
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_travels_by_value_keeps_the_name_of_its_file() -> None:
    def outer() -> Any:
        def inner() -> None: ...

        return inner

    fd = payload.pack({}, payload.dump(recipe(args=(outer,))))
    try:
        travelled = payload.load(fd).args[0]
    finally:
        os.close(fd)
    for code, own in (travelled.__code__, outer.__code__), (travelled().__code__, outer().__code__):
        assert code is not own
        assert (code.co_filename, code.co_firstlineno) == (__file__, own.co_firstlineno)


def test_a_recipe_builds_its_model_after_the_journey() -> None:
    for made in recipe(args=(3,), kwargs={"offset": 1}), recipe(None, Model(3, offset=1)):
        fd = payload.pack({}, payload.dump(made))
        try:
            model = payload.load(fd).build()
        finally:
            os.close(fd)
        assert model.predict_batch(2) == 7


def local_class() -> type:
    lock = threading.Lock()

    class Local(Model):
        def predict_batch(self, x: Any) -> Any:
            with lock:
                return x

    return Local


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (recipe(local_class()), "'lock'.*lock"),
        (recipe(args=(1, LOCK)), "argument 1"),
        (recipe(kwargs={"offset": LOCK}), "argument 'offset'"),
        (recipe(None, Model(LOCK)), "model_obj.*'factor'"),
    ],
    ids=["captured", "argument", "keyword", "attribute"],
)
def test_what_cannot_travel_is_named(made: Recipe, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        payload.dump(made)


def test_surroundings_say_where_the_application_finds_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    found = payload.surroundings()
    assert found["path"] == [os.getcwd(), "/somewhere"] and found["cwd"] == os.getcwd()
    assert "" in found["levels"]


def test_a_current_directory_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"current directory .* does not exist any more: .*os\.chdir\(\)"):
        payload.surroundings()


def test_a_model_is_closed_if_it_can_be() -> None:
    class Closes(Model):
        closed = False

        def close(self) -> None:
            self.closed = True

    model = Closes()
    payload.close_model(model)
    payload.close_model(Model())
    assert model.closed


def test_nobody_who_has_the_payload_can_change_it() -> None:
    fd = payload.pack({"path": []}, b"content")
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1), lambda: os.ftruncate(fd, 1 << 20)):
        with pytest.raises(PermissionError):
            change()
    assert payload.read_content(fd) == b"content"
    os.close(fd)

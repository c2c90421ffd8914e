"""Every Python code block of README, documentation and tutorials runs as it stands, each as a script of its own.

A block after the comment <!-- fragment --> needs what is not installed here and is only compiled.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tutorials").rglob("*.md"))]
BLOCK = re.compile(r"(?P<fragment><!-- fragment -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, bool, str]]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", bool(match["fragment"]), match["code"]))
    return found


BLOCKS = blocks()
WHOLE = [pytest.param(name, code, id=name) for name, fragment, code in BLOCKS if not fragment]
FRAGMENTS = [pytest.param(name, code, id=name) for name, fragment, code in BLOCKS if fragment]


@pytest.mark.parametrize(("name", "code"), WHOLE)
def test_code_block_runs(name: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error::DeprecationWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, f"{name}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(("name", "code"), FRAGMENTS)
def test_fragment_compiles(name: str, code: str) -> None:
    compile(code, name, "exec")


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

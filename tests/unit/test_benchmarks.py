"""The pure parts of the benchmarks: percentiles, choice of rounds, judgement, the table. No timing."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import load, page
from benchmarks.__main__ import main, parse
from benchmarks.measure import Cell, Goal, Round, Row, Sample, judge, percentile, quiet, summary
from benchmarks.options import Options
from benchmarks.peers import goals, roster
from benchmarks.peers.beside import PIPE
from benchmarks.peers.compare import CALLERS, takes_part
from benchmarks.peers.contender import Contender, merged
from benchmarks.report import number, record, table
from benchmarks.workloads import MAX_BATCH, WORKLOADS, Counts, Model, echo, right


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1.0), (0.5, 5.0), (0.9, 9.0), (0.99, 10.0), (1.0, 10.0), (0.01, 1.0)]
)
def test_percentile_is_the_nearest_rank_of_unsorted_values(share: float, wanted: float) -> None:
    assert percentile([10.0, 3.0, 1.0, 2.0, 5.0, 4.0, 8.0, 9.0, 6.0, 7.0], share) == wanted


def test_percentile_refuses_no_values_and_shares_outside_0_to_1() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], 50)


@pytest.mark.parametrize(
    ("goal", "value", "ratio", "met"),
    [
        (Goal(times=2.2, at_most=True), 33.0, 2.2, True),
        (Goal(times=2.2, at_most=True), 33.0, 2.21, False),
        (Goal(45_000, 2.0), 45_000, 0.5, True),
        (Goal(45_000, 2.0), 30_000, 2.0, True),
        (Goal(45_000, 2.0), 44_999, 1.99, False),
        (Goal(times=0.35), 400.0, 0.35, True),
        (Goal(times=0.35), 400.0, None, False),
        (Goal(limit=0.6, at_most=True), 0.6, None, True),
        (Goal(limit=0.6, at_most=True), 0.61, None, False),
    ],
)
def test_a_goal_is_met_by_either_of_its_bounds(goal: Goal, value: float, ratio: float | None, met: bool) -> None:
    assert goal.met(value, ratio) is met


def test_a_goal_reads_as_a_bound() -> None:
    assert str(Goal(120_000, 5.0)) == ">= 120,000 or 5x"
    assert str(Goal(times=2.2, at_most=True)) == "<= 2.2x"


def test_disturbed_rounds_are_left_out_while_enough_quiet_ones_remain() -> None:
    samples = [Sample(float(index), foreign=foreign) for index, foreign in enumerate((0.0, 0.9, 0.1, 0.2, 0.3))]
    assert sorted(sample.value for sample in quiet(samples)) == [0.0, 2.0, 3.0]


def test_without_enough_quiet_rounds_the_least_disturbed_ones_count() -> None:
    samples = [Sample(float(index), foreign=foreign) for index, foreign in enumerate((0.9, 0.4, 0.8, 0.5))]
    assert [sample.value for sample in quiet(samples)] == [1.0, 3.0, 2.0]


def test_the_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    row = judge("cell", "us", [Sample(10, 10), Sample(40, 20), Sample(90, 30)], Goal(times=2.0, at_most=True))
    assert (row.value, row.floor, row.ratio, row.met, row.rounds) == (40, 20, 2.0, True, 3)


def test_a_wrong_answer_fails_the_row_however_fast_it_was() -> None:
    row = judge("cell", "/s", [Sample(1e6, 1.0)], Goal(limit=1.0), note="fast", faults=2)
    assert row.met is False
    assert row.note == "2 wrong or missing answers; fast"


def test_a_row_without_a_goal_has_nothing_to_meet() -> None:
    assert judge("cell", "/s", [Sample(5.0)]).met is None


def test_the_table_shows_missed_goals_and_disturbed_rows() -> None:
    rows = [
        Row("round trip", 40.0, "us", 15.0, 2.67, "<= 2.2x", False),
        Row("rate", 123456.7, "/s", 60000.0, 2.06, ">= 2x", True, foreign=0.5),
    ]
    text = table(rows).splitlines()
    assert len({line.index("value") + 5 for line in text[:1]}) == 1
    assert "40 us" in text[1] and "2.67x" in text[1] and "MISSED" in text[1]
    assert "123,457 /s" in text[2] and "ok" in text[2] and "others kept 0.5 cores busy" in text[2]


@pytest.mark.parametrize(("value", "wanted"), [(None, ""), (0.123456, "0.123"), (41.27, "41.3"), (1234.5, "1,234")])
def test_numbers_are_short(value: float | None, wanted: str) -> None:
    assert number(value) == wanted


def test_a_row_becomes_a_json_line() -> None:
    found = json.loads(json.dumps(record("transport", Row("cell", 1.0, "us"))))
    assert (
        found["kind"] == "row" and found["benchmark"] == "transport" and found["value"] == 1.0 and found["met"] is None
    )


def test_the_command_line_refuses_unknown_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["nonsense"])
    assert "no benchmark named nonsense" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert "transport" in capsys.readouterr().out


class Neighbour:
    """Answers each caller with what the caller before it sent; the first gets its own."""

    def __init__(self) -> None:
        self._last: Any = None

    def predict(self, x: Any) -> Any:
        last, self._last = self._last, np.array(x)
        return x if last is None else last

    async def apredict(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return self.predict(x)


class Broken:
    def predict(self, x: Any) -> Any:
        raise ValueError("no")

    async def apredict(self, x: Any) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize("how", [load.threads, load.tasks])
def test_answers_of_others_and_exceptions_are_counted_as_faults(how: Any) -> None:
    pids = (os.getpid(),) if hasattr(os, "sched_getaffinity") else ()
    plan = load.Plan(2, echo((1, 16)), 0.01, 0.01, pids)
    swapped = how(Neighbour(), plan)
    assert swapped.wrong > 0 and swapped.faults >= swapped.wrong
    broken = how(Broken(), plan)
    assert broken.errors == ["ValueError('no')"] * 2 and broken.faults == 2


# --- us beside our peers --------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_model_of_each_workload_gives_the_answers_that_callers_expect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "counts"
    counts.touch()
    monkeypatch.setenv("BENCH_COUNTS", str(counts))
    monkeypatch.setenv("BENCH_BURN", "1")
    work = WORKLOADS[name].work
    streams = [work.stream(caller) for caller in (0, 63)]
    requests, values = zip(*(next(itertools.islice(stream, 5, None)) for stream in streams))
    answers = Model(name).predict_list(requests)
    assert all(right(answer, work.answer, value) for answer, value in zip(answers, values, strict=True))
    assert not right(answers[0], work.answer, values[1])
    assert Counts(str(counts)).read() == (1, 2)


@pytest.mark.parametrize("name", ["a", "g"])
def test_no_two_requests_have_the_same_value(name: str) -> None:
    work = WORKLOADS[name].work
    values = [value for caller in range(MAX_BATCH) for _, value in itertools.islice(work.stream(caller), 100)]
    assert len(set(values)) == len(values)


def test_every_peer_has_an_adapter_and_a_known_environment() -> None:
    folder = Path(roster.__file__).with_name("adapters")
    for peer in roster.PEERS:
        assert (folder / f"{peer.adapter}.py").exists(), peer.name
        assert not peer.environment or peer.environment in roster.ENVIRONMENTS
        assert peer.how in ("threads", "tasks")
    assert set(roster.OURS) <= set(roster.BY_NAME)


def test_only_who_can_share_a_model_between_processes_takes_part_where_callers_are_spread() -> None:
    assert [peer.name for peer in roster.PEERS if takes_part(peer, "f")][:2] == list(roster.OURS)
    assert not takes_part(roster.BY_NAME["a lock"], "f")


def test_answers_of_several_processes_are_one_round() -> None:
    one = {"seconds": 2.0, "cpu": 0.4, "batches": 5, "rows": 30, "foreign": 0.1, "wrong": 0, "missing": 1, "errors": []}
    other = {**one, "seconds": 1.0, "cpu": 9.9, "errors": ["bad"]}
    got = merged(3, [{**one, "latencies": [1.0] * 20}, {**other, "latencies": [3.0] * 30}], 7.5)
    assert (got.number, got.rate, got.p50, got.p99, got.batch, got.memory) == (3, 40.0, 3.0, 3.0, 6.0, 7.5)
    assert got.cpu == pytest.approx(0.4 / 2 / 40)
    assert (got.faults, got.error) == (3, "bad")


def rounds(*rates: float, **values: Any) -> list[Round]:
    return [
        Round(number, rate, values.get("p50", 1 / rate), 1.0, values.get("cpu", 0.0))
        for number, rate in enumerate(rates)
    ]


def test_a_goal_against_peers_is_judged_beside_the_best_of_them_round_by_round() -> None:
    key = ("a", 8, roster.OURS[0])
    results = {
        key: rounds(400, 900, 1000),
        ("a", 8, "multiprocessing.Queue"): rounds(100, 100, 200),
        ("a", 8, "service-streamer"): rounds(20, 30, 40),
        ("a", 8, "a lock"): rounds(9000, 9000, 9000),
    }
    (row,) = goals.judged(results)
    assert row.name == "1. (a) 8 threads" and row.note == "beside multiprocessing.Queue"
    assert (row.ratio, row.met) == (5.0, True)
    results[key] = [*rounds(400, 900), Round(2, 1000.0, 1.0, 1.0, faults=1)]
    assert goals.judged(results)[0].met is False


def test_goals_of_latency_cpu_and_cells_nobody_measured() -> None:
    results = {
        ("a", 1, roster.OURS[0]): rounds(1.0, p50=90e-6),
        ("a", 1, PIPE): rounds(1.0, p50=40e-6),
        ("a", 32, roster.OURS[1]): rounds(1.0, cpu=29e-6),
    }
    found = {row.name: row for row in goals.judged(results)}
    assert set(found) == {"1. (a) 32 tasks, CPU a request", "3. (a) one of our threads, p50"}
    assert found["3. (a) one of our threads, p50"].ratio == pytest.approx(2.25)
    assert [row.met for row in found.values()] == [True, False]
    assert goals.judged({}) == []


def test_beside_each_goal_stands_what_the_bare_path_makes_of_it() -> None:
    results = {
        ("a", 8, roster.OURS[0]): rounds(30.0, 33.0, 36.0),
        ("a", 8, roster.BARE[0]): rounds(45.0, 50.0, 55.0),
        ("a", 8, "multiprocessing.Queue"): rounds(10.0, 10.0, 10.0),
        ("d", 8, roster.OURS[0]): rounds(10.0),
        ("d", 32, roster.OURS[0]): rounds(9.0),
        ("d", 8, roster.BARE[0]): rounds(20.0),
        ("d", 32, roster.BARE[0]): rounds(5.0),
        ("a", 32, roster.OURS[1]): rounds(1.0, cpu=40e-6),
        ("a", 32, roster.BARE[1]): rounds(1.0, cpu=20e-6),
    }
    found = {row.name: row.note for row in goals.judged(results)}
    assert found == {
        "1. (a) 8 threads": "beside multiprocessing.Queue; the bare path 5.00",
        "5. (d) 32 threads": "beside 8 threads; the bare path 0.25",
        "1. (a) 32 tasks, CPU a request": "the bare path 20",
    }


def test_a_round_without_answers_does_not_pull_the_median_down_but_is_reported() -> None:
    cell = summary("a", 8, "peer", [*rounds(10, 30, 20), Round(3, 0.0, 0.0, 0.0, faults=1, error="it ended")])
    assert (cell.rate, cell.rounds, cell.faults, cell.error) == (20, 3, 1, "it ended")


def test_the_page_is_written_from_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "FIGURES", tmp_path)
    page.PAGE.write_text(
        "Prose.\n<!-- begin goals -->\nold\n<!-- end -->\n<!-- begin workloads -->\n<!-- end -->\nMore.\n"
    )
    on = dict.fromkeys(("cores", "cpu", "kernel", "python", "numpy", "commit", "time"), "?")
    cell = Cell("b", 32, "ours, tasks", 12_345.678, 2e-3, 3e-3, 20e-6, 31.5, 48.0, 0.0, 5, 0)
    page.publish("peers", [Row("old", 1.0, "us"), cell], on, Options())
    page.publish("peers", [Row("2. goal", 1.0, "us", met=False), cell], on, Options())
    page.publish("startup", [Row("6. start", 0.3, "s", met=True)], on, Options())
    page.write()
    text = page.PAGE.read_text()
    assert text.startswith("Prose.") and text.endswith("More.\n")
    assert "1 of 2 bounds met." in text and "**missed**" in text and "6. start" in text and "old" not in text
    assert "| ours, tasks | 12,346 |" in text and "| ours, tasks | 2 | 3 | 20 | 31.5 | 48 |" in text
    page.write()
    assert page.PAGE.read_text() == text
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "peers.svg").exists()


@linux
@pytest.mark.parametrize(
    "name, workload, clients, processes",
    [("a lock", "a", 1, 1), (roster.BARE[0], "c", 1, 2), (roster.BARE[0], "f", 4, 5), (roster.BARE[1], "b", 1, 2)],
)
def test_a_contender_is_started_measured_and_leaves_nothing_behind(
    name: str, workload: str, clients: int, processes: int
) -> None:
    contender = Contender(roster.BY_NAME[name], workload, burn=1, processes=clients)
    try:
        contender.ready()
        pids = contender.pids()
        got = contender.cell(4, 4, window=0.1, warm=0.05)
    finally:
        contender.close()
    assert len(pids) == processes and contender.pids() == ()
    assert got.number == 4 and got.rate > 0 and got.faults == 0 and got.batch >= 1 and got.memory > 0
    assert max(CALLERS) <= MAX_BATCH

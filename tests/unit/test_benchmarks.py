"""The pure parts of the benchmarks: percentiles, choice of rounds, judgement, the table. No timing."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import numpy as np
import pytest

from benchmarks import load
from benchmarks.__main__ import main, parse
from benchmarks.measure import Goal, Row, Sample, judge, percentile, quiet
from benchmarks.report import number, row_record, table


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
    record = json.loads(json.dumps(row_record("transport", Row("cell", 1.0, "us"))))
    assert record["benchmark"] == "transport" and record["value"] == 1.0 and record["met"] is None


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
    swapped = how(Neighbour(), 2, (1, 16), 0.01, 0.01, pids)
    assert swapped.wrong > 0 and swapped.faults >= swapped.wrong
    broken = how(Broken(), 2, (1, 16), 0.01, 0.01, pids)
    assert broken.errors == ["ValueError('no')"] * 2 and broken.faults == 2

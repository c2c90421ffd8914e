"""The page on faults shows the tables that the tests here cause."""

from pathlib import Path

import pytest

from tests.faults import table


@pytest.mark.parametrize("shown", [table.markdown(table.culprits()), table.markdown(table.SUPERVISOR)])
def test_the_page_on_faults_shows_the_table(shown: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text("utf-8")
    assert shown in text, f"docs/faults.md must have:\n{shown}"


def test_batch_mates_and_those_who_wait_are_answered_in_every_cell_as_the_page_says() -> None:
    outcomes = [outcome for row in table.WORKER.values() for outcome in row.values()]
    assert {(outcome.mates, outcome.waiting) for outcome in outcomes} == {(table.ANSWERED, table.ANSWERED)}

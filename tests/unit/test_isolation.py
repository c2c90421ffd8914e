"""Finding the culprits of a failed batch, without a worker."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_inference.isolation import HOPELESS, Hope, culprits


class Poison:
    """Runs items of which some fail whatever runs beside them."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.runs = 0
        self.settled: list[int] = []

    def __call__(self, items) -> Exception | None:
        self.runs += 1
        found = [item for item in items if item in self.bad]
        if found:
            return ValueError(found[0])
        self.settled += items
        return None


@given(n=st.integers(1, 70), data=st.data())
@settings(max_examples=300, deadline=None)
def test_culprits_fail_with_their_own_error_and_all_others_are_settled_once(n, data):
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n))
    run = Poison(bad)
    batch = list(range(n))
    found = culprits(batch, ValueError(min(bad)), run)
    assert {item for item, _ in found} == bad
    assert all(error.args == (item,) for item, error in found)
    assert sorted(run.settled) == sorted(set(batch) - bad)
    assert run.runs <= 2 * len(bad) * math.ceil(math.log2(n)) + 1


def test_a_batch_that_fails_only_as_a_whole_harms_nobody():
    settled = []

    def run(items) -> Exception | None:
        if len(items) > 3:
            return MemoryError()
        settled.extend(items)
        return None

    assert culprits(list(range(8)), MemoryError(), run) == []
    assert sorted(settled) == list(range(8))


def test_dividing_pauses_when_everything_fails_and_resumes_after_a_success():
    hope = Hope()
    for _ in range(HOPELESS):
        assert hope
        hope.saw(4, 4)
    assert not hope
    hope.saw(1, 0)
    assert hope


@pytest.mark.parametrize("failed", [0, 1, 3])
def test_a_batch_that_fails_in_part_leaves_hope(failed):
    hope = Hope()
    for _ in range(HOPELESS + 1):
        hope.saw(4, failed)
    assert hope

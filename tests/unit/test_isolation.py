"""Finding the culprits of a failed batch, without a worker."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_inference import BatcherError, ItemErrors
from batch_inference.isolation import HOPELESS, Failure, Hope, blame, culprits


class Poison:
    """Runs items of which some fail whatever runs beside them."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.runs = 0
        self.settled: list[int] = []

    def __call__(self, items) -> Failure | None:
        self.runs += 1
        found = [item for item in items if item in self.bad]
        if found:
            return Failure(items, ValueError(found[0]))
        self.settled += items
        return None


@given(n=st.integers(1, 70), data=st.data())
@settings(max_examples=300, deadline=None)
def test_culprits_fail_with_their_own_error_and_all_others_are_settled_once(n, data):
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n))
    run = Poison(bad)
    batch = list(range(n))
    found = culprits(Failure(batch, ValueError(min(bad))), run)
    assert {item for item, _ in found} == bad
    assert all(error.args == (item,) for item, error in found)
    assert sorted(run.settled) == sorted(set(batch) - bad)
    assert run.runs <= 2 * len(bad) * math.ceil(math.log2(n)) + 1


def test_a_batch_that_fails_only_as_a_whole_harms_nobody():
    settled = []

    def run(items) -> Failure | None:
        if len(items) > 3:
            return Failure(items, ValueError("too many"))
        settled.extend(items)
        return None

    assert culprits(Failure(range(8), ValueError("too many")), run) == []
    assert sorted(settled) == list(range(8))


@given(n=st.integers(1, 70), data=st.data())
@settings(max_examples=200, deadline=None)
def test_items_that_an_attempt_settles_though_it_fails_are_not_attempted_again(n, data):
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n))
    named = data.draw(st.sets(st.integers(0, n - 1)))
    settled: list[int] = []

    def run(items) -> Failure | None:
        assert not set(items) & set(settled)
        settled.extend(named & set(items))
        left = [item for item in items if item not in named]
        if set(left) & bad:
            return Failure(left, ValueError())
        settled.extend(left)
        return None

    first = run(list(range(n)))
    found = [] if first is None else [item for item, _ in culprits(first, run)]
    assert sorted(found) == sorted(bad - named)
    assert sorted(settled + found) == list(range(n))


def test_dividing_pauses_when_everything_fails_and_resumes_after_a_success():
    hope = Hope()
    for _ in range(HOPELESS):
        assert hope
        hope.saw(answered=0)
    assert not hope
    hope.saw(answered=1)
    assert hope


@pytest.mark.parametrize("answered", [1, 3, 4])
def test_a_batch_that_fails_in_part_leaves_hope(answered):
    hope = Hope()
    for _ in range(HOPELESS + 1):
        hope.saw(answered)
    assert hope


# --- what a model says of rows ----------------------------------------------------------------------------------------

ONE, TWO, THREE = ValueError("one"), KeyError("two"), OSError("three")


def test_an_item_gets_the_error_of_its_first_row_that_failed():
    owners = [0, 0, 0, 1, 2, 2]
    assert blame(ItemErrors({5: ONE, 1: TWO, np.int64(0): THREE}), owners, 3) == {0: THREE, 2: ONE}
    assert blame(ItemErrors({3: ONE}), [2, 0, 1, 0], 3) == {0: ONE}
    assert blame(ItemErrors({7: ONE, 2: TWO}), None, 1) == {0: TWO}


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({-1: ONE}, "row -1 .* 3 rows"),
        ({3: ONE}, "row 3 .* 3 rows"),
        ({0: ONE, "a": ONE}, "row 'a'"),
        ({1.0: ONE}, "row 1.0"),
        ({1: "broken"}, "exception for each row, got 'broken' for row 1"),
        ({1: ValueError}, "got <class 'ValueError'> for row 1"),
        ({1: KeyboardInterrupt()}, "got KeyboardInterrupt.* for row 1"),
        ({}, "names no row"),
    ],
)
def test_rows_that_do_not_exist_and_errors_that_are_none_are_named(errors, said):
    with pytest.raises(BatcherError, match=said):
        blame(ItemErrors(errors), [0, 0, 1], 2)


def test_owners_that_do_not_exist_are_an_error_of_the_batcher():
    with pytest.raises(BatcherError, match="row 1 belongs to request 2 of 2"):
        blame(ItemErrors({1: ONE}), [0, 2], 2)

"""Histograms, and what is read from a host's board."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_inference import board
from batch_inference.board import BUCKETS, bucket_bounds
from batch_inference.counting import bucket
from batch_inference.statistics import Percentiles, read_board


@given(st.integers(0, 1 << 41))
def test_a_duration_lies_within_the_bounds_of_its_bucket(nanoseconds: int) -> None:
    low, high = bucket_bounds(bucket(nanoseconds))
    assert low <= nanoseconds < high


@given(st.integers(-(1 << 50), 1 << 62), st.integers(-(1 << 50), 1 << 62))
def test_buckets_are_in_order_and_within_their_number(one: int, other: int) -> None:
    assert 0 <= bucket(one) < BUCKETS
    assert (bucket(one) <= bucket(other)) == (bucket(min(one, other)) == bucket(one)) or bucket(one) == bucket(other)


def test_buckets_follow_each_other_without_gaps_and_are_a_quarter_wide_at_most() -> None:
    for index in range(BUCKETS - 1):
        assert bucket_bounds(index)[1] == bucket_bounds(index + 1)[0]
    for index in range(4, BUCKETS):
        low, high = bucket_bounds(index)
        assert high - low <= low / 4 and bucket(low) == index == bucket(high - 1)


def test_percentiles_are_those_of_the_durations() -> None:
    counts = [0] * BUCKETS
    assert Percentiles.of(counts) == Percentiles(0.0, 0.0, 0.0)
    for milliseconds in range(1, 1001):
        counts[bucket(milliseconds * 1_000_000)] += 1
    found = Percentiles.of(counts)
    assert found.p50 == pytest.approx(0.5, rel=0.13)
    assert found.p90 == pytest.approx(0.9, rel=0.13)
    assert found.p99 == pytest.approx(0.99, rel=0.13)
    one = [0] * BUCKETS
    one[bucket(3_000_000)] = 1
    assert Percentiles.of(one).p50 == Percentiles.of(one).p99 == pytest.approx(0.003, rel=0.13)


def test_the_board_adds_up_over_workers_and_clients() -> None:
    cells = [0] * (board.BOARD_SIZE // 8)
    for index, state in enumerate([board.READY, board.RESTARTING]):
        cells[index * board.WORKER_CELLS + board.WORKER_STATE] = state
        cells[index * board.WORKER_CELLS + board.WORKER_RESTARTS] = index
        row = board.worker_row(index)
        cells[row + board.REQUESTS], cells[row + board.FAILED] = 10, 1 + index
        cells[row + board.BATCHES], cells[row + board.SIZE] = 4, 20
        cells[row + board.RUNNING + bucket(1_000_000)] = 10
    cells[board.CLIENT_ROWS] = 3
    for number, outstanding in (0, 2), (2, 5):
        cells[board.client_row(number) + board.OUTSTANDING + number % 2] = outstanding
        cells[board.client_row(number) + board.TRANSPORT + 3] = 1
    found = read_board(cells, 0)
    assert (found.requests, found.failed, found.batches, found.mean_batch, found.pending) == (20, 3, 8, 5.0, 7)
    assert found.state == "ready" and [worker.state for worker in found.workers] == ["ready", "restarting"]
    assert [worker.restarts for worker in found.workers] == [0, 1]
    assert found.running.p50 == pytest.approx(0.001, rel=0.13) and found.waiting.p50 == 0


def test_rows_do_not_overlap() -> None:
    starts = [0, *map(board.worker_row, range(board.MAX_WORKERS)), *map(board.client_row, range(-1, board.MAX_CLIENTS))]
    assert starts == sorted(set(starts)) and {b - a for a, b in zip(starts, starts[1:])} == {board.ROW}
    assert starts[-1] + board.ROW == board.BOARD_SIZE // 8
    assert board.TRANSPORT + BUCKETS <= board.ROW and board.RUNNING + BUCKETS <= board.ROW
    assert board.WAITING + BUCKETS <= board.RUNNING and board.CLIENT_ROWS < board.ROW
    assert board.MAX_WORKERS <= board.TRANSPORT

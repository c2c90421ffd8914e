"""When a worker hangs, and when there were too many restarts."""

from __future__ import annotations

import pytest

from batch_inference.watching import RESTART_DELAYS, Pulse, Restarts, restart_delay

# --- hangs ------------------------------------------------------------------------------------------------------------


def test_silence_counts_from_the_first_look_at_a_worker_with_something_to_do() -> None:
    pulse = Pulse(1.0)
    assert [pulse.look(7, 0, now) for now in range(100)] == [0.0] * 100  # idle
    assert pulse.look(7, 1, 100.0) == 1.0
    assert pulse.look(7, 1, 101.0) == 2.0


def test_a_sign_of_life_or_an_empty_queue_ends_the_silence() -> None:
    pulse = Pulse(1.0)
    for now in range(5):
        pulse.look(7, 2, now)
    assert pulse.silent == 4.0
    assert pulse.look(8, 2, 5.0) == 0.0
    assert pulse.look(8, 2, 6.0) == 1.0
    assert pulse.look(8, 0, 7.0) == 0.0
    assert pulse.look(8, 1, 8.0) == 1.0


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """A paused container, or a stopped supervisor: the worker may have been stopped as well."""
    pulse = Pulse(1.0)
    pulse.look(7, 1, 0.0)
    assert pulse.look(7, 1, 3600.0) == 2.0


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_more_deaths_in_a_minute_than_allowed_are_too_many() -> None:
    restarts = Restarts(2)
    for number in range(2):
        restarts.died((0, number), float(number), number)
        assert not restarts.exceeded(float(number), number)
    restarts.died((1, 0), 2.0, 10)
    assert restarts.exceeded(2.0, 10)
    assert not restarts.exceeded(60.5, 10)  # the first is more than a minute ago


def test_with_max_restarts_0_the_first_death_is_too_much() -> None:
    restarts = Restarts(0)
    assert not restarts.exceeded(0.0, 0)
    restarts.died((0, 1), 0.0, 0)
    assert restarts.exceeded(0.0, 0)


def test_deaths_of_one_convicted_request_count_as_one_and_as_none_once_a_batch_was_served() -> None:
    restarts = Restarts(0)
    deaths = [(0, number) for number in range(3)]
    for who in deaths:
        restarts.died(who, 0.0, 5)
    restarts.convict(deaths)
    assert restarts.exceeded(1.0, 5)
    assert not restarts.exceeded(1.0, 6)
    one_more = Restarts(1)
    for who in deaths:
        one_more.died(who, 0.0, 5)
    assert one_more.exceeded(1.0, 5)
    one_more.convict(deaths)
    assert not one_more.exceeded(1.0, 5)


def test_any_number_of_killers_is_borne_while_batches_are_served() -> None:
    restarts, batches = Restarts(5), 0
    for killer in range(20):
        deaths = [(0, 10 * killer + number) for number in range(4)]
        for who in deaths:
            restarts.died(who, 0.0, batches)
            assert not restarts.exceeded(0.0, batches)
        restarts.convict(deaths)
        batches += 1


def test_a_model_under_which_every_request_dies_is_given_up() -> None:
    restarts, deaths = Restarts(5), 0
    for killer in range(100):
        both = [(0, 2 * killer), (0, 2 * killer + 1)]
        for who in both:
            restarts.died(who, 0.0, 7)
            deaths += 1
        restarts.convict(both)
        if restarts.exceeded(0.0, 7):
            break
    assert deaths == 12


def test_a_death_that_nobody_was_convicted_of_counts_whatever_is_served() -> None:
    restarts = Restarts(1)
    restarts.died((0, 1), 0.0, 0)
    restarts.convict({(0, 7)})
    restarts.died((0, 2), 0.0, 100)
    assert restarts.exceeded(0.0, 200)


@pytest.mark.parametrize(("failures", "delay"), [(1, 0.0), (2, 0.1), (8, 5.0), (1000, RESTART_DELAYS[-1])])
def test_restarts_back_off(failures: int, delay: float) -> None:
    assert restart_delay(failures) == delay

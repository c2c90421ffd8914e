"""When a request is convicted of having killed its workers, and what it is told."""

from __future__ import annotations

import signal

import pytest

from batch_inference.deaths import Death, Fatality, blame, convicted, not_retried


def death(code: int | None, *, ours: bool = False, incarnation: int = 1) -> Death:
    return Death(0, incarnation, "worker 0 (process 12) did something", "last words\n", code, ours)


CRASHED, EXITED = death(-signal.SIGSEGV), death(3)
KILLED, HUNG = death(-signal.SIGKILL), death(-signal.SIGKILL, ours=True)


def alone(*deaths: Death) -> list[Fatality]:
    return [Fatality(death, alone=True) for death in deaths]


def shared(*deaths: Death) -> list[Fatality]:
    return [Fatality(death, alone=False) for death in deaths]


@pytest.mark.parametrize("how", [CRASHED, EXITED, HUNG])
def test_two_deaths_alone_convict(how: Death) -> None:
    assert not convicted(alone(how))
    assert convicted(alone(how, how))


def test_deaths_that_others_shared_convict_nobody() -> None:
    assert not convicted(shared(*[CRASHED] * 10))
    assert not convicted(shared(CRASHED) + alone(CRASHED))
    assert convicted(shared(CRASHED) + alone(CRASHED, EXITED))


def test_a_kill_that_may_have_come_from_outside_earns_one_more_try_and_no_second() -> None:
    assert not convicted(alone(KILLED, KILLED))
    assert not convicted(alone(KILLED, CRASHED))
    assert not convicted(alone(CRASHED, KILLED))
    assert convicted(alone(KILLED, KILLED, KILLED))
    assert convicted(alone(KILLED, CRASHED, HUNG))
    assert convicted(shared(KILLED) + alone(CRASHED, CRASHED))  # what others shared says nothing about those alone


def test_a_request_without_a_death_is_innocent() -> None:
    assert not convicted([])


def test_the_error_says_how_often_how_and_the_last_words() -> None:
    said = str(blame(shared(KILLED) + alone(CRASHED, EXITED)))
    assert "3 times" in said and "twice with it alone" in said and EXITED.cause in said and "last words" in said
    assert "not tried again" in said and "num_workers=0" in said


def test_where_nothing_may_run_twice_the_error_says_so() -> None:
    said = str(not_retried(CRASHED))
    assert "retry=False" in said and CRASHED.cause in said and "last words" in said
    with_supervisor = Death(0, 1, "worker 0 was killed because its supervisor died")
    assert with_supervisor.with_supervisor and "printed" not in str(not_retried(with_supervisor))

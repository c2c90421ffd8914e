"""When a batch is cut: the rule driven with arrivals and a clock of the test's own. Nothing here waits."""

from __future__ import annotations

import pickle
import random

import pytest

from batch_inference.policy import LEAST_FIXED_COST, OUTLIER, Costs, FixedDelay, Queue, Returning
from tests.unit.simulator import Load, Outcome, Simulation

A, B = 2e-3, 20e-6
DELAYS = (0.0, 100e-6, 200e-6, 400e-6, 1e-3, 2e-3, 5e-3)


class Callers:
    """Takes a policy through batches in which `callers` requests are answered and come back `after` seconds later."""

    def __init__(self, policy: Returning, now: float = 100.0) -> None:
        self.policy = policy
        self.now = now

    def batches(self, count: int, callers: int, after: float, cost: float = A) -> None:
        for _ in range(count):
            for _ in range(callers):
                self.policy.arrived(self.now + after, 1)
            self.now += after
            self.run(callers, cost)

    def run(self, callers: int, cost: float = A) -> None:
        self.now += cost
        self.policy.ran(callers, cost)
        self.policy.completed(self.now, callers)

    def queue(self, arrivals: list[float]) -> Queue:
        for arrival in arrivals:
            self.policy.arrived(arrival, 1)
        return Queue(len(arrivals), len(arrivals), arrivals[0])


def learned(callers: int, after: float, cost: float = A) -> Callers:
    loop = Callers(Returning())
    loop.batches(30, callers, after, cost)
    return loop


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_it_knows_nothing_at_first_and_runs_at_once() -> None:
    policy = Returning()
    assert policy.wait(Queue(1, 1, 5.0), 5.0) <= 0
    policy.ran(1, A)
    policy.completed(5.0, 1)
    policy.arrived(5.001, 1)
    assert policy.wait(Queue(1, 1, 5.001), 5.001) <= 0


def test_requests_that_came_together_count_as_one_by_one() -> None:
    one_by_one, together = learned(8, 80e-6), learned(8, 80e-6)
    start = one_by_one.now
    for batch in range(30):
        random.seed(batch)
        times = [start + 2e-3 * batch + random.uniform(-1e-3 if batch % 2 else 10e-6, 90e-6) for _ in range(8)]
        for sent in times:
            one_by_one.policy.arrived(sent, 1)
        together.policy.arrived_all(times, [1] * 8)
        now, queue = max(times), Queue(3, 3, min(times))
        assert together.policy.wait(queue, now) == one_by_one.policy.wait(queue, now)
        for loop in (one_by_one, together):
            loop.now = start + 2e-3 * batch
            loop.run(8)
    assert repr(together.policy) == repr(one_by_one.policy)


def test_it_waits_for_callers_that_return_and_no_longer_than_the_last_one_takes() -> None:
    loop = learned(callers=8, after=80e-6)
    first = loop.now + 50e-6
    queue = loop.queue([first])
    wait = loop.policy.wait(queue, first)
    assert 80e-6 <= 50e-6 + wait <= 160e-6  # the step of the ladder above 80 us
    loop.queue([loop.now + 80e-6] * 7)
    assert loop.policy.wait(Queue(8, 8, first), loop.now + 80e-6) <= 0  # all are back


def test_it_gives_up_on_callers_that_do_not_return_this_time() -> None:
    loop = learned(callers=8, after=80e-6)
    queue = loop.queue([loop.now + 50e-6])
    assert loop.policy.wait(queue, loop.now + 50e-6) > 0
    assert loop.policy.wait(queue, loop.now + 201e-6) <= 0


def test_one_lone_caller_is_never_made_to_wait() -> None:
    source = random.Random(1)
    loop = Callers(Returning())
    for _ in range(500):
        arrival = loop.now + source.choice([30e-6, 100e-6, 1e-3, 20e-3, 1.0])
        queue = loop.queue([arrival])
        assert loop.policy.wait(queue, arrival) <= 0
        loop.now = arrival
        loop.run(1)


def test_it_does_not_wait_longer_than_a_batch_of_their_own_would_cost_them() -> None:
    loop = learned(callers=2, after=3 * A)
    arrival = loop.now + 10e-6
    assert loop.policy.wait(loop.queue([arrival]), arrival) <= 0


def test_a_batch_without_fixed_cost_is_cut_at_once() -> None:
    loop = learned(callers=8, after=20e-6, cost=LEAST_FIXED_COST / 2)
    arrival = loop.now + 10e-6
    assert loop.policy.wait(loop.queue([arrival]), arrival) <= 0


def test_it_is_eager_while_batches_are_cheap_and_begins_anew_when_they_are_not() -> None:
    loop = learned(callers=8, after=20e-6, cost=LEAST_FIXED_COST / 2)
    assert loop.policy.eager
    loop.batches(40, 8, after=80e-6)
    assert not loop.policy.eager
    arrival = loop.now + 50e-6
    assert loop.policy.wait(loop.queue([arrival]), arrival) > 0


@pytest.mark.parametrize(("seconds", "eager"), [(0, True), (-1, True), (1e-3, False)])
def test_a_fixed_delay_is_eager_without_one(seconds: float, eager: bool) -> None:
    assert FixedDelay(seconds).eager is eager


def test_many_that_wait_do_not_wait_for_few() -> None:
    loop = learned(callers=4, after=A / 4)
    arrivals = [loop.now + 20e-6]
    assert loop.policy.wait(loop.queue(arrivals), arrivals[0]) > 0
    assert loop.policy.wait(Queue(100, 100, arrivals[0]), arrivals[0]) <= 0


def test_half_batches_that_alternate_are_joined() -> None:
    """What arrives while the model runs is reported after the completion: it has not come back, it was never there."""
    loop = Callers(Returning())
    for _ in range(30):
        start = loop.now
        loop.run(8)
        for _ in range(8):  # the callers of the batch before
            loop.policy.arrived(start + 80e-6, 1)
    wait = loop.policy.wait(Queue(8, 8, start + 80e-6), loop.now)
    assert 80e-6 <= wait <= 160e-6


def test_arrivals_of_several_clients_may_be_reported_out_of_order() -> None:
    in_order, shuffled = Callers(Returning()), Callers(Returning())
    source = random.Random(2)
    for _ in range(40):
        arrivals = [in_order.now + after for after in (40e-6, 60e-6, 70e-6, 150e-6, 300e-6, 310e-6)]
        for loop in (in_order, shuffled):
            if loop is shuffled:
                source.shuffle(arrivals)
            for arrival in arrivals:
                loop.policy.arrived(arrival, 1)
            loop.now = max(arrivals)
            loop.run(6)
    for elapsed in (10e-6, 100e-6, 200e-6):
        now = in_order.now + elapsed
        assert in_order.policy.wait(Queue(1, 1, now), now) == shuffled.policy.wait(Queue(1, 1, now), now)
    assert repr(in_order.policy) == repr(shuffled.policy)


def test_sizes_make_the_cost_and_requests_the_count_of_callers() -> None:
    loop = Callers(Returning())
    source = random.Random(3)
    for _ in range(200):
        size = source.choice([10, 40, 90])
        for _ in range(2):
            loop.policy.arrived(loop.now + 80e-6, size // 2)
        loop.now += 80e-6 + A + B * size
        loop.policy.ran(size, A + B * size)
        loop.policy.completed(loop.now, 2)
    assert loop.policy.costs.fixed == pytest.approx(A, rel=0.05)
    arrival = loop.now + 40e-6
    loop.policy.arrived(arrival, 30)
    assert loop.policy.wait(Queue(1, 30, arrival), arrival) > 0  # one of two is back
    loop.policy.arrived(arrival, 30)
    assert loop.policy.wait(Queue(2, 60, arrival), arrival) <= 0


# --- forgetting -------------------------------------------------------------------------------------------------------


def test_it_stops_waiting_within_ten_batches_after_callers_no_longer_return() -> None:
    loop = learned(callers=8, after=80e-6)
    batches = 0
    while True:
        arrival = loop.now + 50e-3
        if loop.policy.wait(loop.queue([arrival]), arrival) <= 0:
            break
        loop.now = arrival
        loop.run(1)
        batches += 1
        assert batches <= 10


def test_it_waits_within_ten_batches_after_callers_begin_to_return() -> None:
    loop = Callers(Returning())
    loop.batches(100, 1, after=50e-3)
    loop.batches(10, 8, after=80e-6)
    first = loop.now + 40e-6
    assert loop.policy.wait(Queue(1, 1, first), first) > 0


def test_a_step_of_the_load_is_learned_within_20_batches() -> None:
    load = Load(callers=2)
    few, many = steady(Load(callers=2)), steady(Load(callers=64))
    simulation = Simulation(Returning(), load)
    simulation.run(0.5)
    simulation.change_callers(62)
    simulation.run_batches(20)
    assert simulation.run_batches(50).throughput > 0.95 * many
    simulation.change_callers(-62)
    simulation.run_batches(20)
    assert simulation.run_batches(50).throughput > 0.95 * few


def steady(load: Load) -> float:
    simulation = Simulation(Returning(), load)
    simulation.run(0.5)
    return simulation.run_batches(100).throughput


# --- costs ------------------------------------------------------------------------------------------------------------


def test_the_line_of_costs_is_learned_through_noise() -> None:
    costs, source = Costs(), random.Random(4)
    for _ in range(300):
        size = source.randint(1, 64)
        costs.learn(size, (A + B * size) * source.uniform(0.95, 1.05))
    assert costs.fixed == pytest.approx(A, rel=0.1)
    assert costs.per_item == pytest.approx(B, rel=0.15)


def test_sizes_that_do_not_vary_leave_all_of_the_cost_fixed() -> None:
    costs = Costs()
    for _ in range(50):
        costs.learn(16, A)
    assert costs.fixed == pytest.approx(A) and costs.per_item == 0


def test_costs_are_never_negative() -> None:
    costs, source = Costs(), random.Random(5)
    for _ in range(500):
        costs.learn(source.randint(1, 100), source.expovariate(1 / A))
        assert costs.fixed is not None and costs.fixed >= 0 and costs.per_item >= 0


def test_a_batch_that_was_held_up_counts_for_little() -> None:
    costs = Costs()
    for _ in range(50):
        costs.learn(8, A)
    costs.learn(8, 1000 * A)
    assert costs.fixed is not None and costs.fixed <= A * (1 + (OUTLIER - 1) / 15)


def test_a_model_that_has_become_slower_is_learned_within_50_batches() -> None:
    costs = Costs()
    for _ in range(100):
        costs.learn(8, A)
    for _ in range(50):
        costs.learn(8, 20 * A)
    assert costs.fixed == pytest.approx(20 * A, rel=0.2)


# --- the fixed delay, and values --------------------------------------------------------------------------------------


def test_a_fixed_delay_counts_from_the_oldest_request_whatever_comes_later() -> None:
    policy = FixedDelay(5e-3)
    assert policy.wait(Queue(1, 1, 10.0), 10.001) == pytest.approx(4e-3)
    policy.arrived(10.002, 1)
    assert policy.wait(Queue(2, 2, 10.0), 10.002) == pytest.approx(3e-3)
    assert policy.wait(Queue(2, 2, 10.0), 10.006) <= 0
    assert FixedDelay(0).wait(Queue(1, 1, 10.0), 10.0) <= 0
    assert repr(policy) == "FixedDelay(0.005)"


def test_a_fixed_delay_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="number of seconds, got nan"):
        FixedDelay(float("nan"))
    assert FixedDelay(float("inf")).wait(Queue(1, 1, 10.0), 10.0) == float("inf")


def test_policies_travel_by_pickle_and_say_what_they_know() -> None:
    policy = pickle.loads(pickle.dumps(learned(8, 80e-6).policy))
    assert "shares 0.00 0.00 1.00" in repr(policy)
    assert pickle.loads(pickle.dumps(FixedDelay(1.0))).seconds == 1.0


# --- whole loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("think", [0.0, 5e-3])
@pytest.mark.parametrize("callers", [1, 2, 4, 8, 16, 32])
def test_a_closed_loop_is_as_fast_as_with_the_best_fixed_delay(callers: int, think: float) -> None:
    load = Load(callers=callers, think=think, fixed=A, per_item=B)
    seconds = min(20.0, max(1.5, 40.0 / callers))
    best = max(Simulation(FixedDelay(delay), load).run(seconds).throughput for delay in DELAYS)
    assert Simulation(Returning(), load).run(seconds).throughput >= 0.95 * best


@pytest.mark.parametrize("callers", [2, 8, 32])
@pytest.mark.parametrize("on_the_way", [20e-6, 50e-6])
def test_a_closed_loop_that_costs_time_on_the_way_is_as_fast_as_full_batches_can_be(
    callers: int, on_the_way: float
) -> None:
    """A batch of n of N callers takes A + B n, and then (2 n - N) times the time on the way until n are there again: as
    long as A is larger than N times that, nothing is quicker than to wait for all."""
    load = Load(callers=callers, fixed=A, per_item=B, on_the_way=on_the_way)
    assert A > callers * on_the_way
    fastest = callers / (A + B * callers + on_the_way * callers)
    simulation = Simulation(Returning(), load)
    simulation.run(0.5)
    assert simulation.run(1.0).throughput > 0.93 * fastest


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8, 0.95])
def test_an_open_loop_has_the_latency_of_the_best_fixed_delay(share: float) -> None:
    load = Load(rate=share * 64 / (A + B * 64), fixed=A, per_item=B)
    seconds = 3.0 if share < 0.1 else 1.5
    best = min(Simulation(FixedDelay(delay), load).run(seconds).latency for delay in DELAYS)
    assert Simulation(Returning(), load).run(seconds).latency <= 1.05 * best


def test_a_lone_caller_in_a_simulation_is_never_made_to_wait() -> None:
    def longest(outcome: Outcome) -> float:
        return max(outcome.waits)

    assert longest(Simulation(Returning(), Load(callers=1)).run(3.0)) == 0
    assert longest(Simulation(Returning(), Load(callers=1, think=5e-3)).run(10.0)) == 0


@pytest.mark.parametrize("callers", [2, 16])
def test_a_slow_model_gets_full_batches(callers: int) -> None:
    load = Load(callers=callers, fixed=20e-3, per_item=100e-6)
    outcome = Simulation(Returning(), load).run(5.0)
    late = outcome.batches[len(outcome.batches) // 2 :]
    assert sum(late) / len(late) > 0.97 * callers

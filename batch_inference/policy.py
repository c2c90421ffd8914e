"""When to cut a batch: decisions as values. No clock, no thread, no I/O: times come in, a wait comes out.

A worker whose model is free asks its policy how long to wait for more requests before it runs those that wait. The
library's own rule, `Returning`, has no knob. A caller in a closed loop sends its next request soon after it got a
reply, so after a batch of n replies some share of n requests comes back within a short time. Cut at once, and they
just miss the batch: two half batches alternate. The rule learns

    A + B n    the seconds that a batch of size n takes (least squares over recent batches),
    S(delta)   the share of a batch's callers whose next request arrives within delta of the batch's completion,

and, with q requests waiting, E expected within delta and R >= E until the batch is over, waits the delta that maximises

    E A  -  (q + R) (delta - elapsed)

E requests save the fixed cost A of a batch of their own; q + R are delayed. Where nothing gains, it does not wait.
E is the smaller of two guesses: S(delta) n less those that are back already; and of those that are not back, the share
that used to come between now and delta. By the first alone it would wait on for callers that have gone.
All durations are seconds.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

LADDER = tuple(50e-6 * 2 ** (step / 2) for step in range(19))  # the deltas: 50 us, 71 us, 100 us .. 25.6 ms
LEAST_FIXED_COST = 150e-6  # below it no wait that the kernel can time gains anything; half of it is our own
MEMORY = 0.95  # how much of what was learned about costs is kept from batch to batch
LEARNING_INTERVAL = 1e-3  # at the least; with shorter batches learning would cost more than it gains
LEARNING = 0.2  # the weight of the newest batch in the shares
LEAST_EXPECTED = 0.5  # requests: fewer are not waited for
OUTLIER = 4.0  # a batch may count for this many times what was expected of it: it may have been held up by others


@dataclass(slots=True)
class Queue:
    """What waits of the kind whose oldest request is oldest. Times are of one monotonic clock."""

    count: int
    size: int
    oldest: float
    deadline: float | None = None
    """The nearest deadline of any of the requests."""


class Policy(Protocol):
    """When to cut a batch. One object serves one worker; it is pickled into it before its first use."""

    def arrived(self, time: float, size: int) -> None:
        """A request of this size was sent at `time`."""

    def ran(self, size: int, seconds: float) -> None:
        """A batch of this size took so long, from cutting it until its replies were written."""

    def completed(self, time: float, requests: int) -> None:
        """The replies to that many requests were written at `time`."""

    def wait(self, queue: Queue, now: float) -> float:
        """How long to wait for more before the queue is cut; 0 or less: not at all. Asked again after each arrival."""


class FixedDelay:
    """The classical rule: a batch waits until its oldest request is `seconds` old. 0 runs at once whatever is there."""

    def __init__(self, seconds: float) -> None:
        if seconds != seconds:  # NaN, which no request ever is as old as
            raise ValueError(f"FixedDelay takes a number of seconds, got {seconds}")
        self.seconds = seconds
        self.eager = seconds <= 0

    def __repr__(self) -> str:
        return f"FixedDelay({self.seconds})"

    def arrived(self, time: float, size: int) -> None:
        pass

    def arrived_all(self, times: list[float], sizes: list[int]) -> None:
        pass

    def ran(self, size: int, seconds: float) -> None:
        pass

    def completed(self, time: float, requests: int) -> None:
        pass

    def wait(self, queue: Queue, now: float) -> float:
        return queue.oldest + self.seconds - now


class Costs:
    """Learns the line A + B n through recent pairs of size and seconds, older ones counting less and less."""

    def __init__(self) -> None:
        self.fixed: float | None = None
        self.per_item = 0.0
        self._weight = self._n = self._s = self._nn = self._ns = 0.0

    def learn(self, size: int, seconds: float) -> float:
        """What it takes to be the fixed cost, now that a batch of this size took so long."""
        if self.fixed is not None:
            seconds = min(seconds, OUTLIER * (self.fixed + self.per_item * size))
        self._weight = self._weight * MEMORY + 1
        self._n = self._n * MEMORY + size
        self._s = self._s * MEMORY + seconds
        self._nn = self._nn * MEMORY + size * size
        self._ns = self._ns * MEMORY + size * seconds
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        # Sizes that hardly vary say nothing about the slope: then all of the cost counts as fixed.
        if variance > 1e-3 * mean_n * mean_n:
            self.per_item = max(0.0, (self._ns / self._weight - mean_n * mean_s) / variance)
            self.per_item = min(self.per_item, mean_s / mean_n)
        self.fixed = max(0.0, mean_s - self.per_item * mean_n)
        return self.fixed


@dataclass(slots=True)
class Window:
    """The time from a completion, which answered so many requests, to the next one."""

    completion: float
    replied: int
    arrivals: list[float] = field(default_factory=list)

    def shares(self) -> list[float]:
        """For each delta, the share of the callers that were answered who sent again within it."""
        arrivals, completion, replied = sorted(self.arrivals), self.completion, self.replied
        back = map(bisect.bisect_right, repeat(arrivals), [completion + delta for delta in LADDER])
        return [min(1.0, number / replied) for number in back]


class Returning:
    """The library's own rule: see the head of this module."""

    def __init__(self) -> None:
        self.costs = Costs()
        self.eager = False
        self._share = [0.0] * len(LADDER)
        self._learned = 0.0
        self._forget()

    def __repr__(self) -> str:
        shares = " ".join(f"{share:.2f}" for share in self._share)
        return f"<Returning: fixed {self.costs.fixed} s, {self.costs.per_item} s an item, shares {shares}>"

    def arrived(self, time: float, size: int) -> None:
        # A worker hears of what came while its model ran when that is over, and so after the completion.
        window = self._window if time > self._window.completion else self._before
        window.arrivals.append(time)

    def arrived_all(self, times: list[float], sizes: list[int]) -> None:
        """`arrived`, for each of some requests, which came together."""
        if min(times) > self._window.completion:
            self._window.arrivals += times
        else:
            for time, size in zip(times, sizes):
                self.arrived(time, size)

    def ran(self, size: int, seconds: float) -> None:
        eager = self.costs.learn(size, seconds) < LEAST_FIXED_COST
        if eager is not self.eager:
            self.eager = eager
            self._forget()

    def _forget(self) -> None:
        """What is not heard of any more would be taken for what did not happen."""
        self._window = self._before = Window(-math.inf, 0)  # before: the window that ended with the last completion

    def completed(self, time: float, requests: int) -> None:
        if self._before.replied and time - self._learned >= LEARNING_INTERVAL:
            self._learned = time
            self._learn(self._before)
        self._before, self._window = self._window, Window(time, requests)

    def _learn(self, window: Window) -> None:
        shares = zip(self._share, window.shares())
        self._share = [share + LEARNING * (newest - share) for share, newest in shares]

    def wait(self, queue: Queue, now: float) -> float:
        fixed, window = self.costs.fixed, self._window
        if self.eager or fixed is None:
            return 0.0
        back, replied = len(window.arrivals), window.replied
        coming = self._share[-1] * replied - back
        if coming <= LEAST_EXPECTED:
            return 0.0
        elapsed, best, best_wait = now - window.completion, 0.0, 0.0
        ahead = bisect.bisect_right(LADDER, elapsed)
        passed = self._share[ahead - 1] if ahead else 0.0
        for share, delta in zip(self._share[ahead:], LADDER[ahead:]):
            if coming * fixed <= (queue.count + coming) * (delta - elapsed):
                break  # no longer wait gains anything, whoever comes
            if share <= passed:
                continue
            # Who is not back by now, though most used to be, will not come any more than the others came later.
            late = (replied - back) * (share - passed) / (1.0 - passed)
            expected = min(share * replied - back, late)
            if expected <= LEAST_EXPECTED:
                continue
            gain = expected * fixed - (queue.count + coming) * (delta - elapsed)
            if gain > best:
                best, best_wait = gain, delta - elapsed
        return best_wait

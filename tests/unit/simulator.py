"""A worker, its callers and their clock in one process without time: drives a policy as the worker does.

A batch of n costs `fixed + n * per_item` seconds, give or take 5 %. In a closed loop each of `callers` sends, waits for
its answer, thinks, and sends again; in an open loop requests come at random at `rate`. What arrives while the model
runs is told to the policy after the batch has completed, as in the worker, which does one thing at a time. With
`on_the_way`, one process does something for each request on its way back and forth, and so for one after the other.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from batch_inference.policy import Policy, Queue

TURNAROUND = 60e-6  # from a reply until its caller's next request


@dataclass(frozen=True)
class Load:
    callers: int = 0
    think: float = 0.0
    rate: float = 0.0
    fixed: float = 2e-3
    per_item: float = 20e-6
    max_batch: int = 64
    on_the_way: float = 0.0


@dataclass
class Outcome:
    seconds: float
    latencies: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """How long the oldest request of each batch waited while the model was free."""

    @property
    def throughput(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def latency(self) -> float:
        return sum(self.latencies) / len(self.latencies)


class Simulation:
    def __init__(self, policy: Policy, load: Load, seed: int = 0) -> None:
        self.policy = policy
        self.load = load
        self.now = 0.0
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._queue: list[float] = []
        self._unheard: list[float] = []  # arrivals of which the worker has not heard
        self._busy = False
        self._free_since = 0.0
        self._timer = self._serial = 0
        self._surplus = 0  # callers that leave
        self._callers_free = 0.0  # when their process has nothing left to do
        self.outcome = Outcome(0.0)
        for _ in range(load.callers):
            self._at(self._random.random() * 1e-3, self._arrive)
        if load.rate:
            self._at(self._random.expovariate(load.rate), self._arrive)

    def run(self, seconds: float) -> Outcome:
        """What happens in the next `seconds`."""
        self.outcome = Outcome(seconds)
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until
        return self.outcome

    def run_batches(self, count: int) -> Outcome:
        """What happens in the next `count` batches."""
        self.outcome, start = Outcome(0.0), self.now
        while len(self.outcome.batches) < count or self._busy:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.outcome.seconds = self.now - start
        return self.outcome

    def change_callers(self, more: int) -> None:
        """That many callers come, or, if negative, leave with their next answer."""
        for _ in range(more):
            self._at(self.now + self._random.random() * 1e-3, self._arrive)
        self._surplus += max(0, -more)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, event))

    def _arrive(self) -> None:
        self._unheard.append(self.now)
        if self.load.rate:
            self._at(self.now + self._random.expovariate(self.load.rate), self._arrive)
        self._consider()

    def _consider(self) -> None:
        if self._busy:
            return
        for arrived in self._unheard:
            self.policy.arrived(arrived, 1)
        self._queue += self._unheard
        self._unheard = []
        if not self._queue:
            return
        size = len(self._queue)
        wait = 0.0 if size >= self.load.max_batch else self.policy.wait(Queue(size, size, self._queue[0]), self.now)
        self._timer += 1
        if wait > 1e-9:
            timer = self._timer
            self._at(self.now + wait, lambda: self._consider() if timer == self._timer else None)
        else:
            self._serve()

    def _serve(self) -> None:
        batch = self._queue[: self.load.max_batch]
        del self._queue[: self.load.max_batch]
        self.outcome.batches.append(len(batch))
        self.outcome.waits.append(self.now - max(self._free_since, batch[0]))
        seconds = (self.load.fixed + self.load.per_item * len(batch)) * self._random.uniform(0.95, 1.05)
        self._busy = True
        self._at(self.now + seconds, lambda: self._complete(batch, seconds))

    def _complete(self, batch: list[float], seconds: float) -> None:
        self._busy, self._free_since = False, self.now
        self.policy.ran(len(batch), seconds)
        self.policy.completed(self.now, len(batch))
        for sent in batch:
            self.outcome.latencies.append(self.now - sent)
            if self._surplus:
                self._surplus -= 1
            elif self.load.callers:
                think = self._random.expovariate(1 / self.load.think) if self.load.think else 0.0
                self._callers_free = max(self.now, self._callers_free) + self.load.on_the_way
                self._at(self._callers_free + TURNAROUND * self._random.uniform(0.5, 2) + think, self._arrive)
        self._consider()

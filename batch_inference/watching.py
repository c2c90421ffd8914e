"""What a supervisor decides about its workers: whether one hangs, when a dead one is started again, when to give up.

Values without I/O: the supervisor asks, and acts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

RESTART_DELAYS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
MINUTE = 60.0


class Pulse:
    """For how long a worker has had something to do and has shown no sign of life.

    Only time in which the supervisor itself was looking counts, `interval` seconds between two looks: where a whole
    container is paused, or the supervisor is, nobody hangs. An idle worker may be as silent as it likes; its time
    starts when it is first seen with something to do.
    """

    def __init__(self, interval: float) -> None:
        self._most = 2 * interval
        self._beats = -1
        self._looked = 0.0
        self.silent = 0.0

    def look(self, beats: int, outstanding: int, now: float) -> float:
        """The seconds of silence up to `now`."""
        if beats != self._beats or not outstanding:
            self._beats, self.silent = beats, 0.0
        else:
            self.silent += min(now - self._looked, self._most)
        self._looked = now
        return self.silent


class _Entry:
    def __init__(self, who: tuple[int, int], at: float, batches: int) -> None:
        self.who = who  # worker and incarnation
        self.at = at
        self.batches = batches  # that the host had served by then
        self.culprit = 0  # a number for the request that was convicted of it


class Restarts:
    """The deaths of a host's workers within the last minute: whether there are more than `most`, so that it gives up.

    Those for which a request was convicted count as one, and as none once the host has served a batch since: a few
    requests that kill workers shall not take the host from all others. A model under which every request dies serves
    no batch, and is given up.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._deaths: deque[_Entry] = deque()
        self._culprits = 0

    def died(self, who: tuple[int, int], now: float, batches: int) -> None:
        self._deaths.append(_Entry(who, now, batches))

    def convict(self, deaths: Collection[tuple[int, int]]) -> None:
        """One request was to blame for these deaths."""
        self._culprits += 1
        for entry in self._deaths:
            if entry.who in deaths:
                entry.culprit = self._culprits

    def exceeded(self, now: float, batches: int) -> bool:
        while self._deaths and self._deaths[0].at < now - MINUTE:
            self._deaths.popleft()
        unexplained = sum(not entry.culprit for entry in self._deaths)
        last = {entry.culprit: entry.batches for entry in self._deaths if entry.culprit}
        return unexplained + sum(served == batches for served in last.values()) > self._most


def restart_delay(failures: int) -> float:
    """Seconds until the next start of a worker that died `failures` times since it last served a batch."""
    return RESTART_DELAYS[min(failures, len(RESTART_DELAYS)) - 1]

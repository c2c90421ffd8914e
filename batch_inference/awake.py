"""Keeping the core of whoever waits for an answer awake."""

from __future__ import annotations

from batch_inference.speedups import in_c

LONG = 5_000_000  # ns; beside a wait that takes longer, the wake-up is nothing
MOMENT = 500_000  # ns; who is answered and sends again at once has done so by then


@in_c
def keep_awake(ns: int) -> None:
    """Says that a thread on this core waits, for the next `ns` nanoseconds or until the next call; 0 if none does.

    A core with nothing to do falls asleep. A virtual one is given away by its host after some 200 us, and then it is 30
    to 1,000 us until whoever waited runs again, not 10. So a thread wakes up there every 150 us; less and less often if
    nobody ever waits as long as that, or everybody longer than `LONG`.

    One state for the process. In Python it would cost more than it gains: nothing is done.
    """

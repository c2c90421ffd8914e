"""What becomes of a request whose worker died while a batch with it ran.

A client decides it from what it has seen happen to the request. Whoever only waited is nobody's culprit and goes to
the next incarnation as it is. Who was in the running batch may be the culprit, so it is sent again to run alone, and
it is given up when the worker has died twice under it alone. SIGKILL may have come from outside (the out-of-memory
killer, a person), so it earns one more try. That a worker had to end with its supervisor says nothing about requests.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batch_inference.errors import WorkerDiedError

MOST_ALONE = 2  # deaths with a request alone in the batch that convict it


@dataclass(frozen=True)
class Death:
    """The end of one incarnation of a worker."""

    worker: int
    incarnation: int
    cause: str
    """What died, and how, in words."""
    output: str = ""
    """The last lines that it printed."""
    code: int | None = None
    """Its exit status, negative for a signal; None when it ended because its supervisor did."""
    ours: bool = False
    """Whether the supervisor killed it, because it hung."""

    @property
    def with_supervisor(self) -> bool:
        return self.code is None

    @property
    def unexplained(self) -> bool:
        """Whether it may have been killed for reasons that have nothing to do with what it ran."""
        return self.code == -signal.SIGKILL and not self.ours


class Fatality(NamedTuple):
    """A death with a certain request in the running batch."""

    death: Death
    alone: bool
    """Whether no other request was in that batch."""


def convicted(history: Sequence[Fatality]) -> bool:
    """Whether what happened to a request so far is enough to say that it kills workers."""
    alone = [death for death, alone in history if alone]
    return len(alone) >= MOST_ALONE + any(death.unexplained for death in alone)


def blame(history: Sequence[Fatality]) -> WorkerDiedError:
    """The error for a request that was convicted."""
    deaths, last = len(history), history[-1].death
    alone = sum(fatality.alone for fatality in history)
    return WorkerDiedError(
        f"the worker died {_times(deaths)} with this request in the running batch, {_times(alone)} with it alone, so "
        f"it was not tried again: {last.cause}. The request probably crashes or hangs the model: try it on the model "
        f"by itself (num_workers=0), and refuse such requests before they are sent.{_said(last)}"
    )


def not_retried(death: Death) -> WorkerDiedError:
    """The error for a request of the running batch where retry=False forbids to run it again."""
    return WorkerDiedError(
        f"the worker died with this request in the running batch: {death.cause}. The model may have run it or not; it "
        f"was not sent again because of retry=False.{_said(death)}"
    )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _said(death: Death) -> str:
    if death.with_supervisor:
        return ""
    return f" The last it printed:\n{death.output}" if death.output.strip() else " It printed nothing."

"""What the command line decides for every benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    rounds: int = 5
    """Times each cell is measured; cells and floors take turns within a round."""
    window: float = 1.0
    """Seconds measured in a cell."""
    warm: float = 0.3
    """Seconds run before the window opens."""
    cells: tuple[str, ...] = ()
    """Only these cells of a benchmark that has several; none named: all."""
    peers: tuple[str, ...] = ()
    """Only these peers; none named: all that are installed."""
    pythons: tuple[str, ...] = ()
    """Interpreters to compare."""

"""Us beside our peers: ``python -m benchmarks peers``.

roster        who they are
environments  a virtual environment for each that needs packages
adapters/     one file a peer: how to start it and how to send it a request
serve         runs an adapter in the peer's environment and lets callers loose on it, cell by cell
contender     the other end of `serve`: starts it, places it on cores, stops and continues it
compare       the cells, in turns
goals         what is to be reached, judged from the cells
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measure import Found
    from benchmarks.options import Options


def run(options: Options) -> list[Found]:
    from benchmarks.peers.compare import run  # not where a peer's environment imports this package

    return run(options)

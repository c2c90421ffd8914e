"""This library, called from asyncio tasks."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.adapters import base, ours


class Adapter(ours.Adapter):
    how = "tasks"

    async def start(self) -> None:  # type: ignore[override]
        super().start()
        self.apredict = self._apair if base.pairs(self.workload) else self.host.apredict  # type: ignore[method-assign]

    async def _apair(self, x: Any) -> Any:
        return await self.host.apredict(*x)

"""The same, called from asyncio tasks."""

from __future__ import annotations

from typing import Any

from batch_inference.aio import ModelHost
from benchmarks.peers.adapters import base
from benchmarks.peers.adapters.predecessor_threads import options


class Adapter(base.Adapter):
    how = "tasks"

    async def start(self) -> None:
        self._host = ModelHost(model_obj=base.Model(self.workload), **options(self.workload))
        await self._host.start()
        self.apredict = self._pair if base.pairs(self.workload) else self._host.predict  # type: ignore[method-assign]

    async def _pair(self, x: Any) -> Any:
        return await self._host.predict(*x)

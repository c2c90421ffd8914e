"""`bare`, called from asyncio tasks: one write for what a turn of the loop sends, one read for what a batch answers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from benchmarks.peers.adapters import bare, base


class Adapter(bare.Adapter):
    how = "tasks"

    async def start(self) -> None:  # type: ignore[override]
        self.begin(together=True)
        self._loop = asyncio.get_running_loop()
        self._outbox: list[int] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._loop.add_reader(self.wakes[0], self._answered)
        await self.apredict(base.row(self.workload))

    async def apredict(self, x: Any) -> Any:
        slot = self.free.pop()
        self.slots.requests[slot][:] = x
        done = self._waiting[slot] = self._loop.create_future()
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(slot)
        await done
        answer = self.slots.replies[slot].copy()
        self.free.append(slot)
        return answer

    def _flush(self) -> None:
        os.write(self.requests[0], bytes(self._outbox))
        self._outbox.clear()

    def _answered(self) -> None:
        for slot in os.read(self.wakes[0], bare.SLOTS):
            self._waiting[slot].set_result(None)

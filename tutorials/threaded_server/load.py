"""A load generator: callers that each post a sentence, wait for the answer, and post the next one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Load:
    """What the callers saw: one latency in seconds per answer."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Caller:
    """One HTTP connection to localhost, opened again where the server closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def embed(self, text: str) -> list[float]:
        """The server's answer; RuntimeError when it has another status than 200."""
        body = json.dumps({"text": text}).encode()
        head = (
            f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        content = await self._reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close" or status.startswith("http/1.0"):
            self.close()
        if status.split()[1] != "200":
            raise RuntimeError(f"{status}: {content.decode()}")
        return json.loads(content)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def embed(port: int, texts: Sequence[str]) -> list[list[float]]:
    """The answers to `texts`, asked one after the other."""

    async def ask() -> list[list[float]]:
        caller = Caller(port)
        answers = [await caller.embed(text) for text in texts]
        caller.close()
        return answers

    return asyncio.run(ask())


def run(port: int, texts: Sequence[str], callers: int, seconds: float) -> Load:
    """`callers` of them at once, each in a closed loop, for so many seconds."""
    load = Load()

    async def loop(supply: Iterator[str], end: float) -> None:
        caller = Caller(port)
        while (start := time.perf_counter()) < end:
            try:
                await caller.embed(next(supply))
                load.latencies.append(time.perf_counter() - start)
            except (OSError, EOFError, RuntimeError) as error:
                load.errors.append(f"{type(error).__name__}: {error}")
                caller.close()
        caller.close()

    async def everybody() -> None:
        start = time.perf_counter()
        supply = itertools.cycle(texts)
        await asyncio.gather(*(loop(supply, start + seconds) for _ in range(callers)))
        load.seconds = time.perf_counter() - start

    asyncio.run(everybody())
    return load

"""The same with its server in a process of its own, over gRPC."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

from batch_inference import RemoteModelHost
from benchmarks.peers.adapters import base
from benchmarks.peers.adapters.predecessor_threads import options


class Served(base.Model):
    """Its constructor takes no arguments from afar."""

    workload = ""

    def __init__(self) -> None:
        super().__init__(self.workload)


def host(workload: str, port: int) -> Any:
    Served.workload = workload
    made = RemoteModelHost(Served, grpc_port=port, **options(workload))
    made()
    made.start()
    return made


class Adapter(base.Adapter):
    def start(self) -> None:
        if not self.address:
            self.address = str(base.free_port())
            self._server = subprocess.Popen(
                (sys.executable, "-m", __name__, self.workload, self.address), stdin=subprocess.DEVNULL
            )
            end = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", int(self.address)), 1).close()
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
        self._host = host(self.workload, int(self.address))
        self.predict = self._pair if base.pairs(self.workload) else self._host.predict  # type: ignore[method-assign]

    def _pair(self, x: Any) -> Any:
        return self._host.predict(*x)

    def stop(self) -> None:
        self._host.stop()


if __name__ == "__main__":
    served = host(sys.argv[1], int(sys.argv[2]))
    while True:
        time.sleep(3600)

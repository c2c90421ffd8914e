"""Who is measured. A peer is an adapter, what it needs, and how it is set."""

from __future__ import annotations

from dataclasses import dataclass

ENVIRONMENTS = {
    "predecessor": ("batch-inference",),
    "service-streamer": ("service-streamer",),
    "async-batcher": ("async-batcher",),
    "batched": ("batched",),
    "torchrl": ("torch", "torchrl"),
    "ray": ("ray[serve]",),
    "mosec": ("mosec", "msgpack"),
    "litserve": ("litserve",),
    "bentoml": ("bentoml",),
    "mlserver": ("mlserver", "uvloop<0.22"),  # 1.7.1 cannot start its worker with 0.22
}
"""Packages of each environment, besides numpy. Peers without an environment run in ours."""


HERE, PROCESS, HTTP = "in process", "another process", "over HTTP"


@dataclass(frozen=True)
class Peer:
    name: str
    adapter: str
    environment: str = ""
    how: str = "threads"
    """What its callers are: threads, or tasks of one event loop."""
    where: str = HERE
    """Where the model runs, seen from the callers."""
    batches: bool = True
    wait: float = 0.0
    """Its delay for a fuller batch, ms."""
    skips: tuple[str, ...] = ()
    """Workloads it cannot do."""
    connects: bool = False
    """Whether several client processes can share one model."""
    note: str = ""
    python: str = ""
    """Its interpreter, if not that of its environment or ours."""

    def runs(self, workload: str, processes: int) -> bool:
        return workload not in self.skips and (processes == 1 or self.connects)


PEERS = (
    Peer("ours, threads", "ours", where=PROCESS, connects=True),
    Peer("ours, tasks", "ours_tasks", how="tasks", where=PROCESS, connects=True),
    Peer("multiprocessing.Queue", "queues", where=PROCESS, batches=False, note="one request at a time"),
    Peer("ProcessPoolExecutor", "executor", where=PROCESS, batches=False, note="one request at a time"),
    Peer("service-streamer", "service_streamer_", "service-streamer", where=PROCESS, wait=1),
    Peer(
        "TorchRL", "torchrl_", "torchrl", where=PROCESS, skips=("g",), note="ProcessSlotTransport: slots of one shape"
    ),
    Peer(
        "predecessor, gRPC",
        "predecessor_grpc",
        "predecessor",
        where=PROCESS,
        skips=("d",),
        connects=True,
        note="refuses messages above 4 MiB",
    ),
    Peer("Ray Serve", "ray_", "ray", where=PROCESS, note="a DeploymentHandle, no HTTP"),
    Peer(
        "mosec",
        "mosec_",
        "mosec",
        where=HTTP,
        connects=True,
        wait=1,
        skips=("g",),
        note="msgpack, a bare socket as client",
    ),
    Peer(
        "LitServe",
        "litserve_",
        "litserve",
        where=HTTP,
        connects=True,
        skips=("g",),
        note="base64, a bare socket as client",
    ),
    Peer(
        "BentoML",
        "bentoml_",
        "bentoml",
        where=HTTP,
        connects=True,
        skips=("g",),
        note="base64, a bare socket as client; it learns its delay",
    ),
    Peer(
        "MLServer",
        "mlserver_",
        "mlserver",
        where=HTTP,
        connects=True,
        wait=1,
        skips=("g",),
        note="V2 protocol, base64, a bare socket as client",
    ),
    Peer("predecessor, threads", "predecessor_threads", "predecessor"),
    Peer("predecessor, tasks", "predecessor_tasks", "predecessor", how="tasks"),
    Peer("async-batcher", "async_batcher_", "async-batcher", how="tasks"),
    Peer("batched, threads", "batched_threads", "batched", wait=1),
    Peer("batched, tasks", "batched_tasks", "batched", how="tasks", wait=1),
    Peer(
        "bare path, threads",
        "bare",
        where=PROCESS,
        skips=("g",),
        connects=True,
        note="no library: the least Python that does the work",
    ),
    Peer(
        "bare path, tasks",
        "bare_tasks",
        how="tasks",
        where=PROCESS,
        skips=("g",),
        note="the same",
    ),
    Peer("a lock", "lock", batches=False, note="the model in process, one caller at a time"),
)
BY_NAME = {peer.name: peer for peer in PEERS}
OURS = ("ours, threads", "ours, tasks")
BARE = ("bare path, threads", "bare path, tasks")
"""What no library can do much better than."""

"""Ray Serve: @serve.batch behind a DeploymentHandle, without HTTP."""

from __future__ import annotations

import logging
import os
from typing import Any

from benchmarks.peers.adapters import base

# It is stopped while others are measured: not a reason to give it up.
os.environ.update(
    RAY_agent_register_timeout_ms="100000",
    RAY_health_check_failure_threshold="1000",
    RAY_usage_stats_enabled="0",
    RAY_enable_metrics_collection="0",
    RAY_AUTH_MODE="disabled",
)


class Adapter(base.Adapter):
    def start(self) -> None:
        import ray
        from ray import serve

        passed = {name: value for name, value in os.environ.items() if name.startswith(("BENCH_", "PYTHONPATH"))}
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=1 << 30,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": passed},
        )
        latency, most = base.wait_ms() / 1000, base.MAX_BATCH

        @serve.deployment(
            max_ongoing_requests=256,
            ray_actor_options={"num_cpus": 1},
            health_check_period_s=3600,
            health_check_timeout_s=3600,
        )
        class Served:
            def __init__(self, workload: str) -> None:
                self._model = base.Model(workload)

            @serve.batch(max_batch_size=most, batch_wait_timeout_s=latency)  # type: ignore[untyped-decorator]
            async def __call__(self, batch: Any) -> Any:
                return self._model.predict_list(batch)

        serve.start(proxy_location="Disabled")
        self._handle = serve.run(Served.bind(self.workload), name="bench", route_prefix=None)
        self.predict(base.row(self.workload))

    def predict(self, x: Any) -> Any:
        return self._handle.remote(x).result(timeout_s=30)

    def stop(self) -> None:
        import ray

        ray.shutdown()

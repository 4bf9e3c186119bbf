"""Ray: the cores of this machine, or a cluster that runs. Lost workers and nodes do no harm.

Options are those of a remote function, like `num_cpus`, `memory` and `max_retries`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterator
from typing import Any

from exporter.errors import UsageError
from exporter.jobs.engines.engine_options import require_room, require_short
from exporter.jobs.engines.process import Asked
from exporter.jobs.execute import execute

LIBRARY = "ray"

_AHEAD = 4  # works submitted to Ray for each core: enough to keep it busy
_LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by the machine's address in the network


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """Run works on Ray and yield their outcomes, in any order.

    Without an address, Ray is started here, and ended at the end; environment variables of this process are
    changed. During the iteration: UsageError for options that Ray does not accept, or that ask for more than
    this machine has, for more workers than fit into memory, and for too long a path of temporary files;
    errors of Ray pass.
    """
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    own: dict[str, Any] = {}
    if not asked.address:  # Ray listens on all networks, and runs the code of any caller who has the token
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        require_short(asked.files)
        own = {"num_cpus": asked.cores, "include_dashboard": False, "_temp_dir": asked.files}
        # Outcomes are small; Ray refuses less than 75 MiB.
        own |= {"object_store_memory": 80 << 20, "_node_ip_address": _LOOPBACK}  # outcomes are small
    import ray

    options = {"max_retries": 3, **asked.values()}
    try:
        call = ray.remote(**options)(execute)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Ray does not take these options of --engine: {error}") from error
    # "local", as without an address Ray joins a cluster that a left-over file names, even a dead one.
    ray.init(asked.address or "local", log_to_driver=False, logging_level="ERROR", **own)
    if own:
        require_room(options, ray.cluster_resources())
    ahead = (asked.workers if asked.address else 0) or _AHEAD * int(ray.cluster_resources().get("CPU", 1))
    pending: list[Any] = []
    try:
        for work in works:
            pending.append(call.remote(work))
            if len(pending) >= ahead:
                (done, *_), pending = ray.wait(pending)
                yield ray.get(done)
        while pending:
            (done, *_), pending = ray.wait(pending)
            yield ray.get(done)
    finally:
        for each in pending:
            ray.cancel(each, force=True)
        ray.shutdown()

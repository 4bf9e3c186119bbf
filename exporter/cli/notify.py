"""`--notify`: ask model servers to apply what was just published, and say what each of them did.

For teams that run no agent. A server that does not answer is a warning: what is published stays published,
and the next notification, or a server's own start, catches up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from exporter.cli.documents.exported import Notified
from exporter.errors import CallFailed, ExportError

DEADLINE_S = 30.0
_AT_A_TIME = 32


def notify(addresses: Sequence[str], model: str) -> list[Notified]:
    """Bring each server as far as what is published and the hold allow, all at the same time.

    Args:
        addresses: `host:port` of gRPC ports; the port is 8500 if left out.
        model: the model's name on the servers.
    """
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        return list(pool.map(partial(_notify, model=model), addresses))


def _notify(address: str, model: str) -> Notified:
    from serving.client import ModelClient
    from serving.updates import update

    began = time.monotonic()
    position, problem = None, None
    try:
        with ModelClient(address, model, deadline_s=DEADLINE_S) as client:
            done = update(client)
        position = done.position
        if done.is_stuck:
            problem = done.status
    except CallFailed as error:
        problem = error.cause or error.message
    except ExportError as error:
        problem = error.message
    return Notified(address, position, round(time.monotonic() - began, 4), problem)

"""`--notify`: ask model servers to apply what was just published, and say what each of them did.

For teams that run no agent. A server that does not answer is a warning: what is published stays published,
and the next notification, or a server's own start, catches up.
"""

from __future__ import annotations

import time
from functools import partial

from msgspec import Struct

from exporter.cli.documents.exported import Notified
from exporter.errors import CallFailed, ExportError, UsageError
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess

DEADLINE_S = 30.0
_AT_A_TIME = 32


class Servers(Struct, frozen=True):
    """The model servers that are told: `host:port` of gRPC ports, and how to reach them."""

    addresses: tuple[str, ...] = ()
    access: ServerAccess = WITHOUT_TLS

    def check(self) -> None:
        """Look at the files for TLS before anything is published.

        Raises:
            UsageError: one of them cannot be used, or nobody is to be reached by them.
        """
        if self.access == WITHOUT_TLS:
            return
        if not self.addresses:
            raise UsageError("--grpc-ca and its like go with --notify")
        from serving.credentials import channel_credentials

        channel_credentials(self.access)

    def notify(self, model: str) -> list[Notified]:
        """Bring each as far as what is published and the hold allow, all at the same time."""
        if not self.addresses:
            return []
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_AT_A_TIME, len(self.addresses))) as pool:
            return list(pool.map(partial(_notify, model=model, access=self.access), self.addresses))


NOBODY = Servers()


def _notify(address: str, model: str, access: ServerAccess) -> Notified:
    from serving.client import ModelClient
    from serving.updates import update

    began = time.monotonic()
    position, problem = None, None
    try:
        with ModelClient(address, model, deadline_s=DEADLINE_S, access=access) as client:
            done = update(client)
        position = done.position
        if done.is_stuck:
            problem = done.status
    except CallFailed as error:
        problem = error.cause or error.message
    except ExportError as error:
        problem = error.message
    return Notified(address, position, round(time.monotonic() - began, 4), problem)

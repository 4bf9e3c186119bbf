"""`--notify`: ask model servers to apply a new publication, and report the result of each.

For teams that run no agent. A server that does not answer is a warning: the publication remains, and the next
notification, or a server's own start, makes up for it. Each server is asked for its status before it is asked
to update. A server that does not answer is not asked again for a while, so that it does not delay a watch.
"""

from __future__ import annotations

import time
from functools import partial

from msgspec import Struct, field

from exporter.errors import CallFailed, ExportError, UsageError
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess

DEADLINE_S = 30.0
_AT_A_TIME = 32
_LEFT_OUT_S = 10.0
# A server may only be busy; one that hung before gets less time, because a watch waits for it.
_FIRST_SIGN_OF_LIFE_S, _SIGN_OF_LIFE_S = 5.0, 1.0


class Notified(Struct, frozen=True):
    """A server that `--notify` names, and the position that it reached."""

    address: str
    """As it was given."""
    position: int | None
    """The server's position now; null if it did not say."""
    seconds: float
    """How long it took."""
    problem: str | None
    """Why it is not at the published position; null if it is."""


class Servers(Struct, frozen=True):
    """The model servers to ask, as `host:port` of gRPC ports, and how to reach them."""

    addresses: tuple[str, ...] = ()
    access: ServerAccess = WITHOUT_TLS
    _hanging: dict[str, float] = field(
        default_factory=dict
    )  # until when (monotonic, s) each is not asked again

    def check(self) -> None:
        """Read the files for TLS, so that errors come before publishing.

        Raises:
            UsageError: TLS options exclude each other or are given without a server, or a file cannot be
                used.
            LfsPointer: a file is a pointer of Git LFS.
        """
        if self.access == WITHOUT_TLS:
            return
        if not self.addresses:
            raise UsageError("--grpc goes with --notify", hint="add --notify HOST, or leave out --grpc")
        from serving.credentials import channel_credentials

        channel_credentials(self.access)

    def notify(self, model: str, position: int) -> list[Notified]:
        """Ask all servers to apply the publications; wait, and return a result for each, in order.

        `model` is the model's name on the servers, `position` the published one, which each should reach. At
        most 32 are asked at a time, and a call fails after 30 s. A server that did not answer is not asked
        again for ten seconds. A failure is the `problem` of a result, not an exception. [] without servers.
        """
        if not self.addresses:
            return []
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_AT_A_TIME, len(self.addresses))) as pool:
            return list(pool.map(partial(self._notify, model, position), self.addresses))

    def _notify(self, model: str, published: int, address: str) -> Notified:
        from exporter.wire.update_status import UpdateStatus
        from serving.client import ModelClient
        from serving.updates import update

        began = time.monotonic()
        if began < self._hanging.get(address, 0.0):
            return Notified(address, None, 0.0, "not asked: it did not answer a moment ago")
        position, problem = None, None
        try:
            patience = _SIGN_OF_LIFE_S if address in self._hanging else _FIRST_SIGN_OF_LIFE_S
            with ModelClient(address, model, deadline_s=patience, access=self.access) as client:
                client.status()
                client.deadline_s = DEADLINE_S
                done = update(client)
            position = done.position
            if done.is_stuck:
                problem = done.status
            elif done.word == UpdateStatus.CURRENT and position < published:
                problem = "nothing newer is in the directory that it reads: a copy, perhaps, that lags"
        except CallFailed as error:
            problem = error.cause or error.message
        except ExportError as error:
            problem = error.message
        ended = time.monotonic()
        # One that refuses at once costs no time, and is asked at each publication.
        if position is None and ended - began >= _SIGN_OF_LIFE_S:
            self._hanging[address] = ended + _LEFT_OUT_S
        else:
            self._hanging.pop(address, None)
        return Notified(address, position, round(ended - began, 4), problem)


NOBODY = Servers()

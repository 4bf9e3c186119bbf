"""The calls that the agent makes to one model of one server."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Self

from exporter.delta.chunk_digest import Chunk
from exporter.errors import CallFailed
from exporter.terminal.server_access import ServerAccess
from serving.agent.audit import Audited, audit
from serving.agent.rollout import Apply, Audit, Version
from serving.client import ModelClient
from serving.status import VersionState, VersionStatus, error_text
from serving.updates import IncrementalStatus, Updated, call_until_there, read_incremental_status

BYTES_A_SECOND = 20e6
"""A catch-up is given the time that its deltas take at this rate, beside the deadline of any call."""


class Replica:
    """One model of one server; used by one thread."""

    def __init__(self, address: str, model: str, deadline_s: float, access: ServerAccess) -> None:
        self.address = address
        self.model = model
        self._deadline_s = deadline_s
        self._client = ModelClient(address, model, deadline_s=deadline_s, access=access)

    def observe(self) -> list[Version]:
        """Every version, and where those stand that are available.

        Raises:
            CallFailed: the server did not answer, or has no such model.
        """
        return [self._version(status) for status in self._client.status()]

    def apply(self, action: Apply, bytes_: int) -> Updated:
        """Bring a version to a position; `bytes_` is what the deltas on the way hold.

        If another update ran all the time, nothing was done: see `Updated.found_another`.

        Raises:
            CallFailed: INVALID_ARGUMENT, the version does not take a delta; otherwise nobody knows.
        """
        self._client.deadline_s = self._deadline_s + bytes_ / BYTES_A_SECOND
        try:
            return call_until_there(self._client, action.up_to, action.version)
        finally:
            self._client.deadline_s = self._deadline_s

    def audit(self, action: Audit, model: Path, chunks: int, suspects: Collection[Chunk]) -> Audited:
        """Compare what a version holds with what is published under `model`.

        Raises:
            CallFailed: the server did not answer, or refused.
        """
        return audit(self._client, model, action, chunks, suspects)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _version(self, status: VersionStatus) -> Version:
        found = self._standing(status)
        if found is None:
            return Version(status.version, status.state, message=error_text(status))
        return Version(
            status.version,
            status.state,
            found.position,
            found.step,
            found.lineage,
            error_text(status),
            found.unsettled,
        )

    def _standing(self, status: VersionStatus) -> IncrementalStatus | None:
        if status.state is not VersionState.AVAILABLE:
            return None
        try:
            return read_incremental_status(self._client, status.version)
        except CallFailed as error:
            if error.code == "NOT_FOUND":  # unloaded between the two calls
                return None
            raise

"""Bring a running model to a position: one call of the incremental subgraph's signature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exporter.errors import CallFailed, UsageError
from serving.client import ModelClient

UPDATE_SIGNATURE = "incremental_update"
NEWEST = -1
_AS_FAR_AS_ASKED = {"reached", "current", "passed", "hold"}
"""First words of the statuses (see `exporter.bundle.update_function`) that ask for nothing."""
_NO_HOLD = "hold: its file cannot be read"


@dataclass(frozen=True, slots=True)
class Updated:
    """Where a replica stands after an update: what was applied, and in the model's words why it stopped."""

    version: int
    position: int
    step: int
    rows: int
    deltas: int
    status: str

    @property
    def is_stuck(self) -> bool:
        """True if deltas that are published were not taken, and never will be."""
        return self.status.partition(":")[0] not in _AS_FAR_AS_ASKED or _NO_HOLD in self.status


def update(client: ModelClient, *, up_to: int = NEWEST, version: int | None = None) -> Updated:
    """Apply published deltas up to a position; with -1 as far as they go and `hold` allows.

    Calls are idempotent: after a time-out, call again.

    Raises:
        UsageError: the model has no incremental subgraph.
        CallFailed (exporter.errors): the model refuses to go to `up_to`, or the call failed otherwise.
    """
    metadata = client.metadata(version)
    if UPDATE_SIGNATURE not in metadata.signatures:
        raise UsageError(
            f"version {metadata.version} of {client.model} takes no deltas",
            cause=f"it has no signature {UPDATE_SIGNATURE!r}",
            hint="publish a newer version that does: the same export-model command with --updatable",
        )
    inputs = {"up_to": np.array([up_to], np.int64)}
    try:
        answer = client.predict(inputs, signature=UPDATE_SIGNATURE, version=metadata.version)
    except CallFailed as error:
        if error.code != "INVALID_ARGUMENT":
            raise
        hint = "see which positions are published: export-model verify MODEL"
        raise CallFailed(error.code, error.message, cause=error.cause, hint=hint) from error
    numbers = {name: int(answer.outputs[name][0]) for name in ("position", "step", "rows", "deltas")}
    return Updated(answer.version, **numbers, status=bytes(answer.outputs["status"][0]).decode())

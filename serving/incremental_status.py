"""Ask a version that takes deltas for its position, by the signature `incremental_status`."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from serving.client import ModelClient

STATUS_SIGNATURE = "incremental_status"


class IncrementalStatus(Struct, frozen=True):
    """The position and training step whose values a version serves, and the log that its deltas are of.

    `unsettled` counts its responses of no one position since it was loaded; None if it does not report them.
    """

    position: int
    step: int
    lineage: str
    unsettled: int | None = None


def read_incremental_status(client: ModelClient, version: int) -> IncrementalStatus | None:
    """Where a version stands; None if it takes no deltas.

    Raises:
        CallFailed (exporter.errors): the server did not answer, or refused.
    """
    if STATUS_SIGNATURE not in client.metadata(version).signatures:
        return None
    probe = {"probe": np.zeros([1], np.int64)}
    found = client.predict(probe, signature=STATUS_SIGNATURE, version=version).outputs
    lineage = bytes(found["lineage"][0]).decode()
    unsettled = int(found["unsettled"][0]) if "unsettled" in found else None  # bases of 0.1.0 have none
    return IncrementalStatus(int(found["position"][0]), int(found["step"][0]), lineage, unsettled)

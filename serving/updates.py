"""Update a running model to a position, by calls of its `incremental_update` signature.

One call as a rule. It is made again while another update runs, and where a server batches requests: a call
that is merged with another goes no further than the smaller of their targets. The status says which.

Ask a version that takes deltas for its position, by the signature `incremental_status`.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CallFailed, UsageError
from serving.client import ModelClient
from serving.status import Code, VersionState

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


UPDATE_SIGNATURE = "incremental_update"
NEWEST = -1
_ANOTHER_RUNS = "merged: another update runs"
_AS_FAR_AS_ASKED = {"reached", "current", "passed", "hold"}
"""First words of the statuses (see `exporter.subgraph.update`) that ask for nothing."""
_POLL_SECONDS = 0.1
_NO_HOLD = "hold: its file cannot be read"
_WITH_A_TARGET = {"reached", "passed", "inside", "unpublished"}
"""Statuses that calls for the newest position get from another's target, where a base says no `merged`."""
_REFUSED = "INVALID_ARGUMENT"
_HINT = "see which positions are published: export-model verify MODEL"
_MOST_CALLS = 20
_LONGEST_PAUSE_S = 0.1


class Updated(Struct, frozen=True):
    """Where a replica stands after an update: what was applied, and in the model's words why it stopped.

    `loading` is a newer version that the server had not made available in time; it was not updated.
    """

    version: int
    position: int
    step: int
    rows: int
    deltas: int
    status: str
    loading: int | None = None

    @property
    def is_stuck(self) -> bool:
        """True if published deltas were not applied, and calling again will not help."""
        return self.word not in _AS_FAR_AS_ASKED or _NO_HOLD in self.status

    @property
    def word(self) -> str:
        """The first word of the status."""
        return self.status.partition(":")[0]

    @property
    def found_another(self) -> bool:
        """True if nothing was done because another update was under way."""
        return self.status.startswith(_ANOTHER_RUNS)

    def was_merged(self, up_to: int) -> bool:
        """True if it stopped at another call's target, so that calling again may get further."""
        if up_to == NEWEST:
            return self.word == "merged" or self.word in _WITH_A_TARGET
        return self.word == "merged" or (self.word in ("reached", "passed") and self.position < up_to)


def update(client: ModelClient, *, up_to: int = NEWEST, version: int | None = None) -> Updated:
    """Apply published deltas up to a position; with -1 as far as they go and `hold` allows.

    Without a version the newest available one is updated, and then a newer one that is being loaded, once it
    is available: what was published while its warm-up ran would be missing until the next update otherwise.
    The client's deadline bounds the wait. Calls are idempotent: after a time-out, call again. Rows and deltas
    are those of all calls together, also if they were applied for another client as well.

    Raises:
        UsageError: the model has no incremental subgraph.
        CallFailed (exporter.errors): the model refuses to go to `up_to`, or the call failed otherwise;
            DEADLINE_EXCEEDED: another update ran all the time.
    """
    until = time.monotonic() + client.deadline_s
    done = _update(client, up_to, version)
    while version is None and (newer := _newer(client, done.version)):
        number, is_available = newer
        if is_available:
            done = _update(client, up_to, number)
        elif time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        else:
            return replace(done, loading=number)
    return done


def _newer(client: ModelClient, version: int) -> tuple[int, bool] | None:
    """The newest version beyond `version` that is available or will be, and whether it is."""
    with suppress(CallFailed):  # what was asked for is done already
        for found in client.status():
            coming = found.state in {VersionState.START, VersionState.LOADING, VersionState.AVAILABLE}
            if found.version > version and coming and found.code is Code.OK:
                return found.version, found.state is VersionState.AVAILABLE
    return None


def _update(client: ModelClient, up_to: int, version: int | None) -> Updated:
    metadata = client.metadata(version)
    if UPDATE_SIGNATURE not in metadata.signatures:
        raise UsageError(
            f"version {metadata.version} of {client.model} takes no deltas",
            cause=f"it has no signature {UPDATE_SIGNATURE!r}",
            hint="publish a newer version that does: the same export-model command with --updatable",
        )
    done = call_until_there(client, up_to, metadata.version)
    if done.found_another:
        raise CallFailed(
            "DEADLINE_EXCEEDED",
            f"another update of {client.model} ran on {client.address} for {client.deadline_s:g} s",
            cause=done.status,
            hint="call again; each update is cut off by its own client's deadline",
        )
    return done


def call_until_there(client: ModelClient, up_to: int, version: int) -> Updated:
    """Update one version that is known to take deltas.

    While another update runs it asks again until the client's deadline: see `Updated.found_another`.
    """
    until = time.monotonic() + client.deadline_s
    rows = deltas = 0
    for calls in range(1, _MOST_CALLS + 1):
        try:
            done = _call_in_turn(client, up_to, version, until)
        except CallFailed as error:
            # Older bases fail every call of a merged batch by one impossible target.
            if up_to != NEWEST or error.code != _REFUSED or calls == _MOST_CALLS:
                raise
        else:
            rows, deltas = rows + done.rows, deltas + done.deltas
            if done.found_another:
                return replace(done, rows=rows, deltas=deltas)
            if not done.was_merged(up_to):
                break
        time.sleep(random.uniform(0, _LONGEST_PAUSE_S))  # so as to meet another batch
    else:
        raise CallFailed(
            "ABORTED",
            f"{client.address} merged {_MOST_CALLS} calls with others for a smaller position",
            cause=done.status,
            hint="call again when no other client updates the model",
        )
    if up_to != NEWEST and done.position < up_to:  # merged, so that others do not fail by it
        message = f"{client.address} refused Predict for {client.model}"
        raise CallFailed(_REFUSED, message, cause=f"{_REFUSED}: {done.status}", hint=_HINT)
    return replace(done, rows=rows, deltas=deltas)


def _call_in_turn(client: ModelClient, up_to: int, version: int, until: float) -> Updated:
    """Call until no other update runs, or time is up."""
    while (done := _call(client, up_to, version)).found_another and time.monotonic() < until:
        time.sleep(random.uniform(0, _LONGEST_PAUSE_S))
    return done


def _call(client: ModelClient, up_to: int, version: int) -> Updated:
    inputs = {"up_to": np.array([up_to], np.int64)}
    try:
        answer = client.predict(inputs, signature=UPDATE_SIGNATURE, version=version)
    except CallFailed as error:
        if error.code != _REFUSED:
            raise
        raise CallFailed(error.code, error.message, cause=error.cause, hint=_HINT) from error
    numbers = {name: int(answer.outputs[name][0]) for name in ("position", "step", "rows", "deltas")}
    return Updated(answer.version, **numbers, status=bytes(answer.outputs["status"][0]).decode())

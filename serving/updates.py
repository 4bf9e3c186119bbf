"""Read and change the position of a running model, by `incremental_status` and `incremental_update`.

An update usually takes one call. The client calls again while another update runs. It also calls again if the
server batches requests: a batch of several calls stops at the smallest of their targets, and its status says
so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from exporter.errors import CallFailed, NotTrusted, UsageError
from exporter.publish.served import Served, ServedTables
from exporter.wire.update_status import ANOTHER_RUNS, UNREADABLE_HOLD, UpdateStatus
from serving.client import ModelClient, Prediction
from serving.status import Code, VersionState, VersionStatus, error_text

if TYPE_CHECKING:
    from exporter.publish.model import Model

STATUS_SIGNATURE = "incremental_status"
UPDATE_SIGNATURE = "incremental_update"
NEWEST = -1
_AS_FAR_AS_ASKED = {UpdateStatus.REACHED, UpdateStatus.CURRENT, UpdateStatus.PASSED, UpdateStatus.HOLD}
"""First words of the statuses (see `exporter.wire.update_status`) that need no action."""
_POLL_SECONDS = 0.1
_WITH_A_TARGET = {
    UpdateStatus.REACHED,
    UpdateStatus.PASSED,
    UpdateStatus.INSIDE,
    UpdateStatus.UNPUBLISHED,
}
"""Statuses that a call for the newest position gets from another call's target, on bases that do not yet
report `merged`."""
_REFUSED = "INVALID_ARGUMENT"
_UNANSWERED = (Code.UNAVAILABLE.name, Code.DEADLINE_EXCEEDED.name)
_HINT = "list the positions: export-model history MODEL"
_MOST_CALLS = 20
_LONGEST_PAUSE_S = 0.1


def read_incremental_status(client: ModelClient, version: int) -> Served | None:
    """Ask an available version for its position, its log and its tables; None if it takes no deltas.

    Raises:
        CallFailed (exporter.errors): the server did not respond, refused, or did not answer as a model
            server; NOT_FOUND if the version is not available.
    """
    if STATUS_SIGNATURE not in client.metadata(version).signatures:
        return None
    return _read_position(client, version)


def _read_position(client: ModelClient, version: int) -> Served:
    probe = {"probe": np.zeros([1], np.int64)}
    return client.predict_as(
        lambda answer: _served(version, answer.outputs), probe, signature=STATUS_SIGNATURE, version=version
    )


def _served(version: int, found: Mapping[str, NDArray[Any]]) -> Served:
    tables = None
    if "overlay_percent" in found:
        names = ("mapped_tables", "tables_to_map", "overlay_percent")
        tables = ServedTables(*(_number(found, name) for name in names))
    return Served(
        version,
        VersionState.AVAILABLE,
        _number(found, "position"),
        _number(found, "step"),
        _text(found, "lineage"),
        unsettled=_number(found, "unsettled") if "unsettled" in found else None,  # bases of 0.1.0 have none
        tables=tables,
    )


def _number(found: Mapping[str, NDArray[Any]], name: str) -> int:
    """Return the first number of the output `name` in `found`.

    ValueError if it is not an int64, KeyError if there is no such output, IndexError if it is empty.
    """
    if found[name].dtype != np.int64:
        raise ValueError(f"the output {name!r} is {found[name].dtype}, not int64")
    return int(found[name][0])


def _text(found: Mapping[str, NDArray[Any]], name: str) -> str:
    """Return the first text of the output `name` in `found`.

    ValueError if it is no text, KeyError if there is no such output, IndexError if it is empty.
    """
    text = found[name][0]
    if not isinstance(text, bytes):  # bytes(3) would be three zeros
        raise ValueError(f"the output {name!r} is {found[name].dtype}, not string")
    return text.decode()


def read_served(client: ModelClient, status: VersionStatus, before: Collection[Served] = ()) -> Served:
    """Return the version in `status`, with its position if it is available and takes deltas.

    If it was unloaded after the server reported `status`, its state is END, with the reason as message. The
    signatures of a version that is in `before`, the versions at the last look, with a position are read only
    if asking for the position fails: reading them takes most of the time of a client that repeatedly asks
    hundreds of servers.

    Raises:
        CallFailed (exporter.errors): the server did not respond, refused, or did not answer as a model
            server.
    """
    version = Served(status.version, status.state, message=error_text(status))
    if not version.is_available:
        return version
    if any(known.number == status.version and known.position is not None for known in before):
        try:
            return _read_position(client, status.version)
        except CallFailed as error:
            if error.code in _UNANSWERED:
                raise
    try:
        return read_incremental_status(client, status.version) or version
    except CallFailed as error:
        if error.code != "NOT_FOUND":
            raise
        return replace(version, state=VersionState.END, message=error.cause or error.message)


class Updated(Struct, frozen=True):
    """The position after an update, the rows and deltas applied, and the reason why it stopped, `status`.

    `loading` is a newer version that was not available in time, so that it was not updated; or None.
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
        """Return True if published deltas are left that it did not apply, for another reason than a hold.

        True, too, if the hold cannot be read.
        """
        return self.word not in _AS_FAR_AS_ASKED or UNREADABLE_HOLD in self.status

    @property
    def word(self) -> str:
        """Return the first word of the status, an `UpdateStatus` of a known base."""
        return self.status.partition(":")[0]

    @property
    def found_another(self) -> bool:
        """Return True if the last call applied nothing because another update was running."""
        return self.status.startswith(ANOTHER_RUNS)

    def was_merged(self, up_to: int) -> bool:
        """Return True if the update stopped at another call's target, so that a further call may help.

        `up_to` is the position that was requested, -1 for the newest.
        """
        if up_to == NEWEST:
            return self.word == UpdateStatus.MERGED or self.word in _WITH_A_TARGET
        stops_there = self.word in (UpdateStatus.REACHED, UpdateStatus.PASSED)
        return self.word == UpdateStatus.MERGED or (stops_there and self.position < up_to)


def update(client: ModelClient, *, up_to: int = NEWEST, version: int | None = None) -> Updated:
    """Let a server apply published deltas up to a position; -1 means the newest that the hold allows.

    Without a version, the newest available one is updated, and then a newer one that is loading, once it is
    available; otherwise it would lack the deltas published during its warm-up until the next update. The
    client's deadline limits this wait, and each call. Calls are idempotent: after a time-out, call again.
    Rows and deltas in the result are sums over all calls for its version, including deltas that a merged call
    of another client applied. With -1, a hold or a gap is a status of the result, not an error.

    Raises:
        UsageError: the version, or the newer one, takes no deltas.
        CallFailed (exporter.errors): the model refuses to go to `up_to`, or a call failed otherwise;
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


def trusted_target(
    client: ModelClient, model: Model, *, up_to: int = NEWEST, version: int | None = None
) -> tuple[int, int]:
    """Return the version to update, and the furthest position that signed publications let it reach.

    The version is `version`, or the newest available one for None. `up_to`, unless -1, limits the position,
    which is never before the served one. `model` was read with trusted keys in force. The server lists the
    directory itself: it is sent no further than the last delta before one that no trusted key has signed.

    Raises:
        NotTrusted: no trusted key has signed the version's base, or deltas that lead to `up_to`.
        UsageError: the version takes no deltas.
        CallFailed: the server did not respond, or refused.
    """
    number = client.metadata(version).version
    served = read_incremental_status(client, number)
    if served is None:
        raise _takes_none(client, number, STATUS_SIGNATURE)
    log = model.logs.get(served.lineage)
    if served.position is None or log is None:
        raise NotTrusted(
            f"version {number} of {client.model} on {client.address} was signed by no trusted key"
        )
    ends = [span.end for span in (log if up_to == NEWEST else log.up_to(up_to)).reach(served.position)]
    furthest = max([served.position, *ends])
    if up_to > furthest:
        why = next((error.message for error in model.untrusted), "")
        raise NotTrusted(f"nothing that a trusted key has signed leads to position {up_to}", cause=why)
    return number, furthest


def _newer(client: ModelClient, version: int) -> tuple[int, bool] | None:
    """Return the newest version above `version` that is available or loading, and True if it is available.

    None if there is none, or the call fails. A version that failed to load does not count.
    """
    with suppress(CallFailed):  # the update itself has succeeded
        for found in client.status():
            coming = found.state in {VersionState.START, VersionState.LOADING, VersionState.AVAILABLE}
            if found.version > version and coming and found.code is Code.OK:
                return found.version, found.state is VersionState.AVAILABLE
    return None


def _update(client: ModelClient, up_to: int, version: int | None) -> Updated:
    metadata = client.metadata(version)
    if UPDATE_SIGNATURE not in metadata.signatures:
        raise _takes_none(client, metadata.version, UPDATE_SIGNATURE)
    done = call_until_there(client, up_to, metadata.version)
    if done.found_another:
        raise CallFailed(
            "DEADLINE_EXCEEDED",
            f"another update of {client.model} ran on {client.address} for {client.deadline_s:g} s",
            cause=done.status,
            hint="call again; each update ends at the deadline of its own client",
        )
    return done


def _takes_none(client: ModelClient, version: int, signature: str) -> UsageError:
    """Return the error for a version that takes no deltas, because it lacks `signature`."""
    return UsageError(
        f"version {version} of {client.model} takes no deltas",
        cause=f"it has no signature {signature!r}",
        hint="publish a newer version that does: the same export-model command with --new-base always",
    )


def call_until_there(client: ModelClient, up_to: int, version: int) -> Updated:
    """Update one version that takes deltas, by several calls if needed, and return its state after the last.

    `up_to` -1 is the newest position; then a hold or a gap is a status of the result. Rows and deltas are
    sums over the calls. While another update runs, the call is repeated, after up to 0.1 s, until the
    client's deadline; then `Updated.found_another` is true.

    Raises:
        CallFailed: INVALID_ARGUMENT if the model refuses to go to `up_to`, or does not reach it; ABORTED if
            20 calls were merged with calls for a smaller position; other codes if the server does not
            respond or refuses.
    """
    until = time.monotonic() + client.deadline_s
    rows = deltas = 0
    for calls in range(1, _MOST_CALLS + 1):
        try:
            done = _call_in_turn(client, up_to, version, until)
        except CallFailed as error:
            # On older bases one impossible target fails every call of a merged batch.
            if up_to != NEWEST or error.code != _REFUSED or calls == _MOST_CALLS:
                raise
        else:
            rows, deltas = rows + done.rows, deltas + done.deltas
            if done.found_another:
                return replace(done, rows=rows, deltas=deltas)
            if not done.was_merged(up_to):
                break
        time.sleep(random.uniform(0, _LONGEST_PAUSE_S))  # random, to land in another batch
    else:
        raise CallFailed(
            "ABORTED",
            f"{client.address} merged {_MOST_CALLS} calls with calls for a smaller position",
            cause=done.status,
            hint="call again when no other client updates the model",
        )
    if up_to != NEWEST and done.position < up_to:  # the base reported `merged` instead of an error
        message = f"{client.address} refused Predict for {client.model}"
        raise CallFailed(_REFUSED, message, cause=f"{_REFUSED}: {done.status}", hint=_HINT)
    return replace(done, rows=rows, deltas=deltas)


def _call_in_turn(client: ModelClient, up_to: int, version: int, until: float) -> Updated:
    """Ask for an update of a version to `up_to` until no other update runs; return the last answer.

    It gives up at `until`, in seconds of `time.monotonic`, and sleeps for up to 0.1 s between two calls.
    CallFailed if the server does not respond, or refuses.
    """
    while (done := _call(client, up_to, version)).found_another and time.monotonic() < until:
        time.sleep(random.uniform(0, _LONGEST_PAUSE_S))
    return done


def _call(client: ModelClient, up_to: int, version: int) -> Updated:
    inputs = {"up_to": np.array([up_to], np.int64)}
    try:
        return client.predict_as(_updated, inputs, signature=UPDATE_SIGNATURE, version=version)
    except CallFailed as error:
        if error.code != _REFUSED:
            raise
        raise CallFailed(error.code, error.message, cause=error.cause, hint=_HINT) from error


def _updated(answer: Prediction) -> Updated:
    position, step, rows, deltas = (
        _number(answer.outputs, name) for name in ("position", "step", "rows", "deltas")
    )
    return Updated(answer.version, position, step, rows, deltas, _text(answer.outputs, "status"))

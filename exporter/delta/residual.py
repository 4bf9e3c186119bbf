"""Rows that a delta left out, kept beside the log until a later delta holds them.

<log>/.state/left-out-<position>-<state>.index, .data-*         the trainer's values of them, as a delta
<log>/.state/left-out-<position>-<state>.since.index, .data-*   a bundle: when each began to wait, float64 [n]

The second exists if time or size is limited. Both are a cache of the exporter's, of the newest state only,
and carry its name: so after a rollback, or beside another command, no file is mistaken for another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct, field

from exporter.catalog import Catalog
from exporter.checkpoint.bundle_writer import BundleWriter
from exporter.checkpoint.tensor_bundle import check_tensor, memory_map, read_catalog
from exporter.delta.delta_files import read_delta, write_delta
from exporter.delta.format import DeltaHeader, Rows, Schema
from exporter.delta.layered_state import Changes
from exporter.errors import CheckpointError
from exporter.storage.layout import RESIDUAL_PREFIX
from exporter.wire.dtypes import Array

_SINCE = ".since"


class Waiting(Struct, frozen=True):
    """Rows that were left out before this delta, with the trainer's values.

    `since` is when each began to wait, in seconds since 1970; all other rows began to wait at `otherwise`.
    """

    changes: Changes = field(default_factory=dict)
    since: Mapping[str, Array] = field(default_factory=dict)
    otherwise: float = 0.0

    @property
    def oldest(self) -> float:
        """The time when the first of the rows began to wait, in seconds since 1970.

        Infinite if no row waits.
        """
        return min((float(each.min()) for each in self.since.values() if len(each)), default=math.inf)

    def since_of(self, name: str, ids: Array) -> Array:
        """Return when each of the rows `ids` of a table began to wait, in seconds since 1970: float64 [n].

        `ids` may have any order. KeyError if `changes` has rows of the table and `since` has no times of it.
        """
        change = self.changes.get(name)
        if not isinstance(change, Rows) or not len(change.ids):
            return np.full(len(ids), self.otherwise)
        places = np.minimum(np.searchsorted(change.ids, ids), len(change.ids) - 1)
        return np.where(change.ids[places] == ids, self.since[name][places], self.otherwise)


def save_residual(
    directory: Path,
    schema: Schema,
    header: DeltaHeader,
    state: str,
    held_back: Changes,
    since: Mapping[str, Array],
) -> None:
    """Write the trainer's values of rows that the delta `header` left out, as a delta.

    Remove the files of all other states. The directory is made if its parent exists. `state` distinguishes
    the delta from another one at its position. The times `since`, when rows of each table began to wait, are
    written beside it, as a bundle; no such bundle if `since` is empty. The files are a cache: if they are
    lost or damaged, states are compared.

    Raises:
        OSError: they cannot be written.
        ValueError: a change does not fit its variable in the schema.
    """
    directory.mkdir(exist_ok=True)
    name = f"{RESIDUAL_PREFIX}{header.to_position}-{state}"
    write_delta(directory / name, schema, header, held_back)
    if since:
        with BundleWriter(directory / f"{name}{_SINCE}") as writer:
            for table in sorted(since):
                writer.add(table, since[table])
    for path in directory.glob(f"{RESIDUAL_PREFIX}*"):
        if path.name.partition(".")[0] != name:  # the state's own files differ in what follows the dot
            path.unlink(missing_ok=True)


def load_residual(
    directory: Path,
    schema: Schema,
    *,
    lineage: str,
    position: int,
    state: str,
    now: float = 0.0,
    unknown: float = 0.0,
) -> Waiting | None:
    """Read the rows that `save_residual` wrote for a state of a log.

    `lineage` is the log's; `position` and `state` identify the state. None if they are lost, damaged, of
    another schema or another log's. The rows wait since `unknown` if no times were kept, or the times are
    lost. A time after `now`, from another clock, counts as `now`; with the default, all count as 0. Rows that
    are not in the result count as waiting since `now`. All times are in seconds since 1970.
    """
    prefix = directory / f"{RESIDUAL_PREFIX}{position}-{state}"
    try:
        found = read_delta(prefix, schema)
        _check_all(found.catalog)
    except CheckpointError:
        return None
    if (found.header.lineage, found.header.to_position) != (lineage, position):
        return None
    rows = {name: len(change.ids) for name, change in found.changes.items() if isinstance(change, Rows)}
    since = {name: np.full(count, unknown) for name, count in rows.items()}
    with suppress(CheckpointError):
        _check_all(times := read_catalog(directory / f"{prefix.name}{_SINCE}"))
        kept = {name: memory_map(times, ref) for name, ref in times.tensors.items()}
        if {name: each.shape for name, each in kept.items()} == {n: (count,) for n, count in rows.items()}:
            since = {name: np.minimum(each, now) for name, each in kept.items()}
    return Waiting(found.changes, since, now)


def _check_all(catalog: Catalog) -> None:
    for ref in catalog.tensors.values():
        check_tensor(catalog, ref)

"""Read a published log: its bases, its deltas, its hold, and the values at each position.

<model>/<position>/                       a base; its manifest names log, schema and mapping
<model>/deltas/<log>/<from>-<to>/         deltas; names that are no delta's, files and links are ignored
<model>/deltas/<log>/hold                 a position that `up_to = -1` does not pass
<model>/deltas/<log>/.state/              caches of the exporter, see `row_hashes`, `residual` and `snapshot`
                                          of `exporter.delta`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.format import Delta, Schema, log_name, span_name
from exporter.delta.spans import Position, Reach, check_fits, nearest_base, plan_chain
from exporter.errors import CheckpointError, CorruptFile, ManifestError, NotUpdatable, PositionUnknown
from exporter.increments.trained import TrainerVersion
from exporter.publish.hold import Hold
from exporter.publish.manifest import BaseEntry, DeltaEntry, Manifest, tensor_entries
from exporter.publish.versions import (
    VersionDir,
    check_place,
    delta_names,
    delta_positions,
    newest_of,
    nothing_published,
    read_head,
    read_manifest,
    require_signed_bytes,
    unread_positions,
    version_dirs,
)
from exporter.storage.layout import DELTA_NAME, DELTAS_DIRECTORY, MANIFEST_FILE, VARIABLES_PREFIX
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import Array

if TYPE_CHECKING:
    from exporter.catalog import Catalog
    from exporter.delta.delta_files import DeltaTensors
    from exporter.delta.layered_state import LayeredState
    from exporter.delta.row_reader import RowReader

BROKEN_LOG_HINT = (
    "publish a new base, which leaves this log behind: the same export with --new-base always --again"
)


class LogBase(Struct, frozen=True):
    """A base that takes deltas."""

    path: Path
    manifest: Manifest
    entry: BaseEntry

    @classmethod
    def read(cls, path: Path) -> LogBase:
        """Read the base in a version's directory.

        Raises:
            NotUpdatable: the version takes no deltas.
            ManifestError: its manifest cannot be read, or names another version; NotTrusted if no key
                that is trusted there has signed it.
            UsageError: keys are trusted there, and a file of keys cannot be read.
            CheckpointError: the manifest cannot be fetched from its store.
        """
        manifest = read_manifest(path)
        check_place(manifest, path)
        if not isinstance(manifest.incremental, BaseEntry):
            raise NotUpdatable(
                f"{path} was not exported to take deltas",
                hint="begin with deltas: the same export with --new-base always publishes a newer base that "
                "takes them; or go on with plain versions: leave out --incr",
            )
        return cls(path, manifest, manifest.incremental)

    @property
    def at(self) -> Position:
        """The position of a server right after loading this base, and its training step."""
        return Position(self.manifest.position, self.manifest.step)

    def stored(self) -> dict[str, RowReader]:
        """Return readers of the base's served variables, by their names.

        Shards are opened when a reader is used.

        Raises:
            VerificationError: a signed file (other than a shard) differs.
            OSError: a signed file cannot be read.
            CheckpointError: the bundle is damaged, cannot be read, or lists other tensors than the
                manifest.
        """
        from exporter.checkpoint.tensor_bundle import read_catalog
        from exporter.delta.row_reader import served_in

        require_signed_bytes(self.path, self.manifest, but_shards=True)
        catalog = read_catalog(self.path / VARIABLES_PREFIX)
        _check_listed(catalog, self.manifest)
        sources = self.entry.mapping_spec.sources()
        return {found.name: found for source in sources for found in served_in(catalog, source)}


# dict=True: `cached_property` keeps its values in `__dict__`, which structs do not have by themselves
class LogDelta(Struct, Reach, frozen=True, dict=True):
    """A delta, of which only the name is read until more is needed: there may be thousands."""

    log: Path
    start: int
    end: int

    @cached_property
    def path(self) -> Path:
        """The delta's directory, `START-END` in the log's directory; both numbers have 20 digits."""
        return self.log / span_name(self.start, self.end)

    @cached_property
    def manifest(self) -> Manifest:
        """The delta's manifest, read once.

        ManifestError if it cannot be read, is damaged, names another delta, or (NotTrusted) is not signed by
        a key that is trusted there. CheckpointError if it cannot be fetched from its store.
        """
        manifest = read_manifest(self.path)
        check_place(manifest, self.path)
        return manifest

    @property
    def entry(self) -> DeltaEntry:
        """The log entry in the delta's manifest.

        ManifestError if there is none, or the manifest cannot be read; CheckpointError if that cannot be
        fetched.
        """
        entry = self.manifest.incremental
        if not isinstance(entry, DeltaEntry):
            raise ManifestError(f"{self.path / MANIFEST_FILE} does not say which log the delta is of")
        return entry

    @property
    def at(self) -> Position:
        """The position where it ends, and the training step there.

        ManifestError if its manifest cannot be read, CheckpointError if that cannot be fetched.
        """
        return Position(self.end, self.manifest.step)

    @property
    def only_from(self) -> bool:
        """True if it applies at its first position only.

        ManifestError if its manifest cannot be read, CheckpointError if that cannot be fetched.
        """
        return self.entry.only_from

    @property
    def merged_count(self) -> int:
        """The number of publications merged in it; 1 if none are.

        ManifestError if its manifest cannot be read, CheckpointError if that cannot be fetched.
        """
        return self.entry.parts


class DeltaLog(Struct, frozen=True, dict=True):
    """A log at one moment, by one listing of the model's directory and one of its own.

    `base` is the newest of `versions`, which are as `version_dirs` lists them; `deltas` are sorted by their
    positions. A command reads its log once and passes it on. It reads it again under the model's lock, where
    others may have published meanwhile.
    """

    model: Path
    base: LogBase
    versions: tuple[VersionDir, ...]
    deltas: tuple[LogDelta, ...]

    @property
    def number(self) -> int:
        """The position of the log's first base, which names the log's directory."""
        return self.base.entry.log

    @property
    def path(self) -> Path:
        """The directory of the log's deltas, which need not exist."""
        return log_path(self.model, self.number)

    @property
    def lineage(self) -> str:
        """The log's random id; "" if its newest base's manifest has no id."""
        return self.base.manifest.lineage or ""

    @property
    def schema(self) -> Schema:
        """The schema of the variables that its deltas hold."""
        return self.base.entry.schema

    @cached_property
    def bases(self) -> tuple[LogBase, ...]:
        """The bases of the log that still exist and can be read, the newest first; read once.

        CheckpointError if a manifest cannot be fetched from its store.
        """
        found = []
        for child in self.versions:
            if not child.has_manifest:
                continue
            try:
                base = self.base if child.path == self.base.path else LogBase.read(child.path)
            except (ManifestError, NotUpdatable):
                continue
            if base.manifest.lineage == self.lineage:
                found.append(base)
        return tuple(found)

    @cached_property
    def newest(self) -> LogBase | LogDelta:
        """The delta with the greatest end, or the newest base if no delta ends beyond it.

        Of several deltas with that end it is the shortest.
        """
        last = max(self.deltas, key=lambda delta: (delta.end, delta.start), default=None)
        return last if last is not None and last.end > self.base.at.position else self.base

    def has(self, position: int) -> bool:
        """True if a base of the log is at a position, or a delta ends there."""
        return any(base.at.position == position for base in self.bases) or any(
            delta.end == position for delta in self.deltas
        )

    @property
    def at(self) -> Position:
        """The newest position and the training step there.

        ManifestError if the manifest there cannot be read, CheckpointError if that cannot be fetched.
        """
        return self.newest.at

    @property
    def trained(self) -> TrainerVersion:
        """The trainer's state at the newest position.

        ManifestError if the manifest there cannot be read, CheckpointError if that cannot be fetched.
        """
        return self.newest.entry.trained

    @cached_property
    def last(self) -> int:
        """The greatest position in use in the model, by this log or another.

        ManifestError if a directory of the model cannot be listed.
        """
        ends = [delta.end for delta in self.deltas]
        others = [*unread_positions(self.versions), *delta_positions(self.model, but=self.path)]
        return max([self.base.at.position, *ends, *others])

    def followed_by(self, delta: LogDelta) -> DeltaLog:
        """Return the log with one more delta, which was published since the log was read.

        The deltas stay sorted; this log is unchanged.
        """
        return replace(
            self, deltas=tuple(sorted((*self.deltas, delta), key=lambda one: (one.start, one.end)))
        )

    def chain(self, start: int, target: int | None = None) -> tuple[LogDelta, ...]:
        """The deltas, in order, that bring a server from position `start` to `target` (None: to the newest).

        Empty if it is there already. Raises DeltaGap if the deltas do not reach it, StaleDelta if `target` is
        before `start`, ManifestError if the manifest of a delta that could be next cannot be read.
        """
        return plan_chain(self.deltas, start, target)

    def open(self, delta: LogDelta, *, only: Collection[str] | None = None) -> Delta:
        """Read a delta and verify its checksums; return its changes as memory maps.

        With `only`, the changes are those of the variables named there, and only their checksums are
        verified; names that the delta does not change are ignored.

        Raises:
            ManifestError, VerificationError: the manifest cannot be read, or a signed file differs.
            CheckpointError: the delta's files are damaged, made for other variables, or not those of its
                name and manifest.
            PositionError: the delta is of another log (ForeignLineage).
            OSError: a signed file cannot be read.
            DiskFull, PublishError: bytes fetched from a store cannot be kept.
        """
        from exporter.delta.delta_files import with_values

        tensors = self.tensors(delta)
        with _hinted():
            found = with_values(tensors, self.schema)
            if only is not None:
                changes = {name: change for name, change in found.changes.items() if name in only}
                found = replace(found, changes=changes)
            _check_values(found, self.schema, only)
            return found

    def row_numbers(self, delta: LogDelta, tables: Collection[str]) -> dict[str, Array]:
        """Return the numbers of the rows in a delta (int64, ascending), by the name of their table.

        `tables` are names of tables; those that the log does not have are left out. A table that the delta
        does not change has an empty array. The numbers' checksums are verified; no row's values are read.

        Raises:
            ManifestError, VerificationError: the manifest cannot be read, or a signed file differs.
            CheckpointError: the files or the numbers are damaged, or not those of the delta's name and
                manifest.
            PositionError: the delta is of another log (ForeignLineage).
            OSError: a signed file cannot be read.
            DiskFull, PublishError: bytes fetched from a store cannot be kept.
        """
        from exporter.delta.delta_files import row_numbers

        tensors = self.tensors(delta)
        with _hinted():
            chosen = (variable for variable in self.schema.variables if variable.name in tables)
            return {variable.name: row_numbers(tensors, variable) for variable in chosen}

    def tensors(self, delta: LogDelta) -> DeltaTensors:
        """Return the tensors of a delta; their values are not read.

        Raises:
            ManifestError, VerificationError: the manifest cannot be read, or a signed file differs.
            CheckpointError: the files are damaged; UnsupportedFormat if they were made for other
                variables, CorruptFile if positions or tensors differ from name and manifest.
            PositionError: the delta is of another log (ForeignLineage).
            OSError: a signed file cannot be read.
            DiskFull, PublishError: bytes fetched from a store cannot be kept.
        """
        from exporter.delta.delta_files import read_tensors

        with _hinted():
            require_signed_bytes(delta.path, delta.manifest)  # before anything is made of them
            found = read_tensors(delta.path / DELTA_NAME, self.schema)
            header = found.header
            if (header.from_position, header.to_position) != (delta.start, delta.end):
                raise CorruptFile(f"{delta.path} leads from {header.from_position} to {header.to_position}")
            digest = self.schema.digest
            check_fits(header, lineage=self.lineage, schema_digest=digest, position=delta.start)
            _check_listed(found.catalog, delta.manifest)
            return found

    def state(self, position: int | None = None, *, only: Collection[str] | None = None) -> LayeredState:
        """The values at a position (None: the newest).

        With `only`, no delta's changes of other variables are read: these have the values of the nearest base
        before the position. All deltas from that base on are opened, and their checksums verified.

        Raises:
            PositionUnknown: no base, with deltas, reaches the position.
            PositionError: a delta is of another log.
            ManifestError, VerificationError: a manifest cannot be read, or a signed file differs.
            CheckpointError: the base or a delta is damaged, or was made for other variables.
            OSError: a signed file cannot be read.
            DiskFull, PublishError: bytes fetched from a store cannot be kept.
        """
        from exporter.delta.layered_state import LayeredState

        target = self.at.position if position is None else position
        by_position = {base.at.position: base for base in self.bases}
        base = by_position[nearest_base(self.deltas, by_position, target)]
        chain = self.chain(base.at.position, target)
        # before the values are read: what differs from the signature must not reach a new publication
        require_signed_bytes(base.path, base.manifest)
        layers = tuple(self.open(delta, only=only).changes for delta in chain)
        return LayeredState(base.stored(), layers, hint=BROKEN_LOG_HINT)

    def trained_at(self, position: int) -> tuple[TrainerVersion, int | None]:
        """Return the trainer's state at a position, and the training step there (None if it is not recorded).

        Raises PositionUnknown if nothing is published there, ManifestError if the manifest there cannot be
        read, CheckpointError if that cannot be fetched.
        """
        found = self.standing(position)
        return found.entry.trained, found.at.step

    @property
    def hold(self) -> Hold:
        """The log's hold."""
        return Hold(self.path)

    @property
    def approved(self) -> int | None:
        """The position up to which a canary has approved the log; None if no canary's hold is in force."""
        return self.hold.approved()

    def standing(self, position: int) -> LogBase | LogDelta:
        """Return the base at a position, or else the shortest delta that ends there.

        Raises:
            PositionUnknown: there is neither.
        """
        for base in self.bases:
            if base.at.position == position:
                return base
        ending = [delta for delta in self.deltas if delta.end == position]
        if ending:
            return max(ending, key=lambda delta: delta.start)
        known = sorted({base.at.position for base in self.bases} | {delta.end for delta in self.deltas})
        raise PositionUnknown(
            f"nothing is published at position {position}",
            cause=f"published positions: {', '.join(map(str, known[-20:]))}",
            hint=f"list the positions: export-model history {quoted(self.model)}",
        )


@contextmanager
def _hinted() -> Iterator[None]:
    """Give each CheckpointError of the block the hint to publish a new base, unless it has a hint of its own.

    The readers of deltas would hint at the trainer's checkpoints.
    """
    try:
        yield
    except CheckpointError as error:
        error.advise(BROKEN_LOG_HINT)
        raise


def _check_values(delta: Delta, schema: Schema, only: Collection[str] | None) -> None:
    """Read a delta's tensors and verify their checksums; with `only`, of the variables named there.

    Raises CorruptFile if a checksum differs, another CheckpointError if a tensor cannot be read.
    """
    from exporter.checkpoint.tensor_bundle import check_tensor

    names = set(delta.catalog.tensors)
    if only is not None:
        wanted = [variable for variable in schema.variables if variable.name in only]
        names = {key for variable in wanted for key in variable.keys}
        names |= {each.key for variable in wanted for each in variable.packed(delta.header.packing)}
    for name in names:
        check_tensor(delta.catalog, delta.catalog.tensors[name])


def _check_listed(catalog: Catalog, manifest: Manifest) -> None:
    """Raise CorruptFile unless a bundle's index (`catalog`) and the manifest beside it list the same tensors.

    No value is read.
    """
    # both ways: a tensor that the manifest leaves out would be lost without a word
    listed, found = (
        {entry.name: entry for entry in entries} for entries in (manifest.tensors, tensor_entries(catalog))
    )
    differing = sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name))
    if differing:
        name = differing[0]
        what = "lacks" if name not in found else "holds" if name not in listed else "holds another"
        raise CorruptFile(f"{catalog.prefix} {what} {name!r}: its manifest says otherwise")


def read_log(model: Path) -> DeltaLog:
    """Read the log of the newest version under a model base path: its bases, and its deltas by their names.

    Raises:
        NotUpdatable: nothing is published, or the newest version takes no deltas.
        ManifestError: its manifest cannot be read, or a directory cannot be listed.
        UsageError: keys are trusted there, and a file of keys cannot be read.
        CheckpointError: the manifest cannot be fetched from its store.
    """
    return log_of(model, version_dirs(model))


def log_of(model: Path, versions: Sequence[VersionDir]) -> DeltaLog:
    """Read the log of the newest of a model's versions, as listed by `version_dirs`.

    Raises:
        NotUpdatable: there is no version with a manifest, or the newest one takes no deltas.
        ManifestError: its manifest cannot be read, or the log's directory cannot be listed.
        UsageError: keys are trusted there, and a file of keys cannot be read.
        CheckpointError: the manifest cannot be fetched from its store.
    """
    newest = newest_of(versions)
    if newest is None:
        raise nothing_published(model)
    base = LogBase.read(newest.path)
    return DeltaLog(model, base, tuple(versions), list_deltas(log_path(model, base.entry.log)))


def logs_of(model: Path, versions: Sequence[VersionDir]) -> tuple[DeltaLog, ...]:
    """Return the logs that have a base among a model's versions, the newest version's log first.

    `versions` are as `version_dirs` lists them; those that take no deltas, or have a damaged or untrusted
    manifest, are skipped, as are logs whose directory cannot be listed. The `base` of each log is the newest
    of those left.

    Raises:
        CheckpointError: a manifest cannot be fetched from its store.
        UsageError: keys are trusted there, and a file of keys cannot be read.
    """
    found: dict[int, DeltaLog] = {}
    for child in versions:
        with suppress(ManifestError, NotUpdatable):
            # the head first, which is cheap: of each log only its newest base is read whole
            number = read_head(child.path).log if child.has_manifest else None
            if number is not None and number not in found:
                base, deltas = LogBase.read(child.path), list_deltas(log_path(model, number))
                found[number] = DeltaLog(model, base, tuple(versions), deltas)
    return tuple(found.values())


def log_path(model: Path, log: int) -> Path:
    """The directory of the deltas of a log, which is given by the position of its first base."""
    return model / DELTAS_DIRECTORY / log_name(log)


def list_deltas(log: Path) -> tuple[LogDelta, ...]:
    """The deltas in a log's directory, by their names, sorted by start and end; other names are skipped.

    Empty if there is no such directory; ManifestError if it cannot be listed.
    """
    return tuple(LogDelta(log, start, end) for _, start, end in delta_names(log))

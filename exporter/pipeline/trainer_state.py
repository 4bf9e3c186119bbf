"""Read a trainer's newest state in served terms: its last full checkpoint, and the increments since."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint import candidates, open_checkpoint
from exporter.checkpoint.embedding_variables import embedding_variables, find_variable
from exporter.checkpoint.identity import Identity
from exporter.checkpoint.tensor_bundle import index_path, write_bundle
from exporter.delta.format import Rows, Schema
from exporter.delta.layered_state import Changes, LayeredState
from exporter.delta.row_reader import row_readers, translate
from exporter.errors import SchemaChanged
from exporter.increments.deeprec import abandoned_increment, plan_deeprec_changes, read_increment
from exporter.increments.history import History, read_history
from exporter.increments.increment import CheckpointId
from exporter.increments.plan import AnyIncrement, ChangePlan, plan_changes
from exporter.increments.trained import TrainerVersion
from exporter.mapping.build import VariableMapping
from exporter.mapping.mapping_spec import MappingSpec
from exporter.mapping.tensor_source import TensorSource
from exporter.publish.delta_log import DeltaLog
from exporter.storage.files import SETTLED_NS, FileDigests
from exporter.tables.integer_sets import among, distinct
from exporter.terminal.progress import ProgressFactory
from exporter.wire.dtypes import Array


class TrainerState(Struct, frozen=True):
    """The trainer's files, the places of served variables in them, and the changes since the published state.

    `awaits_marker`: the trainer may soon mark its newest full checkpoint's place among increments.
    `abandoned` is an increment that does not follow the full checkpoint, although its step is higher; "" if
    there is none. `archive` is the identity of the files of a checkpoint that is not a tensor bundle; None
    for a bundle, which has checksums.
    """

    catalog: Catalog
    mapping: VariableMapping
    schema: Schema
    plan: ChangePlan
    awaits_marker: bool = False
    abandoned: str = ""
    archive: Identity | None = None

    @property
    def step(self) -> int | None:
        """The training step of its newest state; None if the checkpoint does not record steps."""
        return None if self.catalog.step is None else self.plan.step

    def in_bundle(self, spec: MappingSpec, prefix: Path, progress: ProgressFactory) -> TrainerState:
        """Return the state with rows that can be read one by one: an archive is copied into a bundle first.

        `prefix` is the path prefix of that bundle's files; nothing is written unless the checkpoint is an
        archive. `spec` is the base's mapping: only tensors that it needs are copied. Raises CheckpointChanged
        if the archive was replaced since the plan was made, other CheckpointErrors if it is damaged or cannot
        be read, PublishError if it cannot be copied.
        """
        if self.archive is None:
            return self
        needed, stored = {s.tensor.name: s.tensor for s in self.mapping.sources}, self.catalog.tensors
        known = embedding_variables(self.catalog) if spec.dynamic else {}
        for table in spec.dynamic:  # these are compared by keys, and not in the mapping
            variable = find_variable(known, spec.trained_name(table))
            for part in variable.parts if variable else ():
                needed |= {name: stored[name] for name in part.tensor_names if name in stored}
        with progress("read", sum(ref.bytes_ for ref in needed.values())) as bar:
            written = write_bundle(self.catalog, needed.values(), prefix, bar)
        # Reads notice a replaced file, but not writes into the file after its last block was read.
        self.archive.require_same_files()
        return replace(self, catalog=written, mapping=self.mapping.over(written), archive=None)

    def listed_rows(self, spec: MappingSpec) -> int | None:
        """Return how many changed rows of tables in the base's mapping `spec` the plan's increments list.

        No file is read. A row that several increments list counts several times. None if rows are compared
        instead.
        """
        if not self.plan.is_known:
            return None
        served = {source.tensor.name for source in self.mapping.sources}
        served |= {spec.trained_name(table) for table in spec.dynamic}
        counts = [each.row_counts() for each in self.plan.increments]
        return sum(found[name] for found in counts for name in served)

    def layers(self) -> tuple[Changes, ...]:
        """Return the plan's increments as changes of served variables, oldest first, every checksum verified.

        A row of a table in 8 bits is only in the newest increment that has it: NaN has no codes, and an old
        NaN must not fail the export once the row is finite again.

        Raises CheckpointError if an increment is damaged or gone, SchemaChanged if it does not fit the
        checkpoint, MappingError or NotFinite if a value does not fit the served dtype.
        """
        by_tensor = {source.tensor.name: source for source in self.mapping.sources}
        newer: dict[str, Array] = {}
        newest_first = [self._translated(each, by_tensor, newer) for each in reversed(self.plan.increments)]
        return tuple(reversed(newest_first))

    def state(self) -> LayeredState:
        """Return the values of all served variables, to be read on demand.

        They are the full checkpoint's; if the plan compares states, with its increments on top. Increments
        are read now: CheckpointError if one is damaged or gone, SchemaChanged if it does not fit the
        checkpoint, MappingError or NotFinite if a value does not fit the served dtype.
        """
        stored = (found for source in self.mapping.sources for found in row_readers(self.catalog, source))
        layers = () if self.plan.is_known else self.layers()
        return LayeredState({variable.name: variable for variable in stored}, layers)

    def changed_lookups(self, log: DeltaLog) -> Changes:
        """Return the lookup tables that changed, by variable, if increments report everything else; else {}.

        Increments do not include lookup tables: at each position they are as in the previous full checkpoint.
        They are compared, and nothing else is read, only if the published state is from another full
        checkpoint. Raises CheckpointError, VerificationError or PositionUnknown if the checkpoint's tables,
        or the log's, cannot be read.
        """
        is_same = self.plan.target.checkpoint == log.trained.checkpoint
        if not self.schema.lookups or not self.plan.is_known or is_same:
            return {}
        from exporter.delta.diff import diff_lookups

        names = {half.name for pair in self.schema.lookups for half in pair}
        return diff_lookups(log.state(only=names), self.state(), self.schema)

    def _translated(
        self, stored: AnyIncrement, by_tensor: dict[str, TensorSource], newer: dict[str, Array]
    ) -> Changes:
        """Return an increment as changes of served variables, without the rows in 8 bits that are in `newer`.

        `by_tensor` has the sources by the trainer's names; other variables are left out. `newer` has row
        numbers by variable, and gets this increment's: increments are translated from the newest to the
        oldest. Raises SchemaChanged if a variable has another dtype or shape than in the checkpoint,
        CheckpointError if the increment is damaged or gone, MappingError or NotFinite if a value does not fit
        the served dtype.
        """
        kinds = {variable.name: variable for variable in self.schema.variables}
        layer: Changes = {}
        for changed, change in stored.changes():
            source = by_tensor.get(changed.variable.name)
            if source is None:
                continue
            variable, tensor = changed.variable, source.tensor
            if (variable.dtype, variable.shape) != (tensor.dtype, tensor.shape):
                raise SchemaChanged(
                    f"{stored.path} holds {variable.name!r} as {variable.dtype.label}{list(variable.shape)}, "
                    f"the checkpoint as {tensor.dtype.label}{list(tensor.shape)}"
                )
            if source.is_in_8_bits and isinstance(change, Rows):
                later = newer.get(variable.name)
                newer[variable.name] = change.ids
                if later is not None:
                    newer[variable.name] = distinct(np.concatenate([later, change.ids]))
                    kept = ~among(change.ids, later)
                    change = Rows(change.ids[kept], np.asarray(change.values)[kept])
            layer = {**layer, **translate(source, change, kinds)}
        return layer


def read_trainer(
    ckpt_dir: Path,
    mapping_spec: MappingSpec,
    schema: Schema,
    published: TrainerVersion,
    within: float = 0.0,
    digests: FileDigests | None = None,
    *,
    is_watching: bool = False,
    marker_seconds: float = 0.0,
    is_alone: bool = False,
    ignored: tuple[re.Pattern[str], ...] = (),
) -> TrainerState:
    """Read a checkpoint directory or prefix, and plan the changes from the `published` state to it.

    `mapping_spec` and `schema` are the published base's. `within` is the permitted distance of served rows
    from the trainer's: if no row is further, the newest state counts as published. After a new full
    checkpoint a watch gets a plan without changes while the next increment is due, and for at most
    `marker_seconds` while a marker, a file of the trainer's hook, may still say which increment that is.
    `digests` has digests of archives' files that were read before (None: no file was read); new ones are
    added. With `is_alone` the full checkpoint itself is published, without the increments on top of it.
    Variables that match `ignored` may stay behind. This process remembers when it first saw a full
    checkpoint, and archives whose files are unchanged.

    Raises:
        CheckpointError: the checkpoint, an increment or its manifest is missing, damaged or changing.
        SchemaChanged: the checkpoint does not fit the mapping of the published base.
        UsageError: the checkpoint has no object at the path that the base records.
        OSError: the index of an increment of DeepRec cannot be read.
    """
    found = _open(ckpt_dir, FileDigests() if digests is None else digests)
    catalog = found.catalog
    full = CheckpointId(catalog.prefix.name, catalog.step or 0, found.digest)
    history = read_history(catalog.prefix.parent)
    # A directory is DeepRec's if our hook has not written increments for this checkpoint.
    is_ours = history.leads_on_from(full) or bool(history.markers_of(full))
    deeprec = None if is_ours or is_alone else read_increment(catalog)
    awaits_marker = False
    if is_alone:
        plan = plan_changes(published, full, history, within, is_alone=True)
    elif deeprec is not None:
        plan = plan_deeprec_changes(published, full, deeprec, within)
    else:
        known = _known(catalog.prefix, full)
        awaits = is_watching and _is_increment_due(known, history)
        plan = plan_changes(published, full, history, within, awaits_increment=awaits)
        is_marker_due = not plan.is_known and known.seconds < marker_seconds
        awaits_marker = is_marker_due and _may_be_marked(catalog.prefix, full, published, history)
        if is_watching and awaits_marker:
            plan = ChangePlan(published, full.step)
    abandoned = "" if is_ours or is_alone else abandoned_increment(catalog)
    mapping = mapping_spec.mapping(catalog, ignored)
    return TrainerState(catalog, mapping, schema, plan, awaits_marker, abandoned, found.archive)


class _Opened(Struct, frozen=True):
    """A checkpoint, the digest of its contents and, unless it is a bundle, its files' identity."""

    catalog: Catalog
    digest: str
    archive: Identity | None = None

    def is_newest(self, ckpt_dir: Path) -> bool:
        """True if the checkpoint is an archive with unchanged files, and still the newest of `ckpt_dir`.

        Raises CheckpointNotFound if the directory has none. False for a bundle.
        """
        is_same = self.archive is not None and self.archive.is_untouched
        return is_same and candidates(ckpt_dir)[0] == self.catalog.prefix


_ARCHIVES: dict[Path, _Opened] = {}


def _open(ckpt_dir: Path, digests: FileDigests) -> _Opened:
    """Read a directory's newest checkpoint, or the checkpoint that a path names; no unchanged archive again.

    `digests` of an archive's files are used and updated; an archive is remembered for this process. Raises
    CheckpointError and subclasses if there is no checkpoint, or it cannot be read.
    """
    # A watch looks each second, and an archive must be read completely to know its contents.
    if (known := _ARCHIVES.get(ckpt_dir)) is not None and known.is_newest(ckpt_dir):
        return known
    catalog = open_checkpoint(ckpt_dir)
    if catalog.index_digest is not None:
        # The digest of the index that was read: the trainer may have replaced it since.
        return _Opened(catalog, catalog.index_digest)
    archive = Identity.of(catalog)
    opened = _Opened(catalog, archive.content_digest(digests), archive)
    digests.keep(archive.content_files())
    # A file written just now may be written again within one tick of the clock, and keep its times.
    if time.time_ns() - max(modified for _, _, modified, _ in archive.files) > SETTLED_NS:
        _ARCHIVES[ckpt_dir] = opened
    return opened


class _Known(Struct, frozen=True):
    """A directory's newest full checkpoint, and since when this process knows it, by its own steady clock.

    The trainer's clock, and a file server's, may be wrong by any time. `age_before` is the checkpoint's age
    by those clocks at that time, in seconds, if it is the first that this process saw there, else 0.
    """

    full: CheckpointId
    since: float
    age_before: float

    @property
    def seconds(self) -> float:
        """The seconds for which this process has known the checkpoint."""
        return time.monotonic() - self.since


_KNOWN: dict[Path, _Known] = {}
MARKER_SECONDS = 20.0
"""After its checkpoint is named, a saver writes the graph, and only then the hook the marker; both take well
below a second where neither the graph nor the training step is large."""


def _known(prefix: Path, full: CheckpointId) -> _Known:
    """Return the record of `full`, the newest checkpoint of its directory, and remember it for this process.

    A record is made now if this process knew another checkpoint there, or none.
    """
    known = _KNOWN.get(prefix.parent)
    if known is None or known.full != full:
        age = 0.0
        if known is None:
            with suppress(FileNotFoundError):  # an archive has no index: its age counts from now
                age = max(0.0, time.time() - index_path(prefix).stat().st_mtime)
        known = _KNOWN[prefix.parent] = _Known(full, time.monotonic(), age)
    return known


def _may_be_marked(prefix: Path, full: CheckpointId, published: TrainerVersion, history: History) -> bool:
    """True if a trainer's hook may be about to write the marker of the newest full checkpoint.

    The marker is a file that says which increments the checkpoint follows. False if the checkpoint `full`, at
    `prefix`, has its marker, or is not the directory's newest any more. `published` is the state published
    last: if a hook marked it, that hook probably still runs. Raises CheckpointNotFound if the directory has
    no checkpoint any more.
    """
    return history.awaits_marker(full, published.state) and candidates(prefix.parent)[0] == prefix


def _is_increment_due(known: _Known, history: History) -> bool:
    """True while the trainer may still be about to write the next increment after a full checkpoint.

    It may until the age of the checkpoint `known` exceeds twice the median pause between the last five
    increments in `history`, plus 20 seconds. False if their files vanish meanwhile.
    """
    try:
        times = sorted(stored.path.stat().st_mtime for stored in history.written_last(_LATELY))
    except FileNotFoundError:
        return False
    pauses = sorted(later - earlier for earlier, later in pairwise(times))
    usual = pauses[len(pauses) // 2] if pauses else 0.0  # the median: a night without training does not count
    return known.age_before + known.seconds < 2 * usual + _GRACE_SECONDS


_LATELY = 5  # the number of last increments from which the pause is learned
_GRACE_SECONDS = 20.0
"""Seconds for the trainer to write the increment."""

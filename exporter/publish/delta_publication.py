"""Publish changes as a delta: write it in staging, describe it in a manifest, rename it into the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.delta_files import write_delta
from exporter.delta.format import Change, DeltaHeader, count_rows
from exporter.delta.spans import Span
from exporter.increments.trained import TrainerVersion
from exporter.options import DeltaDtype
from exporter.publish.commit import TAKING_THE_LOCK, PublishedDelta, Staging, UnderLock, publish_delta
from exporter.publish.delta_log import DeltaLog
from exporter.publish.finite import require_finite
from exporter.publish.manifest import DeltaEntry, DeltaOrigin, ManifestDraft, Origin, tensor_entries
from exporter.storage.files import writing
from exporter.storage.layout import DELTA_NAME
from exporter.version import __version__


class Publication(Struct, frozen=True):
    """A delta that is to be published: its span, and its `entry` without the fields that its files determine.

    With `packing` rows are stored in fewer bytes; `hint` is the advice if the model refuses the values.
    """

    span: Span
    step: int | None
    entry: DeltaEntry
    packing: DeltaDtype | None = None
    hint: str = ""

    @classmethod
    def of(
        cls,
        log: DeltaLog,
        span: Span,
        step: int | None,
        made: DeltaOrigin,
        trained: TrainerVersion,
        packing: DeltaDtype | None = None,
        hint: str = "",
        **more: Any,
    ) -> Publication:
        """A publication in a log.

        `step` (None: unknown) and `trained` describe the values at the end of the span. `made` is the
        operation that makes the delta, `packing` and `hint` are as in the class, and `more` are further
        fields of its `DeltaEntry`, by name.
        """
        schema = log.schema.digest
        entry = DeltaEntry(log=log.number, schema=schema, made=made, rows=0, trained=trained, **more)
        return cls(span, step, entry, packing, hint)


def header_of(log: DeltaLog, what: Publication) -> DeltaHeader:
    """The header in the files of a delta that is to be published in `log`; an unknown step is 0 there."""
    span = what.span
    return DeltaHeader(
        log.lineage,
        log.schema.digest,
        span.start,
        span.end,
        what.step or 0,
        only_from=span.only_from,
        packing=what.packing,
    )


def publish_changes(
    log: DeltaLog,
    staging: Staging,
    changes: Mapping[str, Change],
    what: Publication,
    *,
    last: int | None,
    under_lock: UnderLock = TAKING_THE_LOCK,
    check: Callable[[Catalog], object] | None = None,
) -> PublishedDelta:
    """Write changes as a delta of `log` in `staging`, and publish it.

    `changes` are by variable name; `what` has the delta's span and its entry in the manifest. `check` gets
    the written delta's catalog before it is published, and its errors are raised as they are; None: no check.
    `last` was the model's greatest position when the changes were found; None where that does not matter.
    `under_lock`: see `UnderLock`. After an error nothing was published.

    Raises:
        NotFinite: the log's model would refuse it.
        ValueError: a change does not fit its variable, or the log has no such variable.
        PositionMoved: this delta is published already, or another process published meanwhile.
        UsageError: the log is signed, and this delta would not be.
        NotUpdatable, ManifestError: the newest version takes no deltas any more, or cannot be read.
        NotTrusted: it would be signed, and the versions there are of several models, or of another one.
        CheckpointError: the written delta cannot be read again, or a manifest cannot be fetched.
        TargetBusy: another exporter held the lock for `LOCK_SECONDS`.
        TargetNotWritable, DiskFull, PublishError: the operating system refused.
    """
    require_finite(log, changes, what.span, what.hint)
    with writing(staging.path):
        write_delta(staging.path / DELTA_NAME, log.schema, header_of(log, what), changes)
    if check is not None:
        check(read_catalog(staging.path / DELTA_NAME))
    return publish_written(log, staging, count_rows(changes), what, last=last, under_lock=under_lock)


def publish_written(
    log: DeltaLog,
    staging: Staging,
    rows: int,
    what: Publication,
    *,
    last: int | None,
    under_lock: UnderLock,
) -> PublishedDelta:
    """Publish the delta in `staging`, with `rows` rows of all tables and `header_of` as its header.

    `what` has the delta's span and its entry in the manifest. `last` was the model's greatest position when
    the delta was made; None where that does not matter. `under_lock`: see `UnderLock`. If the log's model
    wants finite values, the caller has checked them (`exporter.publish.finite`). After an error nothing was
    published.

    Raises:
        PositionMoved: this delta is published already, or another process published meanwhile.
        UsageError: the log is signed, and this delta would not be.
        NotUpdatable, ManifestError: the newest version takes no deltas any more, or cannot be read.
        NotTrusted: it would be signed, and the versions there are of several models, or of another one.
        CheckpointError: the staged delta's index cannot be read, or a manifest cannot be fetched.
        VerificationError: the staged tree holds something that is neither a file nor a directory.
        TargetBusy: another exporter held the lock for `LOCK_SECONDS`.
        TargetNotWritable, DiskFull, PublishError: the operating system refused.
    """
    span, entry = what.span, what.entry
    draft = ManifestDraft(
        tensors=tensor_entries(read_catalog(staging.path / DELTA_NAME)),
        source=Origin(log.base.manifest.source.directory, entry.trained.checkpoint.name),
        exporter=__version__,
        step=what.step,
        lineage=log.lineage,
        from_position=span.start,
        incremental=replace(
            entry,
            rows=rows,
            parts=span.merged_count,
            only_from=span.only_from,
            # a delta that is marked is not read again to check it: see `finite`
            finite=log.base.entry.updates.finite,
        ),
    )
    return publish_delta(staging, draft, log, position=span.end, last=last, under_lock=under_lock)

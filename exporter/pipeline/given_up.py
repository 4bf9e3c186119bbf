"""Go on where a publication to a store was begun and given up.

Nothing else may ever be published at the path of an upload that was given up: its process may only be slow,
and still write there (see `exporter.transfer.head`). Exports take another number. A merger has its place: so
the log goes on by a delta of no changes, and the merger is made where that leads.
"""

from __future__ import annotations

from pathlib import Path

from exporter.delta.spans import Span
from exporter.publish.commit import Staging, next_delta_position
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.delta_publication import Publication, publish_changes
from exporter.publish.manifest import DeltaOrigin
from exporter.publish.versions import is_taken


def position_of_merger(log: DeltaLog, path: Path) -> int:
    """Where a merger of the whole log stands that would lie at a path."""
    last = log.at.position
    return next_delta_position(log.model, None, last) if is_taken(log.model, path) else last


def past_given_up(log: DeltaLog, path: Path) -> DeltaLog:
    """The log, with a delta of no changes behind it if nothing may be published at a path.

    Raises:
        PositionMoved: another delta was published meanwhile.
        PublishError: see errors.py.
    """
    last = log.at
    end = position_of_merger(log, path)
    if end == last.position:
        return log
    what = Publication(
        Span(last.position, end),
        last.step,
        DeltaOrigin.COMPARISON,
        log.trained,
        state=log.newest.manifest.state_id,
    )
    with Staging(log.model) as staging:
        publish_changes(log, staging, {}, what, last=last.position)
    return read_log(log.model)

"""Order increments and full checkpoints: runs, sessions, parents, checkpoint markers, forks.

    <ckpt-dir>/increments/<from>-<to>/manifest.json    an increment: its run, session, parent and generation
    <ckpt-dir>/increments/<checkpoint>.json            a marker: the place of a full checkpoint in the chain

An increment's parent is the increment before it, or the full checkpoint that its run begins at. Full
checkpoints are identified by content, never by name, step or time: a trainer that was set back writes
`model.ckpt-500` again, with other values. A marker says after which increment a full checkpoint was written,
and whether it equals that increment's state. A full checkpoint without a marker (the trainer died before it
could write one, or did not use the hook) has no place in the chain: no increment is known to follow it.

A *session* is one time that the trainer restored its variables and recorded its writes since. Only its own
increments hold the changes between an increment and a full checkpoint after it:

    session 1 writes  A, full F (after A, not equal), B     F and then B is the state of B
    session 2 restores A, writes  B'                        F and then B' is not a state: the rows that
                                                            changed between A and F would keep F's values

So a marker counts for the increments of its own session, unless the checkpoint equals the increment. Files of
releases that recorded no session leave that open: see `History.after`.

A session that does not continue at the end of the chain is a fork: its generation is higher than every one
before.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Struct, UnsetType

from exporter.checkpoint.identity import index_digest
from exporter.errors import CheckpointError, CorruptFile
from exporter.increments.increment import (
    FORMAT_VERSION,
    CheckpointId,
    Increment,
    StoredIncrement,
    from_json,
    read_document,
)
from exporter.storage.files import Unchanged, below, regular_file
from exporter.storage.layout import INCREMENTS_DIRECTORY, MANIFEST_FILE
from exporter.wire.json_documents import Count, Id, Moment, doc, encode_indented

_MAX_MANIFEST_BYTES = 256 << 20

StateId: TypeAlias = str | CheckpointId
"""A state of the trainer that is on disk: an increment by its id, or a full checkpoint."""

T = TypeVar("T")

_NAME = re.compile(r"[0-9]{20}-[0-9]{20}(-[0-9a-f]{8})?")


class CheckpointMarker(Struct, frozen=True, kw_only=True):
    """`<ckpt-dir>/increments/<checkpoint>.json`."""

    format_version: Annotated[Count, doc("the version of this document: 1")] = FORMAT_VERSION
    kind: Annotated[Literal["milestone"], doc("the kind of the document")] = "milestone"
    checkpoint: Annotated[CheckpointId, doc("the full checkpoint that it marks")]
    run: Annotated[Id, doc("the training that wrote it")]
    session: Annotated[Id | None, doc("the trainer's session that wrote it; null: not known")] = None
    after: Annotated[Id | None, doc("the increment before it; null: it came before the run's first")]
    is_equal: Annotated[bool, doc("true: nothing had changed since that increment")] = False
    event_time: Annotated[
        Moment | UnsetType, doc("the time of the newest event that it was trained on; absent: not known")
    ] = UNSET

    @property
    def file_name(self) -> str:
        """The name of the marker's file in the increments directory."""
        return f"{self.checkpoint.name}.json"

    def leads_to(self, increment: Increment) -> bool:
        """True if the increment is certainly the next one that the checkpoint's own session wrote after it.

        False if the marker does not name its session.
        """
        return self.session is not None and self.session == increment.session and self._is_before(increment)

    def may_lead_to(self, increment: Increment) -> bool:
        """True if neither file names its session, but the increment may be the next one after the checkpoint.

        The increment must be of the same run, and have the expected parent and a higher step.
        """
        # An increment never carries the step of a full checkpoint that its session wrote before it.
        is_unknown = self.session is None and increment.session is None and self.run == increment.run
        return is_unknown and self._is_before(increment) and increment.to_step > self.checkpoint.step

    def _is_before(self, increment: Increment) -> bool:
        if self.after is None:
            return isinstance(increment.parent, CheckpointId)
        return increment.parent == self.after

    def to_json(self) -> str:
        """Return the marker as indented JSON, the content of its file."""
        return encode_indented(self).decode()

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> CheckpointMarker:
        """Decode `text`, the content of the marker file at `path`; the file itself is not read.

        Raises CorruptFile if it is damaged or names a path outside its directory, UnsupportedFormat for
        another version.
        """
        found = read_document(text, path, cls)
        # Its name will be part of a path, which must not leave the directory.
        below(path.parent, found.checkpoint.name, f"{path}: the checkpoint", CorruptFile)
        return found


# `dict`: `cached_property` needs a `__dict__`.
class History(Struct, frozen=True, dict=True):
    """The increments and checkpoint markers of an increments directory."""

    increments: tuple[StoredIncrement, ...] = ()
    markers: tuple[CheckpointMarker, ...] = ()

    @property
    def generation(self) -> int:
        """The highest generation of an increment, 0 without increments.

        Each session of the trainer begins a new generation.
        """
        return max((stored.increment.generation for stored in self.increments), default=0)

    def written_last(self, count: int) -> list[StoredIncrement]:
        """Return the `count` increments written last, newest first: by generation, then step."""
        return nlargest(count, self.increments, _age)

    def find(self, increment: str) -> StoredIncrement | None:
        """Return the increment with this id; None if there is none."""
        return self._by_id.get(increment)

    def markers_of(self, checkpoint: CheckpointId) -> tuple[CheckpointMarker, ...]:
        """Return the markers of full checkpoints with the step and content of `checkpoint`, of any name."""
        return tuple(found for found in self.markers if found.checkpoint == checkpoint)

    def awaits_marker(self, checkpoint: CheckpointId, published: StateId) -> bool:
        """True if `checkpoint` has no marker yet, but the trainer's hook will probably write one in a moment.

        The hook is assumed to run if `published`, the state published last, is an increment or has a marker
        itself. False if there are neither increments nor markers.
        """
        # A hook marks each full checkpoint a moment after the saver has named it. If the checkpoint that was
        # published last has no marker, the training runs without a hook, or died before the hook marked it.
        if self.markers_of(checkpoint) or not (self.increments or self.markers):
            return False
        return isinstance(published, str) or bool(self.markers_of(published))

    def leads_on_from(self, checkpoint: CheckpointId) -> bool:
        """True if at least one increment follows, or may follow, a full checkpoint."""
        return bool(self._children(checkpoint, surely=False))

    def after(self, checkpoint: CheckpointId) -> tuple[StoredIncrement, ...]:
        """Return the increments that a trainer restores after a full checkpoint, oldest first; empty: none.

        If several increments follow one state, the one with the highest generation, then step, is chosen.
        """
        # If the files do not name sessions, an increment that may follow counts.
        maybe = self._children(checkpoint, surely=False)
        chain: dict[str, StoredIncrement] = {}
        # The parents in damaged or hostile files may form a ring.
        while (found := max(maybe, key=_age, default=None)) and found.increment.id not in chain:
            chain[found.increment.id] = found
            maybe = self._children(found.increment.id)
        return tuple(chain.values())

    def chain(self, start: StateId, tip: str) -> tuple[StoredIncrement, ...] | None:
        """Return the chain of increments, without a gap, from state `start` to increment `tip`, oldest first.

        Empty if both are the same state; None if they are not certainly connected.
        """
        if tip in self.same(start):
            return ()
        first = {stored.increment.id for stored in self._children(start)}
        chain: dict[str, StoredIncrement] = {}
        wanted: StateId = tip
        while (found := self._made(wanted)) is not None and found.increment.id not in chain:
            chain[found.increment.id] = found
            if found.increment.id in first:
                return tuple(reversed(chain.values()))
            wanted = found.increment.parent
        return None

    def same(self, state: StateId) -> set[StateId]:
        """Return a state, and all full checkpoints, and increments by id, that are known to equal it."""
        names: set[StateId] = {state}
        while more := [pair for pair in self._equal if pair & names and pair - names]:
            names = names.union(*more)
        return names

    def newest_event(self, state: StateId) -> datetime | None:
        """Return the time of the newest event that a state or an equal one was trained on; None: unknown."""
        names = self.same(state)
        stored = (stored.increment for stored in self.increments)
        return newest(
            [
                *(marker.event_time for marker in self.markers if marker.checkpoint in names),
                *(increment.event_time for increment in stored if increment.id in names),
            ]
        )

    @cached_property
    def _by_id(self) -> Mapping[str, StoredIncrement]:
        return {stored.increment.id: stored for stored in self.increments}

    @cached_property
    def _equal(self) -> tuple[set[StateId], ...]:
        """Sets of two: a full checkpoint, and the id of the increment that it equals."""
        return tuple({m.checkpoint, m.after} for m in self.markers if m.is_equal and m.after is not None)

    @cached_property
    def _by_parent(self) -> Mapping[StateId, list[StoredIncrement]]:
        found: dict[StateId, list[StoredIncrement]] = defaultdict(list)
        for stored in self.increments:
            found[stored.increment.parent].append(stored)
        return dict(found)

    def _made(self, state: StateId) -> StoredIncrement | None:
        """Return the increment whose result is `state` or an equal state; None if there is none."""
        names = (name for name in self.same(state) if isinstance(name, str))
        return next((stored for name in names if (stored := self.find(name))), None)

    def _children(self, state: StateId, *, surely: bool = True) -> list[StoredIncrement]:
        """Return the increments that certainly follow a state, unsorted.

        Unless `surely`, increments that may follow it are added: see `CheckpointMarker.may_lead_to`.
        """
        names = self.same(state)
        children = [stored for name in names for stored in self._by_parent.get(name, [])]
        for marker in self.markers:
            if marker.checkpoint in names:
                children += [
                    stored
                    for stored in self.increments
                    if marker.leads_to(stored.increment)
                    or (not surely and marker.may_lead_to(stored.increment))
                ]
        return children


def newest(times: Iterable[datetime | UnsetType | None]) -> datetime | None:
    """Return the latest of the times that are known (neither None nor UNSET); None if none is."""
    return max((time for time in times if isinstance(time, datetime)), default=None)


def _age(stored: StoredIncrement) -> tuple[int, int]:
    """Return (generation, last step), a sort key that grows with the time of writing.

    A session that goes back to an earlier state has a higher generation.
    """
    return stored.increment.generation, stored.increment.to_step


def identify(prefix: Path, step: int) -> CheckpointId:
    """Return the identity of the full checkpoint at `prefix`: its name, `step` and its index's digest.

    Raises:
        CheckpointNotFound: its index cannot be read.
        CheckpointError: its index cannot be fetched from a store.
    """
    return CheckpointId(prefix.name, step, index_digest(prefix))


def read_history(ckpt_dir: Path) -> History:
    """Read all increments' manifests and all markers in `<ckpt_dir>/increments`; empty if it does not exist.

    Files that the trainer prunes meanwhile are left out; files that have not changed since the last call are
    not read again.

    Raises:
        CorruptFile, UnsupportedFormat: a manifest or marker is damaged, or of another version.
        CheckpointError: the directory or a file cannot be read.
    """
    directory = ckpt_dir / INCREMENTS_DIRECTORY
    try:
        # No `Path` for each: with such savings, planning beside 1,000 increments fell from 27 to 10 ms.
        names = sorted(os.listdir(directory))  # noqa: PTH208
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise CheckpointError(f"cannot list {directory}", cause=str(error)) from None
    manifests = [f"{directory}/{name}/{MANIFEST_FILE}" for name in names if _NAME.fullmatch(name)]
    markers = [f"{directory}/{name}" for name in names if name.endswith(".json") and not name.startswith(".")]
    stored = _read(manifests, _increments, lambda p: StoredIncrement(p.parent, from_json(_text(p), p)))
    marked = _read(markers, _markers, lambda p: CheckpointMarker.from_json(_text(p), p))
    return History(tuple(stored), tuple(marked))


_increments: Unchanged[StoredIncrement] = Unchanged()
_markers: Unchanged[CheckpointMarker] = Unchanged()


def _read(paths: list[str], known: Unchanged[T], read: Callable[[Path], T]) -> Iterator[T]:
    """Yield `read(path)` of each file that still exists, in the order of `paths`.

    Results are memoised in `known`: a file is read again only if it has changed. Other errors of `read` than
    FileNotFoundError reach the caller.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            yield known.of(path, read)


def _text(path: Path) -> bytes:
    """Return the content of a file of at most 256 MiB.

    Raises FileNotFoundError if it does not exist, CheckpointError if it is longer or cannot be read.
    """
    try:
        with regular_file(path) as file:
            content = file.read(_MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", cause=str(error)) from None
    if len(content) > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"cannot read {path}", cause=f"it has more than {_MAX_MANIFEST_BYTES} bytes")
    return content

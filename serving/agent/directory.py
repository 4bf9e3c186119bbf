"""What is published under a model base path, at each look: a new listing, but each manifest is read once."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from stat import S_ISDIR

from msgspec import Struct

from exporter.delta.spans import Span
from exporter.errors import ExportError, ManifestError, NotUpdatable
from exporter.publish.delta_log import LogBase, LogDelta, list_deltas, log_path
from exporter.publish.hold import Hold
from exporter.publish.manifest import DeltaOrigin
from exporter.publish.versions import published_versions
from exporter.storage.files import FileIdentity
from exporter.storage.layout import DELTAS_DIRECTORY, MANIFEST_FILE
from serving.agent.rollout import PublishedLog, PublishedLogs, Rollback

_MOST_COMMITS = 20_000


class Commit(Struct, frozen=True):
    """A publication's time, training step and size in bytes, from its manifest.

    `event_time` is the time of the newest event that it was trained on; None if unknown.
    """

    created: datetime
    step: int | None
    bytes_: int
    event_time: datetime | None = None


class ModelDirectory:
    """One model base path. `read` lists it, and keeps a manifest's content as long as it is the same file: an
    operator may remove a model and export another one to its path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._bases: dict[Path, tuple[FileIdentity, LogBase | None]] = {}
        self._deltas: dict[str, dict[tuple[int, int], tuple[Span, Commit]]] = {}
        self._commits: dict[tuple[str, int], Commit] = {}
        self._rollbacks: dict[tuple[str, int], Rollback] = {}
        self._was_seen = False

    def read(self) -> PublishedLogs:
        """The logs that are published now. An unreadable directory is a `problem`, never an exception."""
        with self._lock:
            try:
                return self._read()
            except (OSError, ExportError) as error:
                return PublishedLogs(problem=f"{self.path} cannot be read: {error}")

    def commit(self, lineage: str, position: int) -> Commit | None:
        """The first publication at a position of a log."""
        return self._commits.get((lineage, position))

    def begun(self, lineage: str) -> datetime | None:
        """When the first existing base of a log was published; None if none was read."""
        bases = [base for _, base in list(self._bases.values()) if base is not None]
        return min(
            (base.manifest.created for base in bases if base.manifest.lineage == lineage), default=None
        )

    def size(self, lineage: str, spans: tuple[Span, ...]) -> int:
        """The total size of listed deltas, in bytes."""
        known = self._deltas.get(lineage, {})
        listed = (known.get((span.start, span.end)) for span in spans)
        return sum(found[1].bytes_ for found in listed if found is not None)

    def log_path(self, lineage: str) -> Path | None:
        """The directory of a log's deltas, which may not exist yet; None if no base of the log was read."""
        for _, base in list(self._bases.values()):
            if base is not None and base.manifest.lineage == lineage:
                return log_path(self.path, base.entry.log)
        return None

    def places(self) -> dict[Path, int]:
        """The directories that a publication changes, with their inode numbers: a new directory at the same
        path has another number.
        """
        deltas = self.path / DELTAS_DIRECTORY
        found = [self.path, deltas]
        with suppress(OSError), os.scandir(deltas) as entries:
            found += [Path(entry.path) for entry in entries if entry.is_dir()]
        places = {}
        for place in found:
            with suppress(OSError):
                status = place.stat()
                if S_ISDIR(status.st_mode):
                    places[place] = status.st_ino
        return places

    def _read(self) -> PublishedLogs:
        if not self.path.is_dir():
            is_there = self.path.exists()
            begun = "" if self._was_seen or is_there else "has anything been published, and "
            what = "is not a directory" if is_there else "does not exist"
            return PublishedLogs(problem=f"{self.path} {what}: {begun}is its volume mounted?")
        versions = published_versions(self.path)
        if not versions:
            lost = ": is its volume mounted?" if self._was_seen else ""
            return PublishedLogs(problem=f"nothing is published under {self.path}{lost}")
        self._was_seen = True
        self._forget_bases({child.path for child in versions})
        if lost_deltas := self._lost_deltas(versions[0].path):
            return PublishedLogs(problem=f"{lost_deltas} has vanished: is its volume mounted?")
        logs: dict[str, PublishedLog] = {}
        for child in versions:
            base = self._base(child.path)
            if base is not None and base.manifest.lineage and base.manifest.lineage not in logs:
                logs[base.manifest.lineage] = self._log(base, base.manifest.lineage)
        self._deltas = {lineage: self._deltas[lineage] for lineage in logs}
        return PublishedLogs(logs, versions[0].version)

    def _lost_deltas(self, newest: Path) -> Path | None:
        """The directory of the newest base's deltas, if it held deltas and has vanished."""
        base = self._base(newest)
        if base is None:
            return None
        directory = log_path(self.path, base.entry.log)
        return directory if self._deltas.get(base.manifest.lineage or "") and not directory.is_dir() else None

    def _forget_bases(self, listed: Collection[Path]) -> None:
        if not self._bases.keys() <= {*listed}:
            self._bases = {path: base for path, base in self._bases.items() if path in listed}

    def _base(self, path: Path) -> LogBase | None:
        """Read a version that takes deltas; None if it takes none, or cannot be read (`doctor` reports
        that).
        """
        try:
            file = FileIdentity.of((path / MANIFEST_FILE).stat())
            known = self._bases.get(path)
            if known is not None and known[0] == file:
                return known[1]
            base = LogBase.read(path)
        except NotUpdatable:
            self._bases[path] = file, None
            return None
        except (FileNotFoundError, ManifestError):
            return None
        self._bases[path] = file, base
        commit = Commit(base.manifest.created, base.at.step, 0, base.entry.trained.newest_event)
        self._remember(base.manifest.lineage or "", base.at.position, commit)
        return base

    def _log(self, base: LogBase, lineage: str) -> PublishedLog:
        directory = log_path(self.path, base.entry.log)
        # The hold before the listing, as the graph reads them: see `_list_and_hold` in subgraph/update.py.
        limit, is_canary = Hold(directory).for_servers()
        known, listed = self._deltas.get(lineage, {}), {}
        for delta in list_deltas(directory):
            place = delta.start, delta.end
            found = known.get(place) or self._read_delta(delta, lineage)
            if found is not None:
                listed[place] = found
        self._deltas[lineage] = listed
        spans = (span for span, _ in listed.values())
        rollback = None if limit is None or is_canary else self._rollbacks.get((lineage, limit))
        return PublishedLog(lineage, tuple(spans), limit, is_canary, base.at.position, rollback)

    def _read_delta(self, delta: LogDelta, lineage: str) -> tuple[Span, Commit] | None:
        try:
            manifest, entry = delta.manifest, delta.entry
        except ManifestError:
            return None  # just removed, or damaged: the agent sends no replica there
        size = sum(file.bytes_ for file in manifest.files)
        commit = Commit(manifest.created, manifest.step, size, entry.trained.newest_event)
        self._remember(lineage, delta.end, commit)
        if entry.made is DeltaOrigin.ROLLBACK and entry.back_to is not None:
            self._rollbacks[lineage, delta.end] = Rollback(delta.end, entry.back_to, entry.reason or "")
        return Span(delta.start, delta.end, entry.only_from, entry.parts), commit

    def _remember(self, lineage: str, position: int, commit: Commit) -> None:
        known = self._commits.get((lineage, position))
        if known is None or commit.created < known.created:
            self._commits[lineage, position] = commit
        if len(self._commits) > _MOST_COMMITS:  # a replica may serve a merged position, but not one this old
            self._commits = dict(list(self._commits.items())[_MOST_COMMITS // 2 :])

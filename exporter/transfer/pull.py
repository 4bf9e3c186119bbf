"""Pull: carry what is published in an object store into a local model base path, for servers that read files.

What has its manifest in the store, and all files of the sizes that it lists, is fetched into a directory
that servers skip, checked against its checksums, and renamed into place: in the order of positions, so that
servers meet what they would have met beside the exporter. What was fetched before a pull was killed is not
fetched again. A hold is there before what it holds back, and is lifted last.

What was published here since the last push is never mixed with what another machine has pushed, and neither
it nor its hold is changed. A rollback by an agent's canary is a decision about the servers of this copy: it
stays, and the copy goes on with what leads on from it (see `exporter.transfer.taken_back`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from msgspec import Struct

from exporter.errors import CheckpointNotFound, ForeignLineage, PositionMoved, UsageError
from exporter.files import make_directories, remove_tree, sync, write_durably, writing
from exporter.layout import (
    CHECKPOINT_STATE_FILE,
    HOLD_FILE,
    MANIFEST_FILE,
    PULL_LOCK_FILE,
    PULL_PREFIX,
    TRASH_PREFIX,
)
from exporter.progress import Progress, ProgressFactory, no_progress
from exporter.publish.commit import model_lock
from exporter.publish.hold import Hold
from exporter.publish.retention import GRACE_SECONDS
from exporter.publish.staging import Staging
from exporter.storage.objects import ObjectWriter, RemoteObject
from exporter.storage.url import Url
from exporter.transfer.head import fetch_head, files_digest, recall, remember
from exporter.transfer.items import Item, StoredModel, files_of, local_holds, local_items, stored_model
from exporter.transfer.push import parse
from exporter.transfer.soundness import require_sound
from exporter.transfer.taken_back import TakenBack, is_restoration

_LOCK_SECONDS = 5.0


class Pulled(Struct, frozen=True):
    """What a pull did: paths below the model, bytes that were fetched, and where the local model stands.

    `incomplete` have a manifest in the store and not yet all their files; `waiting` is what servers could not
    take after a rollback here (see `exporter.transfer.taken_back`). `stored` is what was seen there,
    for the next pull.
    """

    fetched: tuple[str, ...]
    removed: tuple[str, ...]
    incomplete: tuple[str, ...]
    bytes_: int
    position: int | None
    stored: StoredModel
    waiting: tuple[str, ...] = ()


def pull(
    url: str,
    model: Path,
    *,
    prune: bool = False,
    known: StoredModel | None = None,
    progress: ProgressFactory = no_progress,
) -> Pulled:
    """Bring a local model to what is in a store. With `prune` what is there no more is removed here, too.

    Raises:
        CheckpointNotFound: there is no model in the store.
        CheckpointError: it cannot be read.
        ForeignLineage: a publication here is another one than that of its name in the store.
        PositionMoved: this directory and the store have gone on from each other in different ways.
        VerificationError: what was fetched is damaged.
        TargetBusy: another pull works in the directory.
        UsageError: the local directory is that of checkpoints.
        DiskFull, PublishError: the local directory cannot be written; nothing is half-published.
    """
    place = parse(url)
    store = ObjectWriter(place)
    head = fetch_head(store, place)  # before what it may name
    stored = stored_model(store, place, known)
    if not stored.items:
        raise CheckpointNotFound(
            f"there is no model at {place}", hint=f"publish one: export-model push MODEL {place}"
        )
    _require_own_directory(model)
    with writing(model):
        make_directories(model)
    with model_lock(model, _LOCK_SECONDS, PULL_LOCK_FILE):
        job = _Pull(store, place, model, stored)
        fetched, incomplete, removed = job.run(progress, prune=prune)
        if head is not None and job.here.keys() >= stored.items.keys() and head[0].path in stored.items:
            remember(model, place, head[0])
    position = max((item.manifest.position for item in job.here.values()), default=None)
    size = sum(item.bytes_ for item in fetched)
    paths = tuple(item.path for item in fetched)
    return Pulled(paths, removed, incomplete, size, position, stored, job.waiting)


def _require_own_directory(model: Path) -> None:
    if (model / CHECKPOINT_STATE_FILE).is_file():
        raise UsageError(
            f"{model} is a directory of checkpoints",
            cause="versions, deltas and unfinished work would lie among the trainer's files",
            hint=f"name a directory of the model's own: {model / 'served'}",
        )


class _Pull:
    def __init__(self, store: ObjectWriter, url: Url, model: Path, stored: StoredModel) -> None:
        self._store, self._url, self._model, self._stored = store, url, model, stored
        self.here = {item.path: item for item in local_items(model)}
        self.waiting: tuple[str, ...] = ()
        self._kept_hold = ""

    def run(
        self, progress: ProgressFactory, *, prune: bool
    ) -> tuple[list[Item], tuple[str, ...], tuple[str, ...]]:
        """What was fetched, what is not whole in the store yet, what was removed."""
        wanted = sorted(
            (item for item in self._stored.items.values() if not self._has(item)), key=lambda item: item.order
        )
        own = self._published_here()
        taken_back = TakenBack.of(own)
        if own and taken_back is None:
            if wanted:
                ours, theirs = self._model / own[0].path, f"{self._url}/{wanted[0].path}"
                raise PositionMoved(
                    f"{ours} was published here, and {theirs} elsewhere",
                    cause="neither leads on from the other",
                    hint=f"pull into a directory of its own: export-model pull {self._url} OTHER",
                )
            return [], (), ()
        if taken_back is not None:
            self.waiting = tuple(item.path for item in wanted if taken_back.withholds(item))
            wanted = [item for item in wanted if not taken_back.withholds(item)]
            if Hold(self._model / taken_back.log).binds:
                self._kept_hold = f"{taken_back.log}/{HOLD_FILE}"
        fetched, incomplete = self._fetch(wanted, progress)
        removed = self._prune() if prune and taken_back is None else ()
        self._settle_holds()
        return fetched, incomplete, removed

    def _published_here(self) -> list[Item]:
        """What lies beyond the head that this directory knows, and is not in the store."""
        head = recall(self._model, self._url)
        synced = None if head is None else self.here.get(head.path) or self._stored.items.get(head.path)
        last = -1 if synced is None else synced.manifest.position
        beyond = (item for item in self.here.values() if item.manifest.position > last)
        return [item for item in beyond if item.path not in self._stored.items]

    def _fetch(self, wanted: list[Item], progress: ProgressFactory) -> tuple[list[Item], tuple[str, ...]]:
        """Publish what is missing here; what of the store is not whole yet ends it: order matters."""
        self._sweep({item.digest for item in wanted})
        self._set_holds()
        done: list[Item] = []
        with progress("fetching", sum(item.bytes_ for item in wanted)) as bar:
            for item in wanted:
                files = files_of(self._stored, item)
                if files is None:
                    return done, tuple(each.path for each in wanted[len(done) :])
                self._publish(item, self._staged(item, files, bar))
                self.here[item.path] = item
                done.append(item)
        return done, ()

    def _has(self, item: Item) -> bool:
        ours = self.here.get(item.path)
        if ours is not None and ours.digest != item.digest and not _is_same_rollback(ours, item):
            raise ForeignLineage(
                f"{self._model / item.path} is another publication than {self._url}/{item.path}",
                hint="pull into a directory of its own",
            )
        return ours is not None

    def _sweep(self, wanted: set[str]) -> None:
        """Remove what killed pulls left of publications that are not wanted any more."""
        for left in self._model.glob(f"{PULL_PREFIX}*"):
            if left.name.removeprefix(PULL_PREFIX) not in wanted:
                remove_tree(left)

    def _staged(self, item: Item, files: dict[str, RemoteObject], bar: Progress) -> Path:
        """The publication, whole and checked, where servers do not look."""
        staged = self._model / f"{PULL_PREFIX}{item.digest}"
        with writing(staged):
            for name, each in files.items():
                path = staged / name
                if not path.is_file() or path.stat().st_size != each.size:
                    make_directories(path.parent)
                    part = path.with_name(f".{path.name}.part")
                    with part.open("wb") as file:
                        self._store.copy(each, file.fileno(), [(0, each.size, 0)], path, bar.advance)
                        file.flush()
                        os.fsync(file.fileno())
                    part.replace(path)
                    sync(path.parent)
            (staged / MANIFEST_FILE).unlink(missing_ok=True)
            write_durably(staged / MANIFEST_FILE, item.content)
            sync(staged)
        self._check(item, staged)
        return staged

    def _check(self, item: Item, staged: Path) -> None:
        try:
            require_sound(staged, is_delta="/" in item.path)
        except Exception:
            remove_tree(staged)  # to be fetched anew
            raise

    def _publish(self, item: Item, staged: Path) -> None:
        target = self._model / item.path
        with writing(target), Staging(self._model) as staging, model_lock(self._model):
            make_directories(target.parent)
            hold, brought, held = Hold(target.parent), Hold(staged).read(), None
            if brought is not None:
                held = hold.prepare(brought, staging)
                hold.promise(target.name, held, staging)
            os.rename(staged, target)  # noqa: PTH104  the commit: one call, in plain sight
            sync(target.parent)
            if held is not None:
                hold.settle(held)

    def _set_holds(self) -> None:
        here = local_holds(self._model)
        for name, content in self._stored.holds.items():
            if here.get(name) != content and name != self._kept_hold:
                path = self._model / name
                with writing(path), Staging(self._model) as staging:
                    make_directories(path.parent)
                    new = staging.path.with_name(HOLD_FILE)
                    write_durably(new, content)
                    new.replace(path)
                    sync(path.parent)

    def _settle_holds(self) -> None:
        """Set what the store says, and lift what it says no more."""
        self._set_holds()
        for name in local_holds(self._model).keys() - self._stored.holds.keys():
            hold = Hold((self._model / name).parent)
            if (
                not hold.is_canary and name != self._kept_hold
            ):  # what an agent's canary decided about the copy
                hold.lift()

    def _prune(self) -> tuple[str, ...]:
        """Remove what the store has no more; not soon after the newest: readers may have listed it."""
        gone = sorted(self.here.keys() - self._stored.items.keys())
        newest = max((self._model / path / MANIFEST_FILE).stat().st_mtime for path in self.here)
        if not gone or time.time() - newest < GRACE_SECONDS:
            return ()
        with writing(self._model), Staging(self._model) as staging:
            for path in gone:
                trash = staging.path.with_name(f"{TRASH_PREFIX}{path.replace('/', '-')}")
                (self._model / path).rename(trash)
                del self.here[path]
        return tuple(gone)


def _is_same_rollback(ours: Item, item: Item) -> bool:
    """True if the same was rolled back here and in the store: the reason and the time alone differ."""
    return is_restoration(ours) and files_digest(ours.manifest) == files_digest(item.manifest)

"""Pull: download publications from an object store into a local model base path, for servers that read files.

A publication is fetched if the store has its manifest, and all files with the sizes that it lists. It is
fetched into a directory that servers ignore, checked against its checksums, and renamed into place, in the
order of positions: so servers see the same sequence as they would beside the exporter. After a pull was
killed, the next one does not fetch complete files again. A hold is set before the publications that it holds
back are visible, and is lifted last.

Local publications since the last push are never mixed with what another machine has pushed. A pull changes
neither these nor a hold that was set, moved or lifted here since. It does copy other holds, and tags: a push
would undo another machine's changes to them, and asks for a pull first. What retention has removed here is
not fetched again then. Each tag is merged separately: a tag that changed here since the last pull or push
remains, unless it has changed in the store, too.

What the copy made by itself never stops a pull. A rollback or a resumption by its canary or its operator
remains, and the copy continues with publications that continue from it (`exporter.transfer.taken_back`); a
merger has the values of what it was merged from. Anything else that was published here leads elsewhere, and
ends the pull with PositionMoved once the store goes on.

Servers load a version by themselves, whatever the hold. So while the copy's own operator holds it, no version
arrives beyond the hold, and no other log; and while its canary does, no base at a position that a delta leads
to as well.

The store's hold is kept beside the copy's own, which its canary or its operator set: servers get the lesser
(`exporter.publish.hold.Decided`), whatever is written into the store.

A pull with `prune` removes from the copy what the store no longer has, if servers do not need it either.
Servers list the directory, and load what they saw there afterwards. Therefore a publication that is newer
than the grace period, or beyond a hold, does not count yet: only settled ones do. A publication that the
store no longer has is removed

- if it is replaced: a merger that has all its rows, or a base, is settled and reaches at least as far; - if
  the copy is quiet: all publications of the store are here and settled, a base among them, so servers can
  load any of them. A rollback and its resumption remain, because a canary may have made them here.

So the last base remains, whatever is removed from the store.

A file of a version that another version of the copy has, too, by its size and checksums, or by the SHA-256
that is signed, is linked from there and not fetched (`exporter.transfer.same_files`). All its bytes are
compared, as if they had come from the store; one that differs is fetched.

A publication that is damaged in the store is not accepted, and the copy stops before it: PublicationDamaged.
Once a newer base or merger replaces it, the pull skips it, and the deltas that need it.

Whoever may write to a store is not always allowed to publish. With trusted keys (`exporter.publish.signing`)

- a publication that none of them has signed is not fetched, nor a delta whose log has no signed base; -
  fetched files are compared with the signed digests, in the copy, before servers can see them; - a local
  publication is removed only when it is replaced, whatever is removed from the store; - tags are not changed;
  - a hold of the store is copied only if it moves no server of the copy back: it must not be less than the
  newest position in the copy, or than a lower hold there. Any other hold is ignored, and one without a
  readable position;
- the identity of the first model that is accepted is kept in the copy, and no other model is accepted from
  then on, whatever its name: a model that was begun anew in the bucket has to be named.

So a copy never goes back. Whoever may write to the store can still stop a copy where it is, show a new copy
less than was published, and lift a hold.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.spans import Span
from exporter.errors import (
    CheckpointChanged,
    CheckpointNotFound,
    CorruptFile,
    DiskFull,
    EngineFailed,
    ForeignLineage,
    LfsPointer,
    ManifestError,
    MissingShard,
    NotTrusted,
    PositionMoved,
    PublicationDamaged,
    TruncatedFile,
    UnsupportedFormat,
    UsageError,
    VerificationError,
)
from exporter.jobs.runner import Runner
from exporter.publish.commit import model_lock
from exporter.publish.delta_log import log_path
from exporter.publish.hold import Decided, HeldBy, Hold, hold_in, position_in
from exporter.publish.manifest import BaseEntry, DeltaEntry, DeltaOrigin, FileEntry, MergedPart
from exporter.publish.retention import GRACE_SECONDS, move_away
from exporter.publish.spared import Spared, note
from exporter.publish.staging import Staging
from exporter.publish.tags import merged_tags, read_tags, tagged_versions, tags_document
from exporter.publish.versions import (
    identities_of,
    log_directories,
    pinned_identity,
    require_base_path,
    several_models,
    version_dirs,
)
from exporter.storage.files import below, make_directories, remove_tree, sync, write_durably, writing
from exporter.storage.layout import (
    CHECKPOINT_STATE_FILE,
    HOLD_DOCUMENT_FILE,
    HOLD_FILE,
    IDENTITY_FILE,
    MANIFEST_FILE,
    PULL_JOBS_SUFFIX,
    PULL_LOCK_FILE,
    PULL_PREFIX,
    TAGS_FILE,
)
from exporter.storage.local_paths import quoted, require_no_pattern
from exporter.storage.objects import ObjectWriter, RemoteObject, Tag
from exporter.storage.output_directory import NEW_PREFIX
from exporter.storage.requests import PART_BYTES
from exporter.storage.url import Url
from exporter.storage.waiting import workers
from exporter.terminal.progress import Progress, ProgressFactory, human_bytes, no_progress
from exporter.transfer.head import Head, Known, Upload, fetch_head, files_digest, recall, remember
from exporter.transfer.items import (
    Item,
    Passage,
    StoredItems,
    by_path,
    end_of,
    files_of,
    forged,
    local_holds,
    local_item,
    local_items,
    local_paths,
    looking_again,
    stored_items,
)
from exporter.transfer.push import parse
from exporter.transfer.same_files import LocalFiles
from exporter.transfer.taken_back import (
    TakenBack,
    is_merger,
    is_of_a_canary,
    is_restoration,
    repeated,
    restored,
    to_repeat,
    way_on,
)

if TYPE_CHECKING:
    from exporter.publish.signing import Trust


def superseded(
    model: Path, here: Mapping[str, Item], stored: Collection[str], *, is_current: bool
) -> list[Item]:
    """Return the items of a copy that the store no longer has and that can be removed, by `Item.order`.

    `here` has the items of the copy at `model`, by path; `stored` are the paths of the store's publications,
    and `is_current` tells that all of them are here. An item can be removed if another one replaces it that
    is settled: no hold keeps it from servers, and it is 300 s old. If `is_current`, and all items that the
    store has are settled, a version among them, any item can be removed but a rollback or a resumption.
    OSError if a manifest in the copy cannot be looked at.
    """
    gone = sorted((item for path, item in here.items() if path not in stored), key=lambda item: item.order)
    if not gone:
        return []
    kept = [item for path, item in here.items() if path in stored]
    settled = _settled(model, kept)
    is_quiet = is_current and len(settled) == len(kept) and not all(item.is_delta for item in kept)
    newest = max((item.manifest.position for item in settled), default=-1)

    def is_over(item: Item) -> bool:
        if not is_restoration(item):
            return is_quiet
        return not item.is_delta and item.manifest.position < newest and not Hold(model / item.log_path).binds

    return [item for item in gone if is_over(item) or any(_replaces(each, item) for each in settled)]


def _settled(model: Path, items: Iterable[Item]) -> list[Item]:
    """Return the items of `model` that no hold keeps from servers and that are older than `GRACE_SECONDS`.

    The age is that of the manifest's file; the order is kept. OSError if a manifest cannot be looked at.
    """
    holds: dict[Path, int | None] = {}
    latest, found = time.time() - GRACE_SECONDS, []
    for item in items:
        path = model / item.path
        if path.parent not in holds:
            held = Hold(path.parent).for_servers() if item.is_delta else None
            holds[path.parent] = None if held is None else held.position
        hold = holds[path.parent]
        is_free = hold is None or item.manifest.position <= hold
        # when it came here, not when it was published: servers list this directory
        if is_free and (path / MANIFEST_FILE).stat().st_mtime <= latest:
            found.append(item)
    return found


def _replaces(new: Item, old: Item) -> bool:
    """Return True if each server that could load `old` can load `new` instead, and gets at least as far.

    A base replaces all that ends no later; a delta replaces deltas of its log that begin no earlier and end
    no later.
    """
    if new.manifest.position < old.manifest.position:
        return False
    start, old_start = new.manifest.from_position, old.manifest.from_position
    if start is None:
        return True
    return old_start is not None and start <= old_start and new.log == old.log


_LONG_AGO = datetime.fromtimestamp(0, timezone.utc)
"""The time of a hold that does not state when it was set."""
_LOCK_SECONDS = 5.0
_LIST_SECONDS = 10.0
"""How long (s) a listing is used while the head is unchanged: other tools may write objects there, too."""
_AHEAD = 8
"""How many small publications are fetched at once."""


class Seen(Struct, frozen=True):
    """A listing of a store: its head and tag (None without one), and then the model, `stored`.

    `at` is the monotonic time (s) of the listing; None if the listing lacked something that the head
    mentions, or if there was no listing.
    """

    head: tuple[Head, Tag] | None = None
    stored: StoredItems = StoredItems({}, {}, {}, {})
    at: float | None = None

    def is_current(self, head: tuple[Head, Tag] | None, now: float) -> bool:
        """Return True if `head` is still the head of this listing, and the listing is less than 10 s old.

        `now` is a monotonic time in seconds. False if the listing lacked something that the head mentions.
        """
        return head == self.head and self.at is not None and now - self.at < _LIST_SECONDS


class Pulled(Struct, frozen=True):
    """The result of a pull: paths below the model, the number of bytes fetched, and the copy's position.

    `position` is the greatest in the copy; None if it is empty. `incomplete` are the publications that
    were not fetched because one of them lacks files in the store. `waiting` are publications that servers
    could not load after what this copy took back by itself (`exporter.transfer.taken_back`), and `way_on` is
    the shell command after which the copy gets past them: empty if nothing waits, or if only the store's next
    publications help. `repeated` is the path of the rollback or resumption that was published here because
    the store's could not be fetched; empty without one.
    """

    fetched: tuple[str, ...]
    removed: tuple[str, ...]
    incomplete: tuple[str, ...]
    bytes_: int
    position: int | None
    waiting: tuple[str, ...] = ()
    untrusted: tuple[NotTrusted, ...] = ()
    """Why publications, the newest first, and holds were not accepted."""
    identity: str = ""
    """With trusted keys: the identity of the only model that this copy accepts; empty while it has none."""
    is_pinned_now: bool = False
    """True if this pull pinned the identity."""
    spared: tuple[Spared, ...] = ()
    """What of the fetched publications did not come from the store."""
    way_on: str = ""
    repeated: str = ""


def pull(
    url: str,
    model: Path,
    *,
    prune: bool = False,
    progress: ProgressFactory = no_progress,
    trust: Trust | None = None,
    workers: int = 0,
) -> Pulled:
    """Update the local model at `model` from the store at `url` once; return what was fetched and removed.

    `prune` also removes what the store no longer has; with `trust`, only publications that one of its keys
    has signed are accepted. `workers` threads merge bases, 0: one a processor. `progress` makes the bars for
    bytes fetched.

    Raises:
        UsageError: the URL is not that of a model in a store, or `model` cannot be a copy.
        CheckpointNotFound: the store has no model at this URL.
        PositionMoved, ForeignLineage: the copy has publications that do not fit those of the store.
        PublicationDamaged: the next publication is damaged, and none replaces it.
        NotTrusted: no trusted key has signed what is in the store or here.
        TargetBusy: another pull into this copy, or an exporter, keeps its lock too long.
        ExportError, OSError: the store cannot be read, or the copy cannot be read or written.
    """
    return LocalCopy(url, model, prune=prune, trust=trust, workers=workers).update(progress)


class LocalCopy:
    """A local model that is updated from a store, as often as its owner wants.

    Connections, credentials from a cloud, and manifests are kept between updates. After a failure the store
    is opened again, because files of credentials may have been replaced. With `prune`, an update also removes
    what the store no longer has. With `trust`, only publications that one of its keys has signed are
    accepted; the files of keys are read again at each update. With `holds_new_logs`, for a canary, a log that
    is not here yet is held at its first base before servers see it: so they start where the canary judges
    first. `workers` threads merge bases, 0: one a processor.

    Raises:
        UsageError: the URL is not that of a model in a store. Nothing is opened yet.
    """

    def __init__(
        self,
        url: str,
        model: Path,
        *,
        prune: bool = False,
        trust: Trust | None = None,
        holds_new_logs: bool = False,
        workers: int = 0,
    ) -> None:
        self.url = parse(url)
        self._holds_new_logs = holds_new_logs
        self._model, self._prune, self._trust, self._workers = model, prune, trust, workers
        self._keys: list[str] = []
        self._damaged = dict[frozenset[RemoteObject], str]()
        self._store: ObjectWriter | None = None
        self._seen = Seen()

    def update(self, progress: ProgressFactory = no_progress) -> Pulled:
        """Fetch new publications, holds and tags from the store; return what was fetched and removed.

        Publications come in the order of positions, and servers see each as soon as it is whole. With
        `prune`, publications that the store no longer has are removed here, too, if servers do not need them.
        The copy is locked against other pulls meanwhile, and its directory is made if need be. The head of
        the store is remembered beside it. `progress` makes the bars for bytes fetched.

        Raises:
            CheckpointNotFound: the store has no model at this URL.
            PositionMoved: something was published here, and something else there.
            ForeignLineage: the copy has another publication at the same path.
            PublicationDamaged: the next publication is damaged, and none replaces it.
            NotTrusted: no trusted key has signed what is in the store or here, or a file of keys cannot be
                read.
            UsageError: `model` cannot be a model base path, or is the trainer's directory; or the library
                that reads stores is not installed.
            TargetBusy: another pull into this copy, or an exporter, keeps its lock too long.
            ModelHeld, PositionUnknown, OverlayFull, NotFinite: the values of a rollback of the store cannot
                be published here (see `exporter.transfer.taken_back`).
            ExportError: the store cannot be read, or the copy cannot be read or written; see errors.py.
            OSError: a lock or a hold of the copy cannot be opened.
        """
        store, self._store = self._store or ObjectWriter(self.url), None
        # kept across repetitions: what the first one fetched counts, too
        fetched: dict[str, tuple[Item, Spared]] = {}
        done = looking_again(lambda: self._update(store, fetched, progress))
        self._store = store
        return done

    def plan(self) -> Pulled:
        """Return what `update` would do now, without a change on disk.

        Its `bytes_` are the most that would be fetched; nothing is repeated in it.

        Raises:
            ExportError, OSError: as `update`, for each failure that is found before anything is fetched.
        """
        return looking_again(self._plan)

    def _plan(self) -> Pulled:
        store = ObjectWriter(self.url)
        seen = self._look(store)
        self._require_model(seen.stored)
        job = _Pull(store, self.url, self._model, seen.stored, {}, {}, self._pinned())
        return job.plan(None if seen.head is None else seen.head[0], prune=self._prune)

    def _require_model(self, stored: StoredItems) -> None:
        """Refuse to go on without a model in the store, or with a local path that cannot be a copy.

        Raises:
            CheckpointNotFound: the store has no model.
            NotTrusted: keys are trusted, and no trusted key has signed a version there.
            UsageError: the local path is a version, inside another model, a directory of models, or the
                trainer's; or it has a character of a pattern.
            TargetNotWritable: the local path, or a parent, is a file or a broken symbolic link.
            ManifestError: the local path cannot be listed.
        """
        if self._trust is not None and all(item.is_delta for item in stored.items.values()):
            for error in forged(stored).values():
                raise error
        if not stored.items:
            raise CheckpointNotFound(f"there is no model at {self.url}", hint=self._published_from_here())
        _require_own_directory(self._model)
        require_base_path(self._model)
        require_no_pattern("DIR", self._model)

    @property
    def newest(self) -> tuple[int, datetime] | None:
        """The position and the publication time of the store's newest publication, as last listed.

        None before the first listing, and for an empty store. The newest has the greatest position.
        """
        seen = [each.manifest for each in self._seen.stored.items.values()]
        return max(((each.position, each.created) for each in seen), default=None)

    def _update(
        self, store: ObjectWriter, fetched: dict[str, tuple[Item, Spared]], progress: ProgressFactory
    ) -> Pulled:
        model = self._model
        seen = self._look(store)
        head, stored = seen.head, seen.stored
        self._seen = replace(seen, at=None)  # if this update fails, the next one lists again
        self._require_model(stored)
        with writing(model):
            make_directories(model)
        # a lock of its own: publishing takes the model's, and flock would make this process wait for itself
        with model_lock(model, _LOCK_SECONDS, PULL_LOCK_FILE):
            if pinned := self._pin(stored):
                # now with the identity in force, which leaves other models out
                seen = self._look(store)
                head, stored = seen.head, seen.stored
            job = _Pull(store, self.url, model, stored, fetched, self._damaged, self._pinned())
            job.holds_new_logs, job.workers = self._holds_new_logs, self._workers
            done = job.run(None if head is None else head[0], progress, prune=self._prune)
            is_level = job.has_own or job.here.keys() | job.passed_by >= stored.items.keys()
            # only if all of it is here: else a push from here would believe that it continues the head
            if head is not None and is_level and head[0].path in stored.items:
                remember(model, self.url, head[0], job.own, job.newest)
        self._seen = seen
        trust = self._pinned()
        identity = None if trust is None else trust.identity
        return replace(done, identity=identity or "", is_pinned_now=pinned)

    def _published_from_here(self) -> str:
        """Return the hint for a URL without a model: the shell command that uploads this copy's model again.

        If a canary holds the copy, the command that lifts its hold in the store follows. For a copy without a
        version, it is the command that uploads another local model. ManifestError if the copy cannot be
        listed.
        """
        if not version_dirs(self._model):
            return f"publish one: export-model push MODEL {quoted(self.url)}"
        found = f"put back what this copy has: export-model push {quoted(self._model)} {quoted(self.url)}"
        holds = [Hold(log).for_servers() for log in log_directories(self._model)]
        if any(hold is not None and hold.is_canary for hold in holds):
            found += f", then export-model resume {quoted(self.url)} --lift-canary"
        return found

    def _pinned(self) -> Trust | None:
        """Return the trusted keys, with the identity that was named, or else is pinned in the copy.

        None if no keys are trusted. NotTrusted if the pinned identity cannot be read.
        """
        if self._trust is None or self._trust.identity is not None:
            return self._trust
        return replace(self._trust, identity=pinned_identity(self._model))

    def _pin(self, stored: StoredItems) -> bool:
        """Write the model's identity into the copy, if it can be known; return True if this call has done so.

        The identity is that of the model that was named (only if the store has a version of it), else of the
        versions here, else of the versions in the store. Nothing is written without trusted keys, or if the
        same identity is pinned already; another pinned one is replaced only by the one that was named.

        Raises:
            NotTrusted: versions of several models are here or there, and none is named or pinned; or the
                pinned identity cannot be read.
            ManifestError: the copy cannot be listed.
            PublishError and subclasses: the file cannot be written.
        """
        if self._trust is None:
            return False
        before, wanted = pinned_identity(self._model), self._trust.identity
        versions = (item.manifest for item in stored.items.values() if not item.is_delta)
        named = {version.identity for version in versions} - {None}
        if before is not None and wanted in (None, before):
            return False
        if wanted is None:
            found = identities_of(version_dirs(self._model)) or tuple(sorted(map(str, named)))
            if len(found) > 1:
                raise several_models(self.url, found)
            wanted = next(iter(found), None)
        elif wanted not in named:  # it may not have been published yet
            return False
        if wanted is None:
            return False
        with writing(self._model), Staging(self._model) as staging:
            new = staging.path.with_name(IDENTITY_FILE)
            write_durably(new, f"{wanted}\n".encode("ascii"))
            new.replace(self._model / IDENTITY_FILE)
            sync(self._model)
        return True

    def _look(self, store: ObjectWriter) -> Seen:
        now = time.monotonic()
        trust = self._pinned()
        if trust is not None and self._keys != (keys := self._keys_now(trust)):
            self._keys, self._seen = keys, Seen()  # a signer known before may no longer be trusted
        head = fetch_head(store)  # before what it may name
        if self._seen.is_current(head, now):
            return self._seen
        # with keys no local manifest stands for the store's: each must pass the check
        ours = by_path(local_items(self._model)) if trust is None else {}
        stored = stored_items(store, ours, self._seen.stored, trust=trust)
        return Seen(head, stored, now if head is not None and _is_settled(head[0], stored) else None)

    def _keys_now(self, trust: Trust) -> list[str]:
        """Return the ids of the trusted keys, sorted, and then the accepted identity ("" for any).

        NotTrusted if a file of keys cannot be read: it is missing, or is just being written.
        """
        try:
            return [*sorted(trust.keys()), trust.identity or ""]
        except (UsageError, LfsPointer) as error:
            raise NotTrusted(error.message, cause=error.cause, hint=error.hint) from None


def _is_settled(head: Head, stored: StoredItems) -> bool:
    """Return True if a listing, `stored`, has the publication, holds and tags that a head mentions.

    All files of all publications must be in it, too. A store shows them some time after the head was written.
    """
    holds, there = head.hold_files or {}, stored.holds
    if head.hold_documents is None:  # of an earlier release, which leaves documents that it does not know
        there = {name: content for name, content in there.items() if not name.endswith(HOLD_DOCUMENT_FILE)}
    if head.tags is None:
        there = {name: content for name, content in there.items() if name != TAGS_FILE}
    is_shown = head.path in stored.manifests and holds == there
    return is_shown and all(files_of(stored, item) is not None for item in stored.items.values())


def _require_own_directory(model: Path) -> None:
    if (model / CHECKPOINT_STATE_FILE).is_file():
        raise UsageError(
            f"{model} is a directory of checkpoints",
            cause="versions, deltas and unfinished work would lie among the trainer's files",
            hint=f"name a directory of the model's own: {model / 'served'}",
        )


class _Pull:
    def __init__(
        self,
        store: ObjectWriter,
        url: Url,
        model: Path,
        stored: StoredItems,
        fetched: dict[str, tuple[Item, Spared]],
        damaged: dict[frozenset[RemoteObject], str],
        trust: Trust | None = None,
    ) -> None:
        self._store, self._url, self._model, self._stored = store, url, model, stored
        self._fetched, self._damaged = fetched, damaged
        self.passed_by = set[str]()
        self.holds_new_logs, self.workers = False, 0
        self._repeated = ""
        self.here = by_path(local_items(model))
        self._lent = LocalFiles(model)
        for item in self.here.values():
            self._lent.add_version(item)
        self.has_own = False
        self._trust = trust
        self._unsigned = dict[str, NotTrusted]()
        self._refused = set[str]()
        self._untrusted = [*forged(stored).values()]
        if trust is not None:
            self._require_trusted(trust)
            self._leave_untrusted()
        self._held = set[str]()
        self.last, self._taken_back, self._agreed = -1, list[TakenBack](), dict[tuple[str, int], Item]()

    def run(self, head: Head | None, progress: ProgressFactory, *, prune: bool) -> Pulled:
        """Fetch the missing publications, set the holds and tags, and return the result of the pull.

        Superseded publications are removed first; without `prune`, only versions that a rollback or
        resumption published again here. If something was published in this copy, and nothing in the store
        since, only holds and tags are set. `head` is the store's, None without one. `progress` makes the bars
        for bytes fetched.

        Raises:
            PositionMoved: something was published here, and something else there.
            ForeignLineage: the copy has another publication at the same path.
            PublicationDamaged: the next publication is damaged, and none replaces it.
            NotTrusted: no trusted key has signed a version that was published again here.
            TargetBusy: an exporter holds the lock of the copy.
            CheckpointChanged: the copy was rolled back, or published to, meanwhile.
            ExportError, OSError: the store cannot be read, or the copy cannot be read or written; or the
                values of a rollback of the store cannot be published here.
        """
        known = recall(self._model, self._url)
        wanted, waiting = self._missing(head, known)
        if self.has_own:
            self._settle_holds()
            return self._done()
        # before anything changes: a pull that is killed must not take its own rollbacks for the store's
        if self.own != self._kept(known):
            remember(self._model, self._url, known or Head(), self.own, self.last)
        # first, for the room that it makes
        removed = self._prune(is_current=self._is_current(wanted, waiting), everything=prune)
        incomplete = self._fetch(wanted, progress)
        # holds are lifted last: what they held back must be complete
        if not incomplete:
            self._settle_holds()
            waiting = self._repeat(waiting)
        elif not self._fetched:
            self._require_sizes(self._stored.items[incomplete[0]])
        return self._done(removed, incomplete, waiting)

    def _repeat(self, waiting: tuple[str, ...]) -> tuple[str, ...]:
        """Publish the values of the store's newest rollback or resumption here, if `to_repeat` returns it.

        Return the paths in `waiting` without its path; all of them if nothing was published. With trusted
        keys nothing is repeated that ends before the copy's newest position: it may be an old rollback that
        was put back into the store. ModelHeld if a canary of the copy rejected the values; PositionUnknown,
        OverlayFull or NotFinite if they are gone or servers would refuse them; TargetBusy, VerificationError,
        CheckpointError or PublishError if the copy is locked, damaged or cannot be written.
        """
        if not (self.here and self._taken_back):
            return waiting
        from exporter.pipeline.log_maintenance import repeat  # late: most pulls publish nothing themselves

        log = max(self.here.values(), key=lambda item: item.order).log_path
        own = Hold(self._model / log).decided().own
        reach = None if own is None else own.reach
        item = to_repeat(self.here, self._stored.items, self._taken_back, reach)
        if item is None or not isinstance(entry := item.manifest.incremental, DeltaEntry):
            return waiting
        newest = max(each.manifest.position for each in self.here.values())
        if self._trust is not None and item.manifest.position < newest:
            return waiting
        held = self._stored_hold(f"{log}/{HOLD_FILE}")
        if held is not None and held.position != item.manifest.position:
            held = None
        path = repeat(self._model, restored(item) or 0, entry.made, held)
        if path is None:
            return waiting
        made = local_item(self._model, path)
        self.here[made.path] = made
        self._repeated = made.path
        return tuple(each for each in waiting if each != item.path)

    def plan(self, head: Head | None, *, prune: bool) -> Pulled:
        """Return what `run` would return now, without a change on disk.

        It changes this object: do not call `run` afterwards. `head` is the store's, None without one. With
        `prune`, the result has what would be removed. PositionMoved, ForeignLineage and NotTrusted as `run`;
        VerificationError or CheckpointError if a killed pull left a damaged index; ManifestError if the file
        of remembered heads is damaged; OSError or CheckpointError if a hold of the copy cannot be read.
        """
        wanted, waiting = self._missing(head, recall(self._model, self._url))
        gone = self._superseded(is_current=self._is_current(wanted, waiting), everything=prune)
        removed = [item.path for item in gone]
        while wanted and files_of(self._stored, wanted[0]) is not None:
            item = wanted.pop(0)
            self._fetched[item.path] = item, self._foreseen(item)
            self.here[item.path] = item
        return self._done((*removed,), tuple(item.path for item in wanted), waiting)

    def _foreseen(self, item: Item) -> Spared:
        """Return how many bytes of a publication would be linked, merged here or fetched, by its manifest.

        An unsigned shard does not count as linked, because only the index tells what it holds, unless a
        killed pull has fetched the index. VerificationError or CheckpointError if that index is damaged.
        """
        passage = Passage(item, self._model / f"{PULL_PREFIX}{item.digest}")
        files = () if item.is_delta else passage.files
        linked = sum(file.bytes_ for file in files if self._lent.place(passage.content(file)) is not None)
        merged, left = _MergedHere(self._model, item, self.here, self._stored), item.bytes_ - linked
        if merged.deltas and not merged.why:
            return Spared(item.path, linked, made=left, deltas=merged.deltas)
        return Spared(item.path, linked, why_fetched=merged.why, fetched=left)

    def _is_current(self, wanted: list[Item], waiting: tuple[str, ...]) -> bool:
        """True if nothing of the store is missing here; False if a hold keeps some away, or keys are trusted.

        `wanted` are the items to be fetched, `waiting` the paths of those that have to wait.
        """
        return not (wanted or waiting or self._held or self._trust)

    def _missing(self, head: Head | None, known: Known | None) -> tuple[list[Item], tuple[str, ...]]:
        """Return the items to fetch, by `Item.order`, and the paths of other missing items that must wait.

        Items that a hold of the copy keeps away are in neither; their paths are kept. If the copy has gone on
        from the store, both are empty and `has_own` is set. `known` is the store's head as this copy
        remembers it, `head` the present one; None without one.

        Raises:
            PositionMoved: something was published here, and something else there.
            ForeignLineage: the copy has another publication at the same path.
            NotTrusted: keys are trusted, and a version that was published again here is not signed.
            OSError, CheckpointError: a hold of the copy cannot be read.
        """
        self._find_taken_back(known)
        wanted = sorted(
            (item for item in self._stored.items.values() if not self._has(item)), key=lambda item: item.order
        )
        if others := self._published_here():
            if wanted and not (head is not None and head.is_same_publication(known)):
                ours, theirs = self._model / others[0].path, f"{self._url}/{wanted[0].path}"
                raise PositionMoved(
                    f"{ours} was published here, and {theirs} elsewhere",
                    cause="neither leads on from the other",
                    hint=f"pull into a directory of its own: export-model pull {quoted(self._url)} OTHER",
                )
            self.has_own = True
            return [], ()
        coming, held, withheld = self._fitting(wanted)
        self._held = held
        led_past = [item for path, item in self._stored.items.items() if path not in held | withheld]
        return coming, tuple(
            item.path
            for item in wanted
            if item.path in withheld
            and not any(_replaces(each, item) for each in led_past)
            and repeated(item, self.here, self._stored.items) is None
        )

    def _find_taken_back(self, known: Known | None) -> None:
        """Set `own` to the rollbacks and resumptions of this copy that are not the store's, and set `last`.

        `last` is the greatest position that came from the store; -1 if none is known. A rollback that was
        found once is kept with the remembered head, `known` (None without one), because later publications of
        the store reach beyond it. NotTrusted if keys are trusted, and an unsigned version that restored
        earlier values may have come from the store.
        """
        stored = self._stored.items
        made = {path: (item, to) for path, item in self.here.items() if (to := restored(item)) is not None}
        theirs = {path for path in made.keys() & stored.keys() if _is_equal(made[path][0], stored[path])}
        self._agreed = {(self.here[path].log_path, end_of(path)): self.here[path] for path in theirs}
        self.last = max([*(position for _, position in self._agreed), *self._came(known)], default=-1)
        found = {
            path: to
            for path, (item, to) in made.items()
            if path not in theirs and self._was_made_here(item, known)
        }
        found |= {  # they are gone, and what they withhold may still come
            path: to
            for path, to in self._kept(known).items()
            if path not in self.here and any(map(TakenBack(path, to).withholds, stored.values()))
        }
        self._taken_back = [TakenBack(*each) for each in found.items()]
        for path, error in self._unsigned.items():
            if path not in found and not self.here[path].is_delta:  # it may have come by a pull without keys
                raise error

    def _came(self, known: Known | None) -> Iterator[int]:
        """Yield the positions that came from the store, as the remembered head says; none without one."""
        if known is not None:
            yield known.last
            # An upload counts once it is here: a pull may be killed before, and others upload, too.
            paths = (path for path in known.paths if path == known.path or path in self.here)
            yield from map(self._position, paths)

    def _was_made_here(self, item: Item, known: Known | None) -> bool:
        """True if a rollback or resumption that is not the store's was made in this copy, and did not come.

        Its position is then beyond `last`, unless it was found before. `known` is the remembered head.
        """
        if item.path in self._kept(known) or item.manifest.position > self.last:
            return True
        if item.path in self._unsigned and item.is_delta:
            return True
        return known is not None and known.own is None and is_of_a_canary(item)  # a release that kept nothing

    def _kept(self, known: Known | None) -> dict[str, int]:
        return {} if known is None or known.own is None else known.own

    @property
    def newest(self) -> int:
        """The greatest position in the store; ValueError if the store has no publication."""
        return max(item.manifest.position for item in self._stored.items.values())

    @property
    def own(self) -> dict[str, int]:
        """The rollbacks and resumptions made in this copy alone: the restored position, by path."""
        return {each.path: each.to for each in self._taken_back}

    def _fitting(self, wanted: Iterable[Item]) -> tuple[list[Item], set[str], set[str]]:
        """Return the wanted items that may come now, the paths of held ones, and the paths of withheld ones.

        A hold of this copy keeps the held ones away; the withheld ones do not continue what was taken back
        here. OSError or CheckpointError if a hold of the copy cannot be read.
        """
        coming, held, withheld = list[Item](), set[str](), set[str]()
        lineages = {item.manifest.lineage for item in self.here.values() if not item.is_delta}
        absent, reached = set[str | None](), dict[str, list[int]]()
        for item in self.here.values():
            reached.setdefault(item.log_path, []).append(item.manifest.position)
        for item in wanted:
            if self._is_held(item) or (item.is_delta and item.manifest.lineage in absent):
                held.add(item.path)
            elif item.path in self.here or any(
                each.withholds(item) or each.is_passed_by(item, reached.get(item.log, ()))
                for each in self._taken_back
            ):
                withheld.add(item.path)
            else:
                coming.append(item)
                reached.setdefault(item.log_path, []).append(item.manifest.position)
                continue
            if not item.is_delta and item.manifest.lineage not in lineages:
                # the deltas of a base that stays away must do so, too: nobody could load them
                absent.add(item.manifest.lineage)
        return coming, held, withheld

    def _is_held(self, item: Item) -> bool:
        """Return True if `item` is a version that servers would load past the copy's own hold.

        False for a delta, which servers do not load past a hold. OSError or CheckpointError if a hold of the
        copy cannot be read.
        """
        if item.is_delta:
            return False
        for name in local_holds(self._model, has_tags=False):
            log = name.rpartition("/")[0]
            is_same = log == item.log_path
            own = None
            if PurePosixPath(name).name == HOLD_FILE:
                own = self._own(name, Hold(self._model / log).decided())
            if own is None or (is_same and item.manifest.position <= own.position):
                continue
            if not own.canary or (is_same and self._is_led_to(item, own.position)):
                return True
        return False

    def _is_led_to(self, base: Item, position: int) -> bool:
        """True if deltas that are here or may come bring a server from `position` to the base, or beyond.

        Deltas of the copy and of the store count, except withheld ones. `position` is one in the base's log.
        """
        items = (item for each in (self.here, self._stored.items) for item in each.values())
        deltas = {item.path: item for item in items if item.log == base.log_path}.values()
        for delta in sorted(
            deltas, key=lambda item: (item.manifest.from_position or 0, -item.manifest.position)
        ):
            entry, start = delta.manifest.incremental, delta.manifest.from_position or 0
            span = Span(start, delta.manifest.position, isinstance(entry, DeltaEntry) and entry.only_from)
            if span.accepts(position) and not any(each.withholds(delta) for each in self._taken_back):
                position = span.end
        return position >= base.manifest.position

    def _done(
        self, removed: tuple[str, ...] = (), incomplete: tuple[str, ...] = (), waiting: tuple[str, ...] = ()
    ) -> Pulled:
        spared = tuple(each for _, each in self._fetched.values() if each.bytes_ or each.why_fetched)
        size = sum(each.fetched for _, each in self._fetched.values())  # not what a killed pull had fetched
        position = max((item.manifest.position for item in self.here.values()), default=None)
        return Pulled(
            (*self._fetched,),
            removed,
            incomplete,
            size,
            position,
            waiting,
            tuple(self._untrusted),
            spared=spared,
            way_on=self._way_on(waiting) if waiting else "",
            repeated=self._repeated,
        )

    def _way_on(self, waiting: Iterable[str]) -> str:
        """Return the shell command after which this copy gets past the publications in `waiting`.

        If the copy's own hold keeps a version away that leads past all of them, the command lifts that hold;
        otherwise it merges in the store. "" if none helps yet: the store is held, not by a canary, and only a
        merged base would help; or it has nothing beyond what was taken back here.
        """
        stored = self._stored.items
        bases = (stored[path] for path in self._held if not stored[path].is_delta)
        if any(all(_replaces(base, stored[path]) for path in waiting) for base in bases):
            owns = (Hold(log).decided().own for log in log_directories(self._model))
            return next((_typed(*own.lifting(self._model)) for own in owns if own is not None), "")
        try:
            words = way_on(stored.values(), self._taken_back)
        except LookupError:
            return ""
        holds = (self._stored_hold(name) for name in self._stored.holds if name.endswith(HOLD_FILE))
        if words and any(by is not None and not by.canary for by in holds):
            return ""  # of a model that is held no base is published
        return _typed("export-model", "merge", str(self._url), *words)

    def _require_trusted(self, trust: Trust) -> None:
        """Refuse a copy that contains a publication which no trusted key has signed, with two exceptions.

        Accepted are rollbacks and resumptions made here, which are noted in `_unsigned`, and publications up
        to the store's newest trusted version, because servers leave them when they load that version.

        Raises:
            NotTrusted: there is another one.
            UsageError: a file of keys cannot be read.
        """
        bases = (path for path, item in self._stored.items.items() if not item.is_delta)
        newest = max(map(end_of, bases), default=-1)
        for path, item in self.here.items():
            try:
                trust.check(item.content, path, self._model / path)
            except NotTrusted as error:
                if end_of(path) <= newest:
                    continue
                error.cause = f"it was here before this pull{f'; {error.cause}' if error.cause else ''}"
                error.hint = f"pull into a directory of its own, or remove {self._model}"
                if not is_restoration(item):
                    raise
                self._unsigned[path] = error

    def _leave_untrusted(self) -> None:
        """Drop from the listing tags, deltas whose log has no trusted base, and holds that move servers back.

        Each such hold is noted as not trusted. OSError or CheckpointError if a hold of the copy cannot be
        read.
        """
        items, here = self._stored.items, local_holds(self._model, has_tags=False)
        bases = (item for each in (items, self.here) for item in each.values() if not item.is_delta)
        logs = {item.manifest.lineage for item in bases}
        items = {
            path: item for path, item in items.items() if not item.is_delta or item.manifest.lineage in logs
        }
        holds = dict(self._stored.holds)
        holds.pop(TAGS_FILE, None)  # which nobody signs
        for name in [name for name in holds if PurePosixPath(name).name == HOLD_FILE]:
            least, position = self._least_hold(name, here.get(name)), position_in(holds[name])
            if here.get(name) == holds[name] or (position is not None and position >= least):
                continue
            log = name.rpartition("/")[0]
            if self._repeated_at(log, position) is not None:
                continue  # servers are held where its values were published again
            self._refused.add(name)
            ends = (item for item in items.values() if item.log == log and item.manifest.position == position)
            back = next((each for each in map(restored, ends) if each is not None), position)
            self._untrusted.append(self._leads_back(name, position, least, back))
        self._stored = replace(self._stored, items=items, holds=holds)

    def _leads_back(self, name: str, position: int | None, least: int, back: int | None) -> NotTrusted:
        """Return the error for the store's hold `name`, at `position`, of a copy that is at `least`.

        `back` is the position to which it would lead; None: it is not known.
        """
        said = "no position" if position is None else f"position {position}"
        to = "POSITION" if back is None else back
        return NotTrusted(
            f"{self._url}/{name} says {said}, and {self._model} is at {least}",
            cause="a hold is not signed: it is not taken where it would lead back",
            hint=f"to go back, publish that: export-model rollback {quoted(self._url)} --to {quoted(to)}",
        )

    def _least_hold(self, name: str, here: bytes | None) -> int:
        """Return the least position that a hold may state without moving a server of this copy back; -1: any.

        `name` is the path of the hold's number, `here` the bytes of the copy's number (None: no hold).
        """
        log = name.rpartition("/")[0]
        newest = max((item.manifest.position for item in self.here.values() if item.log == log), default=-1)
        held = None if here is None else position_in(here)
        return newest if held is None else min(newest, held)

    def _published_here(self) -> list[Item]:
        """Return the items that were published in this copy and that the store does not have.

        Mergers, rollbacks and resumptions do not count. The items are beyond the greatest position that came
        from the store (`last`). Empty with trusted keys: a signed item is the publisher's, whatever was
        removed from the store.
        """
        if self._trust is not None:
            return []
        gone = (item for path, item in self.here.items() if path not in self._stored.items)
        beyond = (item for item in gone if item.manifest.position > self.last)
        return [item for item in beyond if item.path not in self.own and not is_merger(item)]

    def _position(self, path: str) -> int:
        """The position that the publication at `path` reaches; -1 if it is gone, and was not a delta."""
        item = self.here.get(path) or self._stored.items.get(path)
        if item is not None:
            return item.manifest.position
        return int(path.rpartition("-")[2]) if "-" in path else -1

    def _fetch(self, wanted: list[Item], progress: ProgressFactory) -> tuple[str, ...]:
        """Fetch the `wanted` items and publish them in the copy, until one is incomplete in the store.

        Return the paths of the items that were not fetched. `wanted` is sorted by `Item.order`. Holds of the
        store are set first, and remains of killed pulls removed. `progress` makes the bar for bytes fetched.

        Raises:
            PublicationDamaged: the next item is damaged, and none replaces it.
            CheckpointChanged: the copy was rolled back, or published to, meanwhile.
            ManifestError: the file of remembered heads is damaged.
            TargetBusy: an exporter holds the lock of the copy.
            CheckpointError, PublishError: the store cannot be read, or the copy cannot be written.
        """
        self._sweep({item.digest for item in wanted})
        # before anything that they hold back can be seen
        self._set_holds(wanted)
        whole = dict[str, dict[str, RemoteObject]]()
        for item in wanted:
            files = files_of(self._stored, item)
            if files is not None:
                whole[item.path] = files
            # and nothing after it: servers would list a gap
            elif not self._passes_by(item, wanted):
                break
        coming = [item for item in wanted if item.path in whole]
        left = [item for item in wanted if item.path not in whole and item.path not in self.passed_by]
        size = sum(item.bytes_ for item in wanted)
        had_base = any(not item.is_delta for item in self.here.values())
        with progress("fetching", size) as bar, self._ahead(coming, whole, bar, progress) as staged:
            # published in order, whatever was fetched first: servers must never list a gap
            for item in coming:
                if item.path in self.passed_by:
                    continue
                try:
                    path, spared = staged(item)
                except PublicationDamaged:
                    if not self._passes_by(item, wanted):
                        raise
                    continue
                self._announce(item)  # first: a pull that ends here must not take it for published here
                self._publish(item, path)
                self.here[item.path] = item
                self.last = max(self.last, item.manifest.position)
                self._lent.add_version(item)
                self._fetched[item.path] = item, spared
                if not item.is_delta and had_base:  # a new copy has nothing to merge
                    note(self._model, spared)
        return tuple(item.path for item in left)

    def _passes_by(self, item: Item, wanted: Iterable[Item]) -> bool:
        """Skip a damaged item, and the `wanted` deltas that need it, if the store has a replacement.

        Return True then; False if the store has none. The skipped paths are added to `passed_by`. A
        replacement is a later base, or a merger that begins no later and ends no earlier.
        """
        stored = self._stored.items.values()
        instead = min(
            (each for each in stored if each.path != item.path and _replaces(each, item)),
            key=lambda each: each.order,
            default=None,
        )
        if instead is None:
            return False
        self.passed_by |= {item.path} | {
            each.path
            for each in wanted
            if each.log == item.log and item.order < each.order < instead.order and not _replaces(each, item)
        }
        return True

    @contextmanager
    def _ahead(
        self,
        items: list[Item],
        whole: dict[str, dict[str, RemoteObject]],
        bar: Progress,
        progress: ProgressFactory,
    ) -> Iterator[Callable[[Item], tuple[Path, Spared]]]:
        """Fetch small publications in parallel during the block; yield a function that waits for one of them.

        That function takes an item, waits until it is fetched or fetches it, and returns and raises as
        `_staged`. `whole` has, by the item's path, its objects by the paths of its files. `bar` advances by
        the bytes fetched; `progress` makes bars for merged bases. Requests have latency, and a copy may be a
        thousand deltas behind; most deltas are small. Large publications are fetched in parts instead.
        """
        with workers(_AHEAD, "ahead") as pool:
            tasks = {
                item.path: pool.submit(self._staged, item, whole[item.path], bar, progress)
                for item in items
                if item.bytes_ <= PART_BYTES
                and item.manifest.merged_from is None  # which needs its parts here
            }

            def staged(item: Item) -> tuple[Path, Spared]:
                task = tasks.get(item.path)
                if task is None:
                    return self._staged(item, whole[item.path], bar, progress)
                return task.result()

            yield staged

    def _has(self, item: Item) -> bool:
        ours = self.here.get(item.path)
        if ours is None or ours.path in self.own:
            return False
        if not _is_equal(ours, item):
            raise ForeignLineage(
                f"{self._model / item.path} is another publication than {self._url}/{item.path}",
                hint=f"pull into another directory, or remove {self._model}: servers load it again then",
            )
        return True

    def _announce(self, item: Item) -> None:
        """Record beside the copy that `item` came from the store, also for when the store has removed it.

        ManifestError if the file of remembered heads is damaged, PublishError or a subclass if it cannot be
        written.
        """
        head = recall(self._model, self._url) or Head()
        if (coming := head.uploading) is not None and coming.path in self.here:
            head = Head(coming.path, coming.manifest, None, head.holds, head.hold_documents, head.tags)
        head = replace(head, uploading=Upload(item.path, item.digest, ""))
        remember(self._model, self._url, head, self.own, self.last)

    def _sweep(self, wanted: set[str]) -> None:
        """Remove the remains of killed pulls, except of publications whose manifest's SHA-256 is in `wanted`.

        Errors are ignored.
        """
        for left in self._model.glob(f"{PULL_PREFIX}*"):
            if left.name.removeprefix(PULL_PREFIX).removesuffix(PULL_JOBS_SUFFIX) not in wanted:
                remove_tree(left)

    def _staged(
        self, item: Item, files: dict[str, RemoteObject], bar: Progress, progress: ProgressFactory
    ) -> tuple[Path, Spared]:
        """Fetch a publication into a hidden directory of the copy, and check all of it.

        Return the directory, and how many bytes were linked, merged here or fetched. Whole files from a
        killed pull are not fetched again. `files` has the item's objects by the paths of its files; `bar`
        advances by its bytes, and `progress` makes the bars of a merger.

        Raises:
            PublicationDamaged: the store's files differ from the manifest. This is remembered, and raised at
                once the next time, until the objects change.
            CheckpointError, PublishError: the store cannot be read, or the copy cannot be written.
        """
        # by the manifest's digest: files of a killed pull serve the same publication alone
        staged = self._model / f"{PULL_PREFIX}{item.digest}"
        objects = frozenset(files.values())
        if objects in self._damaged:
            raise self._damage_of(item, self._damaged[objects])
        with writing(staged):
            try:
                merged = _MergedHere(self._model, item, self.here, self._stored, self.workers, progress)
                spared = self._fill(item, staged, files, bar, merged)
            except _DAMAGE as error:
                remove_tree(staged)  # to be fetched again
                said = self._damaged[objects] = error.message.replace(str(staged), f"{self._url}/{item.path}")
                raise self._damage_of(item, said) from error
            # last: with it the directory is a publication
            write_durably(staged / MANIFEST_FILE, item.content)
            sync(staged)
        return staged, spared

    def _require_sizes(self, item: Item) -> None:
        """Raise PublicationDamaged if an object of `item` has another size than its manifest says.

        A missing object is no error, because it may still come.
        """
        for file in item.manifest.files:
            each = self._stored.objects.get(f"{item.path}/{file.path}")
            if each is not None and each.size != file.bytes_:
                place = f"{self._url}/{item.path}/{file.path}"
                raise self._damage_of(item, f"{place} has {each.size} bytes, expected {file.bytes_}")

    def _damage_of(self, item: Item, why: str) -> PublicationDamaged:
        return PublicationDamaged(
            f"publication {item.manifest.position} is damaged in the store",
            cause=why,
            hint=f"what to publish in its place: export-model doctor {quoted(self._url)}",
        )

    def _fill(
        self,
        item: Item,
        staged: Path,
        files: dict[str, RemoteObject],
        bar: Progress,
        merged: _MergedHere,
    ) -> Spared:
        """Bring the missing files of `item` into the directory `staged`, and compare all with the manifest.

        Return how many bytes were linked, merged here and fetched, without the files that a killed pull left
        whole; `bar` advances by them. A file comes from a version that is here, from a merger made here
        (`merged`), or from the store: `files` has the objects by the files' paths. A file that is in `staged`
        already, or did not come from the store, is fetched if it differs from the manifest. All other files
        in `staged` are removed.

        Raises:
            VerificationError, CheckpointError: a fetched file differs, or cannot be fetched.
            PublishError, OSError: the copy cannot be written; DiskFull, before anything is fetched, if there
                is no room for it.
        """
        passage, said = Passage(item, staged), f"{self._url}/{item.path}/{MANIFEST_FILE}: the file"
        places = {file: below(staged, file.path, said, writes=True) for file in passage.files}
        _remove_others(staged, {*places.values()})  # halves of files, which may not be fetched now
        linked, made, fetched = set[FileEntry](), set[FileEntry](), set[FileEntry]()

        def fetch(wanted: Sequence[FileEntry]) -> None:
            _require_room(staged, sum(file.bytes_ for file in wanted))
            for file in wanted:
                make_directories(places[file].parent)
                self._get(files[file.path], places[file], bar, passage.noting(file))
                passage.check_file(file)
                fetched.add(file)

        with merged:
            for is_shard in (False, True):  # the index first: it says what the shards hold
                coming = [file for file in passage.files if (file.crc32c is None) is is_shard]
                missing = [file for file in coming if not _is_there(places[file], files[file.path])]
                for file in () if item.is_delta else missing:
                    if self._lent.lend(passage.content(file), places[file]):
                        linked.add(file)
                    elif merged.give(file, places[file]):
                        made.add(file)
                    else:
                        continue
                    bar.advance(file.bytes_)
                fetch([file for file in missing if file not in linked | made])
                alone = [file for file in coming if file not in fetched]
                # all at once, which is fast; if that fails, one by one, to find the file that differs
                with suppress(*_DAMAGE, EngineFailed):
                    passage.compare(alone, merged.runner)
                    alone = []
                for file in alone:  # one of them differs, or nobody compared
                    try:
                        passage.compare([file])
                    except _DAMAGE as error:
                        if file in made:
                            merged.why = f"what was merged here differs: {error.message}"
                        for own in (linked, made):
                            own.discard(file)
                        places[file].unlink()
                        fetch([file])
        passage.check_files()
        passage.check_values()
        passage.check_digests()  # of the local files, because servers will read these
        return Spared(
            item.path,
            linked=sum(file.bytes_ for file in linked),
            made=sum(file.bytes_ for file in made),
            deltas=merged.deltas if made else 0,
            why_fetched=merged.why,
            fetched=sum(file.bytes_ for file in fetched),
        )

    def _get(
        self, each: RemoteObject, path: Path, bar: Progress, note: Callable[[int, memoryview], None]
    ) -> None:
        """Fetch an object into the file `path`, which appears once it is whole and on disk.

        Threads call `note` with the offset and bytes of each part; `bar` advances by their number.
        CheckpointError if the object cannot be fetched, OSError or PublishError if the file cannot be
        written.
        """
        # hidden, and under another name than a whole file's
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as opened:
            self._store.copy(each, opened.fileno(), [(0, each.size, 0)], path, bar.advance, note)
            opened.flush()
            # before the rename: the next pull takes a file of this name and size for a whole one
            os.fsync(opened.fileno())
        part.replace(path)
        sync(path.parent)

    def _clear_way(self, item: Item) -> None:
        """Remove this copy's own mergers that span the store's rollback or resumption `item`.

        They begin before the position at which it begins, and end after that position: they have values that
        it takes back. Does nothing for other items. OSError if one cannot be moved, BlockingIOError if a
        reader has a lease on it.
        """
        start = item.manifest.from_position
        if start is None or not is_restoration(item):
            return
        for path, each in [*self.here.items()]:
            begin, is_own = each.manifest.from_position, path not in self._stored.items and is_merger(each)
            if is_own and begin is not None and each.log == item.log and begin < start < end_of(path):
                remove_tree(move_away(self._model / path, self._model))
                del self.here[path]

    def _publish(self, item: Item, staged: Path) -> None:
        target = self._model / item.path
        with writing(target), Staging(self._model) as staging, model_lock(self._model):
            # again, under the lock: since the listing an agent or a person may have decided here
            if self._is_held(item) or local_paths(self._model).keys() - self.here.keys():
                raise CheckpointChanged(f"{self._model} was rolled back, or published to, during the pull")
            # before the rename: a server that lists both would go through values that were taken back
            self._clear_way(item)
            make_directories(target.parent)
            hold, brought, held = Hold(target.parent), Hold(staged).read(), None
            name = f"{item.log}/{HOLD_FILE}"
            if self._trust is not None and brought is not None:
                least = self._least_hold(name, local_holds(self._model, has_tags=False).get(name))
                # an old rollback that was put back into the store must not hold servers
                brought = brought if brought >= least else None
            both = Decided()
            entry = item.manifest.incremental
            # before the base can be seen: servers would begin beyond what the canary judges first
            if self.holds_new_logs and isinstance(entry, BaseEntry):
                log = Hold(log_path(self._model, entry.log))
                bases = (each.manifest.lineage for each in self.here.values() if not each.is_delta)
                if item.manifest.lineage not in bases:  # else servers follow it, and the canary has begun
                    log.put(item.manifest.position, staging, canary=True, why="the base is judged first")
            if brought is not None:
                stored = self._stored_hold(name)
                if stored is None or stored.position != brought:
                    stored = HeldBy(brought, "", item.manifest.created, url=str(self._url))
                stored = replace(stored, values_of=self._values_of({item.path: item}, item.log, brought))
                both = Decided(self._own(name, hold.decided())).following(stored)
                # as in `commit.publish_delta`: with one rename the delta is seen, and the hold is read
                if both.in_force is stored:
                    hold.announce_both(both, staging)
                    held = hold.prepare(brought, staging)
                    hold.promise(target.name, held, staging)
            os.rename(staged, target)  # noqa: PTH104  the commit: one call, in plain sight
            sync(target.parent)
            if held is not None:
                hold.settle(held)
            # only now: the copy's own hold, the lower one, is in force before and after
            elif both.stored is not None:
                hold.set(both, staging)

    def _set_holds(self, coming: Iterable[Item] = ()) -> None:
        """Set the store's holds beside the copy's own, except holds that deltas in `coming` contain.

        Those are set when the delta is published. TargetBusy, PublishError or a subclass if a hold cannot be
        set; ManifestError if the file of remembered heads is damaged, or a hold's name is not a path below
        the model.
        """
        brought = {(item.hold, item.manifest.position) for item in coming if item.hold is not None}
        for name, content in self._stored.holds.items():
            if PurePosixPath(name).name != HOLD_FILE or name in self._refused:
                continue
            if (name, position_in(content)) not in brought:
                self._set_hold(name, content)

    def _set_hold(self, name: str, content: bytes | None) -> None:
        """Set the store's hold beside the copy's own; remove the store's hold if `content` is None.

        `content` has the bytes of its number, `name` is the path of the number below the model. Writes under
        the model's lock, and only if anything changes: TargetBusy, PublishError or a subclass if it cannot.
        ManifestError if `name` is not a path below the model, or the file of remembered heads is damaged.
        """
        hold = Hold((self._model / name).parent)
        if self._both(name, hold, content) is None:
            return
        below(self._model, name, f"{self._url}: the hold")
        with writing(hold.path), Staging(self._model) as staging, model_lock(self._model):
            if (found := self._both(name, hold, content)) is not None:  # the copy's own may have changed
                after, unreadable = found
                hold.set(after, staging, unreadable)

    def _both(self, name: str, hold: Hold, content: bytes | None) -> tuple[Decided, bytes | None] | None:
        """Return the copy's and the store's hold as they should be set; None if nothing has to change.

        With them come the bytes of the store's number if it states no position, else None. `content` is the
        store's number, None without one; `name` is its path below the model, `hold` the hold there.
        ManifestError if the file of remembered heads is damaged.
        """
        before, stored = hold.decided(), self._stored_hold(name)
        own = self._own(name, before)
        if stored is not None and own is not None and not own.canary and _is_same(own, stored):
            return None  # it was pushed from here
        after = Decided(own).following(stored)
        if content is not None and stored is None:
            return None if hold.content() == content else (after, content)
        is_so = after == before and (after.in_force is not None or not hold.is_set)
        return None if is_so else (after, None)

    def _stored_hold(self, name: str) -> HeldBy | None:
        """Return the store's hold whose number is at the path `name`; None without one or without a position.

        If a delta of the copy repeats the store's rollback at that position, the result has the delta's
        position and values.
        """
        document = self._stored.holds.get(str(PurePosixPath(name).with_name(HOLD_DOCUMENT_FILE)))
        held, log = hold_in(self._stored.holds.get(name), document), name.rpartition("/")[0]
        if held is None or held.position < 0:
            return None
        unknown = HeldBy(held.position, "", _LONG_AGO, canary=held.is_canary)
        by = replace(held.by or unknown, url=str(self._url))
        if (again := self._repeated_at(log, held.position)) is not None:
            return replace(by, position=again.manifest.position, values_of=restored(again))
        there = {path: item for path, item in self.here.items() if path in self._stored.manifests}
        return replace(by, values_of=self._values_of(there, log, held.position))

    def _repeated_at(self, log: str, position: int | None) -> Item | None:
        """Return the copy's delta that repeats the store's rollback or resumption at a position of a log.

        None without one. `log` is the log's path below the model.
        """
        items = self._stored.items.values()
        ends = (item for item in items if item.log == log and item.manifest.position == position)
        return next(filter(None, (repeated(item, self.here, self._stored.items) for item in ends)), None)

    def _values_of(self, items: Mapping[str, Item], log: str, position: int) -> int | None:
        """Return the position whose values the rollback at `position` of a log restored; None without one.

        `items` are the publications, by path, among which the rollback is looked for; `log` is the log's path
        below the model. None, too, if a rollback of the copy took those values back: its canary may have
        failed them, or never have judged them.
        """
        over = [
            (entry.back_to or 0, item.manifest.position)
            for item in self.here.values()
            if isinstance(entry := item.manifest.incremental, DeltaEntry)
            and entry.made is DeltaOrigin.ROLLBACK
        ]
        for item in items.values():
            entry = item.manifest.incremental
            if item.log != log or item.manifest.position != position or not isinstance(entry, DeltaEntry):
                continue
            if entry.made is DeltaOrigin.ROLLBACK and entry.back_to is not None:
                return None if any(to < entry.back_to < end for to, end in over) else entry.back_to
        return None

    def _own(self, name: str, decided: Decided) -> HeldBy | None:
        """Return the copy's own hold; None if there is none, or if it came from the store.

        `name` is the path of its number below the model, `decided` the holds there. ManifestError if the file
        of remembered heads is damaged. In a log where something was taken back here, a hold is always the
        copy's own. Elsewhere, compared with the store's when the copy was last current:

        - a canary's hold came from the store only if the store had a canary's hold at its position, and this
          one does not say who set it (else its document also says whether it came from the store);
        - another hold that says who set it came from the store if the store had the same one; or if it is of
          a rollback that the store has made, too. In a log that a canary approves the latter is returned as a
          canary's: when the store's hold goes, the canary decides again;
        - one that does not say it, of an earlier release, came from the store if the copy has published
          nothing of its own, or if the store had a hold at its position.
        """
        own, log = decided.own, name.rpartition("/")[0]
        if own is None or any(each.log == log for each in self._taken_back):
            return own
        had = hold_in(self._had(name), self._had(str(PurePosixPath(name).with_name(HOLD_DOCUMENT_FILE))))
        is_stores = had is not None and had.position == own.position
        if own.canary:
            return None if not own.who and is_stores and had is not None and had.is_canary else own
        if own.who:
            is_theirs = had is not None and had.by is not None and _is_same(own, had.by)
            if (agreed := self._agreed.get((log, own.position))) is not None and is_of_a_canary(agreed):
                return replace(
                    own, canary=True, why=""
                )  # when the store's hold goes, the canary decides again
            return None if is_theirs or agreed is not None else own
        if not self.has_own:
            return None
        return own if recall(self._model, self._url) is None or not is_stores else None

    def _set_tags(self) -> None:
        """Copy the tags that have changed in the store; tags that have changed only here remain.

        Does nothing with trusted keys, while tags cannot be read, or while it is not known which are newer.
        Writes under the model's lock: TargetBusy, PublishError or a subclass if it cannot. ManifestError if
        the file of remembered heads is damaged.
        """
        is_unknown = self.has_own and recall(self._model, self._url) is None
        if self._trust is not None or is_unknown:  # tags are not signed; it is unknown which are older
            return
        had, theirs = self._had(TAGS_FILE), self._stored.holds.get(TAGS_FILE)
        with suppress(ManifestError):  # unreadable tags do not stop a copy from being updated
            if merged_tags(had, ours := tags_document(self._model), theirs) == ours:
                return
            with (
                writing(self._model),
                model_lock(self._model),
            ):  # under the lock: a command that sets a tag has read the others
                merged = merged_tags(had, tags_document(self._model), theirs)
                if merged is None:
                    (self._model / TAGS_FILE).unlink(missing_ok=True)
                else:
                    self._replace(TAGS_FILE, merged)

    def _replace(self, name: str, content: bytes) -> None:
        path = below(self._model, name, f"{self._url}: the hold")
        with writing(path), Staging(self._model) as staging:
            make_directories(path.parent)
            new = staging.path.with_name(HOLD_FILE)
            write_durably(new, content)
            new.replace(path)
            sync(path.parent)

    def _settle_holds(self) -> None:
        """Set the store's holds and tags, and lift the holds that the store has lifted.

        A canary's hold is lifted only if the store had the same canary's hold: any other was set by an agent
        here. TargetBusy, PublishError or a subclass if a file cannot be written; ManifestError if the file of
        remembered heads is damaged; OSError or CheckpointError if a hold of the copy cannot be read.
        """
        self._set_holds()
        self._set_tags()
        for name in local_holds(self._model, has_tags=False).keys() - self._stored.holds.keys():
            if PurePosixPath(name).name == HOLD_FILE:  # a document is removed with its number
                self._set_hold(name, None)

    def _had(self, name: str) -> bytes | None:
        """Return the content of a file of holds or tags in the head that this copy remembers of the store.

        `name` is its path below the model. None if that head has no such file, or no head is remembered.
        ManifestError if the file of remembered heads is damaged.
        """
        known = recall(self._model, self._url)
        return None if known is None else (known.hold_files or {}).get(name)

    def _superseded(self, *, is_current: bool, everything: bool) -> list[Item]:
        """Return the items that `superseded` returns, by `Item.order`, without items that tags need.

        Unless `everything`, only versions that a rollback or resumption published again here. `is_current`
        tells that the copy has all that the store has. OSError if a manifest here cannot be looked at.
        """
        gone = superseded(self._model, self.here, self._stored.items.keys(), is_current=is_current)
        gone = [item for item in gone if everything or (item.path in self.own and not item.is_delta)]
        tagged = self._tagged() if gone else set()
        return [item for item in gone if item.path not in tagged]

    def _prune(self, *, is_current: bool, everything: bool) -> tuple[str, ...]:
        removed = []
        with writing(self._model):
            for item in self._superseded(is_current=is_current, everything=everything):
                with suppress(OSError):  # a reader has a lease on it: the next update tries again
                    remove_tree(move_away(self._model / item.path, self._model))
                    del self.here[item.path]
                    removed.append(item.path)
        return tuple(removed)

    def _tagged(self) -> set[str]:
        """Return the paths of the publications that tags of this copy need; none with trusted keys.

        All of them while the copy's tags cannot be read.
        """
        if self._trust is not None:
            return set()  # tags are not signed: they protect no position
        try:
            tags = read_tags(self._model)
        except ManifestError:
            return {*self.here}
        bases, needed = tagged_versions(version_dirs(self._model) if tags else (), tags), set[str]()
        for position in {tag.position for tag in tags.values()}:
            first = max((base for base in bases if base <= position), default=position)
            for path, item in self.here.items():
                end, start = item.manifest.position, item.manifest.from_position
                if first <= (end if start is None else start) and end <= position:
                    needed.add(path)
        return needed


class _MergedHere(ExitStack):
    """The files of a merged base, merged from its parts in this copy when the first file is asked for.

    `why` is the reason, for people, if the base cannot be merged here, or a file differs; "" otherwise, and
    for an item that is not a merged base. `deltas` is the number of deltas among the parts. The end of the
    block removes the files that were not given out.
    """

    def __init__(
        self,
        model: Path,
        item: Item,
        here: Mapping[str, Item],
        stored: StoredItems,
        workers: int = 0,
        progress: ProgressFactory = no_progress,
    ) -> None:
        super().__init__()
        self._model, self._item, self._workers, self._progress = model, item, workers, progress
        self._kept = model / f"{PULL_PREFIX}{item.digest}{PULL_JOBS_SUFFIX}"
        self._bundle: Path | None = None
        record = item.manifest.merged_from
        parts = () if record is None else record.parts
        self.deltas = max(0, len(parts) - 1)
        self.why = next((why for part in parts if (why := _why_not(part, here.get(part.path), stored))), "")
        self._is_tried = record is None or bool(self.why)

    def give(self, file: FileEntry, path: Path) -> bool:
        """Move a file of the merged base to `path`, which is replaced if it exists; return True then.

        False if the merged base has no such file of this size, or cannot be made here: `why` is set then. The
        first call merges the base, which may take long.

        Raises:
            DiskFull: there is no room for the base.
            OSError, PublishError: the file cannot be moved.
        """
        if not self._is_tried:
            self._is_tried = True
            self._bundle = self._made()
        if self._bundle is None or not _has_size(source := self._bundle / file.path, file.bytes_):
            return False
        make_directories(path.parent)
        # as `commit.seal` does it: servers run as other users
        source.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o666)
        sync(source)
        source.replace(path)
        sync(path.parent)
        return True

    def _made(self) -> Path | None:
        from exporter.pipeline.merged_base import write_again

        for left in self._kept.glob(f"*/{NEW_PREFIX}*"):  # of tasks that were killed
            left.unlink(missing_ok=True)
        outputs = self._kept.glob("*/*.data-*")  # of a pull that was killed, or found no room
        _require_room(self._kept, self._item.bytes_ - sum(path.stat().st_size for path in outputs))
        staging = self.enter_context(Staging(self._model))
        try:
            write_again(self._model, self._item.manifest, staging.path, self._runner, self._progress)
        except DiskFull:
            raise  # what was made is kept
        except Exception as error:  # noqa: BLE001 - whatever local files do to the merger, the store has the base
            self.why = f"it cannot be merged here: {error}"
            remove_tree(self._kept)
            return None
        remove_tree(self._kept)
        return staging.path

    @property
    def runner(self) -> Runner | None:
        """The runner whose tasks read the merged files again, at idle priority; None if none were merged."""
        return None if self._bundle is None else replace(self._runner(0), kept="")

    def _runner(self, tasks: int) -> Runner:
        """Return the runner of the merger's tasks; their number is not used.

        Its job is kept on disk, so that the pull after one that was killed goes on with it.
        """
        from exporter.jobs.engines.process import Asked, ProcessEngine

        assert self._item.manifest.merged_from is not None
        size = self._item.manifest.merged_from.task_bytes
        return Runner(ProcessEngine(Asked("idle", self._workers)), size, os.fspath(self._kept))


def _why_not(part: MergedPart, ours: Item | None, stored: StoredItems) -> str:
    """Return the reason why a copy cannot merge a part of a base; "" if it can.

    `ours` is the copy's publication at the part's path, None without one; `stored` is the store's model.
    """
    if ours is None:
        return f"this copy lacks {part.path}{'' if part.path in stored.items else ', as does the store'}"
    return "" if ours.digest == part.manifest else f"{part.path} is another publication here"


def _has_size(path: Path, size: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _is_same(own: HeldBy, stored: HeldBy) -> bool:
    """True if two holds have one position, setter and time: then `own` was pushed, or `stored` pulled."""
    return (own.position, own.who, own.when) == (stored.position, stored.who, stored.when)


_DAMAGE = (VerificationError, CorruptFile, MissingShard, TruncatedFile, UnsupportedFormat)
"""What reading a publication raises whose files are not those of its manifest."""


def _typed(*words: str) -> str:
    return " ".join(map(quoted, words))


def _remove_others(directory: Path, kept: Container[Path]) -> None:
    """Remove all files and links at any depth of a directory, except the paths to keep."""
    for path in [*directory.rglob("*")]:
        if path not in kept and (path.is_symlink() or not path.is_dir()):
            path.unlink()


def _is_there(path: Path, each: RemoteObject) -> bool:
    return path.is_file() and path.stat().st_size == each.size


def _require_room(staged: Path, size: int) -> None:
    """Raise DiskFull if `size` bytes have no room beside the directory `staged`, before anything is fetched.

    A continuous pull would otherwise fetch the same bytes at each update. OSError if the parent of `staged`
    does not exist.
    """
    free = shutil.disk_usage(staged.parent).free
    if size > free:
        raise DiskFull(
            f"no space left to fetch into {staged.parent}",
            cause=f"{human_bytes(size)} are needed, and {human_bytes(free)} are free",
            hint="free space, or keep fewer versions where they are published (--keep)",
        )


def _is_equal(ours: Item, item: Item) -> bool:
    """True if the copy's publication `ours` can stand for the store's `item` at the same path.

    They have the same manifest; or `ours` is a rollback or a resumption with the same files, whose reason and
    time alone differ; or it is a merger in the same lineage, which has the values of its last part, however
    its files divide them.
    """
    if is_restoration(ours) and files_digest(ours.manifest) == files_digest(item.manifest):
        return True
    is_same_merger = is_merger(ours) and ours.manifest.lineage == item.manifest.lineage
    return is_same_merger or ours.digest == item.digest

"""A model in an object store, opened as a private local directory for one command or watch.

A local file of the right size represents each published file, and its bytes are fetched when they are read;
manifests and holds are fetched at once. The changes that a command makes under that path are then the
difference to the state shown before, and exactly these are uploaded to the store. Locks, leases and retention
work on the local path as for any model; between machines, the head decides (see `exporter.transfer.head`).

Two caches of the exporter are uploaded with a model, because without them every row would be compared: the
values of rows that were held back, and the hashes of rows. Everything else that is private to a directory is
made anew. Caches are not signed: where keys are trusted, none is read from a store, nor uploaded. Then a
watch keeps its own, and a command compares all rows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from exporter.errors import (
    CheckpointChanged,
    ExportError,
    ManifestError,
    ModelHeld,
    NothingChanged,
    PositionMoved,
    PublishError,
)
from exporter.jobs.runner import StoredJob, remove_abandoned
from exporter.publish.hold import hold_in
from exporter.publish.versions import is_trusting
from exporter.storage import mirror
from exporter.storage.files import below, make_directories, remove_tree, writing
from exporter.storage.layout import (
    CACHES_DIRECTORY,
    DELTAS_DIRECTORY,
    HASHES_DIRECTORY,
    HOLD_DOCUMENT_FILE,
    HOLD_FILE,
    JOBS_DIRECTORY,
    MANIFEST_FILE,
    OVERLAID_PREFIX,
    RESIDUAL_PREFIX,
    TAKEN_FILE,
)
from exporter.storage.mirror import Mirror
from exporter.storage.objects import ObjectWriter, RemoteObject
from exporter.storage.url import Url
from exporter.storage.waiting import within
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.transfer.carrier import DECISION_SECONDS, FAREWELL_SECONDS, WAIT_SECONDS, Carrier
from exporter.transfer.items import (
    Item,
    StoredModel,
    is_certainly,
    local_holds,
    local_item,
    local_paths,
    looking_again,
    path_of,
    read_stored,
)
from exporter.transfer.push import parse, remove_stored
from exporter.transfer.same_files import StoredFiles

T = TypeVar("T")

_LONG_GONE_SECONDS = 86400.0
_SWEEP_SECONDS = 3600.0  # a sweep lists all objects of jobs, which may be many pages
_ATTEMPTS = 3
"""How often a command does its work, at most, because another machine published meanwhile."""


class _ModelMirror(Mirror):
    """A mirror of a model that only `show` updates: the reader of a file cannot list the store again.

    No trainer removes files here: if a listed object is gone, another publisher has removed it.
    """

    is_outdated = False
    """True if a reader asked for an object that no longer exists, even if the reader ignored the error."""

    def refresh(self) -> None:
        """Do nothing: `show` updates the mirror."""

    def show(self, found: Mapping[str, RemoteObject]) -> None:
        """Make files for the objects `found`, by name, as `Mirror.show`, and clear `is_outdated`.

        Files that a failed command removed are made again. DiskFull or PublishError if a file cannot be made.
        """
        with self._lock:
            self._shown = {name: held for name, held in self._shown.items() if (self.root / name).exists()}
            super().show(found)
        self.is_outdated = False

    def require_current(self) -> None:
        """Raise PositionMoved if an object was missing or replaced when it was read since the last `show`.

        It is raised even if the reader ignored that error.
        """
        if self.is_outdated:
            raise PositionMoved(f"another machine published to {self.url} meanwhile")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Replace a CheckpointChanged of the block, which reads objects, by PositionMoved.

        `is_outdated` is set then.
        """
        try:
            yield
        except CheckpointChanged as error:
            self.is_outdated = True
            raise PositionMoved(
                f"another machine published to {self.url} meanwhile", cause=error.message
            ) from error


class RemoteModel:
    """A model in a store, and the private local directory `path` that represents it: empty until `show`.

    With `read_only` nothing is written to the store. `deciding` is the name of a person's command, which
    takes precedence over all publishers; "" for a publisher. UsageError if `url` is not that of a model in a
    store, or the library that reads stores is not installed; CheckpointError if the environment's settings
    for the store are refused; OSError if the directory cannot be made.
    """

    is_remote = True

    def __init__(self, url: str, *, read_only: bool = False, deciding: str = "") -> None:
        self.url: Url = parse(url)
        self._deciding = deciding
        self._decision = ExitStack()
        self._progress: ProgressFactory = no_progress
        self._store = ObjectWriter(self.url)
        self._carrier = Carrier(self._store)
        self._read_only = read_only
        self._stored = StoredModel({}, {}, {})
        self._own: dict[str, RemoteObject] = {}
        """Manifests in the store known to be those that this process published, by path."""
        self._is_stale = True
        self._next_sweep = 0.0
        self._mirror = _ModelMirror(self.url, is_directory=True)
        if deciding and not read_only:
            self._mirror.on_lock, self._mirror.on_hold = self._decide, self._hold
        mirror.register(self._mirror)
        self.path = self._mirror.root

    def show(self) -> None:
        """Make the local directory show the model in the store, even during another person's decision.

        Local publications that are not in the store are removed, and holds are written again. Waits up to
        75 s for another machine's upload, as `refresh`.

        Raises:
            UsageError: the URL is a version, or inside another model.
            PositionMoved: another machine's upload takes longer, or an object vanished while it was read.
            ManifestError, CheckpointError, PublishError: something is damaged, or the store or a local file
                cannot be read or written.
        """
        try:
            self.refresh()
        except ModelHeld:
            looking_again(lambda: self._show(self._carrier.listed()))

    def refresh(self) -> None:
        """Make the local directory show the model in the store now; remove local publications not uploaded.

        Only the head is read while it is unchanged, unless the directory is known to be outdated. A publisher
        waits up to 75 s for another machine's upload; `read_only` and a decision do not. Unless `read_only`,
        a publication that a killed process has committed is revealed in the store.

        Raises:
            UsageError: the URL is a version, or inside another model.
            ModelHeld: this process is a publisher, and a person's decision is in progress.
            PositionMoved: another machine's upload takes longer, or an object vanished while it was read.
            ManifestError, CheckpointError, PublishError: something is damaged, or the store or a local file
                cannot be read or written.
        """
        carrier = self._carrier
        before = carrier.head
        if self._read_only or self._deciding:  # a decision does not wait for uploads
            carrier.look()
        else:
            carrier.await_turn()
        if carrier.head == before and not self._is_stale:
            return
        self._stored = looking_again(self._shown_anew)
        self._is_stale = False

    def carry(self, work: Callable[[], T], progress: ProgressFactory = no_progress) -> T:
        """Run `work`, which may publish below `path`; upload the change, and return what `work` returned.

        The directory is refreshed first, for a decision once `work` has locked the model. Work and upload are
        done again if another machine published first: three times in all, a decision's also for 60 s. A
        decision takes precedence over all other publishers from that lock on, until the upload or an error.
        The error of `work`, or of the upload, is raised if the store has not changed, or after the last
        attempt. With `read_only` nothing is uploaded. `progress` makes the bars of waiting and uploading.

        Raises:
            PositionMoved: other machines published first each time, or an upload of theirs takes too long.
            ModelHeld: a person's decision is in progress.
            UsageError: the URL is a version, or inside another model.
            VerificationError: a published file differs from its manifest, or a manifest is damaged.
            CheckpointError, PublishError: the store cannot be read or written.
            OSError: a local file cannot be read.
        """
        self._progress, attempt = progress, 0
        deadline = time.monotonic() + (DECISION_SECONDS if self._deciding else 0.0)
        while True:
            attempt += 1
            if attempt > 1 or self._is_stale or self._read_only or not self._deciding:
                self.refresh()  # a decision looks again when it begins, under the lock
            self._is_stale = not self._read_only
            try:
                with self._withdrawn_on_failure():
                    done = work()
                if self._read_only:
                    self._mirror.require_current()
                else:
                    with self._ended_on_failure():
                        self._publish(progress)
            except NothingChanged:  # after another machine was faster, too, with the same job
                self._remove_jobs()
                raise
            except ExportError as error:
                self._is_stale = True
                is_last = attempt >= _ATTEMPTS and time.monotonic() >= deadline
                if is_last or not self._has_moved(error):
                    raise
            else:
                return done

    def _decide(self) -> None:
        """Take precedence over all publishers, and show what they have published so far.

        Does nothing if the decision is in progress already. It is called under the model's lock, and waits up
        to 75 s for other decisions. A thread renews the decision from then on. If the store cannot be shown,
        the decision is ended. ModelHeld or PositionMoved if others keep the head or an object vanished;
        UsageError if the URL is not that of a model; ManifestError, CheckpointError or PublishError if
        something is damaged, or the store ignores conditions or cannot be read or written.
        """
        if self._carrier.is_deciding:
            return
        self._carrier.probe()
        is_shown = self._carrier.decide(self._deciding, self._progress)
        # before the store is shown, which may take longer than a decision lives unrenewed
        self._decision.enter_context(self._carrier.beating())
        if is_shown:  # the store was listed after that head, and all that it names is visible
            return
        with self._ended_on_failure():
            self._stored = looking_again(self._shown_anew)

    def _hold(self) -> None:
        """Set the store's holds and tags to the local ones during a decision; do nothing without one.

        The decision goes on: a rollback's values are made after its hold. PositionMoved if another machine
        has replaced the head, ManifestError if the head or the tags are damaged, CheckpointError or
        PublishError if the store cannot be read or written, OSError if a local hold cannot be read.
        """
        if self._carrier.is_deciding:
            self._carrier.settle(local_holds(self.path), ends_decision=False)

    @contextmanager
    def _withdrawn_on_failure(self) -> Iterator[None]:
        """If the block raises, end the decision, set the store's holds to the local ones, and pass the error.

        The local holds are read after the failure: an OSError of that is raised instead. Failures of the
        store are ignored.
        """
        try:
            yield
        except BaseException as error:
            self._end_decision(error, undoes=True)
            raise

    @contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        """If the block raises, end the decision, and pass the error.

        A hold that the decision has set remains, which is the safer state. Failures of the store are ignored.
        """
        try:
            yield
        except BaseException as error:
            self._end_decision(error)
            raise

    def _end_decision(self, error: BaseException, *, undoes: bool = False) -> None:
        with suppress(ExportError):  # of it: `error` says what is wrong
            self._decision.close()
        if self._carrier.is_deciding:
            seconds = WAIT_SECONDS if isinstance(error, Exception) else FAREWELL_SECONDS
            holds = None
            with suppress(ExportError, OSError):  # holds that cannot be read stay as they are in the store
                holds = local_holds(self.path) if undoes else None
            with suppress(ExportError), within(seconds):
                self._carrier.end_decision(holds)

    @property
    def meets(self) -> tuple[str, ...]:
        """Sentences for people on each upload, decision and, for a merger, hold that a decision would meet.

        They are of the head that was last read. Empty if there is none.
        """
        head, found = self._carrier.head, list[str]()
        files = head.hold_files or {}
        if head.deciding is not None:
            found.append(f"{head.deciding.text}: it would be waited for, {WAIT_SECONDS:g} s at the most")
        if head.uploading is not None:
            then = (
                "that would go on" if self._deciding == "tag" else "that would be abandoned, and made again"
            )
            found.append(f"another machine is uploading {self.url}/{head.uploading.path}: {then}")
        for name in sorted(head.holds or {}) if self._deciding.startswith("merge") else ():
            document = f"{name.removesuffix(HOLD_FILE)}{HOLD_DOCUMENT_FILE}"
            held = hold_in(files.get(name), files.get(document))
            if held is not None:
                by = "" if held.by is None else f", {held.by.text}"
                found.append(f"{'its hold:' if held.position < 0 else 'it is held'} {held.said}{by}")
        return tuple(found)

    def close(self) -> None:
        """Remove the local directory; messages still replace its path by the URL until the process ends."""
        self._mirror.close()

    def _has_moved(self, error: ExportError) -> bool:
        """Return True if another machine's publication or removal may have caused the failure `error`.

        For a CheckpointChanged the head is read again: ManifestError or CheckpointError if that fails.
        """
        if isinstance(error, PositionMoved) or self._mirror.is_outdated:
            return True
        if not isinstance(error, CheckpointChanged):
            return False
        before = self._carrier.head  # engines' tasks ask the store themselves, of the trainer's files too
        self._carrier.look()
        return self._carrier.head != before

    def _shown_anew(self) -> StoredModel:
        stored = self._carrier.listed() if self._read_only else self._carrier.completed()
        self._show(stored)
        return stored

    def _show(self, stored: StoredModel) -> None:
        ours = set()
        for name, path in local_paths(self.path).items():
            each, manifest = stored.manifests.get(name), f"{name}/{MANIFEST_FILE}"
            is_ours = not self._mirror.has(manifest)
            if each is None or not (
                self._is_own(name, each) if is_ours else self._mirror.listed(manifest) == each
            ):
                remove_tree(path)
            elif is_ours:
                ours.add(name)
        self._mirror.show({n: each for n, each in stored.objects.items() if self._is_shown(n, stored, ours)})
        self._show_holds(self._carrier.holds_beside(stored))
        with writing(self.path):
            taken = self._carrier.taken(decides=bool(self._deciding))
            (self.path / TAKEN_FILE).write_text("".join(f"{path}\n" for path in taken))

    def _is_shown(self, name: str, stored: StoredModel, ours: set[str]) -> bool:
        """Return True if a local file is to stand for the object `name`, its key below the model.

        It is for the file of a publication in `stored`, and for a cache unless keys are trusted. `ours` are
        the paths of publications made here: an object of theirs is not shown over a file written here.
        """
        if _is_cache(name):
            return not is_trusting(self.path)
        found = path_of(name)
        return found in stored.manifests and not (found in ours and self._mirror.is_made_here(name))

    def _is_own(self, name: str, each: RemoteObject) -> bool:
        """Return True if the object `each` is the manifest of the local publication at the path `name`.

        The object is read if its tag does not tell. ManifestError if the local manifest cannot be read, or
        the object is too long; CheckpointError if the object cannot be read.
        """
        if self._own.get(name) == each:
            return True
        ours = local_item(self.path, self.path / name)
        if not is_certainly(each, ours) and read_stored(self._store, name, each) != ours.content:
            return False
        self._own[name] = each
        return True

    def _show_holds(self, holds: Mapping[str, bytes]) -> None:
        with writing(self.path):
            for name in local_holds(self.path).keys() - holds.keys():
                (self.path / name).unlink()
            for name, content in holds.items():
                path = below(self.path, name, f"{self.url}: the hold", writes=True)
                make_directories(path.parent)
                path.write_bytes(content)

    def _publish(self, progress: ProgressFactory) -> None:
        """Upload local changes since the store was shown: publications, removals, holds, tags and caches.

        It ends a decision, and removes jobs and abandoned uploads from the store. PositionMoved if another
        machine was faster; VerificationError if a local file differs from its manifest, or a manifest, the
        head or the tags are damaged; CheckpointError or PublishError if the store cannot be read or written;
        OSError if a local file cannot be read. Once the first item is published, a PositionMoved or
        PublishError of a later one ends the work without an error, and errors of the cleaning up are ignored:
        the next command repeats that work.
        """
        stored, carrier, here = self._stored, self._carrier, local_paths(self.path)
        new = [local_item(self.path, path) for name, path in here.items() if name not in stored.manifests]
        # as they were published here: a merger after its parts, though it ends where the last of them does
        new.sort(key=lambda item: (item.manifest.created, item.order))
        gone = sorted(stored.manifests.keys() - here.keys())
        holds = local_holds(self.path)
        # now: its last look at the head raises if the decision was lost, before anything is uploaded
        self._decision.close()
        if not (new or gone) and holds == carrier.shown:
            self._is_stale = False
            if carrier.is_deciding:
                carrier.end_decision()
            return
        # before the delta that they belong to: the next publisher may begin as soon as it sees that
        self._put_caches_of_next()
        is_version = any(not item.is_delta for item in new)
        same = StoredFiles(self.path, stored, self._stored_versions(here) if is_version else ())
        with progress("uploading", sum(item.bytes_ for item in new)) as bar:
            for item in new:
                try:
                    is_last = item is new[-1]
                    # until the last item the holds of both: none is lifted too early
                    held = holds if is_last else carrier.shown | holds
                    carrier.publish(self.path, item, held, bar, same, ends_decision=is_last)
                except (PositionMoved, PublishError):
                    if item is new[0]:
                        raise
                    if carrier.is_deciding:
                        carrier.end_decision()
                    return  # the requested item is published; a merger of it can wait for the next command
        self._remove_jobs()
        holds = carrier.with_tags(holds) if new else holds
        if holds != carrier.shown or not new:
            carrier.settle(holds)
        with suppress(ExportError):  # the next command does it again
            # after the head was replaced: a publisher that was slower has failed, and relies on none of these
            remove_stored(self._store, stored, *gone)
            self._put_caches()
            self._remove_given_up()

    def _stored_versions(self, here: Mapping[str, Path]) -> Iterator[Item]:
        """Yield the local versions that are also in the store, except unreadable and untrusted ones.

        `here` has the directories of local publications by path below the model.
        """
        for name, path in here.items():
            if name in self._stored.manifests and name.isdecimal():
                with suppress(ManifestError):
                    yield local_item(self.path, path)

    def _remove_jobs(self) -> None:
        """Remove the directories of jobs from the store, after their objects were copied to published places.

        Failures of the store are ignored.
        """
        for key in {each.key.rpartition("/")[0] for each in self._mirror.stand_ins}:
            self._mirror.spent.add(str(replace(self.url, path=key)))
        while self._mirror.spent:
            StoredJob(self._mirror.spent.pop(), is_begun=True).remove()

    def _put_caches_of_next(self) -> None:
        """Upload the caches, not in the store yet, from which the delta after the one to publish is made.

        Where keys are trusted, none is uploaded. PublishError if the store refuses one.
        """
        for prefix in () if is_trusting(self.path) else _WITH_STATE:
            for path in self.path.glob(f"{DELTAS_DIRECTORY}/*/{CACHES_DIRECTORY}/{prefix}*"):
                name = path.relative_to(self.path).as_posix()
                if name not in self._stored.objects:
                    self._store.upload(self.url.key(name), path)

    def _put_caches(self) -> None:
        """Upload changed hashes of rows, and delete from the store the caches that are gone locally.

        It is called after a delta is published: the hashes identify the state that they belong to. Where keys
        are trusted, they are not uploaded. Errors of the store are ignored.
        """
        with suppress(ExportError):
            for path in self.path.glob(f"{DELTAS_DIRECTORY}/*/{HASHES_DIRECTORY}"):
                name = path.relative_to(self.path).as_posix()
                if not (is_trusting(self.path) or self._mirror.has(name)):
                    self._store.upload(self.url.key(name), path)
            old = [
                name for name in self._stored.objects if _is_cache(name) and not (self.path / name).exists()
            ]
            self._store.delete(*map(self.url.key, old))

    def _remove_given_up(self) -> None:
        """Remove from the store abandoned uploads, old probes and, at most once an hour, abandoned jobs.

        A decision removes no jobs. The paths of abandoned uploads are recorded in the head, and never used
        again. PositionMoved if another machine has replaced the head, ManifestError if that head is damaged,
        CheckpointError or PublishError if the store cannot be read or written.
        """
        stored, carrier = self._stored, self._carrier
        old = [name for name, each in stored.objects.items() if _is_old_probe(name, each)]
        self._store.delete(*map(self.url.key, old))
        if time.monotonic() >= self._next_sweep and not self._deciding:
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS
            remove_abandoned(f"{self.url}/{JOBS_DIRECTORY}")
        found = {
            path: [name for name in stored.objects if name.startswith(f"{path}/")]
            for path in carrier.head.given_up
            if path not in stored.manifests
        }
        left = {path: names for path, names in found.items() if names}
        if left:
            # first: from then on not even the same files may be uploaded there, which would be deleted here
            carrier.forget(left)
            self._store.delete(*(self.url.key(name) for names in left.values() for name in names))


def _is_cache(name: str) -> bool:
    """True if the object of this name, its key below the model, is a cache that is uploaded with a model."""
    return _CACHE.fullmatch(name) is not None


_WITH_STATE = (RESIDUAL_PREFIX, OVERLAID_PREFIX)
"""The prefixes of caches whose names include their state: of rows held back, and of rows in overlays."""

_CACHE = re.compile(
    rf"{DELTAS_DIRECTORY}/[0-9]{{20}}/{re.escape(str(CACHES_DIRECTORY))}"
    rf"/({re.escape(HASHES_DIRECTORY.name)}|({'|'.join(map(re.escape, _WITH_STATE))}).+)"
)


def _is_old_probe(name: str, each: RemoteObject) -> bool:
    """Return True for a test object (`.probe-*`) that is more than a day old: its process was killed.

    `name` is the object's key below the model.
    """
    return name.startswith(".probe-") and time.time() - each.modified > _LONG_GONE_SECONDS

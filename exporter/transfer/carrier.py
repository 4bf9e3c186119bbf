"""Upload publications to a store, one after another, by the protocol of `exporter.transfer.head`."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from exporter.errors import (
    CheckpointError,
    ExportError,
    ManifestError,
    ModelHeld,
    PositionMoved,
    PublishError,
)
from exporter.publish.hold import HeldBy
from exporter.publish.manifest import FileEntry
from exporter.publish.versions import MAX_MANIFEST_BYTES, lease
from exporter.storage import mirror
from exporter.storage.layout import HEAD_FILE, MANIFEST_FILE, TAGS_FILE
from exporter.storage.objects import ObjectWriter, RemoteObject, Tag, require_conditions
from exporter.storage.requests import MOST_COPIED
from exporter.storage.waiting import GivenUp, setting_if_interrupted, until, within, workers
from exporter.terminal.progress import Progress, ProgressFactory
from exporter.transfer.head import Decision, Head, Upload, fetch_head, files_digest
from exporter.transfer.items import Item, Passage, StoredModel, item_of, stored_model
from exporter.transfer.same_files import StoredFiles

BEAT_SECONDS = 10.0
"""How often (s) an upload renews the head."""
LEASE_SECONDS = 60.0
"""How long (s) an upload may leave the head unrenewed; abandoning it too early costs only its work so far."""
WAIT_SECONDS = 75.0
"""How long (s) to wait for another upload: longer than a lease, so that a killed one has expired."""
DECISION_SECONDS = 60.0
"""How long (s) a person's command tries again to take precedence over publishers."""
FAREWELL_SECONDS = 1.0
"""How long (s) an interrupted upload or decision may take to record that it is abandoned."""
_COPIES = 16  # a copy is one request, whose bytes do not pass through here
_POLL_SECONDS = 0.5  # each look is a request, which stores charge for
_UNREADABLE_HOLD = b"a rollback is being published\n"
"""Servers do not move while a hold states no position: so none loads what a rollback is about to undo."""


class Carrier:
    """A publisher to a model in a store, which replaces the head only if it is the one that was last read."""

    def __init__(self, store: ObjectWriter) -> None:
        # the owner is random: process ids of several machines repeat
        self._store, self._url, self._owner = store, store.url, secrets.token_hex(8)
        self._is_probed = False
        self._skew: float | None = None
        self.head = Head()
        self._tag: Tag | None = None
        self._tags_of_others: bytes | None = None
        self._decider = "", 0.0  # whose decision was seen last, and when it was last renewed
        self._replacing = threading.Lock()  # beats replace the head in another thread
        self.copied = 0
        """The number of bytes that the store copied, because it had them already."""
        self.shown: dict[str, bytes] = {}
        """The holds that are in the store."""

    def look(self) -> None:
        """Read the head into `head`, and note when another process's decision was last renewed.

        An absent head is read as an empty one. ManifestError if the head is damaged, CheckpointError if the
        store cannot be read.
        """
        found = fetch_head(self._store)
        # together: a beat must not send one head under the condition of another
        with self._replacing:
            self.head, self._tag = found or (Head(), None)
        deciding = self.head.deciding
        # only its own heads show that it lives: beats of an upload carry a killed one's record, too
        if deciding is not None and (deciding.owner == self.head.owner or deciding.owner != self._decider[0]):
            self._decider = deciding.owner, time.monotonic()

    def await_turn(self, is_ours: Callable[[Upload], bool] = lambda upload: False) -> None:
        """Wait until nothing is being uploaded, at most 75 s, and read the head then.

        An upload that was not renewed for 60 s, or for which `is_ours` returns True, is abandoned: the head
        is replaced. `is_ours` tells if an upload is of this process's own publications. A decision that has
        expired is removed from the head.

        Raises:
            PositionMoved: another machine's upload takes longer than that.
            ModelHeld: a person's decision is in progress; this is raised without waiting.
            ManifestError, CheckpointError, PublishError: the head is damaged, or the store cannot be read or
                written.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        self.look()
        if (other := self._other_decision()) is not None:
            raise ModelHeld(
                f"{self._url} is held while a person decides: {other.text}",
                hint="run the command again in some seconds; with --watch it goes on by itself",
            )
        while (upload := self.head.uploading) is not None:
            if is_ours(upload) or self._silence() >= LEASE_SECONDS:
                with suppress(PositionMoved):  # another machine did so first, or it was renewed after all
                    self._give_up(upload)
                    return
            if time.monotonic() >= deadline:
                raise PositionMoved(
                    f"{self._url}: {upload.path} is being published by another machine",
                    hint="run the command again when that is done",
                )
            time.sleep(_POLL_SECONDS)
            self.look()

    def decide(self, what: str, progress: ProgressFactory) -> bool:
        """Take precedence over all publishers: none of them commits anything until `end_decision`.

        Return True if nobody had replaced the head since it was last read. `what` names the person's command,
        for messages of others. Writes the decision into the head. Waits for another person's decision until
        it ends or expires, at most 75 s, and shows that with `progress`. Tries again for 60 s, because
        uploads replace the head, too. The decision expires after 60 s unless the block of `beating` renews
        it.

        Raises:
            ModelHeld: another decision takes longer than that.
            PositionMoved: other publishers replaced the head first, each time.
            ManifestError, CheckpointError, PublishError: the head is damaged, or the store cannot be read or
                written.
        """
        began, by = time.monotonic(), HeldBy.now(0)
        is_first = self._tag is not None  # the head as it was read: it is replaced only if it still is
        with progress("waiting for other publishers", 0):
            while True:
                if not is_first:
                    self.look()
                if (other := self._other_decision()) is None:
                    deciding = Decision(what, by.who, by.when, self._owner)
                    try:
                        self._replace(replace(self.head, deciding=deciding))
                    except PositionMoved:
                        if time.monotonic() >= began + DECISION_SECONDS:
                            raise
                        is_first = False
                        continue  # at once: the process that tries most often succeeds first
                    return is_first
                is_first = False
                if time.monotonic() >= began + WAIT_SECONDS:
                    raise ModelHeld(
                        f"{self._url} is held while another person decides: {other.text}",
                        hint="run the command again when that is done",
                    )
                time.sleep(_POLL_SECONDS)

    @property
    def is_deciding(self) -> bool:
        """True if this process's decision is in the head that was last read or replaced."""
        return self.head.deciding is not None and self.head.deciding.owner == self._owner

    def end_decision(self, holds: Mapping[str, bytes] | None = None) -> None:
        """End the decision of this process, so that publishers continue.

        With `holds`, the store's files of holds and tags become these, content by path below the model;
        without, they stay as the decision set them. PositionMoved if another process replaced the head
        because the decision seemed abandoned, ManifestError if the head is damaged, CheckpointError or
        PublishError if the store cannot be read or written.
        """
        head = self.head if holds is None else self.head.holding(holds)
        self._replace(replace(head, deciding=None))
        if holds is not None:
            self._show_holds()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the decision in a thread while the block runs, every `BEAT_SECONDS`.

        This also renews uploads in progress, which use the same head. Failures to renew it are ignored. If
        the block ends without an error, the head is read again: PositionMoved if another process ended the
        decision because it seemed abandoned, or if publications or holds have changed meanwhile;
        ManifestError or CheckpointError if the head is damaged or cannot be read.
        """
        with self._beating(self._decides_on):
            yield
        if not self._decides_on():
            raise PositionMoved(f"the decision about {self._url} was taken for abandoned")

    def _decides_on(self) -> bool:
        """Read the head; return True if this process's decision continues, and the model is unchanged.

        The model is the newest publication and the holds, compared with the head from before the call.
        ManifestError if the head is damaged, CheckpointError if the store cannot be read.
        """
        before = self.head
        self.look()
        return self.is_deciding and self.head.is_same_model(before)

    def _other_decision(self) -> Decision | None:
        """Return another process's decision in the head that was last read; None if there is none.

        A decision that was not renewed for 60 s has expired: it is removed from the store, and None is
        returned. ManifestError if the head is damaged, CheckpointError or PublishError if the store cannot be
        read or written.
        """
        other = self.head.deciding
        if other is None or other.owner == self._owner:
            return None
        if self._silence() < LEASE_SECONDS:
            return other
        with suppress(PositionMoved):  # another machine did so first, or it was renewed after all
            self._replace(replace(self.head, deciding=None))
        return None

    def publish(
        self,
        model: Path,
        item: Item,
        holds: Mapping[str, bytes],
        bar: Progress,
        same: StoredFiles,
        *,
        ends_decision: bool = True,
    ) -> None:
        """Publish one item of a local model: upload its files, commit it in the head with `holds`, reveal it.

        `holds` has the content of the files of holds and tags by path below the model. `bar` advances by the
        bytes of each file. Files that the store has already, which `same` finds, are copied there. Another
        machine's upload is abandoned; there can be one only if this process decides. The decision ends with
        the commit, unless `ends_decision` is False. It waits while another process decides. The first call
        tests the store, see `probe`.

        An upload that fails is abandoned. If only the reveal fails, the error says that the item is
        published.

        Raises:
            PositionMoved: another machine published or decided first, or has begun another publication at
                this path.
            ManifestError, VerificationError: the head is damaged, or the local item is being removed, or its
                files differ from its manifest; NotTrusted if keys are trusted, and none has signed it.
            UsageError: keys are trusted, and a file of keys cannot be read.
            CheckpointError, PublishError: the store cannot be read or written.
            OSError: a local file cannot be read.
        """
        self.probe()
        self._tags_of_others = None
        before = self.head
        if item.path == before.path and self._store.look(self._url.key(f"{item.path}/{MANIFEST_FILE}")):
            raise PositionMoved(f"{self._url}/{item.path} was published while the store was listed")
        upload = Upload(item.path, item.digest, files_digest(item.manifest))
        key = self._url.key(_pending(item.path, item.digest))
        if (other := before.uploading) is not None:
            before = replace(before, given_up={**before.given_up, other.path: other.files})
        if before.given_up.get(item.path, upload.files) != upload.files:
            raise PositionMoved(
                f"{self._url}/{item.path} was begun by another machine and abandoned",
                cause="it may still be written to, so that nothing else can be published there",
                hint="publish again when the model has gone on, or to a URL of its own",
            )
        self._replace(replace(before, uploading=upload))
        try:
            with self._beating(lambda: self._goes_on(upload, before)) as check:
                # before the commit: if this process is killed right after it, another one reveals this
                self._store.put(key, item.content)
                # leased, so that retention here removes nothing; closed, so that copies end with the block
                with lease(model / item.path), closing(self._put_files(model, item, same)) as sizes:
                    for size in sizes:
                        bar.advance(size)
                        check()
            self._commit(item, holds, upload, before, ends_decision=ends_decision)
        except BaseException as error:  # so that other processes need not wait until the lease expires
            seconds = WAIT_SECONDS if isinstance(error, Exception) else FAREWELL_SECONDS
            with suppress(ExportError), within(seconds):
                self._give_up_own(upload)
            raise
        try:
            self._reveal(item)
        except (PublishError, CheckpointError) as error:
            error.message = f"{self._url}/{item.path} is published, but not shown yet: {error.message}"
            error.hint = "run any command that publishes there: it shows what is published"
            raise

    def _commit(
        self, item: Item, holds: Mapping[str, bytes], upload: Upload, before: Head, *, ends_decision: bool
    ) -> None:
        """Replace the head by one that names the upload of `item` as published; first wait for decisions.

        `before` is the head from before the upload; `holds` has the content of the files of holds and tags by
        path below the model. With `ends_decision` the decision of this process ends in the same step.
        PositionMoved if another process that decided changed publications, holds, or tags that `holds`
        changes, too, or if the upload was abandoned; ManifestError if the head is damaged; CheckpointError or
        PublishError if the store cannot be read or written.
        """
        while True:
            while self._other_decision() is not None:
                time.sleep(_POLL_SECONDS)
                if not self._goes_on(upload, before):
                    raise PositionMoved(f"a person decided about {self._url} meanwhile")
            head = self.head
            # published, it is not abandoned any more
            given_up = {path: files for path, files in head.given_up.items() if path != item.path}
            done = replace(head, path=item.path, manifest=item.digest, uploading=None, given_up=given_up)
            done = replace(done, deciding=None if ends_decision else head.deciding).holding(holds)
            if head.tags != before.tags:
                if done.tags != (before.tags or ""):
                    raise PositionMoved(f"another person changed the tags of {self._url} meanwhile")
                done = replace(done, tags=head.tags)
                self._tags_of_others = (head.tags or "").encode("latin-1")
            try:
                self._replace(done)
            except PositionMoved:
                if not self._goes_on(upload, before):
                    raise
            else:
                return

    def _goes_on(self, upload: Upload, before: Head) -> bool:
        """Read the head; return True if `upload` continues, and only decisions or tags have changed.

        `before` is the head to compare with. ManifestError if the head is damaged, CheckpointError if the
        store cannot be read.
        """
        self.look()
        return self.head.uploading == upload and self.head.is_same_model(before)

    def _put_files(self, model: Path, item: Item, same: StoredFiles) -> Generator[int, None, None]:
        """Put an item's files into the store, check the bytes sent, and yield the size of each file in bytes.

        `model` is the local model. The store itself copies a file that tasks wrote there, and a file that it
        has already, as `same` tells; if such a copy of the latter fails, the file is uploaded. A copy takes
        seconds, so many are made at once. `copied` grows by the bytes of files that the store had; the files
        of a version that were uploaded are added to `same`.

        Raises, while iterating:
            VerificationError: a file differs from the manifest.
            CheckpointError, PublishError: the store cannot be read or written, or an object was replaced.
            OSError: a local file cannot be read.
        """
        passage = Passage(item, model / item.path)
        copies, sent = list[tuple[FileEntry, RemoteObject, bool]](), list[FileEntry]()
        uploaded = dict[object, RemoteObject]()

        def key(file: FileEntry) -> str:
            return self._url.key(f"{item.path}/{file.path}")

        def upload(file: FileEntry) -> None:
            path = model / item.path / file.path
            mirror.fetch(path)
            # compared as it was sent: a second reading could meet other bytes
            tag = self._store.upload(key(file), path, passage.noting(file))
            passage.check_file(file)
            sent.append(file)
            uploaded[passage.content(file)] = RemoteObject(key(file), file.bytes_, tag, 0.0)

        def copy(file: FileEntry, source: RemoteObject, *, is_only: bool) -> bool:
            try:
                self._store.duplicate(source, key(file))
            except (CheckpointError, PublishError):
                if is_only:
                    raise
                return False
            return True

        for file in passage.files:
            made = mirror.written_by_tasks(model / item.path / file.path)
            found = None if item.is_delta else same.place(passage.content(file))
            if made is not None and made.size <= MOST_COPIED:
                copies.append((file, made, True))
            elif found is not None:
                copies.append((file, found, False))
            else:
                upload(file)
                yield file.bytes_
        with workers(_COPIES, "copy") as pool:
            done = pool.map(lambda each: copy(*each[:2], is_only=each[2]), copies)
            for (file, _, is_made), is_copied in zip(copies, done, strict=True):
                if not is_copied:
                    upload(file)
                elif not is_made:
                    self.copied += file.bytes_
                yield file.bytes_
        passage.check_values(sent)
        for content, each in uploaded.items():
            # with a tag alone: without one nothing would show that another object has taken its place
            if content is not None and each.tag and not item.is_delta:
                same.add_file(content, each)

    def settle(self, holds: Mapping[str, bytes], *, ends_decision: bool = True) -> None:
        """Set the store's holds and tags to these files: `holds` has their content by path below the model.

        The head is replaced even if they are set already, so that a caller may remove published items
        afterwards. The decision of this process ends with it, unless `ends_decision` is False. PositionMoved
        if another machine has replaced the head, ManifestError if the head is damaged, CheckpointError or
        PublishError if the store cannot be read or written.
        """
        self.probe()
        head = self.head.holding(holds)
        self._replace(replace(head, deciding=None) if ends_decision else head)
        self._show_holds()

    def with_tags(self, holds: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return a copy of `holds`, in which tags that others set during the last upload replace its own.

        `holds` has the content of the files of holds and tags by path below the model.
        """
        tags = self._tags_of_others
        if tags is None:
            return dict(holds)
        others = {name: content for name, content in holds.items() if name != TAGS_FILE}
        return {**others, TAGS_FILE: tags} if tags else others

    def completed(self) -> StoredModel:
        """Return the model in the store, listed after all that the head names is visible there.

        A publication that a killed process has committed is revealed first; holds and tags of the head that
        the store does not show yet are written.

        Raises:
            ManifestError: the head is damaged, or the pending manifest is not the one that the head names.
            PositionMoved: another manifest is in its place.
            UsageError: the URL is a version, or inside another model.
            CheckpointError, PublishError: the store cannot be read or written.
        """
        found = self.listed()
        return self.listed() if self._complete(found) else found

    def listed(self) -> StoredModel:
        """Return the model in the store, listed now, and note its holds as `shown`.

        CheckpointError if the store cannot be read, UsageError if the URL is a version or inside another
        model.
        """
        found = stored_model(self._store)
        self.shown = dict(found.holds)
        return found

    def holds_beside(self, stored: StoredModel) -> Mapping[str, bytes]:
        """Return the files of holds and tags to show with a listed model, content by path below the model.

        They are the head's files, or the files listed in `stored` if the head does not mention holds. While
        the last publication is not visible yet, listed holds that the head has lifted remain, so that none is
        lifted too early for readers.
        """
        head, holds = self.head, self.head.files_beside(stored.holds)
        if holds is None:
            return stored.holds
        is_shown = _pending(head.path, head.manifest) not in stored.objects
        return holds if is_shown else {**stored.holds, **holds}

    def _complete(self, stored: StoredModel) -> bool:
        """Reveal the last publication if it is not visible yet; return True if `stored` is outdated then.

        That listing is outdated after a change here, or if another machine has just revealed the publication.

        Holds and tags of the head that the store does not show yet are written, too.

        Raises:
            ManifestError: the head is damaged, or the pending manifest is not the one that the head names.
            PositionMoved: another manifest is in its place.
            CheckpointError, PublishError: the store cannot be read or written.
        """
        head = self.head
        pending = _pending(head.path, head.manifest)
        if pending in stored.objects:
            found = self._store.fetch(self._url.key(pending), MAX_MANIFEST_BYTES)
            if found is not None:  # else another machine has revealed it since
                item = item_of(head.path, found[0], f"{self._url}/{head.path}")
                # its name has 16 digits of the digest, and anybody who writes there can give that name
                if item.digest != head.manifest:
                    raise ManifestError(
                        f"{self._url}/{pending} is not what {HEAD_FILE} says is published",
                        hint="publish to a URL of its own",
                    )
                self._reveal(item)
            return True
        return self._show_holds()

    def probe(self) -> None:
        """Test that the store obeys the conditions of writes, in the first call only.

        The test writes and removes an object. PublishError if the store ignores conditions or cannot be
        written, CheckpointError if it cannot be read.
        """
        if not self._is_probed:
            require_conditions(self._store, self._url.path)
            self._is_probed = True

    def taken(self, *, decides: bool) -> list[str]:
        """Return the paths of abandoned uploads in the head, sorted: nothing new may be published there.

        With `decides`, the path of an upload in progress counts, too: a decision abandons it.
        """
        upload = self.head.uploading if decides else None
        return sorted({*self.head.given_up, *([] if upload is None else [upload.path])})

    def forget(self, paths: Iterable[str]) -> None:
        """Record abandoned paths, below the model, in the head, so that no publisher ever uses them.

        PositionMoved if another machine has replaced the head, ManifestError if it is damaged,
        CheckpointError or PublishError if the store cannot be read or written.
        """
        self._replace(replace(self.head, given_up=self.head.given_up | dict.fromkeys(paths, "")))

    def _give_up(self, upload: Upload) -> None:
        self.probe()
        given_up = {**self.head.given_up, upload.path: upload.files}
        self._replace(replace(self.head, uploading=None, given_up=given_up))

    def _give_up_own(self, upload: Upload) -> None:
        if self.head.uploading != upload:
            return  # it was committed, or another process abandoned it
        try:
            self._give_up(upload)
        except PositionMoved:
            self.look()
            if self.head.uploading != upload:
                raise
            self._give_up(upload)  # one of our own beats, or a decision, replaced the head meanwhile

    def _silence(self) -> float:
        """Return the seconds since the head was written, by the store's clock; 0 if there is no head.

        The first call writes and removes an object, to learn the difference between the store's clock and
        this machine's. CheckpointError or PublishError if the store cannot be read or written.
        """
        if self._skew is None:
            key = self._url.key(f".probe-{self._owner}")
            self._store.put(key, b"")
            found = self._store.look(key)
            self._store.delete(key)
            # not by this machine's clock, which may be set meanwhile
            now = time.time() if found is None else found.modified
            self._skew = now - time.monotonic()
        found = self._store.look(self._url.key(HEAD_FILE))
        return 0.0 if found is None else time.monotonic() + self._skew - found.modified

    def _replace(self, head: Head | None = None) -> None:
        """Replace the store's head by `head`, if it is still the one that was last read or replaced here.

        None writes the same head again, which renews it, without another process's expired decision. The
        attributes `head` and `_tag` become those of the new one. PositionMoved if another machine has
        replaced the head, ManifestError if that head is damaged, CheckpointError or PublishError if the store
        cannot be read or written.
        """
        with self._replacing:
            self._put_head(self._alive() if head is None else head)

    def _alive(self) -> Head:
        """Return the head to renew: without another process's decision if that decision has expired.

        It has expired if it was not renewed for 60 s, as far as this process has seen. Otherwise the same
        head is returned.
        """
        deciding, (owner, lived) = self.head.deciding, self._decider
        if deciding is None or deciding.owner == self._owner or deciding.owner != owner:
            return self.head
        is_over = time.monotonic() - lived >= LEASE_SECONDS
        return replace(self.head, deciding=None) if is_over else self.head

    def _put_head(self, head: Head) -> None:
        # each head differs from all before it: where tags are digests, equal ones could not be told apart
        head = replace(head, owner=self._owner, beat=self.head.beat + 1)
        key, content = self._url.key(HEAD_FILE), head.encoded()
        if self._tag is None:
            tag = self._store.create(key, content)
        else:
            tag = self._store.replace(key, content, self._tag)
        if tag is None:
            found = fetch_head(self._store)
            if found is None or found[0] != head:  # else the response was lost, and the request repeated
                raise PositionMoved(f"another machine published to {self._url} meanwhile")
            tag = found[1]
        self.head, self._tag = head, tag

    @contextmanager
    def _beating(self, goes_on: Callable[[], bool]) -> Iterator[_Check]:
        """Renew the head in a thread while the block runs, every 10 s; yield a function that checks the head.

        That function, and the end of a block without an error, raise PositionMoved if the head was lost:
        another process replaced it, and `goes_on`, which reads it again, returned False. Other failures to
        renew it are ignored. The end of the block waits for the thread.
        """
        ended, interrupted, failure = threading.Event(), threading.Event(), list[ExportError]()

        def beat() -> None:
            with suppress(GivenUp), until(interrupted):
                while not ended.wait(BEAT_SECONDS):
                    try:
                        self._replace()
                    except PositionMoved as error:
                        try:
                            is_lost = not goes_on()
                        except ExportError:
                            continue  # as below
                        if is_lost:
                            failure.append(error)
                            return
                    except ExportError:
                        continue  # if the failure lasts, the upload itself fails

        def check() -> None:
            if failure:
                raise failure[0]

        thread = threading.Thread(target=beat, name="upload-beat", daemon=True)
        thread.start()
        try:
            with setting_if_interrupted(interrupted):
                yield check
        finally:
            ended.set()
            thread.join()
        check()

    def _reveal(self, item: Item) -> None:
        """Make `item`, the publication in the head, visible in the store, with the head's holds and tags.

        The store itself copies the pending manifest. If a suspended process resumes too late, another one has
        copied it, and the publication may have been removed again: the pending manifest is gone then, and the
        late copy does nothing.

        Raises:
            PositionMoved: another manifest is in its place.
            ManifestError: the head is damaged.
            CheckpointError, PublishError: the store cannot be read or written.
        """
        is_late = False
        for name, content in (self.head.files_beside(self.shown) or {}).items():
            is_late |= self._show_hold(name, _UNREADABLE_HOLD if name == item.hold else content)
        key = self._url.key(f"{item.path}/{MANIFEST_FILE}")
        pending = self._url.key(_pending(item.path, item.digest))
        found = self._store.fetch(key, MAX_MANIFEST_BYTES)
        if found is None:
            self._store.copy_if_there(pending, key)
        elif found[0] != item.content:
            raise PositionMoved(
                f"{self._url}/{item.path} was published by another tool meanwhile",
                cause=f"its {MANIFEST_FILE} is not what {self._url}/{HEAD_FILE} says is published",
                hint=f"remove the wrong one of {MANIFEST_FILE} and {pending.rpartition('/')[2]} there",
            )
        self._show_holds(look_first=is_late)
        self._store.delete(pending)  # last: as long as it is there, the next command reveals again

    def _show_holds(self, *, look_first: bool = False) -> bool:
        """Set the files of holds and tags in the store as the newest head says; return True if any changed.

        With `look_first` the head is read before, because another machine may not have known of holds set
        just now. A head that does not mention holds changes none. ManifestError if the head is damaged,
        CheckpointError or PublishError if the store cannot be read or written.
        """
        newest = fetch_head(self._store) if look_first else None
        head, changed = self.head if newest is None else newest[0], False
        while (holds := head.files_beside(self.shown)) is not None:
            # Set a document before its number; lift holds last, the number before its document.
            names = [*holds, *sorted(self.shown.keys() - holds.keys())]
            if not sum([self._show_hold(name, holds.get(name)) for name in names]):
                break
            changed = True
            found = fetch_head(self._store)  # another process may have set others meanwhile
            head = head if found is None else found[0]
        return changed

    def _show_hold(self, name: str, content: bytes | None) -> bool:
        """Write a file of holds or tags into the store, or remove it if `content` is None; return True.

        False, without a request, if `shown` has this content; otherwise `shown` is updated. `name` is the
        file's path below the model. PublishError if the store refuses it.
        """
        if self.shown.get(name) == content:
            return False
        if content is None:
            self._store.delete(self._url.key(name))
            del self.shown[name]
        else:
            self._store.put(self._url.key(name), content)
            self.shown[name] = content
        return True


_Check = Callable[[], None]


def _pending(path: str, digest: str) -> str:
    """Return the name, below the model, of a manifest's object while the item's files are uploaded.

    `path` is the item's path below the model, `digest` the SHA-256 of the manifest: the name ends with its
    first 16 digits.
    """
    return f"{path}/{MANIFEST_FILE}.{digest[:16]}"

"""Carry publications into a store, one after another, by the protocol of `exporter.transfer.head`."""

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

BEAT_SECONDS = 10.0
"""How often an upload says that it goes on."""
LEASE_SECONDS = 60.0
"""How long an upload may be silent. Abandoning it too early costs only the work done so far."""
WAIT_SECONDS = 75.0
"""How long to wait for another upload; longer than a lease, so that one which was killed is outlasted."""
DECISION_SECONDS = 60.0
"""How long a person's command tries again to go before those who publish."""
FAREWELL_SECONDS = 1.0
"""How long an interrupted upload or decision may take to record that it is abandoned."""
_COPIES = 16
_POLL_SECONDS = 0.5
_UNREADABLE_HOLD = b"a rollback is being published\n"
"""Servers do not move while a hold says no position: so none goes where a rollback leads away from."""


class Carrier:
    """Publishes to a model in a store as long as no other process does, from the head on that it has read."""

    def __init__(self, store: ObjectWriter) -> None:
        self._store, self._url, self._owner = store, store.url, secrets.token_hex(8)
        self._is_probed = False
        self._skew: float | None = None
        self.head = Head()
        self._tag: Tag | None = None
        self._tags_of_others: bytes | None = None
        self._decider = "", 0.0  # whose decision was seen last, and when it showed life
        self._replacing = threading.Lock()  # beats replace the head from a thread of their own
        self.shown: dict[str, bytes] = {}
        """The holds that are in the store."""

    def look(self) -> None:
        """Read the head."""
        found = fetch_head(self._store)
        with self._replacing:
            self.head, self._tag = found or (Head(), None)
        deciding = self.head.deciding
        if deciding is not None and (deciding.owner == self.head.owner or deciding.owner != self._decider[0]):
            self._decider = deciding.owner, time.monotonic()

    def await_turn(self, is_ours: Callable[[Upload], bool] = lambda upload: False) -> None:
        """Read the head once nothing is being uploaded; what shows no life, or is ours, is abandoned.

        Waits for uploads of others; PositionMoved if one of them goes on too long. ModelHeld, at once, while
        a person's decision is under way.
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
                with suppress(PositionMoved):  # another machine did so first, or it goes on after all
                    self._give_up(upload)
                    return
            if time.monotonic() >= deadline:
                raise PositionMoved(
                    f"{self._url}: {upload.path} is being published by another machine",
                    hint="run the command again when that is done",
                )
            time.sleep(_POLL_SECONDS)
            self.look()

    def decide(self, what: str, progress: ProgressFactory) -> None:
        """Go before all publishers: from here on none of them commits anything, until `end_decision`.

        Waits for the decision of somebody else, and outlasts one that was killed. It is tried again for
        `DECISION_SECONDS` in all: uploads and their beats replace the head, too.

        Raises:
            ModelHeld: another decision takes longer.
            PositionMoved: other publishers always replaced the head first.
        """
        began, by = time.monotonic(), HeldBy.now(0)
        with progress("waiting for other publishers", 0):
            while True:
                self.look()
                if (other := self._other_decision()) is None:
                    deciding = Decision(what, by.who, by.when, self._owner)
                    try:
                        self._replace(replace(self.head, deciding=deciding))
                    except PositionMoved:
                        if time.monotonic() >= began + DECISION_SECONDS:
                            raise
                        continue  # at once: whoever asks most often comes first
                    return
                if time.monotonic() >= began + WAIT_SECONDS:
                    raise ModelHeld(
                        f"{self._url} is held while another person decides: {other.text}",
                        hint="run the command again when that is done",
                    )
                time.sleep(_POLL_SECONDS)

    @property
    def is_deciding(self) -> bool:
        """True if the head that was read or replaced last says that this process decides."""
        return self.head.deciding is not None and self.head.deciding.owner == self._owner

    def end_decision(self, holds: Mapping[str, bytes] | None = None) -> None:
        """Let publishers go on; with `holds`, set these in place of those that the decision had set.

        PositionMoved if the decision was taken for abandoned.
        """
        head = self.head if holds is None else self.head.holding(holds)
        self._replace(replace(head, deciding=None))
        if holds is not None:
            self._show_holds()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show that the decision goes on while the block takes its time.

        Uploads that go on meanwhile show life, too, in the same head. PositionMoved if the decision was taken
        for abandoned.
        """
        with self._beating(self._decides_on):
            yield
        if not self._decides_on():
            raise PositionMoved(f"the decision about {self._url} was taken for abandoned")

    def _decides_on(self) -> bool:
        """Read the head; True if our decision goes on, and what is published and held is the same."""
        before = self.head
        self.look()
        return self.is_deciding and self.head.is_same_model(before)

    def _other_decision(self) -> Decision | None:
        """The decision of another process in the head that was read last; None also if it shows no life."""
        other = self.head.deciding
        if other is None or other.owner == self._owner:
            return None
        if self._silence() < LEASE_SECONDS:
            return other
        with suppress(PositionMoved):  # another machine did so first, or it goes on after all
            self._replace(replace(self.head, deciding=None))
        return None

    def publish(
        self,
        model: Path,
        item: Item,
        holds: Mapping[str, bytes],
        bar: Progress,
        *,
        ends_decision: bool = True,
    ) -> None:
        """Publish one item of a local model, with these holds; PositionMoved if another machine was faster.

        Another machine's upload is abandoned, which is there only where this process decides; the decision
        ends with the commit, unless more is to come.

        An upload that fails is abandoned. After it, the error of showing the item says that it is published.
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
                self._store.put(key, item.content)
                with lease(model / item.path), closing(self._put_files(model, item)) as sizes:
                    for size in sizes:
                        bar.advance(size)
                        check()
            self._commit(item, holds, upload, before, ends_decision=ends_decision)
        except BaseException as error:  # other processes need not wait until the lease ends
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
        """Let the head name what was uploaded as published; while another process decides, wait for it.

        PositionMoved if that changed what is published or held, or tags that `holds` change, too.
        """
        while True:
            while self._other_decision() is not None:
                time.sleep(_POLL_SECONDS)
                if not self._goes_on(upload, before):
                    raise PositionMoved(f"a person decided about {self._url} meanwhile")
            head = self.head
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
        """Read the head; True if our upload goes on, and decisions or tags alone have changed meanwhile."""
        self.look()
        return self.head.uploading == upload and self.head.is_same_model(before)

    def _put_files(self, model: Path, item: Item) -> Generator[int, None, None]:
        """Put an item's files into the store, and tell the bytes of each; what is sent is checked on its way.

        What stands for an object, which tasks wrote, is copied by the store: that takes it seconds for each,
        so many are copied at a time.
        """
        copies: list[tuple[RemoteObject, str]] = []
        passage, sent = Passage(item, model / item.path), list[FileEntry]()
        for file in passage.files:
            path, key = model / item.path / file.path, self._url.key(f"{item.path}/{file.path}")
            each = mirror.written_by_tasks(path)
            if each is not None and each.size <= MOST_COPIED:
                copies.append((each, key))
                continue
            mirror.fetch(path)
            self._store.upload(key, path, passage.noting(file))
            passage.check_file(file)
            sent.append(file)
            yield file.bytes_
        passage.check_values(sent)
        with workers(_COPIES, "copy") as pool:
            done = pool.map(lambda copy: self._store.duplicate(*copy), copies)
            for (each, _), _ in zip(copies, done, strict=True):
                yield each.size

    def settle(self, holds: Mapping[str, bytes], *, ends_decision: bool = True) -> None:
        """Change holds alone, or nothing, before what was published is removed."""
        self.probe()
        head = self.head.holding(holds)
        self._replace(replace(head, deciding=None) if ends_decision else head)
        self._show_holds()

    def with_tags(self, holds: Mapping[str, bytes]) -> dict[str, bytes]:
        """These files, with the tags that other people set while this process uploaded, if they did."""
        tags = self._tags_of_others
        if tags is None:
            return dict(holds)
        others = {name: content for name, content in holds.items() if name != TAGS_FILE}
        return {**others, TAGS_FILE: tags} if tags else others

    def completed(self) -> StoredModel:
        """Show what a killed process has published and not shown yet; return what is published then."""
        found = self.listed()
        return self.listed() if self._complete(found) else found

    def listed(self) -> StoredModel:
        """The model in the store, listed now."""
        found = stored_model(self._store)
        self.shown = dict(found.holds)
        return found

    def holds_beside(self, stored: StoredModel) -> Mapping[str, bytes]:
        """The holds of a listed model: those of the head.

        What was published last may not be visible yet; until it is, no hold is lifted for readers.
        """
        head, holds = self.head, self.head.files_beside(stored.holds)
        if holds is None:
            return stored.holds
        is_shown = _pending(head.path, head.manifest) not in stored.objects
        return holds if is_shown else {**stored.holds, **holds}

    def _complete(self, stored: StoredModel) -> bool:
        """Reveal what is published and is not shown; True if `stored` is out of date then.

        ManifestError if the pending manifest is another one than the head names.
        """
        head = self.head
        pending = _pending(head.path, head.manifest)
        if pending in stored.objects:
            found = self._store.fetch(self._url.key(pending), MAX_MANIFEST_BYTES)
            if found is not None:  # else another machine has revealed it since
                item = item_of(head.path, found[0], f"{self._url}/{head.path}")
                if item.digest != head.manifest:
                    raise ManifestError(
                        f"{self._url}/{pending} is not what {HEAD_FILE} says is published",
                        hint="publish to a URL of its own",
                    )
                self._reveal(item)
            return True
        return self._show_holds()

    def probe(self) -> None:
        """Refuse a store that ignores conditions."""
        if not self._is_probed:
            require_conditions(self._store, self._url.path)
            self._is_probed = True

    def taken(self, *, decides: bool) -> list[str]:
        """The paths at which nothing new may be published; with `decides`, a pending upload's, too."""
        upload = self.head.uploading if decides else None
        return sorted({*self.head.given_up, *([] if upload is None else [upload.path])})

    def forget(self, paths: Iterable[str]) -> None:
        """Record abandoned paths, so that no publisher ever uses them."""
        self._replace(replace(self.head, given_up=self.head.given_up | dict.fromkeys(paths, "")))

    def _give_up(self, upload: Upload) -> None:
        self.probe()
        given_up = {**self.head.given_up, upload.path: upload.files}
        self._replace(replace(self.head, uploading=None, given_up=given_up))

    def _give_up_own(self, upload: Upload) -> None:
        if self.head.uploading != upload:
            return  # it was committed, or somebody gave it up
        try:
            self._give_up(upload)
        except PositionMoved:
            self.look()
            if self.head.uploading != upload:
                raise
            self._give_up(upload)  # a beat of ours that was not waited for, or a decision, replaced the head

    def _silence(self) -> float:
        """Seconds since the head was written, by the store's clock; 0 if there is no head.

        The first call writes an object and removes it, to learn how far the two clocks are apart.
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
        """Replace the head that was read, or last replaced; None: by the same one, to show life.

        PositionMoved if another machine has replaced it.
        """
        with self._replacing:
            self._put_head(self._alive() if head is None else head)

    def _alive(self) -> Head:
        """The head without a decision of others that has shown no life: our beats would keep it for ever."""
        deciding, (owner, lived) = self.head.deciding, self._decider
        if deciding is None or deciding.owner == self._owner or deciding.owner != owner:
            return self.head
        is_over = time.monotonic() - lived >= LEASE_SECONDS
        return replace(self.head, deciding=None) if is_over else self.head

    def _put_head(self, head: Head) -> None:
        head = replace(head, owner=self._owner, beat=self.head.beat + 1)
        key, content = self._url.key(HEAD_FILE), head.encoded()
        if self._tag is None:
            tag = self._store.create(key, content)
        else:
            tag = self._store.replace(key, content, self._tag)
        if tag is None:
            found = fetch_head(self._store)
            if found is None or found[0] != head:  # else the answer was lost, and the request repeated
                raise PositionMoved(f"another machine published to {self._url} meanwhile")
            tag = found[1]
        self.head, self._tag = head, tag

    @contextmanager
    def _beating(self, goes_on: Callable[[], bool]) -> Iterator[_Check]:
        """Renew the head in a thread while work goes on; yields a function that checks if it may go on.

        That, and the end of the block, raises PositionMoved if somebody has given it up: if another process
        replaced the head, and what is read then does not say that it `goes_on`.
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
                        continue  # the upload itself will tell if it is more than a moment

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
        """Make visible what the head says is published.

        PositionMoved if another manifest stands in its place, PublishError if the store refuses something.
        The store itself copies the pending manifest. If a suspended process resumes too late, another one has
        done so, and what was published may have been removed again: the pending manifest is gone then, and
        the late copy does nothing.
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
        self._store.delete(pending)

    def _show_holds(self, *, look_first: bool = False) -> bool:
        """Make the holds in the store what the newest head says; True if there was anything to do.

        `look_first`: some were set, of which another machine may not have known.
        """
        newest = fetch_head(self._store) if look_first else None
        head, changed = self.head if newest is None else newest[0], False
        while (holds := head.files_beside(self.shown)) is not None:
            # A document before the number that it is of, and what is lifted last, the number first.
            names = [*holds, *sorted(self.shown.keys() - holds.keys())]
            if not sum([self._show_hold(name, holds.get(name)) for name in names]):
                break
            changed = True
            found = fetch_head(self._store)  # another process may have shown other ones meanwhile
            head = head if found is None else found[0]
        return changed

    def _show_hold(self, name: str, content: bytes | None) -> bool:
        """Set or lift a hold; False if it is so already."""
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
    """The name of a manifest while its files are uploaded."""
    return f"{path}/{MANIFEST_FILE}.{digest[:16]}"

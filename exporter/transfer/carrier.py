"""Carry publications into a store, one after another, by the protocol of `exporter.transfer.head`."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from exporter.errors import CheckpointError, ExportError, ManifestError, PositionMoved, PublishError
from exporter.publish.manifest import FileEntry
from exporter.publish.versions import MAX_MANIFEST_BYTES, lease
from exporter.storage import mirror
from exporter.storage.layout import HEAD_FILE, MANIFEST_FILE
from exporter.storage.objects import ObjectWriter, RemoteObject, Tag, require_conditions
from exporter.storage.requests import MOST_COPIED
from exporter.storage.waiting import GivenUp, setting_if_interrupted, until, within, workers
from exporter.terminal.progress import Progress
from exporter.transfer.head import Head, Upload, fetch_head, files_digest
from exporter.transfer.items import Item, Passage, StoredModel, item_of, stored_model

BEAT_SECONDS = 10.0
"""How often an upload says that it goes on."""
LEASE_SECONDS = 60.0
"""How long an upload may be silent. Abandoning it too early costs only the work done so far."""
WAIT_SECONDS = 75.0
"""How long to wait for another upload; longer than a lease, so that one which was killed is outlasted."""
_FAREWELL_SECONDS = 1.0
"""How long an interrupted upload may take to record that it is abandoned."""
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
        self.shown: dict[str, bytes] = {}
        """The holds that are in the store."""

    def look(self) -> None:
        """Read the head."""
        found = fetch_head(self._store)
        self.head, self._tag = found or (Head(), None)

    def await_turn(self, is_ours: Callable[[Upload], bool] = lambda upload: False) -> None:
        """Read the head once nothing is being uploaded; what shows no life, or is ours, is abandoned.

        Waits for uploads of others; PositionMoved if one of them goes on too long.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        self.look()
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

    def publish(self, model: Path, item: Item, holds: Mapping[str, bytes], bar: Progress) -> None:
        """Publish one item of a local model, with these holds; PositionMoved if another machine was faster.

        An upload that fails is abandoned. After it, the error of showing the item says that it is published.
        """
        self.probe()
        before = self.head
        if item.path == before.path and self._store.look(self._url.key(f"{item.path}/{MANIFEST_FILE}")):
            raise PositionMoved(f"{self._url}/{item.path} was published while the store was listed")
        upload = Upload(item.path, item.digest, files_digest(item.manifest))
        key = self._url.key(_pending(item.path, item.digest))
        if before.given_up.get(item.path, upload.files) != upload.files:
            raise PositionMoved(
                f"{self._url}/{item.path} was begun by another machine and abandoned",
                cause="it may still be written to, so that nothing else can be published there",
                hint="publish again when the model has gone on, or to a URL of its own",
            )
        self._replace(replace(before, uploading=upload))
        try:
            with self._beating() as check:
                self._store.put(key, item.content)
                with lease(model / item.path), closing(self._put_files(model, item)) as sizes:
                    for size in sizes:
                        bar.advance(size)
                        check()
        except BaseException as error:  # other processes need not wait until the lease ends
            seconds = WAIT_SECONDS if isinstance(error, Exception) else _FAREWELL_SECONDS
            with suppress(ExportError), within(seconds):
                self._give_up_own(upload)
            raise
        given_up = {path: files for path, files in before.given_up.items() if path != item.path}
        done = replace(before, path=item.path, manifest=item.digest, given_up=given_up)
        self._replace(done.holding(holds))
        try:
            self._reveal(item)
        except (PublishError, CheckpointError) as error:
            error.message = f"{self._url}/{item.path} is published, but not shown yet: {error.message}"
            error.hint = "run any command that publishes there: it shows what is published"
            raise

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

    def settle(self, holds: Mapping[str, bytes]) -> None:
        """Change holds alone, or nothing, before what was published is removed."""
        self.probe()
        self._replace(self.head.holding(holds))
        self._show_holds()

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

    def forget(self, paths: Iterable[str]) -> None:
        """Record abandoned paths, so that no publisher ever uses them."""
        self._replace(replace(self.head, given_up=self.head.given_up | dict.fromkeys(paths, "")))

    def _give_up(self, upload: Upload) -> None:
        self.probe()
        given_up = {**self.head.given_up, upload.path: upload.files}
        self._replace(replace(self.head, uploading=None, given_up=given_up))

    def _give_up_own(self, upload: Upload) -> None:
        try:
            self._give_up(upload)
        except PositionMoved:
            self.look()
            if self.head.owner != self._owner or self.head.uploading != upload:
                raise
            self._give_up(upload)  # the head was replaced by a beat of ours that was not waited for

    def _silence(self) -> float:
        """Seconds since the head was written, by the store's clock; 0 if there is no head.

        The first call writes an object and removes it, to learn how far the two clocks are apart.
        """
        if self._skew is None:
            key = self._url.key(f".probe-{self._owner}")
            self._store.put(key, b"")
            found = self._store.look(key)
            self._store.delete(key)
            self._skew = 0.0 if found is None else found.modified - time.time()
        found = self._store.look(self._url.key(HEAD_FILE))
        return 0.0 if found is None else time.time() + self._skew - found.modified

    def _replace(self, head: Head) -> None:
        """Replace the head that was read, or last replaced.

        PositionMoved if another machine has replaced it.
        """
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
    def _beating(self) -> Iterator[_Check]:
        """Renew the head in a thread while the upload goes on; yields a function that checks if it may go on.

        That, and the end of the block, raises PositionMoved if somebody has given the upload up.
        """
        ended, interrupted, failure = threading.Event(), threading.Event(), list[ExportError]()

        def beat() -> None:
            with suppress(GivenUp), until(interrupted):
                while not ended.wait(BEAT_SECONDS):
                    try:
                        self._replace(self.head)
                    except PositionMoved as error:
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

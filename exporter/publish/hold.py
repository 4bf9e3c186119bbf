"""The hold: a position that servers do not pass by themselves. A person's hold also binds publishers.

    <model>/deltas/<log>/hold      of a log: `up_to = -1` does not go beyond it
    <model>/hold                   of versions that take no deltas: it binds publishers alone
    hold.json beside either        who set it, why and when

The file `hold` has a position in digits: it alone decides, and graphs in servers read nothing else. A
person's hold, or a rollback's, also keeps exporters from publishing versions. A *canary's* hold does not: it
is how far the agent's canary has approved the log. The agent advances it, and the trainer goes on publishing
behind it. `hold.json` says which it is; a hold without it is a person's. Releases up to 0.2 wrote a canary's
position with 18 digits or more, the first of them a zero, and no document: every release reads that.

Two files do not change at once. The document is written first, and has the previous hold in `instead_of`:
whichever position the number says, before and after it changes, is one of the two. A document with neither is
a left-over of an earlier release, which has set the number since, and is ignored.

A copy of a model in a store has *two* holds: its own, which its canary or its operator set, and the store's.
Servers get the lesser; `Decided.in_force` alone decides which that is, and `beside` keeps the other one. A
rollback's hold counts as the position whose values it brought back: a canary that approved these values does
not keep servers from the position where they are published again.

A hold that cannot be read binds as well: servers then do not move by themselves. While a rollback is
published the file is, for an instant, a symbolic link into the delta that is about to appear
(`exporter.pipeline.restoration` has the argument).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from exporter.errors import ManifestError, PublishError
from exporter.storage import mirror
from exporter.storage.files import make_directories, read_record, sync, write_durably, writing
from exporter.storage.layout import HOLD_DOCUMENT_FILE, HOLD_FILE
from exporter.wire.json_documents import Count, DocumentError, Moment, Text, decode, in_utc

if TYPE_CHECKING:
    from exporter.publish.staging import Staging

LONGEST_HOLD = 64
"""Most bytes read of a hold: a position has up to 18 digits, a canary's one more."""

LONGEST_DOCUMENT = 1 << 14
"""Most bytes read of a hold's document: it has up to three holds, each with a shortened reason."""

UNREAD = "it cannot be read, and servers follow no delta"
"""A phrase for people about a hold whose number cannot be read."""

_LONGEST_REASON = 1_000  # in the document: the whole reason is in the manifest of the rollback
_LOOKS = 3  # a number and its document are read one after the other, and may change in between

_CANARY = re.compile(rb"0[0-9]{17,18}\n?")
_LEFT_OVER = re.compile(r"\.hold\.[0-9a-f]{8}", re.ASCII)
"""Names of temporary files that earlier releases left behind when they were killed."""


class HeldBy(Struct, frozen=True):
    """A hold on a model: its position, who set it, when, and why."""

    position: Count
    """The position at which it is held."""
    who: Text
    """The user and the machine that set the hold: `user@machine`; empty if that is not recorded."""
    when: Moment
    """When it was set."""
    why: Text = ""
    """The reason that was given; empty if none was, shortened if it is long."""
    canary: bool = False
    """True if it is the position that an agent's canary has approved: it does not bind publishers."""
    url: Text = ""
    """The URL of the model in a store where it was set; empty if it was set in this directory."""
    values_of: Count | None = None
    """The position whose values a rollback published again where it is held; null if no rollback set it."""

    @classmethod
    def now(
        cls, position: int, why: str | None = "", *, canary: bool = False, values_of: int | None = None
    ) -> HeldBy:
        """A hold at `position` that is set now by this process's user.

        A reason of more than 1,000 characters is shortened; None: none. `canary`: it is a canary's.
        `values_of` is the position whose values a rollback brought back; None: no rollback sets it.
        """
        why = why or ""
        if len(why) > _LONGEST_REASON:
            why = f"{why[: _LONGEST_REASON - 3]}..."
        when = datetime.now(timezone.utc).replace(microsecond=0)
        return cls(position, this_user(), when, why, canary, values_of=values_of)

    @property
    def origin(self) -> str:
        """The hold's setter, place and time as a phrase for people.

        If no setter is recorded, the phrase says so.
        """
        where = f" in {self.url}" if self.url else ""
        if not self.who:
            return f"set{where or ' here'}, and nothing says by whom"
        by = f"the agent's canary ({self.who})" if self.canary else self.who
        return f"set by {by}{where} at {in_utc(self.when):%Y-%m-%d %H:%M:%S} UTC"

    @property
    def reach(self) -> int:
        """The newest position whose values it lets servers have; two holds are compared by this."""
        return self.position if self.values_of is None else self.values_of

    def place(self, model: Path) -> str | Path:
        """The model in which the hold can be changed: the store's URL if it was set there, else `model`."""
        return self.url or model

    def lifting(self, model: Path) -> list[str]:
        """The words of the command that lifts the hold where it was set: at a store's URL, or in `model`."""
        return ["export-model", "resume", str(self.place(model)), *(["--lift-canary"] if self.canary else [])]

    @property
    def text(self) -> str:
        """The author, time and reason of the hold, as a phrase for people."""
        return f"{self.origin}: {self.why}" if self.why else self.origin


class HoldDocument(HeldBy, frozen=True):
    """The file `hold.json`: `instead_of` is the previous hold, in force until the number has changed.

    `beside` is the hold of the other place (store or copy): it allows more, so it is not in force now.
    """

    instead_of: HeldBy | None = None
    beside: HeldBy | None = None


class Decided(Struct, frozen=True):
    """The holds of a directory: its own, and the store's if it is a copy; None if not set."""

    own: HeldBy | None = None
    stored: HeldBy | None = None

    @property
    def in_force(self) -> HeldBy | None:
        """The hold that servers get, the one of lesser `reach`; None without a hold.

        Of two with equal reach it is the one at the greater position, or else the store's.
        """
        if self.own is None or self.stored is None:
            return self.own or self.stored
        own, stored = ((by.reach, -by.position) for by in (self.own, self.stored))
        return self.own if own < stored else self.stored

    @property
    def other(self) -> HeldBy | None:
        """The hold that is not in force; None if there are not two."""
        return self.stored if self.in_force is self.own else self.own

    def following(self, stored: HeldBy | None) -> Decided:
        """Return these holds with another hold of the store; `stored` None: the store has none now.

        If a rollback of the store brings back values that the copy's canary has approved, the canary's hold
        moves to the rollback: it need not judge these values again.
        """
        own = self.own
        is_rollback = stored is not None and stored.values_of is not None
        if stored is not None and own is not None and is_rollback and own.canary:
            is_approved = stored.reach <= own.reach and stored.position > own.position
            own = replace(own, position=stored.position) if is_approved else own
        return Decided(own, stored)


def this_user() -> str:
    """The user and the machine of this process as `user@machine`, at most 200 characters.

    A user without a name is `uid` and the number.
    """
    import getpass  # late: most commands read holds, and few set one

    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # in a container there may be no name for the number
        name = f"uid {os.getuid()}"
    # a name that is not UTF-8 has no form in JSON
    return f"{name}@{os.uname().nodename}".encode(errors="backslashreplace").decode()[:200]


class HeldAt(Struct, frozen=True):
    """A hold as servers read it: they stop at `position`; -1 if the number cannot be read.

    `is_canary`: a canary set it. `by` is who set it; None if that is not recorded. `bound` is the position of
    the store's hold behind a canary's hold: the canary may not pass it either.
    """

    position: int
    is_canary: bool = False
    by: HeldBy | None = None
    bound: int | None = None

    @property
    def said(self) -> str:
        """The position as a phrase for people, `at 900`; or that it cannot be read."""
        return UNREAD if self.position < 0 else f"at {self.position}"


class Hold(Struct, frozen=True):
    """The hold in a directory; changes need the model's lock."""

    directory: Path

    @property
    def path(self) -> Path:
        """The path of the file `hold`, which need not exist."""
        return self.directory / HOLD_FILE

    @property
    def is_set(self) -> bool:
        """True if there is a hold, even if it cannot be read."""
        return os.path.lexists(self.path)

    @property
    def is_canary(self) -> bool:
        """True if a canary's hold is in force here; False also without a hold, or if it cannot be read."""
        held = self.for_servers()
        return held is not None and held.is_canary

    @property
    def by(self) -> HeldBy | None:
        """The record of the hold in force: its setter, time, reason and position.

        None without a hold, or if no record of it is kept.
        """
        held = self.for_servers()
        return None if held is None else held.by

    @property
    def binds(self) -> bool:
        """True if it keeps exporters from publishing versions: there is a hold, and it is not a canary's.

        True also for a hold that cannot be read.
        """
        return self.is_set and not self.is_canary

    def read(self) -> int | None:
        """Return the position in the file `hold`; None without a hold.

        ManifestError if it cannot be read, or states no position.
        """
        return self._position(self.content())

    @property
    def position(self) -> int | None:
        """The position of the hold; None without a hold, or with one that cannot be read."""
        with suppress(ManifestError):
            return self.read()
        return None

    def for_servers(self) -> HeldAt | None:
        """The hold as servers read it, with a number and a document that belong together; None without one.

        Its position is -1 if it cannot be read, as while a rollback is published: servers do not move then.
        """
        content, looks = self.content(), _LOOKS
        while True:
            try:
                position = self._position(content)
            except ManifestError:
                return HeldAt(-1)
            if position is None:
                return None
            said, looks = self._said(), looks - 1
            held = _held_at(content or b"", said)
            if held.by is not None or not looks or (again := self.content()) == content:
                return held
            content = again

    def decided(self) -> Decided:
        """Return the directory's own hold and the store's; each is None if it is not set.

        A hold without a recorded author counts as the directory's own. If the number cannot be read, both are
        as `hold.json` says.
        """
        # the number first: a document that was read before it may lack the hold that the number states
        content, said = self.content(), self._said()
        if content is None:
            return Decided()  # a document without a number says nothing
        told = [] if said is None else [by for by in (_of(said), said.beside) if by is not None]
        if position_in(content) is not None:
            held = _held_at(content, said)
            if held.by is None:
                return Decided(_of_nobody(held, self.path))
            told = [held.by, *told]
        own, stored = (next((by for by in told if bool(by.url) is far), None) for far in (False, True))
        return Decided(own, stored)

    def _said(self) -> HoldDocument | None:
        """Return the content of `hold.json`; None if there is none, or if it cannot be read.

        Of a document in a store only the store's own hold is used: anybody may have written the rest.
        """
        try:
            found = _document_in(read_record(self._document, LONGEST_DOCUMENT))
        except (OSError, DocumentError):
            return None
        if not mirror.is_remote(self.directory):
            return found
        before = found.instead_of
        before = None if before is None else replace(before, url="")
        return replace(found, url="", beside=None, instead_of=before)

    @property
    def _document(self) -> Path:
        return self.directory / HOLD_DOCUMENT_FILE

    def approved(self) -> int | None:
        """The position up to which a canary has approved the log; None if no canary's hold is in force."""
        held = self.for_servers()
        return held.position if held is not None and held.is_canary else None

    def _position(self, content: bytes | None) -> int | None:
        if content is None:
            return None
        text = content.decode("ascii", "replace").strip()
        if (position := position_in(content)) is None:
            raise ManifestError(
                f"{self.path} holds {text[:40]!r}, expected a position",
                hint="servers do not move while it is so; set it again (export-model rollback) or lift it "
                "(export-model resume)",
            )
        return position

    def content(self) -> bytes | None:
        """Return the bytes of the file `hold`; b"" if it cannot be read, None without a hold."""
        try:
            return read_record(self.path, LONGEST_HOLD)
        except OSError:
            return b"" if self.is_set else None

    def put(self, position: int, staging: Staging, *, canary: bool = False, why: str | None = None) -> None:
        """Set the directory's own hold at `position`: a canary's, or one that also binds publishers.

        The store's hold is kept. `why` is the reason that is recorded; None: none. Files are written beside
        the staged bundle first, and the hold is replaced atomically. The caller has the model's lock.

        Raises:
            TargetNotWritable, DiskFull, PublishError: the operating system refuses to write or sync the
                files.
        """
        own = HeldBy.now(position, why, canary=canary)
        self.set(Decided(own, self.decided().stored), staging)

    def set(self, decided: Decided, staging: Staging, content: bytes | None = None) -> None:
        """Write both holds, the directory's own and the store's, atomically.

        If `decided` has neither and `content` is None, the hold's files are removed. If the store's number
        cannot be read, its bytes (`content`) are written in place of a position. The caller has the model's
        lock.

        Raises:
            TargetNotWritable, DiskFull, PublishError: the operating system refuses to write or sync the
                files.
        """
        by = decided.in_force
        if by is None and content is None:
            self._remove()
            return
        with writing(self.path):
            number = _written(
                staging, f"{by.position}\n".encode() if by and content is None else content or b""
            )
            self.announce_both(decided, staging)
            self._replace(number)

    def announce(self, by: HeldBy, staging: Staging) -> None:
        """Write `hold.json` before the `hold` file; until that follows, the previous hold is in force.

        `by` becomes the directory's own hold; the store's is kept. OSError, or PublishError and its
        subclasses, if it cannot be written.
        """
        self.announce_both(Decided(by, self.decided().stored), staging)

    def announce_both(self, decided: Decided, staging: Staging) -> None:
        """Write `hold.json` for both holds, as `announce`; with neither hold, only make the directory.

        OSError, or PublishError and its subclasses, if it cannot be written.
        """
        by = decided.in_force
        make_directories(self.directory)
        if by is None:
            return
        # `self.by` is of the document that this one replaces: nothing says it afterwards
        document = HoldDocument(**asdict(by), instead_of=self.by, beside=decided.other)
        _written(staging, _encoded(document)).replace(self._document)
        sync(self.directory)

    def lift(self, staging: Staging | None = None) -> None:
        """Remove the directory's own hold; the store's hold is in force then, if there is one.

        With `staging` None the store's hold is removed, too; otherwise files are prepared in it. The caller
        has the model's lock.

        Raises:
            TargetNotWritable, DiskFull, PublishError: the operating system refuses to write or remove the
                files.
        """
        stored = self.decided().stored
        if stored is None or staging is None:
            self._remove()
        else:
            self.set(Decided(None, stored), staging)

    def _remove(self) -> None:
        """Remove the files `hold` and `hold.json`, in this order, if they exist.

        PublishError or a subclass if they stay.
        """
        with writing(self.path):
            self.path.unlink(missing_ok=True)  # first: a document without a number means nothing
            self._document.unlink(missing_ok=True)
            if self.directory.exists():
                sync(self.directory)

    @contextmanager
    def put_back_on_failure(self, staging: Staging) -> Iterator[None]:
        """If the block fails, restore the hold that was set before the block, and raise the block's error.

        A copy of the hold is written in staging before the block, as disk space may run out: PublishError or
        a subclass if it cannot be. A hold that cannot be restored stays as the block left it: it binds more
        than the previous one. A link that points at a published file stays, too: the delta for which it was
        made is published.
        """
        content, document = self.content(), self._said()
        before = None if content is None else _written(staging, content)
        said = None if document is None else _written(staging, _encoded(document))
        try:
            yield
        except BaseException:
            if not (self.path.is_symlink() and self.path.exists()):
                with suppress(OSError, PublishError):
                    if said is not None:
                        said.replace(self._document)
                    self._remove() if before is None else self._replace(before)
            raise

    def promise(self, name: str, prepared: Path, staging: Staging) -> None:
        """Make the hold a symbolic link to the hold file of the delta `name`, which will appear beside it.

        Until the delta appears the hold cannot be read, and no server moves; from then on the delta's file
        counts. On a file system without links the file `prepared` (see `prepare`) becomes the hold at once.
        OSError, or PublishError and its subclasses, if the hold cannot be replaced.
        """
        link = _free_name(staging)
        try:
            # relative: servers may have the model's directory at another path
            link.symlink_to(Path(name, HOLD_FILE))
        except OSError:
            link = prepared
        self._replace(link)

    def settle(self, prepared: Path) -> None:
        """Replace the hold, which is a link or a canary's, by the `prepared` file (see `prepare`).

        A failure is ignored.
        """
        with suppress(OSError, PublishError):  # the link has the same content, or the file is there already
            self._replace(prepared)

    def prepare(self, position: int, staging: Staging) -> Path:
        """Write a file with a position, beside the staged bundle, that can become the hold later.

        Return its path. It is removed with the staging unless it becomes a hold. PublishError or a subclass
        if it cannot be written.
        """
        return _written(staging, f"{position}\n".encode("ascii"))

    def sweep(self) -> None:
        """Remove temporary files of holds that earlier releases left behind when they were killed.

        Errors are ignored.
        """
        with suppress(OSError), os.scandir(self.directory) as found:
            left = [entry.path for entry in found if _LEFT_OVER.fullmatch(entry.name)]
            for path in left:
                Path(path).unlink()

    def _replace(self, file: Path) -> None:
        file.replace(self.path)  # in one step: a server never finds no hold, or half of one
        sync(self.directory)


def as_set_there(
    decided: Decided, url: str, number: bytes | None, document: bytes | None
) -> dict[str, bytes]:
    """Return the files of a hold, content by name, as a push writes them into the store at `url`.

    `number` and `document` are the store's files `hold` and `hold.json` now; None if missing. If the hold in
    force came from that store, equals the one there, or does not exist, these bytes are returned (missing and
    empty ones are left out). Else the files state the hold as set in the store itself, and not by a rollback.
    """
    there = {
        name: content for name, content in ((HOLD_FILE, number), (HOLD_DOCUMENT_FILE, document)) if content
    }
    by, held = decided.in_force, hold_in(number, document)
    if by is None or (decided.stored is not None and decided.stored.url == url):
        return there
    by = replace(by, url="", values_of=None)
    if held is not None and held.by is not None and replace(held.by, url="", values_of=None) == by:
        return there
    return {HOLD_DOCUMENT_FILE: _encoded(HoldDocument(**asdict(by))), HOLD_FILE: f"{by.position}\n".encode()}


def hold_in(number: bytes | None, document: bytes | None) -> HeldAt | None:
    """The hold in the bytes of `hold` (its number) and `hold.json`; a missing or damaged document is ignored.

    None without a number; its position is -1 if the number cannot be read.
    """
    if number is None:
        return None
    if position_in(number) is None:
        return HeldAt(-1)
    try:
        return _held_at(number, None if document is None else _document_in(document))
    except DocumentError:
        return _held_at(number, None)


def _document_in(content: bytes) -> HoldDocument:
    found: HoldDocument = decode(content, HoldDocument, HOLD_DOCUMENT_FILE, written=_encoded)
    return found


def _held_at(number: bytes, said: HoldDocument | None) -> HeldAt:
    """Return the hold that a number's bytes and the document beside it (or None) state.

    The document counts only if one of its holds is at the number's position. The bytes must state a position:
    AssertionError otherwise.
    """
    position = position_in(number)
    assert position is not None
    told = () if said is None else (_of(said), said.instead_of)
    by = next((by for by in told if by is not None and by.position == position), None)
    # a release up to 0.2 has set it, whatever document a newer one has left here
    if _CANARY.fullmatch(number) and (by is None or not by.canary):
        return HeldAt(position, True)
    if said is None or by is None or not by.canary:
        return HeldAt(position, False, by)
    others = (one for one in (_of(said), said.beside) if one is not None and bool(one.url) != bool(by.url))
    return HeldAt(position, True, by, next((one.position for one in others), None))


def _of(said: HoldDocument) -> HeldBy:
    return msgspec.convert(said, HeldBy, from_attributes=True)


def _of_nobody(held: HeldAt, path: Path) -> HeldBy:
    """A hold without a recorded author, for a number without a document; its time is the file's.

    `path` is the file of the number; its time is the last modification, or 1970 if the file is gone.
    """
    try:
        since = path.lstat().st_mtime
    except OSError:
        since = 0.0
    when = datetime.fromtimestamp(int(since), timezone.utc)
    return HeldBy(held.position, "", when, canary=held.is_canary)


def position_in(content: bytes) -> int | None:
    """The position in the bytes of a file `hold`: up to 18 digits, maybe after a zero.

    None for any other content.
    """
    text = content.decode("ascii", "replace").strip()
    return int(text) if re.fullmatch(r"0?[0-9]{1,18}", text, re.ASCII) else None


_encoded = msgspec.json.encode


def _written(staging: Staging, content: bytes) -> Path:
    """Write a file beside the staged bundle, durably, and return its path.

    PublishError or a subclass if it fails. It is removed with the staging unless it is renamed to a hold.
    """
    path = _free_name(staging)
    write_durably(path, content)
    return path


def _free_name(staging: Staging) -> Path:
    number = 0
    while os.path.lexists(path := staging.path.with_name(f"{HOLD_FILE}.{number}")):
        number += 1
    return path

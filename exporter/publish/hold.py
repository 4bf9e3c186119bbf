"""The hold: a position that servers do not pass by themselves. A person's hold binds publishers, too.

    <model>/deltas/<log>/hold      of a log: `up_to = -1` does not go beyond it
    <model>/hold                   of versions that take no deltas: it binds publishers alone
    hold.json beside either        who set it, why and when

The file `hold` has a position in digits: it alone decides, and graphs in servers read nothing else. A
person's hold, or a rollback's, also keeps exporters from publishing versions. A *canary's* hold does not: it
is how far the agent's canary has approved the log. The agent moves it on, and the trainer goes on publishing
behind it. `hold.json` says which it is; a hold without it is a person's. Releases up to 0.2 wrote a canary's
position with 18 digits or more, the first of them a zero, and no document: that is read for ever.

Two files do not change at once. The document is written first, and has the hold that it takes the place of
in `instead_of`: whichever position the number says, before and after it changes, is one of the two. A
document of neither is a left-over, and is ignored: an earlier release has set the number since.

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

from exporter.errors import ManifestError, PublishError
from exporter.storage.files import make_directories, read_regular, sync, write_durably, writing
from exporter.storage.layout import HOLD_DOCUMENT_FILE, HOLD_FILE
from exporter.wire.json_documents import Count, DocumentError, Moment, Text, decode, in_utc

if TYPE_CHECKING:
    from exporter.publish.staging import Staging

LONGEST_HOLD = 64
"""Bytes that are read of a hold: a position has 18 digits at the most, a canary's one more."""

LONGEST_DOCUMENT = 1 << 14
"""Bytes that are read of a hold's document: two holds, each with a reason that is cut off."""

_LONGEST_REASON = 1_000  # in the document: the whole reason is in the manifest of the rollback
_LOOKS = 3  # a number and its document are read one after the other, and may change in between

_CANARY = re.compile(rb"0[0-9]{17,18}\n?")
_LEFT_OVER = re.compile(r"\.hold\.[0-9a-f]{8}", re.ASCII)
"""Names that earlier releases left behind when they were killed."""


class HeldBy(Struct, frozen=True):
    """Who holds a model at a position, since when, and why."""

    position: Count
    """Where it is held."""
    who: Text
    """The user and the machine that set the hold: `user@machine`."""
    when: Moment
    """When it was set."""
    why: Text = ""
    """The reason that was given; empty if none was, cut off if it is long."""
    canary: bool = False
    """True if it is how far the canary of an agent approved: it binds nobody who publishes."""

    @classmethod
    def now(cls, position: int, why: str | None = "", *, canary: bool = False) -> HeldBy:
        """A hold that this process sets now, for its user; a long reason is cut off."""
        why = why or ""
        if len(why) > _LONGEST_REASON:
            why = f"{why[: _LONGEST_REASON - 3]}..."
        when = datetime.now(timezone.utc).replace(microsecond=0)
        return cls(position, this_user(), when, why, canary)

    @property
    def origin(self) -> str:
        """Who set it and when, for people."""
        by = f"the agent's canary ({self.who})" if self.canary else self.who
        return f"set by {by} at {in_utc(self.when):%Y-%m-%d %H:%M:%S} UTC"

    @property
    def text(self) -> str:
        """Who set it, when and why, for people."""
        return f"{self.origin}: {self.why}" if self.why else self.origin


class HoldDocument(HeldBy, frozen=True):
    """The file `hold.json`: `instead_of` is the hold before, which stands until the number has changed."""

    instead_of: HeldBy | None = None


def this_user() -> str:
    """Who runs this process, and where: `user@machine`."""
    import getpass  # late: most commands read holds, and few set one

    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # in a container there may be no name for the number
        name = f"uid {os.getuid()}"
    return f"{name}@{os.uname().nodename}".encode(errors="backslashreplace").decode()[:200]


class HeldAt(Struct, frozen=True):
    """A hold as servers take it: they stop at `position`, -1 if the number cannot be read.

    `is_canary`: a canary set it. `by` says who set it; None if nothing does.
    """

    position: int
    is_canary: bool = False
    by: HeldBy | None = None


class Hold(Struct, frozen=True):
    """The hold in a directory; it is changed under the model's lock."""

    directory: Path

    @property
    def path(self) -> Path:
        """The file, which need not exist."""
        return self.directory / HOLD_FILE

    @property
    def is_set(self) -> bool:
        """True if there is a hold, also one that cannot be read."""
        return os.path.lexists(self.path)

    @property
    def is_canary(self) -> bool:
        """True if it is how far a canary has approved the log."""
        held = self.for_servers()
        return held is not None and held.is_canary

    @property
    def by(self) -> HeldBy | None:
        """Who set it, why and when; None without a hold, or if nothing says that of its position."""
        held = self.for_servers()
        return None if held is None else held.by

    @property
    def binds(self) -> bool:
        """True if it binds those who publish: there is a hold, and it is not a canary's."""
        return self.is_set and not self.is_canary

    def read(self) -> int | None:
        """The position; None without a hold."""
        return self._position(self.content())

    @property
    def position(self) -> int | None:
        """The position; None without a hold, or with one that cannot be read."""
        with suppress(ManifestError):
            return self.read()
        return None

    def for_servers(self) -> HeldAt | None:
        """The hold as servers take it, from one reading; None without one.

        Where it cannot be read they go nowhere, as while a rollback is published.
        """
        content, looks = self.content(), _LOOKS
        while True:
            try:
                position = self._position(content)
            except ManifestError:
                return HeldAt(-1)
            if position is None:
                return None
            by, looks = self._said_of(position), looks - 1
            if by is not None or not looks or (again := self.content()) == content:
                break
            content = again
        if _CANARY.fullmatch(content or b""):
            return HeldAt(position, True, by if by is not None and by.canary else None)
        return HeldAt(position, by is not None and by.canary, by)

    def _said_of(self, position: int) -> HeldBy | None:
        """What the document says of a position; None if it does not, or cannot be read."""
        try:
            content = read_regular(self._document, LONGEST_DOCUMENT)
            new: HoldDocument = decode(content, HoldDocument, HOLD_DOCUMENT_FILE, written=_encoded)
        except (OSError, DocumentError):
            return None
        told = (msgspec.convert(new, HeldBy, from_attributes=True), new.instead_of)
        return next((by for by in told if by is not None and by.position == position), None)

    @property
    def _document(self) -> Path:
        return self.directory / HOLD_DOCUMENT_FILE

    def approved(self) -> int | None:
        """The position up to which a canary has approved the log; None if no canary's hold stands."""
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
        """The file's bytes; b"" if it cannot be read, None without a hold."""
        try:
            return read_regular(self.path, LONGEST_HOLD)
        except OSError:
            return b"" if self.is_set else None

    def put(self, position: int, staging: Staging, *, canary: bool = False, why: str | None = None) -> None:
        """Set the hold atomically, a canary's or one that binds publishers, too."""
        with writing(self.path):
            number = self.prepare(position, staging)
            self.announce(HeldBy.now(position, why, canary=canary), staging)
            self._replace(number)

    def announce(self, by: HeldBy, staging: Staging) -> None:
        """Write who sets the hold, before the number says so; until it does, the hold before stands."""
        document = HoldDocument(by.position, by.who, by.when, by.why, by.canary, self.by)
        make_directories(self.directory)
        _written(staging, _encoded(document)).replace(self._document)
        sync(self.directory)

    def lift(self) -> None:
        """Remove the hold, the number first."""
        with writing(self.path):
            self.path.unlink(missing_ok=True)
            self._document.unlink(missing_ok=True)
            if self.directory.exists():
                sync(self.directory)

    @contextmanager
    def put_back_on_failure(self, staging: Staging) -> Iterator[None]:
        """Set the hold as it was if the block fails; that takes no space, which may be what is missing.

        A hold that cannot be put back stays: it binds more than the one before. A link that leads somewhere
        stays, too: what it was made for is published.
        """
        content, by = self.content(), self.by
        before = None if content is None else _written(staging, content)
        said = None if by is None else _written(staging, _encoded(by))
        try:
            yield
        except BaseException:
            if not (self.path.is_symlink() and self.path.exists()):
                with suppress(OSError, PublishError):
                    if said is not None:
                        said.replace(self._document)
                    self.lift() if before is None else self._replace(before)
            raise

    def promise(self, name: str, prepared: Path, staging: Staging) -> None:
        """Make the hold a link to the file `hold` of the delta `name`, which is about to appear beside it.

        Until then the hold cannot be read, and no server moves; from then on it is what the delta says. Where
        there are no links, it is at once the `prepared` file.
        """
        link = _free_name(staging)
        try:
            link.symlink_to(Path(name, HOLD_FILE))
        except OSError:
            link = prepared
        self._replace(link)

    def settle(self, prepared: Path) -> None:
        """Replace a link by the `prepared` file, which says the same; or a canary's hold, by a rollback's."""
        with suppress(OSError, PublishError):  # the link says the same, or the file has its place already
            self._replace(prepared)

    def prepare(self, position: int, staging: Staging) -> Path:
        """Write a file that can become the hold later."""
        return _written(staging, f"{position}\n".encode("ascii"))

    def sweep(self) -> None:
        """Remove what earlier releases left behind when they were killed."""
        with suppress(OSError), os.scandir(self.directory) as found:
            left = [entry.path for entry in found if _LEFT_OVER.fullmatch(entry.name)]
            for path in left:
                Path(path).unlink()

    def _replace(self, file: Path) -> None:
        file.replace(self.path)  # in one step: a server never finds no hold, or half of one
        sync(self.directory)


def position_in(content: bytes) -> int | None:
    """The position that a hold's bytes say; None if they say none."""
    text = content.decode("ascii", "replace").strip()
    return int(text) if re.fullmatch(r"0?[0-9]{1,18}", text, re.ASCII) else None


_encoded = msgspec.json.encode


def _written(staging: Staging, content: bytes) -> Path:
    """A file beside the staged bundle: it goes with the staging if it does not become a hold."""
    path = _free_name(staging)
    write_durably(path, content)
    return path


def _free_name(staging: Staging) -> Path:
    number = 0
    while os.path.lexists(path := staging.path.with_name(f"{HOLD_FILE}.{number}")):
        number += 1
    return path

"""The hold: a position that servers do not pass by themselves. A person's hold binds publishers, too.

    <model>/deltas/<log>/hold      of a log: `up_to = -1` does not go beyond it
    <model>/hold                   of versions that take no deltas: it binds publishers alone

The file holds a position in digits. A person's hold, or a rollback's, also keeps exporters from publishing
versions. A *canary's* hold does not: it is how far the agent's canary has approved the log. The agent moves
it on, and the trainer goes on publishing behind it. It is written with 18 digits or more, the first of them a
zero: the served graph and earlier releases read the same position, and earlier releases take it for a
person's hold.

A hold that cannot be read binds as well: servers then do not move by themselves. While a rollback is
published the file is, for an instant, a symbolic link into the delta that is about to appear
(`exporter.pipeline.restoration` has the argument).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from exporter.errors import ManifestError, PublishError
from exporter.storage.files import make_directories, read_regular, sync, write_durably, writing
from exporter.storage.layout import HOLD_FILE

if TYPE_CHECKING:
    from exporter.publish.staging import Staging

LONGEST_HOLD = 64
"""Bytes that are read of a hold: a position has 18 digits at the most, a canary's one more."""

_CANARY = re.compile(rb"0[0-9]{17,18}\n?")
_LEFT_OVER = re.compile(r"\.hold\.[0-9a-f]{8}", re.ASCII)
"""Names that earlier releases left behind when they were killed."""


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
        return _is_canary(self.content())

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

    def for_servers(self) -> tuple[int | None, bool]:
        """The position at which servers stop, and whether a canary set it, from one reading.

        None without a hold. Where it cannot be read they go nowhere, as while a rollback is published: -1.
        """
        content = self.content()
        try:
            return self._position(content), _is_canary(content)
        except ManifestError:
            return -1, False

    def approved(self) -> int | None:
        """The position up to which a canary has approved the log; None if no canary's hold stands."""
        content = self.content()
        return self._position(content) if _is_canary(content) else None

    def _position(self, content: bytes | None) -> int | None:
        if content is None:
            return None
        text = content.decode("ascii", "replace").strip()
        if not re.fullmatch(r"0?[0-9]{1,18}", text, re.ASCII):
            raise ManifestError(
                f"{self.path} holds {text[:40]!r}, expected a position",
                hint="servers do not move while it is so; set it again (export-model rollback) or lift it "
                "(export-model resume)",
            )
        return int(text)

    def content(self) -> bytes | None:
        """The file's bytes; b"" if it cannot be read, None without a hold."""
        try:
            return read_regular(self.path, LONGEST_HOLD)
        except OSError:
            return b"" if self.is_set else None

    def put(self, position: int, staging: Staging, *, canary: bool = False) -> None:
        """Set the hold atomically, a canary's or one that binds publishers, too."""
        with writing(self.path):
            make_directories(self.directory)
            text = f"0{position:017d}\n" if canary else f"{position}\n"
            self._replace(_written(staging, text.encode("ascii")))

    def lift(self) -> None:
        """Remove the hold."""
        with writing(self.path):
            self.path.unlink(missing_ok=True)
            if self.directory.exists():
                sync(self.directory)

    @contextmanager
    def put_back_on_failure(self, staging: Staging) -> Iterator[None]:
        """Set the hold as it was if the block fails; that takes no space, which may be what is missing.

        A hold that cannot be put back stays: it binds more than the one before. A link that leads somewhere
        stays, too: what it was made for is published.
        """
        content = self.content()
        before = None if content is None else _written(staging, content)
        try:
            yield
        except BaseException:
            if not (self.path.is_symlink() and self.path.exists()):
                with suppress(OSError, PublishError):
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


def _is_canary(content: bytes | None) -> bool:
    return _CANARY.fullmatch(content or b"") is not None


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

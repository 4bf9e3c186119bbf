"""Which versions go when a newer one is published, and how they go without a reader seeing half of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from exporter.errors import ManifestError
from exporter.filesystem import open_lock, try_lock
from exporter.manifest import FILE_NAME
from exporter.published import Child, read_stamp
from exporter.staging import TRASH_PREFIX

GRACE_SECONDS = 300.0
"""How long a superseded version stays: a server polls each second but loads for minutes, and one that began
to load it must not find its files gone."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A version beyond `keep` that stayed, and why; the next publication tries again."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retired:
    """What retention did. `trash` is out of every reader's sight and only needs to be deleted."""

    removed: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    trash: tuple[Path, ...] = ()


def retire(versions: Iterable[Child], *, keep: int, now: float, grace_seconds: float) -> Retired:
    """Move all but the newest `keep` versions out of sight; the caller holds the model's lock.

    Only versions with a manifest count and go: what this program did not publish is not its to remove. A
    version stays if someone has a lease of it (`exporter.published.lease`), or while less than
    `grace_seconds` have passed between the publication of its successor and `now` (seconds since 1970).
    """
    ours = sorted((child for child in versions if child.is_ours), key=lambda child: child.version)
    removed, kept, trash = [], [], []
    for child, successor in list(pairwise(ours))[: max(len(ours) - keep, 0)]:
        try:
            reason = _in_grace(successor, now, grace_seconds)
            if not reason:
                trash.append(_move_away(child))
                removed.append(child.version)
                continue
        except BlockingIOError:
            reason = "a reader has it open"
        except OSError as exc:
            reason = f"it cannot be removed: {exc.strerror}"
        kept.append(Kept(child.version, reason))
    return Retired(tuple(removed), tuple(kept), tuple(trash))


def _in_grace(successor: Child, now: float, grace_seconds: float) -> str:
    """Why a version whose successor is this one must stay for now, or nothing."""
    if grace_seconds <= 0:
        return ""
    try:
        age = now - read_stamp(successor.path).created.timestamp()
    except ManifestError as exc:
        return f"when it was superseded is unknown: {exc.message}"
    return "" if age >= grace_seconds else f"it was superseded less than {grace_seconds:g} s ago"


def _move_away(child: Child) -> Path:
    """Rename a version out of sight, which happens at once, while nobody has or can get a lease of it.

    Raises:
        BlockingIOError: someone has one.
        OSError: the version may not be locked or moved.
    """
    trash = child.path.with_name(f"{TRASH_PREFIX}{child.version}-{secrets.token_hex(4)}")
    manifest = open_lock(child.path / FILE_NAME, flags=0)
    try:
        if not try_lock(manifest):
            raise BlockingIOError
        os.rename(child.path, trash)  # noqa: PTH104  as in publish: the one call that matters, in plain sight
    finally:
        os.close(manifest)
    return trash

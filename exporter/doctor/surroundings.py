"""Check the surroundings: left-overs, permissions, clocks, checkpoints and links to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from exporter.bundle.link import NewFile, link_shard
from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.doctor.finding import Check, Finding, Level, command
from exporter.doctor.published import FUTURE_SECONDS, size_of
from exporter.errors import CheckpointError, PublishError
from exporter.files import writing
from exporter.layout import DELTAS_DIRECTORY, LOCK_FILE
from exporter.progress import count, human_bytes
from exporter.publish.staging import Staging, dead_leftovers
from exporter.publish.versions import published_versions

_CLOSED = {"others": "users outside its group", "group": "its group", "owner": "its owner"}


def left_overs(model: Path) -> Iterator[Finding]:
    """Staging and trash of processes that died."""
    found = dead_leftovers(model)
    if found:
        size = sum(map(size_of, found))
        yield Finding(
            Check.LEFT_OVERS,
            Level.WARNING,
            f"{count(len(found), 'left-over')} of killed exporters ({human_bytes(size)}) under {model}",
            command("rm", "-r", *found),
            cause="the next export removes what it may",
        )


def permissions(model: Path) -> Iterator[Finding]:
    """Whether a server that runs as another user can read what is published, and whether we may publish."""
    yield from _closed_files(model)
    yield from _closed_above(model)
    yield from _not_writable(model)


def checkpoint(model: Path, ckpt_dir: Path) -> Iterator[Finding]:
    """Whether the next full export can read the checkpoint, and link it rather than copy it."""
    try:
        catalog = open_checkpoint(ckpt_dir)
    except CheckpointError as error:
        yield Finding(Check.CHECKPOINT, Level.WRONG, error.message, _as_command(error.hint), error.cause)
        return
    if not catalog.is_bundle:  # its values are written anew in any case
        return
    try:
        reason = _why_not_linked(model, catalog)
    except CheckpointError as error:
        yield Finding(Check.CHECKPOINT, Level.WRONG, error.message, _as_command(error.hint), error.cause)
        return
    except PublishError:  # `permissions` tells
        same = catalog.prefix.parent.stat().st_dev == model.stat().st_dev
        reason = "" if same else "they lie on two file systems"
    if reason:
        closed = [path for path in catalog.shards if f" of {path.name} " in reason]
        yield Finding(
            Check.LINKS,
            Level.WARNING,
            f"each full export copies {human_bytes(catalog.bytes_)} instead of linking {catalog.prefix}",
            command("chmod", "a+r", *catalog.shards) if closed else command("df", ckpt_dir, model),
            cause=reason if closed else f"{reason}; links need one file system for checkpoints and model",
        )


def clock_of_files(model: Path, now: float) -> Iterator[Finding]:
    """Whether the file system stamps files with the time that it is here."""
    try:
        with Staging(model, sweeps=False) as staging, writing(staging.path):
            ahead = staging.path.stat().st_mtime - now
    except PublishError:
        return
    if abs(ahead) > FUTURE_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            Check.CLOCK,
            Level.WARNING,
            f"the file system of {model} is {abs(ahead):.0f} s {where} this machine's clock",
            "timedatectl status",
        )


def _closed_files(model: Path) -> Iterator[Finding]:
    """Published files that fewer may read than may look into the model's directory."""
    allowed = _Readers.of(model)
    closed: list[tuple[Path, str]] = []
    trees = [child.path for child in published_versions(model)]
    for top in [*trees, model / DELTAS_DIRECTORY]:
        for directory, names, files in os.walk(top):
            names[:] = [name for name in names if not name.startswith(".")]
            for path in (Path(directory), *(Path(directory, name) for name in files)):
                if path.name.startswith(".") or path.is_symlink():
                    continue
                lost = allowed.lost_by(_Readers.of(path))
                if lost:
                    closed.append((path, lost))
    if closed:
        path, lost = closed[0]
        mode = f"{path} has mode {stat.S_IMODE(path.stat().st_mode):04o}"
        more = f", and {len(closed) - 1} more like it" if len(closed) > 1 else ""
        tops = sorted({_top(model, path) for path, _ in closed})
        yield Finding(
            Check.PERMISSIONS,
            Level.WRONG,
            f"{mode}{more}: a server of another user sees the version and cannot read it",
            command("chmod", "-R", "a+rX" if lost == "others" else "g+rX", *tops),
            cause=f"{_CLOSED[lost]} may look into {model}, but not read this",
        )


def _closed_above(model: Path) -> Iterator[Finding]:
    """The nearest directory that keeps other users out, of the model's own and all above it."""
    top = model.resolve()
    for directory in (top, *top.parents):
        mode = directory.stat().st_mode
        needed = stat.S_IXOTH | (stat.S_IROTH if directory == top else 0)
        if mode & needed != needed:
            yield Finding(
                Check.PERMISSIONS,
                Level.WARNING,
                f"{directory} has mode {stat.S_IMODE(mode):04o}: a server that runs as another user than "
                f"uid {directory.stat().st_uid} or outside group {directory.stat().st_gid} reads nothing",
                command("chmod", "o+rx" if directory == top else "o+x", directory),
            )
            return


def _not_writable(model: Path) -> Iterator[Finding]:
    logs = [path for path in (model / DELTAS_DIRECTORY).glob("*") if path.is_dir()]
    for path in (model, model / LOCK_FILE, model / DELTAS_DIRECTORY, *logs):
        need = os.W_OK | (os.X_OK if path.is_dir() else 0)
        if path.exists() and not os.access(path, need):
            said, helps = f"this user (uid {os.getuid()}) cannot publish", command("ls", "-ld", path)
            owner = path.stat().st_uid
            if os.statvfs(path).f_flag & os.ST_RDONLY:
                why, helps = "is on a read-only file system", command("findmnt", "-T", path)
            elif owner != os.getuid():
                why = f"belongs to uid {owner}"
                helps = command("sudo", "-u", f"#{owner}", "export-model", "doctor", model)
            else:
                why = f"has mode {stat.S_IMODE(path.stat().st_mode):04o}"
            yield Finding(Check.PERMISSIONS, Level.WARNING, f"{said}: {path} {why}", helps)
            return


def _why_not_linked(model: Path, catalog: Catalog) -> str:
    """Why the shards cannot be linked, found by linking each of them once; "" if they can."""
    with Staging(model, sweeps=False) as staging, writing(staging.path):
        new_file = NewFile.in_directory(staging.path)
        for number, (shard, size) in enumerate(zip(catalog.shards, catalog.shard_sizes, strict=True)):
            reason = link_shard(shard, staging.path / str(number), size=size, new_file=new_file)
            if reason:
                return reason
    return ""


def _top(model: Path, path: Path) -> Path:
    """The version or log that a published file belongs to."""
    inside = path.relative_to(model).parts
    return model.joinpath(*inside[: 2 if inside[0] == DELTAS_DIRECTORY else 1])


def _as_command(hint: str) -> str:
    """The command in a hint that ends with one, else the hint."""
    _, found, rest = hint.partition("export-model ")
    return f"export-model {rest}" if found else hint


class _Readers:
    """Who may read a file, or list and enter a directory."""

    def __init__(self, found: os.stat_result) -> None:
        mode = found.st_mode
        if stat.S_ISDIR(mode):  # to read is to list, and needs the right to enter as well
            mode &= (mode & 0o111) << 2
        self.uid, self.gid = found.st_uid, found.st_gid
        self.others = bool(mode & stat.S_IROTH)
        self.group = self.others or bool(mode & stat.S_IRGRP)

    @classmethod
    def of(cls, path: Path) -> _Readers:
        return cls(path.lstat())

    def lost_by(self, other: _Readers) -> str:
        """Who may read this and not `other`: "others", "group", or "" for nobody."""
        if self.others and not other.others:
            return "others"
        group = other.others or (other.group and other.gid == self.gid)
        return "group" if self.group and not group else ""

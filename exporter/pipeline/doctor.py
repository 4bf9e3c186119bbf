"""Examine a model on disk; each finding names its cause and the command that helps.

`examine` runs the checks in the order in which problems should be repaired: the published model (damage,
gaps, holds, orphaned and foreign files, times), then its surroundings (left-overs, permissions, clocks,
checkpoints and links to them). `ask` asks servers; `exporter.publish.judge` judges their answers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.link import NewFile, link_shard
from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.delta.spans import plan_chain, reached
from exporter.errors import (
    CallFailed,
    CheckpointError,
    DeltaGap,
    ExportError,
    ManifestError,
    NotTrusted,
    PositionError,
    PublishError,
    ServerError,
    VerificationError,
    as_export_error,
    is_unread,
)
from exporter.newer_python import StrEnum
from exporter.pipeline.inspect_tables import tables_of_log
from exporter.publish.commit import NO_SYNC_HINT, cannot_sync
from exporter.publish.delta_log import DeltaLog, LogDelta, read_log
from exporter.publish.finite import lasting, refused
from exporter.publish.hold import Hold
from exporter.publish.judge import (
    Code,
    Finding,
    Habit,
    Level,
    Limits,
    Server,
    command,
    judge,
    silent,
    two_publishers,
)
from exporter.publish.made_by import new_base
from exporter.publish.manifest import BaseEntry, DeltaEntry, DeltaOrigin
from exporter.publish.mapped_state import mapped_elsewhere, network_file_system, why_restored
from exporter.publish.model import Model
from exporter.publish.permission import binding
from exporter.publish.retention import logs_without_base
from exporter.publish.room import Room
from exporter.publish.spared import noted
from exporter.publish.staging import Staging, dead_leftovers
from exporter.publish.tags import ListedTag, tags_of
from exporter.publish.versions import (
    VersionDir,
    newest_version,
    published_versions,
    read_head,
    read_manifest,
    version_dirs,
)
from exporter.storage.files import sync, writing
from exporter.storage.layout import DELTAS_DIRECTORY, LOCK_FILE, SAVED_MODEL_FILES, TURN_FILE
from exporter.terminal.progress import count, human_bytes
from exporter.terminal.server_access import ServerAccess
from exporter.verify.log import Damage, VerifiedModel, verify_model
from exporter.verify.version_files import OVERWRITTEN_HINT


class Check(StrEnum):
    """The subject of a check."""

    FILES = "files"
    WAYS = "ways"
    FINITE = "finite"
    ORPHANS = "orphans"
    STRANGERS = "strangers"
    LEFT_OVERS = "left-overs"
    HOLD = "hold"
    CLOCK = "clock"
    PUBLISHER = "publisher"
    DURABILITY = "durability"
    ROOM = "room"
    AGENT = "agent"
    PERMISSIONS = "permissions"
    COPY = "copy"
    LINKS = "links"
    CHECKPOINT = "checkpoint"
    TABLES = "tables"
    MAPPED = "mapped"
    VALUES = "values"
    BUDGET = "budget"
    TAGS = "tags"
    REPLICAS = "replicas"


CHECKS = {
    Code.DAMAGED: Check.FILES,
    Code.UNTRUSTED: Check.FILES,
    Code.NO_WAY: Check.WAYS,
    Code.NOT_FINITE: Check.FINITE,
    Code.ORPHANS: Check.ORPHANS,
    Code.FOREIGN: Check.STRANGERS,
    Code.NOT_LOADABLE: Check.STRANGERS,
    Code.LEFT_OVERS: Check.LEFT_OVERS,
    Code.HELD: Check.HOLD,
    Code.HOLD_UNREADABLE: Check.HOLD,
    Code.CANARY_LATE: Check.HOLD,
    Code.CLOCK: Check.CLOCK,
    Code.ROOM: Check.ROOM,
    Code.AGENT_DOWN: Check.AGENT,
    Code.PUBLISHER_SILENT: Check.PUBLISHER,
    Code.TWO_PUBLISHERS: Check.PUBLISHER,
    Code.DURABILITY: Check.DURABILITY,
    Code.UNREADABLE: Check.PERMISSIONS,
    Code.KEPT_OUT: Check.PERMISSIONS,
    Code.NOT_WRITABLE: Check.PERMISSIONS,
    Code.FETCHED_WHOLE: Check.COPY,
    Code.COPIES: Check.LINKS,
    Code.OVERWRITTEN: Check.LINKS,
    Code.CHECKPOINT: Check.CHECKPOINT,
    Code.TABLE_FULL: Check.TABLES,
    Code.NOT_MAPPED: Check.MAPPED,
    Code.WILD: Check.VALUES,
    Code.BUDGET: Check.BUDGET,
    Code.TAG_GONE: Check.TAGS,
}


def check_of(finding: Finding) -> Check:
    """Return the check that made a finding; REPLICAS for findings that no check on disk makes."""
    return Check(finding.check) if finding.check else CHECKS.get(finding.code, Check.REPLICAS)


def diagnosis(model: Path, findings: Iterable[Finding]) -> ExportError | None:
    """Return the error with which a command ends; None if no finding's level is WRONG.

    It quotes the first wrong finding and the number of all. It is a VerificationError if any wrong finding is
    on disk, else a CheckpointError if any is about the checkpoint, else a ServerError.
    """
    wrong = [finding for finding in findings if finding.level is Level.WRONG]
    if not wrong:
        return None
    checks = {check_of(finding) for finding in wrong}
    kind: type[ExportError] = VerificationError
    if checks <= {Check.CHECKPOINT, Check.REPLICAS, Check.AGENT}:
        kind = CheckpointError if Check.CHECKPOINT in checks else ServerError
    many = f"{count(len(wrong), 'thing')} {'is' if len(wrong) == 1 else 'are'}"
    first = wrong[0]
    return kind(f"{many} wrong with {model}: {first.text}", cause=first.why, hint=first.command)


_CLOSED = {"others": "users outside its group", "group": "its group", "owner": "its owner"}


def left_overs(model: Path) -> Iterator[Finding]:
    """Yield a finding if there are staging and trash directories of processes that died.

    Raises OSError if the model's directory cannot be listed.
    """
    found = dead_leftovers(model)
    if found:
        size = sum(map(size_of, found))
        yield Finding(
            Code.LEFT_OVERS,
            f"{count(len(found), 'left-over')} of killed exporters ({human_bytes(size)}) under {model}",
            "the next export removes what it may",
            command("rm", "-r", *found),
        )


def copied(model: Path) -> Iterator[Finding]:
    """Yield a finding if this copy of a store fetched its newest base instead of merging it here.

    Raises ManifestError if the record of that cannot be read.
    """
    spared = noted(model)
    if spared is not None:
        yield Finding(
            Code.FETCHED_WHOLE,
            f"{human_bytes(spared.fetched)} of version {spared.path} were fetched, not merged here",
            spared.why_fetched,
            command("export-model", "verify", model),
        )


def permissions(model: Path) -> Iterator[Finding]:
    """Yield findings if a server of another user cannot read the model, or this user cannot publish.

    At most one for each cause: closed files, a closed directory above them, a path that cannot be written.
    Raises OSError if a file vanishes meanwhile, ManifestError if the model cannot be listed.
    """
    yield from _closed_files(model)
    yield from _closed_above(model)
    yield from _not_writable(model)


def checkpoint(model: Path | None, ckpt_dir: Path) -> Iterator[Finding]:
    """Yield findings about a checkpoint that the next full export cannot read, or must copy, not link.

    `model` is None for a model in a store, to which nothing is linked. Otherwise makes and removes a
    directory with links to the shards under the model. Raises OSError if a directory cannot be looked at,
    ManifestError if the model cannot be listed.
    """
    try:
        catalog = open_checkpoint(ckpt_dir)
    except CheckpointError as error:
        yield Finding(Code.CHECKPOINT, error.message, error.cause, _as_command(error.hint))
        return
    if model is None or not catalog.is_bundle:  # its values are rewritten in any case
        return
    yield from _written_over(model, catalog, ckpt_dir)
    try:
        reason = _why_not_linked(model, catalog)
    except CheckpointError as error:
        yield Finding(Code.CHECKPOINT, error.message, error.cause, _as_command(error.hint))
        return
    except PublishError:  # `permissions` reports it
        same = catalog.prefix.parent.stat().st_dev == model.stat().st_dev
        reason = "" if same else "they lie on two file systems"
    if reason:
        closed = [path for path in catalog.shards if f" of {path.name} " in reason]
        yield Finding(
            Code.COPIES,
            f"each full export copies {human_bytes(catalog.bytes_)} instead of linking {catalog.prefix}",
            reason if closed else f"{reason}; links need one file system for checkpoints and model",
            command("chmod", "a+r", *catalog.shards) if closed else command("df", ckpt_dir, model),
        )


def _written_over(model: Path, catalog: Catalog, ckpt_dir: Path) -> Iterator[Finding]:
    """Yield at most one finding: a trainer writes new checkpoints into files to which versions have links.

    `catalog` is the newest checkpoint's, in `ckpt_dir`. Versions without a readable manifest are skipped;
    ManifestError if the model cannot be listed.
    """
    for version in published_versions(model):
        written: list[Path] = []
        with suppress(ExportError, OSError):  # `damage` reports it
            written = read_manifest(version.path).overwritten(version.path)
        for shard in catalog.shards:
            with suppress(OSError):
                if any(shard.samefile(file) for file in written):
                    yield Finding(
                        Code.OVERWRITTEN,
                        f"the trainer writes new checkpoints into the files of earlier ones: {shard} has the "
                        f"bytes of another checkpoint than version {version.version}, which links to it",
                        "a hard link changes with the file; a version with --data compact has its own",
                        f"{_new_base(model, ckpt_dir, _deltas(model))} --data compact",
                    )
                    return


def _deltas(model: Path) -> list[str]:
    """Return the words `--new-base always` for a model with a directory of deltas; [] for another."""
    return ["--new-base", "always"] if (model / DELTAS_DIRECTORY).is_dir() else []


def clock_of_files(model: Path, now: float) -> Iterator[Finding]:
    """Yield a finding if the clock of the model's file system differs by more than 60 s from `now`.

    `now` is this machine's time, in seconds since 1970. Makes and removes a directory under the model; yields
    nothing if that cannot be made.
    """
    try:
        # Without a sweep: a doctor removes nothing of others.
        with Staging(model, sweeps=False) as staging, writing(staging.path):
            ahead = staging.path.stat().st_mtime - now
    except PublishError:
        return
    if abs(ahead) > FUTURE_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            Code.CLOCK,
            f"the file system of {model} is {abs(ahead):.0f} s {where} this machine's clock",
            command="timedatectl status",
        )


def durability(model: Path) -> Iterator[Finding]:
    """Yield a finding if publications may not survive a power cut here, as the file system cannot sync.

    Makes and removes a directory under the model; yields nothing if that cannot be made.
    """
    try:
        with Staging(model, sweeps=False) as staging:
            is_durable = sync(staging.path)
    except PublishError:  # `permissions` reports it
        return
    if not is_durable:
        where = command("findmnt", "-T", model)
        yield Finding(Code.DURABILITY, cannot_sync(model), NO_SYNC_HINT, where)


def _closed_files(model: Path) -> Iterator[Finding]:
    """Yield a finding if published files are closed to users that may list and enter the model's directory.

    It names the first such file and counts the others. Hidden files and links are not looked at. Raises
    OSError if a file vanishes meanwhile, ManifestError if the model cannot be listed.
    """
    allowed = _Readers.of(model)
    closed: list[tuple[Path, str]] = []
    trees = [child.path for child in published_versions(model)]
    for top in [*trees, model / DELTAS_DIRECTORY]:
        for directory, names, files in os.walk(top):
            # in place, so that `walk` skips them
            names[:] = [name for name in names if not name.startswith(".")]
            for path in (Path(directory), *(Path(directory, name) for name in files)):
                # A hold may be a link to a delta that is still to come; a link's own mode says nothing.
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
            Code.UNREADABLE,
            f"{mode}{more}: a server of another user sees the version and cannot read it",
            f"{_CLOSED[lost]} may look into {model}, but not read this",
            command("chmod", "-R", "a+rX" if lost == "others" else "g+rX", *tops),
        )


def _closed_above(model: Path) -> Iterator[Finding]:
    """Yield a finding on the nearest directory, the model's or one above, that keeps other users out.

    The model's directory must let others read and enter it, each directory above only enter. Raises OSError
    if one cannot be looked at.
    """
    top = model.resolve()
    for directory in (top, *top.parents):
        mode = directory.stat().st_mode
        needed = stat.S_IXOTH | (stat.S_IROTH if directory == top else 0)
        if mode & needed != needed:
            yield Finding(
                Code.KEPT_OUT,
                f"{directory} has mode {stat.S_IMODE(mode):04o}: a server that runs as another user than "
                f"uid {directory.stat().st_uid} or outside group {directory.stat().st_gid} reads nothing",
                command=command("chmod", "o+rx" if directory == top else "o+x", directory),
            )
            return


def _not_writable(model: Path) -> Iterator[Finding]:
    logs = [path for path in (model / DELTAS_DIRECTORY).glob("*") if path.is_dir()]
    for path in (model, model / LOCK_FILE, model / TURN_FILE, model / DELTAS_DIRECTORY, *logs):
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
            yield Finding(Code.NOT_WRITABLE, f"{said}: {path} {why}", command=helps)
            return


def _why_not_linked(model: Path, catalog: Catalog) -> str:
    """Return the reason why a checkpoint's shards cannot be linked into a model; "" if they can.

    Links shards, up to the first that cannot be linked, into a staging directory, which is removed. Raises
    CheckpointError if a shard changed since its index was read, PublishError if nothing can be written.
    """
    with Staging(model, sweeps=False) as staging, writing(staging.path):
        new_file = NewFile.in_directory(staging.path)
        for number, (shard, size) in enumerate(zip(catalog.shards, catalog.shard_sizes, strict=True)):
            # By trying: kernels (`protected_hardlinks`) and file systems have rules of their own.
            reason = link_shard(shard, staging.path / str(number), size=size, new_file=new_file)
            if reason:
                return reason
    return ""


def _top(model: Path, path: Path) -> Path:
    """Return the directory of the version or log to which `path`, a path below `model`, belongs."""
    inside = path.relative_to(model).parts
    return model.joinpath(*inside[: 2 if inside[0] == DELTAS_DIRECTORY else 1])


def _as_command(hint: str) -> str:
    """Return the part of a hint from its first `export-model` on; the hint itself if it has none."""
    _, found, rest = hint.partition("export-model ")
    return f"export-model {rest}" if found else hint


class _Readers:
    """The users that may read a file, or list and enter a directory."""

    def __init__(self, found: os.stat_result) -> None:
        mode = found.st_mode
        if stat.S_ISDIR(mode):  # reading a directory also needs the right to enter it
            mode &= (mode & 0o111) << 2  # each x bit, moved to where its r bit is
        self.uid, self.gid = found.st_uid, found.st_gid
        self.others = bool(mode & stat.S_IROTH)
        self.group = self.others or bool(mode & stat.S_IRGRP)

    @classmethod
    def of(cls, path: Path) -> _Readers:
        return cls(path.lstat())

    def lost_by(self, other: _Readers) -> str:
        """Return the users of this file that may not read the file of `other`: "others", "group", or ""."""
        if self.others and not other.others:
            return "others"
        group = other.others or (other.group and other.gid == self.gid)
        return "group" if self.group and not group else ""


CANARY_SECONDS = 600.0
"""Seconds after which an undecided canary is not running, or has no replica to go first."""

PATIENCE = 60.0
"""Seconds that a server may take to serve a publication."""

FUTURE_SECONDS = 60.0
"""Seconds by which clocks may differ without a finding."""


LATELY, LEAST = 20, 5
"""The most and the fewest deltas by which a budget is judged."""
SMALL_SHARE = 0.25
"""The share of the change below which a budget is too small: a tenth of the rows usually has half of it."""

SCARCE = 0.05
"""The share of free rows in a dynamic table below which they are few."""


def damage(model: Path, found: VerifiedModel, ckpt_dir: Path | None) -> Iterator[Finding]:
    """Yield a finding for each damage that `verify_model` found, with the command that repairs it.

    For a publication that is not trusted, the command is the error's own hint. `ckpt_dir`, the trainer's
    directory, is named in commands; None if it is not known. Raises ManifestError if the model or a manifest
    cannot be read.
    """
    for problem in found.damage:
        if problem.path.name == Hold(model).path.name:
            yield _broken_hold(model, problem)
            continue
        if isinstance(problem.error, NotTrusted):
            said = problem.error
            yield Finding(Code.UNTRUSTED, said.message, said.cause, said.hint)
            continue
        if is_unread(problem.error):
            yield _unexamined(problem.error, Check.FILES)
            continue
        code = Code.NO_WAY if isinstance(problem.error, DeltaGap) else Code.DAMAGED
        remedy = _remedy(model, found.log, problem, ckpt_dir)
        message = problem.error.message
        if code is Code.NO_WAY:
            message = f"servers that load {problem.path} do not reach the newest position: {message}"
        yield Finding(code, message, problem.error.cause, remedy)


def not_finite(model: Path, found: VerifiedModel) -> Iterator[Finding]:
    """Yield a finding if servers refuse deltas with NaN or infinity, and finite deltas do not bypass them.

    `found` is the result of `verify_model`. Nothing if the model accepts such values, takes no deltas or is
    damaged. Raises ManifestError if the hold
    or a manifest cannot be read, CheckpointError if a delta cannot, DeltaGap if deltas are missing.
    """
    log = found.log
    if log is None or found.damage or not log.base.entry.updates.finite:
        return
    limit = log.hold.read() if log.hold.binds else None
    deltas = [delta for delta in log.deltas if limit is None or delta.end <= limit]
    bad = [delta for delta in deltas if refused(log, delta)]
    if not bad or (lowest := _stuck_at(log, deltas, bad)) is None:
        return
    before = next(delta for delta in bad if delta.accepts(lowest))
    is_healed = not lasting(log, plan_chain(deltas, lowest))
    yield Finding(
        Code.NOT_FINITE,
        f"servers stay at {lowest}: {before.path} holds NaN or infinity, and the model refuses it",
        "an earlier release published it unchecked; "
        + (
            "what follows it is finite: a merged delta leads past it" if is_healed else "the values still are"
        ),
        command("export-model", "merge", model, "--from", str(lowest))
        if is_healed
        else command("export-model", "rollback", model, "--to", str(lowest)),
    )


def _stuck_at(log: DeltaLog, deltas: Sequence[LogDelta], bad: Sequence[LogDelta]) -> int | None:
    """Return the lowest position at which servers stop as they refuse the deltas `bad`; None if none does.

    Servers do not stop where other deltas lead past the refused ones. `deltas` are all deltas that servers
    may apply now, `bad` among them.
    """
    taken = [delta for delta in deltas if delta not in bad]
    places = {base.at.position for base in log.bases} | {delta.end for delta in taken}
    ends = {reached(taken, place) for place in places if reached(taken, place) < reached(deltas, place)}
    return min(ends, default=None)


def held(model: Path, found: VerifiedModel, now: float) -> Iterator[Finding]:
    """Yield findings about holds in force, and about deltas that are pending for a canary for too long.

    `found` is the result of `verify_model`, `now` in seconds since 1970. Damaged holds are left out: `damage`
    reports them.
    """
    log = None if found.log is None else found.log.base.entry.log
    for hold in binding(model, log):
        held = hold.for_servers()  # read once: it may be lifted meanwhile
        if held is None or held.position < 0:
            continue
        with suppress(OSError):
            by = held.by
            since = f"since {_told(hold.path.lstat().st_mtime)}" if by is None else by.origin
            yield Finding(
                Code.HELD,
                f"held at {held.position}, {since}: servers follow no delta beyond it, and new versions "
                "are refused",
                "" if by is None else by.why,
                command=command(*(["export-model", "resume", model] if by is None else by.lifting(model))),
            )
    if found.log is not None and found.log.hold.is_canary:
        yield from _unapproved(model, found.log, now)


def _unapproved(model: Path, log: DeltaLog, now: float) -> Iterator[Finding]:
    """Yield a finding if deltas have waited for a canary for ten minutes, so that none can be running.

    `now` is in seconds since 1970. Nothing if a manifest cannot be read.
    """
    with suppress(ManifestError, OSError):
        approved, by = log.approved, log.hold.by
        waiting = [delta for delta in log.deltas if approved is not None and delta.end > approved]
        since = min((delta.manifest.created for delta in waiting), default=None)
        if since is not None and now - since.timestamp() > CANARY_SECONDS:
            yield Finding(
                Code.CANARY_LATE,
                f"the agent's canary approved position {approved}, and {count(len(waiting), 'delta')} wait "
                f"for it since {_told(since.timestamp())}: see the agent's status page",
                "no agent with a canary runs any more, or no replica can go first",
                command("export-model", "resume", by.place(model) if by else model, "--lift-canary"),
            )


def orphans(model: Path, found: VerifiedModel) -> Iterator[Finding]:
    """Yield a finding for each log whose bases are all gone, so that no server can apply its deltas.

    `found` is the result of `verify_model`. Raises OSError or ManifestError if a directory cannot be listed.
    """
    for log in logs_without_base(model, None if found.log is None else found.log.path):
        deltas = [entry for entry in log.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        yield Finding(
            Code.ORPHANS,
            f"{log} holds {count(len(deltas), 'delta')} ({human_bytes(size_of(log))}), and no base is left",
            "export-model --incr removes them five minutes after the last one was published",
            command("rm", "-r", log),
        )


def strangers(model: Path) -> Iterator[Finding]:
    """Yield a finding for each path that servers take for the newest version although it has no manifest.

    It says whether servers can load it; its command renames the path, so that servers ignore it. Raises
    ManifestError if the model cannot be listed.
    """
    found = version_dirs(model)
    newest = next((child.version for child in found if child.has_manifest), -1)
    for child in found:
        if child.has_manifest or child.version < newest:
            continue
        remedy = command("mv", child.path, child.path.with_name(f".{child.path.name.strip()}"))
        if _loads(child):
            what = "was not published by export-model: servers load it in the place of"
            yield Finding(Code.FOREIGN, f"version {child.path} {what} {newest}", "no manifest", remedy)
        else:
            what = "is not a SavedModel, but servers take it for the newest version and load no other"
            yield Finding(Code.NOT_LOADABLE, f"{child.path} {what}", command=remedy)


def times(model: Path, found: VerifiedModel, now: float) -> Iterator[Finding]:
    """Yield at most one finding: publications are dated more than 60 s in the future.

    `found` is the result of `verify_model`. Publications that they replaced are kept until that time. The
    finding names the latest and counts the others. `now` is in seconds since 1970. Damaged manifests are
    skipped; ManifestError if the model cannot be listed.
    """
    paths = [child.path for child in published_versions(model)]
    paths += [delta.path for delta in found.log.deltas] if found.log else []
    later: list[tuple[float, Path]] = []
    for path in paths:
        with suppress(ManifestError):  # `damage` has reported it
            created = read_head(path).created.timestamp()
            if created > now + FUTURE_SECONDS:
                later.append((created, path))
    if later:
        created, path = max(later)
        several = f", as {len(later) - 1} more" if len(later) > 1 else ""
        yield Finding(
            Code.CLOCK,
            f"{path} was published at {_told(created)}{several}; now it is {_told(now)}",
            "a clock is wrong, here or where it was published; nothing it superseded is removed until that "
            "time",
            "timedatectl status",
        )


def publisher(model: Path, now: float) -> Iterator[Finding]:
    """Yield findings about a publisher that is unusually silent, and about users that publish in turn.

    `now` is in seconds since 1970. Raises NotUpdatable, ManifestError, LfsPointer or OSError if the model
    cannot be read.
    """
    seen = Model.read(model)
    found = Habit.of(seen).silence(datetime.fromtimestamp(now, timezone.utc))
    if found.is_too_long:
        yield silent(model, found, takes_deltas=seen.newest_log is not None)
    if seen.publishers:
        yield two_publishers(model, seen.publishers)


def room(model: Path) -> Iterator[Finding]:
    """Yield a finding if the disk has less free space than the newest base has unshared bytes.

    Nothing if nothing is published. Bytes are shared if another file has a hard link to them. Raises OSError
    if the disk cannot be asked.
    """
    newest = newest_version(model)
    if newest is None:
        return
    there = Room.of(model)
    if (needed := there.own[-1]) > there.free:
        yield Finding(
            Code.ROOM,
            f"the next base needs {human_bytes(needed)}, and {human_bytes(there.free)} are free",
            f"as much as {newest.path} takes of its own; {there.text}",
            there.command(model),
        )


def tables(model: Path, found: VerifiedModel, ckpt_dir: Path | None) -> Iterator[Finding]:
    """Yield findings about dynamic tables with few free rows (under 5 %): a full one refuses deltas.

    Nothing if the model takes no deltas or is damaged, by `found`, the result of `verify_model`. `ckpt_dir`
    is named in the command, None if it is not known. Raises PositionError, ManifestError or CheckpointError
    if the log or its tables cannot be read.
    """
    if found.log is None or found.damage:  # reported by `damage`, and tables cannot be read past it
        return
    for table in tables_of_log(read_log(model)):  # read anew: retention may have removed deltas
        if table.free_rows < (table.keys + table.free_rows) * SCARCE:
            yield Finding(
                Code.TABLE_FULL,
                f"table {table.name!r} holds {table.keys} keys and has room for {table.free_rows} more",
                "when it is full, --incr fails and --watch publishes a new base by itself",
                _new_base(model, ckpt_dir, ["--new-base", "always"]),
            )


def _lately(found: VerifiedModel) -> list[DeltaEntry]:
    """Return the manifest entries of the newest deltas, oldest first: at most `LATELY`.

    `found` is the result of `verify_model`. Mergers, and deltas with a damaged manifest, are left out; []
    without a log.
    """
    deltas = () if found.log is None else found.log.deltas
    entries: list[DeltaEntry] = []
    for delta in sorted(deltas, key=lambda one: one.end, reverse=True):
        if len(entries) == LATELY:
            break
        with suppress(ManifestError):  # `damage` has reported it
            if delta.entry.made is not DeltaOrigin.MERGE:
                entries.append(delta.entry)
    return entries[::-1]


def wild(model: Path, found: VerifiedModel) -> Iterator[Finding]:
    """Yield a finding on the newest delta's row with the greatest norm, if it is beyond `--max-norm`.

    The row was sent or held back. Mergers are not looked at. `found` is the result of `verify_model`; `model`
    is named in the command.
    """
    entries = _lately(found)
    worst = max(entries[-1].wild if entries else (), key=lambda one: one.norm, default=None)
    if worst is not None:
        yield Finding(
            Code.WILD,
            worst.said,
            "a learning rate that is too high, or rubbish in the trainer's memory",
            command("export-model", "history", model),
        )


def budget(found: VerifiedModel) -> Iterator[Finding]:
    """Yield a finding if recent delta budgets were exceeded, or, of at least five, sent too little.

    `found` is the result of `verify_model`. Too little is less than a quarter of the distance that rows had
    moved, on average. At most the 20 newest deltas count.
    """
    used = [entry.budget for entry in _lately(found) if entry.budget is not None]
    excess = [each for each in used if each.excess]
    if excess:
        most = max(excess, key=lambda one: one.excess)
        yield Finding(
            Code.BUDGET,
            f"{len(excess)} of the last {len(used)} deltas with a budget exceeded it: the worst had "
            f"{human_bytes(most.due)} that had to go, and {human_bytes(most.allowed)} were allowed",
            "what is served whole, new keys, and rows older than --delta-budget age go whatever the budget",
            "export with a larger --delta-budget, or a longer --delta-budget age",
        )
    elif len(used) >= LEAST and (share := sum(each.share for each in used) / len(used)) < SMALL_SHARE:
        sent, changes = (
            sum(numbers) // len(used)
            for numbers in zip(*((one.sent, one.changes) for one in used), strict=True)
        )
        yield Finding(
            Code.BUDGET,
            f"the last {len(used)} deltas with a budget sent {share:.0%} of how far rows had moved, "
            f"in {human_bytes(sent)} a delta of the {human_bytes(changes)} that all rows take",
            "the model changes faster than its budget lets servers follow",
            "export with a larger --delta-budget",
        )


def tags(found: Sequence[ListedTag], model: Path) -> Iterator[Finding]:
    """Yield a finding for each tag in `found` whose position cannot be restored.

    Its command deletes the tag of `model`.
    """
    for tag in found:
        if tag.gone:
            yield Finding(
                Code.TAG_GONE,
                f"the tag {tag.name} names position {tag.position}, which is gone",
                tag.why_gone,
                command("export-model", "tag", model, tag.name, "--delete"),
            )


def mapped(model: Path, ckpt_dir: Path | None) -> Iterator[Finding]:
    """Yield a finding if servers on this machine do not map the newest version's mapped tables.

    Also if they map tables on a network file system, where they may crash. `ckpt_dir` is named in the
    command, None if it is not known. Raises ManifestError if the newest version's manifest cannot be read or
    has a wrong path.
    """
    newest = newest_version(model)
    if newest is None or not newest.has_manifest:
        return
    manifest = read_manifest(newest.path)
    record = manifest.mapped
    if record is None or not record.tables:
        return
    deltas = ["--new-base", "always"] if isinstance(manifest.incremental, BaseEntry) else []
    words = ["--ckpt-dir", ckpt_dir or "CKPT_DIR", "--out", model, *deltas, "--map-tables", "--again"]
    again = command("export-model", *words)
    if why := why_restored(record):
        message = f"a server on this machine restores the tables of version {newest.version}"
        yield Finding(Code.NOT_MAPPED, message, why, f"{again} --served-at DIR")
    elif (place := mapped_elsewhere(record, newest.path)) and not _is_version_of(model, Path(place)):
        yield Finding(
            Code.NOT_MAPPED,
            f"a server that is given this copy maps the tables of {place}",
            "its graph looks for its tables there, and restores its own once they are gone",
            f"{again} --served-at DIR",
        )
    elif kind := network_file_system(Path(record.directory)):
        yield Finding(
            Code.NOT_MAPPED,
            f"version {newest.version} is mapped on a network file system ({kind})",
            "when its file server removes a file that is still mapped, the model server dies; pull copies to "
            "a local disk, and map them there (--served-at)",
            command("export-model", "push", model, "URL"),
        )


def _is_version_of(model: Path, place: Path) -> bool:
    """True if the parent of the directory `place` is the model's directory.

    After a rollback, a version's tables are in another version of the model.
    """
    return place.parent.resolve() == model.resolve()


def size_of(directory: Path) -> int:
    """Return the sum of the sizes, in bytes, of all files below a directory; unreadable files count as 0."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def _broken_hold(model: Path, problem: Damage) -> Finding:
    killed = "a rollback was killed before its delta was there" if problem.path.is_symlink() else ""
    return Finding(
        Code.HOLD_UNREADABLE,
        f"{problem.path} holds the model and says no position: servers follow no delta at all",
        killed or problem.error.message,
        command("export-model", "resume", model),
    )


def _remedy(model: Path, log: DeltaLog | None, problem: Damage, ckpt_dir: Path | None) -> str:
    """Return the command that repairs `problem`: remove a file that no server needs, or publish a new base.

    `log` is the newest version's, None if it takes no deltas or cannot be read. `ckpt_dir` is for the
    command, None if it is not known. Raises ManifestError if the model or a delta's manifest cannot be
    read.
    """
    path = problem.path
    if not isinstance(problem.error, DeltaGap):
        if log is not None and path.parent == log.path and _is_spare(log, path):
            return command("rm", "-r", path)
        newest = newest_version(model)
        if path.parent == model and (newest is None or path != newest.path):
            return command("rm", "-r", path)
    options = ["--new-base", "always"] if log is not None else _deltas(model)
    found = _new_base(model, ckpt_dir, options)
    return f"{found} --data compact" if problem.error.hint == OVERWRITTEN_HINT else found


def _new_base(model: Path, ckpt_dir: Path | None, options: list[str]) -> str:
    found = new_base(model, ckpt_dir)
    return found if options else found.replace(" --new-base always", "")


def _is_spare(log: DeltaLog, delta: Path) -> bool:
    """True if the delta at the path `delta` is not needed to get from any base to the newest position.

    Raises ManifestError if the manifest of another delta cannot be read.
    """
    left = tuple(other for other in log.deltas if other.path != delta)
    newest = max([log.base.at.position, *(other.end for other in log.deltas)])
    without = replace(log, deltas=left)
    try:
        return all(
            without.chain(base.at.position, newest) or base.at.position == newest for base in log.bases
        )
    except PositionError:
        return False


def _loads(child: VersionDir) -> bool:
    return any((child.path / name).is_file() for name in SAVED_MODEL_FILES)


def _told(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


class Examination(Struct, frozen=True):
    """The published model, the servers' answers, and findings about present and coming problems.

    `ckpt_dir` is None if checkpoints were not examined.
    """

    model: Path
    found: VerifiedModel
    findings: tuple[Finding, ...]
    ckpt_dir: Path | None = None
    servers: tuple[Server, ...] = ()
    tags: tuple[ListedTag, ...] = ()

    @property
    def is_well(self) -> bool:
        """True if nothing is wrong; there may be warnings."""
        return all(finding.level is not Level.WRONG for finding in self.findings)


def ask(address: str, name: str, deadline: float, access: ServerAccess) -> Server:
    """Ask the server at `address`, HOST:PORT, for its versions of the model `name`, and return the answer.

    If the server does not answer, or refuses, the result has the error as its `failure`. Each call waits at
    most `deadline` seconds. `access` has the keys for TLS. Raises UsageError or LfsPointer if a file of
    `access` cannot be used.
    """
    from serving.client import ModelClient
    from serving.updates import read_served

    with ModelClient(address, name, deadline_s=deadline, access=access) as client:
        try:
            return Server(client.address, name, tuple(read_served(client, each) for each in client.status()))
        except CallFailed as error:
            return Server(client.address, name, failure=error)


def examine(
    model: Path,
    ckpt_dir: Path | None,
    *,
    now: float,
    is_remote: bool = False,
    servers: tuple[Server, ...] = (),
    patience: float = PATIENCE,
) -> Examination:
    """Examine a model, its servers and, if `ckpt_dir` is given, the trainer's checkpoints.

    `now` is in seconds since 1970; servers that lack a publication older than `patience` seconds are late.
    Nothing is changed, but for a moment there are staging directories, to see which links the file system
    permits. `is_remote`: the path stands for a model in a store, and checks of this machine's files are
    skipped.

    `servers` are the answers of `ask`. A check that fails is a finding, too.

    Raises:
        NotUpdatable: nothing is published.
        ManifestError: the model's directory cannot be listed.
        CheckpointChanged, PositionMoved, DiskFull: the files could not be read to the end.
    """
    found = verify_model(model)
    looks: list[tuple[Check, Callable[[], Iterator[Finding]]]] = [
        (Check.FILES, lambda: damage(model, found, ckpt_dir)),
        (Check.FINITE, lambda: not_finite(model, found)),
        (Check.STRANGERS, lambda: strangers(model)),
        (Check.PERMISSIONS, lambda: permissions(model)),
        (Check.HOLD, lambda: held(model, found, now)),
        (Check.CLOCK, lambda: times(model, found, now)),
        (Check.CLOCK, lambda: clock_of_files(model, now)),
        (Check.PUBLISHER, lambda: publisher(model, now)),
        (Check.DURABILITY, lambda: durability(model)),
        (Check.ROOM, lambda: room(model)),
        (Check.TABLES, lambda: tables(model, found, ckpt_dir)),
        (Check.MAPPED, lambda: mapped(model, ckpt_dir)),
        (Check.VALUES, lambda: wild(model, found)),
        (Check.BUDGET, lambda: budget(found)),
        (Check.TAGS, lambda: tags(tags_of(model), model)),
        (Check.COPY, lambda: copied(model)),
        (Check.ORPHANS, lambda: orphans(model, found)),
        (Check.LEFT_OVERS, lambda: left_overs(model)),
    ]
    if is_remote:
        looks = [(check, look) for check, look in looks if check not in _OF_THIS_MACHINE]
    if ckpt_dir is not None:
        directory, linked_to = ckpt_dir, None if is_remote else model
        looks.append((Check.LINKS, lambda: checkpoint(linked_to, directory)))
    findings = [finding for check, look in looks for finding in _each(check, look)]
    if servers:
        at = datetime.fromtimestamp(now, timezone.utc)
        findings += judge(Model.read(model), servers, at, Limits(patience))
    names: tuple[ListedTag, ...] = ()
    with suppress(ExportError):  # which is a finding
        names = tags_of(model)
    return Examination(model, found, tuple(findings), ckpt_dir, servers, names)


_OF_THIS_MACHINE = (
    Check.STRANGERS,
    Check.PERMISSIONS,
    Check.LEFT_OVERS,
    Check.DURABILITY,
    Check.ROOM,
    Check.MAPPED,
    Check.COPY,
)


def _each(check: Check, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings that `look` yields; its ExportError or OSError becomes the only finding.

    `check` is the subject of that finding. A FileNotFoundError or CheckpointError may come from retention,
    which removes files meanwhile: after one the check is repeated, at most twice.
    """
    for is_last in (False, False, True):
        try:
            return [*look()]
        except (ExportError, OSError) as error:
            if is_last or not isinstance(error, FileNotFoundError | CheckpointError):
                return [_unexamined(as_export_error(error), check)]
    raise AssertionError("the loop returns")


def _unexamined(error: ExportError, check: Check) -> Finding:
    return Finding(Code.UNEXAMINED, error.message, error.cause, error.hint, check=check.value)

"""Names of positions: tags, which people set; the newest and the previous one; times.

    900                        a position; where versions take no deltas, a version
    prod                       a tag
    @latest  @previous         the newest position, and the one before it
    @2h  @yesterday            the newest position that was published two hours ago, or a day ago
    @2026-11-26T08:00          the same, for a time; UTC, unless it names another zone

`resolve_position` reads all of them, for every command. The time of a publication is in its manifest.

    <model>/tags.json          each tag's position, who set it, when and why

The document is replaced in one step, under the model's lock. Retention keeps all that a tagged position needs
(`tagged_versions`, and `retire_deltas` of `exporter.publish.retention`). Servers do not read tags, and tags
are not signed: where keys are trusted, a tag cannot be used as a position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from exporter.delta.spans import nearest_base
from exporter.errors import (
    LfsPointer,
    ManifestError,
    NotUpdatable,
    PositionError,
    PositionUnknown,
    UsageError,
    nearest,
)
from exporter.publish.delta_log import DeltaLog, log_of, logs_of
from exporter.publish.hold import HeldBy
from exporter.publish.versions import (
    VersionDir,
    delta_positions,
    is_trusting,
    newest_of,
    newest_version,
    nothing_published,
    read_head,
    version_dirs,
)
from exporter.storage.files import read_regular, sync, write_durably, writing
from exporter.storage.layout import TAGS_FILE
from exporter.storage.local_paths import quoted
from exporter.wire.json_documents import Count, DocumentError, Moment, Text, decode, encode_indented

if TYPE_CHECKING:
    from exporter.publish.staging import Staging

LONGEST_TAGS = 1 << 16
"""The most bytes of the document, which is part of a store's head: some hundred tags."""

_LONGEST_NUMBER = 19  # digits of 2**63 - 1
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_AGO = re.compile(r"([0-9]{1,9})([smhdw])")
_RESERVED = r"latest|previous|yesterday|[0-9]+[smhdw]?|[0-9]{4}-[0-9]{2}-[0-9]{2}.*"
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{3}(?:[0-9]{3})?)?)?(?:[zZ]|[+-][0-9]{2}:[0-9]{2})?)?"
)
"""The forms that `datetime.fromisoformat` reads in every release of Python; newer ones read more."""
_NUMBERS = r"[0-9][0-9_]*(?:e[0-9]+)?|0[box][0-9a-f]+"
"""Not names, as other programs read these as numbers: 1_000, 1e3, 0x10."""
_NAME = rf"^(?!(?:{_RESERVED}|{_NUMBERS})$)[a-z0-9][a-z0-9._-]{{0,63}}$(?!\n)"
_EXPECTED = "expected a number, a tag, @latest, @previous, @2h, @yesterday or @2026-11-26T08:00 (UTC)"


class PositionTag(Struct, frozen=True, omit_defaults=True):
    """The position of a tag, who set it, when, and why."""

    position: Count
    """The position, or the version where versions take no deltas."""
    who: Text
    """The user and the machine that set it: `user@machine`."""
    when: Moment
    """When it was set."""
    why: Text = ""
    """The reason that was given; empty if none was, shortened if it is long."""

    @classmethod
    def now(cls, position: int, why: str | None = None) -> PositionTag:
        """A tag of `position` that this process's user sets now; `why` is the reason, None without one."""
        by = HeldBy.now(position, why)
        return cls(position, by.who, by.when, by.why)


class ListedTag(Struct, frozen=True):
    """A tag of a model."""

    name: str
    """Its name."""
    position: int
    """The position that it names, or the version where versions take no deltas."""
    who: str
    """The user and the machine that set it: `user@machine`."""
    when: datetime
    """When it was set."""
    why: str
    """The reason that was given; empty if none was."""
    gone: str
    """The reason why its values cannot be restored; empty if they can."""
    keeps: int | None
    """The older version that retention keeps for it, even if the values are gone; null if there is none."""

    @property
    def why_gone(self) -> str:
        """The reason why the tag's values are gone, with the version that stays nevertheless.

        Empty if they are not.
        """
        stays = "" if self.keeps is None else f"; version {self.keeps} stays until the tag is deleted"
        return self.gone and f"{self.gone}{stays}"


class TagsDocument(Struct, frozen=True):
    """The file `tags.json`: the tags by their names."""

    tags: dict[Annotated[str, Meta(pattern=_NAME)], PositionTag]


def read_tags(model: Path) -> Mapping[str, PositionTag]:
    """Return the tags of a model by their names, sorted by name; empty without any.

    Raises:
        ManifestError: the document cannot be read, or is not one.
        CheckpointError: the document cannot be fetched from its store.
    """
    if (content := tags_document(model)) is None:
        return {}
    try:
        return dict(sorted(_tags_in(content).items()))
    except DocumentError as error:
        raise _no_tags(model / TAGS_FILE, str(error)) from None


def _tags_in(content: bytes) -> dict[str, PositionTag]:
    """Return the tags in the bytes of a document, by name; DocumentError if it is not one."""
    found: TagsDocument = decode(content, TagsDocument, TAGS_FILE, written=encode_indented)
    return found.tags


def merged_tags(had: bytes | None, ours: bytes | None, theirs: bytes | None) -> bytes | None:
    """Merge two tag documents, `ours` and `theirs`, tag by tag; both derive from the document `had`.

    Return the bytes, or None. None, in and out, is a document without tags. If both have changed a tag,
    `theirs` counts. If theirs has changed and any document cannot be read, `theirs` is returned. If the
    result equals one of the two, its bytes are returned unchanged.
    """
    if theirs == had:
        return ours
    try:
        documents = (had, ours, theirs)
        before, here, there = ({} if each is None else _tags_in(each) for each in documents)
    except DocumentError:
        return theirs
    names = {*before, *here, *there}
    chosen = {name: (here if there.get(name) == before.get(name) else there).get(name) for name in names}
    merged = {name: tag for name, tag in chosen.items() if tag is not None}
    if merged in (there, here):  # with the bytes of its writer
        return theirs if merged == there else ours
    return encode_indented(TagsDocument(dict(sorted(merged.items()))))


def tags_document(model: Path) -> bytes | None:
    """Return the bytes of the document of a model's tags, unparsed; None without one.

    Raises:
        ManifestError: they cannot be read, or are too many; or they are a pointer of Git LFS.
        CheckpointError: they cannot be fetched from their store.
    """
    path = model / TAGS_FILE
    try:
        return read_regular(path, LONGEST_TAGS)
    except FileNotFoundError as error:
        if not path.is_symlink():
            return None
        raise _no_tags(path, f"it is a link to what is not there: {error.strerror}") from None
    except LfsPointer as error:
        raise _no_tags(path, f"{error.message}; {error.hint}") from None
    except OSError as error:
        raise _no_tags(path, error.strerror or str(error)) from None


def _no_tags(path: Path, cause: str) -> ManifestError:
    return ManifestError(
        f"{path} does not hold the model's tags",
        cause=cause,
        hint=f"remove it, and set the tags again: rm -r {quoted(path)}",
    )


def write_tags(tags: Mapping[str, PositionTag], staging: Staging) -> None:
    """Replace the tags of the staging's model by these, atomically and durably.

    The caller has the model's lock.

    Raises:
        UsageError: they are too long for one document.
        TargetNotWritable, DiskFull, PublishError: the operating system refuses to write or sync the file.
    """
    content = encode_indented(TagsDocument(dict(sorted(tags.items()))))
    if len(content) > LONGEST_TAGS:
        raise UsageError(
            f"{len(tags)} tags take {len(content)} bytes, and {TAGS_FILE} has {LONGEST_TAGS} at the most",
            hint=f"delete one that is not needed: export-model tag {quoted(staging.model)} NAME --delete",
        )
    path, new = staging.model / TAGS_FILE, staging.path.with_name(TAGS_FILE)
    with writing(path):
        # left by an earlier call with this staging: `write_durably` makes new files only
        new.unlink(missing_ok=True)
        write_durably(new, content)
        new.replace(path)
        sync(staging.model)


def require_tag_name(name: str, model: Path | None = None) -> None:
    """Refuse a name that a tag cannot have; the hint's command names `model`, if it is given.

    Raises:
        UsageError: it has other characters, or is a number, a time, or a name like `latest`.
    """
    if not isinstance(name, str) or re.match(_NAME, name) is None:
        raise UsageError(
            f"{str(name)[:80]!r} cannot be the name of a tag",
            cause="a tag has up to 64 of the characters a-z, 0-9, '.', '_' and '-', begins with one of the "
            "first two kinds, and is neither a number nor a time",
            hint=_instead(str(name), model),
        )


def _instead(name: str, model: Path | None) -> str:
    """The hint for a name that a tag cannot have.

    It proposes a command for `model`, or only words if that is None. The proposed command changes no existing
    tag.
    """
    of_model = "" if model is None else f"export-model tag {quoted(model)} "
    tag, position = split_position(re.sub("[=:]", "@", name, count=1)) or ("", "")
    if position and re.match(_NAME, tag):
        return f"the position stands behind the name: {of_model}{tag} {quoted(position)}"
    if is_position(name):
        free = f"at-{re.sub('[^a-z0-9]', '', name.lower())}"
        return f"a name stands before the position: {of_model}{free} {quoted(name)}"
    return f"write {quoted(near) if (near := _allowed(name)) else 'prod, for example'}"


def is_position(text: str) -> bool:
    """True if a text is a number, a time or a name like `latest`, with or without @: it cannot be a tag."""
    return re.fullmatch(rf"@?(?:{_RESERVED})", text) is not None


def _allowed(name: str) -> str:
    """The name with other characters replaced by `-`; empty if that cannot be a tag's name either."""
    near = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")
    return near if re.match(_NAME, near) else ""


def no_such_tag(model: Path, name: str, tags: Iterable[str]) -> PositionUnknown:
    """The error for a tag that does not exist; its hint names the nearest of the existing `tags`."""
    near = nearest(name, tags)
    return PositionUnknown(
        f"{model} has no tag {name!r}",
        cause=f"its tags are {', '.join(tags)}" if tags else "it has none",
        hint=f"did you mean {near}?" if near else f"list the positions: export-model history {quoted(model)}",
    )


class Standing(Struct, frozen=True, dict=True):
    """The positions of a model at one moment, also in logs that have ended.

    `log` is the newest version's; None if that takes no deltas.
    """

    model: Path
    log: DeltaLog | None
    versions: Sequence[VersionDir]

    @classmethod
    def of(cls, model: Path) -> Standing:
        """Read the positions under a model base path.

        Raises:
            NotUpdatable: nothing is published.
            ManifestError: the manifest of the newest version cannot be read, or a directory cannot be
                listed.
            CheckpointError: that manifest cannot be fetched from its store.
        """
        versions = version_dirs(model)
        if newest_of(versions) is None:
            raise nothing_published(model)
        try:
            return cls(model, log_of(model, versions), versions)
        except NotUpdatable:
            return cls(model, None, versions)

    @cached_property
    def logs(self) -> tuple[DeltaLog, ...]:
        """All logs with an existing base, newest first.

        Versions with a damaged manifest are left out. CheckpointError if a manifest cannot be fetched from
        its store.
        """
        return logs_of(self.model, self.versions)

    def log_at(self, position: int) -> DeltaLog | None:
        """Return the log in which a base is at the position or a delta ends there.

        None if no log with a base has it. Of several, the newest version's log counts first, then the newer
        ones. CheckpointError if a manifest cannot be fetched from its store.
        """
        if self.log is not None and self.log.has(position):
            return self.log
        return next((log for log in self.logs if log.has(position)), None)

    @cached_property
    def plain(self) -> Mapping[int, Path]:
        """The paths of the versions that take no deltas, by version number.

        Versions with a damaged manifest are left out. CheckpointError if a manifest cannot be fetched from
        its store.
        """
        found = {}
        for child in self.versions:
            with suppress(ManifestError):
                if child.has_manifest and read_head(child.path).log is None:
                    found[child.version] = child.path
        return found

    @cached_property
    def paths(self) -> Mapping[int, list[Path]]:
        """For each position, the paths of the versions that are there and of the deltas that end there.

        Versions that take no deltas are listed by their number. Versions with a damaged manifest, and logs
        whose directory cannot be listed, are left out. CheckpointError if a manifest cannot be fetched from
        its store.
        """
        paths = {number: [path] for number, path in self.plain.items()}
        for log in self.logs:
            for base in log.bases:
                paths.setdefault(base.at.position, []).append(base.path)
            for delta in log.deltas:
                paths.setdefault(delta.end, []).append(delta.path)
        return paths

    @property
    def newest(self) -> int:
        """The model's newest position; the newest version's number if that takes no deltas.

        ManifestError if the manifest of the newest delta cannot be read, CheckpointError if that cannot be
        fetched.
        """
        return self.log.at.position if self.log is not None else max(self.plain)

    def loss(self, position: int) -> str:
        """Return the reason why the values of a position cannot be restored; empty if they can.

        ManifestError if a directory or a delta's manifest that decides this cannot be read, CheckpointError
        if a manifest cannot be fetched from its store.
        """
        if (log := self.log_at(position)) is not None:
            try:
                nearest_base(log.deltas, [base.at.position for base in log.bases], position)
            except PositionError:
                return "no base leads there any more"
            return ""
        if position in self.plain:
            return ""
        for delta in (delta for log in self.logs for delta in log.deltas):
            if delta.merged_count > 1 and delta.start < position < delta.end:
                return f"it was merged away, into {delta.path.name}"
        if position in delta_positions(self.model):
            return "its log has ended, and no base of that is left"
        return "nothing is published there, or no longer"

    def version_at(self, position: int) -> int:
        """Return the version from which the fewest deltas reach a position: its own, if there is one.

        Raises:
            PositionUnknown: no version reaches it.
            ManifestError: a directory or a delta's manifest that decides this cannot be read.
            CheckpointError: a manifest cannot be fetched from its store.
        """
        self.require(position)
        if (log := self.log_at(position)) is None:
            return position
        return nearest_base(log.deltas, [base.at.position for base in log.bases], position)

    def require(self, position: int) -> None:
        """Refuse a position whose values cannot be restored.

        Raises:
            PositionUnknown: nothing is there, or no base is left from which deltas reach it.
            ManifestError: a directory or a delta's manifest that decides this cannot be read.
            CheckpointError: a manifest cannot be fetched from its store.
        """
        if why := self.loss(position):
            known = ", ".join(map(str, sorted(self.paths)[-20:]))
            raise PositionUnknown(
                f"nothing that is published leads to position {position}",
                cause=f"{why}; there are {known}",
                hint=f"list the positions: export-model history {quoted(self.model)}",
            )


def split_position(text: str) -> tuple[str, str] | None:
    """Split `MODEL@POSITION` into the model and the position, for `resolve_position`; None without an @.

    The @ of a special name may be left out (MODEL@latest, MODEL@2h); the returned position has it.
    """
    model, at, position = text.rpartition("@")
    if not at:
        return None
    is_special = model.endswith("@") or (re.fullmatch(_RESERVED, position) and not position.isdecimal())
    return model.removesuffix("@"), f"@{position}" if is_special else position


def tags_of(model: Path) -> tuple[ListedTag, ...]:
    """Return the tags of a model, sorted by name; () without any.

    Raises:
        NotUpdatable: nothing is published.
        ManifestError: the tags, or a manifest, cannot be read, or a directory cannot be listed.
        CheckpointError: a manifest or the tags cannot be fetched.
    """
    found = listed_tags(model)
    if not found and newest_version(model) is None:
        Standing.of(model)  # says what is wrong
    return found


def listed_tags(model: Path) -> tuple[ListedTag, ...]:
    """Return the tags of a model that is known to have versions, sorted by name; () without any.

    Without tags no version is read.

    Raises:
        NotUpdatable: there are tags, and nothing is published.
        ManifestError: the tags, or a manifest, cannot be read, or a directory cannot be listed.
        CheckpointError: a manifest or the tags cannot be fetched.
    """
    if not (tags := read_tags(model)):
        return ()
    there = Standing.of(model)
    newest = newest_of(there.versions)
    found = []
    for name, tag in tags.items():
        needed = tagged_versions(there.versions, {name: tag}).keys()
        keeps = next((each for each in needed if newest is None or each != newest.version), None)
        gone = there.loss(tag.position)
        found.append(ListedTag(name, tag.position, tag.who, tag.when, tag.why, gone, keeps))
    return tuple(found)


def resolve_position(named: int | str, model: Path) -> int:
    """Return the position of a model that a number, a tag, or a name that begins with @ means.

    A number is returned as it is, whether or not it was published: the caller reports that.

    Raises:
        UsageError: it is none of these; or it is a tag, and keys are trusted there (tags are not signed).
        PositionUnknown: there is no such tag, its values are gone, or nothing had been published at that
            time.
        NotUpdatable: nothing is published.
        ManifestError: a manifest, or the document of tags, cannot be read.
        CheckpointError: a manifest or the tags cannot be fetched.
    """
    text = str(named)
    if not isinstance(named, str):
        return named
    if re.fullmatch(rf"[0-9]{{1,{_LONGEST_NUMBER}}}", text) and int(text) < 1 << 63:
        return int(text)
    if text.startswith("@"):
        return _special(text[1:], Standing.of(model))
    if re.match(_NAME, text) is None:
        is_special = re.fullmatch(_RESERVED, text) is not None and not text.isdigit()
        raise UsageError(
            f"{text[:80]!r} names no position",
            cause=_EXPECTED,
            hint=f"write @{text}" if is_special else f"list them: export-model history {quoted(model)}",
        )
    return _tagged(text, model)


def version_named(named: str, model: Path) -> int:
    """Return the version from which the fewest deltas reach a position, named as `resolve_position` reads it.

    Raises:
        UsageError: it is no name of a position; or it is a tag, and keys are trusted there.
        PositionUnknown: there is no such tag, or no version reaches the position.
        NotUpdatable: nothing is published.
        ManifestError: a manifest, or the document of tags, cannot be read.
        CheckpointError: a manifest or the tags cannot be fetched.
    """
    return Standing.of(model).version_at(resolve_position(named, model))


def _tagged(name: str, model: Path) -> int:
    tags = read_tags(model)
    if name not in tags and newest_version(model) is None:
        raise nothing_published(model)
    if name not in tags:
        raise no_such_tag(model, name, tags)
    position = tags[name].position
    if is_trusting(model):
        raise UsageError(
            f"the tag {name} names position {position}, and nobody has signed that",
            cause="keys are trusted here, and tags are not signed",
            hint=f"if it is meant, name the position itself: {position}",
        )
    if why := Standing.of(model).loss(position):
        raise PositionUnknown(
            f"the tag {name} of {model} names position {position}, which is gone",
            cause=why,
            hint=f"set it anew: export-model tag {quoted(model)} {quoted(name)} POSITION",
        )
    return position


def _meant(text: str, model: Path) -> str:
    """The hint for an unknown name with @: the tag of that name, or the nearest special name.

    A tag needs no @; `text` has none. ManifestError if the tags cannot be read.
    """
    if text in read_tags(model):
        return f"write {text}"
    near = nearest(text, ("latest", "previous", "yesterday"))
    return f"did you mean @{near}?" if near else "for example: @latest, or @2h"


def _special(text: str, there: Standing) -> int:
    """Return the position of a special name, given without its @: `latest`, `previous`, or a time.

    Raises:
        UsageError: it is none of these.
        PositionUnknown: there is only one position, or nothing had been published at that time.
        ManifestError: a manifest, a directory, or the document of tags cannot be read.
        CheckpointError: a manifest cannot be fetched.
    """
    if text == "latest":
        return there.newest
    earlier = (each for each in sorted(there.paths, reverse=True) if each != there.newest)
    known = (each for each in earlier if (there.log and there.log.has(each)) or not there.loss(each))
    if text == "previous":
        if (found := next(known, None)) is None:
            raise PositionUnknown(
                f"{there.newest} is the only position of {there.model}: there is none before it"
            )
        return found
    until = _moment(text, datetime.now(timezone.utc))
    if until is None:
        raise UsageError(f"'@{text[:80]}' names no position", cause=_EXPECTED, hint=_meant(text, there.model))
    oldest = ""
    for position in chain([there.newest], known):
        times = [time for path in there.paths[position] if (time := _published(path)) is not None]
        if any(time <= until for time in times):
            return position
        oldest = f"{position}, at {min(times):%Y-%m-%d %H:%M:%S} UTC" if times else oldest
    raise PositionUnknown(
        f"nothing of {there.model} was published by {until:%Y-%m-%d %H:%M:%S} UTC",
        cause=f"the oldest that is left is {oldest}" if oldest else "",
        hint=f"list the positions: export-model history {quoted(there.model)}",
    )


def _published(path: Path) -> datetime | None:
    """The publication time of a version or delta, in UTC; None if its manifest is damaged or missing.

    CheckpointError if the manifest cannot be fetched.
    """
    with suppress(ManifestError):  # one that is damaged, or was just removed
        return read_head(path).created.astimezone(timezone.utc)
    return None


def _moment(text: str, now: datetime) -> datetime | None:
    """Return the time that a name means (`2h` and `yesterday`: that long before `now`), in UTC.

    A time without a zone is in UTC. None if the name does not mean a time.
    """
    ago = _AGO.fullmatch("1d" if text == "yesterday" else text)
    with suppress(ValueError, OverflowError):
        if ago is not None:
            return now - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
        if _TIME.fullmatch(text) is None:
            return None
        # Python 3.10 does not read the Z
        found = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    return None


def tagged_versions(versions: Iterable[VersionDir], tags: Mapping[str, PositionTag]) -> dict[int, str]:
    """The numbers of the versions that tagged positions need, each with the name of one tag that needs it.

    `versions` are as `version_dirs` lists them, `tags` are by name. A tag needs the version at its position,
    or else the base before it: the newest before that takes deltas. A version with a damaged manifest counts
    as a base. A tag without either needs none. CheckpointError if a manifest cannot be fetched from its
    store.
    """
    numbers = {child.version: child.path for child in versions if child.has_manifest}
    found: dict[int, str] = {}
    for name, tag in tags.items():
        for number in sorted((each for each in numbers if each <= tag.position), reverse=True):
            if number == tag.position or _may_take_deltas(numbers[number]):
                found.setdefault(number, name)
                break
    return found


def _may_take_deltas(version: Path) -> bool:
    with suppress(ManifestError):
        return read_head(version).log is not None
    return True

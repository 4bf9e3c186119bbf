"""Set, delete and list the tags of a model: names of its positions (`exporter.publish.tags`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from exporter.publish.commit import Staging, model_lock
from exporter.publish.tags import (
    PositionTag,
    Standing,
    no_such_tag,
    read_tags,
    require_tag_name,
    resolve_position,
    write_tags,
)
from exporter.publish.versions import newest_version, nothing_published
from exporter.storage.files import writing


class Tagging(Struct, frozen=True):
    """A change of a tag: `tag` after the change and the tag `before`; None for a tag that does not exist.

    `meets` lists what a plan would meet in a store.
    """

    name: str
    tag: PositionTag | None
    before: PositionTag | None
    meets: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """False if the tag is already as requested: at the same position, with the reason if one is given."""
        then, now = self.before, self.tag
        if then is None or now is None:
            return then is not now
        return then.position != now.position or (bool(now.why) and then.why != now.why)


_Change: TypeAlias = Callable[[Mapping[str, PositionTag]], Tagging]


def set_tag(
    model: Path,
    name: str,
    position: int | str = "@latest",
    *,
    reason: str | None = None,
    dry_run: bool = False,
) -> Tagging:
    """Set a tag to a position, which retention keeps from now on; an existing tag of this name moves.

    `position` is a number or a name; `reason` is kept with the tag, None without. Returns the tag before and
    after. A `dry_run` checks everything and writes nothing.

    Raises:
        UsageError: a tag cannot have the name, or `position` is not one; or there are too many tags.
        PositionUnknown: the values of the position cannot be restored.
        NotUpdatable: nothing is published.
        TargetBusy: another exporter had the model's lock for too long.
        ExportError: the model or its tags cannot be read or written; the tags are as they were.
    """
    require_tag_name(name, model)
    if reason is not None:
        # Bytes of a command line that are not UTF-8 are lone surrogates, which no file of tags can hold.
        reason = reason.encode(errors="backslashreplace").decode()

    def change(tags: Mapping[str, PositionTag]) -> Tagging:
        number = resolve_position(position, model)
        Standing.of(model).require(number)
        return Tagging(name, PositionTag.now(number, reason), tags.get(name))

    return _changed(model, change, dry_run=dry_run)


def _changed(model: Path, change: _Change, *, dry_run: bool) -> Tagging:
    """Call `change` with a model's tags (by name) under its lock; write the tag, and return the change.

    Nothing is written if the tag is already as requested. A dry run neither locks nor writes. Raises
    NotUpdatable if nothing is published, TargetBusy, ManifestError or PublishError if tags cannot be locked,
    read or written, UsageError if there are too many tags, and what `change` raises.
    """
    if newest_version(model) is None:  # without a publication make nothing, not even a lock
        raise nothing_published(model)
    if dry_run:
        return change(read_tags(model))
    with Staging(model) as staging, writing(staging.path), model_lock(model):
        tags = dict(read_tags(model))
        found = change(tags)
        if found.changes:
            tags.pop(found.name, None)
            write_tags(tags if found.tag is None else tags | {found.name: found.tag}, staging)
        return found


def delete_tag(model: Path, name: str, *, dry_run: bool = False) -> Tagging:
    """Delete a tag of a model, and return the change, with the deleted tag as `before`.

    Retention may then remove the position of the tag. A `dry_run` writes nothing.

    Raises:
        UsageError: a tag cannot have the name.
        PositionUnknown: there is no such tag.
        NotUpdatable: nothing is published.
        TargetBusy: another exporter had the model's lock for too long.
        ExportError: the tags cannot be read or written; they are as they were.
    """
    require_tag_name(name, model)

    def change(tags: Mapping[str, PositionTag]) -> Tagging:
        if name not in tags:
            raise no_such_tag(model, name, tags)
        return Tagging(name, None, tags[name])

    return _changed(model, change, dry_run=dry_run)

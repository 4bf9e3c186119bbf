"""Push: upload local publications to an object store, each version and delta whole or not at all.

The next push from the same directory finishes one that was killed. A push is refused from a directory that
does not continue the publications of the store: a model has one history (see `head`). Holds are uploaded
before the publications that they hold back, and lifted after everything else. Tags are uploaded with them.

What a pulled copy took back by itself is a decision about its own servers (`exporter.transfer.taken_back`).
It is not pushed once the store has gone on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import (
    ForeignLineage,
    ManifestError,
    NotTrusted,
    PositionMoved,
    TargetNotWritable,
    UsageError,
)
from exporter.publish.hold import Hold, as_set_there
from exporter.publish.versions import nothing_published, require_base_path
from exporter.storage.layout import HOLD_DOCUMENT_FILE, HOLD_FILE, MANIFEST_FILE, TAGS_FILE
from exporter.storage.local_paths import quoted, store_url, without_secrets
from exporter.storage.objects import ObjectWriter
from exporter.storage.url import Url
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.transfer.carrier import Carrier
from exporter.transfer.head import ITEM, Head, fetch_head, recall, remember
from exporter.transfer.items import (
    Item,
    StoredItems,
    StoredModel,
    by_path,
    forged,
    local_holds,
    local_item,
    local_items,
    path_of,
    require_sound,
    stored_items,
)
from exporter.transfer.same_files import StoredFiles
from exporter.transfer.taken_back import restored

if TYPE_CHECKING:
    from exporter.publish.signing import Trust


_OF_ITS_OWN = "push to a URL of its own, or begin from the store's: export-model pull {} MODEL"


class PushPlan(Struct, frozen=True):
    """The items that a push would upload, and the paths of the publications that it would remove.

    `stored` is the model in the store as it was listed, `position` the newest local position, and `holds` the
    content of the files of holds and tags to be set, by path below the model.
    """

    model: Path
    url: Url
    upload: tuple[Item, ...]
    remove: tuple[str, ...]
    stored: StoredItems
    position: int | None
    holds: dict[str, bytes]
    prune: bool = False
    trust: Trust | None = None
    copied: int = 0
    """Bytes that are not uploaded: the store has them, and copies them."""

    @property
    def changes_holds(self) -> bool:
        """True if the store's holds or tags differ from `holds`."""
        return self.stored.holds != self.holds

    @property
    def bytes_(self) -> int:
        """The number of bytes to upload, without those that the store copies."""
        return sum(item.bytes_ for item in self.upload) - self.copied


def plan_push(model: Path, url: str, *, prune: bool = False, trust: Trust | None = None) -> PushPlan:
    """Compare a local model with the model in a store, and return the plan of a push; nothing is written.

    With `prune`, the plan removes the store's publications that are not here. With `trust`, only publications
    that its keys have signed are pushed; None pushes all.

    Raises:
        UsageError: the URL is not that of a model in a store; `model` is not a model base path; a key cannot
            be used; the library that reads stores is not installed.
        TargetNotWritable: `model`, or a parent, is a file or a broken symbolic link.
        NotUpdatable: nothing is published here.
        ForeignLineage: the store has another model, or another publication at the same path.
        PositionMoved: another machine has published or changed holds or tags there since this directory last
            pushed or pulled; or the store has gone on from a rollback that was made here alone.
        NotTrusted: `trust` is given, and no trusted key has signed a publication here or there.
        VerificationError: the index of a local version differs from its manifest.
        ManifestError, CheckpointError: a manifest, the head or an index is damaged, or the store cannot be
            read.
        OSError: a file of a hold, or an index, cannot be read.
    """
    place = parse(url)
    store = ObjectWriter(place)
    ours = _ours(model, trust)
    found = fetch_head(store)
    head = Head() if found is None else found[0]
    return _plan(model, ours, place, stored_items(store, ours, trust=trust), head, prune, trust)


def _ours(model: Path, trust: Trust | None) -> dict[str, Item]:
    require_base_path(model)
    items = by_path(local_items(model))
    if trust is not None:
        items = _trusted(items, model, trust)
    for path in items:
        if re.fullmatch(ITEM, path) is None:
            raise ManifestError(
                f"{model / path} has a name that no version has in a store",
                hint=f"rename it, if no server reads it: {int(path)}",
            )
    if not items:
        raise nothing_published(model)
    return items


def _trusted(items: dict[str, Item], model: Path, trust: Trust) -> dict[str, Item]:
    """Return the items of a local model, by path, that a trusted key has signed.

    Items from before the first signed version are left out.

    Raises:
        NotTrusted: a later item is not signed, or there is no signed version.
        UsageError: a key cannot be used.
    """
    found, others = dict[str, Item](), dict[str, NotTrusted]()
    for path, item in items.items():
        try:
            trust.check(item.content, path, model / path)
            found[path] = item
        except NotTrusted as error:
            others[path] = error
    _refuse_forged(StoredItems({}, {}, {}, found, others))
    return found


def _refuse_forged(items: StoredItems) -> None:
    for error in forged(items).values():
        raise error


def _plan(
    model: Path,
    ours: dict[str, Item],
    place: Url,
    stored: StoredItems,
    head: Head,
    prune: bool,
    trust: Trust | None,
) -> PushPlan:
    _refuse_forged(stored)
    for path, item in stored.items.items():
        if path in ours and ours[path].digest != item.digest:
            raise ForeignLineage(
                f"{place}/{path} is another publication than {model / path}",
                hint=_OF_ITS_OWN.format(quoted(place)),
            )
    if not head.path and (foreign := stored.items.keys() - ours.keys()):
        raise ForeignLineage(
            f"{place} holds {min(foreign)}, which {model} does not",
            hint=_OF_ITS_OWN.format(quoted(place)),
        )
    upload = tuple(item for path, item in ours.items() if path not in stored.items)
    _require_not_passed(model, place, ours, upload, stored)
    gone = tuple(sorted(stored.items.keys() - ours.keys())) if prune else ()
    position = list(ours.values())[-1].manifest.position
    holds, same = _holds(model, stored, place), StoredFiles(model, stored, stored.items.values())
    copied = sum(same.copies_of(item, model / item.path) for item in upload)
    plan = PushPlan(model, place, upload, gone, stored, position, holds, prune, trust, copied)
    if head.path:
        _require_ours(plan, head)
    return plan


def _require_not_passed(
    model: Path, place: Url, ours: dict[str, Item], upload: Iterable[Item], stored: StoredItems
) -> None:
    """Raise PositionMoved if the store at `place` has gone on from a rollback that was made here alone.

    `ours` are the publications here by path, and `upload` those that the store does not have. ManifestError
    if the file of remembered heads is damaged.
    """
    known = recall(model, place)
    synced = None if known is None else ours.get(known.path) or stored.items.get(known.path)
    last = -1 if synced is None else synced.manifest.position
    newest = max((item.manifest.position for item in stored.items.values()), default=-1)
    for item in upload:
        position, to = item.manifest.position, restored(item)
        is_own = last < position or (known is not None and item.path in (known.own or {}))
        if to is not None and is_own and position <= newest:
            again = f"export-model rollback {quoted(place)} --to {quoted(to)}"
            raise PositionMoved(
                f"{place} has gone on from what {model / item.path} took back",
                cause="that was decided for the servers of this directory alone",
                hint=f"roll the store's back, too: {again}",
            )


def _holds(model: Path, stored: StoredModel, url: Url) -> dict[str, bytes]:
    """Return the content of the files of holds and tags to upload, by path below the model.

    A hold that came from the store at `url` is sent unchanged, as it is in `stored`. ManifestError if the
    tags cannot be read, OSError or CheckpointError if a file of a hold cannot be read.
    """
    found = local_holds(model)
    for name in [name for name in found if PurePosixPath(name).name == HOLD_FILE]:
        decided = Hold((model / name).parent).decided()
        if decided.stored is None:
            continue
        document = str(PurePosixPath(name).with_name(HOLD_DOCUMENT_FILE))
        files = as_set_there(decided, str(url), stored.holds.get(name), stored.holds.get(document))
        for file in (name, document):
            found.pop(file, None)
            found |= {file: files[PurePosixPath(file).name]} if PurePosixPath(file).name in files else {}
    return found


def push(plan: PushPlan, progress: ProgressFactory = no_progress) -> PushPlan:
    """Execute a plan, and return the part of it that was done: another push may have done the rest.

    It waits up to 75 s for another machine's upload, and then makes the plan again of the newest state. Each
    local file is read and compared before it is uploaded. The store's head is remembered beside the model.
    `progress` makes the bar for bytes uploaded.

    Raises:
        UsageError, TargetNotWritable, NotUpdatable, ForeignLineage, NotTrusted: as `plan_push`, now of the
            newest state.
        PositionMoved: as `plan_push`; or another machine's upload takes longer, or was faster.
        ModelHeld: a person's decision about the store's model is in progress.
        VerificationError: a local file differs from its manifest.
        ManifestError: a manifest or the head is damaged.
        CheckpointError, PublishError: the store cannot be read or written.
        OSError: a local file cannot be read.
    """
    store, url, model = ObjectWriter(plan.url), plan.url, plan.model
    carrier = Carrier(store)
    digests = {item.digest for item in plan.upload}
    # an upload of the same manifest was begun from this directory: one that was killed is not waited for
    carrier.await_turn(lambda upload: upload.manifest in digests)
    ours = _ours(model, plan.trust)
    stored = stored_items(store, ours, plan.stored, carrier.completed, plan.trust)
    plan = _plan(model, ours, url, stored, carrier.head, plan.prune, plan.trust)
    same = StoredFiles(model, stored, stored.items.values())
    with progress("uploading", plan.bytes_ + plan.copied) as bar:
        for item in plan.upload:
            require_sound(item, model / item.path)  # all of it: where wrong bytes went, nothing else may go
            # with the holds of both: none is lifted before all that it holds back is there
            carrier.publish(model, item, stored.holds | plan.holds, bar, same)
            _remember(model, url, carrier.head)
    holds = carrier.with_tags(plan.holds) if plan.upload else plan.holds
    # also to replace the head before anything is removed: a slower publisher fails then
    if carrier.shown != holds or (plan.remove and not plan.upload):
        carrier.settle(holds)
    _remember(model, url, carrier.head)
    remove_stored(store, stored, *plan.remove)
    return replace(plan, copied=carrier.copied)


def _remember(model: Path, url: Url, head: Head) -> None:
    """Write the head of the store at `url` beside the model, for the next push; nothing if it is read-only.

    Nothing is ever removed from a read-only model, so that it shows what was pushed. ManifestError if the
    file of remembered heads is damaged, DiskFull or PublishError if it cannot be written for another reason.
    """
    with suppress(TargetNotWritable):
        remember(model, url, head)


def parse(url: str) -> Url:
    """Return the URL of a model in a store, parsed from its text; nothing is opened.

    Raises:
        UsageError: the text is not a URL of s3, gs or az, has a part that no object's name can have, or names
            a whole bucket.
    """
    found = Url.parse(url)
    if found is None:
        is_local = "://" in url or Path(url).is_absolute() or Path(url).exists()
        known = store_url(url) or (None if is_local else f"s3://{url}")
        raise UsageError(
            f"{without_secrets(url)}: expected s3://BUCKET/MODEL, gs://BUCKET/MODEL or az://CONTAINER/MODEL",
            hint=f"write {without_secrets(known)}"
            if known
            else "name a bucket and a model in it: s3://BUCKET/MODEL",
        )
    if not found.path:
        raise UsageError(
            f"{found} is a whole bucket: expected the URL of a model in it", hint=f"name one: {found}/MODEL"
        )
    return found


def remove_stored(store: ObjectWriter, stored: StoredModel, *paths: str) -> None:
    """Remove publications from a store, their manifests first, so that nobody sees one without its files.

    `paths` are the paths of the publications below the model; the objects listed for them in `stored` are
    removed. PublishError if the store refuses to remove one.
    """
    manifests = {f"{path}/{MANIFEST_FILE}" for path in paths}
    files = [name for name in stored.objects if path_of(name) in paths and name not in manifests]
    for names in (manifests, files):
        store.delete(*(store.url.key(name) for name in names))


def _require_ours(plan: PushPlan, head: Head) -> None:
    """Raise PositionMoved if the head has a publication, holds or tags that this directory does not know.

    It knows what is published here, and what it last remembered of the store. `plan` has the local model and
    its holds. ManifestError if the file of remembered heads, or a local manifest, is damaged.
    """
    known = recall(plan.model, plan.url)
    directory = plan.model / head.path
    if (directory / MANIFEST_FILE).is_file():
        is_ours = local_item(plan.model, directory).digest == head.manifest
    else:
        is_ours = head.is_same_publication(known)
    if not is_ours:
        raise PositionMoved(
            f"{plan.url}: {head.path} was published by another machine",
            cause=f"{plan.model} does not lead on from it",
            hint=f"begin from the store's: export-model pull {quoted(plan.url)} MODEL",
        )
    if known is None or known.holds is None or head.holds is None or not head.is_same_publication(known):
        return
    if head.tags not in (None, known.tags or "", plan.holds.get(TAGS_FILE, b"").decode("latin-1")):
        raise PositionMoved(
            f"{plan.url}: another machine has changed the tags",
            cause=f"{plan.model} does not know of it",
            hint=f"take them over first: export-model pull {quoted(plan.url)} {quoted(plan.model)}",
        )
    if head.holds != known.holds and head.hold_files != plan.holds:
        raise PositionMoved(
            f"{plan.url}: another machine has set or lifted a hold",
            cause=f"{plan.model} does not know of it",
            hint=f"take it over first: export-model pull {quoted(plan.url)} {quoted(plan.model)}",
        )

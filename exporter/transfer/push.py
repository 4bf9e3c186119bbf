"""Push: carry what is published locally into an object store, each version and delta whole or not at all.

    1. reserve   `<model>/head.json` names what comes next; it is replaced only if nobody else has meanwhile
    2. upload    the files of the version or delta
    3. commit    its `manifest.json`, created only if it is not there

A push that is killed is finished by the next one from the same directory. One from a directory that does not
lead on from what is in the store is refused: a model has one history (see `head`). Holds go before what they
hold back, and are lifted after everything else.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from exporter.errors import ForeignLineage, NotUpdatable, PositionMoved, UsageError
from exporter.layout import HEAD_FILE, HOLD_FILE, MANIFEST_FILE
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.versions import lease, require_base_path
from exporter.storage.objects import ObjectWriter, Url
from exporter.transfer.head import Head, fetch_head, recall, remember
from exporter.transfer.items import Item, StoredModel, local_holds, local_item, local_items, stored_model

_UNREADABLE_HOLD = b"a rollback is being pushed\n"
"""Servers do not move while a hold says no position: so none goes where a rollback leads away from."""


class PushPlan(Struct, frozen=True):
    """What a push will do."""

    model: Path
    url: Url
    upload: tuple[Item, ...]
    remove: tuple[str, ...]
    stored: StoredModel
    position: int | None
    holds: dict[str, bytes]

    @property
    def changes_holds(self) -> bool:
        """True if the store's holds are not the local ones."""
        return self.stored.holds != self.holds

    @property
    def bytes_(self) -> int:
        """Bytes that are to be uploaded."""
        return sum(item.bytes_ for item in self.upload)


def plan_push(model: Path, url: str, *, prune: bool = False) -> PushPlan:
    """Compare a local model with the one in a store.

    Raises:
        NotUpdatable: nothing is published locally.
        ForeignLineage, PositionMoved: the store holds what this directory does not lead to.
        ManifestError, CheckpointError: one of them cannot be read.
        UsageError: the URL is of no store.
    """
    place = parse(url)
    require_base_path(model)
    items = local_items(model)
    if not items:
        raise NotUpdatable(f"there is nothing published under {model}", hint="export first, to --out MODEL")
    store = ObjectWriter(place)
    stored = stored_model(store, place)
    ours = {item.path: item for item in items}
    for path, item in stored.items.items():
        if path in ours and ours[path].digest != item.digest:
            raise ForeignLineage(
                f"{place}/{path} is another publication than {model / path}",
                hint="push to a URL of its own, or begin from the store's: export-model pull URL MODEL",
            )
    position = items[-1].manifest.position
    if (head := fetch_head(store, place)) is None and (foreign := stored.items.keys() - ours.keys()):
        raise ForeignLineage(
            f"{place} holds {min(foreign)}, which {model} does not",
            hint="push to a URL of its own, or begin from the store's: export-model pull URL MODEL",
        )
    upload = tuple(item for item in items if item.path not in stored.items)
    gone = sorted(stored.items.keys() - ours.keys()) if prune else []
    plan = PushPlan(model, place, upload, tuple(gone), stored, position, local_holds(model))
    if head is not None:
        _require_ours(plan, head[0])
    return plan


def push(plan: PushPlan, progress: ProgressFactory = no_progress) -> None:
    """Do what a plan says.

    Raises:
        PositionMoved: another publisher was faster; what this one has uploaded cannot be seen.
        PublishError: the store cannot be written, or ignores conditions.
        ManifestError: a version is being removed locally.
    """
    store = ObjectWriter(plan.url)
    if plan.upload:
        store.probe(plan.url.path)
    with progress("uploading", plan.bytes_) as bar:
        for item in plan.upload:
            _reserve(store, plan, item)
            _announce_holds(store, plan, item)
            with lease(plan.model / item.path):
                for file in item.manifest.files:
                    name = f"{item.path}/{file.path}"
                    store.upload(_key(plan.url, name), plan.model / name)
                    bar.advance(file.bytes_)
            if store.create(_key(plan.url, f"{item.path}/{MANIFEST_FILE}"), item.content) is None:
                _require_same(store, plan, item)
    _settle_holds(store, plan)
    for path in plan.remove:
        _remove(store, plan, path)


def parse(url: str) -> Url:
    """The URL of a model in a store.

    Raises:
        UsageError: it is none.
    """
    found = Url.parse(url)
    if found is None or not found.path:
        raise UsageError(f"{url}: expected s3://BUCKET/MODEL, gs://BUCKET/MODEL or az://CONTAINER/MODEL")
    return found


def _key(url: Url, name: str) -> str:
    return f"{url.path}/{name}"


def _reserve(store: ObjectWriter, plan: PushPlan, item: Item) -> None:
    """Make the head name the item; from then on nobody else can publish before it is there.

    Raises:
        PositionMoved: the head is not the one that this directory leads on from.
    """
    head = Head(item.path, item.digest)
    key = _key(plan.url, HEAD_FILE)
    found = fetch_head(store, plan.url)
    if found is not None and found[0] == head:
        moved = False  # a push that was killed had come as far
    elif found is None:
        moved = store.create(key, head.encoded()) is None
    else:
        _require_ours(plan, found[0])
        moved = store.replace(key, head.encoded(), found[1]) is None
    if moved:
        raise PositionMoved(f"another command publishes to {plan.url} at this moment")
    remember(plan.model, plan.url, head)


def _require_ours(plan: PushPlan, head: Head) -> None:
    if head == recall(plan.model, plan.url):
        return
    directory = plan.model / head.path
    if (directory / MANIFEST_FILE).is_file() and local_item(plan.model, directory).digest == head.manifest:
        return
    is_there = head.path in plan.stored.items
    raise PositionMoved(
        f"{plan.url}: {head.path} was published by another machine"
        if is_there
        else f"{plan.url}: {head.path} is being published by another machine",
        cause=f"{plan.model} does not lead on from it",
        hint=f"begin from the store's: export-model pull {plan.url} MODEL"
        if is_there
        else f"wait for it; if that machine is lost, remove {plan.url}/{HEAD_FILE} and what has no manifest",
    )


def _require_same(store: ObjectWriter, plan: PushPlan, item: Item) -> None:
    found = store.fetch(_key(plan.url, f"{item.path}/{MANIFEST_FILE}"), len(item.content))
    if found is None or found[0] != item.content:
        raise PositionMoved(f"{plan.url}/{item.path} was published by another machine meanwhile")


def _announce_holds(store: ObjectWriter, plan: PushPlan, item: Item) -> None:
    """Before a delta that brings a hold (a rollback's), let nobody move; a hold of our own is set at once."""
    log = item.path.rpartition("/")[0]
    brings = any(file.path == HOLD_FILE for file in item.manifest.files)
    for name, content in plan.holds.items():
        is_of_log = name == f"{log}/{HOLD_FILE}"
        store.put(_key(plan.url, name), _UNREADABLE_HOLD if brings and is_of_log else content)


def _settle_holds(store: ObjectWriter, plan: PushPlan) -> None:
    for name, content in plan.holds.items():
        store.put(_key(plan.url, name), content)
    for name in plan.stored.holds.keys() - plan.holds.keys():
        store.delete(_key(plan.url, name))


def _remove(store: ObjectWriter, plan: PushPlan, path: str) -> None:
    store.delete(_key(plan.url, f"{path}/{MANIFEST_FILE}"))
    files = [name for name in plan.stored.objects if name.startswith(f"{path}/")]
    store.delete(*(_key(plan.url, name) for name in files))

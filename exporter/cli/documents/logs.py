"""The documents of the commands that inspect or change a published model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from exporter.cli.documents import Status
from exporter.publish.hold import HeldBy
from exporter.publish.model import Event
from exporter.publish.retention import KeptVersion
from exporter.publish.spared import Spared
from exporter.publish.tags import ListedTag


class Change(Struct, frozen=True, kw_only=True):
    """The first fields of every document of a change of what is published."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned` or `nothing_to_do`."""


class Push(Change, frozen=True, kw_only=True):
    """The document that `push` prints."""

    url: str
    """The model in the store."""
    uploaded: Sequence[str]
    """Versions and deltas, by their paths below the model, in the order in which they became visible."""
    removed: Sequence[str]
    """What was removed from the store, with `--prune`."""
    bytes: int
    """Bytes uploaded."""
    copied: int
    """Bytes that were not uploaded: the store had them, of another version, and copied them."""
    position: int | None
    """The newest position in the store now."""


class Pull(Change, frozen=True, kw_only=True):
    """The document that `pull` prints; with `--watch` one document a line, whenever something was fetched."""

    model: str
    """The local model base path."""
    fetched: Sequence[str]
    """Versions and deltas, by their paths below the model, in the order in which they became visible."""
    removed: Sequence[str]
    """What was removed here, with `--prune`."""
    incomplete: Sequence[str]
    """Publications that have a manifest in the store, but not yet all their files."""
    waiting: Sequence[str] = ()
    """Publications that servers could not load after what this copy took back by itself."""
    way_on: str = ""
    """The command after which the copy gets past those; empty if only the store's next publications help."""
    repeated: str = ""
    """The delta that this pull published here, as the store's rollback, or its resumption, did not fit."""
    untrusted: Sequence[str] = ()
    """With `--trust`: why publications and holds were not accepted."""
    identity: str = ""
    """With `--trust`: the identity of the only model that this copy accepts; empty if that has none."""
    bytes: int
    """Bytes fetched; with `--dry-run` the most that would be."""
    spared: Sequence[Spared] = ()
    """Of what was fetched, the publications that the store did not have to send whole."""
    position: int | None
    """The newest position here now."""


class Merge(Change, frozen=True, kw_only=True):
    """The document that `merge` prints: the delta that takes the place of several."""

    path: str | None = None
    """The merged delta's directory."""
    from_position: int | None = None
    """The position at which it begins."""
    position: int | None = None
    """The position at which it ends."""
    merged: Sequence[str] = ()
    """The directories of the deltas that it contains."""
    bytes: int | None = None
    """The size of its files; null while it is not written."""
    tasks: int = 0
    """How many tasks write it."""
    meets: Sequence[str] = ()
    """With `--dry-run`, what the command would meet in a store: uploads, decisions of others, a hold."""


class Rebase(Change, frozen=True, kw_only=True):
    """The document that `merge --rebase` prints: the new base, which includes all deltas before it."""

    path: str | None = None
    """The new version's directory."""
    position: int | None = None
    """Its position, which is also its version."""
    step: int | None = None
    """The training step of its values."""
    deltas: int | None = None
    """How many deltas were merged with the base before."""
    tasks: int = 0
    """How many tasks write its values."""
    versions_removed: Sequence[int] | None = None
    """Versions that `--keep` removed; null while that is not decided."""
    versions_kept: Sequence[KeptVersion] | None = None
    """Versions beyond `--keep` that had to stay; null while that is not decided."""
    meets: Sequence[str] = ()
    """With `--dry-run`, what the command would meet in a store: uploads, decisions of others, a hold."""


class Rollback(Struct, frozen=True, kw_only=True):
    """The document that `rollback` and `resume` print."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned`, `hold_lifted` if the values stay, or `nothing_to_do` where nothing is held, or
    by a canary alone."""
    path: str | None
    """The delta or version that brings the values back; null if the values stay."""
    from_position: int
    """The model's position before."""
    position: int
    """The model's position now."""
    values_of: int
    """The position whose values are served now."""
    step: int | None
    """The training step of those values."""
    hold: int | None
    """The position at which the model is held; after `resume` null, or how far a canary has approved it."""
    is_canary: bool
    """True if that hold is how far the canary of an agent approved: it decides about what lies beyond."""
    replaced: HeldBy | None
    """The hold before, whose place that of a rollback takes; null without one, and after `resume`."""
    made: str | None = None
    """`delta`, `base` where the values are of a log that has ended, or `version` where they take no deltas;
    null if the values stay."""
    meets: Sequence[str] = ()
    """With `--dry-run`, what the command would meet in a store: uploads, decisions of others, a hold."""


class Problem(Struct, frozen=True):
    """Something that is damaged or missing."""

    error: str
    """The error's class."""
    message: str
    """What was found, and what was expected."""


class Verification(Struct, frozen=True):
    """The document that `verify` prints."""

    versions: int
    """How many versions are published."""
    deltas: int
    """How many deltas the newest version's log holds."""
    log: int | None
    """That log; null if the newest version takes no deltas, or cannot be read."""
    lineage: str | None
    """The log's id."""
    position: int | None
    """The newest position."""
    step: int | None
    """The training step of its values."""
    positions: Sequence[int]
    """All positions that can be named: to go back to, or to compare."""
    hold: int | None
    """The position at which the model is held."""
    problems: Sequence[Problem]
    """What is wrong; empty if all is well."""
    identity: str | None = None
    """The random id of the model, by which `--signed-as NAME@ID` names it; null without one."""


class Finding(Struct, frozen=True):
    """A present or coming problem."""

    check: str
    """What was looked at: `files`, `ways`, `hold`, `replicas`, ..."""
    level: Literal["wrong", "warning"]
    """`wrong`: something is not served as it should be. `warning`: it works, and costs or will end."""
    message: str
    """What was found."""
    command: str
    """The next command."""
    cause: str | None
    """Why, or since when."""
    code: str
    """What it is, in a word; [what each means](findings.md)."""


class Target(Struct, frozen=True):
    """A model server that was asked."""

    address: str
    """Its address."""
    model: str
    """The model's name there."""
    versions: Mapping[str, str]
    """The state of each version."""
    positions: Mapping[str, int | None]
    """The position of each version; null if it takes no deltas."""


class Diagnosis(Struct, frozen=True):
    """The document that `doctor` prints."""

    model: str
    """The model base path."""
    status: Literal["well", "warnings", "wrong"]
    """The worst of what was found."""
    versions: int
    """How many versions are published."""
    deltas: int
    """How many deltas the newest version's log holds."""
    position: int | None
    """The newest position."""
    step: int | None
    """The training step of its values."""
    hold: int | None
    """The position at which the model is held."""
    tags: Mapping[str, int]
    """The positions that tags name."""
    ckpt_dir: str | None
    """The directory of checkpoints that was looked at, too."""
    targets: Sequence[Target]
    """The model servers that were asked."""
    findings: Sequence[Finding]
    """What is wrong or will be."""
    read_by: str | None = None
    """Of a model in a store: the user and machine that read it; elsewhere the store may be seen otherwise."""
    variables: Sequence[str] = ()
    """The names of the environment's variables that are set for such a store."""


class History(Struct, frozen=True):
    """The document that `history` prints."""

    model: str
    """The model base path."""
    position: int | None
    """The newest position."""
    step: int | None
    """The training step of its values."""
    log: int | None
    """The log of the newest version; null if that takes no deltas."""
    hold: int | None
    """The position at which the model is held."""
    held_by: HeldBy | None
    """Who set the hold, when and why; null if nothing says so."""
    tags: Sequence[ListedTag]
    """The tags: names of positions."""
    events: Sequence[Event]
    """What was published, in the order of positions."""


class Tags(Struct, frozen=True):
    """The document that `tag` prints without a name."""

    model: str
    """The model base path."""
    tags: Sequence[ListedTag]
    """Its tags, by their names."""


class Tag(Struct, frozen=True):
    """The document that `tag` prints when it sets or deletes one."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned`, or `nothing_to_do` if it is so already."""
    name: str
    """The tag."""
    position: int | None
    """The position that it names now; null if it is deleted."""
    before: int | None
    """The position that it named before; null if there was no such tag."""
    meets: Sequence[str] = ()
    """With `--dry-run`, what the command would meet in a store: uploads, decisions of others, a hold."""

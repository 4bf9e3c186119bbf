"""What the commands print that inspect or change a published model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from exporter.cli.documents import Status
from exporter.pipeline.comparison import TableDifference, VariableDifference
from exporter.publish.model import Event
from exporter.publish.retention import KeptVersion


class Push(Struct, frozen=True, kw_only=True):
    """What `push` prints."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned` or `nothing_to_do`."""
    url: str
    """The model in the store."""
    uploaded: Sequence[str]
    """Versions and deltas, by their paths below the model, in the order in which they became visible."""
    removed: Sequence[str]
    """What was removed from the store, with `--prune`."""
    bytes: int
    """Bytes uploaded."""
    position: int | None
    """The newest position in the store now."""


class Pull(Struct, frozen=True, kw_only=True):
    """What `pull` prints; with `--watch` one document a line, whenever something was fetched."""

    status: Status
    """`published` or `nothing_to_do`."""
    model: str
    """The local model base path."""
    fetched: Sequence[str]
    """Versions and deltas, by their paths below the model, in the order in which they became visible."""
    removed: Sequence[str]
    """What was removed here, with `--prune`."""
    incomplete: Sequence[str]
    """What has a manifest in the store and not yet all its files."""
    waiting: Sequence[str] = ()
    """What servers could not take after the rollback that a canary made here."""
    bytes: int
    """Bytes fetched."""
    position: int | None
    """The newest position here now."""


class Merge(Struct, frozen=True, kw_only=True):
    """What `merge` prints: the delta that takes the place of several."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned` or `nothing_to_do`."""
    path: str | None = None
    """The merged delta's directory."""
    from_position: int | None = None
    """Where it begins."""
    position: int | None = None
    """Where it leads."""
    merged: Sequence[str] = ()
    """The directories of the deltas that it holds."""
    bytes: int | None = None
    """The size of its files; null while it is not written."""
    tasks: int = 0
    """How many tasks write it."""


class Rebase(Struct, frozen=True, kw_only=True):
    """What `merge --rebase` prints: the base that holds all deltas so far."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned` or `nothing_to_do`."""
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


class Rollback(Struct, frozen=True, kw_only=True):
    """What `rollback` and `resume` print."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned`, `hold_lifted` if the values stay, or `nothing_to_do` where nothing is held, or
    by a canary alone."""
    path: str | None
    """The delta or version that brings the values back; null if the values stay."""
    from_position: int
    """Where the model stood before."""
    position: int
    """Where it stands now."""
    values_of: int
    """The position whose values are served now."""
    step: int | None
    """The training step of those values."""
    hold: int | None
    """The position at which the model is held; after `resume` null, or how far a canary has approved it."""
    is_canary: bool
    """True if that hold is how far the canary of an agent approved: it decides about what lies beyond."""


class Side(Struct, frozen=True):
    """One side of a comparison."""

    label: str
    """What was compared, as it was named."""
    position: int | None
    """Its position, if it is published."""
    step: int | None
    """Its training step."""


class Differences(Struct, frozen=True):
    """What `diff` prints."""

    a: Side
    """The first side."""
    b: Side
    """The second side."""
    equal: bool
    """True if both hold the same variables with the same bits."""
    compared: int
    """How many variables both have."""
    variables: Sequence[VariableDifference]
    """Those that differ."""
    tables: Sequence[TableDifference]
    """Tables by keys that differ."""
    only_a: Sequence[str]
    """Names that only the first side has."""
    only_b: Sequence[str]
    """Names that only the second side has."""


class Problem(Struct, frozen=True):
    """Something that is damaged or missing."""

    error: str
    """The error's class."""
    message: str
    """What was found, and what was expected."""


class Verification(Struct, frozen=True):
    """What `verify` prints."""

    versions: int
    """How many versions are published."""
    deltas: int
    """How many deltas the newest version's log holds."""
    log: int | None
    """That log; null if the newest version takes no deltas."""
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


class History(Struct, frozen=True):
    """What `history` prints."""

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
    events: Sequence[Event]
    """What was published, in the order of positions."""


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


class Finding(Struct, frozen=True):
    """Something that is wrong, or will be."""

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


class Diagnosis(Struct, frozen=True):
    """What `doctor` prints."""

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
    ckpt_dir: str | None
    """The directory of checkpoints that was looked at, too."""
    targets: Sequence[Target]
    """The model servers that were asked."""
    findings: Sequence[Finding]
    """What is wrong or will be."""

"""The document that `export-model --incr` prints: the plan of a delta, or its publication."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from exporter.cli.documents import Status
from exporter.cli.notify import Notified
from exporter.delta.deviation import Budgeted, LeftOut, Rounded, WildRows
from exporter.terminal.parameters import Taken


class DeltaPlan(Struct, frozen=True, kw_only=True):
    """The document that `export-model --incr --dry-run` prints: the delta that would be published."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`planned`, `published` or `nothing_to_do`."""
    checkpoint: str
    """The full checkpoint that it starts from."""
    log: int
    """The log of deltas, named by the position of the base that it began with."""
    lineage: str
    """The log's id, which every delta carries."""
    from_position: int
    """The position that is published now."""
    to_position: int
    """The position at which the delta ends."""
    to_step: int | None
    """The training step of its values."""
    increments: Sequence[str]
    """The trainer's increments that it is made of."""
    listed_rows: int | None
    """Rows of served tables that these increments list; one that several list counts as often. Null: rows
    are compared."""
    compares: bool
    """True if every row of two checkpoints is compared, because nothing says what changed."""
    why: str
    """Why rows are compared; empty if they are not."""
    graph: str
    """How it is known that graph and assets are those of the base."""
    notes: Sequence[str]
    """Notes for people about it."""
    taken: Sequence[Taken]
    """Options that were not typed, and where they come from."""


class DeltaExport(DeltaPlan, frozen=True, kw_only=True):
    """The document that `export-model --incr` prints: the delta that it published."""

    path: str | None
    """The delta's directory; null if there was nothing to publish."""
    position: int
    """The model's position now."""
    hold: int | None
    """The position at which it is held: servers go no further."""
    step: int | None
    """The training step that is published now."""
    rows: int
    """Rows in the delta, of all tables together."""
    variables_changed: int
    """Variables in the delta."""
    left_out: LeftOut | None
    """Rows that were not sent, with `--delta-budget` or `--on-wild hold-row`."""
    rounded: Rounded | None
    """Rows that were sent rounded, with `--delta-dtype`."""
    bytes_compared: int
    """Bytes that had to be read to find what changed."""
    seconds: float
    """How long it took, without the start of the program."""
    warnings: Sequence[str]
    """What went wrong after it was published."""
    budget: Budgeted | None = None
    """How the delta used its budget, with `--delta-budget`."""
    wild: Sequence[WildRows] = ()
    """Rows that are beyond `--max-norm`, by table."""
    notified: Sequence[Notified] = ()
    """The servers that were asked to apply it (`--notify`)."""
    new_base: str | None = None
    """The base that `--new-base merged` published."""

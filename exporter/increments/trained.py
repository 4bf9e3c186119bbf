"""The published state of the trainer: the full checkpoint, the last increment, and any deviation."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from exporter.delta.deviation import LeftOut, Rounded
from exporter.options import DeltaDtype
from exporter.wire.json_documents import Count, Id, Moment, Text, doc

# `(?!\n)`: `$` also matches before a newline at the end.
IncrementName = Annotated[str, Meta(pattern=r"^[0-9A-Za-z:._-]{1,200}$(?!\n)")]


class CheckpointId(Struct, frozen=True, eq=False, rename={"digest": "index_sha256"}):
    """A full checkpoint by content: `digest` is the SHA-256 of its index, which holds a crc of every tensor.

    Without an index, as in an archive, it is the SHA-256 of its file. `name` is its prefix without the path;
    it is not compared: a trainer that restores a checkpoint whose step is ahead of its name (workers went on
    while it was saved) saves the same contents under another name.
    """

    name: Annotated[Text, doc("its prefix, without the path")]
    step: Annotated[Count, doc("the training step that it holds")]
    digest: Annotated[Id, doc("SHA-256 of its index file; without an index, of the file itself")]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointId) and (self.step, self.digest) == (other.step, other.digest)

    def __ne__(self, other: object) -> bool:  # a Struct's own does not ask `__eq__`
        return not self == other

    def __hash__(self) -> int:
        return hash((self.step, self.digest))


class TrainerVersion(Struct, frozen=True):
    """The trainer's state that was published: a full checkpoint, and the last increment on top of it.

    `increment` is an id of the trainer's, or an id that a reader of another kind of increments makes.
    `left_out` and `rounded` describe rows that differ from the trainer's; without them every bit is equal.
    `event_time` is `UNSET`, and not in the file, if it is not known.
    """

    checkpoint: Annotated[CheckpointId, doc("the full checkpoint")]
    increment: Annotated[IncrementName | None, doc("the last increment on top of it")] = None
    left_out: Annotated[LeftOut | None, doc("rows that were not sent; null: none")] = None
    rounded: Annotated[Rounded | None, doc("rows that are served rounded; null: none")] = None
    event_time: Annotated[
        Moment | UnsetType, doc("the time of the newest event that was trained on; absent: not known")
    ] = UNSET

    @classmethod
    def of(
        cls, checkpoint: CheckpointId, increment: str | None, event_time: datetime | None
    ) -> TrainerVersion:
        """Return the exact state (nothing left out or rounded) of a checkpoint and an increment on top of it.

        `increment` is its id, None without one. `event_time` is the time of the newest event, converted to
        UTC; None if it is not known.
        """
        if event_time is None:
            return cls(checkpoint, increment)
        return cls(checkpoint, increment, event_time=event_time.astimezone(timezone.utc))

    @property
    def state(self) -> str | CheckpointId:
        """The id of the increment or, without one, the full checkpoint."""
        return self.checkpoint if self.increment is None else self.increment

    @property
    def newest_event(self) -> datetime | None:
        """The time of the newest event that was trained on; None if it is not known."""
        return self.event_time or None

    @property
    def is_exact(self) -> bool:
        """True if every row equals the trainer's, bit for bit."""
        return self.left_out is None and self.rounded is None

    def is_within(self, distance: float) -> bool:
        """True if no row was rounded, and no row is further than `distance` from the trainer's row.

        The distance is a Euclidean norm.
        """
        return self.rounded is None and (self.left_out is None or self.left_out.bound <= distance)

    def exact_but_for(self, dtype: DeltaDtype | None) -> TrainerVersion:
        """Return the state without `rounded` if its rows were rounded to `dtype`; else the state itself.

        `dtype` is the type of the next delta, None if that is not rounded.
        """
        is_rounded_so = self.rounded is not None and self.rounded.dtype is dtype
        return replace(self, rounded=None) if is_rounded_so else self

    def is_state_of(self, other: TrainerVersion) -> bool:
        """True if both name the same checkpoint and increment, whatever rows were left out or rounded."""
        return (self.checkpoint, self.increment) == (other.checkpoint, other.increment)

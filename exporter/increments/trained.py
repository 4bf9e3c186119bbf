"""The trainer's state that was published: the full checkpoint, the last increment, and any deviation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from exporter.delta.deviation import LeftOut, Rounded, rounded_of
from exporter.increments.increment import CheckpointId
from exporter.options import DeltaDtype
from exporter.wire.json_fields import Fields


@dataclass(frozen=True, slots=True)
class TrainerVersion:
    """The trainer's state that was published: a full checkpoint, and the last increment on top of it.

    `increment` is an id of the trainer's, or what a reader of another kind of increments calls its own.
    `left_out` and `rounded` tell of rows that are not what the trainer had then; without them every bit is.
    """

    checkpoint: CheckpointId
    increment: str | None = None
    left_out: LeftOut | None = None
    rounded: Rounded | None = None

    @property
    def is_exact(self) -> bool:
        """True if every row is what the trainer had, bit for bit."""
        return self.left_out is None and self.rounded is None

    def is_within(self, distance: float) -> bool:
        """True if no row was rounded, and none is further than this from what the trainer had."""
        return self.rounded is None and (self.left_out is None or self.left_out.bound <= distance)

    def exact_but_for(self, dtype: DeltaDtype | None) -> TrainerVersion:
        """The state as if rows that are rounded to `dtype` were exact: increments alone tell what to send."""
        is_rounded_so = self.rounded is not None and self.rounded.dtype is dtype
        return replace(self, rounded=None) if is_rounded_so else self

    def is_state_of(self, other: TrainerVersion) -> bool:
        """True if both are the same state of the trainer, however closely they were published."""
        return (self.checkpoint, self.increment) == (other.checkpoint, other.increment)

    def to_json(self) -> dict[str, Any]:
        """The state as a JSON object."""
        return {
            "checkpoint": self.checkpoint.to_json(),
            "increment": self.increment,
            "left_out": None if self.left_out is None else self.left_out.to_json(),
            "rounded": None if self.rounded is None else self.rounded.to_json(),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> TrainerVersion:
        """The state that `to_json` gave.

        Raises:
            FieldError: it is something else.
        """
        increment = fields.or_null(lambda key: fields.text(key, _INCREMENT), "increment")
        checkpoint = CheckpointId.from_fields(fields.object("checkpoint"))
        is_whole = fields.document.get("left_out") is None
        left_out = None if is_whole else LeftOut.from_fields(fields.object("left_out"))
        return cls(checkpoint, increment, left_out, rounded_of(fields))


_INCREMENT = re.compile(r"[0-9A-Za-z:._-]{1,200}")

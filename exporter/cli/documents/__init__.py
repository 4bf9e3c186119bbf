"""The documents that `export-model --json` prints: every field, with its type and meaning.

The text under a field is its description in the published schema (docs/reference/documents.md). A document
always has all its fields: `null` says that something is not known, or is not the case. `format_version`
comes before them. New releases may add fields, and never change what one means.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from exporter.newer_python import StrEnum


class Status(StrEnum):
    """The outcome of a command that publishes."""

    PUBLISHED = "published"
    NOTHING_TO_DO = "nothing_to_do"
    PLANNED = "planned"
    HOLD_LIFTED = "hold_lifted"

    @classmethod
    def done(cls, *, is_plan: bool) -> Status:
        """The outcome of a command that had something to do, or would have: `is_plan`."""
        return cls.PLANNED if is_plan else cls.PUBLISHED


class Checkpoint(Struct, frozen=True):
    """A checkpoint, or a version's variables."""

    family: str
    """What kind of file it is, as in `TensorFlow V2, name-based`."""
    prefix: str
    """Where it is: the path without `.index`, or the file."""
    step: int | None
    """The training step, from its global step or its name."""
    tensor_count: int
    """How many tensors it holds."""
    bytes: int
    """Bytes of all its tensors."""
    shards: int
    """How many files hold the tensors."""


class Tensor(Struct, frozen=True):
    """A stored tensor."""

    name: str
    """Its name in the checkpoint."""
    dtype: str
    """Its type, as TensorFlow calls it: `float32`."""
    shape: Sequence[int]
    """Its shape, of all parts together."""
    slices: int
    """In how many parts it is stored; 0 if in one piece."""
    bytes: int
    """Its size."""


class TensorGroup(Struct, frozen=True):
    """Tensors of one kind together."""

    tensors: int
    """How many there are."""
    bytes: int
    """Their size."""

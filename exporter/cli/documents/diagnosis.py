"""The document that `doctor` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct


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

"""A finding of an examination: what is wrong, why, and the command that helps."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from exporter.errors import CheckpointError, ExportError, ServerError, VerificationError
from exporter.local_paths import quoted
from exporter.progress import count


class Level(StrEnum):
    """`WRONG`: something is not served as it should be. `WARNING`: it works, and costs or will end."""

    WRONG = "wrong"
    WARNING = "warning"


class Check(StrEnum):
    """What was looked at."""

    FILES = "files"
    WAYS = "ways"
    FINITE = "finite"
    ORPHANS = "orphans"
    STRANGERS = "strangers"
    LEFT_OVERS = "left-overs"
    HOLD = "hold"
    CLOCK = "clock"
    DURABILITY = "durability"
    PERMISSIONS = "permissions"
    LINKS = "links"
    CHECKPOINT = "checkpoint"
    TABLES = "tables"
    REPLICAS = "replicas"


class Finding(Struct, frozen=True):
    """One thing that is wrong or will be; `command` is what to run next."""

    check: Check
    level: Level
    message: str
    command: str
    cause: str = ""


def command(*words: str | Path) -> str:
    """A command line to paste into a shell."""
    return " ".join(map(quoted, words))


def diagnosis(model: Path, findings: Iterable[Finding]) -> ExportError | None:
    """The error that a command ends with; None if nothing is wrong.

    What is wrong on disk counts first, then the checkpoint, then servers.
    """
    wrong = [finding for finding in findings if finding.level is Level.WRONG]
    if not wrong:
        return None
    checks = {finding.check for finding in wrong}
    kind: type[ExportError] = VerificationError
    if checks <= {Check.CHECKPOINT, Check.REPLICAS}:
        kind = CheckpointError if Check.CHECKPOINT in checks else ServerError
    many = f"{count(len(wrong), 'thing')} {'is' if len(wrong) == 1 else 'are'}"
    return kind(f"{many} wrong with {model}: {wrong[0].message}", cause=wrong[0].cause, hint=wrong[0].command)

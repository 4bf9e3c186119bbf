"""Run every check of a model on disk, in the order in which problems should be repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from exporter.doctor import published, surroundings
from exporter.doctor.finding import Check, Finding, Level
from exporter.errors import ExportError, unreachable
from exporter.verify.log import VerifiedModel, verify_model


class Examination(Struct, frozen=True):
    """What is published, and what was found."""

    model: Path
    found: VerifiedModel
    findings: tuple[Finding, ...]


def examine(model: Path, ckpt_dir: Path | None, *, now: float, is_remote: bool = False) -> Examination:
    """Look at a model and, if it is named, at the checkpoints it is exported from.

    Nothing is changed. For a moment there is a staging directory, to see which links the file system allows.
    `is_remote`: the path stands for a model in a store, and what else is in it is of no interest.

    Raises:
        NotUpdatable: nothing is published.
    """
    found = verify_model(model)
    looks: list[tuple[Check, Callable[[], Iterator[Finding]]]] = [
        (Check.FILES, lambda: published.damage(model, found, ckpt_dir)),
        (Check.STRANGERS, lambda: published.strangers(model)),
        (Check.PERMISSIONS, lambda: surroundings.permissions(model)),
        (Check.HOLD, lambda: published.held(model, found, now)),
        (Check.CLOCK, lambda: published.times(model, found, now)),
        (Check.CLOCK, lambda: surroundings.clock_of_files(model, now)),
        (Check.TABLES, lambda: published.tables(model, found, ckpt_dir)),
        (Check.ORPHANS, lambda: published.orphans(model, found)),
        (Check.LEFT_OVERS, lambda: surroundings.left_overs(model)),
    ]
    if is_remote:
        looks = [(check, look) for check, look in looks if check not in _OF_THIS_MACHINE]
    elif ckpt_dir is not None:
        directory = ckpt_dir
        looks.append((Check.LINKS, lambda: surroundings.checkpoint(model, directory)))
    findings = [finding for check, look in looks for finding in _each(check, look)]
    return Examination(model, found, tuple(findings))


_OF_THIS_MACHINE = (Check.STRANGERS, Check.PERMISSIONS, Check.LEFT_OVERS)


def _each(check: Check, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of one look; what it may not look at is a finding, too, and ends no other look."""
    try:
        yield from look()
    except (ExportError, OSError) as error:
        named = unreachable(error) if isinstance(error, OSError) else error
        yield Finding(check, Level.WRONG, named.message, named.hint, named.cause)

"""Admission of keys: an embedding variable serves those seen often enough, and not too long ago.

The trainer's records decide: `-freqs` how often a key was seen, `-versions` the step of its last update. A
table without such records is not filtered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import EmbeddingVariable, count_blocks
from exporter.errors import UsageError

Array = np.ndarray[Any, Any]


class Admission(Struct, frozen=True):
    """Keys that are served: seen `min_freq` times, updated within `max_age_steps`; None: of any age."""

    min_freq: int = 0
    max_age_steps: int | None = None

    @property
    def is_everyone(self) -> bool:
        """True if every key is served."""
        return self.min_freq <= 0 and self.max_age_steps is None

    def enough(self, freqs: Array | None) -> Array | bool:
        """A mask of the keys seen `min_freq` times; True, for all, without recorded counts."""
        return True if freqs is None else np.asarray(freqs >= self.min_freq)

    def recent(self, versions: Array | None, step: int | None) -> Array | bool:
        """A mask of the keys updated within `max_age_steps` before `step`; True, for all, if unknown."""
        if versions is None or step is None or self.max_age_steps is None:
            return True
        return np.asarray(versions >= step - self.max_age_steps)

    def require_recorded(self, catalog: Catalog, variables: tuple[EmbeddingVariable, ...]) -> None:
        """Refuse, by a UsageError, a filter whose numbers no table of the checkpoint has."""
        if self.max_age_steps is not None and catalog.step is None:
            raise UsageError(
                f"--max-age-steps counts back from the training step, and {catalog.prefix.name} tells none",
                hint="leave it out, or save the checkpoint with its global step",
            )
        asked = {"--min-freq": ("freqs", self.min_freq > 0)}
        asked["--max-age-steps"] = ("versions", self.max_age_steps is not None)
        for option, (what, is_asked) in asked.items():
            if is_asked and all(v.rows and count_blocks(catalog, v, what) is None for v in variables):
                raise UsageError(
                    f"{option} filters keys, and no table of {catalog.prefix.name} has their {what}",
                    hint=f"leave {option} out, or let the trainer record them "
                    "(DeepRec: EmbeddingVariableOption with record_freq, record_version); a trainer of "
                    "exporter.tables takes old keys away itself: TrainableTable.remove_unseen",
                )


EVERYONE = Admission()


def admitted(
    catalog: Catalog, variable: EmbeddingVariable, admission: Admission, step: int | None
) -> Array | None:
    """A mask, in stored order, of the rows of a table that are served; None if all are.

    Raises:
        CorruptFile: a checksum is wrong.
        CheckpointChanged: a shard vanished or shrank since the catalog was read.
    """
    if admission.is_everyone:
        return None
    mask = np.ones(variable.rows, bool)
    if admission.min_freq > 0:
        for first, freqs in count_blocks(catalog, variable, "freqs") or ():
            mask[first : first + len(freqs)] &= admission.enough(freqs)
    if admission.max_age_steps is not None:
        for first, versions in count_blocks(catalog, variable, "versions") or ():
            mask[first : first + len(versions)] &= admission.recent(versions, step)
    return None if mask.all() else mask

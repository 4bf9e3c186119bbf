"""Choose the keys of embedding variables that are served: seen often enough, and updated recently enough.

The trainer's records decide: `-freqs` has how often a key was seen, `-versions` the step of its last update.
A table without such records is not filtered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from exporter.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from exporter.catalog import Catalog
    from exporter.checkpoint.embedding_variables import EmbeddingVariable

Array: TypeAlias = "np.ndarray[Any, Any]"


class Admission(Struct, frozen=True):
    """A filter of keys: seen at least `min_freq` times, updated within `max_age_steps`.

    A `max_age_steps` of None admits any age.
    """

    min_freq: int = 0
    max_age_steps: int | None = None

    @property
    def is_everyone(self) -> bool:
        """True if the filter leaves out no key."""
        return self.min_freq <= 0 and self.max_age_steps is None

    def enough(self, freqs: Array | None) -> Array | bool:
        """Return a bool mask of the keys whose counts in `freqs` are at least `min_freq`.

        True, meaning all keys, if `freqs` is None: no counts are recorded.
        """
        return True if freqs is None else freqs >= self.min_freq

    def recent(self, versions: Array | None, step: int | None) -> Array | bool:
        """Return a bool mask of the keys updated at most `max_age_steps` before `step`.

        `versions` has the step of each key's last update. The result is True, meaning all keys, if any age is
        admitted, `versions` is None (not recorded), or `step` is None (unknown).
        """
        if versions is None or step is None or self.max_age_steps is None:
            return True
        return versions >= step - self.max_age_steps

    def require_recorded(self, catalog: Catalog, variables: tuple[EmbeddingVariable, ...]) -> None:
        """Raise UsageError if the filter needs numbers that the checkpoint lacks.

        For `max_age_steps` these are the catalog's step and the tables' versions, for `min_freq` the tables'
        counts. Numbers of tables are lacking if every table in `variables` has rows and none has them
        recorded completely; a table without rows prevents the error.
        """
        if self.max_age_steps is not None and catalog.step is None:
            raise UsageError(
                f"--keys max-age-steps counts back from a training step, and {catalog.prefix.name} has none",
                hint="leave it out, or save the checkpoint with its global step",
            )
        from exporter.checkpoint.embedding_variables import count_blocks

        asked = {"--keys min-freq": ("freqs", self.min_freq > 0)}
        asked["--keys max-age-steps"] = ("versions", self.max_age_steps is not None)
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
    """Return a bool mask, in stored order, of the rows of a table that are served; None if all are.

    The recorded counts and versions are read; a filter by numbers that are not recorded admits every row.
    `step` is the checkpoint's, None if unknown.

    Raises:
        CorruptFile: a checksum is wrong.
        CheckpointChanged: a shard vanished or shrank since the catalog was read.
        CheckpointError: a shard cannot be read.
    """
    if admission.is_everyone:
        return None
    import numpy as np

    from exporter.checkpoint.embedding_variables import count_blocks

    mask = np.ones(variable.rows, bool)
    if admission.min_freq > 0:
        for first, freqs in count_blocks(catalog, variable, "freqs") or ():
            mask[first : first + len(freqs)] &= admission.enough(freqs)
    if admission.max_age_steps is not None:
        for first, versions in count_blocks(catalog, variable, "versions") or ():
            mask[first : first + len(versions)] &= admission.recent(versions, step)
    return None if mask.all() else mask

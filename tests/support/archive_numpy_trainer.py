"""A trainer in numpy whose checkpoints are archives of `numpy.savez`; it writes no increments."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from exporter.increments.history import StateId
from tests.support.numpy_trainer import KEEP, NumpyTrainer, Session, Values, Variables


class ArchiveNumpyTrainer(NumpyTrainer):
    """As `NumpyTrainer`, by archives that are numbered: the greatest number is the newest."""

    suffix = ".npz"
    number = 0

    def newest_state(self, start: StateId | None = None) -> StateId:
        """The archive of the greatest number that is there."""
        return self._state(self._archives()[-1])

    newest = newest_state  # type: ignore[assignment]  # a checkpoint's name is that of its state

    def begin(self, *, restores: bool, saver_first: bool, is_live: bool) -> None:
        """Restore the newest archive, and perhaps write it anew."""
        del restores, is_live
        self.sessions += 1
        variables = Variables(dict(self.states[self.newest_state()]))
        self.session = Session(self.sessions, variables, None, set())  # type: ignore[arg-type]  # no increments
        if saver_first:
            self.save()

    def save(self, *, notices: bool = True) -> None:
        """An archive of now; or the trainer dies then."""
        if self.session is not None:
            self.save_files(self.session.variables)
        if not notices:
            self.session = None

    def increment(self) -> None:
        """What changed is found by comparing archives."""
        self.save()

    def end(self) -> None:
        """The training ends with an archive."""
        self.train()
        self.save()
        self.session = None

    def set_back(self, what_of_later: str) -> None:
        """Let an older archive be the newest: it gets a number of its own, or those after it are deleted."""
        found = self._archives()
        to = int(self.rng.integers(len(found)))
        if what_of_later == "kept":
            values = self.states[self._state(found[to])]
            shutil.copyfile(found[to], self._part)
            self._arrive(values)
            return
        for path in found[to + 1 :]:
            path.unlink()

    def save_files(self, variables: Variables) -> StateId:  # type: ignore[override]  # as `newest`
        """Write the next archive, and delete the oldest."""
        return self._arrive(self.write(self._part, dict(variables.values)))

    def write(self, path: Path, values: Values) -> Values:
        """Write an archive of values; those that it holds."""
        np.savez(path, **values)  # type: ignore[arg-type]  # the stub takes them for options
        return values

    @property
    def _part(self) -> Path:
        return self.directory / f"part{self.suffix}"

    def _arrive(self, values: Values) -> StateId:
        self.number += 1
        path = self._part.rename(self.directory / f"model-{self.number}{self.suffix}")
        self.states[self._state(path)] = values
        for old in self._archives()[:-KEEP]:
            old.unlink()
        return self._state(path)

    def _archives(self) -> list[Path]:
        found = self.directory.glob(f"model-*{self.suffix}")
        return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))

    @staticmethod
    def _state(path: Path) -> StateId:
        return f"archive:{path.name}"

"""A DeepRec trainer of ordinary tables in numpy: full checkpoints, and increments since the last one.

Its files have times of their own, a second apart: what was written before what counts where a trainer was
set back. Nothing is known here of how an export finds that out, but for what an increment leads on from.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.increments.history import StateId
from exporter.increments.increment import CheckpointId
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY
from tests.support.numpy_trainer import TABLES, NumpyTrainer, Session, Variables, named_by

_AGO_S = 100_000


@dataclass(frozen=True)
class _Written:
    """An increment: what it builds on, and when it was written."""

    on: CheckpointId
    at: float


class DeepRecNumpyTrainer(NumpyTrainer):
    """As `NumpyTrainer`, by DeepRec's files."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.clock = time.time() - _AGO_S
        self.written: dict[int, _Written] = {}
        self.saved_at: dict[int, float] = {}
        self.last_full: CheckpointId | None = None
        super().__init__(directory, seed)

    @property
    def increments(self) -> Path:
        return self.directory / DEEPREC_INCREMENTS_DIRECTORY

    def newest_state(self, start: StateId | None = None) -> StateId:
        """The newest full checkpoint with the increment that was written last after it, and builds on it."""
        full = self.newest()
        later = {int(index.stem.partition("-")[2]) for index in self.directory.glob("*.index")}
        last = min((step for step in later if step > full.step), default=1 << 60)
        whole = (
            index for index in self.increments.glob("*.index") if [*index.parent.glob(f"{index.stem}.data-*")]
        )
        there = {int(index.stem.rpartition("-")[2]) for index in whole}
        newest = int(named_by(self.increments / "checkpoint").rpartition("-")[2] or max(there, default=0))
        steps = [
            step
            for step in there
            if full.step < step < last and step <= newest and self._is_of(self.written[step], full)
        ]
        return f"deeprec:{max(steps)}" if steps else full

    def _is_of(self, written: _Written, full: CheckpointId) -> bool:
        """Unless the full checkpoint was saved once more since: then a trainer was set back to it."""
        return written.on == full and written.at > self.saved_at[full.step]

    def begin(self, *, restores: bool, saver_first: bool, is_live: bool) -> None:
        """Restore the full checkpoint, with its increment or without it; then a full one is saved at once."""
        del is_live
        if self.named not in self.fulls():
            self.point_to(f"model.ckpt-{self.newest().step}")
        restored = self.newest()
        state = self.newest_state() if restores else restored
        variables = Variables(dict(self.states[state]))
        self.last_full = restored
        self.sessions += 1
        self.session = Session(self.sessions, variables, None, set())  # type: ignore[arg-type]  # DeepRec's own
        if saver_first or state != restored:
            self.save()

    def save(self, *, notices: bool = True) -> None:
        """A full checkpoint of now; or the trainer dies then."""
        if self.session is None:
            return
        self.save_files(self.session.variables)
        self.session.variables.touched.clear()
        if not notices:
            self.session = None

    def increment(self) -> None:
        """What was touched since the last full checkpoint."""
        if self.session is None:
            return
        variables = self.session.variables
        step = int(variables.values["global_step"])
        if self.last_full is None or step <= self.last_full.step:
            return
        self.increments.mkdir(exist_ok=True)
        prefix = self.increments / f"incremental_model.ckpt-{step}"
        with BundleWriter(prefix) as writer:
            for name, value in variables.values.items():
                if name not in TABLES:
                    writer.add(name, value)
                elif rows := sorted(variables.touched[name]):
                    writer.add(f"{name}-sparse_incr_keys", np.array(rows, np.int64))
                    writer.add(f"{name}-sparse_incr_values", value[rows])
        (self.increments / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
        self._date(*self.increments.glob(f"{prefix.name}.*"))
        self.written[step] = _Written(self.last_full, self.clock)
        self.states[f"deeprec:{step}"] = dict(variables.values)

    def end(self) -> None:
        """The training ends with a full checkpoint."""
        self.train()
        self.save()
        self.session = None

    def abandon(self) -> None:
        """Increments, a trainer that is set back, and a full checkpoint of a lower number than theirs."""
        if self.session is None:
            self.begin(restores=False, saver_first=False, is_live=False)
        self.save()
        for _ in range(6):
            self.train()
        self.increment()
        self.kill()
        self.begin(restores=False, saver_first=False, is_live=False)
        self.train()
        self.save()

    def save_files(self, variables: Variables) -> CheckpointId:
        saved = super().save_files(variables)
        self._date(*self.directory.glob(f"model.ckpt-{saved.step}.*"))
        self.last_full, self.saved_at[saved.step] = saved, self.clock
        return saved

    def _date(self, *files: Path) -> None:
        self.clock += 1
        for file in files:
            os.utime(file, (self.clock, self.clock))

"""`ExportHook`, `ExportCallback`: export checkpoints while training goes on, and when it ends.

    request = ExportRequest(Path("train"), Path("models/ranker"), model="my_model.py:serving")
    hooks = [ExportHook(request, every_checkpoints=10)]                          # MonitoredTrainingSession
    callbacks = [keras.callbacks.ModelCheckpoint(...), ExportCallback(request)]  # either Keras

Somebody else saves: the session's CheckpointSaverHook, a ModelCheckpoint, a CheckpointManager. What they
leave in the request's `ckpt_dir` is noticed and exported by `export-model` in a process of its own: training
does not wait for it. One export runs at a time; a newer checkpoint takes the place of one that waits.

Notice new checkpoints in a directory, whoever saves them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from exporter.checkpoint.locate import candidates
from exporter.checkpoint.tensor_bundle import index_path
from exporter.errors import CheckpointError, ExportFailed, UsageError
from exporter.files import FileIdentity, identity_of
from exporter.layout import CHECKPOINT_STATE_FILE
from exporter.training.callbacks import callback_base
from exporter.training.chief import is_chief as is_chief_of
from exporter.training.chief import is_multi_worker
from exporter.training.exports import ExportOutcome, Exports, What


class NewCheckpoints:
    """The newest checkpoint of a directory, looked up when files changed; a look costs three system calls."""

    def __init__(self, ckpt_dir: Path) -> None:
        self._ckpt_dir = ckpt_dir
        self._looked: tuple[FileIdentity | None, ...] | None = None
        self._newest: tuple[Path, FileIdentity] | None = None

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint at the last look."""
        return self._newest[0] if self._newest else None

    def new(self) -> Path | None:
        """The newest checkpoint (prefix or archive) if it is another, or written anew, since the last."""
        looked = (identity_of(self._ckpt_dir), identity_of(self._ckpt_dir / CHECKPOINT_STATE_FILE))
        if looked == self._looked and not self._is_overwritten():
            return None
        before = self._newest
        self._looked, self._newest = looked, self._find()
        return self.newest if self._newest != before else None

    def _is_overwritten(self) -> bool:
        """An archive may be written anew in place; then its directory stays as it was."""
        return self._newest is not None and _saved(self._newest[0]) != self._newest[1]

    def _find(self) -> tuple[Path, FileIdentity] | None:
        try:
            newest = candidates(self._ckpt_dir)[0]
        except CheckpointError:
            return None
        return (newest, identity) if (identity := _saved(newest)) else None


def _saved(checkpoint: Path) -> FileIdentity | None:
    return identity_of(index_path(checkpoint)) or identity_of(checkpoint)


log = logging.getLogger(__name__)

WAIT_SECONDS = 600.0
"""How long the end of a training waits for its last export."""


class ExportSchedule:
    """When a training's checkpoints are exported: every n-th new one, and the newest at the end.

    Raises:
        UsageError: `every_checkpoints` or `wait_seconds` is not positive, or `what` is no complete request.
    """

    def __init__(
        self, what: What, every_checkpoints: int | None, wait_seconds: float, raise_on_failure: bool
    ) -> None:
        if every_checkpoints is not None and every_checkpoints < 1:
            raise UsageError(f"every_checkpoints is {every_checkpoints}", hint="1 exports every checkpoint")
        if not wait_seconds > 0:
            raise UsageError(f"wait_seconds is {wait_seconds}", hint="600 waits ten minutes at most")
        self.exports = Exports(what)
        self._every = every_checkpoints
        self._wait_seconds = wait_seconds
        self._raises = raise_on_failure
        self._sightings = NewCheckpoints(self.exports.ckpt_dir)
        self._seen = 0
        self._started: Path | None = None

    def begin(self) -> None:
        """Ignore checkpoints that are there before the training's first step."""
        self._sightings.new()

    def look(self) -> None:
        """Count a checkpoint that has appeared, and export it when it is its turn."""
        checkpoint = self._sightings.new()
        if checkpoint is None:
            return
        self._seen += 1
        self._started = None
        if self._every and self._seen % self._every == 0:
            self._start(checkpoint)

    def end(self) -> None:
        """Export the newest checkpoint, unless that was done, and wait for it.

        Raises:
            ExportFailed: it failed, or took too long, and `raise_on_failure` is set.
        """
        self.look()
        newest = self._sightings.newest
        if newest is None:
            log.error("export: there is no checkpoint in %s", self.exports.ckpt_dir)
        elif newest != self._started:
            self._start(newest)
        outcome = self.exports.finish(self._wait_seconds)
        if self._raises and (outcome is None or not outcome.is_done):
            raise _failure(outcome, self.exports.ckpt_dir)

    def _start(self, checkpoint: Path) -> None:
        self._started = checkpoint
        self.exports.start(checkpoint)


def _failure(outcome: ExportOutcome | None, ckpt_dir: Path) -> ExportFailed:
    if outcome is None:
        return ExportFailed("nothing was exported", cause=f"there is no checkpoint in {ckpt_dir}")
    return ExportFailed(
        f"exporting {outcome.checkpoint} failed with exit code {outcome.exit_code}",
        cause=outcome.message,
        hint=outcome.hint,
    )


class ExportHook:
    """A `SessionRunHook` for MonitoredTrainingSession: pass it in `hooks=`, which follow the session's saver.

    `what` is an `ExportRequest`, or the arguments of `export-model`; its `ckpt_dir` is the session's
    `checkpoint_dir`. Every `every_checkpoints`-th new checkpoint is exported (None: none of them), and the
    newest when training ends, which waits for that up to `wait_seconds`. A failure is logged and to be seen
    in `outcomes`; with `raise_on_failure` that of the last export is raised. Only the chief exports;
    `is_chief` says who that is where the environment does not tell.

    Raises:
        UsageError: the arguments contradict each other.
        RoleUnknown: the environment contradicts itself.
        ExportFailed: from the session's end, with `raise_on_failure`.
    """

    def __init__(
        self,
        what: What,
        every_checkpoints: int | None = None,
        *,
        is_chief: bool | None = None,
        wait_seconds: float = WAIT_SECONDS,
        raise_on_failure: bool = False,
    ) -> None:
        self._schedule = ExportSchedule(what, every_checkpoints, wait_seconds, raise_on_failure)
        self._is_chief = is_chief_of() if is_chief is None else is_chief
        self._has_begun = False

    @property
    def outcomes(self) -> tuple[ExportOutcome, ...]:
        """How the exports that have ended did, in their order."""
        return self._schedule.exports.outcomes

    def begin(self) -> None:
        """Do nothing: the graph is left as it is."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Ignore the checkpoint that the session's saver writes at once of what it restored."""
        self._has_begun = False

    def before_run(self, run_context: Any) -> None:
        """Note what is there before the session's first step."""
        if self._is_chief and not self._has_begun:
            self._schedule.begin()
        self._has_begun = True

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Export a checkpoint that has appeared, when it is its turn."""
        if self._is_chief:
            self._schedule.look()

    def end(self, session: Any) -> None:
        """Export the last checkpoint and wait for it."""
        if self._is_chief:
            self._schedule.end()


def ExportCallback(
    what: What,
    every_checkpoints: int | None = None,
    *,
    is_chief: bool | None = None,
    wait_seconds: float = WAIT_SECONDS,
    raise_on_failure: bool = False,
) -> Any:
    """A Keras callback (Keras 3 or tf-keras) that does what `ExportHook` does; looks when an epoch ends.

    Put it behind the callback that saves. In a MultiWorkerMirroredStrategy the strategy tells who is chief.

    Raises:
        UsageError, RoleUnknown, ExportFailed: as `ExportHook`.
    """
    exports = ExportSchedule(what, every_checkpoints, wait_seconds, raise_on_failure)

    class Callback(callback_base()):  # type: ignore[misc]  # Keras is untyped
        """Hands the calls of `fit` over."""

        schedule = exports

        @property
        def outcomes(self) -> tuple[ExportOutcome, ...]:
            """How the exports that have ended did, in their order."""
            return self.schedule.exports.outcomes

        def on_train_begin(self, logs: Any = None) -> None:
            strategy = getattr(self.model, "distribute_strategy", None)
            if is_chief is None:
                self._is_chief = is_chief_of(strategy if is_multi_worker(strategy) else None)
            else:
                self._is_chief = is_chief
            if self._is_chief:
                self.schedule.begin()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if self._is_chief:
                self.schedule.look()

        def on_train_end(self, logs: Any = None) -> None:
            if self._is_chief:
                self.schedule.end()

    return Callback()

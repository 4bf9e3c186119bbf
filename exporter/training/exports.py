"""`ExportHook`, `ExportCallback`: export checkpoints while training goes on, and when it ends.

    request = ExportRequest(Path("train"), Path("models/ranker"), model="my_model.py:serving")
    hooks = [ExportHook(request, every_checkpoints=10)]                          # MonitoredTrainingSession
    callbacks = [keras.callbacks.ModelCheckpoint(...), ExportCallback(request)]  # either Keras

The trainer saves checkpoints as before: by the session's CheckpointSaverHook, a ModelCheckpoint, a
CheckpointManager. The hook notices new ones in the request's `ckpt_dir`, and exports them by `export-model`
in a process of its own, so that training does not wait. One export runs at a time; a newer checkpoint
replaces one that is pending.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.checkpoint.locate import candidates
from exporter.checkpoint.tensor_bundle import index_path
from exporter.errors import CheckpointError, Exit, ExportFailed, UsageError
from exporter.newer_python import module_command
from exporter.options import ExportRequest, arguments, given, require_exact
from exporter.storage.files import FileIdentity, identity_of
from exporter.storage.layout import CHECKPOINT_STATE_FILE
from exporter.storage.local_paths import checkpoint_path, trained_path
from exporter.training import roles
from exporter.training.chief import is_chief as is_chief_of
from exporter.training.chief import is_multi_worker
from exporter.training.session_hook import SessionHook
from exporter.training.trainer_side import callback_base

log = logging.getLogger(__name__)

ToExport = ExportRequest | Sequence[str | os.PathLike[str]]
"""A request to export, or arguments of `export-model`."""

WAIT_SECONDS = 600.0
"""The longest time in seconds that the end of a training waits for its last export."""

_CKPT_DIR, _OUT, _WATCH = "--ckpt-dir", "--out", "--watch"

_OPTIONS = "EXPORT_MODEL_"

_ATTEMPTS = 3
"""The number of checkpoints that an export tries if the trainer prunes each of them before it is read."""

_STOP_SECONDS = 30.0  # time for an export to remove its staging directory before it is killed
_TAIL_BYTES = 64 << 10


class ExportHook(SessionHook):
    """A `SessionRunHook` for MonitoredTrainingSession: pass it in `hooks=`, which follow the session's saver.

    `what` is an `ExportRequest`, or the arguments of `export-model`; its `ckpt_dir` is the session's
    `checkpoint_dir`. Every `every_checkpoints`-th new checkpoint is exported (None: none of them), and the
    newest when training ends; the end waits for that up to `wait_seconds`. A failure is logged and recorded
    in `outcomes`; with `raise_on_failure` the failure of the last export is raised. Only the chief exports;
    `is_chief` says whether this process is the chief, None that the environment decides.

    Raises:
        UsageError: the arguments contradict each other.
        RoleUnknown: the environment contradicts itself.
        ExportFailed: from the session's end, with `raise_on_failure`.
    """

    def __init__(
        self,
        what: ToExport,
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
        """The outcomes of the exports that have ended or were abandoned, oldest first."""
        return self._schedule.exports.outcomes

    def begin(self) -> None:
        """Do nothing: the graph is not changed."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Note that a session begins, so that `before_run` marks the existing checkpoints as seen.

        The session's saver writes a checkpoint in this call, right after it has restored one, perhaps after
        this hook; so the hook looks only before the first step.
        """
        self._has_begun = False

    def before_run(self, run_context: Any) -> None:
        """Before the session's first step, mark the existing checkpoints as seen: they are not new ones."""
        if self._is_chief and not self._has_begun:
            self._schedule.begin()
        self._has_begun = True

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Start to export a new checkpoint if it is an `every_checkpoints`-th one, without waiting for it."""
        if self._is_chief:
            self._schedule.look()

    def end(self, session: Any) -> None:
        """Export the newest checkpoint, unless its export was started already, and wait up to `wait_seconds`.

        An export that takes longer is stopped, which may take a minute. With `raise_on_failure`, ExportFailed
        if the last export failed or was stopped, or there is no checkpoint.
        """
        if self._is_chief:
            self._schedule.end()


def ExportCallback(
    what: ToExport,
    every_checkpoints: int | None = None,
    *,
    is_chief: bool | None = None,
    wait_seconds: float = WAIT_SECONDS,
    raise_on_failure: bool = False,
) -> Any:
    """Return a Keras callback (Keras 3 or tf-keras) that exports checkpoints like `ExportHook`.

    It looks for checkpoints when an epoch ends. Put it after the callback that saves. `is_chief` says whether
    this process exports; None: the strategy decides if it is a MultiWorkerMirroredStrategy, else the
    environment. The other arguments are those of `ExportHook`.

    Raises:
        UsageError: the arguments contradict each other.
        RoleUnknown: from `fit`: the environment contradicts itself.
        ExportFailed: from the end of `fit`, with `raise_on_failure`.
    """
    exports = ExportSchedule(what, every_checkpoints, wait_seconds, raise_on_failure)

    class Callback(callback_base()):  # type: ignore[misc]  # Keras is untyped
        """Passes the calls of `fit` on to the schedule."""

        schedule = exports

        @property
        def outcomes(self) -> tuple[ExportOutcome, ...]:
            """The outcomes of the exports that have ended or were abandoned, oldest first."""
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


class ExportSchedule:
    """Decides which checkpoints of a training are exported: every n-th new one, and the newest at the end.

    Raises:
        UsageError: `every_checkpoints` or `wait_seconds` is not positive, or `what` is an incomplete request.
    """

    def __init__(
        self, what: ToExport, every_checkpoints: int | None, wait_seconds: float, raise_on_failure: bool
    ) -> None:
        every = "every_checkpoints=1 exports every checkpoint"
        if every_checkpoints is not None and given.whole("every_checkpoints", every_checkpoints, every) < 1:
            raise UsageError(f"every_checkpoints is {every_checkpoints}", hint=every)
        if not given.number("wait_seconds", wait_seconds, "wait_seconds=600") > 0:
            raise UsageError(f"wait_seconds is {wait_seconds}", hint="600 waits ten minutes at most")
        self.exports = Exports(what)
        self._every = every_checkpoints
        self._wait_seconds = wait_seconds
        self._raises = raise_on_failure
        self._sightings = NewCheckpoints(self.exports.ckpt_dir)
        self._seen = 0
        self._started: Path | None = None

    def begin(self) -> None:
        """Mark the existing checkpoints as seen: `look` does not count them; `end` may export the newest."""
        self._sightings.new()

    def look(self) -> None:
        """Count a new checkpoint if there is one, and start to export every n-th; exports are not awaited."""
        checkpoint = self._sightings.new()
        if checkpoint is None:
            return
        self._seen += 1
        self._started = None  # it may be the same one, saved again
        if self._every and self._seen % self._every == 0:
            self._start(checkpoint)

    def end(self) -> None:
        """Export the newest checkpoint unless its export was started already, and wait for all exports.

        Waits up to `wait_seconds`, and then up to a minute for an export to stop. Failures are logged.

        Raises:
            ExportFailed: the export failed, took too long, or there is no checkpoint; and `raise_on_failure`
                is set.
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


class ExportOutcome(Struct, frozen=True):
    """The result of one export.

    `exit_code` is the command's (docs/scripts.md), negative for a signal, and 130 also for an export that was
    abandoned before it had started or ended. `error`, `message` and `hint` describe the failure, `last_line`
    is the last line of the command's stderr. `document` is its output with `--json`: `document["path"]` is
    the published version.
    """

    checkpoint: Path
    exit_code: int
    seconds: float
    document: Mapping[str, Any]
    error: str = ""
    message: str = ""
    hint: str = ""
    last_line: str = ""

    @property
    def is_done(self) -> bool:
        """True if the export succeeded."""
        return self.exit_code == Exit.DONE


class Exports:
    """The exports of one training; `outcomes` lists the ended and abandoned ones, oldest first.

    Raises:
        UsageError: `what` is an incomplete request.
    """

    def __init__(self, what: ToExport) -> None:
        self._arguments = ExportArguments.of(what)
        self._directory = Path.cwd()  # relative paths refer to it even if the trainer changes its directory
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._running: Path | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.outcomes: tuple[ExportOutcome, ...] = ()

    @property
    def ckpt_dir(self) -> Path:
        """The directory of the training's checkpoints."""
        return self._arguments.ckpt_dir

    def start(self, checkpoint: Path) -> None:
        """Export a checkpoint, in a thread, as soon as no export runs.

        A checkpoint that is pending is dropped. Does not wait for the export; failures are outcomes.
        """
        with self._changed:
            if self._waiting is not None:
                log.info("export: %s takes the place of %s", checkpoint.name, self._waiting.name)
            self._waiting = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="export-model", daemon=True)
                self._thread.start()

    def finish(self, seconds: float) -> ExportOutcome | None:
        """Wait up to `seconds` for the exports; return the outcome of the last one, None if there was none.

        An export that is not done in time is stopped, which may take a minute more, and a pending one is not
        started; both get outcomes, as failures.
        """
        with self._changed:
            # A longer wait, as an infinite one, raises OverflowError.
            if not self._changed.wait_for(lambda: self._thread is None, min(seconds, threading.TIMEOUT_MAX)):
                log.error("export: not done after %g s, stopping it", seconds)
                self._abandon(seconds)
        return self.outcomes[-1] if self.outcomes else None

    def _abandon(self, seconds: float) -> None:
        waiting, self._waiting = self._waiting, None  # first, or it begins when the running one has ended
        before = self.outcomes
        self._stop()
        stopped = self.outcomes[len(before) :]  # an export may still have succeeded meanwhile
        late = f"not done after {seconds:g} s"
        ended = [o if o.is_done else replace(o, message=f"{late}, stopped") for o in stopped]
        for checkpoint, why in ((self._running, "and it cannot be stopped"), (waiting, "not begun")):
            if checkpoint is not None:
                message = f"{late}, {why}"
                ended.append(ExportOutcome(checkpoint, Exit.INTERRUPTED, seconds, {}, message=message))
        self.outcomes = (*before, *ended)

    def _stop(self) -> None:
        """Stop the running export: by SIGTERM, on which the command cleans up, then by SIGKILL.

        Waits up to 30 s after each.
        """
        for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
            process = self._process  # read once: the export's thread sets it to None when the process ends
            if process is not None:
                stop(process)
            if self._changed.wait_for(lambda: self._thread is None, _STOP_SECONDS):
                return

    def _work(self) -> None:
        while True:
            with self._changed:
                # With the end of the thread in one lock: `start` finds it running, or begins another.
                checkpoint, self._waiting = self._waiting, None
                self._running = checkpoint
                if checkpoint is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            outcome = self._export_or_newer(checkpoint)
            _report(outcome)
            with self._changed:
                self._running = None
                self.outcomes = (*self.outcomes, outcome)

    def _export_or_newer(self, checkpoint: Path) -> ExportOutcome:
        outcome = self._export(checkpoint)
        for _ in range(1, _ATTEMPTS):
            if outcome.exit_code != Exit.CHECKPOINT or _is_there(checkpoint):
                break
            with suppress(CheckpointError):
                checkpoint = candidates(self.ckpt_dir)[0]
            log.info("export: %s was pruned, exporting %s", outcome.checkpoint.name, checkpoint.name)
            with self._changed:
                self._running = checkpoint
                self._waiting = None if self._waiting == checkpoint else self._waiting  # not exported twice
            outcome = self._export(checkpoint)
        return outcome

    def _export(self, checkpoint: Path) -> ExportOutcome:
        begun = time.monotonic()
        try:
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                code = self._run(checkpoint, out, err)
                return _outcome(checkpoint, code, time.monotonic() - begun, out, err)
        except OSError as error:  # no process, or no temporary file
            return ExportOutcome(checkpoint, Exit.FAILURE, 0.0, {}, type(error).__name__, str(error))

    def _run(self, checkpoint: Path, out: IO[bytes], err: IO[bytes]) -> int:
        """Run the command for a checkpoint, wait for it, and return its exit code, negative for a signal.

        Its output goes to the files `out` and `err`: a pipe would break if the trainer ends first. OSError if
        it cannot be started.
        """
        arguments = (*self._arguments.at(checkpoint.absolute()), "--json")
        self._process = subprocess.Popen(
            [*module_command("exporter"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=self._directory,
            env=export_environment(os.environ),
        )
        try:
            return self._process.wait()
        finally:
            self._process = None


def export_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an export: the trainer's without cluster role, GPUs and `EXPORT_MODEL_*`.

    The trainer occupies the GPUs' memory, and the request has all options. `PYTHONPATH` is the trainer's
    `sys.path`, so that Python finds the same modules.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in roles.VARIABLES and not name.startswith(_OPTIONS)
    }
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return kept | {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "PYTHONPATH": path}


def _is_there(checkpoint: Path) -> bool:
    return checkpoint.exists() or index_path(checkpoint).exists()


def _outcome(checkpoint: Path, code: int, seconds: float, out: IO[bytes], err: IO[bytes]) -> ExportOutcome:
    last_line = _last_line(err)
    if code == Exit.DONE:
        out.seek(0)
        return ExportOutcome(checkpoint, code, seconds, _parsed(out.read()), last_line=last_line)
    said = _parsed(last_line.encode())
    error, message, hint = (str(said.get(name, "")) for name in ("error", "message", "hint"))
    cause = f": {said['cause']}" if said.get("cause") else ""
    return ExportOutcome(
        checkpoint, code, seconds, {}, error, f"{message}{cause}" or last_line, hint, last_line
    )


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _parsed(text: bytes) -> dict[str, Any]:
    """Parse the JSON object that the command printed.

    Empty if it printed none, for example because it was killed.
    """
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _report(outcome: ExportOutcome) -> None:
    name, seconds = outcome.checkpoint.name, outcome.seconds
    if outcome.is_done:
        log.info("export: %s to %s in %.1f s", name, outcome.document.get("path", "nothing new"), seconds)
    else:
        log.error(
            "export: %s failed with exit code %d after %.1f s: %s (%s)",
            *(name, outcome.exit_code, seconds, outcome.message or "it printed nothing", outcome.last_line),
        )


class ExportArguments(Struct, frozen=True):
    """The arguments of `export-model`: the directory whose checkpoints are exported, and all others."""

    ckpt_dir: Path
    rest: tuple[str, ...]

    @classmethod
    def of(cls, what: ToExport) -> ExportArguments:
        """Return the export arguments in `what`, a request or a list, with `--ckpt-dir DIR` taken out.

        Raises:
            UsageError: `--ckpt-dir` or `--out` is missing or malformed, `--watch` is given, the request is
                for deltas or cannot be expressed as arguments, or `what` is a single string.
        """
        if isinstance(what, ExportRequest):
            require_exact(what, 'pass arguments with "--incr": ["--ckpt-dir", "train", "--incr", ...]')
            return cls(trained_path(_CKPT_DIR, what.ckpt_dir), tuple(_options(what)))
        typed = _typed(what)
        if _WATCH in typed:
            raise UsageError(
                f"{_WATCH} never ends, so the export would not end with the training",
                hint="leave it out: the hook notices each checkpoint",
            )
        for at, text in enumerate(typed):
            name, equals, value = text.partition("=")
            if name == _CKPT_DIR and (equals or at + 1 < len(typed)):
                after = at + (1 if equals else 2)
                _check_out(typed)
                place = trained_path(_CKPT_DIR, value or typed[at + 1])
                return cls(place, (*typed[:at], *typed[after:]))
        raise UsageError(
            f"expected an ExportRequest, or arguments with {_CKPT_DIR} DIR; found {what!r}",
            hint='["--ckpt-dir", "train", "--model", "my_model.py:serving", "--out", "models/ranker"]',
        )

    def at(self, checkpoint: Path) -> tuple[str, ...]:
        """Return the arguments that export the checkpoint at this path.

        Without `--model` they allow the graph, which is the one beside the checkpoint, to read any file.
        """
        # Without --model the graph is the one beside the checkpoint, which this process wrote itself: it may
        # read files anywhere.
        is_named = any(text.partition("=")[0] == "--model" for text in self.rest)
        own = () if is_named else ("--allow=files=/",)
        return (_CKPT_DIR, str(checkpoint), *own, *self.rest)


def _typed(what: Any) -> list[str]:
    """Return the arguments `what` as texts; empty if it is neither a tuple nor a list.

    UsageError for an element that is neither text nor path.
    """
    texts = what if isinstance(what, tuple | list) else ()
    for at, text in enumerate(texts):
        if not isinstance(text, str | os.PathLike):
            raise given.wrong(f"what[{at}]", text, "a string or a path", f'as it is typed: "{text}"')
    return [os.fspath(text) for text in texts]


def _check_out(typed: Sequence[str]) -> None:
    """Raise UsageError if `--out` is missing in the arguments, or is neither a path nor a model's URL.

    This is checked before the training, not at a checkpoint.
    """
    places = [
        text.partition("=")[2] or following
        for text, following in pairwise((*typed, ""))
        if text.partition("=")[0] == _OUT
    ]
    if not places:
        raise UsageError(f"{_OUT} is missing", hint='name the model to publish: "--out", "models/ranker"')
    for place in places:
        checkpoint_path(_OUT, place)  # or a model's URL


def _options(request: ExportRequest) -> Iterator[str]:
    if request.model is not None and not isinstance(request.model, str):
        raise UsageError(
            f"an export in a process of its own needs the builder's name, found {_what(request.model)}",
            hint='model="my_model.py:serving", or "package.module:serving"',
        )
    yield f"{_OUT}={request.out}"
    if request.again:
        yield "--again"
    if request.plain:
        yield "--despite=deltas"
    if request.despite_hold:
        yield "--despite=hold"
    if request.updates is not None:
        yield "--new-base=always"
    yield from arguments(request)


def _what(model: Any) -> str:
    return "a function" if hasattr(model, "__qualname__") else f"an object, {type(model).__name__}"


class NewCheckpoints:
    """Notices new checkpoints in a directory. A look costs three system calls if no file has changed."""

    def __init__(self, ckpt_dir: Path) -> None:
        self._ckpt_dir = ckpt_dir
        self._looked: tuple[FileIdentity | None, ...] | None = None
        self._newest: tuple[Path, FileIdentity] | None = None

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint at the last call of `new`; None if there was none."""
        return self._newest[0] if self._newest else None

    def new(self) -> Path | None:
        """Return the newest checkpoint (prefix or archive) if it is new or rewritten since the last call.

        None otherwise, also if there is none. The first call returns one that exists.
        """
        # Before the search: a checkpoint that appears meanwhile changes it again.
        looked = (identity_of(self._ckpt_dir), identity_of(self._ckpt_dir / CHECKPOINT_STATE_FILE))
        if looked == self._looked and not self._is_overwritten():
            return None
        before = self._newest
        self._looked, self._newest = looked, self._find()
        return self.newest if self._newest != before else None

    def _is_overwritten(self) -> bool:
        """True if the newest checkpoint was rewritten in place, which does not change its directory."""
        return self._newest is not None and _saved(self._newest[0]) != self._newest[1]

    def _find(self) -> tuple[Path, FileIdentity] | None:
        try:
            newest = candidates(self._ckpt_dir)[0]
        except CheckpointError:
            return None
        return (newest, identity) if (identity := _saved(newest)) else None


def _saved(checkpoint: Path) -> FileIdentity | None:
    return identity_of(index_path(checkpoint)) or identity_of(checkpoint)

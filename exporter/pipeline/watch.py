"""Follow training: export each new checkpoint once.

Publications record what was exported: a version's manifest has the digests of its checkpoint and its plan. So
re-running a watch that was killed resumes it, and a second one beside it does nothing twice; other options
publish the newest checkpoint again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.checkpoint import candidates, open_checkpoint
from exporter.checkpoint.families import ARCHIVE_SUFFIXES
from exporter.checkpoint.identity import Identity, Looks, look
from exporter.errors import CheckpointChanged, ExportError, TargetBusy, UsageError
from exporter.graph.load import GraphSource, run_builders_once
from exporter.graph.origin import check_named
from exporter.options import ExportRequest, require_exact, require_local
from exporter.pipeline.full import Exported, export
from exporter.pipeline.trainer_graph import require_graph
from exporter.pipeline.watch_loop import EVERY_SECOND, Poll, Watching, follow
from exporter.publish.commit import model_lock
from exporter.publish.model import PublishedAlready
from exporter.storage.arrivals import Arrivals
from exporter.storage.files import make_directories, writing
from exporter.storage.layout import WATCH_LOCK_FILE
from exporter.terminal.progress import ProgressFactory, no_progress

T = TypeVar("T")


class Carry(Protocol):
    """A function that runs work that publishes, with transfers before and after it: `OpenModel.carry`."""

    def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; the transfers around it may run it again.

        Raises what `work` or a transfer raises.
        """


def watch(
    request: ExportRequest,
    watching: Watching = EVERY_SECOND,
    tell: Callable[[ExportError], None] = lambda error: None,
    progress: ProgressFactory = no_progress,
    ended: Callable[[str], None] = lambda why: None,
    carry: Carry = lambda work: work(),
    looked: Callable[[ExportError | None], None] = lambda error: None,
) -> Iterator[Exported]:
    """Export the newest complete checkpoint whenever there is another one; yield each export.

    Nothing is done or raised before the first item is asked for. The directory and its checkpoints need not
    exist yet. Of several checkpoints since the last look only the newest is exported. A builder is run once.
    Between looks it sleeps as `watching` says, or until files arrive. `tell` gets errors that the watch
    survives (see `watch_loop`), `ended` the reason why it ends, `looked` the error of each look, or None.
    `carry` runs the work that publishes. A missing `--model` is refused before the first wait.

    Raises:
        UsageError: the request names one version's number, or has options for the exactness of deltas; or the
            file of the graph does not exist.
        BuilderError: the builder of `--model` does not exist.
        ExportError: an error that only a person can repair; or, when the watch ends, the error of its last
            look, unless time may repair it.
    """
    require_local(request)
    require_exact(request)
    if request.version not in (None, "time"):
        raise UsageError(
            f"--version {request.version} names one version, and a watch publishes many",
            hint="leave --version out, or use --version time",
        )
    check_named(request.model)
    # Not `again`: each look would publish the same checkpoint once more.
    newest = _Newest(replace(request, again=False), progress, run_builders_once(), carry)
    sleep = Arrivals.of_trainer(request.ckpt_dir, ARCHIVE_SUFFIXES).sleep
    yield from follow(newest.export, watching, tell, ended=ended, looked=looked, sleep=sleep)


class _Newest(Struct):
    """An exporter of a directory's newest checkpoint; it does not read unchanged files again."""

    request: ExportRequest
    progress: ProgressFactory
    graphs: GraphSource
    carry: Carry
    _seen: Looks = ()
    _exported: set[str] = field(default_factory=set)
    _step: int | None = None

    def export(self) -> Poll[Exported]:
        """Export the newest checkpoint, unless it is published or another watch is exporting it.

        Then the result's `done` is None. Its step is the step of the checkpoint published last, None if this
        watch knows none. Raises CheckpointNotFound while there is no checkpoint, or its graph is not written
        yet; any other ExportError, or OSError, of an export.
        """
        # Before it is read: if it changes meanwhile, the next look sees other times and reads it again.
        first = look(candidates(self.request.ckpt_dir)[0])
        if first and first == self._seen:
            return Poll(None, self._step)
        catalog = open_checkpoint(self.request.ckpt_dir)
        require_graph(self.request, catalog)
        checkpoint = Identity.of(catalog)
        done = None
        if checkpoint.digest not in self._exported:
            done, published = self.carry(lambda: self._export(checkpoint))
            if published is None:  # not `_seen`: the other watch may fail, and then it is exported here
                return Poll(None, self._step)
            self._exported.add(published)
        self._seen, self._step = first, catalog.step
        return Poll(done, catalog.step)

    def _export(self, checkpoint: Identity) -> tuple[Exported | None, str | None]:
        """Export a checkpoint; return the export and the digest of the checkpoint that is published now.

        The export is None if the checkpoint is published already; both are None if another watch is
        exporting. Makes the model's directory. Raises any ExportError or OSError of an export, PublishError
        if the directory or the lock cannot be made.
        """
        model = self.request.out
        with writing(model):
            make_directories(model)
        with _turn(model) as is_ours:
            if not is_ours:
                return None, None
            with suppress(PublishedAlready):
                done = self._export_unless_changed(checkpoint)
                return done, done.plan.checkpoint.digest
        return None, checkpoint.digest

    def _export_unless_changed(self, checkpoint: Identity) -> Exported:
        """Export a checkpoint and return the result.

        Raises PublishedAlready if it is published; CheckpointChanged, which a watch survives, if the export
        failed and the checkpoint was changed meanwhile; otherwise the ExportError or OSError of the export.
        """
        try:
            return export(replace(self.request, ckpt_dir=checkpoint.prefix), self.progress, self.graphs)
        except ExportError as error:
            if checkpoint.is_untouched or isinstance(error, PublishedAlready):
                raise
            message = f"{checkpoint.prefix} was changed or removed while it was exported"
            raise CheckpointChanged(message, cause=error.message) from error


@contextmanager
def _turn(model: Path) -> Iterator[bool]:
    """Hold the watches' lock of a model for a block and yield True; yield False if another watch has it.

    The lock is not waited for. Raises PublishError if the lock cannot be made.
    """
    with ExitStack() as held:
        try:
            held.enter_context(model_lock(model, seconds=0, name=WATCH_LOCK_FILE))
            is_ours = True
        except TargetBusy:
            is_ours = False
        yield is_ours

"""The functions of `exporter`: they accept strings, paths and URLs, and do the same as the commands.

    done = export("train", "models/ranker", model="my_model.py:serving")
    done = export(ExportRequest("train", "models/ranker", model="my_model.py:serving"))

A model in an object store is named by its URL; the function that publishes uploads it.
"""

from __future__ import annotations

import inspect as inspection_of
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

from exporter.errors import ExportError, ExportWarning, NothingChanged, UsageError
from exporter.options import (
    ANYBODY,
    LOCALLY,
    UNSIGNED,
    ExportRequest,
    Jobs,
    Signing,
    Trusting,
    given,
    meanings,
    require_exact,
)
from exporter.options.given import StrPath
from exporter.options.keywords import ExportKeywords
from exporter.pipeline.watch_loop import EVERY_SECOND, Watching
from exporter.storage.local_paths import checkpoint_path, local_path, quoted
from exporter.storage.url import Url
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.terminal.tensorflow_import import said_by_name
from exporter.transfer.opened import (
    LocalModel,
    OpenModel,
    data_mode,
    opened,
    opened_if_model,
    require_apart,
    trust_in,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exporter.catalog import Catalog
    from exporter.pipeline.comparison import Differences
    from exporter.pipeline.doctor import Examination
    from exporter.pipeline.full import Exported, Plan
    from exporter.pipeline.incremental import ExportedDelta, Incremental
    from exporter.pipeline.inspected import Inspection
    from exporter.pipeline.log_maintenance import Merged, RollbackResult
    from exporter.pipeline.rebase import Rebased
    from exporter.pipeline.tagging import Tagging
    from exporter.publish.model import Model
    from exporter.publish.tags import ListedTag
    from exporter.transfer.pull import Pulled
    from exporter.transfer.push import PushPlan
    from exporter.verify.log import VerifiedModel

T = TypeVar("T")
DoneT = TypeVar("DoneT", "Exported", "ExportedDelta", "Incremental")
Served: TypeAlias = "StrPath | Callable[..., Any] | None"


@overload
def export(
    ckpt_dir: StrPath | ExportRequest,
    out: StrPath | None = None,
    model: Served = None,
    *,
    save_incr_model: Literal[False] = False,
    progress: ProgressFactory = ...,
    **options: Unpack[ExportKeywords],
) -> Exported: ...
@overload
def export(
    ckpt_dir: StrPath | ExportRequest,
    out: StrPath | None = None,
    model: Served = None,
    *,
    save_incr_model: Literal[True],
    progress: ProgressFactory = ...,
    **options: Unpack[ExportKeywords],
) -> ExportedDelta: ...
@given.named_misfit
def export(
    ckpt_dir: StrPath | ExportRequest,
    out: StrPath | None = None,
    model: Served = None,
    *,
    save_incr_model: bool = False,
    progress: ProgressFactory = no_progress,
    **options: Unpack[ExportKeywords],
) -> Exported | ExportedDelta:
    """Publish a version; with `save_incr_model`, publish the changes since the newest position as a delta.

    The newest checkpoint in `ckpt_dir` is published under `out`; both are paths or URLs. `model` is what to
    serve: "pkg.mod:fn", "file.py:fn", a path, a function, or a Keras model, of which only the architecture
    counts: values come from the checkpoint. None: the graph beside the checkpoint. An `ExportRequest` as the
    first argument replaces `out`, `model` and the options.

    If the checkpoint was already published, by the same graph and options, the result has that version, and
    `is_new` is False; `again=True` publishes it once more. Each note of the export, as the command prints it,
    becomes an `ExportWarning` (`warnings.warn`).

    A delta has the changes that the trainer's increments (also DeepRec's) report, or that a comparison of its
    newest checkpoint with the published values finds. `export_incremental` publishes deltas, too, but begins
    with a base, and does not raise an error if there is nothing new.

    Raises:
        UsageError: an argument is wrong; or options of deltas without `save_incr_model`.
        NotUpdatable: `save_incr_model`, and nothing is published that a delta could continue.
        NothingChanged: `save_incr_model`, and the trainer has saved nothing new.
        ExportError: any other of exporter.errors; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    request = _request("export", ckpt_dir, out, model, options, progress)
    if not given.flag("save_incr_model", save_incr_model):
        from exporter.pipeline import full

        require_exact(request)
        return _publish(request, lambda local: full.export_unless_published(local, progress))
    return _publish(request, lambda local: _delta(local, progress))


def _delta(request: ExportRequest, progress: ProgressFactory) -> ExportedDelta:
    from exporter.pipeline import incremental
    from exporter.publish.delta_log import read_log

    at = read_log(request.out).at
    done = incremental.export_incremental(request, progress)
    if not isinstance(done, incremental.ExportedDelta) or done.published is None:
        raise NothingChanged(f"{request.ckpt_dir} holds nothing beyond position {at}, which is published")
    return done


@given.named_misfit
def export_incremental(
    ckpt_dir: StrPath | ExportRequest,
    out: StrPath | None = None,
    model: Served = None,
    *,
    new_base: str | Sequence[str] = (),
    progress: ProgressFactory = no_progress,
    **options: Unpack[ExportKeywords],
) -> Incremental:
    """Publish the changes as a delta, or a base if there is none; nothing if there is nothing new.

    The result is an `Exported` for a base, an `ExportedDelta` for a delta; its `published` is None if there
    is nothing new. The arguments are as for `export`. With `new_base="if-needed"` a base is published if no
    delta fits. Notes become ExportWarnings.

    Raises:
        ExportError: any of exporter.errors; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    from exporter.pipeline import incremental

    request = _request("export_incremental", ckpt_dir, out, model, options, progress)
    words = given.several("new_base", str, new_base)
    if not {*words} <= {"if-needed"}:
        raise given.wrong("new_base", new_base, '"if-needed"', "updates=Updates() publishes a base always")
    return _publish(
        request,
        lambda local: incremental.export_incremental(local, progress, full_on_mismatch=bool(words)),
    )


@given.named_misfit
def plan(
    ckpt_dir: StrPath | ExportRequest,
    out: StrPath | None = None,
    model: Served = None,
    **options: Unpack[ExportKeywords],
) -> Plan:
    """Return the plan of an export, for `execute`; nothing is written.

    The arguments are as for `export`, but `out` is a local path.

    Raises:
        PublishedAlready: the checkpoint is published by this plan, and `again` is not asked for.
        ExportError: any other of exporter.errors.
        OSError: the operating system refuses to read a file.
    """
    from exporter.pipeline import full

    request = _request("plan", ckpt_dir, out, model, options)
    with said_by_name():
        return full.plan(request)


@given.named_misfit
def execute(planned: Plan, progress: ProgressFactory = no_progress) -> Exported:
    """Stage, verify and publish a plan's version, and return the result; its notes become ExportWarnings.

    Raises:
        CheckpointChanged: the trainer removed or replaced files since the plan was made.
        PublishedAlready: another process published the same meanwhile, and `again` is not asked for.
        ExportError: PublishError, VerificationError and others of exporter.errors; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    from exporter.pipeline import full

    if not isinstance(planned, full.Plan):
        raise given.wrong("planned", planned, "what plan(...) returns", "execute(plan(...)), or export(...)")
    with said_by_name():
        return _with_warnings(full.execute(planned, progress), stacklevel=4)


@given.named_misfit
def watch(
    ckpt_dir: StrPath | ExportRequest,
    out: StrPath | None = None,
    model: Served = None,
    *,
    watching: Watching = EVERY_SECOND,
    tell: Callable[[ExportError], None] | None = None,
    ended: Callable[[str], None] | None = None,
    progress: ProgressFactory = no_progress,
    **options: Unpack[ExportKeywords],
) -> Iterator[Exported]:
    """Export the newest complete checkpoint whenever there is another one; yield each export.

    The watch runs, and waits, while the result is iterated. The arguments are as for `export`. `watching`
    says how often to look and when to end: `Watching(stop=StopWhen(count=3))`; by default it looks every
    second and never ends. `tell` is called with each error that the watch survives, `ended` with the reason
    why the watch ends, as a text. Notes of an export become ExportWarnings.

    Raises:
        UsageError: an argument is wrong, at once; or, while iterating, the request names one version's
            number, or has options for the exactness of deltas.
        ExportError: while iterating, an error that only a person can repair; or, when the watch ends, the
            error of its last look, unless time may repair it.
        OSError: while iterating, the operating system refuses to read a file.
    """
    request = _request("watch", ckpt_dir, out, model, options, progress)
    if not isinstance(watching, Watching):
        raise given.wrong(
            "watching", watching, "exporter.Watching(...)", "watching=Watching(stop=StopWhen(count=3))"
        )
    return _watch(request, watching, tell or _ignore, progress, ended or _ignore)


def _ignore(told: object) -> None:
    """Do nothing."""


def _watch(
    request: ExportRequest,
    watching: Watching,
    tell: Callable[[ExportError], None],
    progress: ProgressFactory,
    ended: Callable[[str], None],
) -> Iterator[Exported]:
    from exporter.pipeline import watch as watches

    with said_by_name(), opened(request.out, signing=request.signing) as target:
        for done in watches.watch(_opened_at(request, target), watching, tell, progress, ended, target.carry):
            yield _with_warnings(done, stacklevel=3)


@given.named_misfit
def merge(
    model: StrPath,
    start: int | str | None = None,
    end: int | str | None = None,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
    signing: Signing = UNSIGNED,
    *,
    dry_run: bool = False,
) -> Merged | None:
    """Merge the deltas between two positions into one and publish it; None if there is nothing to merge.

    That is so if at most one delta is between them, or they are merged already. `start` is by default the
    newest base, `end` the newest position; both are numbers or names, as for `rollback`. `model` is a path or
    a URL, `jobs` says where tasks run, `signing` who signs. A `dry_run` reads and checks the deltas, writes
    nothing, and returns the plan.

    Raises:
        UsageError: an argument is wrong, or `start` is not before `end`.
        DeltaGap, StaleDelta: deltas do not reach from `start` to `end`.
        ExportError: any other of exporter.errors; nothing was published.
        OSError: the operating system refuses to read a file.
    """
    from exporter.pipeline import log_maintenance

    for name, position in (("start", start), ("end", end)):
        if position is not None:
            _position(name, position, model)

    work = partial(log_maintenance.merge, start=start, end=end, jobs=jobs, progress=progress, dry_run=dry_run)
    return _with_model(model, work, read_only=dry_run, deciding="merge", signing=signing)


@given.named_misfit
def rebase(
    model: StrPath,
    *,
    keep: int | None = None,
    despite_hold: bool = False,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
    signing: Signing = UNSIGNED,
    dry_run: bool = False,
) -> Rebased | None:
    """Publish a new base, the newest one with all its deltas; return None if it has no deltas.

    `keep` is the number of newest versions that stay, all by default; others are removed. `model` is a model
    base path, or its URL; `jobs` says where tasks run, `signing` who signs. A `dry_run` reads and checks the
    deltas, writes nothing, and returns the plan.

    Raises:
        ModelHeld: the model is held, and not `despite_hold`.
        UsageError: an argument is wrong, or a base with hot rows is in an object store.
        ExportError: any other of exporter.errors; nothing was published.
        OSError: the operating system refuses to read a file.
    """
    from exporter.pipeline import rebase as bases
    from exporter.publish.retention import Keep

    if keep is not None and given.whole("keep", keep, "keep=2") < 1:
        raise UsageError(f"keep={keep} would leave no version to serve", hint="leave out keep, or give 1")
    work = partial(
        bases.rebase,
        keep=None if keep is None else Keep(keep),
        despite_hold=despite_hold,
        jobs=jobs,
        progress=progress,
        dry_run=dry_run,
    )
    return _with_model(model, work, read_only=dry_run, deciding="merge --rebase", signing=signing)


@given.named_misfit
def rollback(
    model: StrPath,
    to: int | str,
    *,
    reason: str | None = None,
    if_canary: bool = False,
    signing: Signing = UNSIGNED,
    dry_run: bool = False,
) -> RollbackResult:
    """Publish the values of position `to` as the next position, and hold the model there.

    `to` is a number, or a name: a tag ("prod"), "@latest", "@previous", "@yesterday", "@2h" (two hours ago)
    or "@2026-11-26T08:00" (UTC): the newest position published until then. Values from before a change of
    structure are published as a new base; those of a version that takes no deltas, as the newest version. The
    `reason` is kept in the manifest, and `export-model history` shows it; None: there is none. `if_canary`:
    only if a canary's hold is at `to`. `model` is a model base path, or its URL; `signing` says who signs. A
    `dry_run` reads and checks the same input, writes nothing, and returns the plan.

    Raises:
        PositionUnknown: `to` is not a published position, or its values are gone.
        UsageError: `to` is the newest position, or not a position.
        ModelHeld: a canary decides about the log, and rejected the values of `to`; or the model is a copy,
            and its store holds it.
        PositionMoved: with `if_canary`, there is no canary's hold at `to`.
        ExportError: any other of exporter.errors; nothing was published.
    """
    from exporter.pipeline import log_maintenance

    _position("to", to, model)

    work = partial(log_maintenance.rollback, to=to, reason=reason, if_canary=if_canary, dry_run=dry_run)
    return _with_model(model, work, read_only=dry_run, deciding="rollback", signing=signing)


@given.named_misfit
def resume(
    model: StrPath,
    *,
    lift_only: bool = False,
    lift_canary: bool = False,
    signing: Signing = UNSIGNED,
    dry_run: bool = False,
) -> RollbackResult:
    """Lift the hold; after a rollback without later publications, publish the values before it again.

    With `lift_only` the values stay the rollback's; `lift_canary` lifts a canary's hold, too. Without a hold
    nothing is done, and the result's `was_held` is False. `model` is a model base path, or its URL; `signing`
    says who signs. A `dry_run` reads and checks the same input, writes nothing, and returns the plan.

    Raises:
        UsageError: the rollback was accepted by a resumption with `lift_only`.
        ModelHeld: the model is a copy, and its store holds it.
        PositionUnknown: the values before the rollback are gone.
        TargetBusy: with `lift_canary`, the canary of a running agent would set its hold again.
        ExportError: any other of exporter.errors; the model is still held.
    """
    from exporter.pipeline import log_maintenance

    work = partial(log_maintenance.resume, lift_only=lift_only, lift_canary=lift_canary, dry_run=dry_run)
    return _with_model(model, work, read_only=dry_run, deciding="resume", signing=signing)


@given.named_misfit
def tag(
    model: StrPath,
    name: str,
    position: int | str = "@latest",
    *,
    reason: str | None = None,
    dry_run: bool = False,
) -> Tagging:
    """Set a tag of a model, a name by which all functions accept a position, and return the change.

    Retention keeps the files that a tagged position needs. An existing tag of this name moves. `position` is
    a number or a name, as for `rollback`; where versions take no deltas, it is a version's number. `reason`
    is recorded, if it is not None. `model` is a model base path, or its URL. A `dry_run` writes nothing.

    Raises:
        UsageError: a tag cannot have the name, or `position` is not a position.
        PositionUnknown: the values of the position cannot be restored.
        ExportError: any other of exporter.errors; the tags are as they were.
    """
    from exporter.pipeline import tagging

    _position("position", position, model)
    return _with_model(
        model,
        lambda path: tagging.set_tag(path, name, position, reason=reason, dry_run=dry_run),
        read_only=dry_run,
        deciding="tag",
    )


@given.named_misfit
def untag(model: StrPath, name: str, *, dry_run: bool = False) -> Tagging:
    """Delete a tag of a model, by its path or URL; `before` in the result is the deleted tag.

    Retention may then remove the tagged position. A `dry_run` writes nothing.

    Raises:
        PositionUnknown: there is no such tag.
        ExportError: any other of exporter.errors; the tags are as they were.
    """
    from exporter.pipeline import tagging

    return _with_model(
        model,
        lambda path: tagging.delete_tag(path, name, dry_run=dry_run),
        read_only=dry_run,
        deciding="tag",
    )


@given.named_misfit
def tags(model: StrPath) -> tuple[ListedTag, ...]:
    """Return a model's tags, sorted by name: name, position, who set it, when and why, and if it is gone.

    `model` is a model base path, or its URL. A tag is gone if its position cannot be restored any more.

    Raises:
        NotUpdatable: nothing is published there.
        ManifestError: the tags, or a manifest, cannot be read.
        ExportError: a store cannot be read.
    """
    from exporter.publish.tags import tags_of

    return _with_model(model, tags_of, read_only=True)


@given.named_misfit
def inspect(path: StrPath) -> Inspection:
    """Examine a path or URL: return a view of a checkpoint, a graph, a version, or a model with its versions.

    Raises:
        UsageError: `path` is neither a path nor a URL.
        CheckpointNotFound: it is none of these.
        ExportError, OSError: it is damaged, or cannot be read.
    """
    from exporter.pipeline import inspection

    place = given.place("path", path, checkpoint_path)
    with opened_if_model(os.fspath(place)) as stored:
        target: OpenModel = stored or LocalModel(place)
        return target.carry(lambda: inspection.inspect(target.path))


@given.named_misfit
def verify_model(
    model: StrPath, *, bytes_: bool = False, jobs: Jobs = LOCALLY, trusting: Trusting = ANYBODY
) -> VerifiedModel:
    """Check a model's versions, its newest log and its hold, and list the damage.

    Deltas are read whole; with `bytes_` all values of versions are read, too. `model` is a path or a URL.
    With trusted keys (`trusting`) a publication that none of them has signed is damage, and every file is
    compared with its signed digest. `jobs` says where values are read. Damage is in the result, not raised.

    Raises:
        UsageError: `jobs` names an engine, and `bytes_` is False; or another argument is wrong.
        NotUpdatable: nothing is published there.
        ExportError: the model cannot be read.
    """
    from exporter.jobs.runner import Runner
    from exporter.verify import log as verify_log

    if jobs.engine and not bytes_:
        raise UsageError("--engine goes with --bytes", hint="add --bytes, or leave out --engine")
    return _with_model(
        model,
        lambda path: verify_log.verify_model(path, bytes_=bytes_, runner=Runner.of(jobs)),
        read_only=True,
        trusting=trusting,
    )


@given.named_misfit
def history(model: StrPath) -> Model:
    """Read a model's publications: `publications`, by position; `at`, the newest position; `hold`.

    `model` is a model base path, or its URL. Damaged publications are listed, too.

    Raises:
        NotUpdatable: nothing is published there.
        ManifestError: the model cannot be listed.
        OSError: a manifest exists but cannot be looked at.
        ExportError: a store cannot be read.
    """
    from exporter.publish.model import Model

    return _with_model(model, Model.history, read_only=True)


@given.named_misfit
def diff(a: StrPath, b: StrPath, *, jobs: Jobs = LOCALLY) -> Differences:
    """Compare two states, and list the variables that differ, with their rows and norms.

    A state is a checkpoint, a version, a model (its newest position), or "MODEL@POSITION", by number or name
    ("models/ranker@prod", "models/ranker@2h"); a path or URL.

    `jobs` says where rows are compared: with an engine in its tasks, else in this process.

    Raises:
        UsageError: a position is malformed.
        PositionUnknown: no position has this name.
        ExportError, OSError: a state cannot be read.
    """
    from exporter.jobs.runner import Runner
    from exporter.pipeline import comparison

    with ExitStack() as stack:
        models: dict[str, OpenModel] = {}
        first, second = (_local_state(os.fspath(state), models, stack) for state in (a, b))
        runner = Runner.of(jobs) if jobs.engine else None

        def work() -> Differences:
            return comparison.compare(comparison.parse_side(first), comparison.parse_side(second), runner)

        for model in models.values():
            work = partial(model.carry, work)
        return work()


def _local_state(text: str, models: dict[str, OpenModel], stack: ExitStack) -> str:
    """Return a state as text, with a model's URL replaced by the local path at which the model is opened.

    Models are opened on `stack`, each once: `models` has the open ones, by URL, and gets the new ones. A
    path, or the URL of a checkpoint, is returned unchanged. Raises ExportError if a store cannot be read.
    """
    from exporter.publish.tags import split_position

    name, position = split_position(text) or ("", "")
    if Url.parse(name) is not None:
        if name not in models and position.isdecimal():
            models[name] = stack.enter_context(opened(name, read_only=True))
        elif name not in models and (model := stack.enter_context(opened_if_model(name))) is not None:
            models[name] = model
        if name in models:
            return f"{models[name].path}@{position}"
    if text not in models:
        found = stack.enter_context(opened_if_model(text))
        if found is None:
            return text
        models[text] = found
    return str(models[text].path)


@given.named_misfit
def push(
    model: StrPath,
    url: str,
    *,
    prune: bool = False,
    progress: ProgressFactory = no_progress,
    trusting: Trusting = ANYBODY,
    dry_run: bool = False,
) -> PushPlan:
    """Upload the publications of a model to an object store; return the files uploaded and removed.

    `url` is s3://BUCKET/MODEL, gs://BUCKET/MODEL or az://CONTAINER/MODEL. `prune` removes publications there
    that no longer exist here. With trusted keys (`trusting`) only signed publications are uploaded. A
    `dry_run` looks into the store, writes nothing, and returns the plan.

    Raises:
        UsageError: `model` is a URL, or `url` is not one.
        ExportError: any other of exporter.errors; the model in the store is whole.
        OSError: a local file cannot be read; the model in the store is whole.
    """
    from exporter.transfer import push as transfer

    place = local_path("model", os.fspath(model))
    plan = transfer.plan_push(place, url, prune=prune, trust=trust_in(trusting, place))
    return plan if dry_run else transfer.push(plan, progress)


@given.named_misfit
def pull(
    url: str,
    model: StrPath,
    *,
    prune: bool = False,
    progress: ProgressFactory = no_progress,
    trusting: Trusting = ANYBODY,
    workers: int = 0,
    dry_run: bool = False,
) -> Pulled:
    """Fetch the publications in an object store into a local model; return those fetched and removed.

    Each is checked, in order of positions. `prune` removes publications here that no longer exist in the
    store. With trusted keys only signed publications are fetched; `untrusted` has the errors of others.
    `workers` threads, 0: one a processor, merge bases here, at idle priority. With `dry_run`, nothing is
    changed: what would be done is returned, and the most bytes that would come.

    Raises:
        UsageError: `model` is a URL, or `url` is not one.
        CheckpointNotFound: the store has no such model.
        ExportError: any other of exporter.errors; the local model is whole.
        OSError: a local file cannot be read; the local model is whole.
    """
    from exporter.transfer import pull as transfer

    place, trust = local_path("model", os.fspath(model)), trust_in(trusting, url)
    copy = transfer.LocalCopy(url, place, prune=prune, trust=trust, workers=workers)
    return copy.plan() if dry_run else copy.update(progress)


@given.named_misfit
def doctor(
    model: StrPath,
    *,
    ckpt_dir: StrPath | None = None,
    targets: Sequence[str] = (),
    model_name: str | None = None,
    patience: float = 60.0,
    deadline: float = 5.0,
    access: ServerAccess = WITHOUT_TLS,
    trusting: Trusting = ANYBODY,
) -> Examination:
    """Find present and coming problems of a published model: `findings`, each with the command that helps.

    With `ckpt_dir` also problems of the checkpoints that the next export would read; with `targets`
    (HOST:PORT) problems of these servers, which call the model `model_name` (by default the last part of its
    path), have `deadline` seconds for an answer, and `patience` seconds to serve a publication. A server that
    does not answer is a finding. `access` has the files for TLS; with `trusting`, a publication that none of
    its keys has signed is a finding.

    Nothing is changed, but for moments there is a staging directory beside the versions.

    Raises:
        NotUpdatable: nothing is published there.
        UsageError: an argument is wrong.
        ExportError: a store, or a pinned identity, cannot be read.
    """
    from exporter.pipeline.doctor import ask, examine

    place = None if ckpt_dir is None else given.place("ckpt_dir", ckpt_dir, checkpoint_path)
    with opened(given.place("model", model, checkpoint_path), read_only=True, trusting=trusting) as target:
        name = model_name or target.path.resolve().name
        servers = tuple(
            ask(address, name, deadline, access) for address in given.several("targets", str, targets)
        )
        return target.carry(
            lambda: examine(
                target.path,
                place,
                now=time.time(),
                is_remote=target.is_remote,
                servers=servers,
                patience=patience,
            )
        )


@given.named_misfit
def open_checkpoint(path: StrPath) -> Catalog:
    """Return the catalog of a checkpoint by its path or URL; a directory means its newest complete one.

    Raises:
        UsageError: `path` is neither a path nor a URL.
        CheckpointNotFound: there is none; the message says what was found instead.
        CheckpointError: it is damaged, was changed while it was read, or its store does not answer.
    """
    from exporter import checkpoint

    return checkpoint.open_checkpoint(given.place("path", path, checkpoint_path))


def _request(
    function: str,
    ckpt_dir: Any,
    out: Any,
    model: Any,
    options: Mapping[str, Any],
    progress: ProgressFactory = no_progress,
) -> ExportRequest:
    """Return the request of a call of `function`: `ckpt_dir` if it is one, else one made of the arguments.

    `options` are the other fields, by name. Raises UsageError if an argument is wrong.
    """
    if not callable(progress):
        raise given.wrong("progress", progress, "a function of a title and a total", "leave progress= out")
    if isinstance(ckpt_dir, ExportRequest):
        if out is not None or model is not None or options:
            more = next(iter(options), "out" if out is not None else "model")
            raise UsageError(
                f"{function}(request, {more}=...): a request has all options in itself",
                hint=f"{function}(msgspec.structs.replace(request, {more}=...))",
            )
        return given.changed(ckpt_dir)  # `msgspec.structs.replace` looks at no value
    given.require_names(function, options, (*_OPTIONS, *_FLAGS.get(function, ())))
    if out is None:
        raise UsageError(
            f"{function} needs two places: the checkpoint and the model to publish",
            hint=f'{function}("train", "models/ranker", model="my_model.py:serving")',
        )
    return ExportRequest(ckpt_dir, out, model, **options)


_OPTIONS = tuple(one.name for one in fields(ExportRequest) if one.name not in ("ckpt_dir", "out", "model"))
_FLAGS = {"export": ("model", "save_incr_model", "progress"), "watch": ("watching", "tell", "ended")}


def _position(name: str, position: object, model: object) -> None:
    """Raise UsageError unless `position` is a number or a text."""
    if not isinstance(position, str) and (isinstance(position, bool) or not isinstance(position, Integral)):
        expected = "a position: a whole number, a tag, @latest, @2h or the like"
        raise given.wrong(name, position, expected, f"list them: export-model history {quoted(model)}")


def _opened_at(request: ExportRequest, target: OpenModel) -> ExportRequest:
    require_apart(request.ckpt_dir, request.out)
    return replace(request, out=target.path, data=data_mode(request.out, request.data))


def _publish(request: ExportRequest, work: Callable[[ExportRequest], DoneT]) -> DoneT:
    """Run `work` on the request, with its model opened as a local path; return the result of `work`.

    A model in a store is uploaded after that, and `work` may be repeated. Notes of the result become
    warnings. Raises UsageError if the model cannot be opened as requested, ExportError if its store cannot be
    read or written, TensorFlowNeeded if `work` needs it, and what `work` raises.
    """
    with said_by_name(), opened(request.out, signing=request.signing) as target:
        local = _opened_at(request, target)
        done = target.carry(lambda: work(local))
    return _with_warnings(done, stacklevel=5)


def _with_warnings(done: DoneT, stacklevel: int) -> DoneT:
    """Issue each note of an export as an ExportWarning, `stacklevel` callers up; return the export."""
    for note in done.plan.notes:
        warnings.warn(note, ExportWarning, stacklevel=stacklevel)
    return done


def _with_model(
    model: StrPath,
    work: Callable[..., T],
    *,
    read_only: bool = False,
    deciding: str = "",
    signing: Signing = UNSIGNED,
    trusting: Trusting = ANYBODY,
) -> T:
    given.flag("dry_run", read_only)
    place = given.place("model", model, checkpoint_path)
    with opened(place, read_only=read_only, deciding=deciding, signing=signing, trusting=trusting) as target:
        done = target.carry(lambda: work(target.path))
        if read_only and deciding and target.meets and isinstance(done, Struct):
            done = replace(done, meets=target.meets)
        return done


def _show_options(function: Any) -> None:
    """Add all options to a function's `__signature__` and docstring, for `help` and completion.

    Each option has its name, type, default and meaning.
    """
    declared = inspection_of.signature(function)
    texts, named, told = meanings(ExportRequest), [], []
    for each in fields(ExportRequest):
        if each.name in _OPTIONS:
            kind = ExportKeywords.__annotations__[each.name].__forward_arg__
            default = each.default if each.default_factory is NODEFAULT else each.default_factory()
            default = getattr(default, "value", default)  # an enumeration's value, as one would type it
            named.append(
                inspection_of.Parameter(
                    each.name, inspection_of.Parameter.KEYWORD_ONLY, annotation=kind, default=default
                )
            )
            told += [f"        {each.name}: {kind} = {default!r}", f"            {texts[each.name]}"]
    function.__signature__ = inspection_of.Signature(
        [*(one for one in declared.parameters.values() if one.kind is not one.VAR_KEYWORD), *named],
        return_annotation=declared.return_annotation,
    )
    function.__doc__ = "\n".join([function.__doc__ or "", "    Options, by name:", *told, "    "])


for _function in (export, export_incremental, plan, watch):
    _show_options(_function)

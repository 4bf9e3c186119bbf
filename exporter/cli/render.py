"""Print plans and results of full exports, as a JSON document, and as lines for people."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import asdict

from exporter.bundle.mapped_tables import LEAST_BYTES
from exporter.bundle.variables import LITTLE_KEPT, ShardOrigin, ShardPlan
from exporter.cli.documents import Status
from exporter.cli.documents import exported as documents
from exporter.cli.documents.exported import Export, ExportPlan, Variable
from exporter.cli.render_catalog import catalog_text, checkpoint_document, kind_texts, line, tensor_groups
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.tensor_source import TensorSource
from exporter.options import ExportFormat, Verify
from exporter.pipeline.full import Exported, Plan
from exporter.pipeline.full_plan import served_at
from exporter.pipeline.inspected import signatures_of
from exporter.storage import mirror
from exporter.storage.local_paths import quoted
from exporter.terminal.output import Output, escape
from exporter.terminal.parameters import TAKEN
from exporter.terminal.progress import count, human_bytes

_PART = re.compile(r"(.*)\[((?:[0-9]+ )+)([0-9]+,[0-9]+(?::[0-9]+,[0-9]+)*)\]", re.DOTALL)
_BOX = re.compile(r"([0-9]+),([0-9]+)")


def in_rows(name: str) -> str:
    """Return the name of a variable's part in slice notation: `items[0:4]` for `items[7 16 0,4:0,16]`.

    Trailing dimensions that are complete are left out. A name of another form is returned as it is.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return name
    boxes = [(int(start), int(length)) for start, length in _BOX.findall(found[3])]
    sizes = [int(size) for size in found[2].split()]
    while boxes and boxes[-1] == (0, sizes[len(boxes) - 1]):  # drop trailing dimensions that are complete
        boxes.pop()
    return f"{found[1]}[{','.join(f'{start}:{start + length}' for start, length in boxes)}]"


def plan(planned: Plan, sink: Output) -> None:
    """Print the plan of a full export: its notes, and a JSON document or lines for people.

    Before anything is printed, raises MappingError if values would have to move between parts that are not
    ranges of rows, UsageError if tasks are so small that there would be too many shards.
    """
    rewritten = sum(source.bytes_ for source in planned.mapping.sources if not source.is_verbatim)
    how = f"{human_bytes(rewritten)} of it rewritten" if rewritten else "all of it as stored"
    lines = [
        *_plan_lines(planned),
        line("would write", f"{human_bytes(planned.mapping.bytes_)} under {planned.request.out}, {how}"),
        *(line("data", text) for text in ["; ".join(_data(planned.shards))] if text),
        *_linked_lines(planned.shards),
        *_delta_lines(planned),
    ]
    tasks, read = planned.work
    if tasks and (engine := planned.request.jobs.engine):
        what = f"{count(tasks, 'task')} on {engine}, reading {human_bytes(read)}"
        lines.append(line("would run", what))
    _warn(planned, sink)
    sink.result(_plan(planned, Status.PLANNED, planned.work, planned.shards), lines)


def exported(done: Exported, sink: Output) -> None:
    """Print the version that an export published, its notes, and its warnings."""
    variables, published = done.variables, done.published
    document = Export(
        **asdict(_plan(done.plan, Status.PUBLISHED, variables.work, variables.shards)),
        path=str(published.path),
        version=published.version,
        position=published.position,
        bytes_linked=variables.bytes_linked,
        bytes_cloned=variables.bytes_cloned,
        bytes_copied=variables.bytes_copied,
        bytes_rewritten=variables.bytes_rewritten,
        rounded=variables.rounded,
        verified=done.plan.request.verify.value,
        max_errors={f"{found.signature}/{found.output}": found.max_error for found in done.differences},
        versions_removed=published.removed,
        versions_kept=published.kept,
        seconds=round(done.seconds, 4),
        warnings=[warning.message for warning in published.warnings],
    )
    lines = [
        *_plan_lines(done.plan),
        line("data", "; ".join(_data(variables.shards)) or "no variables"),
        *_linked_lines(variables.shards),
        *(
            line("rounded", f"{key} to 8 bits: largest error {found.largest:.3g}, mean {found.mean:.3g}")
            for key, found in variables.rounded.items()
        ),
        line("verified", _verified(done)),
        *(line("removed", f"version {number}") for number in published.removed),
        *(line("kept", f"version {kept.version}, too: {kept.reason}") for kept in published.kept),
        *_delta_lines(done.plan),
        line("published", f"{published.path} in {done.seconds:.2f} s"),
        line("next", _next(done)),
    ]
    _warn(done.plan, sink)
    size = human_bytes(done.plan.mapping.bytes_)
    brief = f"{published.path}: {count(len(document.variables), 'variable')}, {size}, in {done.seconds:.2f} s"
    sink.result(document, lines, brief=escape(brief), is_done=True)
    for warning in published.warnings:
        sink.warn(warning.message)


def _next(done: Exported) -> str:
    version, model = done.published.path, done.published.path.parent
    if mirror.is_remote(model):  # servers read files; of the stores, they read only gs://
        return f"export-model pull {quoted(model)} {quoted(model.name)}"
    if done.plan.request.format is ExportFormat.METAGRAPH or done.plan.graph.foreign:
        return f"export-model inspect {quoted(version)}"  # serve-model run can load neither
    return f"serve-model run {quoted(model)}"


def _plan(planned: Plan, status: Status, work: tuple[int, int], shards: Iterable[ShardPlan]) -> ExportPlan:
    unmapped = {each.key: each.why for each in planned.unmapped}
    return ExportPlan(
        dry_run=status is Status.PLANNED,
        status=status,
        checkpoint=checkpoint_document(planned.catalog),
        graph=planned.graph.source,
        signatures=signatures_of(planned.graph.meta_graph),
        takes_deltas=planned.request.updates is not None,
        variables=[_variable(source, unmapped) for source in planned.mapping.sources],
        bytes=planned.mapping.bytes_,
        tasks=work[0],
        task_bytes=work[1],
        shards=list(_shards(planned, shards)),
        ignored=tensor_groups(planned.ignored),
        training=_training(planned.training),
        bytes_mapped=sum(source.bytes_ for source in planned.mapping.sources if source.is_mapped),
        served_at=str(served_at(planned.request)) if planned.request.map_tables else None,
        notes=planned.notes,
        taken=TAKEN.get(),
    )


def _plan_lines(planned: Plan) -> Iterator[str]:
    mapping = planned.mapping
    yield line("checkpoint", catalog_text(planned.catalog))
    yield line("graph", planned.graph.source)
    for name, signature in signatures_of(planned.graph.meta_graph).items():
        yield line("signature", f"{name}{signature}")
    via = Counter(source.via for source in mapping.sources)
    how = ", ".join(f"{count} by {rule}" for rule, count in via.most_common())
    yield line("variables", f"{len(mapping.sources)}, {human_bytes(mapping.bytes_)} ({how or 'none'})")
    for source in mapping.sources:
        if not source.is_verbatim:
            yield line("", f"{source.key}: {_rewrite_text(source)}")
    if planned.request.map_tables:
        yield from _mapped_lines(planned)
    if (training := planned.training) is not None:
        yield line(
            "training", f"graph {training.tag!r} of {training.source}: {len(training.tensors)} tensors"
        )
    ignored = "; ".join(kind_texts(planned.ignored))
    if ignored:
        yield line("ignored", ignored)


def _mapped_lines(planned: Plan) -> Iterator[str]:
    mapped = [source for source in planned.mapping.sources if source.is_mapped]
    size = human_bytes(sum(source.bytes_ for source in mapped))
    what = f"{count(len(mapped), 'variable')}, {size}, where servers see {served_at(planned.request)}"
    yield line(
        "mapped", what if mapped else f"nothing: no table of {human_bytes(LEAST_BYTES)} or more can be"
    )
    for choice in planned.hot:
        yield line("", f"{choice.key}: its most read rows lie side by side, {choice.source}")
    for each in planned.unmapped:
        yield line("", f"{each.key} ({human_bytes(each.bytes_)}) is restored: {each.why}")


def _training(training: TrainingGraph | None) -> documents.TrainingGraph | None:
    if training is None:
        return None
    return documents.TrainingGraph(training.source, training.tag, len(training.tensors))


def _rewrite_text(source: TensorSource) -> str:
    texts = []
    if source.gather_parts:
        texts.append(f"rows gathered from {source.gather_parts} mod partitions")
    if source.scatter_parts:
        texts.append(f"rows laid out in {source.scatter_parts} mod partitions")
    if source.cast:
        texts.append(f"{source.tensor.dtype.label} stored as {source.cast.label}")
    return ", ".join(texts)


def _shards(planned: Plan, shards: Iterable[ShardPlan]) -> Iterator[documents.Shard]:
    """Yield documents of those `shards` that contain bytes of the checkpoint's files unchanged, in order."""
    own = set(planned.catalog.shards)
    for shard in shards:
        if shard.source in own and shard.how is not ShardOrigin.REWRITTEN:
            yield documents.Shard(
                str(shard.source), shard.how.value, shard.why or None, shard.bytes_, shard.source_bytes
            )


def _data(shards: Iterable[ShardPlan]) -> Iterator[str]:
    """Yield a text with number and bytes of the shards for each origin, in the order of `ShardOrigin`.

    Shards of which little is kept have a text of their own after the others of their origin.
    """
    groups: dict[tuple[ShardOrigin, bool], list[ShardPlan]] = defaultdict(list)
    for shard in shards:
        groups[shard.how, shard.why == LITTLE_KEPT].append(shard)
    for how in ShardOrigin:
        for is_little in (False, True):
            if found := groups.get((how, is_little)):
                why = next((f" ({shard.why})" for shard in found if shard.why), "")
                size = human_bytes(sum(shard.bytes_ for shard in found))
                whole = human_bytes(sum(shard.source_bytes for shard in found))
                size = f"{size} of {whole}" if is_little else size
                yield f"{count(len(found), 'shard')} {how.value}, {size}{why}"


def _linked_lines(shards: Iterable[ShardPlan]) -> Iterator[str]:
    """Yield a warning about the trainer, as a line, if a shard is a link to its file."""
    if any(shard.how is ShardOrigin.LINKED for shard in shards):
        yield line("", "the trainer may remove these files, and must not write into them; or --data compact")


def _delta_lines(planned: Plan) -> Iterator[str]:
    """Yield a line on whether the version takes deltas, and how it would; nothing if it never can."""
    if planned.request.updates is not None:
        yield line("deltas", "taken: the next export with --incr publishes what changed")
    elif planned.request.format is ExportFormat.SAVED_MODEL and not planned.graph.foreign:
        yield line("deltas", "not taken: --new-base always publishes a version that takes them")


def _verified(done: Exported) -> str:
    if done.plan.request.verify is not Verify.OUTPUTS:
        return str(done.plan.request.verify)
    worst = max((found.max_error for found in done.differences), default=0.0)
    return f"outputs: {len(done.differences)} compared, largest difference {worst:.3g}"


def _warn(planned: Plan, sink: Output) -> None:
    for note in planned.notes:
        sink.note(f"note: {note}")


def _variable(source: TensorSource, unmapped: Mapping[str, str]) -> Variable:
    return Variable(
        name=source.key,
        tensor=source.tensor.name,
        via=source.via,
        dtype=source.dtype.label,
        shape=source.tensor.shape,
        bytes=source.bytes_,
        rewritten=_rewrite_text(source) or None,
        mapped=source.is_mapped,
        not_mapped=unmapped.get(source.key),
    )

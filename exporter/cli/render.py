"""Print what full exports and `inspect` found: as a JSON document, and as lines for people."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from msgspec.structs import asdict

from exporter.bundle.variables import ShardOrigin
from exporter.catalog import Catalog, TensorRef
from exporter.cli.documents import exported as documents
from exporter.cli.documents import inspections, values
from exporter.cli.documents.exported import Export, ExportPlan, Variable
from exporter.cli.documents.values import Status
from exporter.cli.render_tables import embedding_document, embedding_lines, served_document, served_text
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.build import TensorSource
from exporter.mapping.extras import Extra, ExtraKind
from exporter.mapping.unmatched import Unmatched
from exporter.options import Verify
from exporter.pipeline.both_sides import Unmatchable
from exporter.pipeline.full import Exported, Plan
from exporter.pipeline.inspection import (
    BundleView,
    CheckpointView,
    GraphView,
    Inspection,
    ModelView,
    Signature,
    TensorSpec,
    signatures_of,
)
from exporter.progress import count, human_bytes
from exporter.publish.manifest import Origin
from exporter.terminal.markup import escape
from exporter.terminal.output import Output
from exporter.wire.dtypes import DType


def plan(planned: Plan, sink: Output) -> None:
    """What `--dry-run` prints."""
    rewritten = sum(source.bytes_ for source in planned.mapping.sources if not source.is_verbatim)
    how = f"{human_bytes(rewritten)} of it rewritten" if rewritten else "all of it as stored"
    lines = [
        *_plan_lines(planned),
        _line("would write", f"{human_bytes(planned.mapping.bytes_)} under {planned.request.out}, {how}"),
    ]
    if (tasks := planned.work[0]) and (engine := planned.request.jobs.engine):
        lines.append(_line("would run", f"{count(tasks, 'task')} on {engine}"))
    _warn(planned, sink)
    sink.result(_plan(planned, Status.PLANNED), lines)


def exported(done: Exported, sink: Output) -> None:
    """What an export prints when it is done."""
    variables, published = done.variables, done.published
    document = Export(
        **asdict(_plan(done.plan, Status.PUBLISHED)),
        path=str(published.path),
        version=published.version,
        position=published.position,
        bytes_linked=variables.bytes_linked,
        bytes_copied=variables.bytes_copied,
        bytes_rewritten=variables.bytes_rewritten,
        verified=done.plan.request.verify.value,
        max_errors={f"{found.signature}/{found.output}": found.max_error for found in done.differences},
        versions_removed=published.removed,
        versions_kept=[values.KeptVersion(kept.version, kept.reason) for kept in published.kept],
        seconds=round(done.seconds, 4),
        warnings=[warning.message for warning in published.warnings],
    )
    lines = [
        *_plan_lines(done.plan),
        _line("data", "; ".join(_data(done)) or "no variables"),
        _line("verified", _verified(done)),
        *(_line("removed", f"version {number}") for number in published.removed),
        *(_line("kept", f"version {kept.version}, too: {kept.reason}") for kept in published.kept),
        _line("published", f"{published.path} in {done.seconds:.2f} s"),
        _line("next", f"serve-model run {shlex.quote(str(published.path.parent))}"),
    ]
    _warn(done.plan, sink)
    sink.result(document, lines, is_done=True)
    for warning in published.warnings:
        sink.warn(warning.message)


def inspected(found: Inspection, sink: Output, *, tensors: bool) -> None:
    """What `inspect` prints; `tensors` adds one row for each tensor."""
    document, lines = _inspection(found, tensors=tensors)
    if isinstance(found, CheckpointView) and found.problem is not None:
        sink.note(f"note: its embedding variables cannot be read: {found.problem.message}")
    sink.result(document, lines)
    if not tensors or isinstance(found, ModelView):
        return
    if isinstance(found, GraphView):
        columns = dict.fromkeys(("tensor", "dtype", "shape"), "left")
        rows = ([spec.tensor, spec.dtype, spec.shape_text] for spec in found.tensors)
        sink.table("", columns, rows)
    elif found.catalog is not None:
        columns = {"tensor": "left", "dtype": "left", "shape": "left", "slices": "right", "bytes": "right"}
        sink.table("", columns, map(_tensor_row, _by_name(found.catalog)))


def _inspection(found: Inspection, *, tensors: bool) -> tuple[inspections.Inspection, list[str]]:
    match found:
        case CheckpointView():
            lines = [
                _line("checkpoint", _catalog_text(found.catalog)),
                *(_line("", text) for text in _kind_texts(found.kinds, other="weights and others")),
                *(_line(*line) for view in found.tables for line in embedding_lines(view)),
            ]
            document = inspections.CheckpointInspection(
                **asdict(_checkpoint(found.catalog)),
                kind="checkpoint",
                kinds=_groups(found.kinds),
                embeddings=list(map(embedding_document, found.tables)),
                tensors=list(map(_tensor, _by_name(found.catalog))) if tensors else None,
            )
            return document, lines
        case GraphView():
            return _graph_document(found, tensors=tensors), list(_graph_lines(found))
        case BundleView():
            return _bundle_document(found, tensors=tensors), list(_bundle_lines(found))
        case ModelView():
            lines = [line for version in found.versions for line in _bundle_lines(version)]
            model = inspections.ModelInspection(
                kind="model",
                path=str(found.path),
                position=None if found.at is None else found.at.position,
                step=None if found.at is None else found.at.step,
                hold=found.hold,
                tables=list(map(served_document, found.tables)),
                versions=[_bundle_document(version, tensors=False) for version in found.versions],
            )
            held = "" if found.hold is None else f", held at {found.hold}"
            where = f"newest position {found.at or 'unknown'}{held}"
            versions = count(len(found.versions), "version")
            return model, [
                _line("model", f"{found.path}: {versions}, {where}"),
                *(_line("table", served_text(table)) for table in found.tables),
                *lines,
            ]


def _graph_document(found: GraphView, *, tensors: bool) -> inspections.GraphInspection:
    return inspections.GraphInspection(
        kind="graph",
        path=str(found.path),
        nodes=found.nodes,
        embedding_variables=found.embedding_variables,
        placeholders=list(map(_spec, found.placeholders)),
        batches=list(map(_spec, found.batches)),
        likely_outputs=list(map(_spec, found.likely_outputs)),
        signatures=_signatures(found.signatures),
        tensors=list(map(_spec, found.tensors)) if tensors else None,
    )


def _graph_lines(found: GraphView) -> Iterator[str]:
    yield _line("graph", f"{found.path}: {found.nodes} nodes, {found.variables} variables")
    yield from (_line("table", f"{name}, rows by keys") for name in found.embedding_variables)
    yield from (_line("placeholder", str(spec)) for spec in found.placeholders)
    yield from (_line("batch", str(spec)) for spec in found.batches)
    yield from (_line("output?", str(spec)) for spec in found.likely_outputs[:_LIKELY_SHOWN])
    yield from (_line("signature", str(signature)) for signature in found.signatures)


def _bundle_document(found: BundleView, *, tensors: bool) -> inspections.VersionInspection:
    manifest, catalog = found.manifest, found.catalog
    origin = None if manifest is None else manifest.source
    return inspections.VersionInspection(
        kind="saved_model",
        path=str(found.path),
        position=None if manifest is None else manifest.position,
        step=None if manifest is None else manifest.step,
        source=None if origin is None else _source(origin),
        variables=None if catalog is None else _checkpoint(catalog),
        signatures=_signatures(found.signatures),
        tables=list(map(served_document, found.tables)),
        tensors=list(map(_tensor, _by_name(catalog))) if tensors and catalog is not None else None,
    )


def _source(origin: Origin) -> inspections.Source:
    return inspections.Source(origin.directory, origin.checkpoint, origin.digest)


def _bundle_lines(found: BundleView) -> Iterator[str]:
    manifest, catalog = found.manifest, found.catalog
    origin = f", position {manifest.position}, from {manifest.source.checkpoint}" if manifest else ""
    size = (
        f": {len(catalog.tensors)} variables, {human_bytes(catalog.bytes_)}" if catalog else ": no variables"
    )
    yield _line("saved model", f"{found.path}{size}{origin}")
    for signature in found.signatures:
        yield _line("signature", str(signature))
    yield from (_line("table", served_text(table)) for table in found.tables)


def _plan(planned: Plan, status: Status) -> ExportPlan:
    tasks, task_bytes = planned.work
    return ExportPlan(
        dry_run=status is Status.PLANNED,
        status=status,
        checkpoint=_checkpoint(planned.catalog),
        graph=planned.graph.source,
        signatures=_signatures(signatures_of(planned.graph.meta_graph)),
        variables=list(map(_variable, planned.mapping.sources)),
        bytes=planned.mapping.bytes_,
        tasks=tasks,
        task_bytes=task_bytes,
        ignored=_groups(planned.ignored),
        training=_training(planned.training),
        notes=planned.notes,
    )


def compared(found: Unmatchable, sink: Output) -> None:
    """What `inspect --unmatched` prints: both left-over lists, and the beginning of a table of names."""
    left = found.unmatched
    document = inspections.NameComparison(
        checkpoint=_checkpoint(found.catalog),
        graph=found.graph.source,
        matched=left.matched,
        reason=left.reason or None,
        variables=[
            inspections.UnmatchedVariable(
                item.variable.key,
                item.variable.dtype.label,
                item.variable.full_shape,
                [ref.name for ref in item.candidates],
            )
            for item in left.variables
        ],
        tensors=list(map(_unmatched, left.tensors)),
        table=left.table,
    )
    lines = [
        _line("checkpoint", _catalog_text(found.catalog)),
        _line("graph", found.graph.source),
        _line("matched", f"{left.matched} of {left.matched + len(left.variables)} variables"),
        *([_line("because", left.reason)] if left.reason else []),
        *_two_lists(left),
        *(["", escape("# rename file: variable, tensor"), *map(escape, left.table)] if left.table else []),
    ]
    sink.result(document, lines)


def _two_lists(left: Unmatched) -> Iterator[str]:
    """Variables to the left, tensors to the right, both in order of shape so that partners lie close."""
    ours = [
        (v.full_shape, f"{v.key} {_typed(v.dtype, v.full_shape)}")
        for v in (i.variable for i in left.variables)
    ]
    theirs = [
        (ref.shape, f"{ref.name} {_typed(ref.dtype, ref.shape)}{f' of {ref.owner}' if ref.owner else ''}")
        for ref in left.tensors
    ]
    if not ours and not theirs:
        return
    rows = list(
        zip_longest((text for _, text in sorted(ours)), (text for _, text in sorted(theirs)), fillvalue="")
    )
    width = max(len("variable without a tensor"), *(len(row[0]) for row in rows))
    yield ""
    yield f"[bold]{'variable without a tensor':<{width}}  tensor without a variable[/]"
    yield from (escape(f"{one:<{width}}  {other}".rstrip()) for one, other in rows)


def _typed(dtype: DType, shape: tuple[int, ...]) -> str:
    return f"{dtype.label}[{','.join(map(str, shape))}]"


def _plan_lines(planned: Plan) -> Iterator[str]:
    mapping = planned.mapping
    yield _line("checkpoint", _catalog_text(planned.catalog))
    yield _line("graph", planned.graph.source)
    for signature in signatures_of(planned.graph.meta_graph):
        yield _line("signature", str(signature))
    via = Counter(source.via for source in mapping.sources)
    how = ", ".join(f"{count} by {rule}" for rule, count in via.most_common())
    yield _line("variables", f"{len(mapping.sources)}, {human_bytes(mapping.bytes_)} ({how or 'none'})")
    for source in mapping.sources:
        if not source.is_verbatim:
            yield _line("", f"{source.key}: {_rewrite_text(source)}")
    if (training := planned.training) is not None:
        yield _line(
            "training", f"graph {training.tag!r} of {training.source}: {len(training.tensors)} tensors"
        )
    ignored = "; ".join(_kind_texts(planned.ignored))
    if ignored:
        yield _line("ignored", ignored)


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


def _data(done: Exported) -> Iterator[str]:
    for how in ShardOrigin:
        shards = [shard for shard in done.variables.shards if shard.how is how]
        if shards:
            why = next((f" ({shard.why})" for shard in shards if shard.why), "")
            size = human_bytes(sum(shard.bytes_ for shard in shards))
            yield f"{len(shards)} shard{'s' * (len(shards) > 1)} {how.value}, {size}{why}"


def _verified(done: Exported) -> str:
    if done.plan.request.verify is not Verify.OUTPUTS:
        return done.plan.request.verify.value
    worst = max((found.max_error for found in done.differences), default=0.0)
    return f"outputs: {len(done.differences)} compared, largest difference {worst:.3g}"


def _warn(planned: Plan, sink: Output) -> None:
    for note in planned.notes:
        sink.note(f"note: {note}")


def _checkpoint(catalog: Catalog) -> values.Checkpoint:
    return values.Checkpoint(
        catalog.family,
        str(catalog.prefix),
        catalog.step,
        len(catalog.tensors),
        catalog.bytes_,
        len(catalog.shards),
    )


def _catalog_text(catalog: Catalog) -> str:
    step = "" if catalog.step is None else f", step {catalog.step}"
    shards = f"{len(catalog.shards)} shard{'s' * (len(catalog.shards) != 1)}"
    tensors = f"{len(catalog.tensors)} tensors, {human_bytes(catalog.bytes_)}, {shards}"
    return f"{catalog.prefix.name} ({catalog.family}){step}: {tensors}"


def _by_name(catalog: Catalog) -> list[TensorRef]:
    return sorted(catalog.tensors.values(), key=lambda ref: ref.name)


def _tensor(ref: TensorRef) -> values.Tensor:
    return values.Tensor(ref.name, ref.dtype.label, ref.shape, len(ref.slices), ref.bytes_)


def _unmatched(ref: TensorRef) -> inspections.UnmatchedTensor:
    return inspections.UnmatchedTensor(**asdict(_tensor(ref)), owner=ref.owner or None)


def _tensor_row(ref: TensorRef) -> list[str]:
    shape = "[" + ",".join(map(str, ref.shape)) + "]"
    return [ref.name, ref.dtype.label, shape, str(len(ref.slices) or ""), human_bytes(ref.bytes_)]


def _variable(source: TensorSource) -> Variable:
    return Variable(
        name=source.key,
        tensor=source.tensor.name,
        via=source.via,
        dtype=source.dtype.label,
        shape=source.tensor.shape,
        bytes=source.bytes_,
        rewritten=_rewrite_text(source) or None,
    )


def _groups(extras: Iterable[Extra]) -> dict[str, values.TensorGroup]:
    return {
        kind.value: values.TensorGroup(len(refs), sum(ref.bytes_ for ref in refs))
        for kind, refs in _by_kind(extras).items()
    }


def _kind_texts(extras: Iterable[Extra], other: str = "other") -> Iterator[str]:
    for kind, refs in _by_kind(extras).items():
        name = other if kind is ExtraKind.OTHER else kind.value + "s" * (len(refs) > 1)
        yield f"{len(refs)} {name} ({human_bytes(sum(ref.bytes_ for ref in refs))})"


def _by_kind(extras: Iterable[Extra]) -> dict[ExtraKind, list[TensorRef]]:
    found: dict[ExtraKind, list[TensorRef]] = {}
    for extra in extras:
        found.setdefault(extra.kind, []).append(extra.tensor)
    return {kind: found[kind] for kind in ExtraKind if kind in found}


def _signatures(signatures: Iterable[Signature]) -> dict[str, values.Signature]:
    return {
        signature.name: values.Signature(
            signature.method, list(map(_spec, signature.inputs)), list(map(_spec, signature.outputs))
        )
        for signature in signatures
    }


def _spec(spec: TensorSpec) -> values.TensorSpec:
    return values.TensorSpec(spec.alias, spec.tensor, spec.dtype, spec.shape)


_LIKELY_SHOWN = 6


def _line(label: str, text: str) -> str:
    return f"[bold]{label:<12}[/]{escape(text)}"

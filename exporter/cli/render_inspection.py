"""Print the result of `inspect`, as a JSON document, and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from exporter.catalog import Catalog, TensorRef
from exporter.cli.documents import Tensor, inspections
from exporter.cli.render_catalog import (
    catalog_text,
    checkpoint_document,
    kind_texts,
    line,
    tensor_groups,
)
from exporter.pipeline.inspected import (
    BundleView,
    CheckpointView,
    EmbeddingTable,
    GraphView,
    Inspection,
    ModelView,
    ServedTableView,
)
from exporter.terminal.output import Output, escape
from exporter.terminal.progress import count, human_bytes
from exporter.wire.dtypes import DType

if TYPE_CHECKING:
    from exporter.mapping.unmatched import Unmatched
    from exporter.pipeline.both_sides import Unmatchable


def embedding_lines(table: EmbeddingTable) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for people about an embedding variable: size, then the spread of keys, if any.

    The second label is empty.
    """
    filtered = f", {table.filtered_keys} more filtered" if table.filtered_keys else ""
    parts = f", {table.parts} parts" if table.parts > 1 else ""
    slots = f", slots {', '.join(table.slots)}" if table.slots else ""
    yield (
        "table",
        f"{table.name}: {table.keys} keys{filtered}, {table.dtype}[{table.dimension}], "
        f"{human_bytes(table.bytes)}{parts}{slots}",
    )
    if table.keys:
        buckets = table.keys_by_remainder
        spread = f"{min(buckets)} to {max(buckets)}, median {median(buckets):g}"
        yield "", f"keys in each of {len(buckets)} buckets (key % {len(buckets)}): {spread}"


def served_text(view: ServedTableView) -> str:
    """Return a line for people with the size of a served table by keys, and its room for new keys."""
    return (
        f"{view.name}: {view.keys} keys, room for {view.free_rows} more, {view.dtype}[{view.dimension}], "
        f"{human_bytes(view.bytes)}, index {human_bytes(view.index_bytes)} with load factor "
        f"{view.load_factor:.2f}"
    )


_LIKELY_SHOWN = 6


def inspected(found: Inspection, sink: Output, *, tensors: bool) -> None:
    """Print a checkpoint, graph, version or model; with `tensors` also each tensor, except of a model.

    A note tells if a checkpoint's embedding variables cannot be read.
    """
    document, lines = _inspection(found, tensors=tensors)
    if isinstance(found, CheckpointView) and found.problem is not None:
        sink.note(f"note: its embedding variables cannot be read: {found.problem.message}")
    sink.result(document, lines)
    if not tensors or isinstance(found, ModelView):
        return
    if isinstance(found, GraphView):
        columns = dict.fromkeys(("tensor", "dtype", "shape"), "left")
        rows = ([spec.tensor, spec.dtype, spec.shape_text] for spec in found.read_tensors())
        sink.table("", columns, rows)
    elif found.catalog is not None:
        columns = {"tensor": "left", "dtype": "left", "shape": "left", "slices": "right", "bytes": "right"}
        sink.table("", columns, map(_tensor_row, _by_name(found.catalog)))


def _inspection(found: Inspection, *, tensors: bool) -> tuple[inspections.Inspection, list[str]]:
    match found:
        case CheckpointView():
            lines = [
                line("checkpoint", catalog_text(found.catalog)),
                *(line("", text) for text in kind_texts(found.kinds, other="weights and others")),
                *(line(*each) for view in found.tables for each in embedding_lines(view)),
            ]
            document = inspections.CheckpointInspection(
                **asdict(checkpoint_document(found.catalog)),
                kind="checkpoint",
                kinds=tensor_groups(found.kinds),
                embeddings=found.tables,
                tensors=list(map(_tensor, _by_name(found.catalog))) if tensors else None,
            )
            return document, lines
        case GraphView():
            return _graph_document(found, tensors=tensors), list(_graph_lines(found))
        case BundleView():
            return _bundle_document(found, tensors=tensors), list(_bundle_lines(found))
        case ModelView():
            from exporter.publish.hold import UNREAD

            lines = [line for version in found.versions for line in _bundle_lines(version)]
            model = inspections.ModelInspection(
                kind="model",
                path=str(found.path),
                position=None if found.at is None else found.at.position,
                step=None if found.at is None else found.at.step,
                hold=found.hold,
                tables=found.tables,
                versions=[_bundle_document(version, tensors=False) for version in found.versions],
            )
            held = "" if found.hold is None else f", held at {found.hold}"
            held = f"; its hold: {UNREAD}" if found.is_hold_unread else held
            where = f"newest position {found.at or 'unknown'}{held}"
            versions = count(len(found.versions), "version")
            return model, [
                line("model", f"{found.path}: {versions}, {where}"),
                *(line("table", served_text(table)) for table in found.tables),
                *lines,
            ]


def _graph_document(found: GraphView, *, tensors: bool) -> inspections.GraphInspection:
    return inspections.GraphInspection(
        kind="graph",
        path=str(found.path),
        nodes=found.nodes,
        embedding_variables=found.embedding_variables,
        placeholders=found.placeholders,
        batches=found.batches,
        likely_outputs=found.likely_outputs,
        signatures=found.signatures,
        feeds=found.feeds,
        tensors=list(found.read_tensors()) if tensors else None,
    )


def _graph_lines(found: GraphView) -> Iterator[str]:
    yield line("graph", f"{found.path}: {found.nodes} nodes, {found.variables} variables")
    yield from (line("table", f"{name}, rows by keys") for name in found.embedding_variables)
    for label, specs in (("placeholder", found.placeholders), ("batch", found.batches)):
        for spec in specs:
            met = found.feeds.get(spec.tensor)
            yield line(label, f"{spec} -> {', '.join(met)}" if met else str(spec))
    yield from (line("output?", str(spec)) for spec in found.likely_outputs[:_LIKELY_SHOWN])
    yield from (line("signature", f"{name}{each}") for name, each in found.signatures.items())


def _bundle_document(found: BundleView, *, tensors: bool) -> inspections.VersionInspection:
    manifest, catalog = found.manifest, found.catalog
    return inspections.VersionInspection(
        kind="saved_model",
        path=str(found.path),
        position=None if manifest is None else manifest.position,
        step=None if manifest is None else manifest.step,
        source=None if manifest is None else manifest.source,
        variables=None if catalog is None else checkpoint_document(catalog),
        signatures=found.signatures,
        tables=found.tables,
        mapped=found.mapped,
        oldest_server=found.oldest_server,
        opened_batch=None if manifest is None else manifest.opened_batch,
        tensors=list(map(_tensor, _by_name(catalog))) if tensors and catalog is not None else None,
    )


def _bundle_lines(found: BundleView) -> Iterator[str]:
    manifest, catalog = found.manifest, found.catalog
    origin = f", position {manifest.position}, from {manifest.source.checkpoint}" if manifest else ""
    size = (
        f": {len(catalog.tensors)} variables, {human_bytes(catalog.bytes_)}" if catalog else ": no variables"
    )
    yield line("saved model", f"{found.path}{size}{origin}")
    yield from (line("signature", f"{name}{each}") for name, each in found.signatures.items())
    yield from (line("table", served_text(table)) for table in found.tables)
    if manifest is not None and manifest.opened_batch is not None:
        yield line("rows", f"any number, opened by experiment; training had {manifest.opened_batch}")
    if found.mapped is not None:
        yield line("tables", found.mapped)
    if found.oldest_server is not None:
        yield line("servers", f"TensorFlow {found.oldest_server} and newer")


def compared(found: Unmatchable, sink: Output) -> None:
    """Print unmatched variables and tensors, and the beginning of a table of names for `--rename`."""
    left = found.unmatched
    document = inspections.NameComparison(
        checkpoint=checkpoint_document(found.catalog),
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
        line("checkpoint", catalog_text(found.catalog)),
        line("graph", found.graph.source),
        line("matched", f"{left.matched} of {left.matched + len(left.variables)} variables"),
        *([line("because", left.reason)] if left.reason else []),
        *_two_lists(left),
        *(["", escape("# rename file: variable, tensor"), *map(escape, left.table)] if left.table else []),
    ]
    sink.result(document, lines)


def _two_lists(left: Unmatched) -> Iterator[str]:
    """Yield lines with unmatched variables at the left and tensors at the right, each sorted by shape.

    So probable partners are near each other. Nothing is yielded if both are empty.
    """
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


def _by_name(catalog: Catalog) -> list[TensorRef]:
    return sorted(catalog.tensors.values(), key=lambda ref: ref.name)


def _tensor(ref: TensorRef) -> Tensor:
    return Tensor(ref.name, ref.dtype.label, ref.shape, len(ref.slices), ref.bytes_)


def _unmatched(ref: TensorRef) -> inspections.UnmatchedTensor:
    return inspections.UnmatchedTensor(**asdict(_tensor(ref)), owner=ref.owner or None)


def _tensor_row(ref: TensorRef) -> list[str]:
    shape = "[" + ",".join(map(str, ref.shape)) + "]"
    return [ref.name, ref.dtype.label, shape, str(len(ref.slices) or ""), human_bytes(ref.bytes_)]

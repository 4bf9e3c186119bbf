"""Results for the reader: each as one JSON document and as lines for people, both from the same values."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from exporter.bundle.variables import ShardOrigin
from exporter.catalog import Catalog, TensorRef
from exporter.cli.output import Output, escape
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.build import TensorSource
from exporter.mapping.extras import Extra, ExtraKind
from exporter.mapping.unmatched import Unmatched
from exporter.options import Verify
from exporter.pipeline.full import Exported, Plan, Unmatchable
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
from exporter.progress import human_bytes
from exporter.wire.dtypes import DType

Document = dict[str, Any]


def plan(planned: Plan, sink: Output) -> None:
    """What `--dry-run` prints."""
    rewritten = sum(source.bytes_ for source in planned.mapping.sources if not source.is_verbatim)
    how = f"{human_bytes(rewritten)} of it rewritten" if rewritten else "all of it as stored"
    lines = [
        *_plan_lines(planned),
        _line("would write", f"{human_bytes(planned.mapping.bytes_)} under {planned.request.out}, {how}"),
    ]
    _warn(planned, sink)
    sink.result({"dry_run": True, "status": "planned", **_plan_document(planned)}, lines)


def exported(done: Exported, sink: Output) -> None:
    """What an export prints when it is done."""
    variables, published = done.variables, done.published
    document = {
        "status": "published",
        **_plan_document(done.plan),
        "path": str(published.path),
        "version": published.version,
        "position": published.position,
        "bytes_linked": variables.bytes_linked,
        "bytes_copied": variables.bytes_copied,
        "bytes_rewritten": variables.bytes_rewritten,
        "verified": done.plan.request.verify.value,
        "max_errors": {f"{found.signature}/{found.output}": found.max_error for found in done.differences},
        "versions_removed": list(published.removed),
        "versions_kept": [asdict(kept) for kept in published.kept],
        "seconds": round(done.seconds, 4),
        "warnings": [warning.message for warning in published.warnings],
    }
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
    document, lines = _inspection(found)
    if isinstance(found, GraphView):
        specs = [*found.tensors] if tensors else []
        if tensors:
            document["tensors"] = [_spec_document(spec) for spec in specs]
        sink.result(document, lines)
        if specs:
            columns = dict.fromkeys(("tensor", "dtype", "shape"), "left")
            sink.table("", columns, ([spec.tensor, spec.dtype, spec.shape_text] for spec in specs))
        return
    catalog = None if isinstance(found, ModelView) else found.catalog
    rows = sorted(catalog.tensors.values(), key=lambda ref: ref.name) if tensors and catalog else []
    if tensors:
        document["tensors"] = [_tensor_document(ref) for ref in rows]
    sink.result(document, lines)
    if rows:
        columns = {"tensor": "left", "dtype": "left", "shape": "left", "slices": "right", "bytes": "right"}
        sink.table("", columns, (_tensor_row(ref) for ref in rows))


def _inspection(found: Inspection) -> tuple[Document, list[str]]:
    match found:
        case CheckpointView():
            return (
                {
                    "kind": "checkpoint",
                    **_catalog_document(found.catalog),
                    "kinds": _kinds_document(found.kinds),
                },
                [
                    _line("checkpoint", _catalog_text(found.catalog)),
                    *(_line("", text) for text in _kind_texts(found.kinds, other="weights and others")),
                ],
            )
        case GraphView():
            placeholders = [_spec_document(spec) for spec in found.placeholders]
            document = {"kind": "graph", "path": str(found.path), "nodes": found.nodes}
            batches = [_spec_document(spec) for spec in found.batches]
            likely = [_spec_document(spec) for spec in found.likely_outputs]
            document |= {"placeholders": placeholders, "batches": batches, "likely_outputs": likely}
            document |= {"signatures": _signatures_document(found.signatures)}
            counts = f"{found.nodes} nodes, {found.variables} variables"
            return document, [
                _line("graph", f"{found.path}: {counts}"),
                *(_line("placeholder", str(spec)) for spec in found.placeholders),
                *(_line("batch", str(spec)) for spec in found.batches),
                *(_line("output?", str(spec)) for spec in found.likely_outputs[:_LIKELY_SHOWN]),
                *(_line("signature", str(signature)) for signature in found.signatures),
            ]
        case BundleView():
            return _bundle_document(found), list(_bundle_lines(found))
        case ModelView():
            documents = [_bundle_document(version) for version in found.versions]
            lines = [line for version in found.versions for line in _bundle_lines(version)]
            document = {
                "kind": "model",
                "path": str(found.path),
                "position": None if found.at is None else found.at.position,
                "step": None if found.at is None else found.at.step,
                "hold": found.hold,
                "versions": documents,
            }
            held = "" if found.hold is None else f", held at {found.hold}"
            where = f"newest position {found.at or 'unknown'}{held}"
            return document, [_line("model", f"{found.path}: {len(documents)} versions, {where}"), *lines]


def _bundle_document(found: BundleView) -> Document:
    manifest = found.manifest
    document: Document = {"kind": "saved_model", "path": str(found.path)}
    if manifest is not None:
        document |= {"position": manifest.position, "step": manifest.step, "source": asdict(manifest.source)}
    if found.catalog is not None:
        document |= {"variables": _catalog_document(found.catalog)}
    return document | {"signatures": _signatures_document(found.signatures)}


def _bundle_lines(found: BundleView) -> Iterator[str]:
    manifest, catalog = found.manifest, found.catalog
    origin = f", position {manifest.position}, from {manifest.source.checkpoint}" if manifest else ""
    size = (
        f": {len(catalog.tensors)} variables, {human_bytes(catalog.bytes_)}" if catalog else ": no variables"
    )
    yield _line("saved model", f"{found.path}{size}{origin}")
    for signature in found.signatures:
        yield _line("signature", str(signature))


def _plan_document(planned: Plan) -> Document:
    return {
        "checkpoint": _catalog_document(planned.catalog),
        "graph": planned.graph.source,
        "signatures": _signatures_document(signatures_of(planned.graph.meta_graph)),
        "variables": [_source_document(source) for source in planned.mapping.sources],
        "bytes": planned.mapping.bytes_,
        "ignored": _kinds_document(planned.ignored),
        "training": _training_document(planned.training),
        "notes": list(planned.notes),
    }


def compared(found: Unmatchable, sink: Output) -> None:
    """What `inspect --unmatched` prints: both left-over lists, and the beginning of a table of names."""
    left = found.unmatched
    document = {
        "checkpoint": _catalog_document(found.catalog),
        "graph": found.graph.source,
        "matched": left.matched,
        "reason": left.reason or None,
        "variables": [
            {
                "name": item.variable.key,
                "dtype": item.variable.dtype.label,
                "shape": list(item.variable.full_shape),
                "candidates": [ref.name for ref in item.candidates],
            }
            for item in left.variables
        ],
        "tensors": [{**_tensor_document(ref), "owner": ref.owner or None} for ref in left.tensors],
        "table": list(left.table),
    }
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


def _training_document(training: TrainingGraph | None) -> Document | None:
    if training is None:
        return None
    return {"graph": training.source, "tag": training.tag, "tensors": len(training.tensors)}


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


def _catalog_document(catalog: Catalog) -> Document:
    return {
        "family": catalog.family,
        "prefix": str(catalog.prefix),
        "step": catalog.step,
        "tensor_count": len(catalog.tensors),
        "bytes": catalog.bytes_,
        "shards": len(catalog.shards),
    }


def _catalog_text(catalog: Catalog) -> str:
    step = "" if catalog.step is None else f", step {catalog.step}"
    shards = f"{len(catalog.shards)} shard{'s' * (len(catalog.shards) != 1)}"
    tensors = f"{len(catalog.tensors)} tensors, {human_bytes(catalog.bytes_)}, {shards}"
    return f"{catalog.prefix.name} ({catalog.family}){step}: {tensors}"


def _tensor_document(ref: TensorRef) -> Document:
    return {
        "name": ref.name,
        "dtype": ref.dtype.label,
        "shape": list(ref.shape),
        "slices": len(ref.slices),
        "bytes": ref.bytes_,
    }


def _tensor_row(ref: TensorRef) -> list[str]:
    shape = "[" + ",".join(map(str, ref.shape)) + "]"
    return [ref.name, ref.dtype.label, shape, str(len(ref.slices) or ""), human_bytes(ref.bytes_)]


def _source_document(source: TensorSource) -> Document:
    return {
        "name": source.key,
        "tensor": source.tensor.name,
        "via": source.via,
        "dtype": source.dtype.label,
        "shape": list(source.tensor.shape),
        "bytes": source.bytes_,
        "rewritten": _rewrite_text(source) or None,
    }


def _kinds_document(extras: Iterable[Extra]) -> Document:
    return {
        kind.value: {"tensors": len(refs), "bytes": sum(ref.bytes_ for ref in refs)}
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


def _signatures_document(signatures: Iterable[Signature]) -> Document:
    return {
        signature.name: {
            "method": signature.method,
            "inputs": [_spec_document(spec) for spec in signature.inputs],
            "outputs": [_spec_document(spec) for spec in signature.outputs],
        }
        for signature in signatures
    }


def _spec_document(spec: TensorSpec) -> Document:
    shape = None if spec.shape is None else list(spec.shape)
    return {"name": spec.alias, "tensor": spec.tensor, "dtype": spec.dtype, "shape": shape}


_LIKELY_SHOWN = 6


def _line(label: str, text: str) -> str:
    return f"[bold]{label:<12}[/]{escape(text)}"

"""What full exports and `inspect` both print: checkpoints, groups of tensors, signatures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exporter.catalog import Catalog, TensorRef
from exporter.cli.documents import values
from exporter.mapping.extras import Extra, ExtraKind
from exporter.pipeline.inspection import Signature, TensorSpec
from exporter.progress import human_bytes
from exporter.terminal.markup import escape


def checkpoint_document(catalog: Catalog) -> values.Checkpoint:
    """What is told of a checkpoint."""
    return values.Checkpoint(
        catalog.family,
        str(catalog.prefix),
        catalog.step,
        len(catalog.tensors),
        catalog.bytes_,
        len(catalog.shards),
    )


def catalog_text(catalog: Catalog) -> str:
    """A checkpoint in a line."""
    step = "" if catalog.step is None else f", step {catalog.step}"
    shards = f"{len(catalog.shards)} shard{'s' * (len(catalog.shards) != 1)}"
    tensors = f"{len(catalog.tensors)} tensors, {human_bytes(catalog.bytes_)}, {shards}"
    return f"{catalog.prefix.name} ({catalog.family}){step}: {tensors}"


def tensor_groups(extras: Iterable[Extra]) -> dict[str, values.TensorGroup]:
    """Tensors that are not served, by kind."""
    return {
        kind.value: values.TensorGroup(len(refs), sum(ref.bytes_ for ref in refs))
        for kind, refs in by_kind(extras).items()
    }


def kind_texts(extras: Iterable[Extra], other: str = "other") -> Iterator[str]:
    """A line for each kind of tensors that are not served."""
    for kind, refs in by_kind(extras).items():
        name = other if kind is ExtraKind.OTHER else kind.value + "s" * (len(refs) > 1)
        yield f"{len(refs)} {name} ({human_bytes(sum(ref.bytes_ for ref in refs))})"


def by_kind(extras: Iterable[Extra]) -> dict[ExtraKind, list[TensorRef]]:
    """Tensors that are not served, by kind."""
    found: dict[ExtraKind, list[TensorRef]] = {}
    for extra in extras:
        found.setdefault(extra.kind, []).append(extra.tensor)
    return {kind: found[kind] for kind in ExtraKind if kind in found}


def signature_documents(signatures: Iterable[Signature]) -> dict[str, values.Signature]:
    """Signatures by name."""
    return {
        signature.name: values.Signature(
            signature.method,
            list(map(tensor_spec, signature.inputs)),
            list(map(tensor_spec, signature.outputs)),
        )
        for signature in signatures
    }


def tensor_spec(spec: TensorSpec) -> values.TensorSpec:
    """An input or output."""
    return values.TensorSpec(spec.alias, spec.tensor, spec.dtype, spec.shape)


def line(label: str, text: str) -> str:
    """A line of a result: what it is, and in a column of its own what was found."""
    return f"[bold]{label:<12}[/]{escape(text)}"

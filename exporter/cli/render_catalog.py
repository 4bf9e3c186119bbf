"""A checkpoint and groups of its tensors, as documents and as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exporter.catalog import Catalog, Extra, ExtraKind, TensorRef
from exporter.cli.documents import Checkpoint, TensorGroup
from exporter.terminal.output import escape
from exporter.terminal.progress import human_bytes


def checkpoint_document(catalog: Catalog) -> Checkpoint:
    """Return a checkpoint as the document that commands print."""
    return Checkpoint(
        catalog.family,
        str(catalog.prefix),
        catalog.step,
        len(catalog.tensors),
        catalog.bytes_,
        len(catalog.shards),
    )


def catalog_text(catalog: Catalog) -> str:
    """Return a line for people about a checkpoint: name, family, step, and size of tensors and shards."""
    step = "" if catalog.step is None else f", step {catalog.step}"
    shards = f"{len(catalog.shards)} shard{'s' * (len(catalog.shards) != 1)}"
    tensors = f"{len(catalog.tensors)} tensors, {human_bytes(catalog.bytes_)}, {shards}"
    return f"{catalog.label} ({catalog.family}){step}: {tensors}"


def tensor_groups(extras: Iterable[Extra]) -> dict[str, TensorGroup]:
    """Return the number and bytes of unserved tensors by the name of their kind, in the order of ExtraKind.

    Kinds without any are absent.
    """
    return {
        kind.value: TensorGroup(len(refs), sum(ref.bytes_ for ref in refs))
        for kind, refs in by_kind(extras).items()
    }


def kind_texts(extras: Iterable[Extra], other: str = "other") -> Iterator[str]:
    """Yield a text for people with number and bytes of each kind of unserved tensors, in ExtraKind's order.

    The text calls the kind OTHER by the word `other`.
    """
    for kind, refs in by_kind(extras).items():
        name = other if kind is ExtraKind.OTHER else kind.value + "s" * (len(refs) > 1)
        yield f"{len(refs)} {name} ({human_bytes(sum(ref.bytes_ for ref in refs))})"


def by_kind(extras: Iterable[Extra]) -> dict[ExtraKind, list[TensorRef]]:
    """Return the unserved tensors by kind, in the order of ExtraKind; kinds without any are absent."""
    found: dict[ExtraKind, list[TensorRef]] = {}
    for extra in extras:
        found.setdefault(extra.kind, []).append(extra.tensor)
    return {kind: found[kind] for kind in ExtraKind if kind in found}


def line(label: str, text: str) -> str:
    """Return a line of a result, with markup: a label in bold, and the escaped text in a second column."""
    return f"[bold]{label:<12}[/]{escape(text)}"

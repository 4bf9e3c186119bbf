"""Stream the tensors of an archive, or of a checkpoint in format V1, into a tensor bundle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from exporter.catalog import Catalog, Content, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.errors import os_error
from exporter.terminal.progress import NoProgress, Progress
from exporter.wire.dtypes import DType


def write_bundle(
    catalog: Catalog, tensors: Iterable[TensorRef], prefix: Path, progress: Progress | None = None
) -> Catalog:
    """Write these tensors of `catalog` into a new bundle at `prefix`, in blocks; returns the bundle's
    catalog.

    Raises:
        CheckpointError: a source is damaged, or changed since the catalog was read.
        PublishError: the target cannot be written; DiskFull if there is no space.
    """
    progress = progress or NoProgress()
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with BundleWriter(prefix) as writer:
            for ref in tensors:
                if ref.content is None:
                    raise ValueError(f"{ref.name!r} is in a bundle already")
                if not ref.slices:
                    _add(writer, ref, ref.content, ref.shape)
                for part in ref.slices:
                    assert part.content is not None
                    _add(writer, ref, part.content, part.spec.lengths, part.spec)
                progress.advance(ref.bytes_)
    except OSError as error:
        raise os_error(error, prefix) from error
    return replace(read_catalog(prefix), family=catalog.family, step=catalog.step)


def _add(
    writer: BundleWriter,
    ref: TensorRef,
    content: Content,
    shape: tuple[int, ...],
    part: SliceSpec | None = None,
) -> None:
    if ref.dtype is DType.STRING:
        texts = [text for block in content.blocks() for text in block.tolist()]
        writer.add(ref.name, np.array(texts, object).reshape(shape), part)
        return
    writer.add_chunks(ref.name, ref.dtype, shape, content.blocks(), part)

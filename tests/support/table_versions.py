"""Plain versions of a model with several tables, each in a shard of its own, as mapped tables lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from exporter.catalog import TensorRef
from exporter.checkpoint.tensor_bundle import (
    BundleWriter,
    encode_index,
    index_path,
    read_catalog,
    shard_path,
)
from exporter.publish.commit import Staging, publish_version
from exporter.publish.manifest import ManifestDraft, Origin, tensor_entries
from exporter.storage.layout import VARIABLES_PREFIX

Tables = Mapping[str, np.ndarray]


def some_tables(count: int = 10, rows: int = 500, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"table{number}": random.standard_normal((rows, 8), np.float32) for number in range(count)}


def publish_tables(model: Path, tables: Tables, *, graph: bytes = b"a graph", step: int | None = None) -> int:
    """Publish a version with these tables; its number."""
    with Staging(model) as staging:
        prefix, tensors = staging.path / VARIABLES_PREFIX, list[TensorRef]()
        prefix.parent.mkdir()
        for number, (name, values) in enumerate(tables.items()):
            aside = prefix.with_name("aside")
            with BundleWriter(aside) as writer:
                writer.add(name, values)
            shard_path(aside, 0, 1).rename(shard_path(prefix, number, len(tables)))
            index_path(aside).unlink()
            for each in writer.tensors:
                assert each.extent is not None
                tensors.append(replace(each, extent=replace(each.extent, shard=number)))
        index_path(prefix).write_bytes(encode_index(tensors, len(tables)))
        (staging.path / "saved_model.pb").write_bytes(graph)
        (staging.path / "assets").mkdir()
        (staging.path / "assets/words.txt").write_bytes(b"a vocabulary\n" * 1000)
        entries = tensor_entries(read_catalog(prefix))
        draft = ManifestDraft(
            tensors=entries, source=Origin("run7", "model.ckpt"), exporter="0.1.0", step=step
        )
        return publish_version(staging, draft).version

"""The checkpoints that are measured: trained and saved by TensorFlow, or far larger and sparse."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import encode_index, index_path, memory_map, read_catalog, shard_path
from exporter.wire.dtypes import DType
from tests.benchmarks.harness import Lab, job
from tests.benchmarks.job import Timer

ROW_BYTES = 64 * 4
SMALL_ROWS = (32 << 20) // ROW_BYTES
"""With two Adam slots a checkpoint of 100 MB."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with its `.meta` beside it; `rows` are the table's."""

    prefix: Path
    rows: int


LABELS = {"100 MB": 1, "1.5 GB": 16, "1 TB": 10_240}
"""The ranker's sizes, as multiples of the small one."""


def ranker(lab: Lab, label: str) -> Checkpoint:
    """The ranker in one of three sizes: "100 MB", "1.5 GB" and, in sparse files, "1 TB"."""
    small = SMALL_ROWS // 64 if lab.quick else SMALL_ROWS
    rows = {label: small * factor for label, factor in LABELS.items()}

    def make(directory: Path) -> None:
        prefixes = {label: _prefix(directory, label) for label in LABELS}
        job("data:rankers", *(part for label in LABELS for part in (prefixes[label], rows[label])))
        _enlarge(read_catalog(prefixes["100 MB"]), LABELS["1 TB"], prefixes["1 TB"])

    return Checkpoint(_prefix(lab.once("rankers", make), label), rows[label])


def wide(lab: Lab, variables: int) -> Checkpoint:
    """Many small variables, and a step."""

    def make(directory: Path) -> None:
        job("data:train", "wide", _prefix(directory, "wide"), variables)

    return Checkpoint(_prefix(lab.once("wide", make), "wide"), 0)


def columns(lab: Lab, tables: int) -> Checkpoint:
    """Many small tables; all have 1,000 rows."""

    def make(directory: Path) -> None:
        job("data:train", "columns", _prefix(directory, "columns"), tables)

    return Checkpoint(_prefix(lab.once("columns", make), "columns"), 1000)


def terabyte(lab: Lab) -> Checkpoint:
    """Tables of 512 MB, which are holes: 32 in each of 64 shards."""
    shards, tables = (8, 4) if lab.quick else (64, 32)
    rows = (16 << 30) // tables // ROW_BYTES

    def make(directory: Path) -> None:
        prefix, size = _prefix(directory, "tables"), rows * ROW_BYTES
        prefix.parent.mkdir()
        refs = [
            TensorRef(
                f"tables/{shard}-{table}", DType.FLOAT, (rows, 64), Extent(shard, table * size, size, 0)
            )
            for shard in range(shards)
            for table in range(tables)
        ]
        for shard in range(shards):
            path = shard_path(prefix, shard, shards)
            path.touch()
            os.truncate(path, tables * size)
        index_path(prefix).write_bytes(encode_index(refs, shards))

    return Checkpoint(_prefix(lab.once("terabyte", make), "tables"), rows)


def published(lab: Lab, checkpoint: Checkpoint) -> Path:
    """A version directory with the ranker of a checkpoint, for those who serve it."""

    def make(model: Path) -> None:
        job("jobs_full_export:export", checkpoint.prefix, checkpoint.prefix, model)

    return lab.once("served", make) / "1"


def _prefix(directory: Path, label: str) -> Path:
    return directory / label.replace(" ", "") / "model.ckpt-1"


# --- jobs --------------------------------------------------------------------------------------------------


def rankers(timer: Timer, *prefixes_and_rows: str) -> None:
    """The ranker for each prefix and number of rows; the last is too large to be more than a `.meta`."""
    *trained, (huge, rows) = zip(prefixes_and_rows[::2], prefixes_and_rows[1::2], strict=True)
    for prefix, size in trained:
        train(timer, "ranker", prefix, size)
    graph, _ = _training_graph("ranker", int(rows))
    Path(huge).parent.mkdir()
    with graph.as_default():
        _saver().export_meta_graph(f"{huge}.meta")


def train(timer: Timer, model: str, prefix: str, size: str) -> None:
    """One training step in a Session with four devices, then the stock sharded Saver."""
    from tests.benchmarks.model import FEATURES, PARTS, v1

    config = v1.ConfigProto(device_count={"CPU": PARTS})
    graph, step = _training_graph(model, int(size))
    with graph.as_default(), v1.Session(config=config) as session:
        session.run(v1.global_variables_initializer())
        session.run(step, {"ids:0": np.zeros([2, FEATURES], np.int64)})
        Path(prefix).parent.mkdir()
        _saver().save(session, prefix)


def _saver() -> Any:
    import tensorflow as tf

    return tf.compat.v1.train.Saver(sharded=True)


def _training_graph(model: str, size: int) -> tuple[Any, Any]:
    import tensorflow as tf

    from tests.benchmarks import model as models

    with tf.Graph().as_default() as graph, models.v1.device(models.on_parameter_servers):
        _, outputs = getattr(models, model)(size)
        return graph, models.training(outputs, slots=model == "ranker")


# --- sparse ------------------------------------------------------------------------------------------------


def _enlarge(catalog: Catalog, factor: int, prefix: Path) -> None:
    """A checkpoint with `factor` times as many rows in all tables, which are holes; the rest is copied."""
    ends: dict[int, int] = defaultdict(int)

    def placed(extent: Extent, times: int) -> Extent:
        start = ends[extent.shard]
        ends[extent.shard] += extent.size * times
        return replace(extent, offset=start, size=extent.size * times)

    def enlarged(part: SliceRef) -> SliceRef:
        assert part.extent is not None
        boxes = (part.spec.full_shape, part.spec.starts, part.spec.lengths)
        return SliceRef(
            SliceSpec(*((box[0] * factor, *box[1:]) for box in boxes)), placed(part.extent, factor)
        )

    refs = []
    for ref in catalog.tensors.values():
        if ref.extent is not None:
            refs.append(replace(ref, extent=placed(ref.extent, 1)))
        else:
            shape = (ref.shape[0] * factor, *ref.shape[1:])
            refs.append(replace(ref, shape=shape, slices=tuple(map(enlarged, ref.slices))))
    for shard, end in ends.items():
        path = shard_path(prefix, shard, len(ends))
        path.touch()
        os.truncate(path, end)
    for old, new in zip(catalog.tensors.values(), refs, strict=True):
        if old.extent is not None and new.extent is not None:
            with shard_path(prefix, new.extent.shard, len(ends)).open("r+b") as shard_file:
                shard_file.seek(new.extent.offset)
                shard_file.write(memory_map(catalog, old).tobytes())
    index_path(prefix).write_bytes(encode_index(refs, len(ends)))

"""A trainer that is followed: the ranker's checkpoint, what changed after it, and what is published of it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.tensor_bundle import BundleWriter, memory_map, read_catalog
from exporter.delta.delta_files import write_delta
from exporter.delta.format import Change, ChangeKind, DeltaHeader, Rows, ServedVariable, span_name
from exporter.increments.history import identify
from exporter.increments.increment import Changed, Contents, Increment
from exporter.options import Updates
from exporter.pipeline.full import export as run_export
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.storage.layout import DELTA_NAME
from exporter.wire.dtypes import DType
from tests.benchmarks import data
from tests.benchmarks.harness import Lab, job
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_full_export import export_request
from tests.support import increments

LABEL = "1.5 GB"
TABLE, STEP = "table", "global_step"
BASE = 1
"""The position of the base: the training step of the ranker's checkpoint."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Files of a trainer whose newest increment changed `changed` of its table's `rows`, all under `root`."""

    root: Path
    rows: int
    changed: int

    @property
    def train(self) -> Path:
        """The checkpoint directory: a full checkpoint of step 1 and an increment to step 2."""
        return self.root / "train"

    @property
    def newer(self) -> Path:
        """A full checkpoint of step 2, elsewhere."""
        return self.root / "newer" / "model.ckpt-2"

    @property
    def plain(self) -> Path:
        """A version of step 1 that takes no deltas and holds nothing but what is served."""
        return self.root / "plain" / str(BASE)

    def model(self, path: Path, base: str = "model") -> Path:
        """The base of step 1, which takes deltas, as a model of its own at `path`: its files are links.

        The `base` "mapped" is the one whose tables servers map.
        """
        shutil.copytree(self.root / base, path, copy_function=os.link)
        return path


def followed(lab: Lab) -> Followed:
    """The trainer that all incremental benchmarks follow."""
    checkpoint = data.ranker(lab, LABEL)
    changed = 1_000 if lab.quick else 100_000

    def make(root: Path) -> None:
        job("followed:prepare", checkpoint.prefix, root, changed)

    return Followed(lab.once("followed", make), checkpoint.rows, changed)


def published_deltas(model: Path) -> list[Path]:
    """The deltas of the model's only log, in order."""
    return sorted(model.glob("deltas/*/*-*"))


def publish(log: DeltaLog, position: int, rows: int) -> Path:
    """Write the delta from `position` to the next: `rows` random rows, as many of each part."""
    header = DeltaHeader(log.lineage, log.schema.digest, position, position + 1, position + 1)
    directory = log.path / span_name(header.from_position, header.to_position)
    directory.mkdir(parents=True)
    tables = [variable for variable in log.schema.variables if variable.kind is ChangeKind.TABLE]
    rng = np.random.default_rng(position)
    changes: dict[str, Change] = {v.name: _random_rows(rng, v.shape, rows // len(tables)) for v in tables}
    write_delta(directory / DELTA_NAME, log.schema, header, changes)
    return directory


# --- jobs --------------------------------------------------------------------------------------------------


def prepare(timer: Timer, prefix: str, directory: str, changed: str) -> None:
    """Everything that `Followed` names; base and increments without TensorFlow."""
    root, old = Path(directory), Path(prefix)
    shutil.copytree(old.parent, root / "train", copy_function=os.link)
    request = export_request(str(root / "train" / old.name), str(root / "model"))
    run_export(replace(request, updates=Updates()))
    mapped = replace(request, out=root / "mapped", map_tables=True, overlay_rows=1_000_000)
    run_export(replace(mapped, updates=Updates()))
    run_export(export_request(prefix, str(root / "plain"), "compact"))
    catalog = read_catalog(old)
    shape = catalog.tensors[TABLE].shape
    rows = _random_rows(np.random.default_rng(0), shape, int(changed))
    _write_increment(root / "train", identify(root / "train" / old.name, BASE), shape, rows)
    (root / "newer").mkdir()
    _write_newer(catalog, rows, root / "newer" / "model.ckpt-2")
    os.link(f"{prefix}.meta", root / "newer" / "model.ckpt-2.meta")


def publish_all(timer: Timer, model: str, *rows: str) -> None:
    """A delta of so many random rows for each of `rows`."""
    log = read_log(Path(model))
    for position, count in enumerate(rows, BASE):
        publish(log, position, int(count))


def check_published(timer: Timer, model: str, newer: str) -> int:
    """That base and deltas hold the table of the newer checkpoint; how many rows were published."""
    log = read_log(Path(model))
    catalog = read_catalog(Path(newer))
    ref, state = catalog.tensors[TABLE], log.state()
    for part in ref.slices:
        found = state.rows(f"{TABLE}[{part.spec.restore_spec}]", 0, part.spec.lengths[0])
        assert np.array_equal(found, memory_map(catalog, ref, part))
    return sum(log.open(delta).rows for delta in log.deltas)


def _random_rows(rng: Any, shape: tuple[int, ...], count: int) -> Rows:
    ids = np.sort(rng.choice(shape[0], count, replace=False)).astype(np.int64)
    return Rows(ids, rng.random((count, *shape[1:]), np.float32) - np.float32(0.5))


def _write_increment(train: Path, parent: Any, shape: tuple[int, ...], rows: Rows) -> None:
    variable = ServedVariable(TABLE, DType.FLOAT, shape, ChangeKind.TABLE)

    def fill(writer: BundleWriter) -> Contents:
        for key, values in zip(variable.keys, (rows.ids, rows.values), strict=True):
            writer.add(key, values)
        return Contents((Changed(variable, len(rows.ids)),))

    draft = Increment(
        id=secrets.token_hex(16),
        run=secrets.token_hex(16),
        generation=1,
        parent=parent,
        from_step=BASE,
        to_step=BASE + 1,
        variables=(),
    )
    increments.publish(train, draft, fill)


def _write_newer(catalog: Catalog, rows: Rows, prefix: Path) -> None:
    with BundleWriter(prefix) as writer:
        for ref in catalog.tensors.values():
            if ref.name == STEP:
                writer.add(ref.name, np.array(BASE + 1, np.int64))
            elif ref.extent is not None:
                writer.add(ref.name, memory_map(catalog, ref))
            for part, values in _parts(catalog, ref, rows):
                writer.add(ref.name, values, part)


def _parts(catalog: Catalog, ref: TensorRef, rows: Rows) -> Iterator[tuple[Any, Any]]:
    for part in ref.slices:
        values = memory_map(catalog, ref, part)
        if ref.name == TABLE:
            values = values.copy()
            first = part.spec.starts[0]
            start, stop = np.searchsorted(rows.ids, [first, first + len(values)])
            values[rows.ids[start:stop] - first] = rows.values[start:stop]
        yield part.spec, values

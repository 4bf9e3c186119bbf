"""Lay the tables of a checkpoint out as ordinary tensors, so that they are served like any others.

The keys and the rows stay where the trainer wrote them: they become slices of `<table>/keys` and
`<table>/values`. The index is built by tasks (`index_job`). With the room for more rows and the default rows
it goes into one more shard; or, of jobs that are kept in a store, it stays there (`table_shards`). What the
tensors are and how large is known from the checkpoint's index alone (`lay_out`); keys are read when the shard
is written (`TableLayout.write`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.jobs.runner import LOCAL, Job, Runner
from exporter.progress import Progress
from exporter.storage.output_directory import LocalDirectory, open_directory
from exporter.tables.geometry import TableGeometry
from exporter.tables.index_job import IndexedTable, IndexJob
from exporter.tables.table_plan import TablePlan
from exporter.tables.table_shards import join_pieces, show_pieces

SHARD = "tables.data"


class TableLayout(Struct, frozen=True, eq=False):
    """A catalog with tables as ordinary tensors, some of which are still to be written."""

    source: Catalog
    catalog: Catalog
    tables: tuple[TablePlan, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tables' variables by their names."""
        added = self.catalog.tensors.keys() - self.source.tensors.keys()
        return {name: self.catalog.tensors[name].shape for name in added}

    @property
    def geometries(self) -> dict[str, TableGeometry]:
        """The sizes of the tables."""
        return {table.name: table.geometry for table in self.tables}

    @property
    def served_names(self) -> frozenset[str]:
        """The checkpoint's own tensors that are served as parts of tables."""
        parts = chain.from_iterable(table.variable.parts for table in self.tables)
        return frozenset(name for part in parts for name in (part.keys.name, part.values.name))

    @property
    def stored_names(self) -> tuple[str, ...]:
        """All tensors of the checkpoint that the tables are, or may be, read from."""
        parts = chain.from_iterable(table.variable.parts for table in self.tables)
        names = chain.from_iterable(part.tensor_names for part in parts)
        return tuple(name for name in names if name in self.source.tensors)

    def with_source(self, catalog: Catalog) -> TableLayout:
        """The same tables laid out in another catalog, to which their tensors were copied."""
        known = embedding_variables(catalog)
        return lay_out(catalog, (replace(plan, variable=known[plan.variable.name]) for plan in self.tables))

    def index_job(self, admission: Admission, task_bytes: int) -> IndexJob:
        """The tasks that build the indexes.

        Raises:
            CheckpointChanged: a shard is no longer there.
        """
        indexed = [IndexedTable(table.name, table.variable, table.geometry) for table in self.tables]
        return IndexJob(self.source, indexed, admission, task_bytes)

    def write(
        self, scratch: Path, admission: Admission, runner: Runner = LOCAL, progress: Progress | None = None
    ) -> tuple[Catalog, Job]:
        """Write what no shard of the checkpoint holds: into `scratch`, or where the runner keeps jobs.

        The catalog with all tensors, and the job, to be left (it is a context manager) once these were read.

        Raises:
            CorruptFile: keys are damaged, or one occurs twice.
            TableFull: keys crowd in the index.
            CheckpointChanged: a shard vanished or changed.
            PublishError: the target cannot be written; DiskFull if there is no space.
            ExportError: any other of a task's; the engine gave up.
        """
        index = self.index_job(admission, runner.task_bytes)
        with ExitStack() as stack:
            job = stack.enter_context(runner.job(index.plan, os.fspath(scratch / "job")))
            pieces = index.run(job, progress)
            if isinstance(job.directory, LocalDirectory):
                home = job.directory if job.is_kept else open_directory(os.fspath(scratch))
                catalog = join_pieces(self.catalog, self.tables, pieces, job.directory, home)
            else:
                catalog = show_pieces(self.catalog, self.tables, pieces, job.directory, scratch)
            if not job.is_kept:
                job.directory.remove()
            stack.pop_all()
        return catalog, job


def lay_out(catalog: Catalog, tables: Iterable[TablePlan]) -> TableLayout:
    """The catalog with these tables' tensors. Nothing is read or written."""
    tables = tuple(tables)
    tensors, offset, shard = dict(catalog.tensors), 0, len(catalog.shards)
    for table in tables:
        made, offset = table.tensors(shard, offset)
        tensors |= {ref.name: ref for ref in made.values()}
    laid_out = replace(
        catalog,
        tensors=tensors,
        shards=(*catalog.shards, catalog.prefix.with_name(SHARD)),
        shard_sizes=(*catalog.shard_sizes, offset),
    )
    return TableLayout(catalog, laid_out, tables)

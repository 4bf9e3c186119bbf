"""The step that appends hot rows to staged tables: rows from a file, or the most counted of a checkpoint."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from exporter.bundle.hot_rows import BLOCK_ROWS, Blocks, HotRows, lay_hot_rows
from exporter.bundle.variables import ShardOrigin, ShardReport, served_runs
from exporter.checkpoint.embedding_variables import count_blocks
from exporter.mapping.tensor_source import TensorSource
from exporter.pipeline.hot_files import HotChoice, NumberFile
from exporter.pipeline.staged import Staged
from exporter.storage.layout import VARIABLES_PREFIX
from exporter.tables.lay_out import TableLayout
from exporter.tables.parts import KEYS
from exporter.wire.dtypes import Array

_COUNTED_SHARE = 10
"""`auto` chooses a tenth of a table's rows."""
_WHY = "hot rows lie behind a table"


def lay_chosen_rows(staged: Staged) -> None:
    """Append the chosen hot rows to the staged tables; do nothing if no hot rows are chosen.

    Shards are renamed. `staged.hot` gets the tables, by served name, and `staged.variables` the new catalog.
    Raises UsageError if a row is outside its table or chosen twice, NotServable if a tensor has a name that
    hot rows need, CheckpointError, OSError or PublishError if files cannot be read or written.
    """
    chosen = {choice.key: choice for choice in staged.plan.hot}
    if not chosen:
        return
    written = staged.variables.catalog
    tables = []
    for source in staged.plan.mapping.sources:
        if (choice := chosen.get(source.key)) is None:
            continue
        blocks, said = _blocks(staged, choice, source), f"--hot-rows {choice.text}"
        runs = {run.variable.served_name: run for run in served_runs(source, written)}
        for name, run in runs.items():  # several variables may be one part of a table
            assert run.extent is not None
            at = run.extent, run.box.starts[0]
            tables.append(HotRows(name, source.dtype, run.box.lengths, *at, blocks, said))
    catalog, staged.hot = lay_hot_rows(staged.bundle / VARIABLES_PREFIX, written, tables)
    reports = []
    for number, (path, size) in enumerate(zip(catalog.shards, catalog.shard_sizes, strict=True)):
        known = number < len(written.shards) and size == written.shard_sizes[number]
        if known:
            reports.append(replace(staged.variables.shards[number], path=path))
        else:
            reports.append(ShardReport(None, ShardOrigin.REWRITTEN, _WHY, size, path=path))
    staged.variables = replace(staged.variables, catalog=catalog, shards=tuple(reports))


def _blocks(staged: Staged, choice: HotChoice, source: TensorSource) -> Blocks:
    """Return a function that yields the numbers of a table's hot rows, hottest first, in blocks.

    `choice` says which rows of the table `source` are hot. Of a table by keys, counts or the file's keys are
    read now: CheckpointError or OSError if they cannot be. Of another table, the file is read while the
    blocks are iterated: UsageError for a row that the table does not have, CheckpointError or OSError if the
    file cannot be read.
    """
    rows, file = source.tensor.shape[0], choice.file
    if choice.table is not None:
        layout = staged.plan.layout
        assert layout is not None
        found = _most_counted(layout, choice) if file is None else _rows_of_keys(staged, choice, file)
        return lambda: (found[start : start + BLOCK_ROWS] for start in range(0, len(found), BLOCK_ROWS))
    return lambda: choice.rows(rows)


def _rows_of_keys(staged: Staged, choice: HotChoice, file: NumberFile) -> Array:
    """Return the row numbers of a file's keys in the staged table, in the file's order (int64).

    Keys that the table does not have are left out; of a repeated key the first counts. The file's keys are in
    memory; the table's are read in blocks. Raises CheckpointError or OSError if the file, or a staged shard,
    changed or cannot be read.
    """
    from exporter.delta.row_reader import served_in  # late: other exports need none of it

    keys = np.concatenate([np.empty(0, np.int64), *file.blocks()])
    order = np.argsort(keys, kind="stable")  # `searchsorted` finds the first of equal keys: the file's first
    ordered, rows = keys[order], np.full(len(keys), -1, np.int64)
    of_keys = f"{choice.name}/{KEYS}"
    source = next(each for each in staged.plan.mapping.sources if each.key == of_keys)
    (reader,) = served_in(staged.variables.catalog, source)
    for start in range(0, reader.shape[0] if len(keys) else 0, BLOCK_ROWS):
        stored = reader.rows(start, min(start + BLOCK_ROWS, reader.shape[0]))
        at = np.minimum(np.searchsorted(ordered, stored), len(keys) - 1)
        found = np.flatnonzero(ordered[at] == stored)
        rows[order[at[found]]] = start + found
    return rows[rows >= 0]


def _most_counted(layout: TableLayout, choice: HotChoice) -> Array:
    """Return at most a tenth of the rows of a choice's table, most often seen first (int64).

    They are row numbers in the layout; rows with a count of 0 are left out. Raises CheckpointError
    if the checkpoint's counts cannot be read.
    """
    plan = next(each for each in layout.tables if each.name == choice.name)
    most = -(-plan.variable.rows // _COUNTED_SHARE)
    counts, rows = np.empty(0, np.int64), np.empty(0, np.int64)
    for first, block in count_blocks(layout.source, plan.variable, "freqs") or ():
        counts = np.concatenate([counts, block.astype(np.int64)])
        rows = np.concatenate([rows, np.arange(first, first + len(block))])
        if len(counts) > most:  # so memory holds a tenth of the table and a block, not all of it
            kept = np.argpartition(counts, len(counts) - most)[len(counts) - most :]
            counts, rows = counts[kept], rows[kept]
    order = np.argsort(-counts, kind="stable")
    return rows[order[counts[order] > 0]]

"""The files of hot rows in `--hot-rows`, and checks that its tables can have hot rows.

A file holds an array of integers, the most read first: row numbers, or the keys of a table by keys. Row
numbers are read in blocks; keys and counts are sorted in memory, about 24 bytes for each hot row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.bundle.hot_rows import BLOCK_ROWS, named_twice
from exporter.bundle.mapped_tables import Unmapped
from exporter.errors import CheckpointChanged, CheckpointError, NotServable, UsageError, nearest
from exporter.graph.changed_uses import change_uses
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.placed_reads import PlacedReads
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.options import ExportRequest
from exporter.storage.files import regular_file
from exporter.storage.open_files import read_at
from exporter.tables.geometry import TablePlan
from exporter.tables.lay_out import TableLayout
from exporter.tables.parts import VALUES
from exporter.terminal.progress import count
from exporter.wire.dtypes import Array, DType

AUTO = "auto"
HOW_TO_SAVE = (
    "save the numbers of the rows, the most read first: numpy.save(FILE, numpy.argsort(-counts)[:HOW_MANY])"
)


class NumberFile(Struct, frozen=True):
    """A `.npy` file with a one-dimensional array of integers."""

    path: Path
    offset: int
    count: int
    stored: str

    @classmethod
    def read(cls, path: Path) -> NumberFile:
        """Read the header of the `.npy` file at `path`; the numbers themselves are not read.

        Raises UsageError if it cannot be read, is damaged, or has other contents than integers in one
        dimension; a Git LFS pointer is refused so, too.
        """
        from exporter.checkpoint.npz import BEGIN_BYTES, read_header  # late: other exports need none of it

        try:
            with regular_file(path) as file:
                header = read_header(str(path), file.read(BEGIN_BYTES), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UsageError(
                f"--hot-rows: {path} cannot be read", cause=error.strerror or str(error), hint=HOW_TO_SAVE
            ) from error
        except CheckpointError as error:
            raise UsageError(
                f"--hot-rows: {path} cannot be read", cause=error.message, hint=HOW_TO_SAVE
            ) from error
        if header is None or header.stored.kind not in "iu" or len(header.shape) != 1:
            found = "texts" if header is None else f"{header.stored} {list(header.shape)}"
            raise UsageError(
                f"--hot-rows: {path} holds {found}, expected whole numbers in one dimension",
                hint=HOW_TO_SAVE,
            )
        return cls(path, header.size, header.shape[0], header.stored.str)

    def blocks(self) -> Iterator[Array]:
        """Yield the numbers in the file's order as int64, in blocks of at most `BLOCK_ROWS`.

        Raises, while iterated, CheckpointChanged if the file became shorter, other CheckpointErrors or
        OSError if it cannot be opened or read.
        """
        stored = np.dtype(self.stored)
        with regular_file(self.path) as file:
            for start in range(0, self.count, BLOCK_ROWS):
                block = np.empty(min(BLOCK_ROWS, self.count - start), stored)
                at = self.offset + start * stored.itemsize
                # A read, not a map: a file that shrinks under a map kills the process.
                if read_at(file.fileno(), at, block.view(np.uint8).data) < block.nbytes:
                    raise CheckpointChanged(f"{self.path} became shorter after its header was read")
                yield block.astype(np.int64)


class HotChoice(Struct, frozen=True):
    """The hot rows of a table: the key of its variable, and the file with them; None: its most counted rows.

    `table` is set for a table by keys.
    """

    name: str
    key: str
    file: NumberFile | None
    table: TablePlan | None = None

    @property
    def source(self) -> str:
        """A phrase for people on the source of the rows: the checkpoint's counts, or a file and its size."""
        if self.file is None:
            return "by the checkpoint's counts"
        return f"{count(self.file.count, 'row' if self.table is None else 'key')} of {self.file.path}"

    @property
    def text(self) -> str:
        """The choice in the form of the option's value: `NAME=FILE`, or `NAME=auto`."""
        return f"{self.name}={AUTO if self.file is None else self.file.path}"

    def rows(self, rows: int) -> Iterator[Array]:
        """Yield the row numbers in the choice's file, in blocks (int64), in the file's order.

        The choice must have a file, and it must be one of row numbers, not of keys. `rows` is the number of
        rows of the table. Errors come while iterating.

        Raises:
            UsageError: a number is outside the table.
            CheckpointChanged: the file became shorter.
            CheckpointError, OSError: it cannot be opened or read.
        """
        assert self.file is not None
        for block in self.file.blocks():
            if len(wrong := block[(block < 0) | (block >= rows)]):
                raise UsageError(
                    f"--hot-rows {self.text}: there is no row {wrong[0]}, the table has {rows}",
                    hint=HOW_TO_SAVE,
                )
            yield block

    def check(self, rows: int) -> None:
        """Read the choice's file and check its numbers for a table of `rows` rows, before anything is staged.

        Raises UsageError for a number outside the table, or a duplicate; CheckpointChanged if the file became
        shorter, other CheckpointErrors or OSError if it cannot be read. A duplicate is found only if both are
        in one block, as in all but large files; the export finds the others.
        """
        for block in self.rows(rows):
            ordered = np.sort(block)
            if len(twice := ordered[:-1][ordered[:-1] == ordered[1:]]):
                raise named_twice(f"--hot-rows {self.text}", int(twice[0]))


def choose_hot(
    request: ExportRequest,
    graph: InferenceGraph,
    mapping: VariableMapping,
    unmapped: tuple[Unmapped, ...],
    layout: TableLayout | None,
) -> tuple[HotChoice, ...]:
    """Read the files that `--hot-rows` names and return one choice for each table, in the option's order.

    Only the headers of files of keys are read: keys that a table does not have are ignored. `unmapped` says
    why tables are not mapped; `layout` has the tables by keys, None without any. Raises UsageError if a name
    is not a mapped table's, or a file cannot be used or has wrong rows; CheckpointChanged, CheckpointError or
    OSError if a file changes or vanishes meanwhile.
    """
    plans = {} if layout is None else {plan.name: plan for plan in layout.tables}
    sources = {source.key: source for source in mapping.sources}
    whys = {each.key: each.why for each in unmapped}
    chosen = []
    for name, text in request.hot_rows.items():
        plan = plans.get(name)
        key = name if plan is None else f"{name}/{VALUES}"
        source = sources.get(key)
        if source is None:
            raise _no_table(name, plans, sources)
        if not source.is_mapped:
            why = whys.get(key, "it is small")
            raise UsageError(f"--hot-rows {name}: the table is not mapped: {why}", hint="leave it out")
        if plan is None and text == AUTO:
            raise UsageError(
                f"--hot-rows {name}={AUTO}: a checkpoint has counts of tables by keys alone",
                hint=f"name a file of row numbers, the most read first: --hot-rows {name}=hot.npy",
            )
        if plan is not None and text == AUTO and not _has_counts(plan):
            raise UsageError(
                f"--hot-rows {name}={AUTO}: the checkpoint does not say how often keys were seen",
                cause="the trainer recorded no frequencies",
                hint=f"name a file of keys, the most read first: --hot-rows {name}=hot.npy",
            )
        _require_placed(name, graph, source)
        if "://" in text:
            raise UsageError(
                f"--hot-rows {name}={text}: expected a local file", hint="copy it here, and name the copy"
            )
        choice = HotChoice(name, key, None if text == AUTO else NumberFile.read(Path(text)), plan)
        if plan is None:
            choice.check(source.tensor.shape[0])
        chosen.append(choice)
    return tuple(chosen)


def _no_table(name: str, plans: Mapping[str, TablePlan], sources: Mapping[str, TensorSource]) -> UsageError:
    """Return the error for a `name` in `--hot-rows` that no table has.

    `plans` are the tables by keys, `sources` the variables, both by name. Its hint is the most similar name
    of a mapped table, if one is similar.
    """
    of_plans = {f"{plan}/{VALUES}" for plan in plans}
    mapped = [*plans, *(key for key, source in sources.items() if source.is_mapped and key not in of_plans)]
    near = nearest(name, mapped)
    return UsageError(
        f"--hot-rows {name}: no table is called so",
        cause=f"the mapped tables are {', '.join(mapped[:20])}" if mapped else "no table is mapped",
        hint=f"did you mean {near}?" if near else "name a mapped table, or leave --hot-rows out",
    )


def _has_counts(plan: TablePlan) -> bool:
    return all(part.freqs is not None for part in plan.variable.parts)


def _require_placed(name: str, graph: InferenceGraph, source: TensorSource) -> None:
    """Raise UsageError unless the graph reads a table, the variables of `source`, by gathers alone.

    The message calls the table `name`.
    """
    reads = {v.node: PlacedReads(v.shape, f"{v.node}/places", DType.INT32) for v in source.variables}
    try:
        change_uses(deepcopy(graph.meta_graph.graph_def), reads)
    except NotServable as error:
        raise UsageError(
            f"--hot-rows {name}: rows are not read one by one: {error.message}", hint="leave it out"
        ) from error

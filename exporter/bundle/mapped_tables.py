"""Tables that a server maps instead of reading: how they are chosen, and the nodes that map them at load.

`AssignVariableOp(handle, ImmutableConst(memory_region_name=FILE))` makes the mapping of FILE the buffer of a
variable: nothing is read or copied, and all versions and servers of a host share the pages. Both are stock
kernels (tensorflow/core/kernels/immutable_constant_op.cc). A mapped table is a shard of the SavedModel's
bundle that holds nothing else, from offset 0, so that it can be restored, too.

- *The memory is read-only*: a scatter into it kills the process. So a variable is mapped only if the graph
  provably does nothing but gather from it (`variable_uses.readings`). A variable that is read whole would be
  copied at once, so it is restored, too. Rows that a delta changes go into an overlay beside the table
  (`exporter.graph.overlaid_reads`).
- *The path is an attribute*, fixed when the model is exported: the path at which servers see the version. It
  is used if the file `variables/mapped.id` beside the tables holds the id that is in the graph. The nodes
  *try* it: a dataset of that file, filtered by the id, is mapped to the table, with errors ignored; the
  restored table follows; the first element is taken. So a table is restored if its directory was moved or
  copied, or if a file is missing, too short or not readable.
- *A published file never changes.* If it is unlinked, servers keep their mapping; if it were truncated in
  place, its readers would be killed (SIGBUS).
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.hot_rows import HotTable
from exporter.bundle.variables import why_not_mapped
from exporter.errors import NotServable
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.graph.nodes import Body, bodies, called, constant, free_name, new_node, shape_proto
from exporter.graph.overlaid_reads import PAGE_ROWS, SCATTERED, OverlaidReads, overlay_reads
from exporter.graph.signatures import signature_nodes
from exporter.graph.variable_uses import Reading, Use, read_rows_only, readings
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.storage.files import writing
from exporter.storage.layout import MAPPED_ID_FILE, VARIABLES_DIRECTORY
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

LEAST_BYTES = 1 << 20  # to read a smaller variable takes less time than to open a file of its own

_FLAG = (DType.BOOL, ())
_NAME = ((DType.STRING, ()),)
_IN_NAMES = 16  # characters of an id in the names of functions
_GLOB = re.compile(rb"[*?\[\\]")


class Unmapped(Struct, frozen=True):
    """A large variable that is restored instead of mapped, and the reason."""

    key: str
    bytes_: int
    why: str


class MappedChoice(Struct, frozen=True):
    """A graph that reads tables by rows, a mapping that marks the mapped ones, and large other tables."""

    graph: InferenceGraph
    mapping: VariableMapping
    unmapped: tuple[Unmapped, ...]


def choose_mapped(
    graph: InferenceGraph,
    mapping: VariableMapping,
    *,
    takes_deltas: bool = False,
    indexes: Collection[str] = (),
) -> MappedChoice:
    """Choose for mapping the variables of at least `LEAST_BYTES` that the graph only gathers rows from.

    Return a copy of the graph, rewritten to read tables by rows, the mapping with `is_mapped` set in the
    chosen sources, and the other large variables with the reasons why they are not mapped. With
    `takes_deltas`, the reads of a chosen variable must be such that an overlay can change them, and the
    variables `indexes` (by key) of dynamic tables stay in memory: any update may change much of them.
    """
    meta_graph = deepcopy(graph.meta_graph)
    # a gather after a cast, or a read of the shape, is no reason to read a table whole
    read_rows_only(meta_graph.graph_def, signature_nodes(meta_graph))
    read = readings(meta_graph.graph_def)
    large = [source for source in mapping.sources if _smallest(source) >= LEAST_BYTES]
    against: dict[str, str] = {}
    for source in large:
        against[source.key] = taken_whole(source, read) or why_not_mapped(source)
    if takes_deltas:
        left = [source for source in large if not against[source.key]]
        against |= dict.fromkeys((source.key for source in left if source.key in indexes), _INDEX)
        shared = (s.key for s in left if any(read[v.node].handles > 1 for v in s.variables))
        against |= dict.fromkeys(shared, SEVERAL_HANDLES)
        against |= _without_overlay(meta_graph.graph_def, [s for s in left if not against[s.key]])
    sources = tuple(
        replace(source, is_mapped=source.key in against and not against[source.key])
        for source in mapping.sources
    )
    unmapped = (Unmapped(s.key, s.bytes_, against[s.key]) for s in large if against[s.key])
    read_by_rows = replace(graph, meta_graph=meta_graph)
    return MappedChoice(read_by_rows, replace(mapping, sources=sources), tuple(unmapped))


SEVERAL_HANDLES = "several nodes of the graph are its handle"
_INDEX = "it is the index of a table by keys"
_MOST_ROWS = (1 << 31) - 2 * PAGE_ROWS  # `Empty` counts slots by an int32; one page of slots has no rows


def taken_whole(source: TensorSource, read: Mapping[str, Reading]) -> str:
    """Return a phrase about the first node that reads a variable of the source whole or may change it.

    "" if no node does. `read` has the use of each variable, by its node; KeyError if one is missing.
    """
    return next((each.taken_by for v in source.variables if Use.WHOLE in (each := read[v.node]).use), "")


def _without_overlay(graph_def: Proto, sources: Sequence[TensorSource]) -> dict[str, str]:
    """Return, by key, the sources with a variable whose reads an overlay cannot change, each with the reason.

    The graph is not changed.
    """
    if not sources or _why_no_overlay(graph_def, sources) == "":  # all at once: a graph may be large
        return {}
    found = ((source.key, _why_no_overlay(graph_def, [source])) for source in sources)
    return {key: why for key, why in found if why}


def _why_no_overlay(graph_def: Proto, sources: Iterable[TensorSource]) -> str:
    """Return the reason why an overlay cannot change the reads of some variable of the sources.

    "" if it can change all. The graph is not changed.
    """
    variables = [variable for source in sources for variable in source.variables]
    tried = {
        v.node: OverlaidReads(
            v.node,
            v.dtype,
            v.shape[1:],
            changed=f"{v.node}/changed",
            slots=f"{v.node}/slots",
            overlay=f"{v.node}/overlay",
            pages=f"{v.node}/pages",
        )
        for v in variables
    }
    if wrong := next((v for v in variables if v.dtype not in SCATTERED), None):
        return f"rows of {wrong.dtype.label} cannot be written"
    if any(v.shape[0] > _MOST_ROWS for v in variables):
        return "it has more rows than a slot can count places"
    try:
        overlay_reads(deepcopy(graph_def), tried)
    except NotServable as error:
        return error.message
    return ""


def _smallest(source: TensorSource) -> int:
    """Return the bytes of the source's smallest variable as stored; 0 without variables, and for strings."""
    elements = (math.prod(source.as_stored(variable).shape) for variable in source.variables)
    return min(elements, default=0) * (source.dtype.itemsize or 0)


NO_HOT_ROWS: Mapping[str, HotTable] = {}


class MappedTables(Struct, frozen=True):
    """The mapped tables of a version: its `directory` for servers, and `files`, by the variables' nodes.

    `counter` is the node of the variable that gets the number of mapped tables, int64 []; "" if there is
    none. `hot` are the tables with hot rows behind them, by their nodes.
    """

    directory: Path
    id: str
    files: Mapping[str, str]
    counter: str = ""
    hot: Mapping[str, HotTable] = {}

    @classmethod
    def of(
        cls,
        directory: Path,
        files: Mapping[str, str],
        counter: str = "",
        hot: Mapping[str, HotTable] = NO_HOT_ROWS,
    ) -> MappedTables:
        """Return the mapped tables of a new version, with a random id, which `write_id` writes beside them.

        `directory` is the version's as servers see it, `files` has the file name of each variable, by its
        node. `counter` is the node of the variable that gets the number of mapped tables; "" if there is
        none. `hot` has the tables with hot rows, by their nodes.
        """
        return cls(directory, secrets.token_hex(16), files, counter, hot)

    def write_id(self, version: Path) -> None:
        """Write the id to its file in the directory `version`; a graph compares it before it maps the tables.

        Raises TargetNotWritable, DiskFull or PublishError if it cannot be written.
        """
        with writing(path := version / MAPPED_ID_FILE):
            path.write_text(self.id)

    def path(self, node: str) -> bytes:
        """Return the path of the file of a variable, given by its node, as servers see it.

        Raises KeyError if it is not mapped.
        """
        return os.fsencode(self.directory / VARIABLES_DIRECTORY / self.files[node])


NOTHING_MAPPED = MappedTables(Path(), "", {})


class TriedTable(Struct, frozen=True):
    """A variable whose file is tried, and the tensor that RestoreV2 reads if that fails.

    `counts` is False for a list of a table's places, which is not counted as a mapped table.
    """

    variable: GraphVariable
    dtype: DType
    key: str
    slice_spec: str
    counts: bool = True


class Tries(Struct, frozen=True):
    """The tensor of each variable's values, by its node, and the node that counts the mapped variables.

    The latter is missing if none can be mapped.
    """

    values: Mapping[str, str]
    counts: tuple[str, ...] = ()


def add_tries(
    graph_def: Proto, scope: str, prefix: str, tried: Iterable[TriedTable], tables: MappedTables
) -> Tries:
    """Add nodes, under `scope`, that map each variable's file, or else restore it from the bundle.

    `prefix` is the tensor with the bundle's path. Return the tensors of the values, and, if `tables` has a
    counter, the node that counts the mapped tables. Functions are added to the graph's library. Without
    variables nothing is added. KeyError if `tables` has no file of a variable.
    """
    tried = [*tried]
    if not tried:
        return Tries({})
    body, library = Body(graph_def.node), graph_def.library.function
    # TensorFlow has one function of a name in a process: the id keeps those of two models apart.
    names, wish = {function.signature.name for function in library}, f"{scope}_mapped_{tables.id[:_IN_NAMES]}"
    library.append(_same_id(free_name(names, f"{wish}_is_there"), tables))
    place = f"{scope}/mapped"
    pattern = _GLOB.sub(rb"\\\g<0>", os.fsencode(tables.directory / MAPPED_ID_FILE))
    matching = body.put(
        new_node(f"{place}/found", "MatchingFiles", [body.put(_text(f"{place}/id", pattern)).name])
    )
    found = _dataset(body, f"{place}/files", "TensorSliceDataset", _NAME, matching.name, is_first=True)
    same = _dataset(body, f"{place}/same", "FilterDataset", _NAME, found, does=library[-1])
    here = _dataset(body, f"{place}/prefix", "TensorDataset", _NAME, prefix, is_first=True)
    values, is_mapped = {}, []
    for number, table in enumerate(tried):
        place, kind = f"{scope}/mapped_{number}", ((table.dtype, table.variable.shape), _FLAG)
        library.append(_mapping(free_name(names, f"{wish}_{number}"), table, tables))
        maps = _dataset(body, f"{place}/map", "MapDataset", kind, same, does=library[-1])
        # No id file, or another id: no element. Errors left: files unreadable or too short.
        tries = _dataset(body, f"{place}/try", "IgnoreErrorsDataset", kind, maps)
        body.by_name[tries].attr["log_warning"].b = True
        library.append(_restoring(free_name(names, f"{wish}_{number}_restored"), table))
        restores = _dataset(body, f"{place}/restore", "MapDataset", kind, here, does=library[-1])
        # Without this, the end of a truncated shard counts as the end of the dataset.
        body.by_name[restores].attr["preserve_cardinality"].b = True
        either = _dataset(body, f"{place}/either", "ConcatenateDataset", kind, tries, restores)
        count = body.put(constant(f"{place}/one", np.array(1, np.int64), DType.INT64))
        first = _dataset(body, f"{place}/first", "TakeDataset", kind, either, count.name)
        one = _dataset(body, f"{place}/values", "DatasetToSingleElement", kind, first)
        values[table.variable.node] = one
        if table.counts:
            is_mapped.append(f"{one}:1")
    return Tries(values, _add_count(body, f"{scope}/mapped", is_mapped, tables.counter))


def _add_count(body: Body, place: str, is_mapped: Sequence[str], counter: str) -> tuple[str, ...]:
    if not counter:
        return ()
    flags = body.put(new_node(f"{place}/flags", "Pack", is_mapped, T=DType.BOOL, N=len(is_mapped)))
    numbers = body.put(new_node(f"{place}/numbers", "Cast", [flags.name], SrcT=DType.BOOL, DstT=DType.INT64))
    axis = body.put(constant(f"{place}/axis", np.array(0, np.int32), DType.INT32))
    count = body.put(
        new_node(f"{place}/count", "Sum", [numbers.name, axis.name], T=DType.INT64, Tidx=DType.INT32)
    )
    told = new_node(f"{place}/told", "AssignVariableOp", [counter, count.name], dtype=DType.INT64)
    return (str(body.put(told).name),)


def move_tries(graph_def: Proto, version: int, ids: tuple[str, str], files: Mapping[str, str]) -> None:
    """Change a graph of `add_tries`, in place, to try the files of another version of the model.

    `version` is its number, `ids` are the id in the graph and the new one; `files` are the new file names, by
    old ones. KeyError if `files` lacks a file that the graph maps.
    """
    before, now = ids
    renamed = {
        function.signature.name: function.signature.name.replace(before[:_IN_NAMES], now[:_IN_NAMES])
        for function in graph_def.library.function
        if f"_mapped_{before[:_IN_NAMES]}_" in function.signature.name
    }
    for body in bodies(graph_def):
        name = "" if body.function is None else body.function.signature.name
        if name and name not in renamed:
            continue
        if body.function is not None:
            body.function.signature.name = renamed[name]
        for node in body.nodes:
            for function in called(node):
                function.name = renamed.get(function.name, function.name)
            if name and node.op == "ImmutableConst":
                # <model>/<version>/variables/<file>
                model, _, _, file = node.attr["memory_region_name"].s.rsplit(b"/", 3)
                place = f"{version}/{VARIABLES_DIRECTORY}/{files[os.fsdecode(file)]}"
                node.attr["memory_region_name"].s = model + b"/" + os.fsencode(place)
            elif node.op == "Const" and (texts := node.attr["value"].tensor.string_val):
                if texts[0] == before.encode():
                    texts[0] = now.encode()
                elif texts[0].endswith(f"/{MAPPED_ID_FILE}".encode()):
                    model = texts[0].rsplit(b"/", 3)[0]  # <model>/<version>/variables/mapped.id
                    texts[0] = model + f"/{version}/{MAPPED_ID_FILE}".encode()


def _dataset(
    body: Body,
    name: str,
    op: str,
    kind: Sequence[tuple[DType, tuple[int, ...]]],
    *inputs: str,
    does: Proto | None = None,
    is_first: bool = False,
) -> str:
    """Add the node of a dataset, which applies the function `does` if there is one; return the node's name.

    `kind` has the type and shape of each component of an element. With `is_first`, its input is a tensor
    instead of a dataset.
    """
    node = body.put(new_node(name, op, inputs))
    for dtype, shape in kind:
        node.attr["Toutput_types" if is_first else "output_types"].list.type.append(int(dtype))
        node.attr["output_shapes"].list.shape.append(shape_proto(shape))
    if does is not None:
        node.attr["predicate" if op == "FilterDataset" else "f"].func.name = does.signature.name
        node.attr["Targuments"].list.SetInParent()  # empty, but it must be there
    return str(node.name)


def _same_id(name: str, tables: MappedTables) -> Proto:
    """Return a function that is true if the file whose name it gets holds the id of the tables."""
    function = _function(name, DType.BOOL)
    body = Body.of(function)
    there = body.put(new_node("there", "ReadFile", ["given"]))
    expected = body.put(_text("expected", tables.id.encode()))
    inputs = [body.single(there, "contents"), body.single(expected, "output")]
    same = body.put(new_node("same", "Equal", inputs, T=DType.STRING))
    function.ret["result"] = body.single(same, "z")
    return function


def _mapping(name: str, table: TriedTable, tables: MappedTables) -> Proto:
    """Return a function that gives a table as mapped from its file, and true.

    KeyError if `tables` has no file of its variable.
    """
    function = _function(name, table.dtype)
    body = Body.of(function)
    path = tables.path(table.variable.node)
    shape = table.variable.shape
    values = new_node("values", "ImmutableConst", dtype=table.dtype, shape=shape, memory_region_name=path)
    # Constant folding evaluates ImmutableConst and copies the table, in functions and datasets, too, with the
    # default options of a session (tensorflow/core/common_runtime/constant_folding.cc). It leaves nodes alone
    # that have this attribute; an empty list means nothing to the executor.
    values.attr["_scoped_allocator"].list.SetInParent()
    function.ret["result"] = body.single(body.put(values), "tensor")
    return _flagged(function, body, is_mapped=True)


def _restoring(name: str, table: TriedTable) -> Proto:
    """Return a function from a bundle's prefix to a table as RestoreV2 reads it, and false."""
    function = _function(name, table.dtype)
    body = Body.of(function)
    names = body.put(_text("names", table.key.encode(), shape=(1,)))
    slices = body.put(_text("slices", table.slice_spec.encode(), shape=(1,)))
    inputs = ["given", body.single(names, "output"), body.single(slices, "output")]
    values = body.put(new_node("RestoreV2", "RestoreV2", inputs, dtypes=(table.dtype,)))
    function.ret["result"] = body.single(values, "tensors")
    return _flagged(function, body, is_mapped=False)


def _flagged(function: Proto, body: Body, *, is_mapped: bool) -> Proto:
    """Add a second result to a function, a constant that says whether the table is mapped.

    Return the function.
    """
    flag = body.put(constant("flag", np.array(is_mapped), DType.BOOL))
    function.signature.output_arg.add(name="is_mapped", type=int(DType.BOOL))
    function.ret["is_mapped"] = body.single(flag, "output")
    return function


def _function(name: str, dtype: DType) -> Proto:
    """Return a new function without nodes, from one string, `given`, to `result` of this dtype."""
    function = message_class("FunctionDef")()
    function.signature.name = name
    function.signature.is_stateful = True  # it reads files
    function.signature.input_arg.add(name="given", type=int(DType.STRING))
    function.signature.output_arg.add(name="result", type=int(dtype))
    return function


def _text(name: str, text: bytes, shape: tuple[int, ...] = ()) -> Proto:
    """Return a Const of one string of any bytes: a path need not be UTF-8."""
    tensor = message_class("TensorProto")(dtype=int(DType.STRING), string_val=[text])
    tensor.tensor_shape.CopyFrom(shape_proto(shape))
    return new_node(name, "Const", dtype=DType.STRING, value=tensor)

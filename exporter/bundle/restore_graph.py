"""Add the nodes that restore a graph's variables from its bundle, as a stock `Saver` would, without
TensorFlow.

One RestoreV2 reads every variable (parts of a partitioned one by slice), an AssignVariableOp each takes its
values, a LookupTableImportV2 the keys and values of each table; a SaveV2 beside them makes
`Saver(saver_def=...)` of the stock loaders complete.
Source of names and roles: tensorflow/python/training/saver.py and core/protobuf/saver.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from msgspec import Struct

from exporter.graph.inference_graph import NO_STATE, GraphTable, GraphVariable, KeptState
from exporter.graph.nodes import new_node
from exporter.mapping.build import TensorSource
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

VARIABLES_COLLECTION = "variables"
"""Global variables: what makes `tf.saved_model.load` own them as Python objects."""

_SAVER_V2 = 2  # SaverDef.CheckpointFormatVersion.V2


class RestoredVariable(Struct, frozen=True):
    """A variable of the served graph, the bundle key it is restored from, and its dtype in the bundle."""

    variable: GraphVariable
    key: str
    dtype: DType

    @property
    def slice_spec(self) -> str:
        """RestoreV2's slice: empty for a whole tensor, which also joins stored slices."""
        part = self.variable.part
        return part.restore_spec if part and not part.is_full else ""


def served_variables(sources: Iterable[TensorSource]) -> tuple[RestoredVariable, ...]:
    """Every variable of every source, in the order of the sources."""
    return tuple(
        RestoredVariable(variable, source.key, source.dtype)
        for source in sources
        for variable in source.variables
    )


def add_restore(
    meta_graph: Proto,
    served: Sequence[RestoredVariable],
    tables: Sequence[GraphTable] = (),
    state: KeptState = NO_STATE,
) -> None:
    """Add restore and save nodes, the `SaverDef` and the collection of variables to `meta_graph`.

    A graph without variables, tables and other state gets none of them, as with the stock builder.
    """
    if not served and not tables and not state.importing:
        return
    graph_def = meta_graph.graph_def
    scope = _free_scope(graph_def)
    _add_file_name(graph_def, scope)
    _add_reads(graph_def, scope, served, tables)
    _add_save(graph_def, scope, served, tables)
    _add_assignments(graph_def, scope, served, tables, state.importing)
    for node in graph_def.node:
        if node.name == state.prefix:
            node.CopyFrom(new_node(state.prefix, "Identity", [f"{scope}/Const"], T=DType.STRING))
    meta_graph.saver_def.CopyFrom(
        message_class("SaverDef")(
            filename_tensor_name=f"{scope}/Const:0",
            save_tensor_name=f"{scope}/control_dependency:0",
            restore_op_name=f"{scope}/restore_all",
            max_to_keep=5,
            keep_checkpoint_every_n_hours=10000.0,
            version=_SAVER_V2,
        )
    )
    collection = meta_graph.collection_def[VARIABLES_COLLECTION].bytes_list.value
    collection.extend(_variable_def(scope, index, entry) for index, entry in enumerate(served))


def add_node(graph_def: Proto, name: str, op: str, inputs: Sequence[str] = (), **attrs: Proto) -> None:
    """Append a node; `attrs` are AttrValue messages."""
    node = graph_def.node.add(name=name, op=op, input=inputs)
    for key, value in attrs.items():
        node.attr[key].CopyFrom(value)


@cache
def type_attr(dtype: DType) -> Proto:
    """An attribute that holds a dtype."""
    return message_class("AttrValue")(type=int(dtype))


def _free_scope(graph_def: Proto) -> str:
    """`save`, or the first `save_<n>` under which the graph has no node, as stock graphs name theirs."""
    taken = {node.name.partition("/")[0].lower() for node in graph_def.node}
    return next(name for n in range(len(taken) + 1) if (name := f"save_{n}" if n else "save") not in taken)


def _add_file_name(graph_def: Proto, scope: str) -> None:
    default = message_class("TensorProto")(dtype=int(DType.STRING), string_val=[b"model"])
    default.tensor_shape.SetInParent()
    scalar = message_class("AttrValue")()
    scalar.shape.SetInParent()
    value = message_class("AttrValue")(tensor=default)
    string = type_attr(DType.STRING)
    add_node(graph_def, f"{scope}/filename/input", "Const", dtype=string, value=value)
    inputs = [f"{scope}/filename/input"]
    add_node(graph_def, f"{scope}/Const", "PlaceholderWithDefault", inputs, dtype=string, shape=scalar)


def _add_reads(
    graph_def: Proto, scope: str, served: Sequence[RestoredVariable], tables: Sequence[GraphTable]
) -> None:
    inputs = [f"{scope}/Const", f"{scope}/tensor_names", f"{scope}/shape_and_slices"]
    string = type_attr(DType.STRING)
    contents = [name for table in tables for name in (table.keys, table.values)]
    if not served and not contents:
        return
    names = _string_vector([*(entry.key for entry in served), *contents])
    slices = _string_vector([*(entry.slice_spec for entry in served), *("" for _ in contents)])
    add_node(graph_def, inputs[1], "Const", dtype=string, value=names)
    add_node(graph_def, inputs[2], "Const", dtype=string, value=slices)
    add_node(graph_def, f"{scope}/RestoreV2", "RestoreV2", inputs, dtypes=_dtypes(served, tables))


def _add_save(
    graph_def: Proto, scope: str, served: Sequence[RestoredVariable], tables: Sequence[GraphTable]
) -> None:
    for index, entry in enumerate(served):
        name = _read_name(scope, index)
        add_node(graph_def, name, "ReadVariableOp", [entry.variable.node], dtype=type_attr(entry.dtype))
    inputs = [f"{scope}/Const", f"{scope}/tensor_names", f"{scope}/shape_and_slices"]
    inputs.extend(_read_name(scope, index) for index in range(len(served)))
    for index, table in enumerate(tables):
        name = f"{scope}/LookupTableExportV2_{index}"
        types = {"Tkeys": type_attr(table.key_dtype), "Tvalues": type_attr(table.value_dtype)}
        add_node(graph_def, name, "LookupTableExportV2", [table.node], **types)
        inputs += [name, f"{name}:1"]
    after = [f"{scope}/Const"]
    if served or tables:
        add_node(graph_def, f"{scope}/SaveV2", "SaveV2", inputs, dtypes=_dtypes(served, tables))
        after.append(f"^{scope}/SaveV2")
    add_node(graph_def, f"{scope}/control_dependency", "Identity", after, T=type_attr(DType.STRING))


def _add_assignments(
    graph_def: Proto,
    scope: str,
    served: Sequence[RestoredVariable],
    tables: Sequence[GraphTable],
    importing: Iterable[str],
) -> None:
    for index, entry in enumerate(served):
        inputs = [entry.variable.node, _restored(scope, index)]
        dtype = type_attr(entry.dtype)
        name = _assign_name(scope, index)
        add_node(graph_def, name, "AssignVariableOp", inputs, dtype=dtype)
    everything = [f"^{_assign_name(scope, index)}" for index in range(len(served))]
    for index, table in enumerate(tables):
        first = len(served) + 2 * index
        name = f"{scope}/LookupTableImportV2_{index}"
        inputs = [table.node, _restored(scope, first), _restored(scope, first + 1)]
        types = {"Tin": type_attr(table.key_dtype), "Tout": type_attr(table.value_dtype)}
        add_node(graph_def, name, "LookupTableImportV2", inputs, **types)
        everything.append(f"^{name}")
    everything += [f"^{name}" for name in importing]
    add_node(graph_def, f"{scope}/restore_all", "NoOp", everything)


def _restored(scope: str, output: int) -> str:
    return f"{scope}/RestoreV2:{output}" if output else f"{scope}/RestoreV2"


def _read_name(scope: str, index: int) -> str:
    return f"{scope}/Read_{index}/ReadVariableOp"


def _assign_name(scope: str, index: int) -> str:
    return f"{scope}/AssignVariableOp_{index}"


def _dtypes(served: Sequence[RestoredVariable], tables: Sequence[GraphTable]) -> Proto:
    attr = message_class("AttrValue")()
    attr.list.type.extend(int(entry.dtype) for entry in served)
    for table in tables:
        attr.list.type.extend((int(table.key_dtype), int(table.value_dtype)))
    return attr


def _string_vector(values: Iterable[str]) -> Proto:
    tensor = message_class("TensorProto")(dtype=int(DType.STRING))
    tensor.string_val.extend(value.encode() for value in values)
    tensor.tensor_shape.dim.add(size=len(tensor.string_val))
    return message_class("AttrValue")(tensor=tensor)


def _variable_def(scope: str, index: int, entry: RestoredVariable) -> bytes:
    definition = message_class("VariableDef")(
        variable_name=f"{entry.variable.node}:0",
        initializer_name=_assign_name(scope, index),
        snapshot_name=f"{_read_name(scope, index)}:0",
        is_resource=True,
    )
    if part := entry.variable.part:
        definition.save_slice_info_def.full_name = entry.key
        definition.save_slice_info_def.full_shape.extend(part.full_shape)
        definition.save_slice_info_def.var_offset.extend(part.starts)
        definition.save_slice_info_def.var_shape.extend(part.lengths)
    return bytes(definition.SerializeToString(deterministic=True))

"""Give lookup tables of TensorFlow 1.0 to 1.2 the handles that tables have had since: resources.

An operation such as HashTable hands its table on as a reference, which no function takes, so that a signature
could not be computed again after an update. HashTableV2 makes the same table, in the same kernel with the
same attributes, and hands it on as a resource. (Source: tensorflow/core/ops/lookup_ops.cc and
core/kernels/lookup_table_op.cc.)
"""

from __future__ import annotations

from exporter.graph.nodes import GraphIndex, closure
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_MAKERS = frozenset({"HashTable", "MutableHashTable", "MutableHashTableOfTensors"})
_USERS = frozenset(
    {
        "InitializeTable",
        "InitializeTableFromTextFile",
        "LookupTableExport",
        "LookupTableFind",
        "LookupTableImport",
        "LookupTableInsert",
        "LookupTableSize",
    }
)
_HANDING_ON = {
    f"Ref{name}": name for name in ("Enter", "Exit", "Identity", "Merge", "NextIteration", "Switch")
}


def use_resource_tables(meta_graph: Proto, index: GraphIndex) -> bool:
    """Change old tables and all that takes their handles, in place; true if there were some.

    A graph in which anything else takes such a handle stays as it is.
    """
    tables = [name for name, node in index.nodes.items() if node.op in _MAKERS]
    found = [index.nodes[name] for name in closure(tables, lambda name: _takers(index, name))]
    if any(node.op not in _MAKERS | _USERS | _HANDING_ON.keys() for node in found):
        return False
    for node in found:
        if node.op not in _USERS:
            node.attr.pop(
                "_output_shapes", None
            )  # a reference is a vector of two strings, a resource a scalar
        if node.op in _HANDING_ON:
            node.op = _HANDING_ON[node.op]
            node.attr["T"].type = int(DType.RESOURCE)
        else:
            node.op = f"{node.op}V2"
    ops = meta_graph.meta_info_def.stripped_op_list.op
    ops.extend([_second_form(op) for op in ops if op.name in _MAKERS | _USERS])
    return bool(found)


def _takers(index: GraphIndex, name: str) -> list[str]:
    """The nodes that take the handle of the table that a node makes or hands on."""
    if index.nodes[name].op in _USERS:
        return []
    return [reader for reader, _ in index.consumers[name]]


def _second_form(op: Proto) -> Proto:
    """The OpDef with resources in the place of references."""
    second = type(op)()
    second.CopyFrom(op)
    second.name = f"{op.name}V2"
    for argument in (*second.input_arg, *second.output_arg):
        if argument.is_ref:
            argument.is_ref = False
            argument.type = int(DType.RESOURCE)
    return second

"""Find the operations of a graph that write to a variable, and whether they name the rows they write.

A variable is followed from its handle (or, for a reference variable, its reference) to every consumer:

    row writes      (Resource)SparseApply*, (Resource)Scatter{Update,Add,Sub,Mul,Div,Min,Max} with `indices`
    into
                    the first dimension, and (Resource)ScatterNd*, whose last dimension of indices begins
                    with it
    reads           known by name
    not counted     the initializer, assignments of what RestoreV2 gives, and what a table by keys does with
                    its own rows, as its index tells of those
    whole writes    every other operation, known or not, also a function or loop body that gets the handle,
    and
                    row writes inside one

so that whatever is not understood is a whole write, and costs a comparison instead of correctness.
Nothing here imports TensorFlow: operations are taken as they come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from exporter.tables.trainable_table import UPKEEP

Operation = Any
Tensor = Any
Variable = Any

_ROW_WRITE = re.compile(r"(Resource)?(SparseApply\w+|Scatter(Update|Add|Sub|Mul|Div|Min|Max))")
_ROW_WRITE_ND = re.compile(r"(Resource)?ScatterNd(Update|Add|Sub|Min|Max)")
_READS = {
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "IsVariableInitialized",
    "VariableShape",
    "DisableCopyOnRead",
    "DestroyResourceOp",
}
_GATHERS = {"ResourceGather", "ResourceGatherNd", "Gather", "GatherV2", "GatherNd"}
_SAME = {"Identity", "Switch", "Enter", "RefIdentity", "RefSwitch", "RefEnter"}
_RESTORES = {"RestoreV2", "Restore", "RestoreSlice"}
_UNCHANGING = {"Identity", "Reshape"}


class RowWrite(Struct, frozen=True):
    """An operation that writes rows `indices` (any shape; with `is_nd`, the first of each last dimension)."""

    op: Operation
    indices: Tensor
    is_nd: bool


class VariableUse(Struct, frozen=True):
    """How a graph uses a variable. `whole_writes` are the types of operations that may move any row."""

    variable: Variable
    row_writes: tuple[RowWrite, ...]
    whole_writes: tuple[str, ...]
    is_gathered: bool


def variable_use(variable: Variable) -> VariableUse:
    """How the graph that `variable` (a resource or a reference variable) was made in uses it."""
    rows: list[RowWrite] = []
    whole: list[str] = []
    is_gathered = False
    for op, is_reference in _consumers(variable):
        if op is variable.initializer or _is_restore(op) or UPKEEP in op.node_def.attr:
            continue
        if not is_reference or op.type in _READS:
            is_gathered |= any(reader.type in _GATHERS for reader in (op, *_readers(op)))
        elif write := _row_write(op):
            rows.append(write)
        else:
            whole.append(op.type)
    return VariableUse(variable, tuple(rows), tuple(whole), is_gathered)


def is_resource(variable: Variable) -> bool:
    """False for a reference variable."""
    return str(variable.op.type) == "VarHandleOp"


def takes_reference(op: Operation, index: int) -> bool:
    """True if input `index` lets the operation write to a variable: a handle, or a reference as such."""
    if op.inputs[index].dtype.base_dtype.name == "resource":
        return True
    position = 0
    for argument in op.op_def.input_arg:
        if argument.number_attr:
            position += int(op.get_attr(argument.number_attr))
        elif argument.type_list_attr:
            position += len(op.get_attr(argument.type_list_attr))
        else:
            position += 1
        if index < position:
            return bool(argument.is_ref)
    return False


def _consumers(variable: Variable) -> Iterator[tuple[Operation, bool]]:
    """Every operation that takes the variable, and whether it could write to it, each once."""
    frontier = [variable.handle if is_resource(variable) else variable.op.outputs[0]]
    seen: set[Operation] = set()
    while frontier:
        tensor = frontier.pop()
        for op in tensor.consumers():
            if op in seen:
                continue
            seen.add(op)
            positions = [index for index, taken in enumerate(op.inputs) if taken is tensor]
            is_reference = any(takes_reference(op, index) for index in positions)
            if is_reference:
                frontier += [output for output in op.outputs if _passes_on(output, tensor)]
            if not (is_reference and op.type in _SAME):
                yield op, is_reference and not _only_read_by_functions(op, positions)


def _passes_on(output: Tensor, reference: Tensor) -> bool:
    """True if `output` is the same variable again."""
    if reference.dtype.base_dtype.name == "resource":
        return output.op.type in _SAME and bool(output.dtype.base_dtype.name == "resource")
    return bool(output.dtype._is_ref_dtype)


def _only_read_by_functions(op: Operation, positions: list[int]) -> bool:
    """True if `op` calls functions (it is a call, condition or loop) that only read these inputs."""
    names = _called(op.node_def.attr.values())
    return bool(names) and all(
        _only_reads(op.graph, name, [position - len(op.inputs) for position in positions]) for name in names
    )


def _only_reads(graph: Any, name: str, positions: list[int]) -> bool:
    """`positions` count from the end: a condition's first input is not its functions'."""
    function = graph._get_function(name)
    if function is None:
        return False
    definition = function.cached_definition
    arguments = [argument.name for argument in definition.signature.input_arg]
    taken = {arguments[position] for position in positions}
    for node in definition.node_def:
        inputs = [given for given in node.input if not given.startswith("^")]
        found = [index - len(inputs) for index, given in enumerate(inputs) if given in taken]
        names = _called(node.attr.values()) if found else []
        if found and node.op not in _READS and not names:
            return False
        if not all(_only_reads(graph, called, found) for called in names):
            return False
    return True


def _called(attributes: Iterable[Any]) -> list[str]:
    called = [function for value in attributes for function in (value.func, *value.list.func)]
    return [function.name for function in called if function.name]


def consumers_of(op: Operation) -> list[Operation]:
    """Every operation that runs after `op` because of a value or a control edge."""
    return [reader for output in op.outputs for reader in output.consumers()] + list(op._control_outputs)


def _row_write(op: Operation) -> RowWrite | None:
    if any(node._get_control_flow_context() is not None for node in (op, *consumers_of(op))):
        return None
    is_nd = bool(_ROW_WRITE_ND.fullmatch(op.type))
    if not is_nd and not _ROW_WRITE.fullmatch(op.type):
        return None
    names = [argument.name for argument in op.op_def.input_arg]
    return RowWrite(op, op.inputs[names.index("indices")], is_nd)


def _readers(op: Operation) -> Iterator[Operation]:
    """What takes a value that was read whole."""
    if op.type in ("Identity", "ReadVariableOp"):
        for output in op.outputs:
            yield from output.consumers()


def _is_restore(op: Operation) -> bool:
    """True for an assignment of a value that comes from a checkpoint."""
    if op.type not in ("Assign", "AssignVariableOp"):
        return False
    value = op.inputs[1].op
    while value.type in _UNCHANGING:
        value = value.inputs[0].op
    return value.type in _RESTORES

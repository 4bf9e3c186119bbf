"""Plan how to find the changes of each variable of a training graph, from the operations that write to it.

A variable is followed from its handle (or, for a reference variable, its reference) to every consumer:

    row writes      (Resource)SparseApply*, (Resource)Scatter{Update,Add,Sub,Mul,Div,Min,Max}, whose `indices`
                    are into the first dimension, and (Resource)ScatterNd*, whose indices begin with it
    reads           operations that are known by name
    not counted     the initializer, assignments of what RestoreV2 gives, and the upkeep of a table by keys,
                    whose index notes the rows concerned
    whole writes    every other operation, known or not, including functions and loop bodies that get the
                    handle, and row writes inside one

So an operation that is not understood counts as a whole write, and costs a comparison instead of correctness.
Nothing here imports TensorFlow.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.tables.trainable_table import UPKEEP
from exporter.wire.dtypes import DType

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
    """How a graph uses a variable. `whole_writes` are the types of operations that may change any row."""

    variable: Variable
    row_writes: tuple[RowWrite, ...]
    whole_writes: tuple[str, ...]
    is_gathered: bool


def variable_use(variable: Variable) -> VariableUse:
    """How its graph uses `variable`, a resource or a reference variable."""
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
    """True if the operation could write to a variable by input `index`: it is a handle, or a reference."""
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
    """True if `output` stands for the same variable as `reference`."""
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
    """True if a function only reads its arguments at `positions`.

    These count from the end, because a condition has an input before those that it passes to its functions.
    """
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
    """Every operation that waits for `op`, because of a value or a control edge."""
    return [reader for output in op.outputs for reader in output.consumers()] + list(op._control_outputs)


def _row_write(op: Operation) -> RowWrite | None:
    # A TF1 condition or loop: no operation outside of it can be ordered after one that may not run.
    if any(node._get_control_flow_context() is not None for node in (op, *consumers_of(op))):
        return None
    is_nd = bool(_ROW_WRITE_ND.fullmatch(op.type))
    if not is_nd and not _ROW_WRITE.fullmatch(op.type):
        return None
    names = [argument.name for argument in op.op_def.input_arg]
    return RowWrite(op, op.inputs[names.index("indices")], is_nd)


def _readers(op: Operation) -> Iterator[Operation]:
    """The operations that take a value that was read whole."""
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


class TrackingMode(Enum):
    """How the changes of a variable are found.

    `TOUCHED`: every write names its rows, which are recorded. `COMPARED`: the graph looks up rows, but some
    write may change any of them, so all are compared with those written last. `WHOLE`: all of it is written
    if its digest changed. `FIXED`: no operation of the graph writes to it after its initializer.
    """

    TOUCHED = "touched rows"
    COMPARED = "compared rows"
    WHOLE = "digest"
    FIXED = "nothing, as no operation writes them"


class VariablePart(Struct, frozen=True):
    """A variable of the graph: the box of `shape` at `starts` of a variable as checkpoints name it."""

    variable: Variable
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    row_writes: tuple[RowWrite, ...]

    @property
    def rows(self) -> int:
        """The number of its rows; a scalar has one."""
        return self.shape[0] if self.shape else 1

    @property
    def offset(self) -> int:
        """Its first row's number in the whole variable."""
        return self.starts[0] if self.starts else 0


class VariableTracking(Struct, frozen=True):
    """A variable as checkpoints name it, and how its changes are found.

    `whole_writes` are the types of operations because of which it is not `TOUCHED`. With `is_keyed` it holds
    the rows of the table by keys called `name`.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[VariablePart, ...]
    mode: TrackingMode
    whole_writes: tuple[str, ...]
    is_keyed: bool = False

    @property
    def bytes_(self) -> int:
        """The size of the whole variable in bytes."""
        return math.prod(self.shape) * (self.dtype.itemsize or 0)


def plan_tracking(
    variables: Iterable[Variable], tables: Mapping[str, Variable] = MappingProxyType({})
) -> tuple[VariableTracking, ...]:
    """How to find the changes of these variables of one graph, sorted by their names in checkpoints.

    `tables` has the variable of the rows of each table by keys, by the table's name.

    Raises:
        UsageError: a variable has no fixed shape, or holds strings.
    """
    groups: dict[str, list[VariableUse]] = defaultdict(list)
    for variable in variables:
        slice_info = variable._get_save_slice_info()
        groups[slice_info.full_name if slice_info else variable.op.name].append(variable_use(variable))
    shapes = {name: _full_shape(uses[0].variable) for name, uses in groups.items()}
    keyed = {name: variable_use(rows) for name, rows in tables.items()}
    used = [*(use for uses in groups.values() for use in uses), *keyed.values()]
    gathered = {_shape(use.variable) for use in used if use.is_gathered or use.row_writes}
    found = [_tracked(name, shapes[name], uses, gathered) for name, uses in groups.items()]
    found += [_keyed(name, use) for name, use in keyed.items()]
    return tuple(sorted(found, key=lambda entry: entry.name))


def tracking_digest(tracked: Iterable[VariableTracking]) -> int:
    """An int64 that two graphs share if the changes of the same variables are found in the same way."""
    plan = [(entry.name, entry.shape, entry.dtype.label, entry.mode.name) for entry in tracked]
    return int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:8], "little", signed=True)


def _tracked(
    name: str, shape: tuple[int, ...], uses: list[VariableUse], tables: set[tuple[int, ...]]
) -> VariableTracking:
    parts = tuple(sorted(map(_part, uses), key=lambda part: part.starts))
    if len(parts) == 1 and parts[0].shape != shape:
        # A slot of one part of a table: savers declare it with the whole table's shape, under a name of its
        # own, but write this part alone.
        shape, parts = parts[0].shape, (replace(parts[0], starts=(0,) * len(shape)),)
    whole_writes = tuple(sorted({kind for use in uses for kind in use.whole_writes}))
    is_by_rows = bool(shape) and all(part.shape[1:] == shape[1:] for part in parts)
    if not whole_writes and not any(use.row_writes for use in uses):
        mode = TrackingMode.FIXED
    elif is_by_rows and not whole_writes:
        mode = TrackingMode.TOUCHED
    # By shape, because slots and moving averages of a table are looked up nowhere themselves.
    elif is_by_rows and any(part.shape in tables for part in parts):
        mode = TrackingMode.COMPARED
    else:
        mode = TrackingMode.WHOLE
    return VariableTracking(name, _dtype(name, uses[0].variable), shape, parts, mode, whole_writes)


def _keyed(name: str, use: VariableUse) -> VariableTracking:
    """A table by keys is never `FIXED`: even if no gradient writes its rows, keys come and go."""
    found = _tracked(name, _shape(use.variable), [use], {_shape(use.variable)})
    mode = TrackingMode.TOUCHED if found.mode is TrackingMode.FIXED else found.mode
    return replace(found, mode=mode, is_keyed=True)


def _part(use: VariableUse) -> VariablePart:
    shape = _shape(use.variable)
    slice_info = use.variable._get_save_slice_info()
    starts = tuple(slice_info.var_offset) if slice_info else (0,) * len(shape)
    return VariablePart(use.variable, shape, starts, use.row_writes)


def _full_shape(variable: Variable) -> tuple[int, ...]:
    slice_info = variable._get_save_slice_info()
    return tuple(slice_info.full_shape) if slice_info else _shape(variable)


def _shape(variable: Variable) -> tuple[int, ...]:
    if not variable.shape.is_fully_defined():
        raise UsageError(
            f"increments cannot hold {variable.op.name!r}: its shape is {variable.shape}",
            hint="give the variable a fixed shape (validate_shape=True)",
        )
    return tuple(variable.shape.as_list())


def _dtype(name: str, variable: Variable) -> DType:
    dtype = DType(variable.dtype.base_dtype.as_datatype_enum)
    if dtype.itemsize is None:
        raise UsageError(
            f"increments cannot hold {name!r}: it is a {dtype.label} variable",
            hint="take it out of the global variables: collections=[LOCAL_VARIABLES]",
        )
    return dtype

"""The trainer's side of increments, in one file: for TensorFlow from 1.12 on, and Python from 3.6 on.

    hook = IncrementHook(ckpt_dir, save_increment_secs=10, is_chief=is_chief)
    with tf.train.MonitoredTrainingSession(..., checkpoint_dir=ckpt_dir, hooks=[hook]) as session:

It needs the standard library, numpy and the trainer's TensorFlow, and nothing else of its package: a copy
beside a trainer works as well. `exporter.training` builds on it.

- `IncrementHook` serves MonitoredTrainingSession and Estimators; its methods serve any loop over a session.
- `IncrementCallback` serves `fit` of Keras 2 and 3.

An operation that writes rows names them, and they are recorded. All other changes are found by comparison
with the values that were written last; a log message says so, with the reason. The files are described in
`exporter.increments`.

# Tracking (`plan_tracking`)

A variable is followed from its handle (or, for a reference variable, its reference) to every consumer:

    row writes      (Resource)SparseApply*, (Resource)Scatter{Update,Add,Sub,Mul,Div,Min,Max}, whose `indices`
                    are into the first dimension, and (Resource)ScatterNd*, whose indices begin with it
    reads           operations that are known by name
    not counted     the initializer, assignments of RestoreV2's results, and the upkeep of a table by keys,
                    whose index records the rows concerned
    whole writes    every other operation, known or not, including functions and loop bodies that get the
                    handle, and row writes inside one

So an operation that is not understood counts as a whole write, and costs a comparison instead of correctness.

# Recording the rows that workers write (`record`)

Rows are recorded where the variables are, so that no update is lost. Beside each table (and the slots that
the same operations write) there is a variable `touched`, uint8 [rows], on the same parameter server. Every
worker's graph is extended: after an operation W that writes rows, an operation M sets their flags to 1. The
chief collects:

    C1  rows = where(touched)      C2  touched[rows] = 0      R  values = table[rows]

Control edges order C1 -> C2, and R is a later call. *Claim*: after the last collection, the collected values
applied in order give the table, except for rows that are flagged, or about to be.

*Proof.* Take the last write W of row r, and its M. If M comes before C1 of some collection and after C2 of
the previous one, r is in that collection's rows, and R reads r after W: it collects the newest value. If M
falls between C1 and C2, there are two cases. Either r was among the rows of C1: C2 clears the flag, perhaps
M's, but R comes after C2, so after M, so after W, and collects the newest value. Or r was not among them: C2
leaves its flag, which stays for the next collection. A value that R reads half-written belongs to a W whose M
is still to come. Setting and clearing a flag store one byte, which leaves its neighbours alone.

*Death of a worker.* M needs W, the indices that W needed, and a constant, which are all on the parameter
server when W runs. TensorFlow's executor continues with the successors of an operation that succeeded,
whatever fails elsewhere in the step (cancellation strikes only at receives, calls and loop conditions). So W
without M means that the server itself died, and its table with it. *Death of the chief or of a server*: the
chief's next session restores every variable from files, so older flags are superfluous and do no harm.
*Failure to publish*: collected rows stay with the chief until an increment that holds them is durable.

M runs because every consumer of W waits for it; if W itself is fetched, the hook fetches M, too. A W without
consumers is also flagged before it runs, in case that a caller runs it in a session without the hook.

# Publishing (`Publisher`)

*Steps.* An increment's `to` is the global step, read before anything is collected. A worker adds to the step
after its writes are done and recorded, so the increment holds every write of a step up to `to`. An increment
never has the step of a full checkpoint that this session wrote before it: a reader that has the full
checkpoint would skip the increment, though it may hold newer rows. It waits for the next step instead. At the
end of a session no step follows: there the last increment takes its values from the full checkpoint and
equals it bit for bit.

*Runs, sessions, parents.* A run is a chain of states; an increment names its parent, the increment or full
checkpoint that it follows. Every session has an id and a generation of its own, also if it continues a run:
changes that another session made after the state that this one restored are neither in its variables nor in
its increments.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections import defaultdict
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np

__all__ = ["IncrementCallback", "IncrementHook", "NotPublished", "Refused"]

Operation = Any
Tensor = Any
Variable = Any
Session = Any
Array = Any
Document = Dict[str, Any]
"""The JSON object of a file in the increments directory."""

log = logging.getLogger("exporter.training")

SCOPE = "increments"
"""The prefix of the names of everything that is added to a graph; an export leaves these nodes out."""

CHUNK_BYTES = 32 << 20
"""The largest number of bytes that one call of a session transfers, unless a single row is larger."""

READY_SECONDS = 600.0
"""The longest time that a worker waits until the chief has initialized the recording."""

_POLL_SECONDS = 0.1
_UNRECORDED_STEPS = 64
"""The number of steps that may be missing without an error. Steps count as recorded before they are in the
global step, and those of a worker that died in between never get there.
"""

_FAILURES_IN_A_ROW = 3  # after these the training fails; until then collected rows are kept in memory
_MOST_AHEAD_S = 300.0
"""The largest difference between clocks, in seconds. A later event time is refused: it would stay the newest
event until then, and hide every lag.
"""

NONE = np.empty(0, np.int64)
"""No rows."""


class Refused(Exception):
    """Increments cannot be written in this way: `message` says why, `hint` how to proceed."""

    def __init__(self, message: str, cause: str = "", hint: str = "") -> None:
        super().__init__("\n".join(filter(None, (message, cause, hint))))
        self.message, self.cause, self.hint = message, cause, hint


class NotPublished(Exception):
    """An increment could not be written; readers see nothing of it."""


def v1() -> Any:
    """Import TensorFlow and return the module with the names of TensorFlow 1: `tf.compat.v1`, or `tf`."""
    import tensorflow as tf

    return getattr(getattr(tf, "compat", None), "v1", tf)


def _resource_ops() -> Any:
    from tensorflow.python.ops import gen_resource_variable_ops

    return gen_resource_variable_ops  # `tf.raw_ops` came with 1.14


# --- tracking: which operation writes which variable --------------------------------------------------------

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
_VARIABLES = {"VarHandleOp", "VariableV2", "Variable"}
UPKEEP = "_table_upkeep"
"""The attribute of operations by which a table by keys (`exporter.tables`) itself writes rows."""


class RowWrite(NamedTuple):
    """An operation that writes rows `indices` (any shape; with `is_nd`, the first of each last dimension)."""

    op: Operation
    indices: Tensor
    is_nd: bool


class VariableUse(NamedTuple):
    """The uses of a variable in a graph.

    `whole_writes` are the types of operations that may change any row. `is_gathered` is True if an operation
    looks up rows by number.
    """

    variable: Variable
    row_writes: Tuple[RowWrite, ...]
    whole_writes: Tuple[str, ...]
    is_gathered: bool


def variable_use(variable: Variable) -> VariableUse:
    """Return the uses of `variable`, a resource or a reference variable, in its graph."""
    rows: List[RowWrite] = []
    whole: List[str] = []
    is_gathered = False
    for op, is_reference in _consumers(variable):
        if op is variable.initializer or _is_restore(op) or UPKEEP in op.node_def.attr:
            continue
        write = _row_write(op) if is_reference else None
        if not is_reference or op.type in _READS:
            is_gathered |= any(reader.type in _GATHERS for reader in [op, *list(_readers(op))])
        elif write is not None:
            rows.append(write)
        else:
            whole.append(op.type)
    return VariableUse(variable, tuple(rows), tuple(whole), is_gathered)


def is_resource(variable: Variable) -> bool:
    """True for a resource variable; False for a reference variable."""
    return str(variable.op.type) == "VarHandleOp"


def _takes_reference(op: Operation, index: int) -> bool:
    """True if input `index` of the operation is a handle or a reference, by which it could write."""
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


def _consumers(variable: Variable) -> Iterator[Tuple[Operation, bool]]:
    """Yield each operation that uses the variable, once, and whether it could write to it.

    Operations that only pass the variable on are left out; their consumers are followed.
    """
    frontier = [variable.handle if is_resource(variable) else variable.op.outputs[0]]
    seen: "set[Operation]" = set()
    while frontier:
        tensor = frontier.pop()
        for op in tensor.consumers():
            if op in seen:
                continue
            seen.add(op)
            positions = [index for index, taken in enumerate(op.inputs) if taken is tensor]
            is_reference = any(_takes_reference(op, index) for index in positions)
            if is_reference:
                frontier += [output for output in op.outputs if _refers_to_same(output, tensor)]
            if not (is_reference and op.type in _SAME):
                yield op, is_reference and not _only_read_by_functions(op, positions)


def _refers_to_same(output: Tensor, reference: Tensor) -> bool:
    """True if `output` refers to the same variable as `reference`."""
    if reference.dtype.base_dtype.name == "resource":
        return output.op.type in _SAME and bool(output.dtype.base_dtype.name == "resource")
    return bool(output.dtype._is_ref_dtype)


def _only_read_by_functions(op: Operation, positions: List[int]) -> bool:
    """True if `op` is a call, condition or loop whose functions only read its inputs at `positions`.

    False if it calls none.
    """
    names = _called(op.node_def.attr.values())
    return bool(names) and all(
        _only_reads(op.graph, name, [position - len(op.inputs) for position in positions]) for name in names
    )


def _only_reads(graph: Any, name: str, positions: List[int]) -> bool:
    """True if the function `name` of a graph only reads its arguments at `positions`.

    False if it is not known. Positions are negative: they count from the end, because a condition has an
    input before those that it passes to its functions.
    """
    function = graph._get_function(name)
    if function is None:
        return False
    definition = getattr(function, "cached_definition", None) or function.definition
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


def _called(attributes: Iterable[Any]) -> List[str]:
    called = [function for value in attributes for function in [value.func, *list(value.list.func)]]
    return [function.name for function in called if function.name]


def _consumers_of(op: Operation) -> List[Operation]:
    """Return every operation that waits for `op`, because of a value or a control edge."""
    return [reader for output in op.outputs for reader in output.consumers()] + list(op._control_outputs)


def _row_write(op: Operation) -> Optional[RowWrite]:
    # A TF1 condition or loop: no operation outside of it can be ordered after one that may not run.
    if any(node._get_control_flow_context() is not None for node in [op, *_consumers_of(op)]):
        return None
    is_nd = bool(_ROW_WRITE_ND.fullmatch(op.type))
    if not is_nd and not _ROW_WRITE.fullmatch(op.type):
        return None
    names = [argument.name for argument in op.op_def.input_arg]
    return RowWrite(op, op.inputs[names.index("indices")], is_nd)


def _readers(op: Operation) -> Iterator[Operation]:
    """Yield the operations that use the value, if `op` reads a variable whole; otherwise nothing."""
    if op.type in ("Identity", "ReadVariableOp"):
        for output in op.outputs:
            for reader in output.consumers():
                yield reader


def _is_restore(op: Operation) -> bool:
    """True for an assignment of a value that comes from a checkpoint."""
    if op.type not in ("Assign", "AssignVariableOp"):
        return False
    value = op.inputs[1].op
    while value.type in _UNCHANGING:
        value = value.inputs[0].op
    return value.type in _RESTORES


class TrackingMode(Enum):
    """The way in which the changes of a variable are found.

    `TOUCHED`: every write names its rows, which are recorded. `COMPARED`: the graph looks up rows, but some
    write may change any of them, so all are compared with those written last. `WHOLE`: all of it is written
    if its digest changed. `FIXED`: no operation of the graph writes to it after its initializer.
    """

    TOUCHED = "touched rows"
    COMPARED = "compared rows"
    WHOLE = "digest"
    FIXED = "nothing, as no operation writes them"


class VariablePart(NamedTuple):
    """A variable of the graph: the box of `shape` at `starts` of a variable with a name in checkpoints.

    `spec` is the box in RestoreV2's notation; "" is all of the variable.
    """

    variable: Variable
    shape: Tuple[int, ...]
    starts: Tuple[int, ...]
    row_writes: Tuple[RowWrite, ...] = ()
    spec: str = ""

    @property
    def rows(self) -> int:
        """The number of the part's rows; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def offset(self) -> int:
        """The number of the part's first row in the whole variable; 0 for a scalar."""
        return self.starts[0] if self.starts else 0


class VariableTracking(NamedTuple):
    """A variable under its name in checkpoints, and how its changes are found.

    `dtype` is TensorFlow's name, `numpy` the type of its values. `whole_writes` are the types of operations
    that keep it from being `TOUCHED`. With `is_keyed` it is the rows of the table by keys called `name`.
    """

    name: str
    dtype: str
    numpy: Any
    shape: Tuple[int, ...]
    parts: Tuple[VariablePart, ...]
    mode: TrackingMode
    whole_writes: Tuple[str, ...] = ()
    is_keyed: bool = False

    @property
    def bytes_(self) -> int:
        """The size of the whole variable in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * int(np.dtype(self.numpy).itemsize)


def plan_tracking(
    variables: Iterable[Variable], tables: Optional[Dict[str, Variable]] = None
) -> Tuple[VariableTracking, ...]:
    """Return the tracking of these variables of one graph, sorted by their names in checkpoints.

    `tables` has the variable of the rows of each table by keys, by the table's name. Variables of kinds that
    are not TensorFlow's own are left out, with a warning in the log.

    Raises:
        Refused: a variable has no fixed shape, or holds strings.
    """
    groups: Dict[str, List[VariableUse]] = defaultdict(list)
    for variable in variables:
        if variable.op.type not in _VARIABLES:  # DeepRec's embedding variables: it writes increments of them
            log.warning("increments: %s is in full checkpoints only (%s)", variable.name, variable.op.type)
            continue
        slice_info = variable._get_save_slice_info()
        groups[slice_info.full_name if slice_info else variable.op.name].append(variable_use(variable))
    keyed = {name: variable_use(rows) for name, rows in (tables or {}).items()}
    used = [use for uses in groups.values() for use in uses] + list(keyed.values())
    gathered = {_shape(use.variable) for use in used if use.is_gathered or use.row_writes}
    found = [_tracked(name, uses, gathered) for name, uses in groups.items()]
    found += [_keyed(name, use) for name, use in keyed.items()]
    return tuple(sorted(found, key=lambda entry: entry.name))


def tracking_digest(tracked: Iterable[VariableTracking]) -> int:
    """Return an int64 that is equal for two graphs only if they find changes of variables in the same way."""
    plan = [(entry.name, entry.shape, entry.dtype, entry.mode.name) for entry in tracked]
    return int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:8], "little", signed=True)


def _tracked(name: str, uses: List[VariableUse], tables: "set[Tuple[int, ...]]") -> VariableTracking:
    shape = _full_shape(uses[0].variable)
    parts = tuple(sorted(map(_part, uses), key=lambda part: part.starts))
    if len(parts) == 1 and parts[0].shape != shape:
        # A slot of one part of a table: savers declare it with the whole table's shape, under a name of its
        # own, but write this part alone.
        shape, parts = parts[0].shape, (parts[0]._replace(starts=(0,) * len(shape)),)
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
    dtype = uses[0].variable.dtype.base_dtype
    if dtype.name == "string":
        raise Refused(
            f"increments cannot hold {name!r}: it is a string variable",
            hint="take it out of the global variables: collections=[LOCAL_VARIABLES]",
        )
    return VariableTracking(name, dtype.name, dtype.as_numpy_dtype, shape, parts, mode, whole_writes)


def _keyed(name: str, use: VariableUse) -> VariableTracking:
    """Return the tracking of the rows of the table by keys `name`: never `FIXED`.

    Even if no gradient writes its rows, keys come and go. Refused if the rows have no fixed shape, or hold
    strings.
    """
    found = _tracked(name, [use], {_shape(use.variable)})
    mode = TrackingMode.TOUCHED if found.mode is TrackingMode.FIXED else found.mode
    return found._replace(mode=mode, is_keyed=True)


def _part(use: VariableUse) -> VariablePart:
    shape = _shape(use.variable)
    slice_info = use.variable._get_save_slice_info()
    starts = tuple(slice_info.var_offset) if slice_info else (0,) * len(shape)
    is_slice = slice_info and tuple(slice_info.full_shape) != shape
    return VariablePart(use.variable, shape, starts, use.row_writes, slice_info.spec if is_slice else "")


def _full_shape(variable: Variable) -> Tuple[int, ...]:
    slice_info = variable._get_save_slice_info()
    return tuple(slice_info.full_shape) if slice_info else _shape(variable)


def _shape(variable: Variable) -> Tuple[int, ...]:
    if not variable.shape.is_fully_defined():
        raise Refused(
            f"increments cannot hold {variable.op.name!r}: its shape is {variable.shape}",
            hint="give the variable a fixed shape (validate_shape=True)",
        )
    return tuple(variable.shape.as_list())


# --- recording: flags of touched rows, beside the variables -------------------------------------------------


class RowGroup(NamedTuple):
    """Parts that the same operations write, with one set of flags.

    `touched` has the flags, uint8 [rows]. The tensor `collect` gives the flagged rows, int64 [n], and clears
    their flags.
    """

    parts: Tuple[VariablePart, ...]
    touched: Variable
    collect: Tensor


class Recording(NamedTuple):
    """The nodes that recording added to a graph.

    `marks` has the operation that flags the rows of a write, by the name of the writing operation. `steps`
    counts the steps that workers recorded, and `plan` holds the chief's `tracking_digest`; `recorded_steps`
    and `plan_of_chief` read them. `are_ready` has a bool for each of `variables`: it is initialized.
    """

    groups: Tuple[RowGroup, ...]
    marks: Dict[str, Operation]
    steps: Variable
    recorded_steps: Tensor
    plan: Variable
    plan_of_chief: Tensor
    tracking_digest: int
    are_ready: Tensor

    @property
    def variables(self) -> Tuple[Variable, ...]:
        """The variables of the recording. They are in no collection, so no saver or initializer sees them."""
        return (*tuple(group.touched for group in self.groups), self.steps, self.plan)


def record(tracked: Iterable[VariableTracking], global_step: Variable) -> Recording:
    """Add the recording of rows and steps to the current default graph, and return its nodes.

    Every worker's graph gets the same nodes. Operations that wait for a write of rows then wait until its
    rows are flagged, too. The new variables are not initialized.
    """
    tf, tracked = v1(), tuple(tracked)
    marks: Dict[str, Operation] = {}
    groups = tuple(_group(parts, marks) for parts in _parts_by_operation(tracked))
    steps = _count_steps(global_step)
    digest = tracking_digest(tracked)
    plan = _beside(global_step, SCOPE + "/plan", [], tf.int64, digest)
    variables = [group.touched for group in groups] + [steps, plan]
    with tf.name_scope(SCOPE + "/"):
        ready = [_resource_ops().var_is_initialized_op(variable.handle) for variable in variables]
        are_ready = tf.stack(ready, name="are_ready")
        return Recording(groups, marks, steps, steps.read_value(), plan, plan.read_value(), digest, are_ready)


def _parts_by_operation(tracked: Iterable[VariableTracking]) -> List[Tuple[VariablePart, ...]]:
    """Return the parts whose touched rows are recorded, grouped by the operations that write them.

    Parts are in one group if an operation writes both, or others connect them.
    """
    parts = [part for entry in tracked if entry.mode is TrackingMode.TOUCHED for part in entry.parts]
    leader = {id(part): id(part) for part in parts}

    def find(key: int) -> int:
        while leader[key] != key:
            key = leader[key]
        return key

    writers: Dict[Operation, int] = {}
    for part in parts:
        for write in part.row_writes:
            leader[find(id(part))] = find(writers.setdefault(write.op, id(part)))
    groups: Dict[int, List[VariablePart]] = defaultdict(list)
    for part in parts:
        groups[find(id(part))].append(part)
    return [tuple(group) for group in groups.values()]


def _group(parts: Tuple[VariablePart, ...], marks: Dict[str, Operation]) -> RowGroup:
    first = min(parts, key=lambda part: str(part.variable.op.name))
    name = f"{SCOPE}/touched/{first.variable.op.name}"
    touched = _beside(first.variable, name, [first.rows], v1().uint8)
    for write in {write.op: write for part in parts for write in part.row_writes}.values():
        _mark(touched, write, marks)
    return RowGroup(parts, touched, _collect(touched))


def _mark(touched: Variable, write: RowWrite, marks: Dict[str, Operation]) -> None:
    """Add operations that flag, in `touched`, the rows of `write` after it.

    The flagging operation is added to `marks`, under the name of the writing operation. All consumers of the
    write wait for it from then on; without consumers the rows are flagged before the write, too.
    """
    tf = v1()
    consumers = _consumers_of(write.op)
    with near(touched, SCOPE + "/mark/"):
        rows = write.indices[..., 0] if write.is_nd else write.indices
        one = tf.constant(1, tf.uint8)

        def mark() -> Operation:
            return _resource_ops().resource_scatter_update(touched.handle, rows, one)

        with tf.control_dependencies([write.op]):
            after = mark()
        marks[write.op.name] = after
        if not consumers:
            # No later operation can wait for the M: flag the rows before the write as well.
            write.op._add_control_input(mark())
    for consumer in consumers:
        consumer._add_control_input(after)


def _collect(touched: Variable) -> Tensor:
    tf = v1()
    with near(touched, SCOPE + "/collect/"):
        rows = tf.where(tf.not_equal(touched.read_value(), 0))[:, 0]
        # C1, C2, and only then the result: the proof at the top of the file needs this order.
        with tf.control_dependencies([rows]):
            clear = _resource_ops().resource_scatter_update(touched.handle, rows, tf.constant(0, tf.uint8))
        with tf.control_dependencies([clear]):
            return tf.identity(rows)


def _count_steps(global_step: Variable) -> Variable:
    """Return a new variable to which each recording worker adds its steps before it adds to the global step.

    Operations for that are added to the graph. A global step that grows faster than this variable reveals a
    worker that does not record.
    """
    tf = v1()
    steps = _beside(global_step, SCOPE + "/recorded_steps", [], tf.int64)
    for op in _additions(global_step):
        with near(steps, SCOPE + "/count/"):
            added = tf.cast(op.inputs[1], tf.int64)
            op._add_control_input(_resource_ops().assign_add_variable_op(steps.handle, added))
    return steps


def _additions(global_step: Variable) -> List[Operation]:
    tensor = global_step.handle if is_resource(global_step) else global_step.op.outputs[0]
    return [op for op in tensor.consumers() if op.type in ("AssignAdd", "AssignAddVariableOp")]


def counts_every_step(global_step: Variable) -> bool:
    """True if the graph changes the global step only by additions, so that recorded steps can be compared."""
    return set(variable_use(global_step).whole_writes) <= {"AssignAdd", "AssignAddVariableOp"}


@contextlib.contextmanager
def near(variable: Variable, scope: str) -> Iterator[None]:
    """Place new nodes of the block on the device of `variable`, without control inputs, named in `scope`."""
    place = variable.handle.op if is_resource(variable) else variable.op
    with v1().control_dependencies(None), place.graph.colocate_with(place, ignore_existing=True):
        with v1().name_scope(scope):
            yield


def _beside(variable: Variable, name: str, shape: List[int], dtype: Any, initial: int = 0) -> Variable:
    """Return a new variable on the same device as `variable`, in no collection, with initial value `initial`.

    It is not initialized.
    """
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    tf = v1()
    with near(variable, ""):
        return ResourceVariable(
            lambda: tf.fill(shape, tf.constant(initial, dtype)),
            trainable=False,
            collections=[],
            name=name,
            dtype=dtype,
        )


# --- values: of a session, and of a full checkpoint ---------------------------------------------------------


class Source:
    """The base of classes that read the values of variables."""

    def read(self, tracked: VariableTracking, part: VariablePart, rows: Any) -> Iterator[Array]:
        """Yield the values of rows of one part in pieces of whole rows; `rows` None means all, in order.

        Row numbers, int64, count within the part. A scalar is one piece.
        """
        raise NotImplementedError

    def prepare(self, wanted: List[Tuple[VariableTracking, Any]]) -> None:
        """Read small variables ahead, in one call; this class does nothing.

        `wanted` has variables, each with ascending rows, which will be read once, or None for all.
        """

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """Yield the values of rows `ids` of a variable, in pieces, in the parts' order.

        `ids` ascend and count through the whole variable, which has parts of whole rows.
        """
        for part in tracked.parts:
            wanted = inside(part, ids) - part.offset
            if len(wanted):
                yield from self.read(tracked, part, wanted)

    def all_rows(self, tracked: VariableTracking) -> Iterator[Tuple[int, Array]]:
        """Yield (number of the first row, values) for pieces of all rows of a variable.

        The variable has parts of whole rows; the pieces are in the parts' order.
        """
        for part in tracked.parts:
            start = part.offset
            for values in self.read(tracked, part, None):
                yield start, values
                start += len(values)

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[Tuple[VariableTracking, Array]]:
        """Yield each variable with its whole value, one after the other."""
        for entry in tracked:
            yield entry, joined(entry, [self._whole(entry, part) for part in entry.parts])

    def _whole(self, tracked: VariableTracking, part: VariablePart) -> Array:
        found = list(self.read(tracked, part, None))
        none = np.empty((0, *part.shape[1:]), tracked.numpy)
        return found[0] if len(found) == 1 else np.concatenate([none, *found])


class PartReader(NamedTuple):
    """The operations that read one variable of the graph, on its own device.

    `gathered` gives the values of the rows whose numbers, int64 [n], are fed to `ids`; `whole` gives all
    values. For a scalar both are its value.
    """

    ids: Tensor
    gathered: Tensor
    whole: Tensor


def reader_of(part: VariablePart) -> PartReader:
    """Add the operations that read a variable to the current default graph, and return them."""
    tf = v1()
    with near(part.variable, f"{SCOPE}/access/"):
        ids = tf.placeholder(tf.int64, [None])
        whole = part.variable.read_value()
        return PartReader(ids, tf.gather(part.variable, ids) if part.shape else whole, whole)


class SessionSource(Source):
    """The present values, read through a session; `readers` are by the id() of each part."""

    def __init__(self, session: Session, readers: Dict[int, PartReader]) -> None:
        self._session = session
        self._readers = readers
        self._ahead: Dict[int, Array] = {}

    def prepare(self, wanted: List[Tuple[VariableTracking, Any]]) -> None:
        """Read small variables ahead by one call of the session, for the same tensors each time.

        `wanted` has variables, each with ascending rows, which will be read once, or None for all. A session
        prepares a large graph again, which takes half a second, for each new combination of tensors. So
        variables with too many rows for the call are part of it, too, with no rows.
        """
        sizes = np.array([e.bytes_ if ids is None else len(ids) * _row_bytes(e) for e, ids in wanted], int)
        order = np.argsort(sizes)
        fitting = set(order[np.cumsum(sizes[order]) <= CHUNK_BYTES].tolist())
        tensors, feeds = {}, {}
        for number, (entry, ids) in enumerate(wanted):
            for part in entry.parts:
                reader = self._readers[id(part)]
                if ids is not None:
                    feeds[reader.ids] = inside(part, ids) - part.offset if number in fitting else NONE
                if ids is not None or number in fitting:
                    tensors[number, id(part)] = reader.whole if ids is None else reader.gathered
        found = self._session.run(tensors, feeds) if tensors else {}
        self._ahead.update({part: values for (number, part), values in found.items() if number in fitting})

    def read(self, tracked: VariableTracking, part: VariablePart, rows: Any) -> Iterator[Array]:
        """Yield the values of rows of one part, or of all (None), by one call of the session for each piece.

        Values that `prepare` has read are yielded once without a call. TensorFlow's errors pass.
        """
        reader, ahead = self._readers[id(part)], self._ahead.pop(id(part), None)
        if ahead is not None or not part.shape:
            yield self._session.run(reader.whole) if ahead is None else ahead
            return
        wanted = np.arange(part.rows, dtype=np.int64) if rows is None else rows
        for piece in pieces(wanted, tracked):
            yield self._session.run(reader.gathered, {reader.ids: piece})


class CheckpointSource(Source):
    """The values of a full checkpoint; one part of a variable is in memory at a time."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix

    def read(self, tracked: VariableTracking, part: VariablePart, rows: Any) -> Iterator[Array]:
        """Yield the values of rows of one part, or of all (None), as one piece.

        TensorFlow's OpError, during the iteration, if it cannot be read.
        """
        value = restored(self._prefix, tracked.name, part.spec, tracked.dtype)
        yield value if rows is None else value[rows]


def pieces(rows: Array, tracked: VariableTracking) -> Iterator[Array]:
    """Yield the row numbers in pieces whose values have at most `CHUNK_BYTES`, or of one row."""
    step = max(1, CHUNK_BYTES // max(1, _row_bytes(tracked)))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _row_bytes(tracked: VariableTracking) -> int:
    return tracked.bytes_ // max(1, tracked.shape[0])


def inside(part: VariablePart, ids: Array) -> Array:
    """Return the rows of a part among `ids`, which are ascending rows of the whole variable, unchanged."""
    start, stop = np.searchsorted(ids, [part.offset, part.offset + part.rows])
    return ids[start:stop]


def joined(entry: VariableTracking, parts: List[Array]) -> Array:
    """Return a variable's whole value, given the values of its parts in their order."""
    if len(parts) == 1:
        return np.asarray(parts[0])
    whole = np.empty(entry.shape, entry.numpy)
    for part, value in zip(entry.parts, parts):
        whole[tuple(slice(start, start + size) for start, size in zip(part.starts, part.shape))] = value
    return whole


# --- tensor bundles, by TensorFlow's own operations ---------------------------------------------------------


def _bundle_session() -> Session:
    """Return a new session with a graph of its own, without the GPUs that the trainer uses."""
    tf = v1()
    return tf.Session(graph=tf.Graph(), config=tf.ConfigProto(device_count={"GPU": 0}))


def restored(prefix: Path, name: str, spec: str, dtype: str) -> Array:
    """Return the value of the tensor `name`, or of its slice `spec`, from a checkpoint; "" means all of it.

    `dtype` is TensorFlow's name of its type. TensorFlow's OpError if it cannot be read.
    """
    from tensorflow.python.ops import gen_io_ops

    with _bundle_session() as session, session.graph.as_default(), v1().device("/cpu:0"):
        (value,) = gen_io_ops.restore_v2(str(prefix), [name], [spec], [v1().as_dtype(dtype)])
        return session.run(value)


class Bundle:
    """A tensor bundle, written when the block ends: `with Bundle(prefix) as bundle: bundle.add(...)`.

    Nothing is written if the block raises, or no tensor was added. OSError if it cannot be written.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = str(prefix)
        self._tensors: List[Tuple[str, Array]] = []

    def __enter__(self) -> "Bundle":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._tensors:
            self._write()

    def add(self, key: str, value: Array) -> None:
        """Keep a tensor in memory, to be written when the block ends."""
        self._tensors.append((key, value))

    def add_rows(self, key: str, dtype: str, shape: List[int], pieces: Iterable[Array]) -> None:
        """Keep a tensor, given in at least one piece of whole rows, to be written when the block ends.

        `shape` is the whole tensor's; `dtype`, TensorFlow's name of its type, is for other writers.
        """
        found = list(pieces)
        self.add(key, found[0] if len(found) == 1 else np.concatenate(found).reshape(shape))

    def _write(self) -> None:
        from tensorflow.python.ops import gen_io_ops

        tf = v1()
        with _bundle_session() as session, session.graph.as_default(), tf.device("/cpu:0"):
            # Fed, not constants: a graph holds 2 GiB at most.
            fed = [tf.placeholder(tf.as_dtype(value.dtype), value.shape) for _, value in self._tensors]
            names = [key for key, _ in self._tensors]
            save = gen_io_ops.save_v2(self._prefix, names, [""] * len(names), fed)
            try:
                session.run(save, dict(zip(fed, [value for _, value in self._tensors])))
            except tf.errors.OpError as error:  # no space left, or no permission
                raise OSError(error.message) from error


# --- collecting what changed --------------------------------------------------------------------------------


class Collector:
    """Collects the changes since the last call of `commit` or `forget`.

    `source` returns the present values, given a session; `tables` has an object with the changes of each
    table by keys, by name. Rows that were collected stay pending until `commit`. A compared variable is
    compared with the values that were written last; if there are none, all of it counts as changed.
    """

    def __init__(
        self,
        tracked: Iterable[VariableTracking],
        groups: Iterable[RowGroup] = (),
        source: Optional[Callable[[Session], Source]] = None,
        tables: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.tracked = tuple(tracked)
        self.source = source or self._reading()
        self.tables = tables or {}
        self._groups = tuple(groups)
        self._pending: Dict[int, Array] = {}
        self._written: Dict[str, Array] = {}
        self._digests: Dict[str, bytes] = {}
        self._new_digests: Dict[str, bytes] = {}
        self.forget()

    def _reading(self) -> Callable[[Session], Source]:
        parts = [part for e in self.tracked if e.mode is not TrackingMode.FIXED for part in e.parts]
        readers = {id(part): reader_of(part) for part in parts}
        return lambda session: SessionSource(session, readers)

    def forget(self) -> None:
        """Start counting changes from a new state: pending rows and keys are dropped.

        Every compared variable counts as changed.
        """
        self._take_none()
        self._written.clear()
        self._digests.clear()

    def remember(self, session: Session) -> None:
        """Read all compared variables; count their changes from the present values on.

        Variables whose digests are compared still count as changed. Only for a process that alone writes the
        variables; otherwise others may have written some of them already.
        """
        for entry in self.tracked:
            if entry.mode is TrackingMode.COMPARED:
                self._moved(self.source(session), entry)

    def collect(self, session: Session) -> None:
        """Read and clear the touched rows of every group, then the records of tables by keys.

        The rows and keys that were read stay pending here until `commit` or `forget`.
        """
        # The proofs depend on the order of these calls, and on values being read after them.
        if self._groups:
            for index, rows in enumerate(session.run([group.collect for group in self._groups])):
                self._pending[index] = union(self._pending[index], rows)
        for table in self.tables.values():
            table.collect(session)

    def touch(self, name: str, ids: Array) -> None:
        """Count ascending rows `ids` of the variable `name` as touched.

        Does nothing unless the variable is tracked as `TOUCHED`.
        """
        for entry in self._by(TrackingMode.TOUCHED):
            for part in entry.parts if entry.name == name else ():
                for index in self._groups_of(part):
                    self._pending[index] = union(self._pending[index], inside(part, ids) - part.offset)

    @property
    def knows_more(self) -> bool:
        """True if there may be changes to write: rows or keys are pending, or a digest was recorded."""
        is_touched = any(len(rows) for rows in self._pending.values())
        return bool(self._digests) or is_touched or any(table.knows_more for table in self.tables.values())

    def write(self, writer: Any, source: Source) -> Document:
        """Write the changes into a bundle; return their entries for the increment's manifest, by kind.

        The kinds are "variables", sorted by name, and "tables"; each may be empty. Call `commit` once the
        changes are durable, `abandon` if they are lost. Errors of `writer` and `source` pass.
        """
        found: List[Optional[Document]] = []
        touched = [(entry, self._touched(entry)) for entry in self._by(TrackingMode.TOUCHED)]
        source.prepare(touched)
        for entry, ids in touched:
            found.append(_write_rows(writer, entry, ids, source.rows(entry, ids)))
        read_whole = self._by(TrackingMode.COMPARED) + self._by(TrackingMode.WHOLE)
        source.prepare([(entry, None) for entry in read_whole])
        for entry in self._by(TrackingMode.COMPARED):
            ids, known = self._moved(source, entry)
            found.append(_write_rows(writer, entry, ids, (known[piece] for piece in pieces(ids, entry))))
        found += self._wholes(writer, source)
        tables: List[Optional[Document]] = []
        for entry in self.tracked:
            if entry.is_keyed:
                is_compared = entry.mode is TrackingMode.COMPARED
                ids = self._moved(source, entry)[0] if is_compared else self._touched(entry)
                tables.append(self.tables[entry.name].write(writer, source, entry, ids))
        changed = [document for document in found if document is not None]
        changed.sort(key=lambda document: str(document["name"]))
        return {"variables": changed, "tables": [document for document in tables if document is not None]}

    def commit(self) -> None:
        """Record that the changes that `write` wrote are durable; pending rows and keys are cleared."""
        self._take_none()
        self._digests.update(self._new_digests)
        self._new_digests.clear()

    def abandon(self) -> None:
        """Record that the changes that `write` wrote are lost, so that they are written again.

        Pending rows stay; all of every compared variable counts as changed.
        """
        self._written.clear()
        self._new_digests.clear()

    def _by(self, mode: TrackingMode) -> List[VariableTracking]:
        return [entry for entry in self.tracked if entry.mode is mode and not entry.is_keyed]

    def _take_none(self) -> None:
        self._pending = dict.fromkeys(range(len(self._groups)), NONE)
        for table in self.tables.values():
            table.take_none()

    def _touched(self, entry: VariableTracking) -> Array:
        ids = [self._pending[at] + part.offset for part in entry.parts for at in self._groups_of(part)]
        return np.concatenate([NONE, *ids])

    def _groups_of(self, part: VariablePart) -> Iterator[int]:
        for index, group in enumerate(self._groups):
            if any(member is part for member in group.parts):
                yield index

    def _moved(self, source: Source, entry: VariableTracking) -> Tuple[Array, Array]:
        """Return the rows that differ from those written last, ascending, and the present values of all rows.

        The present values count as written from then on. If none were written before, all rows differ.
        """
        is_new = entry.name not in self._written
        if is_new:
            self._written[entry.name] = np.empty(entry.shape, entry.numpy)
        known, ids = self._written[entry.name], [NONE]
        for start, values in source.all_rows(entry):
            piece = known[start : start + len(values)]
            moved = np.arange(len(values)) if is_new else _differing_rows(piece, values)
            piece[moved] = values[moved]
            ids.append(moved + start)
        return np.concatenate(ids), known

    def _wholes(self, writer: Any, source: Source) -> Iterator[Document]:
        for entry, found in source.wholes(self._by(TrackingMode.WHOLE)):
            # `ascontiguousarray` alone would make a vector of a scalar.
            value = np.ascontiguousarray(found, entry.numpy).reshape(entry.shape)
            digest = hashlib.blake2b(value.tobytes(), digest_size=16).digest()
            if self._digests.get(entry.name) != digest:
                self._new_digests[entry.name] = digest
                writer.add(f"{entry.name}/value", value[np.newaxis, ...])
                yield _changed(entry, "dense", 1)


def _write_rows(
    writer: Any, entry: VariableTracking, ids: Array, values: Iterable[Array]
) -> Optional[Document]:
    if not len(ids):
        return None
    writer.add(f"{entry.name}/ids", ids)
    writer.add_rows(f"{entry.name}/values", entry.dtype, (len(ids), *entry.shape[1:]), values)
    return _changed(entry, "table", len(ids))


def _changed(entry: VariableTracking, kind: str, rows: int) -> Document:
    """Return the entry of a variable in an increment's manifest; `kind` is "table" or "dense"."""
    return {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "kind": kind, "rows": rows}


def union(one: Array, other: Array) -> Array:
    """Return the integers that are in either array, ascending, each once, as int64."""
    return np.union1d(one, other).astype(np.int64)


def _differing_rows(old: Array, new: Array) -> Array:
    """Return the numbers, ascending, of the rows whose bytes differ in two arrays of one shape."""
    if not old.size:
        return NONE
    # Bytes, not numbers: NaN would differ from itself, and -0.0 equal 0.0.
    one, other = (np.ascontiguousarray(each).view(np.uint8).reshape(len(old), -1) for each in (old, new))
    if one.shape[1] % 8 == 0:
        one, other = one.view(np.uint64), other.view(np.uint64)
    return np.flatnonzero((one != other).any(axis=1))


# --- the increments directory -------------------------------------------------------------------------------

_NAME = re.compile(r"[0-9]{20}-[0-9]{20}(-[0-9a-f]{8})?")
_STATE_PATH = re.compile(r'(?<!\w)model_checkpoint_path\s*:\s*"((?:[^"\\\n]|\\.)*)"')
_SESSION_BYTES = 1 << 12  # no training writes a larger file
_STAGING, _TRASH, _UNFINISHED, _SESSION = ".staging-", ".trash-", ".milestone-", ".session"

StateId = Union[str, Tuple[int, str]]
"""A state of the trainer that is on disk: an increment by its id, a full checkpoint by step and digest."""


class FullCheckpoint(NamedTuple):
    """A full checkpoint of the trainer; `digest` is the SHA-256 of its index, which has each tensor's crc."""

    prefix: Path
    step: int
    digest: str

    @property
    def key(self) -> StateId:
        """The checkpoint's identity: (step, digest).

        A trainer that was set back writes another checkpoint of the same name.
        """
        return self.step, self.digest

    def document(self) -> Document:
        """Return the checkpoint's entry in the documents of increments and markers.

        Its keys are "name", "step" and "index_sha256".
        """
        return {"name": self.prefix.name, "step": self.step, "index_sha256": self.digest}


def _key(checkpoint: Document) -> StateId:
    return checkpoint["step"], checkpoint["index_sha256"]


class History:
    """The manifests and markers of an increments directory."""

    def __init__(self, increments: List[Document], markers: List[Document]) -> None:
        self._increments, self._markers = increments, markers

    @property
    def generation(self) -> int:
        """The highest generation among the increments, 0 without increments."""
        return max([int(each["generation"]) for each in self._increments] or [0])

    def is_marked(self, full: FullCheckpoint) -> bool:
        """True if there is a marker for a full checkpoint of the same step and digest as `full`."""
        return any(_key(marker["checkpoint"]) == full.key for marker in self._markers)

    def end_at(self, full: FullCheckpoint) -> Optional[Document]:
        """Return the manifest of the increment whose end the full checkpoint `full` equals.

        None if it equals the end of none, or increments follow it.
        """
        names: "set[StateId]" = {full.key}
        equal = [{_key(m["checkpoint"]), m["after"]} for m in self._markers if m["is_equal"] and m["after"]]
        for _ in equal:
            names = names.union(*(pair for pair in equal if pair & names))
        befores = {(m.get("session"), m["after"]) for m in self._markers if _key(m["checkpoint"]) in names}
        for each in self._increments:
            parent = each["parent"].get("increment")
            is_next = (parent or _key(each["parent"]["checkpoint"])) in names
            if is_next or (each.get("session") and (each["session"], parent) in befores):
                return None
        return next((each for each in self._increments if each["id"] in names), None)


class Store:
    """The increments of the checkpoint directory `ckpt_dir`, and the markers of its full checkpoints.

    Every write is atomic and durable; one that fails raises `failure`, and readers see nothing of it.
    """

    failure: Any = NotPublished

    def __init__(self, ckpt_dir: Any) -> None:
        self.ckpt_dir = Path(ckpt_dir)
        self.path = self.ckpt_dir / "increments"
        self._state = os.path.join(str(ckpt_dir), "checkpoint")
        self._has_warned = False

    def records(self) -> History:
        """Read the directory's manifests and markers; the history is empty without a directory.

        Files that are pruned meanwhile are left out; so are damaged ones, with a warning in the log.
        """
        names = _listed(self.path)
        manifests = [f"{name}/manifest.json" for name in names if _NAME.fullmatch(name)]
        markers = [name for name in names if name.endswith(".json") and not name.startswith(".")]
        return History(self._documents(manifests), self._documents(markers))

    def _documents(self, names: Iterable[str]) -> List[Document]:
        found = []
        for path in map(self.path.joinpath, names):
            try:
                found.append(json.loads(path.read_text("ascii")))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.warning("increments: %s is passed over: %s", path, error)
        return found

    def publish(self, draft: Document, fill: Callable[[Any], Document]) -> Optional[Path]:
        """Publish the increment that `fill` writes; return its directory, or None if nothing changed.

        `fill` is called with a bundle's writer, and returns fields of the manifest; nothing changed if all of
        them are empty. `draft` has the other fields. Left-overs of killed trainers are removed. NotPublished
        (the store's `failure`) if the increment cannot be written; other errors of `fill` pass.
        """
        staging = self.path / f"{_STAGING}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with self.writing(self.path):
                self._make_directory()
                self._sweep()
                staging.mkdir()
                with self.bundle(staging / "delta") as writer:
                    contents = {name: found for name, found in fill(writer).items() if found}
                if not contents:
                    return None
                # Data and manifest before the rename, the directory after it: after a crash a reader finds
                # either no increment or a whole one.
                for file in staging.iterdir():
                    self.sync(file)
                manifest = {"format_version": 1, "kind": "increment", **draft, "variables": [], **contents}
                self._write(staging / "manifest.json", _text(manifest))
                target = self.path / "{from_step:020d}-{to_step:020d}".format(**draft)
                if target.exists():  # a trainer that restored an older checkpoint passes the same steps again
                    target = target.with_name(f"{target.name}-{(draft['session'] or draft['run'])[:8]}")
                staging.rename(target)
                self.sync(self.path)
                return target
        finally:
            shutil.rmtree(str(staging), ignore_errors=True)

    def note(self, marker: Document) -> None:
        """Write a checkpoint's marker, which replaces one of the same name.

        NotPublished (the store's `failure`) if that fails.
        """
        name = f"{marker['checkpoint']['name']}.json"
        self._place(name, _text({"format_version": 1, "kind": "milestone", **marker}))

    def claim(self, session: str) -> None:
        """Record that a session, by its id, has begun to write here, so that an older one stops.

        NotPublished (the store's `failure`) if that fails.
        """
        self._place(_SESSION, f"{session}\n")

    def require_claim(self, session: str) -> None:
        """Check that no session but `session` has begun to write here since it claimed the directory.

        Raises:
            Refused: another one has. An unreadable record passes.
        """
        try:
            with (self.path / _SESSION).open(encoding="ascii") as file:
                found = file.read(_SESSION_BYTES + 1)
        except (OSError, ValueError):  # without a readable note there is no sign of another session
            return
        if len(found) <= _SESSION_BYTES and found.strip() != session:
            raise Refused(
                f"another training writes increments to {self.path} since this one began",
                cause="two trainings share a checkpoint directory, or this one was thought dead and replaced",
                hint="end one of them, or give each a checkpoint directory of its own",
            )

    def prune(self) -> None:
        """Remove increments that no full checkpoint needs, markers of lost checkpoints, and left-overs.

        Does nothing if no full checkpoint is found. An increment that cannot be removed stays, and is tried
        again by the next call; the first such failure is logged.
        """
        prefixes = self._prefixes()
        if not prefixes:  # or the directory cannot be listed just now
            return
        oldest = min([step for step in map(step_in_name, prefixes) if step is not None] or [0])
        for name in _listed(self.path):
            # [21:41]: the step at which it ends. Whoever restores the oldest checkpoint has it already.
            if _NAME.fullmatch(name) and int(name[21:41]) <= oldest:
                self._discard(self.path / name)
            is_lost = name.endswith(".json") and name[: -len(".json")] not in prefixes
            if is_lost or name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()

    def _discard(self, increment: Path) -> None:
        trash = self.path / f"{_TRASH}{secrets.token_hex(4)}"
        try:
            increment.rename(trash)  # readers skip trash: they never see half an increment
        except OSError as error:
            if not self._has_warned:
                log.warning("increments: %s is not needed, and cannot be removed: %s", increment, error)
            self._has_warned = True
        else:
            shutil.rmtree(str(trash), ignore_errors=True)

    def newest_full(self) -> Optional[FullCheckpoint]:
        """Return the full checkpoint that a trainer would restore now.

        It is the one that the state file names, or else the one of the highest step. None if there is none,
        it has no step, or it cannot be read yet, which is logged.
        """
        prefixes = self._prefixes()
        named = self._named_by_state()
        if named not in prefixes:
            steps = {step: name for name in prefixes for step in [step_in_name(name)] if step is not None}
            named = steps[max(steps)] if steps else ""
        if not named:
            return None
        prefix = self.ckpt_dir / named
        try:
            step = self._step(prefix)
            digest = hashlib.sha256(prefix.with_name(f"{named}.index").read_bytes()).hexdigest()
        except Exception as error:  # noqa: BLE001 - TensorFlow's own; it is being written, or removed
            log.debug("increments: %s cannot be read yet: %s", prefix, error)
            return None
        return None if step is None else FullCheckpoint(prefix, step, digest)

    @staticmethod
    def _step(prefix: Path) -> Optional[int]:
        """Return the global step in a checkpoint, else the one in its name; None without either.

        TensorFlow's errors pass if it cannot be read.
        """
        reader = v1().train.NewCheckpointReader(str(prefix))
        if reader.get_variable_to_shape_map().get("global_step") == []:
            return int(reader.get_tensor("global_step"))
        return step_in_name(prefix.name)

    def _prefixes(self) -> List[str]:
        return [name[: -len(".index")] for name in _listed(self.ckpt_dir) if name.endswith(".index")]

    def _named_by_state(self) -> str:
        try:
            found = _STATE_PATH.search((self.ckpt_dir / "checkpoint").read_text(errors="replace"))
        except OSError:
            return ""
        return Path(found.group(1)).name if found else ""

    def index_signatures(self) -> "set[Any]":
        """Return (name, identity of the index) of each full checkpoint.

        A checkpoint that is rewritten gets another identity.
        """
        return {self.index_signature(self.ckpt_dir / prefix) for prefix in self._prefixes()} - {None}

    @staticmethod
    def index_signature(prefix: Path) -> Optional[Tuple[str, Any]]:
        """Return (name, identity of the index) of one full checkpoint; None if its index is gone."""
        found = _signature(str(prefix) + ".index")
        return None if found is None else (prefix.name, found)

    def state_signature(self) -> Any:
        """Return an identity of the state file, which changes when a saver has finished a full checkpoint.

        None without a state file. The call costs one system call.
        """
        return _signature(self._state)

    def _place(self, name: str, text: str) -> None:
        with self.writing(self.path):
            self._make_directory()
            temporary = self.path / f"{_UNFINISHED}{secrets.token_hex(4)}"
            self._write(temporary, text)
            temporary.rename(self.path / name)
            self.sync(self.path)

    def _make_directory(self) -> None:
        """Create the store's directory, with its parents; their names are on disk when this returns.

        OSErrors pass.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            self.sync(path.parent)

    def _write(self, path: Path, text: str) -> None:
        """Write a new file; its bytes and its name are on disk when this returns.

        OSError if that fails, FileExistsError if it exists.
        """
        with path.open("x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.sync(path.parent)

    def _sweep(self) -> None:
        """Remove the unfinished directories of killed trainers: only one session writes here at a time."""
        for name in _listed(self.path):
            if name.startswith((_STAGING, _TRASH)):
                shutil.rmtree(str(self.path / name), ignore_errors=True)

    def bundle(self, prefix: Path) -> Any:
        """Return a writer of a tensor bundle at `prefix`, a context manager."""
        return Bundle(prefix)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Any:
        """Raise NotPublished, which names `path`, for an OSError of the block."""
        try:
            yield
        except OSError as error:
            raise NotPublished(f"{path} cannot be written: {error}") from error

    @staticmethod
    def sync(path: Path) -> None:
        """Wait until a file's bytes, or a directory's entries, are on disk, if the file system can do so.

        OSError if a file cannot be synced, or nothing has this path.
        """
        descriptor = os.open(str(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            if not path.is_dir():  # CIFS and some of FUSE cannot wait for the entries of a directory
                raise
        finally:
            os.close(descriptor)


def step_in_name(name: str) -> Optional[int]:
    """Return the step at the end of a checkpoint's name, 1200 for `model.ckpt-1200`.

    None if no hyphen and number are at the end, or the number does not fit in an int64.
    """
    found = re.search(r"-([0-9]+)$", name)
    return int(found.group(1)) if found and int(found.group(1)) < 1 << 63 else None


def _text(document: Document) -> str:
    return json.dumps(document, indent=1) + "\n"


def _listed(directory: Path) -> List[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError:
        return []


def _signature(path: str) -> Optional[Tuple[int, ...]]:
    """Return an identity of a file's content, which changes if the file is replaced or written to.

    None if its status cannot be read.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# --- the event time of a training ---------------------------------------------------------------------------


class EventClock:
    """Tells when the newest event that was trained on happened; freshness is measured from it.

    By default it is the time at which the newest step was first seen, which is right for a training that
    follows a live stream closely. A training that lags, or reads old data, passes its own `source`:

        IncrementHook(ckpt_dir, save_increment_secs=1, event_time=lambda: reader.newest_timestamp)
        IncrementHook(ckpt_dir, save_increment_secs=1, event_time=newest_timestamp_variable)

    It is a function, or a variable or tensor that can be read at any time without side effects. Its value is
    a `datetime` with a time zone, or seconds since 1970 (of an array the largest); 0, less, None and an empty
    array mean not known yet. It is read before an increment's rows are collected, so that the increment is at
    least as new. It serves people and alerts: if it cannot be read, increments are written without it. `now`
    returns seconds since 1970.
    """

    def __init__(self, source: Any = None, now: Callable[[], float] = time.time) -> None:
        self._source = source
        self._now = now
        self._step: Optional[int] = None
        self._stepped_at: Optional[float] = None
        self._warned = ""

    def begin(self, step: int) -> None:
        """Begin a session at `step`, which it did not train itself: the time of this step is unknown."""
        self._step, self._stepped_at = step, None

    def notice(self, step: int) -> None:
        """Record that the training is at `step`; the present time is the step's if it is a new one."""
        if step != self._step:
            self._step, self._stepped_at = step, self._now()

    def read(self, session: Session) -> Optional[datetime]:
        """Return the present event time, in UTC; None if it is unknown or invalid.

        Errors, also those of the user's source, are logged, the same one once in a row, and never raised.
        """
        try:
            if self._source is None:
                return _as_time(self._stepped_at)
            found = _as_time(_event(self._source, session))
            if found is not None and found.timestamp() > self._now() + _MOST_AHEAD_S:
                raise ValueError(f"it lies more than {_MOST_AHEAD_S:g} seconds ahead of this machine's clock")
            return found
        except Exception as error:  # noqa: BLE001 - the user's own code must not end a training
            text = f"{type(error).__name__}: {error}"
            if text != self._warned:
                log.warning("increments: the event time is unknown: %s", text)
                self._warned = text
            return None


def _event(source: Any, session: Session) -> Any:
    if hasattr(source, "numpy") and not callable(source):  # an eager tensor or variable
        with contextlib.suppress(NotImplementedError):  # a reference variable of a graph has the method, too
            return source.numpy()
    if hasattr(source, "graph"):  # a tensor or variable of a graph; eager ones have none
        return None if session is None else session.run(source)
    return source() if callable(source) else source


def _as_time(value: Any) -> Optional[datetime]:
    """Convert a `datetime` or seconds since 1970 to a time in UTC; of an array the largest counts.

    None for None, an empty array, 0 and negative numbers. ValueError if a `datetime` has no zone, or a number
    is out of range; TypeError or ValueError for other values.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(timezone.utc)
    seconds = float(np.max(value)) if np.size(value) else 0.0
    if seconds <= 0:
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{seconds:g} is not a time in seconds since 1970: {error}") from error


# --- publishing ---------------------------------------------------------------------------------------------


class RunTip(NamedTuple):
    """The end of a run's chain: the run, the session that writes it, and the `parent` of the next increment.

    `parent` is an increment's id, or a full checkpoint; `step` is its global step. `generation` is one
    more than the highest among the directory's increments when the session began.
    """

    run: str
    session: str
    generation: int
    parent: Union[str, FullCheckpoint]
    step: int

    @classmethod
    def of(cls, run: str, generation: int, parent: Union[str, FullCheckpoint], step: int) -> "RunTip":
        """Return the tip of a new session, with an id of its own, which begins at `parent` with its `step`.

        `generation` is the highest generation before the session, whose own is one more.
        """
        return cls(run, new_id(), generation + 1, parent, step)

    @property
    def last_increment(self) -> Optional[str]:
        """The id of the increment that was written or restored last.

        None if the parent is a full checkpoint.
        """
        return self.parent if isinstance(self.parent, str) else None

    def draft(self, to_step: int, event_time: Optional[datetime]) -> Document:
        """Return the manifest of the next increment, which ends at `to_step`, without its changes.

        The increment has a new id, and ends at least one step after its parent. `event_time` is None if it is
        not known.
        """
        parent = self.parent
        found: Document = {
            "id": secrets.token_hex(16),
            "run": self.run,
            "session": self.session,
            "generation": self.generation,
            "parent": {"increment": parent} if isinstance(parent, str) else {"checkpoint": parent.document()},
            "from_step": self.step,
            "to_step": max(to_step, self.step + 1),
        }
        return _timed(found, event_time)

    def marker(self, full: FullCheckpoint, is_equal: bool, event_time: Optional[datetime] = None) -> Document:
        """Return the document of a marker for a full checkpoint that is written now.

        `is_equal` says that the checkpoint equals the last increment bit for bit. `event_time` is None if it
        is not known.
        """
        found = {
            "checkpoint": full.document(),
            "run": self.run,
            "session": self.session,
            "after": self.last_increment,
            "is_equal": is_equal,
        }
        return _timed(found, event_time)


def _timed(document: Document, event_time: Optional[datetime]) -> Document:
    if event_time is not None:
        document["event_time"] = event_time.isoformat().replace("+00:00", "Z")
    return document


class Publisher:
    """Publishes the increments of one training, over all sessions of the chief.

    `timer` is TensorFlow's SecondOrStepTimer, `clock` gives the event time of the training data. All methods
    may raise the errors of `Store`.
    """

    def __init__(
        self, store: Store, collector: Collector, timer: Any, clock: Optional[EventClock] = None
    ) -> None:
        self._store = store
        self._collector = collector
        self._timer = timer
        self._clock = clock or EventClock()
        self._tip: Optional[RunTip] = None
        self._full = store.newest_full()
        self._own: Optional[FullCheckpoint] = None
        self._before = store.index_signatures()
        self._signature = store.state_signature()
        self._failures = 0

    def begin_session(self, session: Session, step: int) -> bool:
        """Find the state that a restored session continues; apply increments if this publisher restores them.

        `step` is the session's global step. Changes are counted from here on. Returns True if increments were
        restored. NotPublished if the session's claim or a marker cannot be written; errors of restoring pass.
        """
        # The session restored the full checkpoint that was the newest before it began. Its own saver may have
        # written another one already, which holds the same values and later changes of other workers.
        before, self._tip, self._own = self._full, None, None
        self._clock.begin(step)
        self._look()
        self._before = self._store.index_signatures()
        self._collector.forget()
        is_restored = before is not None and self._continue(session, before, step)
        if not is_restored and self._full is not None and self._full.step <= step:
            self._begin_at(self._full)
        self._timer.reset()
        # If the saver has written a full checkpoint already, an increment is due at once: it joins that
        # checkpoint and the restored chain.
        if not is_restored or self._own == before:
            self._timer.update_last_triggered_step(self._tip.step if self._tip else step)
        return is_restored

    def is_due(self, step: int) -> bool:
        """True if an increment should be written at the global step `step`, by the timer."""
        return bool(self._timer.should_trigger_for_step(step))

    @property
    def is_behind(self) -> bool:
        """True if a saver has finished a full checkpoint since the last `begin_session` or `notice`."""
        return bool(self._store.state_signature() != self._signature)

    def notice(self, step: int) -> None:
        """Look for a full checkpoint that a saver has finished, and record it; notice a step that went back.

        A step goes back when the user's program restores an older checkpoint by hand. Such writes are not
        recorded, so increments continue from the next full checkpoint. A checkpoint named by the state file
        that this session did not write (`_is_new`) is ignored.

        `step` is the present global step.

        Raises:
            Refused: another session has begun to write to the directory.
            NotPublished: the record cannot be written.
        """
        self._clock.notice(step)
        if self._tip is not None and step < self._tip.step:
            log.warning(
                "increments: the step went back from %d to %d: waiting for a full checkpoint",
                self._tip.step,
                step,
            )
            self._tip = self._own = None
            self._collector.forget()
            self._timer.reset()
        if not self._look() or self._full is None:
            return
        if self._tip is None:
            self._begin_at(self._full)
        elif self._is_new(self._full, self._tip):
            self._own = self._full
            self._note(self._full, self._tip, is_equal=False, event_time=self._clock.read(None))
        else:
            self._store.require_claim(self._tip.session)
            log.warning(
                "increments: the state file names %s, which this session did not write", self._full.prefix
            )

    def save(self, session: Session, step: int) -> None:
        """Publish an increment up to `step`; if it has no step of its own yet, leave it due.

        Nothing is published while no state to continue from is known.

        Raises:
            Refused: there is no full checkpoint to build on, or another training writes here, too.
            NotPublished: publishing failed for the third time in a row. An earlier failure is logged, and the
                rows are kept for the next increment.
        Errors of the session, TensorFlow's own, pass.
        """
        tip = self._tip
        if tip is None:
            self._check_full()
            return
        if step == tip.step or (self._own is not None and self._own.step >= step):
            return
        self._store.require_claim(tip.session)
        # The event time before the rows: the increment may be newer than it claims, never older.
        event_time = self._clock.read(session)
        self._collector.collect(session)
        try:
            self._publish(tip, step, self._collector.source(session), event_time)
            self._failures = 0
        except self._store.failure as error:
            self._failures += 1
            if self._failures == _FAILURES_IN_A_ROW:
                raise
            text = getattr(error, "message", error)
            log.error("increments: %s; the rows are kept for the next increment", text)
        self._timer.update_last_triggered_step(step)

    def finish(self, session: Session, step: int) -> None:
        """Publish the last increment, from a full checkpoint of this step if there is one, else the session.

        It may be called again, if a full checkpoint was saved meanwhile.

        Raises:
            Refused: there is no full checkpoint to build on, or another training writes here, too.
            NotPublished: the increment or the checkpoint's marker could not be written.

        Errors of the session and of reading the checkpoint pass: TensorFlow's own, or those of `values_of`.
        """
        tip = self._tip
        if tip is None:
            self._check_full()
            return
        self._store.require_claim(tip.session)
        event_time = self._clock.read(session)
        self._collector.collect(session)
        if step == tip.step and not self._collector.knows_more:
            return
        full = self._own if self._own is not None and self._own.step == step else None
        source = None if full is None else self.values_of(full)
        self._publish(tip, step, source or self._collector.source(session), event_time)
        if full is not None and source is not None and self._tip is not None:
            self._note(full, self._tip, is_equal=True)

    def values_of(self, full: FullCheckpoint) -> Optional[Source]:
        """Return a source of the values of a full checkpoint.

        None, with a warning in the log, if it lacks variables that may change: a saver leaves them out.
        TensorFlow's errors pass if it cannot be read.
        """
        there = v1().train.NewCheckpointReader(str(full.prefix)).get_variable_to_shape_map()
        changing = [e.name for e in self._collector.tracked if e.mode is not TrackingMode.FIXED]
        missing = [name for name in changing if name not in there]
        if missing:
            log.warning("increments: %s lacks %s", full.prefix, ", ".join(missing[:9]))
        return None if missing else CheckpointSource(full.prefix)

    def _publish(self, tip: RunTip, step: int, source: Source, event_time: Optional[datetime]) -> None:
        begun = time.time()
        draft = tip.draft(step, event_time)
        try:
            path = self._store.publish(draft, lambda writer: self._collector.write(writer, source))
        except BaseException:
            # `write` has kept values as written that no reader will ever see.
            self._collector.abandon()
            raise
        self._collector.commit()
        if path is None:
            return
        self._tip = tip._replace(parent=draft["id"], step=draft["to_step"])
        log.info("increments: %s in %.3f s", path.name, time.time() - begun)
        self._store.prune()

    def _continue(self, session: Session, before: FullCheckpoint, step: int) -> bool:
        """Apply the increments after the restored full checkpoint `before`; return True if there were any.

        This class restores none: it does nothing, and returns False.
        """
        return False

    def _begin_at(self, full: FullCheckpoint) -> None:
        """Begin a session with the state of a full checkpoint, plus rows that are flagged.

        The run continues if the checkpoint equals the end of its chain; otherwise a new run begins. Writes
        the session's claim, and the checkpoint's marker if it has none: NotPublished (the store's `failure`)
        if that fails.
        """
        history = self._store.records()
        last = history.end_at(full)
        if last is not None:
            tip = RunTip.of(last["run"], history.generation, last["id"], last["to_step"])
        else:
            tip = RunTip.of(new_id(), history.generation, full, full.step)
        self._set_tip(tip, full)
        if not history.is_marked(full):
            self._note(full, tip, is_equal=False)

    def _set_tip(self, tip: RunTip, full: FullCheckpoint) -> None:
        self._store.claim(tip.session)
        self._tip, self._own = tip, full

    def _is_new(self, full: FullCheckpoint, tip: RunTip) -> bool:
        """True if this session can have written a full checkpoint.

        It cannot if the checkpoint existed before the session, has a marker already, or is of an older step
        than the newest increment.
        """
        if self._store.index_signature(full.prefix) in self._before:
            return False
        return full.step >= tip.step and not self._store.records().is_marked(full)

    def _note(
        self, full: FullCheckpoint, tip: RunTip, is_equal: bool, event_time: Optional[datetime] = None
    ) -> None:
        self._store.note(tip.marker(full, is_equal, event_time))

    def _look(self) -> bool:
        """Look up the newest full checkpoint, and keep it; return True if it is another one than before.

        False if the state file has not changed since the last look, or no checkpoint is complete.
        """
        # Before the search: a checkpoint that is finished meanwhile changes it again.
        signature = self._store.state_signature()
        if signature == self._signature:
            return False
        full = self._store.newest_full()
        if full is None:  # not complete yet: look again
            return False
        is_new = self._full is None or full.key != self._full.key
        self._full, self._signature = full, signature
        return is_new

    def _check_full(self) -> None:
        if self._full is None:
            raise Refused(
                "there is no full checkpoint that increments could follow",
                cause=f"{self._store.ckpt_dir} holds none",
                hint="give MonitoredTrainingSession save_checkpoint_secs or save_checkpoint_steps, too",
            )


def new_id() -> str:
    """Return a random id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


# --- AutoDist -----------------------------------------------------------------------------------------------

_REPLICA = "AutoDist-Replica-0/"
"""The replica of a graph whose variables are trained and saved."""


def transformed_by(autodist: Any) -> Tuple[Any, List[Variable]]:
    """Return an `AutoDist`'s transformed graph item, and its variables under their names in checkpoints.

    AutoDist transforms the graph when it makes a session, and operations cannot be added to a graph in use:
    so it is transformed here, as its session would do. The graph has no collections; its saver's SaveV2 shows
    the variables in its checkpoints, and to which partitioned variable each part belongs, which is set here.

    Raises:
        Refused: a session was made already, or no saver before.
    """
    from tensorflow.python.framework import tensor_util

    if autodist.is_built():
        raise Refused("AutoDist has made its session", hint="call begin before create_distributed_session")
    if not autodist._original_graph_item.info.savers:
        raise Refused(
            "AutoDist saves no checkpoint that increments could follow",
            hint="make an autodist.checkpoint.saver.Saver() before begin",
        )
    autodist._build()
    item = autodist._transformed_graph_item
    by_name = {variable.op.name: variable for variable in item.get_all_variables()}
    found = {}
    for op in item.graph.get_operations():
        if op.type == "SaveV2" and op.name.startswith(_REPLICA):
            names, specs = (tensor_util.constant_value(each) for each in op.inputs[1:3])
            for name, spec, tensor in zip(names, specs, list(op.inputs)[3:]):
                place = tensor.op
                while place.type not in _VARIABLES:  # its value was read, and copied
                    place = place.inputs[0].op
                _name_as_saved(by_name[place.name], name.decode(), spec.decode())
                found[place.name] = by_name[place.name]
    return item, list(found.values())


def _name_as_saved(variable: Variable, name: str, spec: str) -> None:
    """Set a variable's name in checkpoints, and the slice of the saved variable that it holds.

    `spec` is "" for all of the saved variable, or its sizes and the slice's start and length in each
    dimension, as in `100 4 50,50:0,4`.
    """
    whole = shape = variable.shape.as_list()
    starts = [0] * len(shape)
    if spec:
        *sizes, box = spec.split(" ")
        whole = [int(size) for size in sizes]
        starts, shape = (
            [int(end) for end in ends] for ends in zip(*(each.split(",") for each in box.split(":")))
        )
    info = v1().Variable.SaveSliceInfo(name, whole, starts, shape)
    variable._set_save_slice_info(info)


def _step_of(variables: List[Variable], name: str) -> Variable:
    """Return the global step, by its `name` in checkpoints, among the variables of a transformed graph.

    Refused if it is missing, or if the graph does not count steps.
    """
    found = [variable for variable in variables if variable._get_save_slice_info().full_name == name]
    if not found:
        raise Refused(f"AutoDist's saver leaves out {name!r}", hint="make its Saver() after the global step")
    if not _additions(found[0]):
        raise Refused(
            "the graph that AutoDist trains does not count steps",
            cause="strategies that partition variables leave out what the optimizer adds to the global step",
            hint='count = tf.assign_add(step, 1, name="count"), and session.run([train_op, count])',
        )
    return found[0]


# --- the hook -----------------------------------------------------------------------------------------------


class _Placeholder:
    """A base class that can be replaced: Python cannot replace `object` as a class's only base."""


class SessionHook(_Placeholder):
    """A base of classes whose instances are `tf.train.SessionRunHook`s, too.

    `Estimator.train` refuses other hooks. That class does not exist before TensorFlow is imported, so it
    becomes the base class when the first hook is made.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make TensorFlow's class the base of all hooks, then return a new instance; imports TensorFlow."""
        SessionHook.__bases__ = (v1().train.SessionRunHook,)
        return object.__new__(cls)


class _Chief(NamedTuple):
    """The chief's own part of the hook."""

    publisher: Publisher
    global_step: Variable


class IncrementHook(SessionHook):
    """A `SessionRunHook` that writes increments into `<ckpt_dir>/increments`, for every worker's `hooks=`.

    `save_increment_secs` or `save_increment_steps` is the interval. Every worker records the rows that it
    writes; the hook of the chief collects and publishes them. `event_time` gives the time of the newest event
    that was trained on (see `EventClock`).

    A loop without hooks calls `begin` when its graph is complete, `after_create_session` once the variables
    have their values, `save_if_due` after each step, and `end` after the last full checkpoint. It saves full
    checkpoints in the same thread, between these calls. With AutoDist it calls `begin(distributed)`, before
    it makes the session.

    Raises:
        Refused: the arguments contradict each other. Later, from the session: there is no global step, a
            variable that increments cannot hold, no full checkpoint, or a worker without the hook.
        NotPublished: an increment could not be written three times in a row, or not at the end.
    """

    def __init__(
        self,
        ckpt_dir: Any,
        save_increment_secs: Optional[float] = None,
        save_increment_steps: Optional[int] = None,
        *,
        is_chief: bool = True,
        event_time: Any = None,
    ) -> None:
        self._interval = schedule(save_increment_secs, steps=save_increment_steps)
        if not ckpt_dir or "://" in os.fspath(ckpt_dir):
            raise Refused(
                "increments need the directory of the full checkpoints, on a file system that is mounted",
                hint="IncrementHook(ckpt_dir, save_increment_secs=60)",
            )
        self._ckpt_dir = ckpt_dir
        self._is_chief = is_chief
        self._clock = EventClock(event_time)
        self._chief: Optional[_Chief] = None
        self._unrecorded = 0
        self._fetched: Tuple[Any, List[Operation]] = (None, [])

    def begin(self, autodist: Any = None) -> None:
        """Extend the graph before it is finalized; with an `AutoDist`, the graph that it trains instead.

        The chief logs how changes will be found. Refused if the graph has no global step, or a variable that
        increments cannot hold; with an `AutoDist`, also if it has no saver yet, has made its session, or does
        not count steps.
        """
        global_step = v1().train.get_global_step()
        if global_step is None:
            raise Refused(
                "increments need a global step", hint="call tf.compat.v1.train.get_or_create_global_step()"
            )
        if autodist is None:
            self._extend(self._track(), global_step)
            return
        self._is_chief &= "AUTODIST_WORKER" not in os.environ  # it runs the program on every node
        item, variables = transformed_by(autodist)
        with item.graph.as_default():
            self._extend(plan_tracking(variables), _step_of(variables, global_step.op.name))
        # Each node's session initializes these, as it does all others, before it trains.
        item.info.update_variables(self._recording.variables, replace=False)

    def _extend(self, tracked: Tuple[VariableTracking, ...], global_step: Variable) -> None:
        tf = v1()
        self._recording = record(tracked, global_step)
        self._checks_steps = counts_every_step(global_step)
        self._fetched = (None, [])
        if self._is_chief:
            saveables = tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)
            _report(tracked, [each for each in saveables if not self._is_known(each)])
            timer = tf.train.SecondOrStepTimer(*self._interval)
            self._chief = _Chief(self._publisher(tracked, self._recording, timer), global_step)

    def _track(self) -> Tuple[VariableTracking, ...]:
        return plan_tracking(v1().global_variables())

    def _is_known(self, saveable: Any) -> bool:
        """True if increments hold the content of a saver's object other than variables; here always False."""
        return False

    def _publisher(
        self, tracked: Tuple[VariableTracking, ...], recording: Recording, timer: Any
    ) -> Publisher:
        collector = Collector(tracked, recording.groups)
        return Publisher(Store(self._ckpt_dir), collector, timer, self._clock)

    def after_create_session(self, session: Session, coord: Any = None) -> None:
        """Chief: initialize the recording and find the state that the session continues.

        Others: wait for the chief, up to `READY_SECONDS`. Refused if that takes longer, or the chief's graph
        finds changes in another way; NotPublished if the chief cannot write its records.
        """
        if self._chief is None:
            self._wait_until_ready(session, coord)
            return
        # Workers wait until the flags are initialized: no change after the look of `begin_session` is missed.
        # Always, and first: a worker that finds all ready compares this chief's plan, not one before it.
        session.run(self._recording.plan.initializer)
        ready = session.run(self._recording.are_ready)
        missing = zip(self._recording.variables, ready)
        # Flags that exist stay: workers that went on without a chief have set them.
        session.run([variable.initializer for variable, is_ready in missing if not is_ready])
        self._chief.publisher.begin_session(session, self._step(session))
        self._unrecorded = self._count_unrecorded(session)

    def before_run(self, run_context: Any) -> Any:
        """Return the additional fetches of a run, as SessionRunArgs; None if there are none.

        For each fetched operation that writes rows, this is the operation that flags them. The chief also
        fetches the global step, as the first or only value.
        """
        marks = self._marks(run_context.original_args.fetches) if self._recording.marks else []
        if self._chief is None:
            return v1().train.SessionRunArgs(marks) if marks else None
        # A single tensor if possible: each level of a structure costs a session 20 us a step.
        step = self._chief.global_step
        return v1().train.SessionRunArgs([step, *marks] if marks else step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Chief: publish an increment if one is due; others do nothing.

        Raises Refused if a worker trains without the hook, there is no full checkpoint, or another training
        writes here; NotPublished if publishing failed for the third time in a row, or the record of a full
        checkpoint cannot be written. TensorFlow's errors pass.
        """
        if self._chief is not None:
            # The run fetched the step before its own update or after it: the order is not defined.
            found = run_values.results
            step = int(found[0] if isinstance(found, list) else found)
            self._chief.publisher.notice(step)
            if self._chief.publisher.is_due(step + 1):
                self.save_if_due(run_context.session)

    def save_if_due(self, session: Session) -> None:
        """Chief: publish an increment if it is due; others do nothing.

        Raises Refused if a worker trains without the hook, there is no full checkpoint, or another training
        writes here; NotPublished if publishing failed for the third time in a row, or the record of a full
        checkpoint cannot be written. TensorFlow's errors pass.
        """
        if self._chief is None:
            return
        step = self._step(session)
        self._chief.publisher.notice(step)
        if self._chief.publisher.is_due(step):
            self._check_recording(session)
            self._chief.publisher.save(session, step)

    def end(self, session: Session) -> None:
        """Chief: publish the last increment; others do nothing.

        Replaces `session.close`, to do so again if a saver has written a full checkpoint until then. Refused
        if there is no full checkpoint, or another training writes here; NotPublished if the increment cannot
        be written; `session.close` may raise them, too. TensorFlow's errors pass.
        """
        if self._chief is not None:
            self._finish(session)
            self._finish_when_closed(session)

    def _finish(self, session: Session) -> None:
        if self._chief is not None:
            step = self._step(session)
            self._chief.publisher.notice(step)
            self._chief.publisher.finish(session, step)

    def _finish_when_closed(self, session: Session) -> None:
        """Replace `session.close` to publish once more before the session is closed.

        A saver's own hook may come after this one: nothing is done unless a saver has written since.
        """
        close = session.close

        def closing() -> None:
            session.close = close
            try:
                if self._chief is not None and self._chief.publisher.is_behind:
                    self._finish(session)
            finally:
                close()

        session.close = closing

    def _marks(self, fetches: Any) -> List[Operation]:
        # Programs fetch the same object in each step; inspecting it takes longer than the recording.
        if self._fetched[0] is not fetches or isinstance(fetches, (list, dict)):
            from tensorflow.python.util import nest

            names = {_operation_name(fetch) for fetch in nest.flatten(fetches)}
            self._fetched = fetches, [mark for name, mark in self._recording.marks.items() if name in names]
        return self._fetched[1]

    def _step(self, session: Session) -> int:
        if self._chief is None:
            raise Refused("the hook has not begun", hint="pass it to a MonitoredTrainingSession")
        return int(session.run(self._chief.global_step))

    def _wait_until_ready(self, session: Session, coord: Any) -> None:
        """Wait until the chief has initialized the flags of rows: setting one earlier would fail or be lost.

        Ends early if `coord` should stop. Refused after `READY_SECONDS`, or if the chief's graph finds
        changes in another way.
        """
        deadline = time.time() + READY_SECONDS
        while not session.run(self._recording.are_ready).all():
            if coord is not None and coord.should_stop():
                return
            if time.time() > deadline:
                raise Refused(
                    f"the chief has not initialized the recording of increments within {READY_SECONDS:g} s",
                    hint="give the chief an IncrementHook, too, with is_chief=True",
                )
            time.sleep(_POLL_SECONDS)
        if int(session.run(self._recording.plan_of_chief)) != self._recording.tracking_digest:
            raise Refused(
                "this worker's graph writes to other variables, or in other ways, than the chief's",
                hint="build the same graph in every worker (between-graph replication)",
            )

    def _count_unrecorded(self, session: Session) -> int:
        """Return the number of global steps minus the number of recorded steps.

        The global step is read first: steps that are recorded in between make the number smaller, so that
        they cannot be mistaken for unrecorded ones.
        """
        step = self._step(session)
        return step - int(session.run(self._recording.recorded_steps))

    def _check_recording(self, session: Session) -> None:
        if not self._checks_steps:
            return
        missing = self._count_unrecorded(session) - self._unrecorded
        if missing > _UNRECORDED_STEPS:
            raise Refused(
                f"{missing} steps of this session were not recorded, so increments lack the rows they wrote",
                cause="a worker trains without IncrementHook",
                hint="pass an IncrementHook to every worker, in hooks= of its MonitoredTrainingSession",
            )


def schedule(*secs: Optional[float], steps: Optional[int]) -> Tuple[Optional[float], Optional[int]]:
    """Return the interval of increments, (seconds, None) or (None, steps), of which one is given.

    Raises:
        Refused: none or several of them are given, or the interval is not a positive number.
    """
    found = [value for value in (*secs, steps) if value is not None]
    is_number = len(found) == 1 and isinstance(found[0], (int, float)) and not isinstance(found[0], bool)
    if not is_number or not found[0] > 0:
        raise Refused(
            f"give one positive interval for increments, in seconds or in steps; found {found or 'none'}",
            hint="save_increment_secs=60, or save_increment_steps=1000",
        )
    return (None, steps) if steps is not None else (found[0], None)


def _operation_name(fetch: Any) -> str:
    if isinstance(fetch, str):
        return fetch.partition(":")[0]
    operation = getattr(fetch, "op", fetch)
    return str(getattr(operation, "name", ""))


def _report(tracked: Iterable[VariableTracking], saveables: List[Any]) -> None:
    """Log how changes are found, which tables are compared and why, and the `saveables` that are left out."""
    tracked = list(tracked)
    for saveable in saveables:
        log.warning("increments: %s is in full checkpoints only", getattr(saveable, "name", saveable))
    for mode in TrackingMode:
        entries = [entry for entry in tracked if entry.mode is mode]
        log.info("increments: %d variables by %s (%s)", len(entries), mode.value, _size(entries))
    compared = [entry for entry in tracked if entry.mode is TrackingMode.COMPARED]
    if compared:
        log.warning(
            "increments: %s may change any row of %s: %s are kept in memory and compared each time. "
            "An optimizer that is lazy for sparse gradients changes only the rows that were looked up",
            " and ".join(sorted({kind for entry in compared for kind in entry.whole_writes})),
            ", ".join(entry.name for entry in compared),
            _size(compared),
        )


def _size(entries: Iterable[VariableTracking]) -> str:
    size, unit = float(sum(entry.bytes_ for entry in entries)), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        size, unit = (size / 1000, larger) if size >= 1000 else (size, unit)
    return f"{size:.3g} {unit}"


# --- Keras --------------------------------------------------------------------------------------------------


def IncrementCallback(
    manager: Any,
    save_increment_secs: Optional[float] = None,
    save_increment_steps: Optional[int] = None,
    *,
    save_checkpoint_steps: Optional[int] = None,
    event_time: Any = None,
) -> Any:
    """Return a Keras callback, of Keras 2 or 3, that writes full checkpoints and increments of `fit`.

    `fit` must run in one process. It saves full checkpoints by `manager` (`tf.train.CheckpointManager`) when
    `fit` begins and ends, and every `save_checkpoint_steps` if given, and increments in between: give one
    interval for them, in seconds or in steps. The step is the optimizer's `iterations`. `event_time` gives
    the time of the newest event that was trained on (see `EventClock`).

    Variables have the names that the full checkpoint gives them. Those of rank 2 and more are compared, row
    by row, with the values that were written last, which are kept in memory: the increments are exact,
    whatever the optimizer does. `fit` continues with the values that the model has: if the program has
    restored the newest full checkpoint, increments continue from that one.

    Raises:
        Refused: the arguments contradict each other; later, from `fit`: the model is not built, or its
            variables are spread over several processes.
        NotPublished: an increment could not be written three times in a row, or not at the end.
    """
    interval = schedule(save_increment_secs, steps=save_increment_steps)
    return callback_of(Fit(manager, interval, save_checkpoint_steps, event_time))


def callback_of(fit: "Fit") -> Any:
    """Return a Keras callback by which Keras calls `fit.begin`, `fit.after_batch` and `fit.end`."""

    class Callback(callback_base()):  # type: ignore[misc]  # Keras is untyped
        """Passes the calls of `fit` on."""

        def on_train_begin(self, logs: Any = None) -> None:
            fit.begin(self.model)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            fit.after_batch()

        def on_train_end(self, logs: Any = None) -> None:
            fit.end()

    return Callback()


def callback_base() -> Any:
    """Return the base class of callbacks: tf-keras' if the program has imported it, else TensorFlow's.

    Keras 3 accepts tf-keras' callbacks. Imports TensorFlow in the second case.
    """
    if "tf_keras" in sys.modules:
        import tf_keras

        return tf_keras.callbacks.Callback
    import tensorflow as tf

    return tf.keras.callbacks.Callback


class Fit:
    """The increments of a callback, which may serve several calls of `fit`, one after the other."""

    def __init__(
        self,
        manager: Any,
        interval: Tuple[Optional[float], Optional[int]],
        save_checkpoint_steps: Optional[int],
        event_time: Any,
    ) -> None:
        self._manager = manager
        self._checkpoint = getattr(manager, "checkpoint", None) or manager._checkpoint
        self._timer = v1().train.SecondOrStepTimer(*interval)
        self._save_checkpoint_steps = save_checkpoint_steps
        self._clock = EventClock(event_time)
        self._store = self._make_store(manager.directory)
        self._last_full = 0

    def _make_store(self, directory: str) -> Store:
        return Store(directory)

    def begin(self, model: Any) -> None:
        """Save a full checkpoint unless the newest one holds these values, and count changes from it.

        Refused if TensorFlow does not execute eagerly, the model is not built, or its variables move between
        processes, or the directory has no full checkpoint with a step even then; NotPublished if the records
        cannot be written. Errors of the manager, and TensorFlow's of reading a checkpoint, pass.
        """
        _check(model)
        self._iterations = model.optimizer.iterations
        full = self._store.newest_full()
        if not self._restore(full) and (full is None or not self._is_at(full)):
            self._save_full()
        newest = self._store.newest_full()
        if newest is None:
            raise Refused(f"{self._manager.directory} holds no full checkpoint with a step in its name")
        collector = self._collector(newest)
        compared = [entry for entry in collector.tracked if entry.mode is TrackingMode.COMPARED]
        log.info("increments: comparing by rows keeps %s in memory", _size(compared))
        self._publisher = self._make_publisher(collector)
        self._publisher.begin_session(None, self._step)
        collector.remember(None)
        self._last_full = newest.step

    def after_batch(self) -> None:
        """Save a full checkpoint, an increment, both or none, whichever is due.

        Raises Refused if another training writes here, or there is no full checkpoint; NotPublished if
        publishing failed for the third time in a row, or the record of a full checkpoint cannot be written;
        errors of the manager pass.
        """
        step = self._step
        if self._save_checkpoint_steps and step - self._last_full >= self._save_checkpoint_steps:
            self._save_full()
        self._publisher.notice(step)
        if self._publisher.is_due(step):
            self._publisher.save(None, step)

    def end(self) -> None:
        """Save a full checkpoint, unless this step has one, and the increment that equals it.

        Raises Refused if another training writes here, or there is no full checkpoint; NotPublished if the
        increment cannot be written; errors of the manager pass.
        """
        if self._step != self._last_full:
            self._save_full()
        self._publisher.notice(self._step)
        self._publisher.finish(None, self._step)

    def _restore(self, full: Optional[FullCheckpoint]) -> bool:
        """Restore the full checkpoint, if asked for, and return True if so; this class restores none."""
        return False

    def _collector(self, full: FullCheckpoint) -> Collector:
        variables = dict(self._by_key(full))
        source = EagerSource(variables)
        tracked = [eager_tracking(name, variables[name]) for name in sorted(variables)]
        return Collector(tracked, source=lambda session: source)

    def _make_publisher(self, collector: Collector) -> Publisher:
        return Publisher(self._store, collector, self._timer, self._clock)

    def _is_at(self, full: FullCheckpoint) -> bool:
        """True if all variables have a checkpoint's values, for example because the program has restored it.

        Saving these values again would make another checkpoint, cut off from the increments that lead to this
        one. False if the program has other objects than the checkpoint. Errors of reading, TensorFlow's own,
        pass.
        """
        if full.step != self._step:
            return False
        reader = v1().train.NewCheckpointReader(str(full.prefix))
        try:
            return all(
                _is_same(reader.get_tensor(key), variable.numpy()) for key, variable in self._by_key(full)
            )
        except AttributeError:  # other objects than the checkpoint has
            return False

    def _by_key(self, full: FullCheckpoint) -> Iterator[Tuple[str, Any]]:
        """Yield (key in a full checkpoint, variable) for the program's variables, by its object graph.

        The save counter is left out: it changes with every save, and each save would need an increment.
        AttributeError if the program has no object for a key.
        """
        graph, objects = self._objects(full)
        for number, trackable in sorted(objects.items()):
            for attribute in graph.nodes[number].attributes:
                if trackable is None:
                    raise AttributeError(f"{attribute.checkpoint_key} has no object")
                is_variable = hasattr(trackable, "assign") and hasattr(trackable, "numpy")
                if is_variable and trackable is not self._checkpoint.save_counter:
                    yield attribute.checkpoint_key, trackable

    def _objects(self, full: FullCheckpoint) -> Tuple[Any, Dict[int, Any]]:
        """Return the object graph of a full checkpoint, and the program's objects by its nodes' numbers.

        None stands for an object that the program lacks.
        """
        from tensorflow.core.protobuf import trackable_object_graph_pb2

        reader = v1().train.NewCheckpointReader(str(full.prefix))
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
        objects: Dict[int, Any] = {0: self._checkpoint}
        order = [0]
        # `order` grows meanwhile: children come behind their parents.
        for number in order:
            children = _children(objects[number])
            for child in graph.nodes[number].children:
                if child.node_id not in objects:
                    objects[child.node_id] = children.get(child.local_name)
                    order.append(child.node_id)
        # Slot variables of Keras 2's optimizers are not among their children.
        for number in order:
            for slot in graph.nodes[number].slot_variables:
                original = objects[slot.original_variable_node_id]
                objects[slot.slot_variable_node_id] = objects[number].get_slot(original, slot.slot_name)
        return graph, objects

    @property
    def _step(self) -> int:
        return int(self._iterations.numpy())

    def _save_full(self) -> None:
        self._last_full = self._step
        # The number ends the name, from which `Store` has the step of a checkpoint without `global_step`.
        self._manager.save(checkpoint_number=self._last_full)


def _children(trackable: Any) -> Dict[str, Any]:
    """Return the objects that a checkpoint's object graph has directly below `trackable`, by name."""
    if hasattr(trackable, "_trackable_children"):
        return dict(trackable._trackable_children())
    return dict(getattr(trackable, "_checkpoint_dependencies", ()))


def _is_same(stored: Array, value: Array) -> bool:
    """True if both have one shape, dtype and, bit by bit, the same values."""
    stored, value = np.asarray(stored), np.asarray(value)
    if (stored.shape, stored.dtype) != (value.shape, value.dtype):
        return False
    return stored.tobytes() == value.tobytes() if stored.dtype != object else bool((stored == value).all())


def _check(model: Any) -> None:
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise Refused("IncrementCallback needs TensorFlow 2", hint="IncrementHook serves sessions")
    if not model.built:
        raise Refused(
            "increments need a model whose variables exist", hint="call model.build(...) before model.fit"
        )
    strategy = getattr(model, "distribute_strategy", None)
    if "ParameterServerStrategy" in type(strategy).__name__:
        raise Refused(
            "IncrementCallback cannot follow a ParameterServerStrategy: its variables move between steps",
            hint="write full checkpoints: they are compared row by row when they are exported",
        )
    # Slots exist before the first full checkpoint then; those made later would be in no increment.
    if hasattr(model.optimizer, "build"):
        model.optimizer.build(model.trainable_variables)
    else:
        model.optimizer._create_all_weights(model.trainable_variables)


def eager_tracking(name: str, variable: Any) -> VariableTracking:
    """Return the tracking of an eager variable `name`, which is read for its shape and type.

    Its rows are compared; all of it if its rank is 0 or 1.
    """
    value = np.asarray(variable.numpy())
    mode = TrackingMode.COMPARED if value.ndim > 1 else TrackingMode.WHOLE
    part = VariablePart(variable, value.shape, (0,) * value.ndim)
    return VariableTracking(name, v1().as_dtype(value.dtype).name, value.dtype, value.shape, (part,), mode)


class EagerSource(Source):
    """The values of eager variables by name."""

    def __init__(self, variables: Dict[str, Any]) -> None:
        self._variables = variables

    def read(self, tracked: VariableTracking, part: VariablePart, rows: Any) -> Iterator[Array]:
        """Yield the present values of rows, or of all (None), as one piece."""
        value = np.asarray(self._variables[tracked.name].numpy())
        yield value if rows is None else value[rows]

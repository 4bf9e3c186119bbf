"""Prune the function library and convert variables, so that a graph can be served and updated.

*Functions.* Functions that the graph calls are kept, and in each the nodes that its results need. Old feature
columns make a table in a function and fill it with constants on each call:

    HashTableV2 -> LookupTableImportV2(table, Const, Const)      the control edge from here
                -> LookupTableFindV2(table, ids)                 to here gives the order

Such fills are kept, although they return nothing. Every call fills in the same entries, which a static table
accepts.

*Variables.* Reference variables become resource variables, which the incremental subgraph can update, and
gathers from whole variables ResourceGather: `exporter.graph.variable_uses` says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from graphlib import CycleError, TopologicalSorter

from msgspec.structs import replace

from exporter.errors import GraphError, NotServable
from exporter.graph.inference_graph import GraphVariable
from exporter.graph.keys import VARIABLE_OPS
from exporter.graph.nodes import (
    CALLS,
    ENTERS,
    SWITCHES,
    Endpoint,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    closure,
    const_value,
    data_inputs,
    drop_from_function,
    endpoint,
    free_name,
    has_control_flow,
    input_names,
    new_node,
    node_of,
    through_identities,
    waited_for,
)
from exporter.graph.servable import called_functions, changes_state, check_body, check_known, check_reads
from exporter.graph.source_graph import VariableKey
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_REF_FORMS = {
    name: name.removeprefix("Ref")
    for name in ("RefSwitch", "RefMerge", "RefEnter", "RefExit", "RefNextIteration")
}

_GATHERS = frozenset({"Gather", "GatherV2"})
_MAX_STEPS = 32  # through nodes that forward a value: a damaged graph may have a cycle of them
_SHOWN = 4
_MOST_LEVELS = 128  # of calls: some functions here, and TensorFlow itself, recurse into each level
_MOST_EXPANDED = 1 << 22  # nodes; served graphs have some ten thousand, and not many more fit into 2 GB
_FILLS = frozenset({"InitializeTable", "InitializeTableV2", "LookupTableImport", "LookupTableImportV2"})
_STATIC = frozenset({"HashTable", "HashTableV2"})
_TABLES = re.compile(r"(Anonymous|Mutable)*(Dense)?HashTable(OfTensors)?(V2)?")
_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_CALLEES = ("f", "then_branch", "else_branch", "cond", "body")


def served_library(
    library: Mapping[str, Proto],
    inference: Iterable[Proto],
    initialisers: Iterable[Proto],
    *,
    allow_foreign: bool,
) -> Proto:
    """Return a FunctionDefLibrary with pruned copies of the functions that a graph calls.

    They are in the order of `library`, which has the graph's functions by name. `inference` are the nodes
    that requests run: a function that they call keeps only nodes that its results need. A function that the
    nodes `initialisers` call, directly or through others, loses only its assignments.

    Raises:
        ForeignOperations: a function needs an operation that TensorFlow lacks; never with `allow_foreign`.
        NotServable: a server must not run a needed node, or one reads a variable after a change of it.
        GraphError: a called function, or an input of a needed node, is missing, or a type number is unknown.
    """
    for_init = reachable(initialisers, library)
    served = protos.FunctionDefLibrary()
    stock = None if allow_foreign else library.keys()
    for_inference = _prune_reachable(inference, library, mutating(library), for_init, stock)
    for name in library:
        if name in for_inference:
            served.function.append(for_inference[name])
        elif name in for_init:
            served.function.append(_without_assignments(without_placement(library[name])))
            if stock is not None:
                check_known(served.function[-1].node_def, name, stock)
    return served


def _prune_reachable(
    nodes: Iterable[Proto],
    library: Mapping[str, Proto],
    changing: set[str],
    keep_whole: set[str],
    stock: Collection[str] | None,
) -> dict[str, Proto]:
    """Return {name: pruned copy} of the functions that nodes call, directly or through others.

    Args:
        nodes: the nodes that call.
        library: all functions of the graph.
        changing: the functions that change state.
        keep_whole: functions that lose only their assignments.
        stock: the graph's functions, which are no foreign operations; None allows foreign operations.

    Raises:
        GraphError: a called function is missing, or cannot be served; the subclass says why.
    """
    found: dict[str, Proto] = {}
    pending = [*nodes]
    while pending:  # a pruned body calls fewer functions, so they are pruned while they are found
        for name in _callees([pending.pop()], library):
            if name not in found:
                body = without_placement(library[name])
                found[name] = (
                    _without_assignments(body) if name in keep_whole else pruned_body(body, changing, stock)
                )
                if stock is not None:
                    check_known(found[name].node_def, name, stock)
                pending += found[name].node_def
    return found


def pruned_body(function: Proto, changing: set[str], stock: Collection[str] | None) -> Proto:
    """Reduce a function, in place, to the nodes that its results need, and return it.

    Nodes that fill needed tables with constants are kept, too, and every user of such a table waits for them.
    Gathers from whole variables become ResourceGather. A function with TF1 control flow is not changed or
    checked. `changing` are the names of the functions that change state. `stock` are the names of the graph's
    functions: other operations must be stock TensorFlow's; None allows all.

    Raises:
        ForeignOperations: a needed operation is not known.
        NotServable: a server must not run a needed node, or it reads a variable after a change of it.
        GraphError: a needed node reads an input that does not exist, or has an unknown type number.
    """
    nodes = {node.name: node for node in function.node_def}
    if has_control_flow(nodes):
        return function  # control edges bind nodes to branches here, see `Pivots`
    gather_rows(nodes)
    fills = constant_fills(nodes)
    kept = needed_by(nodes, function.ret.values())
    kept |= needed_by(nodes, [fill for fill, table in fills.items() if table in kept])
    name = function.signature.name
    if stock is not None:  # first: later checks cannot judge foreign operations
        check_known((nodes[n] for n in kept), name, stock)
    read = [n for n in nodes if n in kept]
    check_reads(nodes, read, changing, where=f" in function {name!r}", allowed=fills)
    check_body((nodes[n] for n in kept if n not in fills), name)
    fill_before_use(nodes, fills)
    there = kept | {argument.name for argument in function.signature.input_arg}
    for node in (nodes[n] for n in kept):
        for text in input_names(node):
            if node_of(text) not in there:
                raise GraphError(
                    f"{node.op} {node.name!r} of function {name!r} reads {text!r}, which is not there"
                )
    drop_from_function(function, {node.name for node in function.node_def} - kept)
    return function


def needed_by(nodes: Mapping[str, Proto], results: Iterable[str]) -> set[str]:
    """Return the names of the nodes of a function's body that results are computed from, directly or not.

    `nodes` are the body's, by name, and `results` tensors as a FunctionDef writes them. Control inputs and
    arguments do not count.
    """

    def makers(texts: Iterable[str]) -> Iterator[str]:
        return (name for text in texts if (name := text.partition(":")[0]) in nodes)  # `^name` is no node

    return {*closure(makers(results), lambda name: makers(nodes[name].input))}


def without_placement(function: Proto) -> Proto:
    """Return a copy of a function without devices and colocation, which name the trainer's machines."""
    copy = deepcopy(function)
    for node in copy.node_def:
        node.device = ""
        node.attr.pop("_class", None)
    return copy


def _without_assignments(function: Proto) -> Proto:
    """Remove the nodes that assign to resource variables from a function, in place, and return it."""
    drop_from_function(function, {node.name for node in function.node_def if node.op in _ASSIGNS})
    return function


def reachable(nodes: Iterable[Proto], library: Mapping[str, Proto]) -> set[str]:
    """Return the names of the functions that `nodes` call, directly or through others.

    `library` has the graph's functions by name. GraphError for a call of a function that it lacks.
    """
    return {*closure(_callees(nodes, library), lambda name: _callees(library[name].node_def, library))}


def callees_first(nodes: Iterable[Proto], library: Mapping[str, Proto]) -> list[str]:
    """Return the names of the functions that `nodes` call, directly or through others, callees first.

    GraphError for a call of a function that the library lacks; its subclass NotServable for recursion, for
    calls nested more than 128 deep, and for a function that expands to more than 4,194,304 nodes.
    """
    nodes = [*nodes]
    calls = {name: [*_callees(library[name].node_def, library)] for name in sorted(reachable(nodes, library))}
    try:
        ordered = [*TopologicalSorter({name: {*callees} for name, callees in calls.items()}).static_order()]
    except CycleError as error:
        name, *others = error.args[1][:-1]
        way = f", through {', '.join(map(repr, others[:_SHOWN]))}" if others else ""
        raise NotServable(
            f"function {name!r} calls itself{way}",
            cause="TensorFlow expands the functions that a graph calls, and would never come to an end",
            hint="write it as a loop (tf.while_loop), or choose other outputs",
        ) from None
    _require_expandable(ordered, calls, library)
    return ordered


def _require_expandable(
    ordered: Iterable[str], calls: Mapping[str, Iterable[str]], library: Mapping[str, Proto]
) -> None:
    """Raise NotServable if functions nest more than 128 deep, or expand to more than 4,194,304 nodes.

    `ordered` has their names, callees first, and `calls` is {name: the functions that it calls, once for each
    call}.
    """
    sizes, levels = dict[str, int](), dict[str, int]()
    for name in ordered:
        sizes[name] = len(library[name].node_def) + sum(sizes[callee] for callee in calls[name])
        levels[name] = 1 + max((levels[callee] for callee in calls[name]), default=0)
        if levels[name] > _MOST_LEVELS:
            raise NotServable(
                f"function {name!r} calls others on more than {_MOST_LEVELS} levels",
                hint="repeat it in a loop (tf.while_loop), or choose other outputs",
            )
        if sizes[name] > _MOST_EXPANDED:
            raise NotServable(
                f"function {name!r} would become more than {_MOST_EXPANDED} nodes",
                cause="TensorFlow writes the body of a function out for each call of it, on every level",
                hint="repeat it in a loop (tf.while_loop), or choose other outputs",
            )


def _callees(nodes: Iterable[Proto], library: Mapping[str, Proto]) -> Iterator[str]:
    """Yield the functions of the library that nodes call directly, once for each call.

    GraphError for a call of a function that the library lacks.
    """
    for node in nodes:
        for key in _CALLEES if node.op in CALLS else ():
            name = attr(node, key).func.name
            if name and name not in library:
                raise GraphError(
                    f"{node.op} {node.name!r} calls function {name!r}, which the graph does not have",
                    cause="the graph is damaged, or was cut by hand",
                )
        yield from (name for name in called_functions(node) if name in library)


def mutating(library: Mapping[str, Proto]) -> set[str]:
    """Return the names of the functions that write a variable or a table, directly or through others.

    A function that only fills its own tables with constants is not one of them.
    """
    found = set[str]()
    for name, function in library.items():
        changing = [node.name for node in function.node_def if changes_state(node.op)]
        if changing and not constant_fills({n.name: n for n in function.node_def}).keys() >= {*changing}:
            found.add(name)
    return callers(library, found)


def callers(library: Mapping[str, Proto], called: Iterable[str]) -> set[str]:
    """Return the names of the functions `called`, and of all that call one of them, directly or not.

    `library` has the graph's functions by name; KeyError if it lacks one of `called`.
    """
    found = {*called}
    if not found:  # a large library takes time to walk
        return found
    calling: dict[str, set[str]] = {name: set() for name in library}
    for name, function in library.items():
        for node in function.node_def:
            for callee in called_functions(node) & library.keys():
                calling[callee].add(name)
    return {*closure(found, calling.__getitem__)}


def terminating(library: Mapping[str, Proto]) -> list[str]:
    """Return the names of the functions that neither recurse nor call one that does, each after its callees.

    GraphError for a call of a function that the library lacks.
    """
    calls = {name: {*_callees(function.node_def, library)} for name, function in library.items()}
    order = TopologicalSorter(calls)
    with suppress(CycleError):  # after it, get_ready still yields what depends on no cycle
        order.prepare()
    found = list[str]()
    while ready := order.get_ready():
        found += ready
        order.done(*ready)
    return found


def constant_fills(nodes: Mapping[str, Proto]) -> dict[str, str]:
    """Return {filling node: table's node} for the nodes that fill a body's own tables with constants.

    `nodes` are the body's, by name. A table that the body gets as an argument is not its own.
    """
    found = {}
    for node in nodes.values():
        if node.op not in _FILLS:
            continue
        table, *contents = (nodes.get(through_identities(nodes, text)) for text in input_names(node))
        is_constant = all(each is not None and each.op == "Const" for each in contents)
        if table is not None and _TABLES.fullmatch(table.op) and is_constant:
            found[node.name] = table.name
    return found


def fill_before_use(nodes: Mapping[str, Proto], fills: Mapping[str, str]) -> None:
    """Make every user of a table wait for the node that fills it, by a control input, in place.

    `fills` is {filling node: table's node}.
    """
    # The program's own control edge may have gone through nodes that are dropped.
    for node in nodes.values() if fills else ():
        if node.name not in fills and node.op != "Identity":
            taken = {through_identities(nodes, text) for text in input_names(node)}
            waits = [f"^{fill}" for fill, table in fills.items() if table in taken]
            node.input.extend(text for text in waits if text not in node.input)


def drop_refills(meta_graph: Proto, init_op: str | None) -> None:
    """Remove from functions, in place, the fills of static tables that the init op has filled before.

    `init_op` is the name of the init op's node; without one (None) nothing is removed. Functions that the
    init op calls keep their fills. Keras' feature columns of TensorFlow 2.0 to 2.2 fill their tables in each
    call of a signature. A static table is filled once; a second fill is ignored if its contents are equal,
    and an error if they differ (`InitializableLookupTable::Initialize` in
    tensorflow/core/framework/lookup_interface). A server runs the init op before any signature. GraphError if
    a function is called that the graph lacks.
    """
    graph = {node.name: node for node in meta_graph.graph_def.node}
    library = {function.signature.name: function for function in meta_graph.graph_def.library.function}
    loading = [graph[name] for name in waited_for(graph, [init_op] if init_op else [])]
    filled = {
        name
        for node in loading
        for source in data_inputs(node)
        if (name := through_identities(graph, source.node)) in graph and graph[name].op in _STATIC
    }
    if not filled:
        return
    at_load = reachable(loading, library)
    served = [node for node in graph.values() if node not in loading]
    known = _arguments_that_are(filled, graph, served, library)
    for name, function in library.items():
        if name not in at_load:
            fills = (node for node in function.node_def if node.op in _FILLS and node.input)
            drop_from_function(function, {node.name for node in fills if node.input[0] in known[name]})


def _arguments_that_are(
    tables: Collection[str],
    graph: Mapping[str, Proto],
    served: Iterable[Proto],
    library: Mapping[str, Proto],
) -> dict[str, set[str]]:
    """Return {function: the names of its arguments to which every call passes one of these tables}.

    `tables` are names of nodes in `graph`, and `served` the nodes of `graph` whose calls count, as do all
    calls in functions. A function that nothing calls has all its arguments.
    """
    behind = partial(through_identities, graph)
    arguments = {name: [a.name for a in f.signature.input_arg] for name, f in library.items()}
    found = {name: {*names} for name, names in arguments.items()}
    calls = [("", node) for node in served]
    calls += [(name, node) for name, function in library.items() for node in function.node_def]
    calls = [(where, node) for where, node in calls if called_functions(node) & library.keys()]
    is_changing = True
    while is_changing:  # a function's arguments depend on its callers': until none is removed any more
        is_changing = False
        for where, node in calls:
            inputs = input_names(node)
            for callee in called_functions(node) & library.keys():
                shift = CALLS.get(node.op, 0 if node.op == callee else len(inputs))
                given = dict(zip(arguments[callee], inputs[shift:], strict=False))
                kept = {
                    name
                    for name in found[callee] & given.keys()
                    if (given[name] in found[where] if where else behind(given[name]) in tables)
                }
                is_changing |= kept != found[callee]
                found[callee] = kept
    return found


def use_resource_variables(nodes: dict[str, Proto]) -> dict[Endpoint, Endpoint]:
    """Make every variable a VarHandleOp with explicit reads, in place.

    `nodes` are a graph's, by name. Operations on references become plain ones, and nodes that read variables
    are added. Returns {reference variable's tensor: the tensor with its value}. Nodes with equal container
    and shared name get the name of the first as shared name. GraphError if a variable has an unknown type
    number.
    """
    references = {name for name, node in nodes.items() if node.op in ("Variable", "VariableV2")}
    reads: dict[Endpoint, Endpoint] = {}
    for node in list(nodes.values()):
        if any(endpoint(text).node in references for text in node.input):
            _read_by_value(nodes, node, references, reads)
        node.op = _REF_FORMS.get(node.op, node.op)
    for name in references:
        reads.setdefault(Endpoint(name, 0), Endpoint(_add_read(nodes, nodes[name]), 0))
    first_of: dict[tuple[str, str], str] = {}
    for name in [name for name, node in nodes.items() if node.op in VARIABLE_OPS]:
        identity = (attr_text(nodes[name], "container"), attr_text(nodes[name], "shared_name") or name)
        _make_handle(nodes[name], first_of.setdefault(identity, name))
    return reads


def _read_by_value(
    nodes: dict[str, Proto], node: Proto, references: set[str], reads: dict[Endpoint, Endpoint]
) -> None:
    if node.op in ("Identity", "RefIdentity"):  # it becomes the read, and keeps its name for its readers
        node.op = "ReadVariableOp"
        if "T" in node.attr:
            node.attr["dtype"].CopyFrom(node.attr["T"])
            del node.attr["T"]
        return
    if node.op == "IsVariableInitialized":
        node.op = "VarIsInitializedOp"
        node.attr.pop("dtype", None)
        return
    for position, text in enumerate(node.input):
        source = endpoint(text)
        if source.node in references and source.output >= 0:
            if source not in reads:
                reads[source] = Endpoint(_add_read(nodes, nodes[source.node]), 0)
            node.input[position] = reads[source].as_input


def _add_read(nodes: dict[str, Proto], variable: Proto) -> str:
    name = free_name(nodes, f"{variable.name}/ReadVariableOp")
    dtype = attr_dtype(variable, "dtype") or DType.FLOAT
    nodes[name] = new_node(name, "ReadVariableOp", [variable.name], dtype=dtype)
    return name


def _make_handle(node: Proto, shared_name: str) -> None:
    """Replace a variable's node by a VarHandleOp with this shared name, in place, and without a container.

    GraphError for an unknown type number.
    """
    # `allowed_devices` and `debug_name` are dropped: a server needs neither, and older ones do not know them.
    kept = {name: node.attr[name] for name in ("shape", "_output_shapes") if name in node.attr}
    dtype = attr_dtype(node, "dtype") or DType.FLOAT
    handle = new_node(node.name, "VarHandleOp", dtype=dtype, shared_name=shared_name.encode())
    for name, value in kept.items():
        if not (name == "_output_shapes" and node.op != "VarHandleOp"):  # a reference's is the value's shape
            handle.attr[name].CopyFrom(value)
    node.CopyFrom(handle)


def graph_variables(
    nodes: Mapping[str, Proto], keys: Mapping[str, VariableKey], without: Collection[str]
) -> tuple[GraphVariable, ...]:
    """Return the variables of a graph's VarHandleOps, each once, in order, except the nodes `without`.

    A VarHandleOp whose shared name is not its own name is another node's variable and left out. `keys` is
    {node: the name that its variable has in a checkpoint}, by default the node's own; a name that several
    whole variables have becomes the node's. NotServable if a variable has no static shape, GraphError if it
    has an unknown type number.
    """
    found = []
    for name, node in nodes.items():
        if node.op != "VarHandleOp" or attr_text(node, "shared_name") != name or name in without:
            continue
        shape = attr_shape(node)
        if shape is None or min(shape, default=0) < 0:
            raise NotServable(
                f"variable {name!r} has no static shape",
                hint="create it with a shape (validate_shape=True), and export again",
            )
        key = keys.get(name, VariableKey(name))
        dtype = attr_dtype(node, "dtype") or DType.FLOAT
        found.append(GraphVariable(name, key.key, dtype, shape, key.part))
    # Several objects may have one name (`Variable`), which would give them one tensor; nodes' names differ.
    uses = Counter(variable.key for variable in found if variable.part is None)
    return tuple(replace(v, key=v.node) if uses[v.key] > 1 else v for v in found)


def gather_rows(nodes: dict[str, Proto]) -> None:
    """Turn gathers from variables' whole values into ResourceGather, in place, in a graph or a function.

    Only gathers of rows (along dimension 0, by int32 or int64) are turned. Nodes that forward a handle may be
    added. GraphError if a gather's indices have an unknown type number.
    """
    twins: dict[str, str] = {}
    for node in list(nodes.values()):
        if node.op in _GATHERS and _is_row_lookup(nodes, node):
            handle = _handle_of(nodes, twins, node.input[0], _MAX_STEPS)
            if handle is not None:
                _make_resource_gather(node, handle)


def _is_row_lookup(nodes: Mapping[str, Proto], node: Proto) -> bool:
    # ResourceGather gathers along dimension 0 alone, by int32 or int64.
    if attr(node, "batch_dims").i or attr_dtype(node, "Tindices") not in (DType.INT32, DType.INT64):
        return False
    if node.op == "Gather":
        return len(node.input) >= 2
    value = const_value(nodes.get(node_of(node.input[2])) if len(node.input) >= 3 else None)
    return value is not None and value.size == 1 and int(value.ravel()[0]) == 0


def _handle_of(nodes: dict[str, Proto], twins: dict[str, str], text: str, steps_left: int) -> str | None:
    """Return the handle of a variable, if the tensor `text` is that variable's whole value, else None.

    Both are names of tensors. The value may pass through Identity, Switch and Enter, at most `steps_left` of
    them. A Switch or Enter gets a copy that forwards the handle: it is added to `nodes`, and to `twins` as
    {node of the value: node of the handle}.
    """
    name = node_of(text)
    node = nodes.get(name)
    if node is None or not node.input or not steps_left:
        return None
    if node.op == "ReadVariableOp":
        return str(node.input[0])
    if node.op == "Identity":
        return _handle_of(nodes, twins, node.input[0], steps_left - 1)
    if node.op not in SWITCHES and node.op not in ENTERS:
        return None
    if name not in twins:  # a Switch or an Enter on the value gets a twin on the handle
        handle = _handle_of(nodes, twins, node.input[0], steps_left - 1)
        if handle is None:
            return None
        twins[name] = free_name(nodes, f"{name}/handle")
        twin = new_node(twins[name], node.op, [handle, *node.input[1:]], T=DType.RESOURCE)
        for key in {"frame_name", "is_constant", "parallel_iterations"} & node.attr.keys():
            twin.attr[key].CopyFrom(node.attr[key])
        nodes[twin.name] = twin
    return twins[name] + text[len(name) :]


def _make_resource_gather(node: Proto, handle: str) -> None:
    gather = new_node(
        node.name, "ResourceGather", [handle, node.input[1]], batch_dims=0, validate_indices=True
    )
    for name, kept in (("dtype", "Tparams"), ("Tindices", "Tindices"), ("_output_shapes", "_output_shapes")):
        if kept in node.attr:
            gather.attr[name].CopyFrom(node.attr[kept])
    node.CopyFrom(gather)

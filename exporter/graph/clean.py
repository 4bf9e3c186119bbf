"""Reduce a graph to what its signatures need, and make it servable: no queues, devices or training.

Kept: what the outputs of the signatures read, and what fills the tables among that. Nothing else: no training
operations, queues, summaries, assertions, devices, colocation, containers or collections. Control edges go
too, because they order side effects and an inference graph has none; those that bind a node to a branch or
an iteration of TF1 control flow stay.

Find assets that a graph reads during requests, not only while a model loads.

A loader feeds an asset's path while it runs the init op, and never again. So the init op puts the path into a
variable, and whatever runs at a request reads it there:

    Const (fed at load) -> AssignVariableOp -> VarHandleOp -> ReadVariableOp -> ReadFile
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy

from exporter.errors import UsageError
from exporter.graph.batch.opening import BatchSize, Ends, settle_batch
from exporter.graph.deeprec_ops import drop_foreign_attributes, is_deeprecs
from exporter.graph.dynamic_tables import tables_among
from exporter.graph.feeds import cut_inputs, fix_constants, pipeline_batches, served_shape
from exporter.graph.functions import mutating, served_library
from exporter.graph.inference_graph import Asset, InferenceGraph, Outside
from exporter.graph.kept_state import StateMakers, keep_restores
from exporter.graph.keys import lookup_strategies
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    Reached,
    check_acyclic,
    control_inputs,
    data_inputs,
    endpoint,
    free_name,
    new_node,
    reach,
    shape_of,
)
from exporter.graph.outside import outside_ops, require_inside
from exporter.graph.resource_variables import gather_rows, graph_variables, use_resource_variables
from exporter.graph.servable import check_reads, check_servable, foreign_ops, told
from exporter.graph.signatures import SignatureEnds, rename_tensors, signature_tensors, tensor_names
from exporter.graph.source_graph import SourceGraph
from exporter.graph.tables import (
    check_filled,
    check_tables,
    find_assets,
    graph_tables,
    init_node,
    initialisers,
    read_assets_directly,
    use_file_names,
)
from exporter.graph.training_mode import training_mode
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto


def remember_paths(
    nodes: dict[str, Proto], roots: Iterable[str], filling: Iterable[str], assets: Iterable[Asset]
) -> list[str]:
    """Put the paths that outputs need into variables, in place; what the init op is to run for that.

    `roots` make the signatures' tensors, `filling` runs at load and goes on reading the asset itself.
    """
    served = reach(nodes, dict.fromkeys(roots)).inputs
    needed = [asset.node for asset in assets if asset.node in served]
    if not needed:
        return []
    _part_from_loading(nodes, served, [*filling], needed)
    assignments = []
    for path in needed:
        handle = free_name(nodes, f"{path}/path")
        nodes[handle] = new_node(
            handle, "VarHandleOp", dtype=DType.STRING, shape=(), shared_name=handle.encode()
        )
        read = free_name(nodes, f"{handle}/ReadVariableOp")
        for name in served:
            _replace_input(nodes[name], path, read)
        nodes[read] = new_node(read, "ReadVariableOp", [handle], dtype=DType.STRING)
        assign = free_name(nodes, f"{handle}/Assign")
        nodes[assign] = new_node(assign, "AssignVariableOp", [handle, path], dtype=DType.STRING)
        assignments.append(assign)
    return assignments


def _part_from_loading(
    nodes: dict[str, Proto], served: Mapping[str, object], filling: list[str], paths: list[str]
) -> None:
    """Give the initialisers copies of nodes between them and a path that requests use as well, in place."""
    loading = reach(nodes, filling).inputs
    changed = {*paths}
    copies: dict[str, str] = {}
    pending = True
    while pending:  # until no more nodes are found behind the paths
        pending = False
        for name in loading:
            if name in served and name not in changed and _sources(nodes[name]) & changed:
                changed.add(name)
                copies[name] = free_name(nodes, f"{name}/at_load")
                nodes[copies[name]] = deepcopy(nodes[name])
                nodes[copies[name]].name = copies[name]
                pending = True
    for name in [*copies.values(), *(name for name in loading if name not in served)]:
        for original, copy in copies.items():
            _replace_input(nodes[name], original, copy)


def _sources(node: Proto) -> set[str]:
    return {source.node for source in data_inputs(node)}


def _replace_input(node: Proto, source: str, replacement: str) -> None:
    for position, text in enumerate(node.input):
        tensor = endpoint(text)
        if tensor.node == source and tensor.output >= 0:
            node.input[position] = tensor._replace(node=replacement).as_input


_DROPPED_ATTRS = (
    "_class",
    "_output_shapes",
    "_gradient_op_type",
    "container",
    "_has_manual_control_dependencies",
)


def clean(source: SourceGraph) -> InferenceGraph:
    """The inference graph of a source; `source` itself stays as it is.

    Raises:
        NotServable: an output needs what a server cannot run, or a placeholder that gets no value.
        MissingAsset: a vocabulary file is not there.
        GraphError: the graph is damaged.
    """
    index = GraphIndex.of(source.meta_graph)
    signatures = {name: SignatureEnds.of(s) for name, s in sorted(source.meta_graph.signature_def.items())}
    nodes = _with_constants(index, source, signatures.values())
    allow_foreign = source.trust.foreign_ops
    foreign = frozenset[str]() if allow_foreign else foreign_ops(index.nodes.values(), index.functions)
    replaced = _cut(index, nodes, signatures.values(), foreign)
    roots = _roots(signatures.values(), replaced)
    needed, filling, makers = _needed(index, nodes, replaced, roots, source.init_op)
    state = keep_restores(index, nodes, makers, source.meta_graph.saver_def)
    whole = [*filling, *state.importing]
    makers.require_filled(nodes, whole)
    # Which files a foreign operation reads beside the one that it is given, nobody knows.
    files = [*source.assets] if any(makers.is_foreign(nodes[name]) for name in filling) else []
    needed = reach(nodes, [*roots, *whole, *files], replaced) if state.importing or files else needed
    check_servable(nodes, reach(nodes, whole), fed={state.prefix}, allowed={*whole}, foreign=foreign)
    check_reads(nodes, needed.inputs, mutating(index.functions), where="")

    kept = _copies(nodes, needed)
    _keep_order(nodes, kept, state.importing)
    if is_deeprecs(index.nodes.values()):
        drop_foreign_attributes(kept.values(), source.meta_graph.meta_info_def.stripped_op_list.op)
    reads = use_resource_variables(kept)
    gather_rows(kept)
    moved = reads | {tensor: _moved(target, reads) for tensor, target in replaced.items()}
    roots = _roots(signatures.values(), moved)
    kept = _still_needed(kept, [*roots, *whole, *files])
    assets = find_assets(source, kept, filling)
    use_file_names(kept, assets)
    dynamic = tables_among(source.dynamic_tables, kept)
    variables = graph_variables(kept, source.keys, {node for table in dynamic for node in table.nodes})
    filling += remember_paths(kept, roots, filling, assets)
    init_op = _add_init_op(kept, filling)
    size = _settled(index, kept, signatures.values(), moved)

    meta_graph = _meta_graph(
        source.meta_graph, index, kept, [*filling, *state.importing], allow_foreign=allow_foreign
    )
    unknown = foreign_ops(protos.all_nodes(meta_graph.graph_def), index.functions)
    check_filled(meta_graph, filling)
    outside = outside_ops(
        meta_graph.graph_def,
        files={asset.node for asset in assets},
        own=[name for name in reach(kept, state.importing).inputs if kept[name].op == "RestoreV2"],
    )
    require_inside(outside, is_allowed=source.trust.file_ops)
    for name, signature in source.meta_graph.signature_def.items():
        meta_graph.signature_def[name].CopyFrom(_served_signature(index, signature, moved, size))
    fed = {_moved(tensor, moved).node for ends in signatures.values() for tensor in ends.inputs}
    training = training_mode(meta_graph.graph_def, _roots(signatures.values(), moved), fed)
    return InferenceGraph(
        source=source.label,
        meta_graph=meta_graph,
        variables=variables,
        assets=assets,
        init_op=init_op,
        lookups=lookup_strategies(meta_graph.graph_def, variables),
        tables=graph_tables(kept, source.tables),
        training=training,
        notes=(
            *source.notes,
            *size.notes,
            *training.notes(),
            *_defaults(kept, fed),
            *_needs(unknown, outside),
        ),
        objects=source.objects,
        traced_rows=size.traced,
        dynamic_tables=dynamic,
        layers={source.keys[node].key: place for node, place in source.layers.items() if node in source.keys},
        foreign=tuple(sorted(unknown)),
        state=state,
        outside=tuple(outside),
    )


def _with_constants(
    index: GraphIndex, source: SourceGraph, signatures: Iterable[SignatureEnds]
) -> dict[str, Proto]:
    """The nodes, with constants for what `--feed` fixes and for the paths of assets."""
    both = source.feeds.keys() & {tensor.node for ends in signatures for tensor in ends.inputs}
    if both:
        raise UsageError(
            f"{min(both)!r} is an input of a signature and fixed by --feed", hint="choose one of them"
        )
    nodes = dict(index.nodes)
    read_assets_directly(nodes, source.assets)
    fix_constants(index, nodes, source.feeds)
    return nodes


def _cut(
    index: GraphIndex, nodes: dict[str, Proto], signatures: Iterable[SignatureEnds], foreign: Collection[str]
) -> dict[Endpoint, Endpoint]:
    """Check what a request to each signature runs, and put placeholders where nothing computes an input.

    A server can be fed any tensor. So one that a signature takes and another one computes stays as it is.
    Returns where the tensors are to be read from that got a placeholder.
    """
    computed: set[str] = set()
    given: dict[Endpoint, str] = {}
    for ends in signatures:
        given |= ends.inputs
        reached = reach(nodes, ends.computed, given=ends.inputs)
        check_servable(nodes, reached, fed={tensor.node for tensor in ends.inputs}, foreign=foreign)
        computed |= reached.inputs.keys()
    return cut_inputs(index, nodes, {t: alias for t, alias in given.items() if t.node not in computed})


def _settled(
    index: GraphIndex,
    kept: dict[str, Proto],
    signatures: Iterable[SignatureEnds],
    moved: Mapping[Endpoint, Endpoint],
) -> BatchSize:
    """How many rows requests may have; in place, the nodes that training's batch was taken out of."""
    cut = [*dict.fromkeys(tensor for ends in signatures for tensor in ends.inputs)]
    traced = {
        shape[0] for tensor in cut if (shape := index.shape(tensor)) and served_shape(index, tensor) != shape
    }
    sizes = traced or pipeline_batches(index)
    ends = [
        Ends(
            {_moved(tensor, moved): served_shape(index, tensor) for tensor in one.inputs},
            [_moved(tensor, moved) for tensor in one.outputs],
        )
        for one in signatures
    ]
    return settle_batch(kept, ends, index.functions, sizes.pop() if len(sizes) == 1 else None)


def _roots(signatures: Iterable[SignatureEnds], moved: Mapping[Endpoint, Endpoint]) -> list[str]:
    """The nodes that make the signatures' tensors, outputs first."""
    outputs = [tensor for ends in signatures for tensor in ends.outputs]
    inputs = [tensor for ends in signatures for tensor in ends.inputs]
    return [*dict.fromkeys(_moved(tensor, moved).node for tensor in [*outputs, *inputs])]


def _needed(
    index: GraphIndex,
    nodes: Mapping[str, Proto],
    replaced: Mapping[Endpoint, Endpoint],
    roots: list[str],
    init_op: str | None,
) -> tuple[Reached, list[str], StateMakers]:
    """What outputs need, together with what fills the tables among it, which may need further tables."""
    filling: list[str] = []
    while True:
        needed = reach(nodes, [*roots, *filling], replaced)
        check_acyclic(nodes, needed)
        check_tables(nodes, needed.inputs)
        makers = StateMakers.among(index, needed.inputs)
        found = [*initialisers(index, needed.inputs, init_op), *makers.initialisers(init_op)]
        found = [*dict.fromkeys(found)]
        if found == filling:
            return needed, filling, makers
        filling = found


def _moved(tensor: Endpoint, moves: Mapping[Endpoint, Endpoint]) -> Endpoint:
    return moves.get(tensor, tensor)


def _copies(nodes: Mapping[str, Proto], needed: Reached) -> dict[str, Proto]:
    """Copies of the needed nodes in the graph's own order."""
    kept = {}
    for name, node in nodes.items():
        if name in needed.inputs:
            kept[name] = deepcopy(node)
            kept[name].input[:] = needed.inputs[name]
    return kept


def _keep_order(nodes: Mapping[str, Proto], kept: Mapping[str, Proto], importing: Collection[str]) -> None:
    """Let what restores state run in the order that its library wants (clear, then import), in place."""
    for name in importing:
        after = (other for other in control_inputs(nodes[name]) if other in importing)
        kept[name].input.extend(f"^{other}" for other in after)


def _still_needed(kept: dict[str, Proto], roots: Iterable[str]) -> dict[str, Proto]:
    """Without the reads of tables that are now gathered from."""
    reached = reach(kept, dict.fromkeys(roots))
    return {name: node for name, node in kept.items() if name in reached.inputs}


def _defaults(kept: Mapping[str, Proto], fed: Collection[str]) -> Iterator[str]:
    """What keeps a default value because no signature feeds it."""
    for name, node in kept.items():
        if node.op == "PlaceholderWithDefault" and name not in fed:
            yield f"placeholder {name!r} keeps its default value; fix another with --feed {name}=VALUE"


def _needs(foreign: Collection[str], outside: Iterable[Outside]) -> Iterator[str]:
    """What serving the graph takes beyond a stock server and the version's own files."""
    for each in outside:
        yield f"when served, {each}"
    if foreign:
        yield f"the server must know operations that stock TensorFlow does not have: {told(foreign)}"


def _add_init_op(kept: dict[str, Proto], filling: list[str]) -> str | None:
    if not filling:
        return None
    name = free_name(kept, "init_tables")
    kept[name] = init_node(name, filling)
    return name


def _meta_graph(
    source: Proto, index: GraphIndex, kept: Mapping[str, Proto], filling: list[str], *, allow_foreign: bool
) -> Proto:
    """A MetaGraphDef with the kept nodes and functions, and what still applies of the description."""
    meta_graph = protos.MetaGraphDef()
    graph_def = meta_graph.graph_def
    for node in kept.values():
        node.device = ""
        for name in _DROPPED_ATTRS:
            node.attr.pop(name, None)
        graph_def.node.append(node)
    graph_def.versions.CopyFrom(source.graph_def.versions)
    inference = [node for name, node in kept.items() if name not in filling]
    whole = [kept[name] for name in filling]
    library = served_library(index.functions, inference, whole, allow_foreign=allow_foreign)
    graph_def.library.CopyFrom(library)
    used = {node.op for node in kept.values()}
    used |= {node.op for function in graph_def.library.function for node in function.node_def}
    info = meta_graph.meta_info_def
    info.tensorflow_version = source.meta_info_def.tensorflow_version
    info.stripped_default_attrs = source.meta_info_def.stripped_default_attrs
    info.stripped_op_list.op.extend(op for op in source.meta_info_def.stripped_op_list.op if op.name in used)
    return meta_graph


def _served_signature(
    index: GraphIndex, signature: Proto, moved: Mapping[Endpoint, Endpoint], size: BatchSize
) -> Proto:
    """The signature with tensors of the served graph; sizes of training batches become unknown.

    If the graph answers one size only, that is what its batched tensors say.
    """
    served = deepcopy(signature)
    batch_sizes = set()
    for role, _, info in signature_tensors(served):
        for text in tensor_names(info):
            tensor = endpoint(text)
            shape = shape_of(info.tensor_shape)
            batched = served_shape(index, tensor)
            if role == "input" and shape and batched and batched[0] != shape[0]:
                batch_sizes.add(shape[0])
                info.tensor_shape.dim[0].size = -1
            elif role == "output" and shape and shape[0] in batch_sizes:
                info.tensor_shape.dim[0].size = -1
            if size.only is not None and info.tensor_shape.dim and info.tensor_shape.dim[0].size < 0:
                info.tensor_shape.dim[0].size = size.only
            rename_tensors(info, {str(tensor): str(_moved(tensor, moved))})
    return served

"""Reduce a graph to the nodes that its signatures need, so that a server can run it: `clean`.

It keeps the nodes that compute the signatures' outputs, and the nodes that fill the tables among them.
Control edges are dropped, too, because they order side effects, and an inference graph has none; except those
that bind a node to a branch or an iteration of TF1 control flow.

*Assets that requests read.* A loader feeds an asset's path while it runs the init op, and never again. So the
init op puts the path into a variable, and the nodes that run at a request read it there:

    Const (fed at load) -> AssignVariableOp -> VarHandleOp -> ReadVariableOp -> ReadFile

*State of other libraries.* A library's own table or model is a resource that a node without inputs makes. Two
kinds of operations fill it, and are kept with all that they need: operations under the graph's init op (TF-DF
reads trees from files of assets/), and operations under its restore op, which import tensors of the
checkpoint (TFRA's tables):

    prefix -> RestoreV2 (names) -> Import (handle)         in the graph, or in the function that restores

A restore in a function is copied into the graph, and reads only the tensors that are imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy

import numpy as np
from msgspec import Struct

from exporter.errors import NotServable, UsageError
from exporter.graph.batch.laboratory import Ends, InputKind, sparse_inputs
from exporter.graph.batch.opening import BatchSize, Filling, settle_batch
from exporter.graph.deeprec_ops import drop_foreign_attributes, is_deeprecs
from exporter.graph.feeds import cut_inputs, fix_constants, pipeline_batches, served_shape
from exporter.graph.functions import (
    callees_first,
    callers,
    gather_rows,
    graph_variables,
    mutating,
    needed_by,
    served_library,
    use_resource_variables,
)
from exporter.graph.inference_graph import Asset, InferenceGraph, KeptState, Outside
from exporter.graph.keys import lookup_strategies
from exporter.graph.lookup_tables import (
    check_filled,
    check_tables,
    find_assets,
    graph_tables,
    initialisers,
    read_assets_directly,
    tables_among,
    use_file_names,
)
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    Reached,
    attr_text,
    base_dtype,
    check_acyclic,
    closure,
    const_texts,
    constant,
    control_inputs,
    data_inputs,
    endpoint,
    free_name,
    input_names,
    new_node,
    node_of,
    reach,
    shape_of,
    through_identities,
    waited_for,
)
from exporter.graph.outside import outside_ops, require_inside
from exporter.graph.servable import by_library, called_functions, check_reads, check_servable, foreign_ops
from exporter.graph.signatures import SignatureEnds, rename_tensors, signature_tensors, tensor_names
from exporter.graph.source_graph import SourceGraph
from exporter.graph.training_mode import training_mode
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.rest_json import REST_TYPES

# Operations of stock TensorFlow that make state which only operations of their own restore.
_STOCK_MAKERS = re.compile(r"BoostedTrees\w*(HandleOp|Resource)")

_READS = "RestoreV2"
_PREFIX = "kept_state/prefix"

_DROPPED_ATTRS = [
    "_class",
    "_output_shapes",
    "_gradient_op_type",
    "container",
    "_has_manual_control_dependencies",
]


def clean(source: SourceGraph) -> InferenceGraph:
    """Make the inference graph of a source, whose graph is not changed.

    It may run the graph in a process of its own, for up to minutes, to find out which batch sizes it accepts.
    GraphError and subclasses if it cannot be served; UsageError if `--feed` fixes an input of a signature.
    """
    index = GraphIndex.of(source.meta_graph)
    signatures = {name: SignatureEnds.of(s) for name, s in sorted(source.meta_graph.signature_def.items())}
    chosen = _choose(source, index, signatures.values())
    nodes, state, filling = chosen.nodes, chosen.state, [*chosen.filling]
    kept, moved = _servable_copies(source, index, signatures.values(), chosen)
    roots = _roots(signatures.values(), moved)
    assets = find_assets(source, kept, filling)
    use_file_names(kept, assets)
    dynamic = tables_among(source.dynamic_tables, kept)
    # Signatures may need only a table's row numbers; it is published whole all the same.
    own = {node for table in dynamic for node in table.nodes}
    kept |= _copies(nodes, Reached(dict.fromkeys(own - kept.keys(), ()), {}))
    variables = graph_variables(kept, source.keys, own)
    filling += remember_paths(kept, roots, filling, assets)
    init_op = free_name(kept, "init_tables") if filling else None
    if init_op is not None:
        kept[init_op] = new_node(init_op, "NoOp", after=filling)
    loading = Filling(filling, {asset.node: asset.source for asset in assets})
    size = _settled(index, kept, signatures.values(), moved, loading)

    functions = index.functions if size.library is None else size.library
    meta_graph = _meta_graph(
        source.meta_graph,
        functions,
        kept,
        [*filling, *state.importing],
        allow_foreign=source.trust.foreign_ops,
    )
    unknown = foreign_ops(protos.all_nodes(meta_graph.graph_def), functions)
    check_filled(meta_graph, filling)
    fed = {moved.get(tensor, tensor).node for ends in signatures.values() for tensor in ends.inputs}
    outside = outside_ops(
        meta_graph.graph_def,
        files={asset.node for asset in assets},
        own=[name for name in reach(kept, state.importing).inputs if kept[name].op == "RestoreV2"],
        fed=fed,
    )
    require_inside(outside, is_allowed=source.trust.file_ops)
    for name, signature in source.meta_graph.signature_def.items():
        meta_graph.signature_def[name].CopyFrom(_served_signature(index, signature, moved, size))
    training = training_mode(meta_graph)
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
            *_beyond_rest(meta_graph.signature_def),
        ),
        objects=source.objects,
        traced_rows=size.traced,
        opened_batch=size.traced if size.opened else None,
        dynamic_tables=dynamic,
        layers={source.keys[node].key: at for node, at in source.layers.items() if node in source.keys},
        foreign=tuple(sorted(unknown)),
        state=state,
        outside=tuple(outside),
    )


class _Chosen(Struct, frozen=True):
    """The nodes that an inference graph keeps, still as the source has them.

    `filling` fill tables, `files` are nodes with the paths of assets that they may read; `replaced` has the
    tensors that are read in place of others.
    """

    nodes: dict[str, Proto]
    needed: Reached
    replaced: Mapping[Endpoint, Endpoint]
    filling: tuple[str, ...]
    state: KeptState
    files: tuple[str, ...]

    @property
    def whole(self) -> tuple[str, ...]:
        """The nodes that fill tables and import state: they are kept with all that they need."""
        return (*self.filling, *self.state.importing)


def _choose(source: SourceGraph, index: GraphIndex, ends: Collection[SignatureEnds]) -> _Chosen:
    """Choose the nodes of a source's graph to keep; `ends` are the tensors of its signatures.

    GraphError and subclasses if some of these nodes cannot be served; UsageError if `--feed` fixes an input.
    """
    nodes = _with_constants(index, source, ends)
    is_any = source.trust.foreign_ops
    foreign = frozenset[str]() if is_any else foreign_ops(index.nodes.values(), index.functions)
    replaced = _cut(index, nodes, ends, foreign)
    roots = _roots(ends, replaced)
    needed, filling, makers = _needed(index, nodes, replaced, roots, source.init_op)
    callees_first((nodes[name] for name in needed.inputs), index.functions)  # refuses recursion
    state = keep_restores(index, nodes, makers, source.meta_graph.saver_def)
    whole = [*filling, *state.importing]
    makers.require_filled(nodes, whole)
    # A foreign operation may read other files beside its argument: keep all assets.
    files = tuple(source.assets) if any(makers.is_foreign(nodes[name]) for name in filling) else ()
    needed = reach(nodes, [*roots, *whole, *files], replaced) if state.importing or files else needed
    check_servable(nodes, reach(nodes, whole), fed={state.prefix}, allowed={*whole}, foreign=foreign)
    check_reads(nodes, needed.inputs, mutating(index.functions), where="")
    return _Chosen(nodes, needed, replaced, tuple(filling), state, files)


def _servable_copies(
    source: SourceGraph, index: GraphIndex, ends: Collection[SignatureEnds], chosen: _Chosen
) -> tuple[dict[str, Proto], dict[Endpoint, Endpoint]]:
    """Copy the chosen nodes, with resource variables in place of reference variables, and with gathered rows.

    Returns the copies by name, and {tensor of the source: the tensor of the copies that has its values} for
    tensors that others replaced. ForeignOperations if an attribute that only DeepRec has changes what a node
    does; GraphError for an unknown type number.
    """
    kept, importing = _copies(chosen.nodes, chosen.needed), chosen.state.importing
    for name in importing:  # a library restores its state in an order: clear, then import
        after = (other for other in control_inputs(chosen.nodes[name]) if other in importing)
        kept[name].input.extend(f"^{other}" for other in after)
    if is_deeprecs(index.nodes.values()):
        drop_foreign_attributes(kept.values(), source.meta_graph.meta_info_def.stripped_op_list.op)
    reads = use_resource_variables(kept)
    gather_rows(kept)
    moved = reads | {tensor: reads.get(target, target) for tensor, target in chosen.replaced.items()}
    # Whole variables that only lookups read are not read any more.
    reached = reach(kept, dict.fromkeys([*_roots(ends, moved), *chosen.whole, *chosen.files])).inputs
    return {name: node for name, node in kept.items() if name in reached}, moved


def _with_constants(
    index: GraphIndex, source: SourceGraph, signatures: Iterable[SignatureEnds]
) -> dict[str, Proto]:
    """Return the graph's nodes by name, assets' paths and placeholders of `--feed` replaced by constants.

    The graph is not changed. `signatures` are the tensors of the signatures. UsageError if one has a
    placeholder of `--feed` as an input; GraphError if a placeholder's dtype is unknown.
    """
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
    """Check the nodes that each signature runs, and add placeholders to `nodes` for computed inputs.

    Returns {input: its placeholder}, without inputs that are placeholders already or that another signature
    computes. `foreign` are operations that stock TensorFlow lacks. NotServable, or its subclass
    ForeignOperations, if a server cannot run a node; GraphError if a node reads one that is missing, or an
    input's dtype is unknown.
    """
    computed: set[str] = set()
    given: dict[Endpoint, str] = {}
    for ends in signatures:
        given |= ends.inputs
        reached = reach(nodes, ends.computed, given=ends.inputs)
        check_servable(nodes, reached, fed={tensor.node for tensor in ends.inputs}, foreign=foreign)
        computed |= reached.inputs.keys()
    # A server accepts values for any tensor, so an input that another signature computes is not cut.
    return cut_inputs(index, nodes, {t: alias for t, alias in given.items() if t.node not in computed})


def _settled(
    index: GraphIndex,
    kept: dict[str, Proto],
    signatures: Iterable[SignatureEnds],
    moved: Mapping[Endpoint, Endpoint],
    filling: Filling,
) -> BatchSize:
    """Return the batch sizes that requests may have, found by running the graph if needed.

    The graph runs in a process of its own, for up to minutes. Constants that fix training's batch size are
    made dynamic in `kept`, in place. `moved` is {tensor of the source: the tensor in `kept` with its values};
    `filling` says how the graph's tables are filled. GraphError if a type number is unknown, or the graph
    calls a function that it lacks.
    """
    cut = [*dict.fromkeys(tensor for ends in signatures for tensor in ends.inputs)]
    traced = {
        shape[0] for tensor in cut if (shape := index.shape(tensor)) and served_shape(index, tensor) != shape
    }
    sizes = traced or pipeline_batches(index)
    ends = [_ends(index, one, moved) for one in signatures]
    return settle_batch(kept, ends, index.functions, sizes.pop() if len(sizes) == 1 else None, filling)


def _ends(index: GraphIndex, ends: SignatureEnds, moved: Mapping[Endpoint, Endpoint]) -> Ends:
    """Return a signature's tensors in the served graph, the inputs with their served shapes and dtypes.

    `moved` is {tensor of the source: the served tensor with its values}. GraphError if an input's dtype is
    unknown.
    """
    inputs = {tensor: InputKind(served_shape(index, tensor), index.dtype(tensor)) for tensor in ends.inputs}
    groups = sparse_inputs(inputs, ends.inputs)
    parts = {tensor for group in groups for tensor in group}

    def is_loose(tensor: Endpoint) -> bool:
        """True for a sparse tensor's values (output 1, a vector) if its indices and shape are not inputs."""
        return tensor not in parts and tensor.output == 1 and index.shape(tensor) == (-1,)

    sparse = [tuple(moved.get(t, t) for t in group) for group in groups]
    return Ends(
        {moved.get(tensor, tensor): given for tensor, given in inputs.items()},
        [moved.get(tensor, tensor) for tensor in ends.outputs],
        [(indices, values, shape) for indices, values, shape in sparse],
        [moved.get(tensor, tensor) for tensor in inputs if groups and is_loose(tensor)],
    )


def _roots(signatures: Iterable[SignatureEnds], moved: Mapping[Endpoint, Endpoint]) -> list[str]:
    """Return the nodes of the signatures' tensors, each once, first the nodes of outputs.

    `moved` is {tensor: the tensor to count in its place}.
    """
    outputs = [tensor for ends in signatures for tensor in ends.outputs]
    inputs = [tensor for ends in signatures for tensor in ends.inputs]
    return [*dict.fromkeys(moved.get(tensor, tensor).node for tensor in [*outputs, *inputs])]


def _needed(
    index: GraphIndex,
    nodes: Mapping[str, Proto],
    replaced: Mapping[Endpoint, Endpoint],
    roots: list[str],
    init_op: str | None,
) -> tuple[Reached, list[str], StateMakers]:
    """Return the nodes that outputs need, the nodes that fill their tables and state, and the state's makers.

    `replaced` is {tensor: the tensor to read in its place}; `roots` are the nodes of the signatures' tensors;
    `init_op` is the node that initialises the graph, None if it has none.

    Raises:
        GraphError: there is a cycle outside of loops, conditionals nest more than 64 deep, or a node or a
            called function is missing.
        NotServable: a table gets its contents only from training.
    """
    filling: list[str] = []
    while True:  # initialisers may need more tables
        needed = reach(nodes, [*roots, *filling], replaced)
        check_acyclic(nodes, needed)
        check_tables(nodes, needed.inputs)
        makers = StateMakers.among(index, needed.inputs)
        found = [
            *dict.fromkeys([*initialisers(index, needed.inputs, init_op), *makers.initialisers(init_op)])
        ]
        if found == filling:
            return needed, filling, makers
        filling = found


def _copies(nodes: Mapping[str, Proto], needed: Reached) -> dict[str, Proto]:
    """Return copies of the needed nodes, by name in the order of `nodes`, with only the needed inputs."""
    kept = {}
    for name, node in nodes.items():
        if name in needed.inputs:
            kept[name] = deepcopy(node)
            kept[name].input[:] = needed.inputs[name]
    return kept


def _defaults(kept: Mapping[str, Proto], fed: Collection[str]) -> Iterator[str]:
    """Yield a note for each placeholder in `kept` with a default value that is not among the nodes `fed`."""
    for name, node in kept.items():
        if node.op == "PlaceholderWithDefault" and name not in fed:
            yield f"placeholder {name!r} keeps its default value; fix another with --feed {name}=VALUE"


def _beyond_rest(signatures: Mapping[str, Proto]) -> Iterator[str]:
    """Yield a note for each signature, by name, with dtypes for which TensorFlow Serving has no JSON.

    GraphError, during the iteration, for an unknown type number.
    """
    for name, signature in sorted(signatures.items()):
        found = [
            f"{alias} is {base_dtype(info.dtype).label}"
            for _, alias, info in signature_tensors(signature)
            if info.WhichOneof("encoding") == "name" and info.dtype not in REST_TYPES
        ]
        if found:
            yield f"REST cannot carry signature {name!r}, gRPC can: {', '.join(found)}"


def _needs(foreign: Collection[str], outside: Iterable[Outside]) -> Iterator[str]:
    """Yield a graph's requirements of a server, beyond stock TensorFlow and the version's files, as notes.

    `foreign` are operations that stock TensorFlow lacks, `outside` operations that reach out of the version.
    """
    for each in outside:
        yield f"when served, {each}"
    if foreign:
        yield f"the server must know operations that stock TensorFlow lacks: {by_library(foreign)}"


def _meta_graph(
    source: Proto,
    functions: Mapping[str, Proto],
    kept: Mapping[str, Proto],
    filling: list[str],
    *,
    allow_foreign: bool,
) -> Proto:
    """Make a MetaGraphDef of the nodes `kept`, whose devices and hints for training are removed in place.

    It has the functions that they call, pruned, and from `source` the versions and the OpDefs that are still
    used. `filling` are the names of the nodes that run at load. GraphError and subclasses if a function
    cannot be served: unless `allow_foreign`, also if it has an operation that TensorFlow lacks.
    """
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
    library = served_library(functions, inference, whole, allow_foreign=allow_foreign)
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
    """Return a copy of a signature with the served graph's tensors and batch size.

    The batch size is -1 for any, or the only one in `size`. `moved` is {tensor of the source: the served
    tensor with its values}.
    """
    served = deepcopy(signature)
    batch_sizes = set()
    for role, _, info in signature_tensors(served):
        for text in tensor_names(info):
            tensor = endpoint(text)
            shape = shape_of(info.tensor_shape)
            # A signature may fix a size that its placeholder does not: its model answers only that size.
            is_pipelines = served_shape(index, tensor) != index.shape(tensor)
            if role == "input" and shape and is_pipelines and shape[0] >= 0:
                batch_sizes.add(shape[0])
                info.tensor_shape.dim[0].size = -1
            elif role == "output" and shape and shape[0] in batch_sizes:
                info.tensor_shape.dim[0].size = -1
            if size.only is not None and info.tensor_shape.dim and info.tensor_shape.dim[0].size < 0:
                info.tensor_shape.dim[0].size = size.only
            rename_tensors(info, {str(tensor): str(moved.get(tensor, tensor))})
    return served


class StateMakers(Struct, frozen=True):
    """The nodes of a graph that make the state of other libraries."""

    index: GraphIndex
    identities: Mapping[str, str]  # the resource of each: those of one operation and shared name make one
    foreign: frozenset[
        str
    ]  # operations that stock TensorFlow lacks, and functions that run one, directly or not
    is_foreign_used: bool  # outputs need a foreign operation

    @classmethod
    def among(cls, index: GraphIndex, needed: Iterable[str]) -> StateMakers:
        """Return the nodes among those named `needed` that make the state of other libraries."""
        ops = foreign_ops(protos.all_nodes(index.graph_def), index.functions)
        own = [name for name, f in index.functions.items() if any(node.op in ops for node in f.node_def)]
        foreign = ops | callers(index.functions, own)
        wanted = [index.nodes[name] for name in needed if name in index.nodes]
        identities = {node.name: _identity(node) for node in wanted if _makes_state(index, node, ops)}
        return cls(index, identities, foreign, any(called_functions(node) & foreign for node in wanted))

    def taken_by(self, node: Proto) -> set[str]:
        """Return the identities of the makers' resources whose handles a node takes; empty for most nodes.

        An identity is the operation and the shared name, or else the node's name.
        """
        nodes = self.index.nodes
        taken = (nodes.get(through_identities(nodes, text)) for text in input_names(node))
        return {_identity(source) for source in taken if source is not None} & {*self.identities.values()}

    def is_foreign(self, node: Proto) -> bool:
        """True for an operation that stock TensorFlow lacks, and for a call of a function that runs one."""
        return not called_functions(node).isdisjoint(self.foreign)

    def initialisers(self, init_op: str | None) -> list[str]:
        """Return the names of the nodes under the init op that fill the makers' state, in the graph's order.

        If outputs need a foreign operation, all foreign operations under the init op are among them. Empty
        without an init op.
        """
        under = {*waited_for(self.index.nodes, [init_op] if init_op else [])}
        return [
            name
            for name, node in self.index.nodes.items()
            if name in under and (self.taken_by(node) or (self.is_foreign_used and self.is_foreign(node)))
        ]

    def require_filled(self, nodes: Mapping[str, Proto], filling: Iterable[str]) -> None:
        """Raise NotServable if a resource of the makers is filled by none of the nodes named `filling`.

        A node fills a resource if it takes the resource's handle. `nodes` has the graph's nodes by name.
        """
        filled = {identity for name in filling for identity in self.taken_by(nodes[name])}
        for name, identity in self.identities.items():
            if identity not in filled:
                raise NotServable(
                    f"nothing in the graph fills {self.index.nodes[name].op} {name!r}",
                    cause="it would be empty when served: neither the init op nor the restore op writes it",
                    hint="save the model with its library's own saver, as a SavedModel or with its Saver",
                )


def keep_restores(
    index: GraphIndex, nodes: dict[str, Proto], makers: StateMakers, saver_def: Proto
) -> KeptState:
    """Make `nodes` restore the makers' state, in place, and read only the tensors that are imported.

    Functions that restore are written out into `nodes`, and a placeholder is added for the checkpoint's
    prefix. Returns the nodes that import, the placeholder, and the tensors' names; an empty KeptState if
    nothing restores such state. NotServable if the restored tensors are unknown; GraphError for an unknown
    type number.
    """
    importing: list[str] = []
    restore = endpoint(saver_def.restore_op_name).node
    for name in waited_for(nodes, [restore]) if makers.identities else []:
        node = nodes[name]
        if not makers.taken_by(node):
            continue
        called = sorted(called_functions(node) & index.functions.keys())
        importing += _written_out(index, nodes, node, called[0], makers) if called else [name]
    if not importing:
        return KeptState()
    nodes[_PREFIX] = new_node(_PREFIX, "Placeholder", dtype=DType.STRING, shape=())
    tensors = _narrow_reads(nodes, importing, endpoint(saver_def.filename_tensor_name).node)
    return KeptState(tuple(importing), _PREFIX, tensors)


def _makes_state(index: GraphIndex, node: Proto, foreign: Collection[str]) -> bool:
    """True for a node without inputs whose operation makes state that only its own library restores.

    `foreign` are the operations that stock TensorFlow lacks.
    """
    is_stock, op_def = _STOCK_MAKERS.fullmatch(node.op) is not None, index.op_def(node.op)
    is_stateful = node.op in foreign and (op_def is None or op_def.is_stateful)
    return (is_stock or is_stateful) and not data_inputs(node)


def _identity(node: Proto) -> str:
    return f"{node.op} {attr_text(node, 'shared_name') or node.name}"


def _written_out(
    index: GraphIndex, nodes: dict[str, Proto], call: Proto, function: str, makers: StateMakers
) -> list[str]:
    """Copy the nodes of a called function that take makers' handles, and their sources, into `nodes`.

    `call` is the node that calls the function. Returns the names of the copies that take handles. NotServable
    if a copied node reads from an operation with several outputs.
    """
    body = {node.name: node for node in index.functions[function].node_def}
    arguments = [argument.name for argument in index.functions[function].signature.input_arg]
    given = dict(zip(arguments, (source.as_input for source in data_inputs(call)), strict=False))
    handles = {name for name, text in given.items() if makers.taken_by(new_node("", "", [text]))}
    taking = [name for name, node in body.items() if {*map(node_of, input_names(node))} & handles]
    kept = {*taking, *needed_by(body, (text for name in taking for text in input_names(body[name])))}
    scope = free_name(nodes, f"kept_state/{call.name}")

    def moved(text: str) -> str:
        """Return an input of a node in the body as the graph writes it.

        NotServable for an output of an operation that has several.
        """
        name, *output = text.removeprefix("^").split(":")
        if text.startswith("^"):
            return f"^{scope}/{name}"
        if not output:
            return str(given[name])
        op_def = index.op_def(body[name].op)
        if op_def is not None and len(op_def.output_arg) > 1:  # its outputs are not counted through
            raise _unclear(body[name])
        return Endpoint(f"{scope}/{name}", int(output[-1])).as_input

    for name in body:
        if name in kept:
            node = nodes[f"{scope}/{name}"] = deepcopy(body[name])
            node.name, node.device = f"{scope}/{name}", ""
            inputs = [text for text in node.input if not text.startswith("^") or text[1:] in kept]
            node.input[:] = map(moved, inputs)
    return [f"{scope}/{name}" for name in taking]


def _narrow_reads(nodes: dict[str, Proto], importing: Iterable[str], prefix: str) -> tuple[str, ...]:
    """Let the RestoreV2 nodes that `importing` depend on read, in place, only tensors that are used.

    `importing` are nodes that import state; a tensor is used if one of them, or a node between, reads it.
    `prefix` is the node with the checkpoint's path. Returns the tensors' names in the checkpoint, each once.
    NotServable if another operation than RestoreV2 reads the path, or the tensors that a RestoreV2 reads are
    unknown; GraphError for an unknown type number.
    """

    def sources(name: str) -> list[str]:
        if nodes[name].op == _READS:
            return []
        return [source.node for source in data_inputs(nodes[name]) if source.node in nodes]

    before = closure(importing, sources)
    if prefix in before:
        raise _unclear(nodes[next(name for name in before if prefix in sources(name))])
    reads = [name for name in before if nodes[name].op == _READS]
    return tuple(dict.fromkeys(tensor for name in reads for tensor in _narrow_read(nodes, name, before)))


def _narrow_read(nodes: dict[str, Proto], name: str, before: Iterable[str]) -> list[str]:
    """Let a RestoreV2 node read, in place, only tensors that the nodes `before` use.

    These nodes are replaced by copies that read the renumbered outputs, and constants with the remaining
    names are added to `nodes`. Returns the tensors' names in the checkpoint, in the order of the node's
    outputs. NotServable if the names and slices are not constants, or an output is used that the node lacks;
    GraphError for an unknown type number.
    """
    node = nodes[name]
    names, slices = (
        const_texts(nodes.get(through_identities(nodes, text))) for text in input_names(node)[1:3]
    )
    if names is None or slices is None or len(names) != len(slices):
        raise _unclear(node)
    users = [user for user in before if name in {source.node for source in data_inputs(nodes[user])}]
    used = sorted({s.output for user in users for s in data_inputs(nodes[user]) if s.node == name})
    types = node.attr["dtypes"].list.type
    if max(used, default=-1) >= min(len(names), len(types)):
        raise _unclear(node)
    numbers = {Endpoint(name, output): Endpoint(name, at) for at, output in enumerate(used)}
    for user in users:
        nodes[user] = deepcopy(nodes[user])
        for at, tensor in enumerate(data_inputs(nodes[user])):
            if tensor in numbers:
                nodes[user].input[at] = numbers[tensor].as_input
    texts = {f"{name}/tensor_names": names, f"{name}/shape_and_slices": slices}
    dtypes = tuple(base_dtype(types[output]) for output in used)
    nodes[name] = new_node(name, _READS, [_PREFIX, *texts], dtypes=dtypes)
    for key, values in texts.items():
        chosen = np.array([values[output].encode() for output in used], object)
        nodes[key] = constant(key, chosen, DType.STRING)
    return [names[output] for output in used]


def _unclear(node: Proto) -> NotServable:
    return NotServable(
        f"it is unknown which tensors {node.op} {node.name!r} restores",
        cause="it reads the checkpoint by itself, and outputs are computed from the state that it fills",
        hint="serve the model as its library saves it",
    )


def remember_paths(
    nodes: dict[str, Proto], roots: Iterable[str], filling: Iterable[str], assets: Iterable[Asset]
) -> list[str]:
    """Put the paths of assets that the nodes `roots` need into variables, in place, to be read at requests.

    The nodes `filling`, which run at load, still read the paths themselves. Returns the names of the
    operations that assign the variables, to be run at load, too; empty if `roots` need no path.
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
    """Copy, in place, the nodes that read a path and that both the nodes `filling` and requests need.

    Nodes that run only at load then read the copies, and requests the originals. `served` has the nodes that
    requests run, `paths` the constants with the paths. A node reads a path directly or through others.
    """
    loading = reach(nodes, filling).inputs
    changed = {*paths}
    copies: dict[str, str] = {}
    pending = True
    while pending:  # until no more nodes are found behind the paths
        pending = False
        for name in loading:
            is_behind = not changed.isdisjoint(map(node_of, input_names(nodes[name])))
            if name in served and name not in changed and is_behind:
                changed.add(name)
                copies[name] = free_name(nodes, f"{name}/at_load")
                nodes[copies[name]] = deepcopy(nodes[name])
                nodes[copies[name]].name = copies[name]
                pending = True
    for name in [*copies.values(), *(name for name in loading if name not in served)]:
        for original, copy in copies.items():
            _replace_input(nodes[name], original, copy)


def _replace_input(node: Proto, source: str, replacement: str) -> None:
    """Let a node read output n of `replacement` where it reads output n of `source`, in place."""
    for position, text in enumerate(node.input):
        tensor = endpoint(text)
        if tensor.node == source and tensor.output >= 0:
            node.input[position] = tensor._replace(node=replacement).as_input

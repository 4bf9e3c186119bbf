"""Read a `.meta` file: a MetaGraphDef, binary or (`.pbtxt`) as text, with the signatures to serve.

If a user has to name the signatures, the error suggests inputs and outputs. Inputs are placeholders, except
those for a Saver's file name. Outputs are the tensors after the last use of a trained variable: a softmax,
sigmoid, top-k or arg-max there, and the logits before it. Tensors of gradients, updates of variables,
summaries and Savers are not outputs.

Graphs of TensorFlow Recommenders-Addons (TFRA) are refused first: a lookup in its training graphs assigns its
result to a variable, so the next check would report that an output changes a variable, and mislead the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from exporter.checkpoint.recommenders_addons import table_in_graph
from exporter.checkpoint.trainers import AUTODIST_SCOPE
from exporter.errors import NotServable, UsageError
from exporter.graph.called_bodies import SHAPES
from exporter.graph.deeprec_conversion import convert_deeprec
from exporter.graph.deeprec_ops import HANDLE
from exporter.graph.feeds import hands_over_batches, parse_feeds
from exporter.graph.functions import callers
from exporter.graph.graph_files import parse_message, read_graph_file, without_recording
from exporter.graph.joined_lookups import separate_lookups
from exporter.graph.keys import VARIABLE_OPS, variable_keys
from exporter.graph.lookup_tables import add_init_op, table_keys, use_resource_tables
from exporter.graph.nodes import Endpoint, GraphIndex, all_before, closure, data_inputs
from exporter.graph.servable import called_functions, changes_state, refusal
from exporter.graph.signatures import (
    SignatureEnds,
    check_signatures,
    collection_spec,
    drop_internal,
    keep_answering,
    parse_examples,
    requested_specs,
    set_signatures,
    without_references,
)
from exporter.graph.source_graph import GraphRequest, SourceGraph
from exporter.graph.table_marks import marked_tables
from exporter.storage.local_paths import quoted
from exporter.wire.protos import Proto

_PREFIX = "TFRA>"
_VERSION = re.compile(r"(?P<release>\d+(\.\d+)*)(-?(a|b|rc|dev|alpha|beta)\.?\d*)?(\+[\w.]+)?", re.ASCII)
_PARTITION = re.compile(r"/part_[0-9]+$")
_SHOWN = 6

_SAVER = re.compile(
    r"(Save|Restore)(V[23]|Slices?)?|MergeV2Checkpoints|ShardedFile(name|spec)|KvResource(Incr)?Import\w*"
)

_FILE_NAMES = re.compile(r"Identity|PlaceholderWithDefault|StringJoin|Pack|Select(V2)?|StaticRegexFullMatch")
_ANSWERS = ("Softmax", "Sigmoid", "TopKV2", "ArgMax")
_TRAINING = re.compile(r"(.*/)?gradients(_\d+)?/.*|(.*/)?(logistic_loss|softmax_cross_entropy)\w*/.*")

_NO_OUTPUT = re.compile(
    r"\w*Grad\w*|\w*Summary\w*|Print(V2)?|Assert|.*CrossEntropyWithLogits|Shape|Rank|Size"
)


def load_metagraph(path: Path, request: GraphRequest) -> SourceGraph:
    """Load the graph of a `.meta` file, with the request's signatures, else its own.

    Raises:
        CorruptFile: the file is truncated, or not a graph, or has more than 2 GiB.
        CheckpointError: it, or the file of `--signatures`, is a pointer of Git LFS, or cannot be fetched from
            a store (subclasses).
        PublishError: what is fetched from a store cannot be written.
        UsageError: it cannot be opened, there are no signatures, or an option does not fit the graph.
        GraphError: it cannot be served; NotServable for a graph that AutoDist has transformed.
    """
    meta_graph = read_metagraph(path)
    if is_autodist(meta_graph):
        raise NotServable(
            f"{path} holds the graph that AutoDist made of the program's, once for each replica",
            cause=f"its names begin with {AUTODIST_SCOPE}0/; the checkpoint has the program's own names",
            hint="name the program's graph: --model with a builder, or AutoDist's SavedModel",
        )
    return with_signatures(meta_graph, request, label=str(path), directory=path.parent)


def is_autodist(meta_graph: Proto) -> bool:
    """True for a graph that AutoDist has transformed for its replicas; no checkpoint has its names."""
    return any(node.name.startswith(AUTODIST_SCOPE) for node in meta_graph.graph_def.node)


def read_metagraph(path: Path) -> Proto:
    """Return the `protos.MetaGraphDef` in a file, without nodes that `IncrementHook` added.

    The file is text if its name ends in `.pbtxt`.

    Raises:
        CorruptFile: it is truncated, or not a graph, or has more than 2 GiB.
        CheckpointError: it is a pointer of Git LFS, or cannot be fetched from a store (subclasses).
        PublishError: what is fetched from a store cannot be written.
        UsageError: it cannot be opened.
    """
    try:
        data = read_graph_file(path)
    except OSError as error:
        raise UsageError(f"the graph {path} cannot be read", cause=error.strerror or str(error)) from error
    is_text = path.suffix == ".pbtxt"
    return without_recording(parse_message("MetaGraphDef", data, path, is_text=is_text, nonempty="graph_def"))


def readable_version(text: str) -> str:
    """Return the longest beginning of a version that `tf.saved_model.load` can parse; "" if there is none.

    For instance `1.15.5` for `1.15.5-deeprec2402`.
    """
    found = _VERSION.match(text)
    return "" if found is None else found[0] if found.end() == len(text) else found["release"]


def with_signatures(meta_graph: Proto, request: GraphRequest, *, label: str, directory: Path) -> SourceGraph:
    """Return a source graph of `meta_graph`, with the request's signatures, else its own.

    Changes `meta_graph`: it gets the signatures, and a node that runs the table initialisers; DeepRec's
    lookups and reference tables become resources; lookups that a published version joined are separate again.
    `label` names the graph in messages. `directory` is where the graph's relative paths are looked up.

    Raises:
        UsageError: there are no signatures, or an option of the request does not fit the graph.
        GraphError: the signatures cannot be served; the subclass says why.
        CheckpointError: the file of `--signatures` is a pointer of Git LFS, or cannot be fetched.
    """
    without_references(meta_graph)
    separate_lookups(meta_graph)
    index = GraphIndex.of(meta_graph)
    drop_internal(meta_graph)
    specs = requested_specs(request) or [*filter(None, [collection_spec(meta_graph)])]
    notes: list[str] = []
    if specs:
        specs = parse_examples(meta_graph, index, specs)
        index = GraphIndex.of(meta_graph)
        set_signatures(meta_graph, index, specs)
    elif meta_graph.signature_def:
        notes = keep_answering(meta_graph, label)
        check_signatures(meta_graph, index)
    if not request.trust.foreign_ops:
        check_addons(meta_graph, index, label)
    if not meta_graph.signature_def:
        raise _nothing_to_serve(index, label)
    converted = convert_deeprec(meta_graph, request.absent_keys)
    if use_resource_tables(meta_graph, index) or converted.tables:
        index = GraphIndex.of(meta_graph)
    return SourceGraph(
        label=label,
        meta_graph=meta_graph,
        keys=variable_keys(meta_graph, index),
        feeds=parse_feeds(index, request.feeds),
        init_op=add_init_op(meta_graph, index),
        directory=directory,
        tables=table_keys(meta_graph, index),
        notes=(*notes, *converted.notes),
        dynamic_tables=(*converted.tables, *marked_tables(meta_graph.graph_def)),
        trust=request.trust,
    )


def _nothing_to_serve(index: GraphIndex, label: str) -> UsageError:
    """Return the error to raise for a graph without signatures; it suggests inputs and outputs.

    `label` names the graph. GraphError if an input pipeline has an unknown type number.
    """
    placeholders = [node.name for node in input_placeholders(index)]
    fed = f"its placeholders are {_listed(placeholders)}" if placeholders else "it has no placeholders"
    batches = [
        str(Endpoint(name, output))
        for name, node in index.nodes.items()
        if hands_over_batches(node.op)
        for output in range(len(index.output_dtypes(node) or ()))
    ]
    if batches:
        fed += f", and is trained with {_listed(batches)}"
    scores = [tensor.as_input for tensor in likely_outputs(index)]
    return UsageError(
        f"nothing says what to serve: {label} has no signatures",
        cause=f"{fed}; likely outputs are {_listed(scores)}",
        hint="--input NAME=TENSOR --output NAME=TENSOR; "
        f"all names: export-model inspect {quoted(label)} --tensors",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") if names else "none"


def check_addons(meta_graph: Proto, index: GraphIndex, label: str) -> None:
    """Raise ForeignOperations if every signature needs operations of TensorFlow Recommenders-Addons.

    A graph without signatures is refused if it has such operations. `label` names the graph in the message.
    """
    bodies = (name for name, body in index.functions.items() if any(map(_is_addons, body.node_def)))
    calling = callers(index.functions, bodies)
    own = {name for name, node in index.nodes.items() if _is_addons(node) or called_functions(node) & calling}
    ends = [SignatureEnds.of(signature) for signature in meta_graph.signature_def.values()]
    if own and all(own & all_before(index.nodes, one.outputs, one.inputs).keys() for one in ends):
        within = (node for name in sorted(calling) for node in index.functions[name].node_def)
        found = {node.name: node.op for node in (*index.nodes.values(), *within) if _is_addons(node)}
        tables = sorted({table for name in found if (table := table_in_graph(name))})
        raise refusal(found, label, f"its tables are {', '.join(map(repr, tables))}" if tables else "")


def _is_addons(node: Proto) -> bool:
    return str(node.op).startswith(_PREFIX)


def input_placeholders(index: GraphIndex) -> list[Proto]:
    """Return the nodes of the placeholders that may be inputs, in the graph's order.

    Placeholders for the file names of a Saver are left out.
    """
    nodes = [node for node in index.nodes.values() if node.op.startswith("Placeholder")]
    return [node for node in nodes if not _is_a_savers(index, node.name)]


def fed_variables(index: GraphIndex, tensors: Iterable[Endpoint]) -> dict[Endpoint, tuple[str, ...]]:
    """Return {tensor: names of the variables that it is first used with}, such as the table of a lookup.

    The names are sorted, and name a partitioned variable as a whole; () if no variable is used with the
    tensor, or with what is computed from it.
    """
    values = _variables_values(index)
    return {tensor: _met(index, tensor, values) for tensor in tensors}


def _met(index: GraphIndex, tensor: Endpoint, values: set[str]) -> tuple[str, ...]:
    seen, level = {tensor.node}, _readers(index, tensor)
    while level:
        sources = {source for node in level for source in _sources(index, node) if source in values}
        if sources:
            found = {name for source in sources for name in _behind(index, source)}
            return tuple(sorted({_PARTITION.sub("", name) for name in found}))
        seen.update(level)
        following = (reader for node in level for reader in _takers(index, node))
        level = [*dict.fromkeys(name for name in following if name not in seen)]
    return ()


def _readers(index: GraphIndex, tensor: Endpoint) -> list[str]:
    """Return the names of the nodes that read values of this output, and not only its shape."""
    return [name for name in _takers(index, tensor.node) if tensor in data_inputs(index.nodes[name])]


def _takers(index: GraphIndex, node: str) -> Iterator[str]:
    """Yield the names of the nodes that read values of any output of `node`, once for each use.

    Nodes that read only a shape are left out.
    """
    return (name for name, _ in index.consumers[node] if index.nodes[name].op not in SHAPES)


def _behind(index: GraphIndex, value: str) -> list[str]:
    """Return the names of the variables that the node `value` is computed from, nearest first."""
    before = closure([value], lambda name: (each for each in _sources(index, name) if each in index.nodes))
    return [name for name in before if index.nodes[name].op in VARIABLE_OPS or index.nodes[name].op == HANDLE]


def likely_outputs(index: GraphIndex) -> list[Endpoint]:
    """Return tensors that look like a model's outputs, the likeliest first.

    Empty if nothing that is computed from an input uses a variable.
    """
    forward = _computed_from_inputs(index)
    values = _variables_values(index)
    reading = (name for name in forward if not values.isdisjoint(_sources(index, name)))
    using = {name for name in reading if index.shape(Endpoint(name, 0)) != ()}  # () is a regularised loss
    followed = _before(index, using, forward)
    last = [name for name in using if name not in followed]
    after = _after(index, last, forward)
    ranked = [name for op in _ANSWERS for name in after if index.nodes[name].op == op]
    logits = [name for name in index.nodes if name in last]
    return [Endpoint(name, 0) for name in dict.fromkeys([*ranked, *logits])]


def _is_a_savers(index: GraphIndex, name: str) -> bool:
    """True if the placeholder `name` is used, and only in the file names of a Saver."""
    pending, seen, saves = [name], {name}, False
    while pending:
        for reader, _ in index.consumers[pending.pop()]:
            op = index.nodes[reader].op
            if not _SAVER.fullmatch(op) and not _FILE_NAMES.fullmatch(op):
                return False
            saves |= _SAVER.fullmatch(op) is not None
            if reader not in seen and not op.startswith(("Restore", "KvResource")):
                seen.add(reader)
                pending.append(reader)
    return saves


def _computed_from_inputs(index: GraphIndex) -> set[str]:
    """Return the names of the nodes computed from inputs: of the forward pass, and of losses after it.

    Gradients, updates of variables, and nodes that only these read are left out.
    """
    reached = {
        name
        for name in _after(index, _inputs(index), index.nodes)
        if not (changes_state(index.nodes[name].op) or _NO_OUTPUT.fullmatch(index.nodes[name].op))
        and not _TRAINING.fullmatch(name)
    }
    return reached - _updates(index, reached)


def _updates(index: GraphIndex, nodes: set[str]) -> set[str]:
    """Return the names among `nodes` that are read only to compute new values of variables."""
    readers = {name: [reader for reader, _ in index.consumers[name]] for name in nodes}
    left = {name: sum(not changes_state(index.nodes[r].op) for r in found) for name, found in readers.items()}
    pending = [name for name, found in readers.items() if found and not left[name]]
    for name in pending:  # grows while it is walked
        for source in _sources(index, name):
            if source in nodes:
                left[source] -= 1
                if not left[source]:
                    pending.append(source)
    return {*pending}


def _variables_values(index: GraphIndex) -> set[str]:
    """Return the names of the variables, and of nodes computed only from them: reads, joined partitions."""
    variables = [name for name, node in index.nodes.items() if node.op in VARIABLE_OPS or node.op == HANDLE]
    fed = {*_after(index, _inputs(index), index.nodes)}
    return {*_after(index, variables, index.nodes.keys() - fed)}


def _inputs(index: GraphIndex) -> list[str]:
    placeholders = [node.name for node in input_placeholders(index)]
    return placeholders + [name for name, node in index.nodes.items() if hands_over_batches(node.op)]


def _after(index: GraphIndex, start: Iterable[str], among: Iterable[str]) -> list[str]:
    """Return the names of the nodes `start`, and of all nodes `among` that depend on them, nearest first.

    Only nodes of `among` are followed.
    """
    among = {*among}
    return [*closure(start, lambda name: (reader for reader, _ in index.consumers[name] if reader in among))]


def _before(index: GraphIndex, start: Iterable[str], among: set[str]) -> set[str]:
    """Return the nodes of `among` that the nodes `start` are computed from, through nodes of `among` only."""

    def before(name: str) -> Iterator[str]:
        return (source for source in _sources(index, name) if source in among)

    return {*closure((source for name in start for source in before(name)), before)}


def _sources(index: GraphIndex, name: str) -> Iterator[str]:
    yield from (source.node for source in data_inputs(index.nodes[name]))

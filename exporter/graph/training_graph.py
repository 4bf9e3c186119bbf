"""Training graphs in SavedModels: find the signatures that can be served, and keep a graph whole.

Builders write the graph of training under tags of their user's choice, with optimizer, loss and train op, and
signatures for training among those for inference (tensorflow/python/saved_model/builder_impl.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from msgspec import Struct, field

from exporter.errors import GraphError, NotServable, UnsupportedFormat
from exporter.graph.deeprec_groups import is_convertible_group
from exporter.graph.deeprec_ops import is_convertible
from exporter.graph.inference_graph import GraphVariable
from exporter.graph.keys import VARIABLE_OPS, variable_keys
from exporter.graph.nodes import (
    GraphIndex,
    all_before,
    attr_dtype,
    attr_shape,
    const_texts,
    data_inputs,
    endpoint,
    reach,
)
from exporter.graph.servable import changes_state, check_servable
from exporter.graph.signatures import SignatureEnds, signature_tensors, tensor_names
from exporter.wire.protos import Proto


def drop_training_signatures(meta_graph: Proto, fixed: Collection[str] = ()) -> list[str]:
    """Remove the signatures that a server cannot run, in place, and return a note on each, sorted by name.

    `fixed` are placeholders that get constants. GraphError if two nodes have the same name, or one has none.
    """
    index = GraphIndex.of(meta_graph)
    notes = []
    for name, signature in sorted(meta_graph.signature_def.items()):
        try:
            _check_signature(index, name, signature, fixed)
        except GraphError as error:
            notes.append(f"signature {name!r} is left out: {error.message}")
            del meta_graph.signature_def[name]
    return notes


def _check_signature(index: GraphIndex, name: str, signature: Proto, fixed: Collection[str]) -> None:
    """Raise GraphError for a signature that needs operations of training, or tensors that do not exist.

    It is NotServable (a GraphError) also if it has no outputs. `fixed` are placeholders that get constants.
    """
    for role, alias, info in signature_tensors(signature):
        for text in tensor_names(info):
            index.resolve(text, f"{role} {alias!r} of {name!r}")
    ends = SignatureEnds.of(signature)
    if not ends.outputs:
        raise NotServable("it has no outputs")
    for node in (index.nodes[before] for before in all_before(index.nodes, ends.outputs, ends.inputs)):
        if changes_state(node.op):
            raise NotServable(f"its outputs wait for {node.op} {node.name!r}")
    reached = reach(index.nodes, ends.computed, given=ends.inputs)
    nodes = index.nodes.values()
    lookups = {node.name for node in nodes if is_convertible(node.op) or is_convertible_group(node)}
    check_servable(
        index.nodes, reached, fed={tensor.node for tensor in ends.inputs} | {*fixed}, allowed=lookups
    )


class TrainingGraph(Struct, frozen=True):
    """A training graph as its author saved it, to be published under `tag` beside the serving graph.

    `source` names its SavedModel; `assets` are files by the node that gets the path.
    """

    source: str
    tag: str
    meta_graph: Proto
    tensors: tuple[str, ...]  # the names that it restores
    variables: tuple[GraphVariable, ...]  # the variables with static shapes that it restores
    assets: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str, tag: str, meta_graph: Proto, assets: Mapping[str, Path]) -> TrainingGraph:
        """Return the training graph `meta_graph` with the names and variables that it restores.

        `source` names its SavedModel, and `tag` the graph in it; `assets` are files by the node that gets the
        path. UnsupportedFormat if it is object-based, GraphError if it computes the names of its tensors, if
        two nodes have the same name, or one has none, or for an unknown type number.
        """
        if meta_graph.HasField("object_graph_def"):
            raise UnsupportedFormat(
                f"the graph {tag!r} of {source} is object-based: nothing else can be saved beside such a one",
                hint="fine-tune from the checkpoint, or leave --train-tag out",
            )
        index = GraphIndex.of(meta_graph)
        keys = variable_keys(meta_graph, index)
        variables = []
        for node in (index.nodes[name] for name in keys if index.nodes[name].op in VARIABLE_OPS):
            shape, dtype, key = attr_shape(node), attr_dtype(node, "dtype"), keys[node.name]
            if shape is not None and min(shape, default=0) >= 0 and dtype is not None:
                variables.append(GraphVariable(node.name, key.key, dtype, shape, key.part))
        restored = _restored_names(index, meta_graph.saver_def.restore_op_name)
        names = restored or dict.fromkeys(key.key for key in keys.values())
        kept = tuple(variable for variable in variables if variable.key in names)
        return cls(source, tag, meta_graph, tuple(names), kept, assets)


def _restored_names(index: GraphIndex, restore_op: str) -> dict[str, None]:
    """Return the names of the tensors that the Saver's restore nodes read, as keys, each once.

    Empty if there is no Saver (`restore_op` is ""). GraphError if the names are computed.
    """
    found: dict[str, None] = {}
    if not restore_op:
        return found
    for name in all_before(index.nodes, [endpoint(restore_op)]):
        node = index.nodes[name]
        if node.op != "RestoreV2":
            continue
        source = data_inputs(node)[1].node if len(data_inputs(node)) > 1 else ""
        names = const_texts(index.nodes.get(source))
        if names is None:
            raise GraphError(f"{name!r} restores names that are not constants of the graph")
        found |= dict.fromkeys(names)
    return found

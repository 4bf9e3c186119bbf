"""Read what DeepRec's `tf.staged` hands over where it comes from.

A stage computes the next batch's features, or its rows, while the model works: a `TensorBufferPut` stores
tensors, and a `TensorBufferTake` of the same shared name gives them to the model. A request is computed at
once, so the model reads what is put. A tensor of a stage that a signature takes as its input stays.

Source: DeepRec, tensorflow/python/ops/prefetch.py and tensorflow/core/ops/tensor_buffer_ops.cc.
"""

from __future__ import annotations

from collections.abc import Collection

from exporter.graph.nodes import Endpoint, GraphIndex, attr, attr_text, data_inputs, endpoint
from exporter.wire.protos import Proto

_PUT, _TAKE = "TensorBufferPut", "TensorBufferTake"


def read_through_stages(index: GraphIndex, given: Collection[Endpoint]) -> None:
    """Let nodes read what is put into stages instead of what is taken from them, in place.

    Stages that give one of the tensors `given`, and those that nothing is put into in this graph, stay.
    """
    takes = [node for node in index.nodes.values() if node.op == _TAKE]
    if not takes:
        return
    puts = {_name(node): node for node in index.nodes.values() if node.op == _PUT}
    moved: dict[Endpoint, str] = {}
    for take in takes:
        put = puts.get(_name(take))
        if put is None or len(attr(take, "dtypes").list.type) != len(data_inputs(put)):
            continue
        if not any(tensor.node == take.name for tensor in given):
            sources = data_inputs(put)
            moved |= {Endpoint(take.name, number): tensor.as_input for number, tensor in enumerate(sources)}
    for node in index.nodes.values():
        for position, text in enumerate(node.input):
            if not text.startswith("^") and endpoint(text) in moved:
                node.input[position] = moved[endpoint(text)]


def _name(node: Proto) -> tuple[str, str]:
    """Nodes that agree on this are of one stage."""
    return attr_text(node, "container"), attr_text(node, "shared_name") or str(node.name)

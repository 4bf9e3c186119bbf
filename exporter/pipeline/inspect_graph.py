"""Examine a `.meta` file: the tensors that could be requested from its graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exporter.graph.deeprec_conversion import looked_up
from exporter.graph.feeds import hands_over_batches
from exporter.graph.metagraph import fed_variables, input_placeholders, likely_outputs, read_metagraph
from exporter.graph.nodes import Endpoint, GraphIndex, endpoint
from exporter.pipeline.inspected import GraphView, TensorSpec, label_of, shape_of, signatures_of
from exporter.wire.protos import Proto


def inspect_graph(path: Path) -> GraphView:
    """Read a `.meta` file and return its view: nodes, signatures, and tensors that could be requested.

    Raises CorruptFile or GraphError if it is damaged, LfsPointer if it is a Git LFS pointer, UsageError if it
    cannot be opened.
    """
    meta_graph = read_metagraph(path)
    index = GraphIndex.of(meta_graph)
    nodes = meta_graph.graph_def.node
    variables = [node for node in nodes if node.op in ("Variable", "VariableV2", "VarHandleOp")]
    batches = [spec for node in nodes if hands_over_batches(node.op) for spec in _outputs(index, node.name)]
    given = [Endpoint(node.name, 0) for node in input_placeholders(index)]
    given += [endpoint(spec.tensor) for spec in batches]
    return GraphView(
        path,
        len(nodes),
        len(variables),
        looked_up(meta_graph, index),
        tuple(map(_placeholder, input_placeholders(index))),
        tuple(batches),
        tuple(_tensor(index, tensor) for tensor in likely_outputs(index)),
        signatures_of(meta_graph),
        {str(tensor): met for tensor, met in fed_variables(index, given).items() if met},
        lambda: (spec for name in sorted(index.nodes) for spec in _outputs(index, name)),
    )


def _outputs(index: GraphIndex, name: str) -> Iterator[TensorSpec]:
    for output, dtype in enumerate(index.output_dtypes(index.nodes[name]) or ()):
        tensor = Endpoint(name, output)
        yield TensorSpec(str(tensor), str(tensor), dtype.label, index.shape(tensor))


def _tensor(index: GraphIndex, tensor: Endpoint) -> TensorSpec:
    dtypes = index.output_dtypes(index.nodes[tensor.node])
    label = dtypes[tensor.output].label if dtypes and tensor.output < len(dtypes) else "unknown type"
    return TensorSpec(str(tensor), str(tensor), label, index.shape(tensor))


def _placeholder(node: Proto) -> TensorSpec:
    return TensorSpec(
        node.name, f"{node.name}:0", label_of(node.attr["dtype"].type), shape_of(node.attr["shape"].shape)
    )

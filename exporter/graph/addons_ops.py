"""Refuse graphs of TensorFlow Recommenders-Addons (TFRA) before anything else is said of them.

Its lookups in a training graph assign what they found to a variable first. So of its `.meta` and its training
SavedModels another error would come first, that an output changes a variable, and lead astray.
"""

from __future__ import annotations

from exporter.checkpoint.recommenders_addons import table_in_graph
from exporter.graph.functions import callers
from exporter.graph.nodes import GraphIndex, all_before
from exporter.graph.servable import called_functions, refusal
from exporter.graph.signatures import SignatureEnds
from exporter.wire.protos import Proto

_PREFIX = "TFRA>"


def check_addons(meta_graph: Proto, index: GraphIndex, label: str) -> None:
    """See that some signature does without TFRA's operations; or, if there is none, that the graph does.

    Raises:
        ForeignOperations: it does not.
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

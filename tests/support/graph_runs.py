"""Train, save and run TF1 graphs in sessions; run cleaned graphs on the same values. For the graph tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exporter.graph.inference_graph import GraphVariable, InferenceGraph


@dataclass(frozen=True)
class Trained:
    """A graph that was trained a little and saved by a stock Saver."""

    graph: Any
    session: Any
    prefix: Path

    @property
    def meta(self) -> str:
        return f"{self.prefix}.meta"

    def run(self, tensor: str, feeds: Mapping[str, Any]) -> Any:
        return self.session.run(tensor, dict(feeds))

    def value(self, key: str) -> Any:
        """A tensor of the checkpoint, partitioned ones joined."""
        import tensorflow as tf

        return tf.train.load_checkpoint(str(self.prefix)).get_tensor(key)


@contextmanager
def v1_graph(*, resource: bool = True, control_flow_v2: bool = False) -> Iterator[Any]:
    """A fresh graph in which variables and control flow are of the asked kind."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    v1 = tf.compat.v1
    before = control_flow_util.ENABLE_CONTROL_FLOW_V2, v1.resource_variables_enabled()
    (v1.enable_control_flow_v2 if control_flow_v2 else v1.disable_control_flow_v2)()
    (v1.enable_resource_variables if resource else v1.disable_resource_variables)()
    try:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(7)
            yield graph
    finally:
        (v1.enable_control_flow_v2 if before[0] else v1.disable_control_flow_v2)()
        (v1.enable_resource_variables if before[1] else v1.disable_resource_variables)()


def train(
    tmp_path: Path,
    build: Callable[[Any], Callable[[Any], None] | None],
    *,
    resource: bool = True,
    control_flow_v2: bool = False,
    saver: Callable[[], Any] | None = None,
) -> Trained:
    """Call `build(v1)` in a graph, run what it returns (a few steps) in a session, and save."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with v1_graph(resource=resource, control_flow_v2=control_flow_v2) as graph:
        steps = build(v1)
        stock = saver() if saver is not None else v1.train.Saver(sharded=True)
        session = v1.Session(graph=graph, config=v1.ConfigProto(allow_soft_placement=True))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(v1.tables_initializer())
        if steps is not None:
            steps(session)
        prefix = stock.save(session, str(tmp_path / "model.ckpt"))
    return Trained(graph, session, Path(prefix))


def serve(
    graph: InferenceGraph,
    values: Callable[[str], Any],
    feeds: Mapping[str, Any],
    signature: str = "serving_default",
) -> dict[str, Any]:
    """Import a cleaned graph, give its variables their values, run a signature."""
    import tensorflow as tf

    v1 = tf.compat.v1
    definition = graph.meta_graph.signature_def[signature]
    graph_def = tf.compat.v1.GraphDef.FromString(graph.meta_graph.graph_def.SerializeToString())
    with tf.Graph().as_default() as served, v1.Session(graph=served) as session:
        tf.import_graph_def(graph_def, name="")
        for variable in graph.variables:
            handle = served.get_tensor_by_name(f"{variable.node}:0")
            value = tf.constant(box(variable, values(variable.key)))
            session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=value))
        if graph.init_op is not None:
            session.run(graph.init_op, {f"{asset.node}:0": str(asset.source) for asset in graph.assets})
        fed = {definition.inputs[alias].name: value for alias, value in feeds.items()}
        return session.run({alias: info.name for alias, info in definition.outputs.items()}, fed)


def box(variable: GraphVariable, whole: Any) -> Any:
    """The part of a whole tensor that a variable holds."""
    if variable.part is None:
        return whole
    spans = zip(variable.part.starts, variable.part.lengths, strict=True)
    return np.asarray(whole)[tuple(slice(start, start + length) for start, length in spans)]


def ops(graph: InferenceGraph) -> set[str]:
    """The kinds of operations in a cleaned graph, functions included."""
    graph_def = graph.meta_graph.graph_def
    inner = {node.op for function in graph_def.library.function for node in function.node_def}
    return {node.op for node in graph_def.node} | inner


def names(graph: InferenceGraph) -> set[str]:
    return {node.name for node in graph.meta_graph.graph_def.node}


def built(make: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """x -> y, and a variable beside it, because a checkpoint holds one."""

    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None, 2], name="x")
        v1.get_variable("w", [1])
        tf.identity(make(v1, x), name="y")

    return build


def keep_prob(v1: Any) -> Any:
    """What dropout keeps, which requests may say."""
    return v1.placeholder_with_default(0.75, [], name="keep_prob")

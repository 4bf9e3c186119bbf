"""Small models trained in a TF1 graph, their checkpoints by the stock Saver, and their graphs by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import VariablesReport, write_variables
from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.graph.inference_graph import Asset, GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import MappingRules
from exporter.options import DataMode
from exporter.wire import protos
from exporter.wire.dtypes import DType

tf1 = tf.compat.v1

Tensors = Mapping[str, Any]
Builder = Callable[[], tuple[Tensors, Tensors]]
"""Makes a model in the default graph: its inputs and outputs by name."""


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and what the model in it answers."""

    prefix: Path
    answers: dict[str, np.ndarray]


def train(
    build: Builder,
    feeds: Mapping[str, Any],
    prefix: Path,
    *,
    sharded: bool = False,
    round_to: Any = None,
    seed: int = 1,
) -> Trained:
    """Build, give every variable random values (as `round_to` holds them), save, answer `feeds`."""
    with tf.Graph().as_default() as graph, tf1.Session(graph=graph) as session:
        inputs, outputs = build()
        tf1.get_variable("opt/slot", [1000], use_resource=True)
        session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])
        rng = np.random.default_rng(seed)
        for variable in tf1.global_variables():
            if variable.dtype.is_floating:
                values = rng.normal(size=variable.shape.as_list())
                if round_to is not None:
                    values = values.astype(variable.dtype.as_numpy_dtype).astype(round_to)
                variable.load(values.astype(variable.dtype.as_numpy_dtype), session)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if sharded:
            saved = _save_sharded(session, prefix)
        else:
            saved = tf1.train.Saver().save(session, str(prefix), write_meta_graph=False)
        answers = session.run(dict(outputs), {inputs[name]: value for name, value in feeds.items()})
        return Trained(Path(saved), answers)


def inference_graph(
    build: Builder,
    *,
    assets: Mapping[str, Path] | None = None,
    lookups: Mapping[str, PartitionStrategy] | None = None,
    with_tables: bool = False,
) -> InferenceGraph:
    """The graph of `build` as the graph stage makes it; `assets` maps constants to files."""
    with tf.Graph().as_default() as graph:
        inputs, outputs = build()
        init_op = tf1.tables_initializer(name="init_tables") if with_tables else None
        wanted = [tensor.op.name for tensor in outputs.values()] + ([init_op.name] if init_op else [])
        meta = protos.MetaGraphDef()
        whole = graph.as_graph_def(add_shapes=False)
        pruned = tf1.graph_util.extract_sub_graph(whole, wanted)
        meta.graph_def.ParseFromString(pruned.SerializeToString())
        signature = tf1.saved_model.build_signature_def(
            {name: tf1.saved_model.build_tensor_info(tensor) for name, tensor in inputs.items()},
            {name: tf1.saved_model.build_tensor_info(tensor) for name, tensor in outputs.items()},
            "tensorflow/serving/predict",
        )
        meta.signature_def["serving_default"].ParseFromString(signature.SerializeToString())
        kept = {node.name for node in meta.graph_def.node}
        variables = tuple(_variable(v) for v in tf1.global_variables() if v.op.name in kept)
        files = tuple(Asset(node, path) for node, path in (assets or {}).items())
        return InferenceGraph(
            "test", meta, variables, files, init_op.name if init_op else None, dict(lookups or {})
        )


def export(
    graph: InferenceGraph,
    prefix: Path,
    directory: Path,
    *,
    rules: MappingRules | None = None,
    data: DataMode = DataMode.AUTO,
) -> VariablesReport:
    mapping = build_mapping(graph, read_catalog(prefix), rules or MappingRules())
    directory.mkdir(parents=True)
    report = write_variables(mapping, directory, data=data)
    write_saved_model(graph, mapping, directory)
    return report


def answers_in_session(
    directory: Path, feeds: Mapping[str, Any], signature: str = "serving_default"
) -> dict[str, np.ndarray]:
    """What TF1's loader and a Session answer, as TF Serving does."""
    with tf.Graph().as_default() as graph, tf1.Session(graph=graph) as session:
        meta = tf1.saved_model.load(session, ["serve"], str(directory))
        definition = meta.signature_def[signature]
        fed = {definition.inputs[name].name: value for name, value in feeds.items()}
        return session.run({name: info.name for name, info in definition.outputs.items()}, fed)


def answers_eagerly(
    directory: Path, feeds: Mapping[str, Any], signature: str = "serving_default"
) -> dict[str, np.ndarray]:
    """What TF2's loader answers."""
    loaded = tf.saved_model.load(str(directory))
    call = loaded.signatures[signature]
    return {k: v.numpy() for k, v in call(**{k: tf.constant(v) for k, v in feeds.items()}).items()}


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def catalog_values(catalog: Any) -> dict[str, np.ndarray]:
    """Every tensor of a bundle as TensorFlow reads it (slices joined, checksums verified)."""
    reader = tf.train.load_checkpoint(str(catalog.prefix))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def _save_sharded(session: Any, prefix: Path, shards: int = 2) -> str:
    """What a sharded Saver does for as many devices: a bundle for each, then one index over all shards."""
    variables = tf1.global_variables()
    parts = [
        tf1.train.Saver(variables[shard::shards]).save(
            session, str(prefix.with_name(f"part-{shard}")), write_meta_graph=False, write_state=False
        )
        for shard in range(shards)
    ]
    session.run(
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=tf.constant(parts), destination_prefix=tf.constant(str(prefix))
        )
    )
    return str(prefix)


def _variable(variable: Any) -> GraphVariable:
    info = variable._get_save_slice_info()
    shape = tuple(variable.shape.as_list())
    part = info and SliceSpec(tuple(info.full_shape), tuple(info.var_offset), tuple(info.var_shape))
    key = info.full_name if info else variable.op.name
    return GraphVariable(
        variable.op.name, key, DType(variable.dtype.base_dtype.as_datatype_enum), shape, part
    )


def embedding(
    rows: int,
    parts: int,
    *,
    width: int = 4,
    strategy: str = "div",
    dtype: Any = tf.float32,
    axis: int = 0,
) -> Builder:
    """A table looked up by id, in `parts` partitions (0: not partitioned), and a dense layer over it."""

    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        partitioner = tf1.fixed_size_partitioner(parts, axis) if parts else None
        table = tf1.get_variable("table", [rows, width], dtype, partitioner=partitioner, use_resource=True)
        kernel = tf1.get_variable("dense/kernel", [width, 3], dtype, use_resource=True)
        scale = tf1.get_variable("scale", [], dtype, use_resource=True)
        if axis == 0:
            found = tf1.nn.embedding_lookup(table, ids, partition_strategy=strategy)
        else:
            found = tf.gather(tf.convert_to_tensor(table), ids)
        return {"ids": ids}, {"rows": tf.identity(found), "scores": tf.matmul(found, kernel) * scale}

    return build


def uneven_ids(rows: int) -> Iterable[int]:
    return np.random.default_rng(0).permutation(rows).astype(np.int64)

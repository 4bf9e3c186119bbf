"""DeepRec's graphs become graphs of stock operations that answer as a numpy reference does, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import ForeignOperations, NotServable, UsageError
from exporter.graph.graph_digest import graph_digest
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphRequest, load_graph, load_source
from exporter.graph.lookup_tables import with_table_shapes
from exporter.graph.outside import runnable_graph
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.stock_ops import is_stock
from tests.support.deeprec_graphs import (
    RANDOM,
    DeepRecGraph,
    EmbeddingVariable,
    Generation,
    deeprec_graph,
    train_op,
)
from tests.support.deeprec_rows import DIM, INT64, answers, rows
from tests.support.dynamic_values import table_values
from tests.support.graph_runs import ops

GENERATIONS = pytest.mark.parametrize("generation", [*Generation], ids=lambda one: one.name.lower())
PROBES = np.array([7, 7, 2, INT64.max, -1, -2, 0, 424_242, INT64.min, -1_000_003, INT64.max - 1, 5])


def converted(program: DeepRecGraph, tmp_path: Path, **ends: dict[str, str]) -> InferenceGraph:
    meta = program.save_meta(tmp_path / "model.ckpt-7.meta")
    return load_graph(GraphRequest(model=str(meta), inputs=ends["inputs"], outputs=ends["outputs"]))


def placeholder(name: str, dtype: Any = np.int64) -> Any:
    import tensorflow as tf

    return tf.compat.v1.placeholder(tf.as_dtype(dtype), [None], name=name)


IDS = {"inputs": {"ids": "ids"}, "outputs": {"rows": "rows"}}


def named(tensor: Any, name: str = "rows") -> None:
    import tensorflow as tf

    tf.identity(tensor, name=name)


@GENERATIONS
@pytest.mark.parametrize("parts", [0, 1, 3, 7])
def test_lookup(tmp_path: Path, generation: Generation, parts: int) -> None:
    with deeprec_graph(generation) as program:
        variable = program.embedding_variable("user", DIM, parts=parts, initializer=0.25)
        named(program.embedding_lookup(variable, placeholder("ids")))
        graph = converted(program, tmp_path, **IDS)

    assert all(is_stock(op) for op in ops(graph))
    assert "DynamicPartition" not in ops(graph), "the parts are served as one table"
    table = rows()
    found = answers(graph, {"user": table}, {"ids": PROBES})["rows"]
    assert np.array_equal(found, table.read(PROBES, np.full((1, DIM), 0.25, np.float32)))
    assert not graph.notes


def test_lookups_themselves_are_outputs(tmp_path: Path) -> None:
    with deeprec_graph() as program:
        whole = program.embedding_variable("whole", DIM, initializer=0.25)
        parted = program.embedding_variable("parted", DIM, parts=2, initializer=0.25)
        ids = placeholder("ids")
        program.embedding_lookup(whole, ids, name="a")
        program.embedding_lookup(parted, ids, name="b")
        outputs = {"a": "a/Gather/Gather", "b": "b/ParallelDynamicStitch", "part": "b/Gather_1/Gather:0"}
        graph = converted(program, tmp_path, inputs={"ids": "ids"}, outputs=outputs)

    table = rows()
    found = answers(graph, {"whole": table, "parted": table}, {"ids": PROBES})
    expected = table.read(PROBES, np.full((1, DIM), 0.25, np.float32))
    assert np.array_equal(found["a"], expected)
    assert np.array_equal(found["b"], expected)
    assert np.array_equal(found["part"], expected[PROBES % 1000 % 2 == 1])


def test_tables_in_front_of_inputs_are_not_served(tmp_path: Path) -> None:
    """Who feeds the rows needs no table, not even to know what absent keys read there."""
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, block_num=2)
        looked_up = tf.identity(program.embedding_lookup(variable, placeholder("ids")), name="looked_up")
        named(looked_up * 2.0)
        graph = converted(program, tmp_path, inputs={"x": "looked_up"}, outputs=IDS["outputs"])

    assert not graph.dynamic_tables
    given = np.ones((2, DIM), np.float32)
    assert np.array_equal(answers(graph, {}, {"x": given})["rows"], given * 2)


@pytest.mark.parametrize("fed", ["ids", "taken"])
def test_stages_are_read_through(tmp_path: Path, fed: str) -> None:
    """`tf.staged` in front of the lookup: requests give what is put in, or what is taken out."""
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, initializer=0.25)
        ids = placeholder("ids")
        doubled = tf.add(ids, ids, name="doubled")
        taken = tf.identity(doubled, name="taken")  # a stand-in: what is put in is `doubled`
        named(program.embedding_lookup(variable, taken))
        meta_graph = program.meta_graph()
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    put = meta_graph.graph_def.node.add(name="stage/put", op="TensorBufferPut", input=["doubled"])
    take = nodes["taken"]
    take.op = "TensorBufferTake"
    del take.input[:]
    take.attr.clear()
    for node in (put, take):
        node.attr["shared_name"].s = b"stage"
        node.attr["dtypes"].list.type.append(int(DType.INT64))
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())

    graph = load_graph(GraphRequest(model=str(meta), inputs={"ids": fed}, outputs=IDS["outputs"]))
    assert all(is_stock(op) for op in ops(graph))
    table = rows()
    asked = np.array([1, 3, 500, 7])
    found = answers(graph, {"user": table}, {"ids": asked})["rows"]
    looked_up = asked * 2 if fed == "ids" else asked
    assert np.array_equal(found, table.read(looked_up, np.full((1, DIM), 0.25, np.float32)))


def test_ids_of_any_rank(tmp_path: Path) -> None:
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, parts=3, initializer=0.0)
        ids = tf.reshape(placeholder("ids"), [-1, 2, 2])
        named(program.embedding_lookup(variable, ids))
        graph = converted(program, tmp_path, **IDS)

    table = rows()
    found = answers(graph, {"user": table}, {"ids": PROBES})["rows"]
    expected = table.read(PROBES, np.zeros((1, DIM), np.float32))
    assert np.array_equal(found, expected.reshape(3, 2, 2, DIM))


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.HALF, DType.BFLOAT16, DType.DOUBLE])
def test_int32_keys_and_other_values(tmp_path: Path, dtype: DType) -> None:
    with deeprec_graph() as program:
        variable = program.embedding_variable(
            "user", DIM, parts=2, key_dtype=DType.INT32, dtype=dtype, initializer=1.5
        )
        named(program.embedding_lookup(variable, placeholder("ids", np.int32)))
        graph = converted(program, tmp_path, **IDS)

    table = rows(keys=[0, 5, -7, 2**31 - 1, -(2**31)], dtype=dtype.numpy)
    probes = np.array([5, 6, -7, 2**31 - 1, -(2**31)], np.int32)
    found = answers(graph, {"user": table}, {"ids": probes})["rows"]
    assert found.dtype == dtype.numpy
    assert np.array_equal(found, table.read(probes, np.full((1, DIM), 1.5, dtype.numpy)))


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_sparse_lookup(tmp_path: Path, parts: int, filtered: bool, weighted: bool, combiner: str) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with deeprec_graph() as program:
        variable = program.embedding_variable(
            "item",
            DIM,
            parts=parts,
            filter_freq=3 if filtered else 0,
            initializer=RANDOM if filtered else 0.5,
            default_value_no_permission=-2.0,
        )
        sparse = v1.sparse_placeholder(tf.int64, [None, None], name="sp")
        weights = tf.SparseTensor(sparse.indices, placeholder("weights", np.float32), sparse.dense_shape)
        named(
            program.embedding_lookup_sparse(
                variable, sparse, weights if weighted else None, combiner=combiner
            )
        )
        inputs = {"indices": "sp/indices", "values": "sp/values", "shape": "sp/shape"}
        graph = converted(
            program,
            tmp_path,
            inputs=inputs | ({"w": "weights"} if weighted else {}),
            outputs={"rows": "rows"},
        )

    assert all(is_stock(op) for op in ops(graph))
    table, segments = rows(), np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
    weight = np.linspace(0.5, 2.0, len(PROBES)).astype(np.float32)
    feeds = {
        "indices": np.stack([segments, np.arange(len(PROBES))], 1),
        "values": PROBES,
        "shape": np.array([4, len(PROBES)]),
    }
    found = answers(graph, {"item": table}, feeds | ({"w": weight} if weighted else {}))["rows"]
    absent = np.full((1, DIM), -2.0 if filtered else 0.5, np.float32)
    expected = combine(table.read(PROBES, absent), segments, weight if weighted else None, combiner)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6)


def combine(values: Any, segments: Any, weights: Any, combiner: str) -> Any:
    weights = np.ones(len(values), np.float32) if weights is None else weights
    total = np.zeros((segments.max() + 1, DIM), np.float32)
    np.add.at(total, segments, values * weights[:, None])
    if combiner == "sum":
        return total
    power = 1 if combiner == "mean" else 2
    norm = np.bincount(segments, weights**power)
    return total / (norm if combiner == "mean" else np.sqrt(norm))[:, None]


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("filter_freq", [0, 2])
def test_default_value_tensor(tmp_path: Path, parts: int, filter_freq: int) -> None:
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable(
            "user", DIM, parts=parts, filter_freq=filter_freq, default_value_no_permission=9.0
        )
        ids = placeholder("ids")
        own = tf.cast(tf.reshape(tf.range(tf.size(ids) * DIM), [-1, DIM]), tf.float32)
        named(program.embedding_lookup(variable, ids, ev_init_value=own))
        graph = converted(program, tmp_path, **IDS)

    table = rows()
    found = answers(graph, {"user": table}, {"ids": PROBES})["rows"]
    own_rows = np.arange(len(PROBES) * DIM, dtype=np.float32).reshape(-1, DIM)
    if filter_freq:  # the filter's constant goes first
        own_rows = np.full_like(own_rows, 9.0)
    expected = [table.read([key], row[None])[0] for key, row in zip(PROBES.tolist(), own_rows, strict=True)]
    assert np.array_equal(found, np.array(expected))


def test_matrix_of_default_rows(tmp_path: Path) -> None:
    matrix = np.arange(5 * DIM, dtype=np.float32).reshape(5, DIM)
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, initializer=matrix)
        named(program.embedding_lookup(variable, placeholder("ids")))
        graph = converted(program, tmp_path, **IDS)

    table = rows()
    found = answers(graph, {"user": table}, {"ids": PROBES})["rows"]
    assert np.array_equal(found, table.read(PROBES, matrix))


def test_several_tables_with_shared_ids(tmp_path: Path) -> None:
    import tensorflow as tf

    with deeprec_graph(Generation.FIRST) as program:
        ids = placeholder("ids")
        tables = {
            "a/emb": program.embedding_variable("a/emb", DIM, parts=3, initializer=0.0),
            "b/emb": program.embedding_variable("b/emb", DIM, initializer=1.0),
            "b/emb_1": program.embedding_variable("b/emb_1", DIM, parts=2, initializer=2.0),
        }
        found = [program.embedding_lookup(variable, ids) for variable in tables.values()]
        again = program.embedding_lookup(tables["a/emb"], ids + 1)
        kernel = tf.compat.v1.get_variable("dense/kernel", [4 * DIM, 2])
        named(tf.matmul(tf.concat([*found, again], 1), kernel))
        graph = converted(program, tmp_path, **IDS)

    assert [table.name for table in graph.dynamic_tables] == [*tables]
    held = {name: rows(seed) for seed, name in enumerate(tables)}
    kernel_value = np.eye(4 * DIM, 2, k=3, dtype=np.float32)
    probes = np.arange(-20, 20)
    answer = answers(graph, held, {"ids": probes}, {"dense/kernel": kernel_value})["rows"]
    absent = {name: np.full((1, DIM), value, np.float32) for value, name in enumerate(tables)}
    parts = [held[name].read(probes, absent[name]) for name in tables]
    parts.append(held["a/emb"].read(probes + 1, absent["a/emb"]))
    assert np.array_equal(answer, np.concatenate(parts, 1) @ kernel_value)


@GENERATIONS
def test_random_initializers_are_noted(tmp_path: Path, generation: Generation) -> None:
    with deeprec_graph(generation) as program:
        variable = program.embedding_variable("user", DIM, default_value_no_permission=0.125)
        named(program.embedding_lookup(variable, placeholder("ids")))
        graph = converted(program, tmp_path, **IDS)

        assert [note for note in graph.notes if "'user'" in note and "0.125" in note and "random" in note]
        found = answers(graph, {"user": rows()}, {"ids": np.array([424_242])})["rows"]
        assert np.array_equal(found, np.full((1, DIM), 0.125, np.float32))
        meta = str(tmp_path / "model.ckpt-7.meta")
        said = load_graph(
            GraphRequest(model=meta, inputs=IDS["inputs"], outputs=IDS["outputs"], absent_keys={"us.*": "-3"})
        )
        assert not said.notes
        assert said.dynamic_tables[0].defaults.tolist() == [[-3.0] * DIM]
        for wrong in ({"nobody": "0"}, {"user": "much"}, {"us[er": "0"}):
            with pytest.raises(UsageError, match="--absent-key"):
                load_graph(
                    GraphRequest(model=meta, inputs=IDS["inputs"], outputs=IDS["outputs"], absent_keys=wrong)
                )


def test_the_trainers_graph_stays_behind(tmp_path: Path) -> None:
    """Slots, gradients' updates, savers and initialisers: none of it is served, and none refused."""
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, parts=2, initializer=0.0)
        named(program.embedding_lookup(variable, placeholder("ids")))
        meta_graph = program.meta_graph()
    train_op(meta_graph, variable, "rows", "ids")
    meta = tmp_path / "model.ckpt-9.meta"
    meta.write_bytes(meta_graph.SerializeToString())

    source = load_source(GraphRequest(model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"]))
    kept = {node.op for node in runnable_graph(source).node}
    assert all(map(is_stock, kept)), "what only DeepRec knows cannot be imported for a comparison"
    assert "ResourceGather" in kept
    assert "SaveV2" not in kept
    import_stock(runnable_graph(source))


def test_a_graph_without_embedding_variables(tmp_path: Path) -> None:
    """Its SaveV2 has DeepRec's attributes all the same."""
    import tensorflow as tf

    with deeprec_graph() as program:
        named(
            tf.matmul(
                tf.reshape(placeholder("x", np.float32), [-1, 2]), tf.compat.v1.get_variable("w", [2, 3])
            )
        )
        meta = program.save_meta(tmp_path / "model.ckpt-1.meta")
    source = load_source(GraphRequest(model=str(meta), inputs={"x": "x"}, outputs={"rows": "rows"}))
    import_stock(runnable_graph(source))


def import_stock(graph_def: Any) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString()), name="")


def test_saved_model(tmp_path: Path) -> None:
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, parts=3, initializer=0.5)
        ids = placeholder("ids")
        answer = tf.identity(program.embedding_lookup(variable, ids), name="rows")
        directory = program.saved_model(tmp_path / "saved", {"ids": ids}, {"rows": answer})
        train = program.saved_model(tmp_path / "other", {"ids": ids}, {"rows": answer}, tag="inference")

    table = rows()
    for path in (directory, train):
        graph = load_graph(GraphRequest(model=str(path)))
        found = answers(graph, {"user": table}, {"ids": PROBES})["rows"]
        assert np.array_equal(found, table.read(PROBES, np.full((1, DIM), 0.5, np.float32)))


def test_group_lookups_are_refused_by_name(tmp_path: Path) -> None:
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM)
        program.embedding_lookup(variable, placeholder("ids"))
        meta_graph = program.meta_graph()
    add = meta_graph.graph_def.node.add
    add(name="group", op="GroupEmbeddingVarLookup", input=["user", "ids"])
    add(name="shape", op="KvVariableShape", input=["user"])
    add(name="fast", op="MyVendorsFusedLayer", input=["group", "shape"]).attr["T"].type = int(DType.FLOAT)
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())

    with pytest.raises(ForeignOperations) as caught:
        load_graph(GraphRequest(model=str(meta), inputs={"ids": "ids"}, outputs={"rows": "fast"}))
    for told in ("GroupEmbeddingVarLookup 'group'", "KvVariableShape 'shape'", "MyVendorsFusedLayer 'fast'"):
        assert told in caught.value.message
    assert "embedding_lookup_sparse" in caught.value.hint


@pytest.mark.parametrize("value", [False, True])
def test_attributes_that_stock_operations_lack(tmp_path: Path, value: bool) -> None:
    """One with its default value says nothing; another would be computed in another way."""
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, initializer=0.0)
        named(program.embedding_lookup(variable, placeholder("ids")))
        meta_graph = program.meta_graph()
    rows = next(node for node in meta_graph.graph_def.node if node.name == "rows")
    rows.attr["in_a_hurry"].b = value
    described = meta_graph.meta_info_def.stripped_op_list.op
    identity = next(op for op in described if op.name == "Identity")
    identity.attr.add(name="in_a_hurry", type="bool").default_value.b = False
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())
    asked = GraphRequest(model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"])
    if value:
        with pytest.raises(ForeignOperations, match=r"Identity 'rows'.*in_a_hurry"):
            load_graph(asked)
        return
    graph = load_graph(asked)
    assert not [node for node in graph.meta_graph.graph_def.node if "in_a_hurry" in node.attr]
    import_stock(graph.meta_graph.graph_def)


def test_a_signature_that_cannot_be_served_is_left_out(tmp_path: Path) -> None:
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, parts=3, initializer=0.5)
        ids = placeholder("ids")
        answer = tf.identity(program.embedding_lookup(variable, ids), name="rows")
        directory = program.saved_model(tmp_path / "saved", {"ids": ids}, {"rows": answer})
    model = protos.SavedModel.FromString((directory / "saved_model.pb").read_bytes())
    (meta_graph,) = model.meta_graphs
    fast = meta_graph.graph_def.node.add(name="fast", op="VendorsLookup", input=["user/part_0", "ids"])
    fast.attr["T"].type = int(DType.FLOAT)
    signature = meta_graph.signature_def["group"]
    signature.CopyFrom(meta_graph.signature_def["serving_default"])
    signature.outputs["rows"].name = "fast:0"
    (directory / "saved_model.pb").write_bytes(model.SerializeToString())

    graph = load_graph(GraphRequest(model=str(directory)))
    assert [*graph.meta_graph.signature_def] == ["serving_default"]
    assert [note for note in graph.notes if "'group'" in note and "VendorsLookup" in note]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda node: node.attr["shape"].shape.dim.add(size=3), "cannot be served"),
        (lambda node: setattr(node.attr["Tkeys"], "type", int(DType.STRING)), "cannot be served"),
        (lambda node: setattr(node.attr["dtype"], "type", int(DType.INT32)), "cannot be served"),
        (lambda node: node.attr["shape"].shape.Clear(), "cannot be served"),
    ],
)
def test_kinds_that_no_table_has(tmp_path: Path, change: Any, message: str) -> None:
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM)
        named(program.embedding_lookup(variable, placeholder("ids")))
        meta_graph = program.meta_graph()
    change(next(node for node in meta_graph.graph_def.node if node.name == "user"))
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())
    with pytest.raises(NotServable, match=message):
        load_graph(GraphRequest(model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"]))


def test_blocks_are_refused_by_name(tmp_path: Path) -> None:
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, block_num=2)
        named(program.embedding_lookup(variable, placeholder("ids")))
        with pytest.raises(NotServable, match="block"):
            converted(program, tmp_path, **IDS)


def test_parts_of_different_initial_values_are_refused(tmp_path: Path) -> None:
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, parts=2, initializer=np.ones((1, DIM), np.float32))
        named(program.embedding_lookup(variable, placeholder("ids")))
        meta_graph = program.meta_graph()
    value = next(n for n in meta_graph.graph_def.node if n.name == "user/part_1/Initializer/initial_value")
    tensor = protos.TensorProto()
    tensor.CopyFrom(value.attr["value"].tensor)
    value.attr["value"].tensor.tensor_content = np.full((1, DIM), 2, np.float32).tobytes()
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())
    with pytest.raises(NotServable, match="different values"):
        load_graph(GraphRequest(model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"]))
    said = GraphRequest(
        model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"], absent_keys={"user": "0"}
    )
    assert load_graph(said).dynamic_tables[0].defaults.tolist() == [[0.0] * DIM]


def test_nothing_tells_what_an_absent_key_reads(tmp_path: Path) -> None:
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, initializer=0.0)
        named(program.embedding_lookup(variable, placeholder("ids")))
        meta_graph = program.meta_graph()
    kept = [n for n in meta_graph.graph_def.node if not n.op.startswith(("Initialize", "KvResourceImport"))]
    bare = protos.MetaGraphDef()
    bare.graph_def.node.extend(kept)
    meta = tmp_path / "m.meta"
    meta.write_bytes(bare.SerializeToString())
    with pytest.raises(NotServable, match="the graph does not say what a key reads") as caught:
        load_graph(GraphRequest(model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"]))
    assert "--absent-key" in caught.value.hint


def test_part_names_without_collections(tmp_path: Path) -> None:
    """An inference graph may have lost its collections: the handles' names tell."""
    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, parts=3, initializer=0.0)
        named(program.embedding_lookup(variable, placeholder("ids")))
        meta_graph = program.meta_graph()
    meta_graph.ClearField("collection_def")
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())
    graph = load_graph(GraphRequest(model=str(meta), inputs=IDS["inputs"], outputs=IDS["outputs"]))
    assert [table.name for table in graph.dynamic_tables] == ["user"]


def test_names_that_are_taken(tmp_path: Path) -> None:
    import tensorflow as tf

    with deeprec_graph() as program:
        variable = program.embedding_variable("user", DIM, initializer=0.0)
        ids = placeholder("ids")
        taken = tf.identity(ids, name="user/values")
        named(program.embedding_lookup(variable, taken))
        graph = converted(program, tmp_path, **IDS)

    table = rows()
    found = answers(graph, {"user": table}, {"ids": PROBES})["rows"]
    assert np.array_equal(found, table.read(PROBES, np.zeros((1, DIM), np.float32)))
    assert [variable.key for variable in graph.dynamic_tables[0].variables][-1] == "user/values"


def test_the_digest_leaves_sizes_out(tmp_path: Path) -> None:
    def program_of(initializer: float) -> InferenceGraph:
        with deeprec_graph() as program:
            variable: EmbeddingVariable = program.embedding_variable("user", DIM, initializer=initializer)
            named(program.embedding_lookup(variable, placeholder("ids")))
            return converted(program, tmp_path, **IDS)

    graph = program_of(0.0)
    values = table_values(graph.dynamic_tables[0], rows())
    shaped = with_table_shapes(graph, {name: value.shape for name, value in values.items()})
    assert graph_digest(graph) == graph_digest(shaped)
    assert graph_digest(graph) != graph_digest(program_of(1.0)), "absent keys read something else"

"""Joined lookups answer as lookups by themselves do, and as dicts; what is not asked together stays apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import ExportError
from exporter.graph import joined_lookups
from exporter.graph.clean import clean
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.joined_lookups import join_lookups, separate_lookups
from exporter.graph.metagraph import with_signatures
from exporter.graph.nodes import all_before, shape_proto
from exporter.graph.signatures import SignatureEnds
from exporter.graph.source_graph import GraphRequest
from exporter.graph.table_marks import mark_tables, marked_tables
from exporter.tables import DynamicTable
from exporter.tables import lookup as marks
from exporter.tables.parts import PARTS
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import to_array
from tests.support.dynamic_values import Rows
from tests.support.joined_tables import Signatures, loaded_session, sized_graph

LIMITS = np.array([0, -1, -2, 2**63 - 1, -(2**63)], np.int64)
SIZES = {"a": 5, "b": 300, "c": 0, "d": 4000, "e": 40}
DIMS = {"a": 1, "b": 4, "c": 3, "d": 8, "e": 2}
DTYPES = {"e": "float64"}
DEFAULTS = {"b": np.arange(12.0).reshape(3, 4), "d": -1.0}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_lookups, "LEAST", 2)


def contents() -> dict[str, Rows]:
    random = np.random.default_rng(3)
    found = {}
    for name, size in SIZES.items():
        keys = np.unique(np.concatenate([random.integers(-(2**63), 2**63 - 1, size), LIMITS[: size and 5]]))
        rows = random.normal(size=(len(keys), DIMS[name])).astype(DTYPES.get(name, "float32"))
        found[name] = Rows(random.permutation(keys), rows)
    return found


def table(name: str) -> DynamicTable:
    return DynamicTable(name, DIMS[name], DTYPES.get(name, "float32"), DEFAULTS.get(name, 0.0))


def expected(name: str, rows: Rows, ids: np.ndarray) -> np.ndarray:
    given = np.asarray(DEFAULTS.get(name, 0.0), rows.values.dtype)
    defaults = np.broadcast_to(given, (1, DIMS[name])) if given.ndim < 2 else given
    return rows.read(ids.ravel(), defaults).reshape(*ids.shape, DIMS[name])


def joined_tables(graph: InferenceGraph) -> set[str]:
    index = {f"/{part}" for part in PARTS[:-1]}
    return {node.removesuffix(part) for node in graph.joined for part in index if node.endswith(part)}


def placeholder(name: str, shape: Any = (None,), dtype: str = "int64") -> Any:
    import tensorflow as tf

    return tf.compat.v1.placeholder(dtype, shape, name=name)


def of_all_shapes() -> Signatures:
    import tensorflow as tf

    ids = {name: placeholder(name, shape) for name, shape in SHAPES.items()}
    made = {name: table(name) for name in ids}
    rows = {name: made[name].lookup(each) for name, each in ids.items()}
    texts = placeholder("texts", (None,), "string")
    rows["of_texts"] = made["e"].lookup(tf.strings.to_number(texts, tf.int64))
    return {"serving_default": ({**ids, "texts": texts}, rows)}


SHAPES: Mapping[str, Any] = {"a": (None,), "b": (None, None), "c": None, "d": (None,), "e": (None, 2)}


def test_keys_of_any_shape_read_the_rows_that_their_own_tables_have() -> None:
    held = contents()
    graph, values = sized_graph(of_all_shapes, held)
    joined = join_lookups(graph)
    assert joined_tables(joined) == SIZES.keys()
    gathers = [node.op for node in joined.meta_graph.graph_def.node].count("ResourceGather")
    assert gathers == 3 + 6, "of the index three for all lookups, of rows one each"
    random = np.random.default_rng(5)
    outputs = {
        alias: info.name for alias, info in joined.meta_graph.signature_def["serving_default"].outputs.items()
    }
    with loaded_session(joined, values) as ours, loaded_session(graph, values) as apart:
        for size in (0, 1, 7, 64, 1000):
            asked = {}
            for name, shape in SHAPES.items():
                known = np.concatenate([held[name].keys, LIMITS, random.integers(-99, 99, 9)])
                ids = random.choice(known, size if size else 0)  # some twice
                asked[name] = {2: ids[: size // 2 * 2].reshape(-1, 2)}.get(len(shape or ()), ids)
            texts = np.array([str(key).encode() for key in random.choice(held["e"].keys, size)], object)
            fed = {f"{name}:0": ids for name, ids in asked.items()} | {"texts:0": texts}
            found = ours.run(outputs, fed)
            asked["of_texts"] = texts.astype(str).astype(np.int64) if size else np.empty(0, np.int64)
            for name, rows in apart.run(outputs, fed).items():
                owner = "e" if name == "of_texts" else name
                assert found[name].tobytes() == rows.tobytes(), (name, size)
                assert rows.tobytes() == expected(owner, held[owner], asked[name]).tobytes(), (name, size)


@pytest.mark.parametrize("axes", [(1,), (0, 1), ()], ids=["columns", "one row", "as declared"])
def test_clients_may_send_other_shapes_than_the_graph_declares(axes: tuple[int, ...]) -> None:
    """Servers do not compare them, and a lookup by itself answers in the shape that it is given."""

    def build() -> Signatures:
        ids = {name: placeholder(name) for name in SIZES}
        return {"serving_default": (ids, {name: table(name).lookup(each) for name, each in ids.items()})}

    held = contents()
    graph, values = sized_graph(build, held)
    joined = join_lookups(graph)
    assert joined_tables(joined) == SIZES.keys()
    names = [info.name for info in graph.meta_graph.signature_def["serving_default"].outputs.values()]
    fed = {f"{name}:0": np.expand_dims(np.concatenate([held[name].keys[:9], LIMITS]), axes) for name in SIZES}
    with loaded_session(joined, values) as ours, loaded_session(graph, values) as apart:
        for found, rows in zip(ours.run(names, fed), apart.run(names, fed), strict=True):
            assert found.shape == rows.shape
            assert found.tobytes() == rows.tobytes()


def test_a_client_may_send_what_another_signature_computes() -> None:
    """A server takes values for any tensor that a signature names, and in any shape."""
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    def build() -> Signatures:
        import tensorflow as tf

        ids = {name: placeholder(name, None) for name in SIZES}
        flat = {name: tf.reshape(each, [-1]) for name, each in ids.items()}
        rows = {name: table(name).lookup(each) for name, each in flat.items()}
        return {"serving_default": (ids, rows), "flat": (flat, rows)}

    held = contents()
    graph, values = sized_graph(build, held)
    joined = join_lookups(graph)
    assert joined_tables(joined) == SIZES.keys()
    signature = graph.meta_graph.signature_def["flat"]
    names = [info.name for info in signature.outputs.values()]
    fed = {signature.inputs[name].name: held[name].keys[:9, np.newaxis] for name in SIZES}
    asked = CallableOptions(feed=[*fed], fetch=names)
    with loaded_session(joined, values) as ours, loaded_session(graph, values) as apart:
        # As in servers; `run` compares shapes.
        answers = [each._make_callable_from_options(asked)(*fed.values()) for each in (ours, apart)]
    for found, rows in zip(*answers, strict=True):
        assert found.shape == rows.shape
        assert found.tobytes() == rows.tobytes()


def test_keys_that_come_from_rows_are_looked_up_after_these() -> None:
    import tensorflow as tf

    def build() -> Signatures:
        ids = {name: placeholder(name) for name in ("a", "b", "d")}
        rows = {name: table(name).lookup(each) for name, each in ids.items()}
        rows["e"] = table("e").lookup(tf.cast(rows["a"][:, 0] * 10, tf.int64))
        return {"serving_default": (ids, rows)}

    held = contents()
    graph, values = sized_graph(build, held)
    joined = join_lookups(graph)
    assert joined_tables(joined) == {"a", "b", "d"}
    names = [info.name for info in graph.meta_graph.signature_def["serving_default"].outputs.values()]
    fed = {f"{name}:0": held[name].keys[:4] for name in ("a", "b", "d")}
    with loaded_session(joined, values) as ours, loaded_session(graph, values) as apart:
        for found, rows in zip(ours.run(names, fed), apart.run(names, fed), strict=True):
            assert found.tobytes() == rows.tobytes()


def test_a_signature_needs_the_ids_of_its_own_tables_alone() -> None:
    def build() -> Signatures:
        ids = {name: placeholder(name) for name in SIZES}
        rows = {name: table(name).lookup(each) for name, each in ids.items()}
        some = [[*"abc"], [*"cde"]]
        return {
            name: ({each: ids[each] for each in names}, {each: rows[each] for each in names})
            for name, names in zip(("first", "second"), some, strict=True)
        }

    held = contents()
    graph, values = sized_graph(build, held)
    joined = join_lookups(graph)
    assert joined_tables(joined) == {*"abde"}, "c alone is asked by both"
    with loaded_session(joined, values) as session:
        for signature in joined.meta_graph.signature_def.values():
            names = {alias: info.name for alias, info in signature.outputs.items()}
            asked = {name: np.concatenate([held[name].keys[:3], LIMITS]) for name in names}
            found = session.run(names, {f"{name}:0": ids for name, ids in asked.items()})
            for name, rows in found.items():
                assert rows.tobytes() == expected(name, held[name], asked[name]).tobytes()


def test_a_lookup_in_a_branch_or_in_a_function_stays_there() -> None:
    import tensorflow as tf

    def build() -> Signatures:
        tf.compat.v1.disable_control_flow_v2()
        ids = {name: placeholder(name) for name in SIZES}
        rows = {name: table(name).lookup(ids[name]) for name in ("a", "b", "c")}
        many = tf.size(ids["d"]) > 2
        rows["d"] = tf.cond(many, lambda: table("d").lookup(ids["d"]), lambda: tf.zeros([0, DIMS["d"]]))
        tf.compat.v1.enable_control_flow_v2()
        e = table("e")
        rows["e"] = tf.function(lambda keys: e.lookup(keys), autograph=False)(ids["e"])
        return {"serving_default": (ids, rows)}

    graph, values = sized_graph(build, contents())
    joined = join_lookups(graph)
    assert joined_tables(joined) == {"a", "b", "c"}
    names = [info.name for info in graph.meta_graph.signature_def["serving_default"].outputs.values()]
    with loaded_session(joined, values) as ours, loaded_session(graph, values) as apart:
        for count in (0, 5):
            fed = {f"{name}:0": LIMITS[:count] for name in SIZES}
            for found, rows in zip(ours.run(names, fed), apart.run(names, fed), strict=True):
                assert found.tobytes() == rows.tobytes()


def test_row_numbers_and_which_keys_were_found_are_outputs_as_well() -> None:
    import tensorflow as tf

    def build() -> Signatures:
        ids = {name: placeholder(name) for name in ("a", "b")}
        made = {name: table(name) for name in ids}
        rows = {name: made[name].rows(each) for name, each in ids.items()}
        values = {f"{name}_values": made[name].lookup(each) for name, each in ids.items()}
        found = tf.compat.v1.get_default_graph().get_tensor_by_name("a_lookup/find/found:0")
        return {"serving_default": (ids, rows | values | {"is_found": tf.identity(found)})}

    held = contents()
    graph, values = sized_graph(build, held)
    joined = join_lookups(graph)
    names = [info.name for info in graph.meta_graph.signature_def["serving_default"].outputs.values()]
    fed = {f"{name}:0": np.concatenate([held[name].keys, LIMITS]) for name in ("a", "b")}
    with loaded_session(joined, values) as ours, loaded_session(graph, values) as apart:
        for found, rows in zip(ours.run(names, fed), apart.run(names, fed), strict=True):
            assert (found == rows).all()
    assert joined.joined
    apart_nodes = [each.node for each in graph.variables if each.key == "a/keys"]
    assert joined_tables(join_lookups(graph, apart_nodes)) == {"b"}


def needed_nodes(meta_graph: Proto) -> dict[str, Any]:
    """The nodes that the signatures need, without sizes of tables, and what TensorFlow says by default."""
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    ends = [SignatureEnds.of(signature) for signature in meta_graph.signature_def.values()]
    found = {}
    for name in all_before(nodes, [tensor for each in ends for tensor in (*each.outputs, *each.inputs)]):
        node = nodes[name]
        types = {key: value.type for key, value in node.attr.items() if value.type}
        is_sized = marks.SIZE in node.attr
        own = {key: node.attr[key].s for key in (marks.TABLE, marks.SIZE) if is_sized}
        value = None if is_sized or node.op != "Const" else to_array(node.attr["value"].tensor).tolist()
        found[name] = (node.op, [*node.input], types, own, value)
    return found


def rows_and_found() -> Signatures:
    import tensorflow as tf

    ids = {name: placeholder(name, shape) for name, shape in SHAPES.items()}
    made = {name: table(name) for name in ids}
    rows = {name: made[name].lookup(each) for name, each in ids.items()}
    rows["row_numbers"] = made["c"].rows(ids["c"])
    found = tf.compat.v1.get_default_graph().get_tensor_by_name("b_lookup/find/found:0")
    return {"serving_default": (ids, rows | {"is_found": tf.identity(found)})}


@pytest.mark.parametrize("build", [of_all_shapes, rows_and_found])
def test_separated_lookups_are_those_that_were_joined(build: Callable[[], Signatures]) -> None:
    graph, _ = sized_graph(build, contents())
    joined = join_lookups(mark_tables(graph))
    assert joined_tables(joined) == SIZES.keys()
    separate = deepcopy(joined.meta_graph)
    separate_lookups(separate)
    assert needed_nodes(separate) == needed_nodes(graph.meta_graph)
    found = {table.name: table for table in marked_tables(separate.graph_def)}
    assert found.keys() == SIZES.keys()
    for each in graph.dynamic_tables:
        assert found[each.name].nodes == each.nodes
        assert found[each.name].defaults.tobytes() == each.defaults.tobytes()
    separate_lookups(separate)  # what joined them stays, and is no lookup that anything reads


def damaged(meta_graph: Proto) -> Iterator[tuple[str, Proto]]:
    """Yield copies of a graph in which one node, input, mark or type is missing or another."""
    for at, node in enumerate(meta_graph.graph_def.node):
        if node.op in ("Const", "Placeholder"):
            continue

        def changed(what: str, at: int = at, name: str = node.name) -> tuple[str, Proto, Proto]:
            copy = deepcopy(meta_graph)
            return f"{what} of {name}", copy, copy.graph_def.node[at]

        what, copy, _ = changed("absence")
        del copy.graph_def.node[at]
        yield what, copy
        for number in range(len(node.input)):
            what, copy, other = changed(f"input {number}")
            del other.input[number]
            yield what, copy
            what, copy, other = changed(f"other input {number}")
            other.input[number] = f"{other.name}:{number}"
            yield what, copy
        for key in node.attr:
            what, copy, other = changed(f"attribute {key}")
            del other.attr[key]
            yield what, copy
            if key in (marks.TABLE, marks.PART, marks.JOINED):
                for value in (b"", b"\xff", b"values", b"a", b"joined_tables/find_0", b"b_lookup/find"):
                    what, copy, other = changed(f"{key} {value!r}")
                    other.attr[key].s = value
                    yield what, copy
            if key == marks.DEFAULTS:
                for shape in ((0, 4), (3,), (1 << 40, 1 << 40), (-1, 4)):
                    what, copy, other = changed(f"{key} {shape}")
                    other.attr[key].tensor.tensor_content = b""
                    other.attr[key].tensor.tensor_shape.CopyFrom(shape_proto(shape))
                    yield what, copy


def test_marks_that_lie_end_in_an_error_by_name() -> None:
    graph, _ = sized_graph(rows_and_found, contents())
    whole = join_lookups(mark_tables(graph)).meta_graph
    errors = Counter[str]()
    for what, copy in damaged(whole):
        try:
            clean(with_signatures(copy, GraphRequest(model="a"), label="a", directory=Path()))
        except ExportError as error:
            errors[type(error).__name__] += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert errors["GraphError"] > 50

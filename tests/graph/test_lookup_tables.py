"""Lookup tables and their vocabulary files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import AccessRefused, MissingAsset, NotServable
from exporter.graph.load import GraphRequest, load_graph, load_source
from exporter.wire.protos import message_class
from tests.support.graph_runs import names, ops, serve, train


def vocabulary(path: Path, words: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{word}\n" for word in words))
    return str(path)


def file_table(path: str) -> Any:
    import tensorflow as tf

    index = tf.lookup.TextFileIndex
    lines = tf.lookup.TextFileInitializer(path, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
    return tf.lookup.StaticHashTable(lines, -1)


def looks_up(*paths: str) -> Any:
    """Looks words up in one file table for each path and then in a table of constants; one more is unused."""

    def build(v1: Any) -> None:
        import tensorflow as tf

        words = v1.placeholder(tf.string, [None], name="words")
        total = tf.zeros_like(words, tf.int64)
        for path in paths:
            total = total * 10 + file_table(path).lookup(words)
        constants = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1, 2], tf.int64), [10.0, 11.0, 12.0])
        by_rank = tf.lookup.StaticHashTable(constants, -1.0).lookup(total)
        tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
        tf.multiply(by_rank, v1.get_variable("w", [], initializer=v1.ones_initializer()), name="y")

    return build


REQUEST = {"inputs": {"words": "words"}, "outputs": {"y": "y"}}


def test_tables_are_filled_by_the_init_op_alone(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "words.txt", ["a", "b", "c"])
    trained = train(tmp_path, looks_up(path))

    graph = load_graph(GraphRequest(model=trained.meta, **REQUEST))

    words = np.array([b"b", b"?", b"c", b"a"], dtype=object)
    served = serve(graph, trained.value, {"words": words})["y"]
    assert np.array_equal(served, trained.run("y:0", {"words:0": words}))
    assert served.tolist() == [11.0, -1.0, 12.0, 10.0]
    assert graph.init_op in names(graph)
    assert [kind for kind in sorted(ops(graph)) if "Initialize" in kind or "Import" in kind] == [
        "InitializeTableFromTextFileV2",
        "LookupTableImportV2",
    ]
    assert len([node for node in graph.meta_graph.graph_def.node if node.op == "HashTableV2"]) == 2


def test_vocabularies_are_assets_without_the_trainers_paths(tmp_path: Path) -> None:
    first = vocabulary(tmp_path / "a" / "words.txt", ["a"])
    second = vocabulary(tmp_path / "b" / "words.txt", ["b"])
    trained = train(tmp_path, looks_up(first, second))

    graph = load_graph(GraphRequest(model=trained.meta, **REQUEST))

    assert {(str(asset.source), asset.file_name) for asset in graph.assets} == {
        (first, "words.txt"),
        (second, "words_1.txt"),
    }
    constants = {node.name: node for node in graph.meta_graph.graph_def.node if node.op == "Const"}
    for asset in graph.assets:
        assert constants[asset.node].attr["value"].tensor.string_val == [asset.file_name.encode()]


def test_a_vocabulary_that_two_tables_read_is_one_file(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "words.txt", ["a"])
    trained = train(tmp_path, looks_up(path, path))

    graph = load_graph(GraphRequest(model=trained.meta, **REQUEST))

    assert {asset.file_name for asset in graph.assets} == {"words.txt"}


def test_a_relative_vocabulary_is_found_beside_the_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary(tmp_path / "words.txt", ["a"])
    monkeypatch.chdir(tmp_path)
    trained = train(tmp_path, looks_up("words.txt"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    graph = load_graph(GraphRequest(model=trained.meta, **REQUEST))

    assert [asset.source for asset in graph.assets] == [tmp_path / "words.txt"]


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "words.txt", ["a"])
    trained = train(tmp_path, looks_up(path))
    Path(path).unlink()

    with pytest.raises(MissingAsset, match=r"words\.txt"):
        load_graph(GraphRequest(model=trained.meta, **REQUEST))


@pytest.mark.parametrize("path", ["w" * 300, "/" + "w" * 300, "a\0b"], ids=["relative", "absolute", "zero"])
@pytest.mark.parametrize("is_found", [False, True], ids=["named", "found"])
def test_a_path_that_no_file_can_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_found: bool
) -> None:
    vocabulary(tmp_path / "words.txt", ["a"])
    monkeypatch.chdir(tmp_path)
    trained = train(tmp_path, looks_up("words.txt"))
    meta = message_class("MetaGraphDef").FromString(Path(trained.meta).read_bytes())
    for node in meta.graph_def.node:
        if node.op == "Const" and node.attr["value"].tensor.string_val == [b"words.txt"]:
            node.attr["value"].tensor.string_val[0] = path.encode()
    Path(trained.meta).write_bytes(meta.SerializeToString())
    with pytest.raises(MissingAsset if not is_found or path[0] != "/" else AccessRefused, match="file"):
        load_graph(GraphRequest(trained.meta, **REQUEST, is_found=is_found))


def test_a_table_that_no_checkpoint_holds_is_refused_and_not_served_empty(tmp_path: Path) -> None:
    def build(v1: Any) -> Any:
        import tensorflow as tf

        words = v1.placeholder(tf.string, [None], name="words")
        make = tf.lookup.experimental.MutableHashTable
        table = make(tf.string, tf.int64, -1, name="seen", experimental_is_anonymous=True)
        tf.add(table.lookup(words), v1.get_variable("w", [], tf.int64, v1.zeros_initializer()), name="y")
        insert = table.insert([b"a"], tf.constant([1], tf.int64))
        return lambda session: session.run(insert)

    trained = train(tmp_path, build)

    with pytest.raises(NotServable, match=r"'seen.*Mutable.*empty when served"):
        load_graph(GraphRequest(model=trained.meta, **REQUEST))


def test_a_computed_vocabulary_is_refused(tmp_path: Path) -> None:
    vocabulary(tmp_path / "words.txt", ["a"])

    def build(v1: Any) -> None:
        import tensorflow as tf

        words = v1.placeholder(tf.string, [None], name="words")
        path = tf.strings.join([str(tmp_path), "words.txt"], "/")
        tf.add(
            file_table(path).lookup(words),
            v1.get_variable("w", [], tf.int64, v1.zeros_initializer()),
            name="y",
        )

    trained = train(tmp_path, build)

    with pytest.raises(NotServable, match="StringJoin"):
        load_graph(GraphRequest(model=trained.meta, **REQUEST))


def test_the_source_graph_can_fill_its_own_tables(tmp_path: Path) -> None:
    import tensorflow as tf

    path = vocabulary(tmp_path / "words.txt", ["a", "b"])
    trained = train(tmp_path, looks_up(path))

    source = load_source(GraphRequest(model=trained.meta, **REQUEST))

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        serialized = source.meta_graph.graph_def.SerializeToString()
        tf.import_graph_def(v1.GraphDef.FromString(serialized), name="")
        assert source.init_op is not None
        session.run(graph.get_operation_by_name(source.init_op))
        session.run(graph.get_operation_by_name("w/Assign"))
        assert session.run("y:0", {"words:0": [b"b"]}).tolist() == [11.0]


def test_a_builders_table(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "words.txt", ["a", "b"])

    def build() -> Any:
        import tensorflow as tf

        words = tf.compat.v1.placeholder(tf.string, [None])
        return {"words": words}, {"ids": file_table(path).lookup(words)}

    graph = load_graph(GraphRequest(model=build))

    assert serve(graph, {}.__getitem__, {"words": [b"b"]})["ids"].tolist() == [1]

"""Of a graph that differs from a base's, the lookups are named whose vocabulary is another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.graph.lookup_tables import differing_lookups
from exporter.wire import protos
from exporter.wire.protos import Proto
from tests.support.graph_runs import v1_graph

TRAINER = """
import sys
import keras

vocabulary, path = sys.argv[1:]
city, user = (keras.Input((1,), dtype="string", name=name) for name in ("city", "user"))
cities = keras.layers.StringLookup(vocabulary=[*vocabulary], name="cities")(city)
users = keras.layers.StringLookup(vocabulary=["u", "v"], name="users")(user)
rows = [keras.layers.Embedding(9, 2)(ids) for ids in (cities, users)]
keras.Model([city, user], keras.layers.Add()(rows)).save(path)
"""


def graph_of(cities: list[str], users: list[str], default: int = -1) -> Proto:
    import tensorflow as tf

    with v1_graph() as graph:
        for name, words in (("cities", cities), ("users", users)):
            with tf.name_scope(f"model/{name}"):
                filled = tf.lookup.KeyValueTensorInitializer(words, tf.range(len(words), dtype=tf.int64))
                table = tf.lookup.StaticHashTable(filled, default)
                table.lookup(tf.constant(["a"]))
        return protos.GraphDef.FromString(graph.as_graph_def().SerializeToString())


def test_lookups_with_another_vocabulary_are_named() -> None:
    was = graph_of(["a", "b"], ["u"])
    assert differing_lookups(was, graph_of(["a", "b"], ["u"])) == []
    assert differing_lookups(was, graph_of(["a", "c"], ["u"])) == ["model/cities"]
    assert differing_lookups(was, graph_of(["b"], ["u", "v"])) == ["model/cities", "model/users"]
    assert differing_lookups(was, graph_of(["a", "b"], ["u"], default=7)) == [], "something else differs"
    assert differing_lookups(protos.GraphDef(), was) == []


def test_tables_that_files_fill_do_not_count_nor_do_nodes_without_inputs() -> None:
    def graph(file: str, *, is_whole: bool = True) -> Proto:
        made = protos.GraphDef()
        made.node.add(name="table", op="HashTableV2")
        made.node.add(name="file", op="Const").attr["value"].tensor.string_val.append(file.encode())
        made.node.add(name="fill", op="InitializeTableFromTextFileV2", input=["table", "file"] * is_whole)
        made.node.add(name="import", op="LookupTableImportV2")
        made.node.add(name="find", op="LookupTableFindV2", input=["table"] * is_whole)
        return made

    assert differing_lookups(graph("a.txt"), graph("b.txt")) == []
    assert differing_lookups(graph("a.txt", is_whole=False), graph("b.txt")) == []


@pytest.mark.landing
def test_the_layer_of_an_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, *command]
        return subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    export = ("-m", "exporter", "--ckpt-dir", "model.keras", "--out", "served", "--incr", "--json")
    assert run("train.py", "ab", "model.keras").returncode == 0
    first = run(*export)
    assert first.returncode == 0, first.stderr
    assert run("train.py", "ac", "model.keras").returncode == 0
    refused = run(*export)
    error = json.loads(refused.stderr.splitlines()[-1])
    assert (refused.returncode, error["error"]) == (5, "SchemaChanged")
    assert "/cities" in error["cause"]
    assert "vocabulary" in error["cause"]
    assert "users" not in error["cause"]

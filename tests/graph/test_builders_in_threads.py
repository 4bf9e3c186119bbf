"""Builders at once, in threads of one program: each makes its own model, and the program stays as it was."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.ops.lookup_ops import StaticHashTable

import exporter
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.errors import BuilderError, ExportError, TargetBusy
from exporter.graph.code_recorder import import_code
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.sources import code_digest, importable
from tests.support.budget import times
from tests.support.publishing import hidden, versions
from tests.support.threads import at_once

tf1 = tf.compat.v1

WORDS = np.array([["a"], ["c"], ["d"], ["zebra"]])


def words(size: int) -> list[str]:
    return ["a", "b", "c", "d", "e", "f", "g"][:size]


def by_vocabulary(library: Any, size: int) -> Callable[[], Any]:
    def build() -> Any:
        text = library.Input([1], dtype="string", name="text")
        lookup = library.layers.StringLookup(vocabulary=words(size))
        assert len(lookup.get_vocabulary()) == size + 1
        table = library.layers.Embedding(lookup.vocabulary_size(), 3, name="table")
        return library.Model(text, table(lookup(text)))

    return build


class Net(tf_keras.Model):  # type: ignore[misc]
    """tf-keras gives its class other bases while it is made in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = tf_keras.layers.StringLookup(vocabulary=words(3))
        self.table = tf_keras.layers.Embedding(self.lookup.vocabulary_size(), 2)

    def call(self, text: Any) -> Any:
        return self.table(self.lookup(text))


def net() -> Any:
    model = Net()
    model(tf_keras.Input([1], dtype="string"))
    return model


def by_table() -> Any:
    text = tf1.placeholder(tf.string, [None, 1], name="text")
    entries = tf.lookup.KeyValueTensorInitializer(["a", "d"], tf.constant([1, 2], tf.int64))
    found = tf.lookup.StaticHashTable(entries, 0)
    with tf1.variable_scope("part", partitioner=tf1.fixed_size_partitioner(2)):
        rows = tf1.get_variable("rows", [4, 2])
    return {"text": text}, {"row": tf1.nn.embedding_lookup(rows, found.lookup(text), "div")}


FILE = """
import beside
from tests.graph.test_builders_in_threads import by_vocabulary
import keras

def build():
    return by_vocabulary(keras, beside.SIZE)()
"""

Models = dict[str, tuple[Path, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Trained models of every kind that a builder patches the process for: weights, and what to serve."""
    root = tmp_path_factory.mktemp("models")
    found: Models = {}
    for library, size in ((keras, 2), (keras, 5), (tf_keras, 4), (tf_keras, 6)):
        name = f"{library.__name__}{size}"
        by_vocabulary(library, size)().save_weights(path := root / f"{name}.weights.h5")
        found[name] = path, by_vocabulary(library, size)
    for library in (keras, tf_keras):
        by_vocabulary(library, 3)().save(path := root / f"{library.__name__}.keras")
        found[f"archive of {library.__name__}"] = path, path
    (trained := Net())(tf.constant(WORDS))
    trained.save_weights(path := root / "net.weights.h5")
    found["net"] = path, net
    with tf.Graph().as_default(), tf1.Session() as session:
        by_table()
        session.run(tf1.global_variables_initializer())
        found["table"] = Path(tf1.train.Saver().save(session, str(root / "table"))), by_table
    for size in (2, 5):  # two directories whose files have the same names
        (place := root / f"size{size}").mkdir()
        (place / "model.py").write_text(FILE)
        (place / "beside.py").write_text(f"SIZE = {size}\n")
        found[f"file{size}"] = found[f"keras{size}"][0], f"{place}/model.py:build"
    return found


def answer(model: Path) -> bytes:
    """What the newest version answers."""
    version = model / str(versions(model)[-1])
    with tf.Graph().as_default(), tf1.Session() as session:
        served = tf1.saved_model.load(session, ["serve"], str(version)).signature_def["serving_default"]
        (text,), (row,) = served.inputs.values(), served.outputs.values()
        return np.asarray(session.run(row.name, {text.name: WORDS})).tobytes()


def the_process() -> dict[str, Any]:
    """What a program can see of itself."""
    patched = {"size": StaticHashTable.size, "export": StaticHashTable.export}
    saved = [library.layers.Layer.save_own_variables for library in (keras, tf_keras)]
    lists = {"path": [*sys.path], "meta_path": [*sys.meta_path], "filters": [*warnings.filters]}
    streams = {
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "in": Path.cwd(),
        "environ": {**os.environ, "PYTEST_CURRENT_TEST": ""},
    }
    modes = {"eager": tf.executing_eagerly(), "gc": gc.isenabled(), "bases": Net.__bases__}
    return {**patched, "saved": saved, **lists, **streams, **modes}


@pytest.fixture(autouse=True)
def _process_is_as_before() -> Iterator[None]:
    before = the_process()
    yield
    assert the_process() == before


@pytest.mark.landing
def test_all_are_as_one_thread_makes_them(models: Models, tmp_path: Path) -> None:
    expected = {}
    for name, (weights, model) in models.items():
        exporter.export(weights, tmp_path / "alone" / name, model)
        expected[name] = answer(tmp_path / "alone" / name)
    assert len({*expected.values()}) == len(models) - 2  # a file's model is one of Keras

    def export(name: str) -> None:
        weights, model = models[name]
        for _ in range(times(3)):
            exporter.export(weights, tmp_path / name, model, again=True)

    at_once([lambda name=name: export(name) for name in models])  # type: ignore[misc]
    for name, was in expected.items():
        assert len(versions(tmp_path / name)) == times(3)
        assert answer(tmp_path / name) == was, name


def test_one_base_path_gets_them_one_after_the_other(models: Models, tmp_path: Path) -> None:
    names, ranker = ["keras2", "keras5", "tf_keras4", "table"], tmp_path / "ranker"

    def export(name: str) -> int:
        weights, model = models[name]
        done = 0
        for _ in range(times(2)):
            with suppress(TargetBusy):
                exporter.export(weights, ranker, model, again=True)
                done += 1
        return done

    done = at_once([lambda name=name: export(name) for name in names])  # type: ignore[misc]
    assert versions(ranker) == [*range(1, 1 + sum(done))] != []
    assert exporter.verify_model(ranker, bytes_=True).problems == ()
    assert hidden(ranker) == []


def test_the_same_export_at_once_is_published_once(tmp_path: Path) -> None:
    def build() -> Any:
        x = tf1.placeholder(tf.float32, [None, 4], name="x")
        return {"x": x}, {"y": tf.matmul(x, tf1.get_variable("w", [4, 2]))}

    with BundleWriter(tmp_path / "model.ckpt-1") as writer:
        writer.add("w", np.ones([4, 2], np.float32))
    done = at_once([lambda: exporter.export(tmp_path, tmp_path / "ranker", build)] * 4)
    assert {each.published.version for each in done} == {1}
    assert sum(each.is_new for each in done) == 1


def test_increments_at_once_are_one_log(tmp_path: Path) -> None:
    def save(step: int) -> None:
        with BundleWriter(tmp_path / f"train/model.ckpt-{step}") as writer:
            writer.add("part/rows", np.full([4, 2], step, np.float32))
        (tmp_path / "train/checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')

    (tmp_path / "train").mkdir()
    save(1)
    request = (tmp_path / "train", tmp_path / "ranker", by_table)
    exporter.export_incremental(*request)
    for step in range(2, 2 + times(4)):
        save(step)

        def publish() -> bool:
            with suppress(ExportError):
                exporter.export(*request, save_incr_model=True)
                return True
            return False

        assert any(at_once([publish] * 3))
        assert exporter.export_incremental(*request) is not None
    assert exporter.verify_model(tmp_path / "ranker", bytes_=True).problems == ()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_one_that_fails_leaves_the_others_alone(error: type[BaseException]) -> None:
    entered, failed = threading.Barrier(2), threading.Event()

    def fails() -> Any:
        entered.wait(60)
        raise error

    def goes_on() -> Any:
        entered.wait(60)
        failed.wait(60)
        return by_vocabulary(keras, 4)()

    def fail() -> None:
        with pytest.raises(BuilderError if error is ValueError else error):
            load_graph(GraphRequest(model=fails))
        failed.set()

    _, graph = at_once([fail, lambda: load_graph(GraphRequest(model=goes_on))])
    assert [variable.shape for variable in graph.variables] == [(5, 3)]


def test_a_builder_may_export_and_start_threads_that_export() -> None:
    def inner() -> Any:
        return load_graph(GraphRequest(model=by_vocabulary(keras, 2)))

    def outer() -> Any:
        with ThreadPoolExecutor(2) as threads:
            for each in (inner(), *threads.map(lambda _: inner(), range(2))):
                assert [variable.shape for variable in each.variables] == [(3, 3)]
        return by_vocabulary(keras, 5)()

    for graph in at_once([lambda: load_graph(GraphRequest(model=outer))] * 2):
        assert [variable.shape for variable in graph.variables] == [(6, 3)]


def test_tables_of_a_training_beside_it_stay_symbols() -> None:
    """Only builders' own tables have contents before they are filled."""

    def build() -> Any:
        with tf.Graph().as_default():  # as in another thread
            entries = tf.lookup.KeyValueTensorInitializer(["a"], tf.constant([1], tf.int64))
            assert isinstance(tf.lookup.StaticHashTable(entries, 0).size(), tf.Tensor)
        return by_table()

    load_graph(GraphRequest(model=build))


def test_a_model_that_another_thread_trains_keeps_its_class() -> None:
    """While builders of its class come and go, their last one puts back what it was before the first."""

    def build() -> None:
        for _ in range(times(5)):
            load_graph(GraphRequest(model=net))

    bases = Net.__bases__
    at_once([build] * 3)
    assert Net.__bases__ == bases
    trained = Net()
    trained.compile("sgd", "mse")
    trained.fit(tf.constant(WORDS), np.ones([4, 1, 2], np.float32), verbose=0)


def test_files_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    """Two directories have a `namesake.py` that their models import."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_with_namesake.py").write_text(
            "import namesake_of_two\n\ndef build():\n    return namesake_of_two.NAME\n"
        )
        (tmp_path / name / "namesake_of_two.py").write_text(f"NAME = {name!r}\n")

    def imported(name: str) -> str:
        with importable():
            return str(import_code(f"{tmp_path}/{name}/model_with_namesake.py").build())

    for _ in range(times(5)):
        assert "".join(map(imported, "abba")) == "abba"
        assert "".join(at_once([lambda name=name: imported(name) for name in "abab"])) == "abab"  # type: ignore[misc]


def test_a_files_warnings_are_not_told_and_the_programs_are(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text("import re\nODD = re.compile('\\d')\n" * times(50))
    end = threading.Event()

    def read() -> None:
        while not end.is_set():
            code_digest(str(odd))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(times(100)):
            time.sleep(0)  # another thread's turn
            warnings.warn(f"the program's {number}", UserWarning, stacklevel=1)
        end.set()
        for thread in threads:
            thread.join()
    assert [str(each.message) for each in told] == [f"the program's {n}" for n in range(times(100))]


def test_large_files_are_read_at_once(tmp_path: Path) -> None:
    """Python 3.11 counts how deep it is in the trees of all threads in one number, and stumbles over that."""

    def change_threads(*_: object) -> None:
        time.sleep(0)

    large = tmp_path / "large.py"
    large.write_text("def fn(x):\n    return [x, (x + 1) * (x - (2 + x)), {x: [x]}]\n" * 300)
    alone = code_digest(str(large))
    gc.callbacks.append(change_threads)  # in the midst of a tree
    try:
        for _ in range(times(2)):
            assert at_once([lambda: code_digest(str(large))] * 4) == [alone] * 4
    finally:
        gc.callbacks.remove(change_threads)

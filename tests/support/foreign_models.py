"""SavedModels as other programs leave them, each over the same words: by TF2's `save` and by TF1's builder.

Every maker writes into a directory, and reads a vocabulary beside it. What they answer depends on the
vocabulary: a word's line, looked up or compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
WORDS = np.array([b"b", b"?", b"c", b"a"], object)
Maker = Callable[[Path], None]


def vocabulary(directory: Path) -> str:
    path = directory.parent / "words.txt"
    path.write_text("a\nb\nc")
    return str(path)


def from_file(path: Any) -> Any:
    index = tf.lookup.TextFileIndex
    return tf.lookup.TextFileInitializer(path, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)


class Answering(tf.Module):
    """Serves `answer(words)`, times a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
    def __call__(self, words: Any) -> Any:
        return {"y": tf.cast(self.answer(words), tf.float32) * self.scale}

    def answer(self, words: Any) -> Any:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        tf.saved_model.save(self, str(directory), signatures=self.__call__)


class Tables(Answering):
    """A vocabulary's line, and a number for each line."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.lines = tf.lookup.StaticHashTable(from_file(path), -1)
        numbers = tf.lookup.KeyValueTensorInitializer(
            tf.constant([0, 1, 2, -1], tf.int64), [4.0, 5.0, 6.0, 7.0]
        )
        self.numbers = tf.lookup.StaticHashTable(numbers, -1.0)

    def answer(self, words: Any) -> Any:
        return self.numbers.lookup(self.lines.lookup(words))


class Wrapped(Answering):
    """A model that was loaded and is saved again, as tf.Transform's graphs and ensembles are."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.inner = tf.saved_model.load(str(directory))

    def answer(self, words: Any) -> Any:
        return self.inner.signatures["serving_default"](words=words)["y"]


class FillsInCall(Answering):
    """A table that each call makes and fills, as feature columns of the first TF2 releases do."""

    def answer(self, words: Any) -> Any:
        table = tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.float32, shared_name="in_call")
        fill = tf.raw_ops.LookupTableImportV2(table_handle=table, keys=["a", "b"], values=[1.0, 2.0])
        with tf.control_dependencies([fill]):
            return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=words, default_value=-1.0)


class ReadsFile(Answering):
    """Reads its asset at each request."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = tf.saved_model.Asset(path)

    def answer(self, words: Any) -> Any:
        lines = tf.strings.split(tf.io.read_file(self.file.asset_path), "\n")
        return words[:, None] == lines[None]


def tables(directory: Path) -> None:
    Tables(vocabulary(directory)).save(directory)


def tables_in_calls(directory: Path) -> None:
    inner = directory.with_name("inner")
    tables(inner)
    Wrapped(inner).save(directory)


def v1_tables(directory: Path, *, reads_at_request: bool = False) -> None:
    """A table of an asset by TF1's builder; the graph may read the same path at requests as well."""
    path = vocabulary(directory)
    with tf.Graph().as_default(), v1.Session() as session:
        words = v1.placeholder(tf.string, [None], name="words")
        asset = tf.constant(path, name="asset")
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, asset)
        place = tf.identity(asset, name="place")  # between the file and both of its readers
        lines = v1.lookup.StaticHashTable(from_file(place), -1).lookup(words)
        scale = v1.get_variable("scale", [], initializer=v1.ones_initializer())
        y = tf.cast(lines, tf.float32) * scale
        if reads_at_request:
            y += tf.cast(tf.strings.length(tf.io.read_file(place)), tf.float32)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.Builder(str(directory))
        signature = v1.saved_model.predict_signature_def({"words": words}, {"y": y})
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            signature_def_map={"serving_default": signature},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()


def v1_table_and_reads(directory: Path) -> None:
    v1_tables(directory, reads_at_request=True)


def v1_tables_in_calls(directory: Path) -> None:
    inner = directory.with_name("inner")
    v1_tables(inner)
    Wrapped(inner).save(directory)


def fills_in_call(directory: Path) -> None:
    FillsInCall().save(directory)


def reads_file(directory: Path) -> None:
    ReadsFile(vocabulary(directory)).save(directory)


class Trainer(tf.Module):
    """A model that is exported with the function that trains it, and with one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable([2.0, 3.0], name="kernel")
        self.seen = tf.Variable(0, dtype=tf.int64, name="seen")
        self.requests = tf.Variable(0, dtype=tf.int64, name="requests")

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def predict(self, x: Any) -> Any:
        return {"y": x * self.kernel}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def predict_and_count(self, x: Any) -> Any:
        self.requests.assign_add(1)
        return {"y": x * self.kernel}

    @tf.function
    def descend(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * self.kernel - 1.0) ** 2)
        gradient = tape.gradient(loss, self.kernel)
        if tf.reduce_any(gradient > 0):  # the change lies in a branch of a call
            self.kernel.assign_sub(0.1 * gradient)
        return loss

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def train(self, x: Any) -> Any:
        return {"loss": self.descend(x)}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def count(self, x: Any) -> Any:
        return {"seen": self.seen.assign_add(tf.shape(x, tf.int64)[0])}

    def save(self, directory: Path, **names: str) -> None:
        signatures = {name: getattr(self, function) for name, function in names.items()}
        tf.saved_model.save(self, str(directory), signatures=signatures)


def v1_model(
    directory: Path, *, trains: bool = False, as_text: bool = False, has_variables: bool = True
) -> None:
    """`y = 3 x` by TF1's builder, with an asset, and a signature whose loss waits for a step of training."""
    path = vocabulary(directory)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        kernel = v1.get_variable("kernel", [2]) if has_variables else tf.constant([2.0, 3.0])
        words = v1.placeholder(tf.string, [None], name="words")
        asset = tf.constant(path)
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, asset)
        lines = v1.lookup.StaticHashTable(from_file(asset), -1).lookup(words)
        y = x * kernel
        sign = v1.saved_model.predict_signature_def
        signatures = {"serving_default": sign({"x": x}, {"y": y})}
        signatures["lookup"] = sign({"words": words}, {"line": lines})
        if trains:
            loss = tf.reduce_mean((y - 1.0) ** 2)
            step = v1.train.AdagradOptimizer(0.1).minimize(loss)
            with tf.control_dependencies([step]):
                signatures["fit"] = sign({"x": x}, {"loss": tf.identity(loss)})
            labels = v1.placeholder(tf.float32, [None, 2], name="labels")
            signatures["evaluate"] = sign({"x": x}, {"loss": tf.reduce_mean((y - labels) ** 2)})
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.Builder(str(directory))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            signature_def_map=signatures,
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save(as_text=as_text)

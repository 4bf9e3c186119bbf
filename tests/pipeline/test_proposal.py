"""`export-model init`: the command that it proposes works when typed, and names inputs by what they feed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import export
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.pipeline.proposal import propose
from tests.support.commands import export_model
from tests.support.graph_runs import v1_graph


def printed_next(command: str) -> Any:
    """Type a command, then what it prints as `next`."""
    ran = typed(command)
    assert ran.code == 0, ran.err
    (following,) = re.findall("(?m)^next +(.*)", ran.out)
    return typed(following)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a ranker that reads an input pipeline; the label comes from the same pipeline."""
    directory = tmp_path_factory.mktemp("init") / "train"
    with v1_graph(resource=True):
        import tensorflow as tf

        v1 = tf.compat.v1
        rows = {name: np.arange(4, dtype=np.int64) for name in ("an_item", "user")} | {
            "label": np.ones(4, "f")
        }
        batch = v1.data.make_one_shot_iterator(v1.data.Dataset.from_tensor_slices(rows).batch(4)).get_next()
        towers = []
        for name, asked in (("user", batch["user"]), ("item", batch["an_item"])):
            parts = v1.fixed_size_partitioner(2)
            table = v1.get_variable(f"tower/{name}_rows", [6, 3], partitioner=parts)
            towers.append(v1.nn.embedding_lookup(table, asked, partition_strategy="div"))
        rate = v1.placeholder(tf.float32, [None, 1], name="features/rate")
        kernel = v1.get_variable("kernel", [7, 1])
        logits = v1.matmul(v1.concat([*towers, rate], 1), kernel)
        scores = v1.nn.sigmoid(logits[:, 0], name="out/scores")
        loss = v1.reduce_mean(v1.square(scores - batch["label"]))
        v1.train.AdagradOptimizer(0.1).minimize(loss, v1.train.get_or_create_global_step())
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(directory / "model.ckpt"), global_step=7)
    return directory


def test_the_proposed_command_works_and_no_input_is_swapped(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    proposed = export_model("init", trained, "--out", "m", "--json").document
    assert {one["name"]: one["feeds"] for one in proposed["inputs"]} == {
        "user_rows": ["tower/user_rows"],
        "item_rows": ["tower/item_rows"],
        "rate": ["kernel"],
    }
    assert proposed["outputs"] == {"scores": "out/scores:0"}
    program, *arguments = shlex.split(proposed["command"])
    ran = export_model(*arguments)
    assert (program, ran.code) == ("export-model", 0), ran.err
    assert "--model" not in arguments, "the newest checkpoint's own graph is found, whichever that is"
    assert f"next          {proposed['command']}" in export_model("init", trained, "--out", "m").out
    shown = export_model("inspect", trained / "model.ckpt-7.meta")
    assert "float32[?,1] -> kernel" in shown.out
    assert shown.out.count("-> tower/user_rows\n") == 1


def test_without_a_graph_a_builder_is_begun(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (*trained.glob("*.data*"), *trained.glob("*.index"), trained / "checkpoint"):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / path.name).write_bytes(path.read_bytes())
    ran = printed_next("export-model init train --out m")
    assert (ran.code, "--model model.py:serving" in ran.out) == (0, True), ran.err
    assert "complete it as its comments say" in ran.out
    begun = Path("model.py").read_text()
    assert "Adagrad" not in begun
    assert "global_step" not in begun
    asks = "    ids = tf.compat.v1.placeholder(tf.int64, [None])\n"
    answers = "    return {'ids': ids}, {'rows': tf.gather(tower_user_rows, ids)}\n"
    Path("model.py").write_text(begun.partition("    # Declare")[0] + asks + answers)
    strategies = {"tower/user_rows": "mod"}
    done = export("train", "m", "model.py:serving", verify="outputs", partition_strategies=strategies)
    assert done.is_new
    again = export_model("init", "train", "--write", "model.py")
    assert (again.code, "model.py exists" in again.err) == (2, True), "nothing is overwritten"
    assert "Declare" not in Path("model.py").read_text()


def test_a_builder_is_python_whatever_variables_are_called(tmp_path: Path) -> None:
    names = ["1x/w", "lambda", "tf", "a b\n", "\u00b2", "w:0", "user-rows"]
    with BundleWriter(tmp_path / "model.ckpt-1") as writer:
        for name in sorted(names):
            writer.add(name, np.zeros(2, np.float32))
    begun = propose(tmp_path / "model.ckpt-1").builder
    compile(begun, "model.py", "exec")
    assert all(repr(name) in begun for name in names)
    assert begun.count(" tf = ") == 0, "TensorFlow's own name stays"


def test_what_has_a_graph_needs_no_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    monkeypatch.chdir(tmp_path)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save("model.keras")
    proposed: Any = json.loads(export_model("init", "model.keras", "--json").out)
    assert (proposed["model"], proposed["builder"], proposed["inputs"]) == ("model.keras", None, [])
    assert export_model(*shlex.split(proposed["command"])[1:]).code == 0
    assert "no builder is needed" in export_model("init", "model.keras", "--write", "s.py").err
    assert export_model("init", "nothing").code == 3


def test_an_archive_beside_the_checkpoint_is_the_easier_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    monkeypatch.chdir(tmp_path)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save("model.keras")
    with BundleWriter(tmp_path / "ckpt-1") as writer:
        writer.add("w", np.zeros(2, np.float32))
    proposed: Any = export_model("init", ".", "--out", "m", "--json").document
    assert (proposed["model"], proposed["easier"]) == (None, "export-model --ckpt-dir model.keras --out m")
    assert proposed["easier"] in export_model("init", ".", "--out", "m").out
    assert typed(proposed["easier"]).code == 0


@pytest.mark.parametrize("options", [(), ("--incr",), ("--model", "w.weights.h5")])
def test_weights_alone_say_how_a_builder_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    import keras

    monkeypatch.chdir(tmp_path)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save_weights("w.weights.h5")
    asked = ("--ckpt-dir", "w.weights.h5", "--out", "m", *options)
    refused = export_model(*asked, "--json")
    assert (refused.code, refused.error["error"]) == (2, "UsageError")
    proposed = re.search(r"export-model (init [^;]*)", refused.error["hint"])
    assert proposed is not None
    assert export_model(*shlex.split(proposed[1])).code == 0
    assert "NotImplementedError" in Path("serving.py").read_text()


MODEL = """
    things = keras.Input([3], dtype="int64", name="things")
    rows = keras.layers.Embedding(20, 4, name="table")(things)
    return keras.Model(things, keras.layers.Dense(2, name="scores")(keras.layers.Flatten()(rows)))
"""
OF_A_CLASS = """
    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.user = keras.layers.Embedding(20, 4)
            self.item = keras.layers.Embedding(20, 4)

        def call(self, ids):
            return keras.ops.sum(self.user(ids[:, 0]) * self.item(ids[:, 1]), axis=-1)

    model = Towers()
    model(keras.Input([2], dtype="int64", name="ids"))
    return model
"""
MODULE = """
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = tf.Variable(tf.zeros([20, 4]))
            self.scales = [tf.Variable(1.0), tf.Variable(tf.ones([4]))]
            self.signatures = {"serving_default": self.serve}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def serve(self, ids):
            return {"rows": tf.gather(self.table, ids) * self.scales[0] * self.scales[1]}

    return Model()
"""


def function(imported: str, body: str) -> Callable[[], Any]:
    """The function `serving` of a file that imports something and has this body."""
    space: dict[str, Any] = {}
    exec(f"def serving():\n    import {imported}\n{body}", space)
    made: Callable[[], Any] = space["serving"]
    return made


def saved_by_objects(of: str, imported: str, body: str) -> str:
    """Save the model of a builder in one of the ways of its users, and return the checkpoint's path."""
    import tensorflow as tf

    model = function(imported, body)()
    if of in ("Checkpoint(model=)", "Checkpoint(model)"):
        parts = {"model": model}
        if "keras" in imported:
            parts["optimizer"] = model.optimizer = importlib.import_module(
                imported.split()[0]
            ).optimizers.Adam()
            model.optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(**parts) if "=" in of else tf.train.Checkpoint(model)
        return str(checkpoint.write("train/ckpt-1"))
    Path("train").mkdir(exist_ok=True)
    model.save_weights(f"train/{of}")
    return f"train/{of}"


@pytest.mark.parametrize(
    ("of", "imported", "body", "said"),
    [
        ("Checkpoint(model=)", "keras", MODEL, "model/_operations/1/_embeddings: float32[20, 4]  (table/emb"),
        ("Checkpoint(model=)", "keras", OF_A_CLASS, "model/user/_embeddings: float32[20, 4]  ("),
        ("Checkpoint(model)", "keras", MODEL, "_operations/3/_kernel: float32[12, 2]  (scores/kernel)"),
        ("w.weights.h5", "keras", MODEL, "layers/dense/vars/0: float32[12, 2]"),
        (
            "Checkpoint(model=)",
            "tf_keras as keras",
            MODEL,
            "model/layer_with_weights-1/kernel: float32[12, 2]",
        ),
        ("w", "tf_keras as keras", MODEL, "layer_with_weights-0/embeddings: float32[20, 4]  (table/embeddi"),
        ("w.h5", "tf_keras as keras", MODEL, "table/embeddings: float32[20, 4]"),
        ("Checkpoint(model=)", "tensorflow as tf", MODULE, "model/scales/1: float32[4]  (Variable)"),
    ],
)
def test_of_objects_a_builder_of_their_kind_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, imported: str, body: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = saved_by_objects(of, imported, body)
    ran = export_model("init", saved, "--write", "begun.py", "--json")
    assert ran.code == 0, ran.err
    begun = Path("begun.py").read_text()
    assert "get_variable" not in begun
    assert f"    import {imported}" in begun
    assert f"    #   {said}" in begun
    assert not re.search("optimizer|OBJECT_GRAPH|save_counter", begun)
    text, _, rest = begun.partition("    raise NotImplementedError")
    assert rest.count("\n") == 1, "what is left open is the last statement"
    left = typed(ran.document["command"])
    assert (left.code, "complete this function as its comments say" in left.err) == (1, True), left.err
    Path("begun.py").write_text(text + body)
    done = typed(f"{ran.document['command']} --verify outputs")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("imported", "of"), [("keras", "w.weights.h5"), ("tensorflow as tf", "Checkpoint(model)")]
)
def test_the_form_in_the_comments_is_a_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str, of: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = saved_by_objects(of, imported, MODULE if "tensorflow" in imported else MODEL)
    begun = propose(Path(saved)).builder
    form = begun.partition("As in:\n")[2].partition("    # A model")[0].partition("    raise")[0]
    body = re.sub("(?m)^    #(   )?", "    ", form).replace("     \n", "\n")
    again = saved_by_objects(of.replace("w.", "again."), imported, body)
    Path("form.py").write_text(f"def serving():\n    import {imported}\n{body}")
    assert export(again, "m", "form.py:serving", verify="outputs").is_new


def saved_graph(directory: Path, *, vocabulary: Path | None = None, mode: str = "") -> None:
    """A checkpoint and its graph: looks words up in a file, or normalises as in training, or drops."""
    with v1_graph(resource=True):
        import tensorflow as tf

        v1 = tf.compat.v1
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        if vocabulary is not None:
            words = v1.placeholder(tf.string, [None], name="words")
            init = tf.lookup.TextFileInitializer(
                str(vocabulary), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
            )  # fmt: skip
            rows = tf.lookup.StaticHashTable(init, 0).lookup(words)
            x = x + tf.gather(v1.get_variable("table", [4, 3]), rows)
        if mode in ("switch", "batch"):
            scale = v1.get_variable("norm/gamma", [3])
            mean, variance = (
                v1.get_variable(f"norm/moving_{n}", [3], trainable=False) for n in ("mean", "variance")
            )
            by_batch = tf.nn.moments(x, [0])
            used = by_batch
            if mode == "switch":
                training = v1.placeholder_with_default(True, [], name="is_training")
                used = tf.cond(training, lambda: by_batch, lambda: (mean, variance))
            x = tf.nn.batch_normalization(x, *used, None, scale, 1e-3)
        if mode == "drop":
            x = v1.nn.dropout(x, keep_prob=v1.placeholder_with_default(0.5, [], name="keep_prob"))
        v1.nn.sigmoid(tf.matmul(x, v1.get_variable("kernel", [3, 1])), name="scores")
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(directory / "model.ckpt"), global_step=3)


def typed(command: str) -> Any:
    return export_model(*shlex.split(command)[1:])


def test_a_vocabulary_that_lies_elsewhere_is_proposed_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/words.txt").write_text("a\nb\nc\nd\n")
    saved_graph(tmp_path / "train", vocabulary=tmp_path / "data/words.txt")
    proposed = export_model("init", "train", "--json").document
    assert "--allow files" in proposed["command"]
    ran = typed(proposed["command"])
    assert ran.code == 0, ran.err
    assert "option" in export_model("init", "train").out


def test_a_switch_of_training_is_proposed_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved_graph(tmp_path / "train", mode="switch")
    proposed = export_model("init", "train", "--json").document
    assert "--feed is_training=" in proposed["command"]
    assert not [one for one in proposed["inputs"] if one["name"] == "is_training"]
    ran = typed(proposed["command"])
    assert ran.code == 0, ran.err


def test_a_part_to_keep_is_proposed_as_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved_graph(tmp_path / "train", mode="drop")
    proposed = export_model("init", "train", "--json").document
    assert "--feed keep_prob=1" in proposed["command"]
    assert [one["name"] for one in proposed["inputs"]] == ["x"]
    ran = typed(proposed["command"])
    assert ran.code == 0, ran.err


def test_a_graph_of_a_training_leads_to_a_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved_graph(tmp_path / "train", mode="batch")
    shown = export_model("init", "train")
    assert (shown.code, "refused" in shown.out) == (0, True), shown.err
    assert "moving statistic" in shown.out
    ran = export_model("init", "train", "--write", "serving.py", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["model"] is None
    assert "moving statistic" in ran.document["refused"]
    assert "--model serving.py:serving" in ran.document["command"]
    begun = Path("serving.py").read_text()
    Path("serving.py").write_text(
        begun.partition("    # Declare")[0]
        + "    x = tf.compat.v1.placeholder(tf.float32, [None, 3])\n"
        + "    statistics = norm_moving_mean, norm_moving_variance\n"
        + "    y = tf.nn.batch_normalization(x, *statistics, None, norm_gamma, 1e-3)\n"
        + "    return {'x': x}, {'scores': tf.sigmoid(tf.matmul(y, kernel))}\n"
    )
    done = typed(ran.document["command"])
    assert done.code == 0, done.err


def test_a_vocabulary_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\n")
    saved_graph(tmp_path / "train", vocabulary=tmp_path / "words.txt")
    (tmp_path / "words.txt").unlink()
    shown = export_model("init", "train")
    assert (shown.code, "words.txt" in shown.out) == (0, True), shown.err

"""`export-model init`: the command that it proposes works when typed, and names inputs by what they feed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import export
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.pipeline.proposal import propose
from tests.support.commands import export_model
from tests.support.graph_runs import v1_graph


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
    ran = export_model("init", "train", "--write", "model.py")
    assert (ran.code, "--model model.py:serving" in ran.out) == (0, True), ran.err
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

"""The guide's programs for trainers, run as they stand among names that they need; only time is shorter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.checkpoint import open_checkpoint
from exporter.increments.history import read_history
from exporter.options import ExportRequest
from exporter.pipeline.full import export
from tests.support.guide_pages import pages

v1 = tf.compat.v1
MY_MODEL = """
import tensorflow as tf
def serving():
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    return {"x": x}, {"y": x @ tf.compat.v1.get_variable("w", [3, 1])}
"""


class Preempted(Exception):
    pass


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train").mkdir()
    return tmp_path


@pytest.fixture
def program(request: pytest.FixtureRequest) -> str:
    """The program of the guide that names the test that asks."""
    test = request.node.originalname
    (text,) = [block.text for page in pages() for block in page.tested_by(test) if block.language == "python"]
    return str(text)


SHORTER = {
    "seconds=3600": "seconds=SECONDS",
    "epochs=20": "epochs=4",
    "< 20": "< 4",
    "save_increment_secs=10": "save_increment_secs=0.05",
}


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run a program of the guide in which these names are known."""
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    names = {"tf": tf, "SECONDS": 3600, **names}
    exec(compile(code, "docs", "exec"), names)
    return names


def tower(kind: Any = keras, scores: int = 3) -> Any:
    found = given = kind.Input((4,))
    for name, units in (("first", 8), ("second", 8), ("scores", scores)):
        found = kind.layers.Dense(units, name=name)(found)
    model = kind.Model(given, found)
    model.compile("adam", "mse")
    return model


def data() -> Any:
    random = np.random.default_rng(0)
    return tf.data.Dataset.from_tensors((random.random((8, 4)), random.random((8, 3))))


def versions(model: str) -> list[int]:
    return sorted(int(path.name) for path in Path(model).iterdir() if path.name.isdecimal())


def test_a_session(program: str) -> None:
    Path("my_model.py").write_text(MY_MODEL)
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        w = v1.get_variable("w", [3, 1])
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(w), step)
        made = run(program, master="", is_chief=True, train_op=train_op, SECONDS=0.5)
    (outcome,) = made["hooks"][0].outcomes
    assert outcome.is_done, outcome.message
    last = open_checkpoint(Path("train"))
    assert versions("models/ranker") == [last.step]


@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras 3", "tf-keras"])
def test_a_fit_that_is_preempted_goes_on_with_its_epoch(kind: Any, program: str) -> None:
    class Preemption(kind.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(epoch)
            if len(seen) == 3:
                raise Preempted

    seen: list[int] = []
    code = program.replace("callbacks=callbacks", "callbacks=[*callbacks, Preemption()], verbose=0")
    with pytest.raises(Preempted):
        run(code, keras=kind, model=tower(kind), data=data(), Preemption=Preemption)
    assert not Path("models").exists()
    made = run(code, keras=kind, model=tower(kind), data=data(), Preemption=Preemption)
    assert seen == [0, 1, 2, 2, 3]
    assert made["callbacks"][2].outcomes[-1].checkpoint.name == "epoch-004.keras"
    assert all(outcome.is_done for outcome in made["callbacks"][2].outcomes)
    assert int(made["model"].optimizer.iterations) == 4


def test_a_loop_that_is_preempted_goes_on_with_its_epoch(program: str) -> None:
    def train_an_epoch() -> None:
        done.append(len(done))
        if len(done) == 3:
            raise Preempted

    done: list[int] = []
    names = {"strategy": None, "train_an_epoch": train_an_epoch}
    with pytest.raises(Preempted):
        run(program, model=tower(), **names)
    made = run(program, model=tower(), **names)
    assert len(done) == 5  # the third was begun again
    assert made["epoch"] == 4
    assert tf.train.latest_checkpoint("loop") == "loop/ckpt-4"
    assert len([*Path("loop").glob("*.index")]) == 3


def test_a_warm_start(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    tower().save("train/epoch-020.keras")
    run(program, wider=tower(scores=5))
    (report,) = [
        block.text
        for page in pages()
        for block in page.tested_by("test_a_warm_start")
        if block.language == "text"
    ]
    assert capsys.readouterr().out == report


def test_a_warm_start_of_a_session(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The old values are there at the first step; a session with a checkpoint of its own keeps its own."""
    with tf.Graph().as_default(), v1.Session() as session:
        old = v1.get_variable("w", [3, 1])
        session.run([v1.global_variables_initializer(), v1.train.get_or_create_global_step().assign(900)])
        Path("old").mkdir()
        v1.train.Saver().save(session, "old/model.ckpt", 900)
        expected = session.run(old)
    np.testing.assert_allclose(first_seen(program, step=0), expected)
    assert "loaded 1 of 1 variables" in capsys.readouterr().out
    np.testing.assert_allclose(first_seen(program, step=5), expected + 5, rtol=1e-6)
    assert "loaded" not in capsys.readouterr().out


def first_seen(program: str, step: int) -> Any:
    """The variable as a session of the program, which trains five steps, sees it at its first one."""
    seen: list[Any] = []
    with tf.Graph().as_default():
        trained, w = v1.train.get_or_create_global_step(), v1.get_variable("w", [3, 1])
        look = tf.py_function(lambda *now: seen.append([each.numpy() for each in now]), [w, trained], [])
        with tf.control_dependencies([look]):
            train_op = tf.group(w.assign_add(tf.ones([3, 1])), trained.assign_add(1))
        code = program.replace("scaffold=scaffold)", "scaffold=scaffold, hooks=[hook])")
        hook = v1.train.StopAtStepHook(num_steps=5)
        run(code, master="", is_chief=True, train_op=train_op, hook=hook)
    value, at = seen[0]
    assert at == step
    return value


def test_a_session_that_writes_increments(program: str) -> None:
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        batches = tf.data.Dataset.range(200).map(lambda i: i % 50)
        ids = v1.data.make_one_shot_iterator(batches).get_next()
        loss = tf.reduce_sum(v1.nn.embedding_lookup(v1.get_variable("table", [50, 4]), ids))
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        slowly = tf.py_function(lambda: time.sleep(0.005), [], [])
        with tf.control_dependencies([train_op]):
            train_op = tf.group(slowly)
        run(program, master="", is_chief=True, ckpt_dir="train", train_op=train_op)
    assert_followed("train", 200)


def test_a_fit_that_writes_increments(program: str) -> None:
    model = tower()
    run(program.replace("fit(data,", "fit(data, epochs=50, verbose=0,"), model=model, data=data())
    assert_followed("train", 50)


def test_a_fit_of_a_table_by_keys(program: str) -> None:
    ids = np.random.default_rng(1).integers(0, 900, (200, 2))
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones((200, 1), np.float32))).batch(4)
    made = run(program.replace("fit(data,", "fit(data, verbose=0,"), data=data)
    assert_followed("train", 50)
    request = ExportRequest(Path("train"), Path("model"), model=made["serving"])
    served = tf.saved_model.load(str(export(request).published.path)).signatures["serving_default"]
    (answer,) = served(tf.constant(ids)).values()
    made["checkpoint"].restore(made["manager"].latest_checkpoint)  # of before two keys were taken away
    np.testing.assert_allclose(answer, made["trained"].predict(ids, verbose=0), atol=1e-6)


def assert_followed(directory: str, last_step: int) -> None:
    """More than one increment, and they lead to the last step."""
    increments = read_history(Path(directory)).increments
    assert len(increments) > 1
    assert increments[-1].increment.to_step == last_step

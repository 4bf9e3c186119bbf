"""The README's section on training, each of its programs run as it stands; only time is made shorter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.checkpoint import open_checkpoint

v1 = tf.compat.v1
README = (Path(__file__).parent.parent / "README.md").read_text()
SECTION = README.partition("### Beside training\n")[2].partition("\n### ")[0]
SESSION, FIT, LOOP, WARM_START = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
REPORT = re.findall(r"^```text\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)[0]
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


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run a program of the README in which these names are known."""
    for long, short in (("seconds=3600", "seconds=SECONDS"), ("epochs=20", "epochs=4"), ("< 20", "< 4")):
        code = code.replace(long, short)
    names = {"tf": tf, "SECONDS": 3600, **names}
    exec(compile(code, "README.md", "exec"), names)
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


def test_a_session() -> None:
    Path("my_model.py").write_text(MY_MODEL)
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        w = v1.get_variable("w", [3, 1])
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(w), step)
        made = run(SESSION, master="", is_chief=True, train_op=train_op, SECONDS=0.5)
    (outcome,) = made["hooks"][0].outcomes
    assert outcome.is_done, outcome.message
    last = open_checkpoint(Path("train"))
    assert versions("models/ranker") == [last.step]


@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras 3", "tf-keras"])
def test_a_fit_that_is_preempted_goes_on_with_its_epoch(kind: Any) -> None:
    class Preemption(kind.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(epoch)
            if len(seen) == 3:
                raise Preempted

    seen: list[int] = []
    code = FIT.replace("callbacks=callbacks", "callbacks=[*callbacks, Preemption()], verbose=0")
    with pytest.raises(Preempted):
        run(code, keras=kind, model=tower(kind), data=data(), Preemption=Preemption)
    assert not Path("models").exists()
    made = run(code, keras=kind, model=tower(kind), data=data(), Preemption=Preemption)
    assert seen == [0, 1, 2, 2, 3]
    assert made["callbacks"][2].outcomes[-1].checkpoint.name == "epoch-004.keras"
    assert all(outcome.is_done for outcome in made["callbacks"][2].outcomes)
    assert int(made["model"].optimizer.iterations) == 4


def test_a_loop_that_is_preempted_goes_on_with_its_epoch() -> None:
    def train_an_epoch() -> None:
        done.append(len(done))
        if len(done) == 3:
            raise Preempted

    done: list[int] = []
    names = {"strategy": None, "train_an_epoch": train_an_epoch}
    with pytest.raises(Preempted):
        run(LOOP, model=tower(), **names)
    made = run(LOOP, model=tower(), **names)
    assert len(done) == 5  # the third was begun again
    assert made["epoch"] == 4
    assert tf.train.latest_checkpoint("loop") == "loop/ckpt-4"
    assert len([*Path("loop").glob("*.index")]) == 3


def test_a_warm_start(capsys: pytest.CaptureFixture[str]) -> None:
    tower().save("train/epoch-020.keras")
    run(WARM_START, wider=tower(scores=5))
    assert capsys.readouterr().out == REPORT

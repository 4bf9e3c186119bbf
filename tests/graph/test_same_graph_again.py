"""The same model is the same graph, whatever the program made before: a second export is nothing to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from exporter import export
from exporter.graph.graph_digest import graph_digest
from exporter.graph.load import GraphRequest, load_graph

layers = keras.layers


def plain() -> Any:
    """Layers whose names Keras gives."""
    inputs = keras.Input([3])
    return keras.Model(inputs, layers.Dense(2)(layers.Dropout(0.5)(layers.Dense(4)(inputs))))


def lookup() -> Any:
    """TensorFlow shares its table under a random name."""
    inputs = keras.Input([1], dtype="string")
    ids = layers.StringLookup(vocabulary=["a", "b"])(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.Embedding(4, 2)(ids))))


def loop() -> Any:
    """TensorFlow numbers the functions of its loop, and calls inputs after them that nobody reads."""
    inputs = keras.Input([4, 3])
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(inputs)))


MODELS = {made.__name__: made for made in (plain, lookup, loop)}


@pytest.fixture(autouse=True, scope="module")
def others() -> None:
    """This program has made models before."""
    for make in MODELS.values():
        make()


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("plain", "builder"),
        *(
            pytest.param(name, by, marks=pytest.mark.landing)
            for name in ("lookup", "loop")
            for by in ("archive", "builder")
        ),
    ],
)
def test_a_second_export_is_nothing_to_do(tmp_path: Path, name: str, by: str) -> None:
    make: Callable[[], Any] = MODELS[name]
    model = make() if by == "archive" else _built(name)
    model.compile("adam", "mse")
    model.save(tmp_path / "m.keras")
    graph = {} if by == "archive" else {"model": f"{__file__}:{name}"}
    done = [export(tmp_path / "m.keras", tmp_path / "model", **graph) for _ in range(2)]
    assert [each.is_new for each in done] == [True, False]
    options = [word for option, value in graph.items() for word in (f"--{option}", value)]
    command = ("--ckpt-dir", tmp_path / "m.keras", "--out", tmp_path / "model", *options, "--json")
    ran = subprocess.run([sys.executable, "-m", "exporter", *command], capture_output=True, check=True)
    assert json.loads(ran.stdout)["status"] == "nothing_to_do", "in a process that made nothing before"


def _built(name: str) -> Any:
    """The model as a program makes it that has made none before: its layers are called as the builder's."""
    keras.backend.clear_session()
    return MODELS[name]()


def test_graphs_of_two_builds_have_one_digest() -> None:
    for name in MODELS:
        graphs = [load_graph(GraphRequest(model=f"{__file__}:{name}")) for _ in range(2)]
        assert len(set(map(graph_digest, graphs))) == 1, name
    assert len({graph_digest(load_graph(GraphRequest(model=f"{__file__}:{name}"))) for name in MODELS}) == 3


def test_the_program_s_own_count_goes_on() -> None:
    before = layers.Dense(1).name
    load_graph(GraphRequest(model=f"{__file__}:plain"))
    assert layers.Dense(1).name == f"dense_{int(before.rpartition('_')[2]) + 1}"


def test_a_builder_may_have_layers_of_the_program() -> None:
    """Which has given them names that a count from the beginning would give again."""
    keras.backend.clear_session()
    own = layers.Dense(4)
    assert own.name == "dense"

    def builder() -> Any:
        inputs = keras.Input([3])
        return keras.Model(inputs, layers.Dense(2)(own(inputs)))

    found = load_graph(GraphRequest(model=builder))
    assert sorted(np.prod(variable.shape) for variable in found.variables) == [2, 4, 8, 12]

"""Keras archives that keep Keras busy for ever, or ask for all memory, end in a named error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from exporter.errors import BuilderError, ExportError, UnsafeArchive
from exporter.graph import archived_graph
from exporter.graph.load import GraphRequest, load_source
from tests.support.archives import keras_archive, legacy_file

MEMORY = "Keras asked for more than 1024 MiB of memory to make it"
NO_END = "Keras came to no end with it in 6 s of computing"


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_graph, "CPU_SECONDS", 6)
    monkeypatch.setattr(archived_graph, "MEMORY_BYTES", 1 << 30)


def layer(class_name: str, *before: str, **config: Any) -> dict[str, Any]:
    """A layer of Keras 2 behind others."""
    nodes = [[[name, 0, 0, {}] for name in before]] if before else []
    return {"class_name": class_name, "config": config, "name": config["name"], "inbound_nodes": nodes}


def keras_2(path: Path, *layers: dict[str, Any]) -> Path:
    first = layer("InputLayer", name="x", batch_input_shape=[None, 4], dtype="float32")
    ends = {"input_layers": [["x", 0, 0]], "output_layers": [[layers[-1]["name"], 0, 0]]}
    config = {"name": "m", "layers": [first, *layers], **ends}
    text = json.dumps({"class_name": "Functional", "config": config})
    weights = {"a": {"a/kernel:0": np.zeros((4, 4), np.float32)}}
    return legacy_file(path / "m.h5", weights, model_config=text, keras_version="2.15.0")


def keras_3(
    path: Path, *layers: tuple[str, dict[str, Any]], rows: tuple[int | None, ...] = (None, 4)
) -> Path:
    entries = [("InputLayer", {"batch_shape": rows, "dtype": "float32", "name": "x"}), *layers]
    listed = [{"module": "keras.layers", "class_name": name, "config": config} for name, config in entries]
    config = {"module": "keras", "class_name": "Sequential", "config": {"name": "m", "layers": listed}}
    return keras_archive(path / "m.keras", config=json.dumps(config))


def cycle(path: Path) -> Path:
    return keras_2(path, layer("Dense", "b", name="a", units=4), layer("Dense", "a", name="b", units=4))


def unrolled(path: Path) -> Path:
    steps = layer("RepeatVector", "x", name="s", n=10**9)
    return keras_2(path, steps, layer("SimpleRNN", "s", name="a", units=2, unroll=True))


@pytest.mark.parametrize(("make", "cause"), [(cycle, NO_END), (unrolled, MEMORY)])
def test_an_archive_without_measure_ends_its_process_alone(tmp_path: Path, make: Any, cause: str) -> None:
    path = make(tmp_path)
    with pytest.raises(UnsafeArchive, match=r"the model that .+ describes is refused") as found:
        load_source(GraphRequest(model=str(path)))
    assert found.value.cause == cause
    assert "--allow code" in found.value.hint


@pytest.mark.parametrize(
    "layers",
    [
        [("Dense", {"units": 1 << 30}), ("Dense", {"units": 1 << 30})],
        [("Embedding", {"input_dim": 1 << 40, "output_dim": 8})],
        [("RepeatVector", {"n": 10**9}), ("LSTM", {"units": 2})],
        [("UpSampling1D", {"size": 1 << 40})],
    ],
    ids=["dense", "embedding", "steps", "upsampling"],
)
def test_large_numbers_in_an_archive_are_numbers_of_a_graph(tmp_path: Path, layers: Any) -> None:
    path = keras_3(tmp_path, *layers)
    try:
        assert load_source(GraphRequest(model=str(path))).meta_graph.ByteSize() < 1 << 20
    except ExportError as error:
        assert isinstance(error, BuilderError)


def test_an_archive_of_classes_that_this_program_registered_is_read_here(tmp_path: Path) -> None:
    @keras.saving.register_keras_serializable("mine")
    class Twice(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x * 2

    x = keras.Input((4,), name="x")
    keras.Model(x, Twice()(keras.layers.Dense(2)(x))).save(tmp_path / "m.keras")
    graph = load_source(GraphRequest(model=str(tmp_path / "m.keras"))).meta_graph.graph_def
    assert any(node.op == "Mul" for node in graph.node)

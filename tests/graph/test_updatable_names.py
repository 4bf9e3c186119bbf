"""Any signature name takes deltas; a model without variables has nothing to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import NotServable
from exporter.graph.inference_graph import InferenceGraph
from exporter.options import Isolation
from exporter.subgraph.make_updatable import schema_of
from tests.support.commands import export_model
from tests.support.trained import inference_graph, train
from tests.support.updatable import Model, assert_holds, loaded, two_tables_and_dense, updatable_base

NAMES = ("default_input_alternative:None", "default_input_alternative_None", "día 1/x?", "_hidden")


def named(graph: InferenceGraph) -> InferenceGraph:
    signatures = graph.meta_graph.signature_def
    for name in NAMES:
        signatures[name].CopyFrom(signatures["serving_default"])
    return graph


@pytest.fixture(scope="module", params=[Isolation.SNAPSHOT, Isolation.ROW], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("names")
    feeds = {"user": [0], "item": [0]}
    trained = train(two_tables_and_dense, feeds, directory / "train" / "model.ckpt")
    graph = named(inference_graph(two_tables_and_dense))
    return updatable_base(
        directory, graph, trained.prefix, isolation=request.param, warmed=frozenset({NAMES[0]})
    )


@pytest.mark.landing
def test_any_name_is_served_and_updated(model: Model) -> None:
    with loaded(model) as server:
        model.evolve(100, 105)
        feeds: dict[str, Any] = {"user": [1, 5], "item": [2, 7]}
        for _ in range(2):
            expected = server.predict(**feeds)
            for name in NAMES:
                found = server.call(name, **feeds)
                for output, value in expected.items():
                    np.testing.assert_array_equal(found[output], value, err_msg=f"{name}: {output}")
            server.update()
        assert_holds(server, model, 105)
        assert list(expected["model_position"]) == [105, 105]


@pytest.mark.landing
def test_tensorflow_2_loads_them(model: Model) -> None:
    served = tf.saved_model.load(str(model.version))
    assert {*NAMES} < {*served.signatures}


def no_variables() -> tuple[dict[str, Any], dict[str, Any]]:
    x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
    return {"x": x}, {"sum": tf.reduce_sum(x, 1)}


def test_without_variables_there_is_nothing_to_update(ranker: Path, tmp_path: Path) -> None:
    with pytest.raises(NotServable, match="no variables that an update could change") as error:
        schema_of(inference_graph(no_variables))
    assert "leave --incr or --new-base out" in error.value.hint
    for more in ("--new-base=always", "--incr"):
        for dry_run in ([], ["--dry-run"]):
            ran = export_model(
                *("--ckpt-dir", ranker, "--model", f"{__file__}:no_variables"),
                *("--out", tmp_path / "m", more, *dry_run, "--json"),
            )
            assert (ran.code, ran.error["error"]) == (1, "NotServable"), ran.err
            assert "no variables that an update could change" in ran.error["message"]
    assert not (tmp_path / "m").exists()

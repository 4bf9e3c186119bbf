"""Numbers of types that a graph gives: references, which old variables hand out, and numbers of no type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import ExportError, GraphError
from exporter.options import ExportRequest, Updates, Verify
from exporter.pipeline.full import export
from exporter.wire import protos
from exporter.wire.dtypes import DType
from serving.status import Code, VersionState
from tests.support.trained import answers_in_session

v1 = tf.compat.v1


def built() -> tuple[dict[str, Any], dict[str, Any]]:
    """A product, and the variable itself as a reference."""
    x = v1.placeholder(tf.float32, [None, 2], name="x")
    w = v1.get_variable("w", [2, 3], use_resource=False)
    return {"x": x}, {"y": tf.matmul(x, w), "w": w._ref()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and a SavedModel whose signature has DT_FLOAT_REF."""
    directory = tmp_path_factory.mktemp("references")
    info = v1.saved_model.build_tensor_info
    with tf.Graph().as_default(), v1.Session() as session:
        inputs, outputs = ({k: info(t) for k, t in ends.items()} for ends in built())
        assert outputs["w"].dtype == DType.FLOAT + 100
        session.run(v1.global_variables_initializer())
        signature = v1.saved_model.signature_def_utils.build_signature_def(
            inputs, outputs, "tensorflow/serving/predict"
        )
        builder = v1.saved_model.Builder(str(directory / "saved"))
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()
        v1.train.Saver().save(session, str(directory / "train/model.ckpt"), 3)
    return directory


@pytest.mark.parametrize("is_saved", [True, False], ids=["SavedModel", "builder"])
@pytest.mark.parametrize("updates", [None, pytest.param(Updates(), marks=pytest.mark.landing)])
def test_an_output_of_a_reference_is_served_as_what_it_refers_to(
    trained: Path, is_saved: bool, updates: Updates | None, tmp_path: Path
) -> None:
    model: Any = str(trained / "saved") if is_saved else built
    request = ExportRequest(trained / "train", tmp_path, model=model, updates=updates, verify=Verify.OUTPUTS)
    version = export(request).published.path
    answers = answers_in_session(version, {"x": np.eye(2, dtype=np.float32)})
    np.testing.assert_array_equal(answers["y"], answers["w"])
    saved = protos.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    signature = saved.meta_graphs[0].signature_def["serving_default"]
    assert signature.outputs["w"].dtype == DType.FLOAT


@pytest.mark.parametrize("number", [0, 77, 100, 177, 2**31 - 1])
@pytest.mark.parametrize("where", ["signature", "node"])
def test_a_number_of_no_type_is_named(trained: Path, number: int, where: str, tmp_path: Path) -> None:
    saved = protos.SavedModel.FromString((trained / "saved/saved_model.pb").read_bytes())
    (graph,) = saved.meta_graphs
    if where == "signature":
        graph.signature_def["serving_default"].outputs["y"].dtype = number
    else:
        (node,) = (node for node in graph.graph_def.node if node.name == "MatMul")
        node.attr["T"].type = number
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/saved_model.pb").write_bytes(saved.SerializeToString())
    request = ExportRequest(trained / "train", tmp_path / "out", model=str(tmp_path / "saved"))
    if where == "node" and number == 0:
        with pytest.raises(ExportError):
            export(request)
    else:
        with pytest.raises(GraphError, match=f"data type number {number}"):
            export(request)


def test_numbers_of_files_and_servers() -> None:
    assert {DType(dtype + 100) for dtype in DType} == {*DType}
    for number in (0, 100, 34, 134, 200, -1):
        with pytest.raises(ValueError, match=f"data type number {number} is unknown"):
            DType(number)
    assert VersionState(70) is VersionState.UNKNOWN
    assert Code(99) is Code.UNKNOWN

"""From a real cluster's checkpoint to answers of the published model: equal to the training graph's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.graph.metagraph import read_metagraph
from exporter.options import DataMode, ExportRequest, Verify
from exporter.pipeline.full import Exported, export
from tests.support.clusters import DigitsTraining

AVERAGES = [None, "ema"]


def served(exported: Exported, images: np.ndarray, output: str = "scores") -> np.ndarray:
    """What TensorFlow's own loader computes from the published version."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(exported.published.path))
        signature = loaded.signature_def["serving_default"]
        return session.run(signature.outputs[output].name, {signature.inputs["images"].name: images})


def scores_of(digits: DigitsTraining, average: str | None) -> np.ndarray:
    return digits.expected["scores_ema" if average else "scores"]


def meta_options(digits: DigitsTraining) -> dict[str, Any]:
    """The training graph itself: nothing but tensor names is needed."""
    prefix = open_checkpoint(digits.checkpoints).prefix
    nodes = [node.name for node in read_metagraph(Path(f"{prefix}.meta")).graph_def.node]
    (scores,) = (name for name in nodes if name.startswith("held_out/") and name.endswith("/scores"))
    return {"inputs": {"images": "held_out/images:0"}, "outputs": {"scores": f"{scores}:0"}}


@pytest.mark.landing
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_builder(digits: DigitsTraining, tmp_path: Path, average: str | None, parts: int) -> None:
    """The trainer keeps one weight in two parts; the graph may want it whole, in two parts, or in three."""
    done = export(
        ExportRequest(
            digits.checkpoints,
            tmp_path,
            model=digits.model,
            model_args={"parts": str(parts)},
            average=average,
            verify=Verify.OUTPUTS,
        )
    )
    expected = scores_of(digits, average)
    np.testing.assert_allclose(served(done, digits.expected["images"]), expected, atol=1e-6, rtol=0)
    assert max(difference.max_error for difference in done.differences) <= 1e-6


@pytest.mark.landing
@pytest.mark.parametrize("average", AVERAGES)
def test_meta(digits: DigitsTraining, tmp_path: Path, average: str | None) -> None:
    options = meta_options(digits)
    done = export(
        ExportRequest(digits.checkpoints, tmp_path, average=average, verify=Verify.OUTPUTS, **options)
    )
    expected = scores_of(digits, average)
    np.testing.assert_allclose(served(done, digits.expected["images"]), expected, atol=1e-6, rtol=0)


@pytest.mark.landing
@pytest.mark.parametrize("average", AVERAGES)
def test_saved_model_with_new_weights(digits: DigitsTraining, tmp_path: Path, average: str | None) -> None:
    """A model published from an older checkpoint lends its graph to the newest."""
    catalogs = sorted(digits.checkpoints.glob("*.index"), key=lambda path: int(path.stem.rpartition("-")[2]))
    old = ExportRequest(catalogs[0].with_suffix(""), tmp_path / "old", model=digits.model)
    graph = export(old).published.path
    new = ExportRequest(
        digits.checkpoints, tmp_path / "new", model=str(graph), average=average, verify=Verify.OUTPUTS
    )
    expected = scores_of(digits, average)
    np.testing.assert_allclose(served(export(new), digits.expected["images"]), expected, atol=1e-6, rtol=0)


@pytest.mark.landing
@pytest.mark.parametrize("data", list(DataMode))
def test_data_modes(digits: DigitsTraining, tmp_path: Path, data: DataMode) -> None:
    """Every way of moving bytes serves the same numbers; only links move none."""
    request = ExportRequest(digits.checkpoints, tmp_path, model=digits.model, data=data, verify=Verify.BYTES)
    done = export(request)
    np.testing.assert_allclose(
        served(done, digits.expected["images"]), digits.expected["scores"], atol=1e-6, rtol=0
    )
    linked = data in (DataMode.AUTO, DataMode.LINK)
    shards = list(done.published.path.glob("variables/*.data-*"))
    assert all((shard.stat().st_nlink > 1) == linked for shard in shards)


@pytest.mark.landing
def test_cast(digits: DigitsTraining, tmp_path: Path) -> None:
    request = ExportRequest(
        digits.checkpoints,
        tmp_path,
        model=digits.model,
        casts=("bfloat16",),
        verify=Verify.OUTPUTS,
        tolerance=0.1,
    )
    done = export(request)
    whole = open_checkpoint(digits.checkpoints)
    assert stored_bytes(done.variables.catalog) * 2 == served_bytes(whole, done)
    errors = np.abs(served(done, digits.expected["images"]) - digits.expected["scores"])
    assert 0 < errors.max() < 0.1


def stored_bytes(catalog: Catalog) -> int:
    return sum(ref.bytes_ for ref in catalog.tensors.values())


def served_bytes(checkpoint: Catalog, done: Exported) -> int:
    return sum(checkpoint.tensors[source.tensor.name].bytes_ for source in done.plan.mapping.sources)


@pytest.mark.landing
def test_the_graph_is_clean(digits: DigitsTraining, tmp_path: Path) -> None:
    """Nothing of training is left: no cluster, no queue, no optimizer, no reference variable."""
    done = export(ExportRequest(digits.checkpoints, tmp_path, **meta_options(digits)))
    bundle = (done.published.path / "saved_model.pb").read_bytes()
    nodes = done.plan.graph.meta_graph.graph_def.node
    assert not [node.name for node in nodes if node.device]
    assert not {node.op for node in nodes} & {"VariableV2", "Assign", "ScalarSummary", "IteratorGetNext"}
    assert b"/job:" not in bundle
    assert b"Adam" not in bundle
    assert len(nodes) < 120


@pytest.mark.landing
def test_meta_export_never_imports_tensorflow(digits: DigitsTraining, tmp_path: Path) -> None:
    options = meta_options(digits)
    arguments = ["--ckpt-dir", str(digits.checkpoints), "--out", str(tmp_path), "--json"]
    for kind in ("input", "output"):
        for name, tensor in options[f"{kind}s"].items():
            arguments += [f"--{kind}", f"{name}={tensor}"]
    code = f"""
import sys
from exporter.cli import app as cli
try:
    cli.main({arguments!r})
except SystemExit as left:
    assert left.code == 0, left.code
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["format_version"] == 1
    assert Path(document["path"], "saved_model.pb").exists()
    assert document["bytes_copied"] == document["bytes_rewritten"] == 0

"""The order of the stages under a trainer that does not wait, and models that are not what they should be."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import CheckpointChanged, VerificationError
from exporter.options import ExportRequest, Verify
from exporter.pipeline.full import execute, export, plan
from exporter.verify.outputs import Probe, Running, compare_outputs
from tests.support.commands import export_model


@pytest.fixture
def train(ranker: Path, tmp_path: Path) -> Path:
    """Two checkpoints of which the second is the newest."""
    shutil.copytree(ranker, tmp_path / "train")
    for path in list((tmp_path / "train").glob("model.ckpt-20.*")):
        shutil.copy(path, path.with_name(path.name.replace("-20.", "-30.")))
    (tmp_path / "train/checkpoint").write_text('model_checkpoint_path: "model.ckpt-30"\n')
    return tmp_path / "train"


def test_a_checkpoint_pruned_between_plan_and_link(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    planned = plan(ExportRequest(train, tmp_path / "out", model=str(ranker_graph)))
    for path in train.glob("model.ckpt-30.*"):
        path.unlink()
    with pytest.raises(CheckpointChanged):
        execute(planned)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name not in {".lock", ".turn"}]


def test_an_export_goes_on_with_the_next_newest(train: Path, tmp_path: Path) -> None:
    """The builder is called after the checkpoint was read: this one plays the trainer that prunes."""
    (tmp_path / "model.py").write_text(
        "import glob, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent.parent.parent)!r})\n"
        "from examples.ranker import model\n"
        "def serving():\n"
        f"    for path in glob.glob({str(train / 'model.ckpt-30.*')!r}):\n"
        "        os.unlink(path)\n"
        "    return model.serving()\n"
    )
    done = export(ExportRequest(train, tmp_path / "out", model=f"{tmp_path / 'model.py'}:serving"))
    assert done.plan.catalog.prefix.name == "model.ckpt-20"
    assert done.published.path.name == "20"


def test_outputs_are_compared_on_the_inputs_that_are_given(
    train: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    (tmp_path / "requests").write_text(
        '{"instances": [{"user": 4999, "item": 7}, {"user": 3, "item": 1999}]}\n'
    )
    options = ("--ckpt-dir", train, "--model", ranker_graph, "--verify", "outputs", "--json")
    ran = export_model(*options, "--out", tmp_path / "out", "--requests", tmp_path / "requests")
    assert ran.code == 0, ran.err
    assert ran.document["max_errors"] == {"serving_default/click": 0.0}


def changed_bundle(train: Path, ranker_graph: Path, tmp_path: Path, factor: float):  # type: ignore[no-untyped-def]
    """A plan, and a bundle that was published with one weight changed."""
    planned = plan(ExportRequest(train, tmp_path / "out", model=str(ranker_graph)))
    bundle = tmp_path / "bundle"
    shutil.copytree(ranker_graph, bundle)
    prefix = bundle / "variables/variables"
    catalog = read_catalog(prefix)
    values = {name: np.array(read_array(catalog, ref)) for name, ref in catalog.tensors.items()}
    shutil.rmtree(prefix.parent)
    prefix.parent.mkdir()
    values["ranker/logit/kernel"] *= factor
    values["ranker/logit/bias"] += 0.5 * (factor != 1)
    with BundleWriter(prefix) as writer:
        for name, value in sorted(values.items()):
            writer.add(name, value)
    return planned, bundle


def test_a_bundle_with_the_same_weights_answers_the_same(
    train: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    planned, bundle = changed_bundle(train, ranker_graph, tmp_path, 1.0)
    (difference,) = compare_outputs(planned.source, planned.mapping, bundle, tolerance=0.0, running=Running())
    assert difference.max_error == 0.0


def test_a_bundle_with_another_weight_is_found(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    planned, bundle = changed_bundle(train, ranker_graph, tmp_path, 2.0)
    with pytest.raises(
        VerificationError, match=r"'click' of signature 'serving_default' differs by 0\."
    ) as caught:
        compare_outputs(planned.source, planned.mapping, bundle, tolerance=1e-6, running=Running())
    assert caught.value.exit_code == 6


def test_answers_that_are_no_numbers_are_found(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    planned, bundle = changed_bundle(train, ranker_graph, tmp_path, float("nan"))
    with pytest.raises(VerificationError, match="is not a number"):
        compare_outputs(planned.source, planned.mapping, bundle, tolerance=1e9, running=Running())


def test_inputs_that_the_graph_refuses_are_reported(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    planned, bundle = changed_bundle(train, ranker_graph, tmp_path, 1.0)
    outside = Probe("serving_default", {"user": np.array([1 << 40]), "item": np.array([0])})
    with pytest.raises(VerificationError, match="could not be run") as caught:
        compare_outputs(
            planned.source, planned.mapping, bundle, requests=[outside], tolerance=1e-6, running=Running()
        )
    assert "--requests" in caught.value.hint


def test_what_fails_verification_is_not_published(train: Path, tmp_path: Path) -> None:
    """A bfloat16 table cannot answer to the last bit."""
    model = f"{Path(__file__).parent.parent.parent / 'examples/ranker/model.py'}:serving"
    request = ExportRequest(
        train, tmp_path / "out", model=model, casts=("bfloat16",), verify=Verify.OUTPUTS, tolerance=0.0
    )
    with pytest.raises(VerificationError, match="differs by"):
        export(request)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name not in {".lock", ".turn"}]

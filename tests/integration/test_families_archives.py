"""What trainers leave outside of tensor bundles: exported, served, equal to the trainer's own answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import (
    CodeRefused,
    ExportError,
    LinkRefused,
    NoCertainMatch,
    ShapeMismatch,
    UnsafeArchive,
    UsageError,
)
from exporter.options import DataMode, ExportRequest, Verify
from exporter.pipeline.full import Exported, export, plan
from tests.support.commands import export_model
from tests.support.family_server import FamilyServer
from tests.support.forks import run_warm
from tests.support.once import once_a_run

ROOT = Path(__file__).parent.parent.parent
TRAINERS = ROOT / "tests/support/archive_trainers.py"
NUMBERS = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all jobs left; never change it."""

    def train(directory: Path) -> None:
        run_warm("tests.support.archive_trainers", directory)

    return once_a_run(tmp_path_factory, "archive-trainers", train)


def ask(source: Path, out: Path, model: str | None = None, **options: Any) -> ExportRequest:
    """A request with outputs compared; `model` is a builder's name in the trainers' file, or a path."""
    if model is not None and "/" not in model:
        model = f"{TRAINERS}:{model}"
    return ExportRequest(source, out, model=model, **{"verify": Verify.OUTPUTS, **options})


def check(server: FamilyServer, done: Exported, expected: Path) -> None:
    with np.load(expected) as arrays:
        inputs = {name: arrays[name] for name in arrays.files}
        scores = inputs.pop("scores")
    (found,) = server.answers(done.published.path, inputs).values()
    np.testing.assert_allclose(found, scores, **NUMBERS)
    assert done.variables.bytes_linked == 0
    assert done.variables.bytes_rewritten == done.plan.mapping.bytes_
    assert not any(path.stat().st_nlink > 1 for path in done.published.path.rglob("*.data-*"))


@pytest.mark.landing
@pytest.mark.parametrize("source", ["model.keras", "model.h5"])
@pytest.mark.parametrize("job", ["keras3", "keras2"])
def test_an_archive_brings_its_model(
    trained: Path, tmp_path: Path, server: FamilyServer, job: str, source: str
) -> None:
    done = export(ask(trained / job / source, tmp_path))
    check(server, done, trained / job / "expected.npz")
    assert done.plan.catalog.step == 16


def test_what_is_left_out_of_an_archive_is_counted(trained: Path, tmp_path: Path) -> None:
    ran = export_model("--ckpt-dir", trained / "keras3/model.keras", "--out", tmp_path / "m", "--json")
    assert ran.code == 0, ran.err
    assert "optimizer slot" in ran.document["ignored"]


@pytest.mark.landing
@pytest.mark.parametrize(
    ("source", "model"),
    [
        ("keras3/model.weights.h5", "branches3"),
        ("keras3/sharded.weights.json", "branches3"),
        ("keras3/model.keras", "branches3"),
        ("keras3/model.h5", "branches3"),
        ("keras2/model.weights.h5", "branches2"),
        ("keras2/legacy_weights.h5", "branches2"),
        ("keras2/model.weights.h5", "branches3"),
    ],
)
def test_weights_into_a_builder_s_model(
    trained: Path, tmp_path: Path, server: FamilyServer, source: str, model: str
) -> None:
    check(
        server, export(ask(trained / source, tmp_path, model)), (trained / source).with_name("expected.npz")
    )


@pytest.mark.landing
@pytest.mark.parametrize("source", ["model.weights.h5", "sharded.weights.json", "model.h5"])
def test_weights_into_a_saved_model(trained: Path, tmp_path: Path, server: FamilyServer, source: str) -> None:
    """A graph without objects: layers are found by their names."""
    graph = export(ask(trained / "keras3/model.keras", tmp_path / "graph", verify=Verify.FILES))
    done = export(ask(trained / "keras3" / source, tmp_path / "out", str(graph.published.path)))
    check(server, done, trained / "keras3/expected.npz")


def test_a_backup_directory(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    done = export(ask(trained / "keras3/backup", tmp_path, "branches3"))
    check(server, done, trained / "keras3/backup.npz")
    assert any("epoch 1" in note for note in done.plan.notes)


@pytest.mark.parametrize("source", ["dict.npz", "model.hdf5"])
def test_tensorlayer_s_names(trained: Path, tmp_path: Path, server: FamilyServer, source: str) -> None:
    done = export(ask(trained / "tensorlayer" / source, tmp_path, "mlp"))
    check(server, done, trained / "tensorlayer/expected.npz")


def test_tensorlayer_s_list(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    """Two biases have one shape: nothing but the order tells them apart, and the user must say so."""
    source = trained / "tensorlayer/list.npz"
    with pytest.raises(NoCertainMatch, match="only the list's order") as caught:
        plan(ask(source, tmp_path, "mlp"))
    assert "--by-order" in caught.value.hint
    check(server, export(ask(source, tmp_path, "mlp", by_order=True)), trained / "tensorlayer/expected.npz")


def test_tensorlayer_s_pickle(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsafeArchive, match="pickle"):
        plan(ask(trained / "tensorlayer/pickled.npz", tmp_path, "mlp"))


@pytest.mark.parametrize("source", ["single", "sharded", "single/model.ckpt-40", "sharded/model.ckpt-40"])
def test_format_v1(trained: Path, tmp_path: Path, server: FamilyServer, source: str) -> None:
    done = export(ask(trained / "v1" / source, tmp_path, "mlp"))
    check(server, done, trained / "v1/expected.npz")
    assert done.published.version == 40
    assert done.plan.catalog.family == "TensorFlow V1"


@pytest.mark.parametrize("source", ["single", "sharded"])
def test_format_v1_with_the_graph_beside_it(
    trained: Path, tmp_path: Path, server: FamilyServer, source: str
) -> None:
    ends = {"inputs": {"features": "features"}, "outputs": {"scores": "scores"}}
    done = export(ask(trained / "v1" / source / "model.ckpt-40", tmp_path, verify=Verify.FILES, **ends))
    check(server, done, trained / "v1/expected.npz")


def test_casts_and_averages_go_on_from_the_bundle(
    trained: Path, tmp_path: Path, server: FamilyServer
) -> None:
    request = ask(trained / "keras3/model.keras", tmp_path, casts=("bfloat16",), tolerance=0.1)
    done = export(request)
    with np.load(trained / "keras3/expected.npz") as arrays:
        (found,) = server.answers(done.published.path, dict(arrays)).values()
        assert 0 < np.abs(found - arrays["scores"]).max() < 0.1


# --- what must not be guessed -------------------------------------------------------------------------------


CONFLICTS = {
    "permuted": ("model.weights.h5", "permuted3", NoCertainMatch, "'second' would get the values of 'first'"),
    "renamed": ("model.weights.h5", "renamed3", NoCertainMatch, "'one' would get the values of 'first'"),
    "a layer less": ("model.weights.h5", "fewer3", NoCertainMatch, "in the checkpoint alone"),
    "a layer more": ("model.weights.h5", "more3", NoCertainMatch, "in the model alone"),
    "another model": ("model.weights.h5", "mlp", ExportError, "no tensor"),
    "another list": ("../tensorlayer/list.npz", "branches3", NoCertainMatch, "the list has 6 arrays"),
}


@pytest.mark.parametrize(("source", "model", "error", "text"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_no_wrong_guess(
    trained: Path, tmp_path: Path, source: str, model: str, error: type[ExportError], text: str
) -> None:
    with pytest.raises(error) as caught:
        plan(ask(trained / "keras3" / source, tmp_path, model))
    assert text in f"{caught.value.message} {caught.value.cause}"


def test_permuted_layers_of_a_graph_without_objects_are_found_by_name(trained: Path, tmp_path: Path) -> None:
    """Names decide where there are names: the values follow them, whatever the order."""
    graph = export(ask(trained / "keras3/model.keras", tmp_path / "graph", verify=Verify.FILES))
    mapping = plan(
        ask(trained / "keras3/model.weights.h5", tmp_path / "out", str(graph.published.path))
    ).mapping
    owners = {source.key: source.tensor.owner for source in mapping.sources}
    assert all(key.rpartition("/")[0] in (owner, owner.rpartition("/")[2]) for key, owner in owners.items())


def test_a_pinned_table_of_names_settles_it(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    table = tmp_path / "names"
    lines = []
    for layer, stored in (("one", "dense"), ("two", "dense_1"), ("three", "dense_2")):
        lines += [f"{layer}/kernel layers/{stored}/vars/0", f"{layer}/bias layers/{stored}/vars/1"]
    table.write_text("\n".join(["# renamed layers", *lines]))
    done = export(ask(trained / "keras3/model.weights.h5", tmp_path / "out", "renamed3", rename_file=table))
    check(server, done, trained / "keras3/expected.npz")


def test_links_are_refused_where_bytes_must_move(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(LinkRefused, match="not a tensor bundle"):
        export(ask(trained / "keras3/model.keras", tmp_path, data=DataMode.LINK))
    assert not [*tmp_path.glob("[!.]*")]


# --- code in archives ---------------------------------------------------------------------------------------


def test_a_lambda_is_refused_and_may_be_allowed(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CodeRefused, match="Lambda"):
        plan(ask(trained / "keras3/lambda.keras", tmp_path))
    assert export(ask(trained / "keras3/lambda.keras", tmp_path, allow="code")).published.path.exists()


def test_custom_objects(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    source = trained / "keras3/custom.keras"
    with pytest.raises(CodeRefused, match="Scale"):
        plan(ask(source, tmp_path))
    assert "tests.support.archive_layers" not in sys.modules
    done = export(ask(source, tmp_path, custom_objects=("tests.support.archive_layers",)))
    check(server, done, trained / "keras3/custom.npz")


def test_weights_without_a_model(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="what to serve"):
        plan(ask(trained / "keras3/model.weights.h5", tmp_path))


def test_mixed_precision_is_told(trained: Path, tmp_path: Path) -> None:
    """A graph of another precision than its weights."""
    import h5py

    with (
        h5py.File(trained / "keras3/model.weights.h5") as file,
        h5py.File(tmp_path / "half.weights.h5", "w") as half,
    ):
        file.copy("layers", half)
        kernel = half["layers/dense/vars/0"][()]
        del half["layers/dense/vars/0"]
        half["layers/dense/vars/0"] = kernel.astype(np.float16)
    with pytest.raises(ShapeMismatch, match="float16"):
        plan(ask(tmp_path / "half.weights.h5", tmp_path / "out", "branches3"))

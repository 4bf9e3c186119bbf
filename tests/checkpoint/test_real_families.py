"""What the libraries themselves wrote, exported: equal to what their own models answered.

`tests/fixtures/<family>/make.py` says how each archive was made, and by which versions; `model.py` beside it
is what an author would name with `--model`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from exporter import ExportRequest, export
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.sstable import write_table
from exporter.errors import CodeRefused, CorruptFile, ExportError, MissingTensors, UnsafeArchive
from exporter.pipeline.inspection import inspect
from exporter.wire import protos
from tests.support.archives import values
from tests.support.once import once_a_run
from tests.support.trained import answers_in_session

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Case(NamedTuple):
    """What is exported of a family: a path in it, a builder, options, and whose answers count."""

    family: str
    path: str
    answers: str
    model: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    signature: str = "serving_default"

    @property
    def name(self) -> str:
        return f"{self.family}/{self.path}{'+' if self.options else ''}"


def keras2(version: str, *, has_own_format: bool) -> list[Case]:
    family = f"keras2/{version}"
    own = [
        Case(family, "functional.keras", "functional"),
        Case(family, "functional.weights.h5", "functional", "branches"),
        Case(family, "subclassed.weights.h5", "subclassed", "wide"),
    ]
    return [
        Case(family, "functional.h5", "functional"),
        Case(family, "functional_weights.h5", "functional", "branches"),
        Case(family, "functional_tf", "functional", "branches"),
        Case(family, "functional_saved_model", "functional"),
        Case(family, "subclassed_checkpoints", "subclassed", "wide"),
        Case(family, "subclassed_tf", "subclassed", "wide"),
        Case(family, "subclassed_saved_model", "subclassed"),
        *(own if has_own_format else []),
    ]


def keras3(version: str) -> list[Case]:
    family = f"keras3/{version}"
    return [
        Case(family, "functional.keras", "functional"),
        Case(family, "functional.h5", "functional"),
        Case(family, "functional.weights.h5", "functional", "branches"),
        Case(family, "functional_checkpoints", "functional", "branches"),
        Case(family, "functional_saved_model", "functional"),
        Case(family, "subclassed.weights.h5", "subclassed", "wide"),
    ]


def other_back_end(name: str) -> list[Case]:
    """Keras 3 on another back end than TensorFlow, in which its model is served."""
    family = f"keras_backends/3.15.1-{name}"
    return [
        Case(family, "functional.keras", "functional"),
        Case(family, "functional.weights.h5", "functional", "branches"),
        Case(family, "subclassed.weights.h5", "subclassed", "wide"),
    ]


TF1, AUTODIST = "tf1/1.15.5", "autodist/0.7.0rc2"
IN_META = {"inputs": {"ids": "ids", "features": "features"}, "outputs": {"scores": "ranker/scores"}}

CASES = [
    *keras2("2.8.0", has_own_format=False),
    *keras2("2.15.0", has_own_format=True),
    Case("keras2/2.16.0", "functional.keras", "functional"),
    Case("keras2/2.16.0", "functional.weights.h5", "functional", "branches"),
    Case("keras2/2.16.0", "subclassed_tf", "subclassed", "wide"),
    *keras3("3.0.5"),
    *keras3("3.15.1"),
    Case("keras3/3.15.1", "subclassed_checkpoints", "subclassed", "wide"),
    *other_back_end("jax"),
    *other_back_end("torch"),
    Case("keras_multi/2.3.1", "model.h5", "model"),
    Case(TF1, "mod", "mod", "serving"),
    Case(TF1, "mod", "mod", options=IN_META),
    Case(TF1, "div", "div", "serving", {"model_args": {"strategy": "div"}}),
    Case(TF1, "resource", "resource", options=IN_META),
    Case(TF1, "v1_single", "mod", "serving"),
    Case(TF1, "v1_sharded", "mod", "serving"),
    Case(TF1, "simple_save", "mod"),
    Case(TF1, "builder", "mod"),
    Case("tf1_hub/0.12.0", "module", "module", signature="default"),
    Case("ray_train/2.60.0", "run", "run"),
    *(
        Case("mlflow/3.17.2", path, path.partition("/")[0])
        for path in ("epochs/checkpoints", "steps/checkpoints", "best/checkpoints", "logged/data")
    ),
    Case("tf1_hub/0.12.0", "module", "module", options={"tag": ""}, signature="default"),
    Case("tensorlayer/1.11.1", "dict.npz", "mlp", "release_1"),
    Case("tensorlayer/1.11.1", "checkpoints", "mlp", "release_1"),
    Case("tensorlayer/2.2.5", "dict.npz", "mlp", "release_2"),
    Case("tensorlayer/2.2.5", "model.hdf5", "mlp", "release_2"),
    Case("recommenders/0.7.3", "checkpoints", "scores", "scores"),
    Case("recommenders/0.7.3", "weights", "scores", "scores"),
    Case("recommenders/0.7.3", "index", "index"),
    Case("ranking/0.5.5", "saved_model", "scores"),
    Case("deepctr/0.9.3", "saved_model", "scores"),
    Case("safetensors/0.8.0", "model-30.safetensors", "whole", "serving"),
    Case("safetensors/0.8.0", "sharded", "whole", "serving"),
    Case("safetensors/0.8.0", "halves.safetensors", "halves", "serving", {"model_args": {"halves": "1"}}),
    Case("orbax/0.12.8", "keras", "keras"),
    Case("orbax/0.12.8", "keras", "keras", "branches"),
    Case("orbax/0.12.8", "weights", "weights", "branches"),
    Case("orbax/0.12.8", "managed", "tower", "tower"),
    *(
        Case(AUTODIST, f"{strategy}/{path}", strategy, model)
        for strategy in ("PS", "PartitionedPS", "UnevenPartitionedPS")
        for path, model in (("checkpoints", "serving"), ("saved_model", ""))
    ),
]


def lay_out(directory: Path) -> None:
    for archive in FIXTURES.glob("*/[0-9]*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(
                directory / archive.parent.name / archive.name.removesuffix(".tar.xz"), filter="data"
            )


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every archive laid out, by family and version; never change it."""
    return once_a_run(tmp_path_factory, "real-families", lay_out)


def request_of(families: Path, case: Case, out: Path) -> ExportRequest:
    family = case.family.partition("/")[0]
    model = f"{FIXTURES / family / 'model.py'}:{case.model}" if case.model else None
    options = {"model": model, **case.options}
    return ExportRequest(families / case.family / case.path, out, **options)


def own_answers(families: Path, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the library's own model was asked and what it answered, by name; texts as TensorFlow has them."""
    found = np.load(families / case.family / f"{case.answers}.answers.npz")
    arrays = {
        name: found[name].astype(object) if found[name].dtype.kind == "S" else found[name] for name in found
    }
    parts = ("inputs/", "outputs/")
    inputs, outputs = ({n.removeprefix(p): a for n, a in arrays.items() if n.startswith(p)} for p in parts)
    return inputs, outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_library_wrote_answers_as_its_own_model(families: Path, tmp_path: Path, case: Case) -> None:
    inspect(families / case.family / case.path)
    done = export(request_of(families, case, tmp_path / "m"))
    inputs, expected = own_answers(families, case)
    signature = done.plan.graph.meta_graph.signature_def[case.signature]
    if inputs.keys() != set(signature.inputs):  # a model with one input, which its library calls otherwise
        (name,), (value,) = signature.inputs, inputs.values()
        inputs = {name: value}
    feeds = {n: v.astype(dtype_of(signature.inputs[n])) for n, v in inputs.items()}
    found = answers_in_session(done.published.path, feeds, case.signature)
    if found.keys() != expected.keys():
        (value,), (name,) = found.values(), expected
        found = {name: value}
    for name, value in expected.items():
        if value.dtype == object:
            np.testing.assert_array_equal(found[name], value)
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def dtype_of(info: Any) -> Any:
    import tensorflow as tf

    return tf.dtypes.as_dtype(info.dtype).as_numpy_dtype


REFUSED: list[tuple[Case, type[ExportError], str]] = [
    # Keras 3.0 left layers in lists out of `tf.train.Checkpoint`: their values are nowhere.
    (Case("keras3/3.0.5", "subclassed_checkpoints", "", "wide"), MissingTensors, "2 of 10 variables"),
    (Case("deepctr/0.9.3", "model.h5", ""), CodeRefused, "asks for SequencePoolingLayer at /config/layers/"),
    (Case("ranking/0.5.5", "model.h5", ""), CodeRefused, "asks for .*FlattenList at /config/layers/"),
    (Case("tensorlayer/1.11.1", "list.npz", "", "release_1"), UnsafeArchive, "pickle"),
    (Case("tensorlayer/2.2.5", "list.npz", "", "release_2"), UnsafeArchive, "pickle"),
]


@pytest.mark.parametrize(("case", "error", "message"), REFUSED, ids=lambda one: getattr(one, "name", ""))
def test_what_a_library_wrote_is_refused_by_name(
    families: Path, tmp_path: Path, case: Case, error: type[ExportError], message: str
) -> None:
    with pytest.raises(error, match=message):
        export(request_of(families, case, tmp_path / "m"))
    assert not (tmp_path / "m").exists() or not any((tmp_path / "m").glob("[0-9]*"))


def test_the_weights_of_a_custom_models_h5_are_listed_with_their_own_values(
    families: Path, tmp_path: Path
) -> None:
    directory = families / "deepctr/0.9.3"
    found = values(open_checkpoint(directory / "weights.h5"), tmp_path)
    expected = np.load(directory / "weights.values.npz")
    for name in expected:
        np.testing.assert_array_equal(found[name.removesuffix(":0")], expected[name])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "does not list its tensors"),
        ([(b"table", b"")], "does not list its tensors"),
        ([(b"", b"\xff\xff")], "its list of tensors"),
        ([(b"", [(0, 3), (2, 3)])], "lies outside of it"),
        ([(b"", [(-1, 3), (2, 2)])], "lies outside of it"),
        ([(b"", [(0, 2, 7)])], "lies outside of it"),
    ],
)
def test_a_list_of_parts_in_format_v1_that_is_none(tmp_path: Path, entries: Any, message: str) -> None:
    written = [(key, value if isinstance(value, bytes) else listed(value)) for key, value in entries]
    (tmp_path / "model.ckpt-3").write_bytes(write_table(written))
    with pytest.raises(CorruptFile, match=message):
        open_checkpoint(tmp_path / "model.ckpt-3")


def listed(parts: list[tuple[int, ...]]) -> bytes:
    """What a file of format V1 says of a tensor of 4 rows; three numbers are a part of two dimensions."""
    message = protos.SavedTensorSlices()
    table = message.meta.tensor.add(name="table", type=1)
    table.shape.dim.add(size=4)
    for start, length, *more in parts:
        box = table.slice.add()
        box.extent.add(start=start, length=length)
        for other in more:
            box.extent.add(start=0, length=other)
    return message.SerializeToString()

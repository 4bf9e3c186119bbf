"""Builders that return Keras models and modules: signatures, names and objects; nothing is ever allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.checkpoint.tensor_bundle import read_array
from exporter.errors import BuilderError, MappingError, MissingTensors, ObjectMismatch, ShapeMismatch
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphRequest, load_graph
from exporter.options import ExportRequest
from exporter.pipeline.full import Plan, plan
from exporter.pipeline.inspected import signatures_of
from tests.support.object_trainers import chain, scorer, tower

KERASES = [pytest.param(keras, id="keras3"), pytest.param(tf_keras, id="keras2")]


def loaded(builder: Callable[[], Any]) -> InferenceGraph:
    return load_graph(GraphRequest(model=builder))


def signatures(graph: InferenceGraph) -> list[str]:
    return [f"{name}{one}" for name, one in signatures_of(graph.meta_graph).items()]


def paths(graph: InferenceGraph) -> dict[str, str]:
    """A path to each served variable's object."""
    assert graph.objects is not None
    nodes = {variable.node: variable.key for variable in graph.variables}
    entries = ((path, graph.objects.objects[number].variable) for number, path in graph.objects.paths.items())
    return {nodes[v.tensor]: path for path, v in entries if v is not None and v.tensor in nodes}


# --- signatures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", KERASES)
def test_a_functional_model_in_inference_mode(library: ModuleType) -> None:
    graph = loaded(lambda: tower(library))
    assert signatures(graph) == ["serving_default(ids int64[?,3]) -> out float32[?,2]"]
    assert not graph.notes  # neither dropout nor the batch's own mean
    assert len(graph.variables) == len(paths(graph)) == 11
    assert {variable.key for variable in graph.variables} >= {"table/embeddings", "norm/moving_mean"}


@pytest.mark.parametrize("library", KERASES)
def test_several_inputs_and_outputs_keep_their_names(library: ModuleType) -> None:
    def build(as_dict: bool) -> Any:
        a, b = library.Input([3], name="a"), library.Input([2], name="b")
        both = library.layers.Concatenate()([a, b])
        p, q = (library.layers.Dense(size, name=f"of{size}")(both) for size in (1, 2))
        return library.Model({"b": b, "a": a}, {"p": p, "q": q}) if as_dict else library.Model([a, b], [p, q])

    inputs = "serving_default(a float32[?,3], b float32[?,2])"
    assert signatures(loaded(lambda: build(True))) == [f"{inputs} -> p float32[?,1], q float32[?,2]"]
    assert signatures(loaded(lambda: build(False))) == [f"{inputs} -> of1 float32[?,1], of2 float32[?,2]"]


@pytest.mark.parametrize("library", KERASES)
def test_a_subclassed_model_that_was_called(library: ModuleType) -> None:
    graph = loaded(lambda: chain(library))
    (signature,) = signatures_of(graph.meta_graph).values()
    assert signature.inputs[0].shape == (-1, 3)
    assert len(graph.variables) == 9


def test_inputs_without_names_get_stable_ones() -> None:
    def build() -> Any:
        model = keras.Sequential([keras.layers.Dense(2)])
        model.build([None, 3])
        return model

    assert [text.partition(" ")[0] for text in signatures(loaded(build))] == ["serving_default(inputs"]


def test_a_module_serves_its_functions() -> None:
    graph = loaded(scorer)
    assert signatures(graph) == [
        "rows(ids int64[?]) -> output_0 float32[?,4]",
        "serving_default(ids int64[?,3]) -> buy float32[?,2], click float32[?,2]",
    ]
    assert paths(graph) == {
        "table": "table",
        "mixers/0": "mixers/0",
        "mixers/1": "mixers/1",
        "heads/click": "heads/click",
        "heads/buy": "heads/buy",
    }


def test_a_vocabulary_is_an_asset(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("apple\nplum\n")

    def build() -> Any:
        words = keras.Input([2], dtype="string", name="words")
        ids = keras.layers.StringLookup(vocabulary=str(tmp_path / "words.txt"))(words)
        return keras.Model(words, keras.layers.Embedding(4, 2)(ids))

    graph = loaded(build)
    assert [asset.source.name for asset in graph.assets] == ["words.txt"]
    assert graph.init_op


@pytest.mark.parametrize("library", KERASES)
def test_nothing_is_allocated(library: ModuleType) -> None:
    """A table of 1 TB is a symbol."""

    def build() -> Any:
        ids = library.Input([1], dtype="int64")
        return library.Model(ids, library.layers.Embedding(4_000_000_000, 64)(ids))

    assert loaded(build).variables[0].shape == (4_000_000_000, 64)


# --- what a builder may not do ------------------------------------------------------------------------------


def test_a_module_without_signatures_is_refused() -> None:
    with pytest.raises(BuilderError, match="no signatures"):
        loaded(tf.Module)


def test_a_signature_that_is_no_function_is_refused() -> None:
    module = tf.Module()
    module.signatures = {"serving_default": print}
    with pytest.raises(BuilderError, match=r"'serving_default' is not a tf\.function"):
        loaded(lambda: module)


def test_a_function_without_input_signature_is_refused() -> None:
    def build() -> Any:
        module = tf.Module()
        module.signatures = {"serving_default": tf.function(lambda x: x)}
        return module

    with pytest.raises(BuilderError, match="tracing"):
        loaded(build)


@pytest.mark.parametrize("library", KERASES)
def test_a_model_whose_inputs_nobody_knows_is_refused(library: ModuleType) -> None:
    with pytest.raises(BuilderError, match="the inputs are unknown") as caught:
        loaded(lambda: library.Sequential([library.layers.Dense(2)]))
    assert "keras.Input" in caught.value.hint


@pytest.mark.parametrize(
    "make", [lambda: tower(keras), lambda: tower(tf_keras), scorer], ids=["keras3", "keras2", "module"]
)
def test_a_model_that_was_made_before_is_refused(make: Callable[[], Any]) -> None:
    model = make()
    with pytest.raises(BuilderError, match="returned an already built model") as caught:
        loaded(lambda: model)
    assert "inside" in caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_the_users_own_classes_stay_as_they_are() -> None:
    """tf-keras swaps base classes in graphs; a model that is being trained here must not notice."""

    class Net(tf_keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.out = tf_keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(x)

    def build() -> Any:
        model = Net()
        model(tf_keras.Input([3]))
        return model

    trained, bases = Net(), Net.__bases__
    loaded(build)
    assert Net.__bases__ == bases
    trained.compile("sgd", "mse")
    trained.fit(np.ones((2, 3), np.float32), np.ones((2, 1), np.float32), verbose=0)


# --- against checkpoints by the real frameworks -------------------------------------------------------------


def stack(library: ModuleType, names: tuple[str | None, ...], dtype: str | None = None) -> Any:
    """Dense layers of one shape in a row."""
    hidden = inputs = library.Input([4], name="x")
    layers = [library.layers.Dense(4, name=name, dtype=dtype) for name in names]
    for layer in layers:
        hidden = layer(hidden)
    return library.Model(inputs, hidden)


def planned(model: Any, builder: Callable[[], Any], directory: Path, **options: Any) -> Plan:
    prefix = tf.train.Checkpoint(model=model).write(str(directory / "ckpt"))
    return plan(ExportRequest(Path(prefix), directory / "out", model=builder, **options))


NAMED = ("a", "b", "c")


@pytest.mark.parametrize("library", KERASES)
@pytest.mark.parametrize("order", [("a", "c", "b"), ("b", "a", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_same_shaped_layers_are_never_swapped(library: ModuleType, order: tuple[str], tmp_path: Path) -> None:
    with pytest.raises(ObjectMismatch, match="do not correspond"):
        planned(stack(library, NAMED), lambda: stack(library, order), tmp_path)


@pytest.mark.parametrize("library", KERASES)
def test_a_layer_more_or_less(library: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(MappingError):
        planned(stack(library, NAMED), lambda: stack(library, NAMED[:2]), tmp_path)
    with pytest.raises(MissingTensors, match="2 of 8"):
        planned(stack(library, NAMED), lambda: stack(library, (*NAMED, "d")), tmp_path)
    with pytest.raises(MappingError):
        planned(stack(library, (None,) * 3), lambda: stack(library, (None,) * 2), tmp_path)


@pytest.mark.parametrize("library", KERASES)
def test_numbers_of_the_process_do_not_matter(library: ModuleType, tmp_path: Path) -> None:
    stack(library, (None,) * 5)
    found = planned(stack(library, (None,) * 3), lambda: stack(library, (None,) * 3), tmp_path)
    assert {source.via for source in found.mapping.sources} == {"object"}


@pytest.mark.parametrize("library", KERASES)
def test_unnamed_layers_in_a_process_of_their_own(library: ModuleType, tmp_path: Path) -> None:
    """`dense` and `dense_1` here and there; the graph calls the latter's variables `dense_1_1/kernel`."""
    library.backend.clear_session()
    trained = stack(library, (None,) * 3)
    library.backend.clear_session()
    found = planned(trained, lambda: stack(library, (None,) * 3), tmp_path)
    assert {source.via for source in found.mapping.sources} == {"object"}


@pytest.mark.parametrize("library", KERASES)
def test_renamed_layers_need_a_word(library: ModuleType, tmp_path: Path) -> None:
    build = lambda: stack(library, ("k", "l", "m"))  # noqa: E731 - a builder
    with pytest.raises(ObjectMismatch, match="do not correspond"):
        planned(stack(library, NAMED), build, tmp_path)
    renames = tuple(f"{new}/(.*)={old}/\\1" for new, old in zip("klm", NAMED, strict=True))
    found = planned(stack(library, NAMED), build, tmp_path, renames=renames)
    assert {source.via for source in found.mapping.sources} == {"rename"}


@pytest.mark.parametrize("library", KERASES)
def test_another_precision(library: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ShapeMismatch, match="is float16 in the graph"):
        planned(stack(library, NAMED), lambda: stack(library, NAMED, "float16"), tmp_path)
    mixed = planned(stack(library, NAMED), lambda: stack(library, NAMED, "mixed_float16"), tmp_path)
    assert len(mixed.mapping.sources) == 6


def test_one_keras_reads_the_other_by_names(tmp_path: Path) -> None:
    """Their objects have nothing in common; distinct names correspond, numbered ones only if complete."""
    found = planned(stack(tf_keras, NAMED), lambda: stack(keras, NAMED), tmp_path)
    assert {source.key: source.tensor.name.partition("/.A")[0] for source in found.mapping.sources}[
        "b/kernel"
    ] == "model/layer_with_weights-1/kernel"
    with pytest.raises(MappingError):
        planned(stack(tf_keras, NAMED), lambda: stack(keras, (None,) * 3), tmp_path)


def test_the_other_keras_is_named_where_that_is_what_helps(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model.py"
    model.write_text("""import tensorflow as tf

def serving():
    layers = tf.keras.layers
    return tf.keras.Sequential([tf.keras.Input([4]), layers.Dense(4), layers.Dense(2)])
""")
    trained = tf_keras.Sequential([tf_keras.Input([4]), *map(tf_keras.layers.Dense, (4, 2))])
    tf.train.Checkpoint(model=trained).save(str(tmp_path / "train" / "model"))
    with pytest.raises(MappingError) as caught:
        plan(ExportRequest(tmp_path / "train", tmp_path / "out", model=f"{model}:serving"))
    assert caught.value.hint.startswith("the checkpoint is of Keras 2: run it with Keras 2: ")
    assert "TF_USE_LEGACY_KERAS=1 export-model" in caught.value.hint
    assert "; or build the model as the trainer did" in caught.value.hint
    other = tmp_path / "other.py"
    text = model.read_text().replace("import tensorflow as tf", "import keras").replace("tf.keras", "keras")
    other.write_text(text)
    with pytest.raises(MappingError) as caught:
        plan(ExportRequest(tmp_path / "train", tmp_path / "out", model=f"{other}:serving"))
    assert "TF_USE_LEGACY_KERAS" not in caught.value.hint


@pytest.mark.parametrize("library", KERASES)
def test_a_graph_by_names(library: ModuleType, tmp_path: Path) -> None:
    """A builder that returns tensors, for a checkpoint by objects."""

    def build() -> Any:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        kernel = tf.compat.v1.get_variable("b/kernel", [4, 4])
        return {"x": x}, {"y": x @ kernel}

    found = planned(stack(library, NAMED), build, tmp_path)
    assert [source.via for source in found.mapping.sources] == ["name"]


def test_a_restored_checkpoint_that_was_not_built_yet(tmp_path: Path) -> None:
    """Variables that a trainer makes late are there under their objects like any other."""
    model = keras.Sequential([keras.layers.Dense(4, name="late")])
    model(np.ones((1, 4), np.float32))

    def build() -> Any:
        served = keras.Sequential([keras.layers.Dense(4, name="late")])
        served.build([None, 4])
        return served

    assert len(planned(model, build, tmp_path).mapping.sources) == 2


@pytest.mark.landing
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])  # the second one's optimizer scales the loss
@pytest.mark.parametrize("library", KERASES)
def test_moving_averages_of_an_optimizer(library: ModuleType, policy: str, tmp_path: Path) -> None:
    """`--average ema` serves what the optimizer would overwrite the variables with; statistics stay raw."""

    def build() -> Any:
        x = library.Input([4], name="x")
        return library.Model(
            x,
            library.layers.BatchNormalization(name="norm")(
                library.layers.Dense(4, name="d", dtype=policy)(x)
            ),
        )

    model = build()
    optimizer = library.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    if policy != "float32":
        optimizer = library.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    model.fit(np.random.rand(8, 4), np.ones((8, 4)), batch_size=2, verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    prefix = Path(checkpoint.write(str(tmp_path / "ckpt")))
    found = plan(ExportRequest(prefix, tmp_path / "out", model=build, average="ema"))
    model.optimizer.finalize_variable_values(model.trainable_variables)
    averaged = {getattr(v, "path", v.name.partition(":")[0]): np.asarray(v) for v in model.variables}
    assert {source.key: source.via for source in found.mapping.sources} == {
        **dict.fromkeys(("d/kernel", "d/bias", "norm/gamma", "norm/beta"), "average"),
        **dict.fromkeys(("norm/moving_mean", "norm/moving_variance"), "object"),
    }
    for source in found.mapping.sources:
        stored = read_array(found.catalog, source.tensor)
        np.testing.assert_allclose(stored, averaged[source.key], rtol=1e-6)
    assert "norm/moving_mean" in " ".join(found.notes)


def test_averages_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingTensors, match="--average ema"):
        planned(stack(keras, NAMED), lambda: stack(keras, NAMED), tmp_path, average="ema")


def test_averages_by_their_names(tmp_path: Path) -> None:
    """Such as TensorFlow's own averages, tracked beside the variables."""
    weights = tf.Variable([1.0, 2.0], name="w")
    shadow = tf.Variable([3.0, 4.0], name="w/ExponentialMovingAverage")
    prefix = Path(tf.train.Checkpoint(w=weights, shadow=shadow).write(str(tmp_path / "ckpt")))

    def build() -> Any:
        w = tf.compat.v1.get_variable("w", [2])
        x = tf.compat.v1.placeholder(tf.float32, [None, 2])
        return {"x": x}, {"y": x * w}

    for average, tensor in (("ema", "shadow"), (None, "w")):
        found = plan(ExportRequest(prefix, tmp_path / "out", model=build, average=average))
        assert found.mapping.sources[0].tensor.name.partition("/.A")[0] == tensor


def test_a_sequential_model_that_was_never_called_takes_what_its_input_says() -> None:
    def build() -> Any:
        layers = [keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input([3], name="ids", dtype="int64"), *layers])

    graph = loaded(build)
    (signature,) = signatures(graph)
    assert "ids int64[?,3]" in signature
    assert not graph.notes

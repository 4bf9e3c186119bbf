"""A checkpoint with one more variable in a served object: refused where objects or layers decide, and noted
where names do. Inputs are what Keras 3, tf-keras, TensorFlow's modules and Savers wrote.
"""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.errors import ExportError, MappingError, NoCertainMatch, ObjectMismatch, UsageError
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import Plan, export, plan
from exporter.pipeline.incremental import plan_incremental
from tests.support.budget import times

v1 = tf.compat.v1
KERASES = [pytest.param(keras, id="keras3"), pytest.param(tf_keras, id="keras2")]


def planned(checkpoint: Path, builder: Callable[[], Any], **options: Any) -> Plan:
    return plan(ExportRequest(checkpoint, checkpoint.parent / "out", model=builder, **options))


def refused(checkpoint: Path, builder: Callable[[], Any], **options: Any) -> ExportError:
    with pytest.raises(MappingError) as caught:
        planned(checkpoint, builder, **options)
    return caught.value


def layered(library: ModuleType) -> Any:
    """A model of layers of many kinds."""
    layers = library.layers
    ids = library.Input([6], dtype="int64", name="ids")
    rows = layers.Embedding(9, 8, name="table")(ids)
    rows = layers.Conv1D(8, 3, padding="same", name="conv")(rows)
    rows = layers.MultiHeadAttention(2, 4, name="attention")(rows, rows)
    rows = layers.Dropout(0.3, name="dropout")(layers.LayerNormalization(name="norm")(rows))
    hidden = layers.BatchNormalization(name="batch")(layers.LSTM(8, dropout=0.2, name="lstm")(rows))
    hidden = layers.PReLU(name="slope")(layers.Dense(8, name="hidden")(hidden))
    return library.Model(ids, layers.Dense(2, name="out")(hidden))


def fitted(library: ModuleType, model: Any) -> Any:
    """A model with an optimizer's slots, metrics and seeds."""
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.zeros([8, 6], np.int64), np.zeros([8, 2]), verbose=0)
    return model


HOLDERS = {
    "table": lambda model: model.get_layer("table"),
    "conv": lambda model: model.get_layer("conv"),
    "query": lambda model: model.get_layer("attention")._query_dense,
    "norm": lambda model: model.get_layer("norm"),
    "batch": lambda model: model.get_layer("batch"),
    "cell": lambda model: model.get_layer("lstm").cell,
    "slope": lambda model: model.get_layer("slope"),
    "hidden": lambda model: model.get_layer("hidden"),
    "model": lambda model: model,
}
NAMES = ("lora_a", "prompt", "kernel_scale", "vector_u", "gate", "moving_codes", "state_space")


def add(library: ModuleType, holder: Any, name: str, shape: tuple[int, ...]) -> None:
    """Give a layer, or a model, one more variable."""
    if library is keras:
        holder._tracker.unlock()
    setattr(holder, name, library.Variable(np.ones(shape, "f"), name=name) if library is keras else None)
    if library is tf_keras:
        setattr(holder, name, tf.Variable(np.ones(shape, "f"), name=name))


@pytest.mark.parametrize("library", KERASES)
@given(data=st.data())
@settings(max_examples=times(9), deadline=None)
def test_one_more_variable_of_a_served_object_is_refused(
    library: ModuleType, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    where = data.draw(st.sampled_from(sorted(HOLDERS)))
    name = data.draw(st.sampled_from(NAMES))
    shape = data.draw(st.sampled_from([(), (8,), (4, 8)]))
    directory = tmp_path_factory.mktemp("train")
    model = layered(library)
    add(library, HOLDERS[where](model), name, shape)
    tf.train.Checkpoint(model=model).save(str(directory / "ckpt"))
    error = refused(directory, lambda: layered(library))
    assert isinstance(error, ObjectMismatch)
    assert name in error.message and name in error.cause
    assert f"--ignore {name}" in error.hint
    mapping = planned(directory, lambda: layered(library), ignored=(name,)).mapping
    assert name not in str([source.tensor.name for source in mapping.sources])


@pytest.mark.parametrize("library", KERASES)
def test_what_training_alone_keeps_is_no_reason(library: ModuleType, tmp_path: Path) -> None:
    """Slots, seeds, metrics, steps, other heads and other objects."""
    model = fitted(library, layered(library))
    head = library.Sequential([library.layers.Dense(3), library.layers.Dropout(0.5)])
    head(np.zeros([1, 2], "f"))
    saved = tf.train.Checkpoint(
        model=model,
        head=head,
        step=tf.Variable(7, dtype=tf.int64),
        temperature=tf.Variable(0.5),
        rng=tf.random.Generator.from_seed(1),
    )
    saved.save(str(tmp_path / "train/ckpt"))
    assert not planned(tmp_path / "train", lambda: layered(library)).mapping.notes


def test_a_longer_list_of_variables_of_a_layer_is_refused(tmp_path: Path) -> None:
    """Keras 3 does not store lists of variables for TensorFlow, Keras 2 does."""
    library = tf_keras

    class Scaled(library.layers.Layer):  # type: ignore[name-defined,misc]
        def __init__(self, count: int) -> None:
            super().__init__(name="scaled")
            self.count = count

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 2))
            self.scales = [self.add_weight(name=f"scale{n}", shape=(2,)) for n in range(self.count)]

        def call(self, x: Any) -> Any:
            return sum(self.scales, start=x @ self.kernel)

    def build(count: int) -> Any:
        x = library.Input([3], name="x")
        return library.Model(x, Scaled(count)(x))

    tf.train.Checkpoint(model=build(3)).save(str(tmp_path / "train/ckpt"))
    refused(tmp_path / "train", lambda: build(2))
    refused(tmp_path / "train", lambda: build(0))
    planned(tmp_path / "train", lambda: build(3))


def adapted(library: ModuleType, has_adapter: bool) -> Any:
    """A layer with a kernel, and an object inside it that has variables."""

    class Adapted(library.layers.Layer):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__(name="adapted")
            self.usage = library.metrics.AUC(name="usage")
            self.inside = library.layers.Dense(2, name="inside") if has_adapter else None

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 2))
            if self.inside is not None:
                self.inside.build(shape)

        def call(self, x: Any) -> Any:
            return x @ self.kernel + (0 if self.inside is None else self.inside(x))

    x = library.Input([3], name="x")
    return library.Model(x, Adapted()(x))


@pytest.mark.parametrize("library", KERASES)
def test_an_adapter_inside_a_served_layer_is_refused(library: ModuleType, tmp_path: Path) -> None:
    tf.train.Checkpoint(model=adapted(library, True)).save(str(tmp_path / "train/ckpt"))
    error = refused(tmp_path / "train", lambda: adapted(library, False))
    assert "inside/kernel" in error.cause and "AUC" not in error.cause
    ignored = tuple(error.hint.replace("'", "").split(" --ignore ")[1:])
    assert len(ignored) == 2
    planned(tmp_path / "train", lambda: adapted(library, False), ignored=ignored)
    planned(tmp_path / "train", lambda: adapted(library, True))


@pytest.mark.parametrize("library", KERASES)
def test_what_stands_beside_the_models_of_a_module_is_noted(library: ModuleType, tmp_path: Path) -> None:
    """A builder's module or mapping around models is none that was trained."""

    def tower() -> Any:
        return library.Sequential([library.Input([4], name="x"), library.layers.Dense(3)])

    query, item = tower(), tower()
    scale = tf.Variable(1.0, name="logit_scale")
    tf.train.Checkpoint(query=query, item=item, scale=scale).save(str(tmp_path / "train/ckpt"))
    (note,) = planned(tmp_path / "train", lambda: {"query": tower(), "item": tower()}).mapping.notes
    assert "'logit_scale'" in note


class Towers(tf.Module):
    """A module with variables of its own."""

    def __init__(self, *more: str) -> None:
        super().__init__()
        self.table = tf.Variable(tf.ones([5, 4]), name="table")
        self.head = {"kernel": tf.Variable(tf.ones([4, 2]), name="head_kernel")}
        for name in more:
            setattr(self, name, tf.Variable(tf.ones([5, 4]), name=name))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
    def __call__(self, ids: Any) -> Any:
        return {"score": tf.gather(self.table, ids) @ self.head["kernel"]}


def served() -> Any:
    module = Towers()
    module.signatures = {"serving_default": module.__call__}
    return module


def graph_alone() -> Any:
    """The same model as tensors: a graph without objects."""
    ids = v1.placeholder(tf.int64, [None], name="ids")
    table, kernel = (
        tf.Variable(tf.ones([5, 4]), name="table"),
        tf.Variable(tf.ones([4, 2]), name="head_kernel"),
    )
    return {"ids": ids}, {"score": tf.gather(table, ids) @ kernel}


@pytest.mark.parametrize("builder", [served, graph_alone])
@pytest.mark.parametrize("wrap", ["net", ""])
def test_a_module_is_an_object_too(builder: Callable[[], Any], wrap: str, tmp_path: Path) -> None:
    trained = Towers("adapter", "table_ema", "seed")
    saved = tf.train.Checkpoint(net=trained) if wrap else tf.train.Checkpoint(trained)
    saved.save(str(tmp_path / "train/ckpt"))
    if builder is graph_alone:
        (note,) = planned(tmp_path / "train", builder).mapping.notes
        assert "'adapter'" in note and "'table'" in note and "more" not in note
    else:
        error = refused(tmp_path / "train", builder)
        assert "'adapter'" in error.message and "table_ema" not in error.cause
    assert not planned(tmp_path / "train", builder, ignored=("adapter",)).mapping.notes


def test_averages_are_served_whole_as_well(tmp_path: Path) -> None:
    """The raw variable beside a served average is none that is missing."""
    trained = Towers()
    ema = v1.train.ExponentialMovingAverage(0.9)
    trained.averages = [tf.Variable(tf.zeros([5, 4]), name="table/ExponentialMovingAverage")]
    del ema
    tf.train.Checkpoint(net=trained).save(str(tmp_path / "train/ckpt"))
    via = {s.key: s.via for s in planned(tmp_path / "train", served, average="ema").mapping.sources}
    assert via["table"] == "average"


@pytest.mark.parametrize("library", KERASES)
def test_lora_begun_after_the_base_stops_the_log(library: ModuleType, tmp_path: Path) -> None:
    model = layered(library)
    (tmp_path / "train").mkdir()
    tf.train.Checkpoint(model=model).save(str(tmp_path / "train/a"))
    request = ExportRequest(
        tmp_path / "train", tmp_path / "out", model=lambda: layered(library), updates=Updates()
    )
    export(request)
    if library is keras:
        model.get_layer("hidden").enable_lora(2)
    else:
        add(library, model.get_layer("hidden"), "lora_kernel_a", (8, 2))
    tf.train.Checkpoint(model=model).save(str(tmp_path / "train/b"))
    with pytest.raises(ExportError, match="lora_kernel_a") as caught:
        plan_incremental(request)
    assert "--ignore lora_kernel_a" in caught.value.hint
    plan_incremental(
        ExportRequest(
            tmp_path / "train",
            tmp_path / "out",
            model=lambda: layered(library),
            updates=Updates(),
            ignored=("lora_.*",),
        )
    )


# --- real layers that have more than they serve -------------------------------------------------------------


def normed(library: Any) -> Any:
    x = library.Input([4], name="x")
    inner = library.layers.Dense(3, name="inner")
    return library.Model(x, library.layers.SpectralNormalization(inner, name="spectral")(x))


def test_spectral_norms_that_inference_does_not_read(tmp_path: Path) -> None:
    library = keras
    tf.train.Checkpoint(model=normed(library)).save(str(tmp_path / "train/ckpt"))
    planned(tmp_path / "train", lambda: normed(library))

    def plain() -> Any:
        x = library.Input([4], name="x")
        return library.Model(x, library.layers.Dense(3, name="inner")(x))

    refused(tmp_path / "train", plain)


def test_an_int8_model_is_no_float_model(tmp_path: Path) -> None:
    def build() -> Any:
        x = keras.Input([4], name="x")
        return keras.Model(x, keras.layers.Dense(3, name="hidden")(x))

    def quantized() -> Any:
        model = build()
        model.quantize("int8")
        return model

    tf.train.Checkpoint(model=quantized()).save(str(tmp_path / "train/ckpt"))
    refused(tmp_path / "train", build)


def test_float8_scales_are_part_of_a_layer(tmp_path: Path) -> None:
    def build(mode: str = "") -> Any:
        x = keras.Input([4], name="x")
        model = keras.Model(x, keras.layers.Dense(3, name="hidden")(x))
        if mode:
            model.quantize(mode)
        return model

    tf.train.Checkpoint(model=build("float8")).save(str(tmp_path / "train/ckpt"))
    assert "scale" in refused(tmp_path / "train", build).message


@pytest.mark.parametrize("library", KERASES)
def test_batch_statistics_keep_their_own_error(library: ModuleType, tmp_path: Path) -> None:
    def normal() -> Any:
        x = library.Input([6], name="x")
        return library.Model(x, library.layers.BatchNormalization(name="batch")(x))

    tf.train.Checkpoint(model=normal()).save(str(tmp_path / "train/ckpt"))

    def build() -> Any:
        """The model as in training."""
        model = normal()
        module = tf.Module()
        module.model = model

        @tf.function(input_signature=[tf.TensorSpec([None, 6], name="x")])
        def serve(x: Any) -> Any:
            return {"y": model(x, training=True)}

        module.signatures = {"serving_default": serve}
        return module

    error = refused(tmp_path / "train", build)
    assert type(error).__name__ == "TrainingModeServed"


@pytest.mark.parametrize("library", KERASES)
def test_states_of_a_stateful_layer_stay_behind(library: ModuleType, tmp_path: Path) -> None:
    def build(stateful: bool) -> Any:
        x = library.Input([3, 4], name="x", batch_size=2 if stateful else None)
        return library.Model(x, library.layers.LSTM(3, stateful=stateful, name="lstm")(x))

    tf.train.Checkpoint(model=build(True)).save(str(tmp_path / "train/ckpt"))
    planned(tmp_path / "train", lambda: build(False))


# --- files that know layers ---------------------------------------------------------------------------------


def gated(library: ModuleType, has_gate: bool) -> Any:
    class Gated(library.layers.Layer):  # type: ignore[name-defined,misc]
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 2))
            if has_gate:
                self.prompt = self.add_weight(name="prompt", shape=(5, 2))

        def call(self, x: Any) -> Any:
            return x @ self.kernel

    x = library.Input([3], name="x")
    return library.Model(x, Gated(name="gated")(x))


FILES = [(keras, "m.weights.h5"), (tf_keras, "m.weights.h5"), (tf_keras, "m.h5")]


@pytest.mark.parametrize(("library", "name"), FILES, ids=["keras3", "keras2", "legacy"])
def test_a_weights_file_knows_its_layers(library: ModuleType, name: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / name
    gated(library, True).save_weights(str(file))
    error = refused(file, lambda: gated(library, False))
    assert isinstance(error, ObjectMismatch | NoCertainMatch)
    assert "gated" in f"{error.message} {error.cause}" and "--ignore" in error.hint
    ignored = error.hint.rpartition("--ignore ")[2].split()[0].strip("'")
    planned(file, lambda: gated(library, False), ignored=(ignored,))
    planned(file, lambda: gated(library, True))


# --- names alone --------------------------------------------------------------------------------------------


def written_by_saver(directory: Path, *more: str) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        for name, shape in (("dense/kernel", [3, 2]), ("dense/bias", [2]), *((n, [3, 2]) for n in more)):
            v1.get_variable(name, shape, use_resource=True)
        v1.train.get_or_create_global_step()
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(directory / "model.ckpt"), 5)
    for meta in directory.glob("*.meta"):
        meta.unlink()


def written_as_safetensors(directory: Path, *more: str) -> None:
    from safetensors.numpy import save_file

    shapes = {"dense/kernel": (3, 2), "dense/bias": (2,)} | dict.fromkeys(more, (3, 2))
    directory.mkdir(exist_ok=True)
    save_file({n: np.ones(s, "f") for n, s in shapes.items()}, directory / "model.safetensors")


def written_as_npz(directory: Path, *more: str) -> None:
    shapes = {"dense/kernel": (3, 2), "dense/bias": (2,)} | dict.fromkeys(more, (3, 2))
    directory.mkdir(exist_ok=True)
    np.savez(directory / "model.npz", **{n: np.ones(s, "f") for n, s in shapes.items()})


def named() -> Any:
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    with v1.variable_scope("dense"):
        kernel, bias = v1.get_variable("kernel", [3, 2]), v1.get_variable("bias", [2])
    return {"x": x}, {"y": x @ kernel + bias}


WRITERS = [written_by_saver, written_as_safetensors, written_as_npz]


@pytest.mark.parametrize("write", WRITERS)
def test_names_in_the_scope_of_a_served_variable_are_noted(
    write: Callable[..., None], tmp_path: Path
) -> None:
    write(tmp_path / "train", "dense/lora_a", "dense/kernel/Adam", "other/kernel", "dense/kernel_ema")
    (note,) = planned(tmp_path / "train", named).mapping.notes
    assert "'dense/lora_a'" in note and "'dense/kernel'" in note and "more like it" not in note
    assert not planned(tmp_path / "train", named, ignored=("dense/lora_a",)).mapping.notes


@pytest.mark.parametrize("write", WRITERS)
def test_other_scopes_are_not_noted(write: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path / "train", "head/kernel", "dense/kernel/Adam_1")
    assert not planned(tmp_path / "train", named).mapping.notes


def test_a_name_that_is_nowhere_cannot_be_ignored(tmp_path: Path) -> None:
    written_by_saver(tmp_path / "train", "dense/lora_a")
    with pytest.raises(UsageError, match="no such variable"):
        planned(tmp_path / "train", named, ignored=("lora_b",))
    with pytest.raises(UsageError, match="not a regular expression"):
        planned(tmp_path / "train", named, ignored=("lora_(",))

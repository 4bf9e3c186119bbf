"""What a user reads of a mistake in a builder: the error itself, its line in the own file, and a way out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from exporter.errors import BuilderError, CodeRefused, UsageError
from exporter.graph.load import GraphRequest, load_graph

HEAD = """
    import tensorflow as tf
    {imports}
    v1 = tf.compat.v1
"""

KERAS = """
    class Looks(keras.layers.Layer):
        def call(self, x):
            return {"a": x}["b"]  # look

    class Holds(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Looks()

        def call(self, x):
            return self.inner(x)

    class Builds(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], self.units))  # build

        def call(self, x):
            return x @ self.w

    class Scores(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x, training=None):
            if training is False:
                return checked(self.dense(x))
            return self.dense(x)

    def checked(x):
        if x.shape[-1] != 3:
            raise ValueError("three columns\\n are needed")  # check
        return x

    def applied(layer):
        inputs = keras.Input([3], name="x")
        return keras.Model(inputs, layer(inputs))

    def key_in_layer(): return applied(Looks())
    def key_in_inner_layer(): return applied(Holds())
    def attribute_in_build(): return applied(Builds())
    def mismatch():
        return keras.layers.Add()([keras.Input([3]), keras.Input([4])])  # add
    def only_when_served():
        model = Scores()
        model(keras.Input([3]))
        return model
    def undefined_name():
        return applied(layers.Dense(2))  # name
    def bare_assertion():
        assert 1 == 2  # bare
    def weights_in_a_graph():
        keras.layers.StringLookup().adapt(["a"])  # adapt
"""

MODULE = """
    class Base(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(tf.ones([4, 2]))
            self.signatures = {"serving_default": self.serve}

    spec = [tf.TensorSpec([None, 3], tf.float32, "x")]

    def scores(x, w):
        return tf.matmul(x, w)  # matmul

    class Multiplies(Base):
        @tf.function(input_signature=spec)
        def serve(self, x):
            return {"y": scores(x, self.w)}

    @tf.function
    def branches(x):
        if tf.reduce_sum(x) > 0:  # if
            z = x
        return z

    class Branches(Base):
        @tf.function(input_signature=spec)
        def serve(self, x):
            return {"y": branches(x)}

    class Asserts(Base):
        @tf.function(input_signature=spec)
        def serve(self, x):
            assert x.shape[0] == 3, "three rows"  # assert
            return {"y": x}

    class Reads(Base):
        @tf.function(input_signature=spec)
        def serve(self, x):
            return {"y": x.numpy()}  # numpy

    class Wraps(Base):
        @tf.function(input_signature=spec)
        def serve(self, x):
            try:
                return {"y": {"a": x}["b"]}
            except KeyError as error:
                raise RuntimeError(f"no feature {error}") from error  # wrap

    class Plain(Base):
        @tf.function
        def serve(self, x):
            return {"y": x}

    def multiplies(): return Multiplies()
    def nested_functions(): return Branches()
    def assertion(): return Asserts()
    def numpy_in_a_function(): return Reads()
    def own_error_of_an_error(): return Wraps()
    def without_a_signature(): return Plain()
    def own_refusal():
        from exporter.tables import DynamicTable
        @tf.function
        def lookup(x):
            return DynamicTable("t", 4, default=[1.0, 2.0]).lookup(x)
        return lookup(v1.placeholder(tf.int64, [None]))
"""

V1 = """
    def shape():
        x = v1.placeholder(tf.float32, [None, 3], "x")
        return {"x": x}, {"y": tf.matmul(x, v1.get_variable("w", [4, 2]))}  # matmul
    def reshape():
        @tf.function
        def fn(x):
            return tf.reshape(x, [2, 2])  # reshape
        x = v1.placeholder(tf.float32, [3], "x")
        return {"x": x}, {"y": fn(x)}
    def iterates():
        return {}, {"y": sum(v1.placeholder(tf.float32, [None, 3]))}  # sum
    def runs():
        with v1.Session() as session:
            return session.run(v1.get_variable("v", [3], use_resource=False))  # run
    def keras_2_alone():
        return v1.layers.dense(v1.placeholder(tf.float32, [None, 3]), 2)  # dense
    def gone_for_good():
        return tf.contrib.layers.dense  # contrib
    def annotated(x: "tf.NoSuchType" = 1):
        return tf.estimator  # estimator
"""

TF_KERAS = """
    def operation():
        inputs = tf.keras.Input([3])
        return tf.keras.Model(inputs, tf.reduce_sum(inputs, -1))  # sum
    class Weighs(tf.keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight("w", shape=[shape[-1], 2])  # weight
        def call(self, x):
            return x @ self.w
    def positional_name():
        return Weighs()(tf.keras.Input([3]))
    def gone_layer(): return tf.keras.layers.DenseFeatures([])  # gone
    def no_layer(): return tf.keras.layers.NoSuchLayer()  # none
    def other_layer():
        import tf_keras
        return tf_keras.layers.Dense(2)(tf.keras.Input([3]))  # other
"""

GRAPH = "a builder runs in a graph"
KERAS_2 = "TF_USE_LEGACY_KERAS=1"
ALONE = "run the builder alone"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for the users' files: AutoGraph takes equal functions of two files for the same."""
    return tmp_path_factory.mktemp("users")


def written(place: Path, name: str, text: str, imports: str = "") -> Path:
    path = place / f"{name}_of_a_user.py"
    path.write_text(textwrap.dedent(HEAD.format(imports=imports)) + textwrap.dedent(text))
    return path


def refused(path: Path, function: str) -> BuilderError:
    with pytest.raises(BuilderError) as caught:
        load_graph(GraphRequest(model=f"{path}:{function}"))
    return caught.value


SYMBOLS = """
    def scored():
        ids = keras.Input([3], dtype="int64", name="ids")
        rows = keras.layers.Embedding(9, 2, name="table")(ids)
        return keras.Model(ids, keras.layers.Dense(1, name="scores")(keras.layers.Flatten()(rows)))

    def in_dicts():
        model = scored()
        return {"ids": model.input}, {"scores": model.output}
    def in_lists():
        model = scored()
        return model.inputs, model.outputs
    def alone():
        return scored().output
    def of_a_signature():
        return {"user": in_dicts()}
    def beside_a_tensor():
        import tensorflow as tf
        ids = tf.compat.v1.placeholder(tf.int64, [None, 3])
        return {"ids": ids}, {"scores": scored().outputs[0]}
    def in_an_operation():
        import tensorflow as tf
        return tf.nn.sigmoid(scored().output)  # operation
    def itself():
        return scored()
"""


def line_of(path: Path, mark: str) -> int:
    lines = path.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return number


def assert_named(path: Path, function: str, cause: str, mark: str, hint: str) -> None:
    """The error has the user's line, in one line of its own, and what to do."""
    error = refused(path, function)
    assert error.cause.startswith(cause)
    assert f"({path}:{line_of(path, mark)} in " in error.cause
    assert hint in error.hint
    assert "\n" not in error.cause
    assert "\x1b" not in error.cause


@pytest.mark.parametrize("keras", ["import keras", "import tf_keras as keras"], ids=["keras3", "tf-keras"])
@pytest.mark.parametrize(
    ("function", "cause", "mark", "hint"),
    [
        ("key_in_layer", "KeyError: 'b'", "look", ALONE),
        ("key_in_inner_layer", "KeyError: 'b'", "look", ALONE),
        ("attribute_in_build", "AttributeError: 'Builds' object has no attribute 'units'", "build", ALONE),
        ("mismatch", "ValueError: Inputs have incompatible shapes.", "add", ALONE),
        ("only_when_served", "ValueError: three columns are needed", "check", ALONE),
        ("undefined_name", "NameError: name 'layers' is not defined", "name", ALONE),
        ("bare_assertion", "AssertionError: assert 1 == 2", "bare", ALONE),
        ("weights_in_a_graph", "", "adapt", GRAPH),
    ],
)
def test_mistakes_in_keras(place: Path, keras: str, function: str, cause: str, mark: str, hint: str) -> None:
    path = written(place, keras.rpartition(" ")[0].replace(" ", "_"), KERAS, keras)
    assert_named(path, function, cause, mark, hint)


@pytest.mark.parametrize("function", ["in_dicts", "in_lists", "alone", "of_a_signature", "beside_a_tensor"])
def test_symbols_of_keras_are_named_and_the_model_is_asked_for(place: Path, function: str) -> None:
    path = written(place, "symbols", SYMBOLS, "import keras")
    error = refused(path, function)
    assert "a KerasTensor, a symbol of a Keras model" in error.message
    assert "expected the Keras model itself" in error.cause
    assert "return keras.Model(inputs, outputs)" in error.hint
    assert len(load_graph(GraphRequest(model=f"{path}:itself")).variables) == 3


def test_an_operation_on_a_symbol_of_keras_is_told_the_way(place: Path) -> None:
    path = written(place, "symbols", SYMBOLS, "import keras")
    assert_named(path, "in_an_operation", "ValueError: A KerasTensor cannot", "operation", "keras.ops")


@pytest.mark.parametrize(
    ("function", "cause", "mark", "hint"),
    [
        ("multiplies", "ValueError: Dimensions must be equal, but are 3 and 4", "matmul", ALONE),
        ("nested_functions", "ValueError: 'z' must also be initialized in the else branch", "if", ALONE),
        ("assertion", "AssertionError: three rows", "assert", ALONE),
        ("numpy_in_a_function", "AttributeError: ", "numpy", GRAPH),
        ("own_error_of_an_error", "RuntimeError: no feature 'b'", "wrap", ALONE),
    ],
)
def test_mistakes_in_modules(place: Path, function: str, cause: str, mark: str, hint: str) -> None:
    path = written(place, "module", MODULE)
    assert_named(path, function, cause, mark, hint)


def test_a_function_without_a_signature_is_told_how_to_get_one(place: Path) -> None:
    assert "input_signature=" in refused(written(place, "module", MODULE), "without_a_signature").hint


def test_a_refusal_of_this_program_is_not_wrapped(place: Path) -> None:
    path = written(place, "module", MODULE)
    with pytest.raises(UsageError, match="default of shape"):
        load_graph(GraphRequest(model=f"{path}:own_refusal"))


@pytest.mark.parametrize(
    ("function", "cause", "mark", "hint"),
    [
        ("shape", "ValueError: Dimensions must be equal, but are 3 and 4", "matmul", ALONE),
        ("reshape", "ValueError: Cannot reshape a tensor with 3 elements", "reshape", ALONE),
        ("iterates", "OperatorNotAllowedInGraphError: Iterating over a symbolic", "sum", GRAPH),
        ("runs", "FailedPreconditionError: Attempting to use uninitialized value v", "run", GRAPH),
        ("keras_2_alone", "AttributeError: `dense` is not available", "dense", KERAS_2),
        ("gone_for_good", "AttributeError: module 'tensorflow' has no attribute 'contrib'", "contrib", ALONE),
        ("annotated", "AttributeError: module 'tensorflow' has no attribute", "estimator", ALONE),
    ],
)
def test_mistakes_in_graphs(place: Path, function: str, cause: str, mark: str, hint: str) -> None:
    path = written(place, "v1", V1)
    assert_named(path, function, cause, mark, hint)


@pytest.mark.parametrize(
    ("function", "mark", "helps"),
    [
        ("operation", "sum", True),
        ("positional_name", "weight", True),
        ("gone_layer", "gone", True),
        ("no_layer", "none", False),
        ("other_layer", "other", True),
    ],
)
def test_keras_2_is_named_where_it_helps(
    place: Path, monkeypatch: pytest.MonkeyPatch, function: str, mark: str, helps: bool
) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    path = written(place, "tf_keras", TF_KERAS)
    error = refused(path, function)
    assert f"({path}:{line_of(path, mark)} in " in error.cause
    assert (KERAS_2 in error.hint) == helps
    itself = TF_KERAS.replace("tf.keras.", "keras.")  # which the variable does not change
    assert KERAS_2 not in refused(written(place, "itself", itself, "import keras"), function).hint
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert KERAS_2 not in refused(path, function).hint


SIZES = """
    def model(lookup, dtype):
        words = keras.Input([], dtype=dtype, name="words")
        size = lookup.vocabulary_size()
        assert len(lookup.get_vocabulary()) == size
        return keras.Model(words, keras.layers.Embedding(size, 4)(lookup(words)))
    def listed(): return model(keras.layers.StringLookup(vocabulary=["a", "b"]), "string")
    def in_a_file(path): return model(keras.layers.StringLookup(vocabulary=path), "string")
    def integers(): return model(keras.layers.IntegerLookup(vocabulary=[3, 4], num_oov_indices=2), "int64")
    def texts():
        return model(keras.layers.TextVectorization(vocabulary=["a"], output_sequence_length=2), "string")
    def one_hot():
        words = keras.Input([], dtype="string", name="words")
        lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
        return keras.Model(words, keras.layers.Dense(4)(lookup(words)))
    def table():
        words = v1.placeholder(tf.string, [None], "words")
        filled = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([0, 1], tf.int64))
        found = tf.lookup.StaticVocabularyTable(filled, 3)
        rows = v1.get_variable("rows", [found.size(), 4])
        return {"words": words}, {"rows": tf.gather(rows, found.lookup(words))}
"""


@pytest.mark.parametrize("keras", ["import keras", "import tf_keras as keras"], ids=["keras3", "tf-keras"])
@pytest.mark.parametrize(
    ("function", "rows"),
    [("listed", 3), ("in_a_file", 4), ("integers", 4), ("texts", 3), ("one_hot", 3), ("table", 5)],
)
def test_the_size_of_a_vocabulary_is_a_number(place: Path, keras: str, function: str, rows: int) -> None:
    path = written(place, f"sizes_{len(keras)}", SIZES, keras)
    (place / "words.txt").write_text("a\nb\nc\n")
    arguments = {"path": str(place / "words.txt")} if function == "in_a_file" else {}
    graph = load_graph(GraphRequest(model=f"{path}:{function}", model_args=arguments))
    assert (rows, 4) in [variable.shape for variable in graph.variables]


LAYERS = """
    class Scale(keras.layers.Layer):
        def __init__(self, by=2.0, **options):
            super().__init__(**options)
            self.by = by
        def call(self, x):
            return x * self.by
        def get_config(self):
            return {**super().get_config(), "by": self.by}
    class Fails(Scale):
        @classmethod
        def from_config(cls, config):
            return cls(by=config["factor"])  # factor
    def double(x):
        return 2 * x
    def save(kind, path):
        inputs = keras.Input([3], name="x")
        scaled = {"layer": Scale, "fails": Fails}.get(kind, keras.layers.Flatten)(name="scale")(inputs)
        activation = double if kind == "function" else None
        keras.Model(inputs, keras.layers.Dense(2, activation)(scaled)).save(path)
"""


@pytest.mark.parametrize("suffix", [".h5", ".keras"])
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
@pytest.mark.parametrize(("kind", "name"), [("layer", "Scale"), ("function", "double")])
def test_what_is_foreign_in_an_archive_is_named(
    tmp_path: Path, keras: str, suffix: str, kind: str, name: str
) -> None:
    defines = saved(tmp_path, keras, kind, f"model{suffix}")
    path = str(tmp_path / f"model{suffix}")
    with pytest.raises(CodeRefused, match=rf"asks for (.+\.)?{name} at /config/layers/[12]") as caught:
        load_graph(GraphRequest(model=path))
    assert "--custom-objects" in caught.value.hint
    load_graph(GraphRequest(model=path, custom_objects=(str(defines),)))


def saved(tmp_path: Path, keras: str, kind: str, name: str) -> Path:
    """Save a model with layers of its own; the file that defines them."""
    defines = written(tmp_path, f"layers_{keras}", LAYERS, f"import {keras} as keras")
    scope: dict[str, object] = {"__name__": "training"}
    exec(compile(defines.read_text(), defines, "exec"), scope)
    scope["save"](kind, tmp_path / name)  # type: ignore[operator]
    return defines


def test_a_class_that_fails_to_be_made_names_its_line(tmp_path: Path) -> None:
    defines = saved(tmp_path, "keras", "fails", "model.keras")
    with pytest.raises(BuilderError, match="cannot make the model") as caught:
        load_graph(GraphRequest(model=str(tmp_path / "model.keras"), custom_objects=(str(defines),)))
    assert caught.value.cause == f"KeyError: 'factor' ({defines}:{line_of(defines, 'factor')} in from_config)"


def test_classes_of_the_other_keras_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    saved(tmp_path, "tf_keras", "layer", "two.h5")
    saved(tmp_path, "keras", "layer", "three.h5")
    two, three = (str(tmp_path / name) for name in ("two.h5", "three.h5"))
    by_tensorflow = written(tmp_path, "by_tensorflow", LAYERS, "keras = tf.keras")
    with pytest.raises(BuilderError, match=r"saved by Keras 2\..* Scale is a class of Keras 3\.") as caught:
        load_graph(GraphRequest(model=two, custom_objects=(str(by_tensorflow),)))
    assert KERAS_2 in caught.value.hint
    by_keras = written(tmp_path, "by_keras", LAYERS, "import keras")
    with pytest.raises(BuilderError, match=r"saved by Keras 2\.") as caught:
        load_graph(GraphRequest(model=two, custom_objects=(str(by_keras),)))
    assert "derive it from a class of tf_keras" in caught.value.hint
    by_tf_keras = written(tmp_path, "by_tf_keras", LAYERS, "import tf_keras as keras")
    with pytest.raises(BuilderError, match=r"saved by Keras 3\..* Scale is a class of Keras 2\."):
        load_graph(GraphRequest(model=three, custom_objects=(str(by_tf_keras),)))


@pytest.mark.parametrize("name", ["serving", "exporter", "json"])
def test_a_builder_does_not_take_the_place_of_another_module(tmp_path: Path, name: str) -> None:
    """In a process of its own: what is imported there later is ours, or the program's."""
    (tmp_path / f"{name}.py").write_text("def build():\n    return 7\n")
    code = f"""
        import json, sys
        from exporter.graph.builder import resolve
        from exporter.graph.sources import importable
        with importable():
            function, _ = resolve({f"{tmp_path / name}.py:build"!r})
        import serving.cli
        print(function(), sys.modules[function.__module__].build is function, json.dumps([1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("7 True [1]\n", 0), done.stderr

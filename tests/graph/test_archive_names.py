"""The lists of what an archive may name, compared with the libraries that are installed."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.util import tf_export

from exporter.graph.archived_code import (
    CLASSES,
    FUNCTIONS,
    GRAPH_FUNCTIONS,
    RAGGED_MAKERS,
    TENSOR_MEMBERS,
)

REFUSED = {
    "Lambda",  # byte code
    "TFSMLayer",  # a SavedModel
    "TorchModuleWrapper",  # a pickle
    "JaxLayer",
    "FlaxLayer",
    "Layer",  # what others derive from
    "Wrapper",
    "AbstractRNNCell",
    "PreprocessingLayer",
    "DynamicEmbedding",  # training on several machines
    "DynamicLookup",
}
TAKES_MORE = re.compile(
    r"\w*(file|path|url|dirname|stream|callable|lambda)s?\w*|(\w+_)?(fn|func|function|body|cond|op|initializer)"
)
HARMLESS = {
    "window_fn",  # JSON has no functions
    "top_paths",  # a number
    "paths",
}


def test_functions_take_tensors_and_constants() -> None:
    """None of their parameters is a file or something to call."""
    for name in sorted(GRAPH_FUNCTIONS):
        found = tf_export.get_symbol_from_name(name)
        assert callable(found), name
        assert not inspect.isclass(found), name
        parameters = {*inspect.signature(found).parameters}
        assert not {each for each in parameters if TAKES_MORE.fullmatch(each)} - HARMLESS, name


def test_no_function_is_of_a_room_that_touches_the_process() -> None:
    rooms = {name.rpartition(".")[0].removeprefix("compat.v1").strip(".") for name in GRAPH_FUNCTIONS}
    forbidden = {"config", "data", "raw_ops", "saved_model", "summary", "train", "io.gfile", "lite", "tpu"}
    assert not rooms & forbidden
    io = {name for name in GRAPH_FUNCTIONS if name.startswith("io.")}
    assert all(re.search(r"\.(decode|encode|extract|is|parse|serialize)_", name) for name in io)


def exported(name: str) -> Iterator[tuple[str, Any]]:
    """Classes in the public modules of layers, initialisers and the like."""
    for room in ("layers", "initializers", "regularizers", "constraints", "models"):
        module = sys.modules[f"{name}.{room}"] if name == "keras" else getattr(tf_keras, room)
        yield from ((key, value) for key, value in vars(module).items() if inspect.isclass(value))


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_every_class_that_keras_exports_was_looked_at(name: str) -> None:
    bases = {"Initializer", "Regularizer", "Constraint"}
    unknown = {key for key, _ in exported(name)} - CLASSES - REFUSED - bases
    assert unknown <= {"InputSpec", "Input", "experimental"}
    assert not CLASSES & REFUSED


MAKE_TENSORS = re.compile(
    r"(keras|tf_keras)\.(src\.|_tf_keras\.|api\.)*(legacy\.)?(ops|random|backend|keras)\b.*"
)


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["Keras 3", "Keras 2"])
def test_a_listed_name_means_one_thing_in_all_of_keras(library: Any) -> None:
    """Keras may look a name up in any of its modules: all it finds are classes, and functions of tensors."""
    odd = set()
    for path, module in [*sys.modules.items()]:
        if path.partition(".")[0] != library.__name__:
            continue
        for name in CLASSES & vars(module).keys():
            value = vars(module)[name]
            is_class = inspect.isclass(value) and (hasattr(value, "from_config") or name == "InputSpec")
            if callable(value) and not is_class and not MAKE_TENSORS.fullmatch(path):
                odd.add(f"{path}.{name}")
    assert not {each for each in odd if each.rpartition(".")[2] not in {"l1_l2", "orthogonal_regularizer"}}


def test_activations_are_listed() -> None:
    for library in (keras, tf_keras):
        found = {name for name, value in vars(library.activations).items() if inspect.isfunction(value)}
        assert found - FUNCTIONS <= {"get", "serialize", "deserialize"}


def test_what_is_listed_of_tensors_is_there() -> None:
    assert all(hasattr(tf.RaggedTensor, name) for name in RAGGED_MAKERS)
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    assert all(any(hasattr(kind, name) for kind in kinds) for name in TENSOR_MEMBERS)

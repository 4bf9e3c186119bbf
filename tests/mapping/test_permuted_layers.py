"""Layers of one shape, written to real files of every family and served in any order: never a wrong value.

Each value tells whose it is. Whatever the order, and with layers more or less, a variable gets the value of
its own name, or the export is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH, BundleWriter, read_array
from exporter.errors import MappingError, NoCertainMatch
from exporter.graph.inference_graph import InferenceGraph
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import MappingRules
from exporter.wire.dtypes import DType
from tests.support.archives import keras_archive, legacy_file, weights_file
from tests.support.budget import times
from tests.support.bundles import write
from tests.support.object_graphs import Var, graph_of, message_of
from tests.support.values import graph, variable

NAMES = ["first", "second", "third", "fourth", "fifth"]
SHAPES = {"kernel": (4, 4), "bias": (4,)}

Values = dict[str, dict[str, Any]]


def values_of(layers: list[str]) -> Values:
    """By layer and leaf: arrays that hold the layer's number."""
    return {
        layer: {
            leaf: np.full(shape, NAMES.index(layer) + 0.5 * (leaf == "bias"), np.float32)
            for leaf, shape in SHAPES.items()
        }
        for layer in layers
    }


def flat(values: Values, separator: str = "/", suffix: str = "") -> dict[str, Any]:
    return {
        f"{layer}{separator}{leaf}{suffix}": value
        for layer, own in values.items()
        for leaf, value in own.items()
    }


# --- files --------------------------------------------------------------------------------------------------


def named_bundle(values: Values, directory: Path) -> Path:
    return write(directory / "model.ckpt-1", **flat(values))


def object_bundle(values: Values, directory: Path) -> Path:
    """A model whose layers are in a list, as most are."""
    objects, variables = graph_of(tree(list(values)), is_trained=True)
    with BundleWriter(directory / "ckpt-1") as writer:
        for found in variables:
            layer, leaf = found.name.split("/")
            writer.add(found.tensor, values[layer][leaf])
        text = np.array([message_of(objects).SerializeToString()], object).reshape(())
        writer.add(OBJECT_GRAPH, text)
    return directory / "ckpt-1"


def keras_weights(values: Values, directory: Path) -> Path:
    return weights_file(directory / "m.weights.h5", stored(values))  # type: ignore[no-any-return]


def keras_whole(values: Values, directory: Path) -> Path:
    weights = keras_weights(values, directory).read_bytes()
    return keras_archive(directory / "m.keras", weights=weights)


def stored(values: Values) -> dict[str, tuple[str, list[Any]]]:
    return {
        f"layers/dense{f'_{number}' if number else ''}": (layer, list(own.values()))
        for number, (layer, own) in enumerate(values.items())
    }


def keras_legacy(values: Values, directory: Path) -> Path:
    layers = {layer: flat({layer: own}, suffix=":0") for layer, own in values.items()}
    return legacy_file(directory / "m.h5", layers, keras_version="2.15.0")


def numpy_dict(values: Values, directory: Path) -> Path:
    np.savez(directory / "m.npz", **flat(values, suffix=":0"))
    return directory / "m.npz"


def numpy_list(values: Values, directory: Path) -> Path:
    np.savez(directory / "m.npz", *flat(values).values())
    return directory / "m.npz"


def v1_checkpoint(values: Values, directory: Path) -> Path:
    import tensorflow as tf

    named = flat(values)
    path = directory / "model.ckpt-1"
    tf.raw_ops.Save(filename=str(path), tensor_names=list(named), data=list(named.values()))
    return path


# --- graphs -------------------------------------------------------------------------------------------------


def tree(layers: list[str]) -> Mapping[str, Any]:
    return {
        "layers": [
            {leaf: Var(f"{layer}/{leaf}", shape) for leaf, shape in SHAPES.items()} for layer in layers
        ]
    }


def by_names(layers: list[str]) -> InferenceGraph:
    return graph(*(variable(f"{layer}/{leaf}", *SHAPES[leaf]) for layer in layers for leaf in SHAPES))


def with_objects(layers: list[str]) -> InferenceGraph:
    objects, _ = graph_of(tree(layers), is_trained=False)
    return replace(by_names(layers), objects=objects)


def with_places(layers: list[str]) -> InferenceGraph:
    """A Keras model in hand: where Keras itself would look, and by which layer's name."""
    places = {}
    for group, (layer, own) in stored(values_of(layers)).items():
        for number, (leaf, value) in enumerate(zip(SHAPES, own, strict=True)):
            ref = TensorRef(f"{group}/vars/{number}", DType.FLOAT, value.shape, owner=layer)
            places[f"{layer}/{leaf}"] = (ref,)
    return replace(by_names(layers), layers=places)


PAIRS: dict[str, tuple[Callable[[Values, Path], Path], Callable[[list[str]], InferenceGraph]]] = {
    "name-based bundle": (named_bundle, by_names),
    "name-based bundle, objects": (named_bundle, with_objects),
    "object-based bundle": (object_bundle, with_objects),
    "object-based bundle, names": (object_bundle, by_names),
    "Keras weights": (keras_weights, with_places),
    "Keras weights, names": (keras_weights, by_names),
    "Keras archive": (keras_whole, with_places),
    "legacy h5": (keras_legacy, with_places),
    "legacy h5, names": (keras_legacy, by_names),
    "npz": (numpy_dict, by_names),
    "npz, a Keras model": (numpy_dict, with_places),
    "V1": (v1_checkpoint, by_names),
}


def read(catalog: Catalog, ref: TensorRef) -> np.ndarray[Any, Any]:
    if ref.content is None:
        return read_array(catalog, ref)
    return np.concatenate(list(ref.content.blocks())).reshape(ref.shape)


@pytest.mark.landing
@pytest.mark.parametrize(("save", "build"), PAIRS.values(), ids=PAIRS.keys())
@given(
    trained=st.permutations(NAMES), built=st.permutations(NAMES), counts=st.tuples(*[st.integers(1, 5)] * 2)
)
@settings(max_examples=times(40))
def test_no_variable_gets_another_s_value(
    tmp_path_factory: pytest.TempPathFactory,
    save: Callable[[Values, Path], Path],
    build: Callable[[list[str]], InferenceGraph],
    trained: list[str],
    built: list[str],
    counts: tuple[int, int],
) -> None:
    trained, built = trained[: counts[0]], built[: counts[1]]
    values = values_of(trained)
    catalog = open_checkpoint(save(values, tmp_path_factory.mktemp("trained")))
    try:
        mapping = build_mapping(build(built), catalog, MappingRules())
    except MappingError:
        assert trained != built
        return
    assert set(built) <= set(trained)
    for source in mapping.sources:
        layer, leaf = source.key.split("/")
        np.testing.assert_array_equal(read(catalog, source.tensor), values[layer][leaf], err_msg=source.key)


@given(
    trained=st.permutations(NAMES), built=st.permutations(NAMES), counts=st.tuples(*[st.integers(2, 5)] * 2)
)
@settings(max_examples=times(20))
def test_a_list_that_only_its_order_tells_apart_is_refused(
    tmp_path_factory: pytest.TempPathFactory, trained: list[str], built: list[str], counts: tuple[int, int]
) -> None:
    values = values_of(trained[: counts[0]])
    catalog = open_checkpoint(numpy_list(values, tmp_path_factory.mktemp("trained")))
    with pytest.raises(NoCertainMatch):
        build_mapping(by_names(built[: counts[1]]), catalog, MappingRules())

"""Values without names: never given to a variable that something else speaks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.catalog import Catalog, Naming, TensorRef
from exporter.errors import MappingError, NoCertainMatch
from exporter.graph.inference_graph import InferenceGraph
from exporter.mapping.build import build_mapping
from exporter.mapping.by_layer import match_unnamed
from exporter.mapping.mapping_rules import MappingRules
from exporter.wire.dtypes import DType
from tests.support.values import graph, tensor, variable

NAMES = ["first", "second", "third", "fourth", "fifth"]


def stored(owners: list[str], shape: tuple[int, ...] = (4, 4), naming: Naming = Naming.LAYERS) -> Catalog:
    """Dense layers of these names as Keras stores them, kernel and bias each."""
    tensors = {}
    for number, owner in enumerate(owners):
        group = f"layers/dense{f'_{number}' if number else ''}/vars"
        for leaf, size in (("0", shape), ("1", shape[1:])):
            tensors[f"{group}/{leaf}"] = replace(tensor(f"{group}/{leaf}", *size), owner=owner)
    return Catalog(
        "Keras weights", Path("m.weights.h5"), tensors, (Path("m.weights.h5"),), (0,), naming=naming
    )


def served(owners: list[str], *, knows_places: bool) -> InferenceGraph:
    """The same layers in a graph: of a Keras model in hand, or with nothing but names."""
    variables = [
        variable(f"{o}/{leaf}", *size) for o in owners for leaf, size in (("kernel", (4, 4)), ("bias", (4,)))
    ]
    if not knows_places:
        return graph(*variables)
    refs = stored(owners).tensors.values()
    leaves = {"0": "kernel", "1": "bias"}
    places = {f"{ref.owner}/{leaves[ref.name.rpartition('/')[2]]}": (ref,) for ref in refs}
    return replace(graph(*variables), layers=places)


def owner_of(catalog: Catalog, name: str) -> str:
    return catalog.tensors[name].owner


@given(data=st.data(), count=st.integers(1, 5), knows_places=st.booleans())
def test_layers_of_one_shape_are_never_swapped(data: st.DataObject, count: int, knows_places: bool) -> None:
    """Whatever the order on both sides, and with layers more or less: right, or refused."""
    trained = data.draw(st.permutations(NAMES[:count]))
    built = data.draw(st.permutations(NAMES[: data.draw(st.integers(1, 5))]))
    catalog = stored(trained)
    try:
        mapping = build_mapping(served(built, knows_places=knows_places), catalog, MappingRules())
    except MappingError:
        assert trained != built
        return
    for source in mapping.sources:
        assert owner_of(catalog, source.tensor.name) == source.key.rpartition("/")[0]
        assert source.via == "layer"


AUTOMATIC = ["dense", *(f"dense_{number}" for number in range(1, 8))]


@given(
    first=st.integers(0, 3), count=st.integers(1, 3), built_first=st.integers(0, 3), built=st.integers(1, 3)
)
def test_layers_that_keras_named_keep_their_order(
    first: int, count: int, built_first: int, built: int
) -> None:
    """Numbers count what a process made before; with a layer more or less nothing is certain."""
    catalog = stored(AUTOMATIC[first : first + count])
    names = AUTOMATIC[built_first : built_first + built]
    try:
        found = match_unnamed(served(names, knows_places=True), catalog)
    except NoCertainMatch:
        assert count != built
        return
    assert count == built
    groups = [found[f"{name}/kernel"] for name in names]
    assert groups == [name for name in catalog.tensors if name.endswith("/0")]


@given(
    first=st.integers(0, 3), count=st.integers(1, 4), built_first=st.integers(0, 3), built=st.integers(1, 4)
)
def test_numbers_without_objects_are_never_mistaken(
    first: int, count: int, built_first: int, built: int
) -> None:
    catalog = stored(AUTOMATIC[first : first + count])
    names = AUTOMATIC[built_first : built_first + built]
    try:
        mapping = build_mapping(served(names, knows_places=False), catalog, MappingRules())
    except MappingError:
        return
    assert (first, count) == (built_first, built)
    for source in mapping.sources:
        assert owner_of(catalog, source.tensor.name) == source.key.rpartition("/")[0]


@given(
    first=st.integers(0, 3), count=st.integers(1, 4), built_first=st.integers(0, 3), built=st.integers(1, 4)
)
def test_legacy_names_are_counted_on(first: int, count: int, built_first: int, built: int) -> None:
    """`dense_3` and `dense_4` are `dense` and `dense_1` of another process: as many, in order."""
    names = AUTOMATIC[first : first + count]
    refs = {f"{name}/kernel": replace(tensor(f"{name}/kernel", 4, 4), owner=name) for name in names}
    catalog = Catalog("Keras legacy h5", Path("m.h5"), refs, (Path("m.h5"),), (0,))
    ours = [f"{name}/kernel" for name in AUTOMATIC[built_first : built_first + built]]
    try:
        mapping = build_mapping(graph(*(variable(key, 4, 4) for key in ours)), catalog, MappingRules())
    except MappingError:
        assert count != built
        return
    assert count == built
    assert [source.tensor.name for source in mapping.sources] == list(refs)


def normalised(owner: str, shape: int = 4) -> dict[str, TensorRef]:
    names = [f"layers/batch_normalization/vars/{number}" for number in range(4)]
    return {name: replace(tensor(name, shape), owner=owner) for name in names}


def of(tensors: dict[str, TensorRef], naming: Naming = Naming.LAYERS) -> Catalog:
    return Catalog("Keras weights", Path("m.weights.h5"), tensors, (), (), naming=naming)


def test_values_of_one_shape_in_one_layer_follow_keras_order() -> None:
    leaves = ("beta", "moving_variance", "gamma", "moving_mean")  # not the order in which they are stored
    found = match_unnamed(graph(*(variable(f"norm/{leaf}", 4) for leaf in leaves)), of(normalised("norm")))
    assert found == {
        "norm/gamma": "layers/batch_normalization/vars/0",
        "norm/beta": "layers/batch_normalization/vars/1",
        "norm/moving_mean": "layers/batch_normalization/vars/2",
        "norm/moving_variance": "layers/batch_normalization/vars/3",
    }


def test_values_of_one_shape_in_an_unknown_layer() -> None:
    names = ["layers/mine/vars/0", "layers/mine/vars/1"]
    catalog = of({name: replace(tensor(name, 4), owner="mine") for name in names})
    with pytest.raises(NoCertainMatch, match="nothing says which is which"):
        match_unnamed(graph(variable("mine/a", 4), variable("mine/b", 4)), catalog)


def test_a_layer_with_other_values() -> None:
    with pytest.raises(NoCertainMatch, match="other values"):
        match_unnamed(graph(variable("norm/gamma", 5)), of(normalised("norm")))


def test_a_name_that_two_layers_have() -> None:
    first, second = normalised("left/norm"), normalised("right/norm")
    moved = {name.replace("layers/", "layers/other/"): ref for name, ref in second.items()}
    both = {**first, **{name: replace(ref, name=name) for name, ref in moved.items()}}
    with pytest.raises(NoCertainMatch, match="several layers"):
        match_unnamed(graph(variable("norm/gamma", 4)), of(both))


def arrays(*shapes: tuple[int, ...]) -> Catalog:
    names = [f"arr_{number}" for number in range(len(shapes))]
    return of({n: tensor(n, *s) for n, s in zip(names, shapes, strict=True)}, Naming.ORDER)


def test_a_list_in_order() -> None:
    served_graph = graph(variable("w", 4, 3), variable("b", 3))
    assert match_unnamed(served_graph, arrays((4, 3), (3,))) == {"w": "arr_0", "b": "arr_1"}


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((4, 3),), "1 arrays and the graph 2 variables"),
        (((3,), (4, 3)), r"array 0 of the list is arr_0 float32\[3\]"),
    ],
)
def test_a_list_that_does_not_fit(shapes: tuple[tuple[int, ...], ...], says: str) -> None:
    with pytest.raises(NoCertainMatch, match=says):
        match_unnamed(graph(variable("w", 4, 3), variable("b", 3)), arrays(*shapes))


def test_a_list_of_equal_shapes_needs_the_user_s_word() -> None:
    served_graph, catalog = graph(variable("a", 3), variable("b", 3)), arrays((3,), (3,))
    with pytest.raises(NoCertainMatch, match="only the list's order"):
        match_unnamed(served_graph, catalog)
    assert match_unnamed(served_graph, catalog, by_order=True) == {"a": "arr_0", "b": "arr_1"}


def test_other_types_do_not_fit_either() -> None:
    with pytest.raises(NoCertainMatch):
        match_unnamed(graph(variable("a", 3, dtype=DType.HALF)), arrays((3,)), by_order=True)

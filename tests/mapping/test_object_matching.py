"""Object-based checkpoints against models: what corresponds is found, everything else is an error by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import AmbiguousRename, MappingError, MissingTensors, ObjectMismatch, UsageError
from exporter.mapping.object_matching import TrainedObjects, match_objects
from exporter.wire.dtypes import DType
from tests.support.object_graphs import SHAPE, Slotted, Tree, Var, graph_of, tensors_of, wanted_of


def match(
    served: Tree | list[Var],
    trained: Tree,
    *,
    path: str | None = None,
    renamed: dict[str, str] | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, str]:
    """The path of the checkpoint's object by served variable; a list is a graph without objects."""
    if isinstance(served, list):
        objects, variables = None, served
        for variable in variables:
            variable.tensor = variable.name
    else:
        objects, variables = graph_of(served, is_trained=False)
    theirs, stored = graph_of(trained, is_trained=True)
    wanted = {key: v for key, v in wanted_of(variables).items() if key not in without}
    side = TrainedObjects(theirs, tensors_of(stored), path)
    found = match_objects(wanted, objects, side, renamed or {}).found
    assert found.keys() == wanted.keys()
    return {key: entry.tensor.partition("/.ATTRIBUTES")[0] for key, entry in found.items()}


def dense(name: str, **options: Any) -> Tree:
    return {"kernel": Var(f"{name}/kernel", **options), "bias": Var(f"{name}/bias", (4,))}


def model(*names: str) -> Tree:
    return {"layers": [dense(name) for name in names]}


# --- same shapes in another order ---------------------------------------------------------------------------

PERMUTED = st.integers(2, 6).flatmap(lambda count: st.permutations(range(count)))


@given(PERMUTED, st.sampled_from(["layer_{}x", "dense_{}", "block_{}/dense"]))
def test_no_layers_of_one_shape_are_ever_swapped(order: list[int], name: str) -> None:
    """However the layers are called, and in whatever order the served program made them."""
    trained = {"model": model(*(name.format(n) for n in range(len(order))))}
    served = model(*(name.format(n) for n in order))
    if order == sorted(order):
        found = match(served, trained)
        assert all(found[f"{name.format(n)}/bias"] == f"model/layers/{n}/bias" for n in order)
    else:
        with pytest.raises(ObjectMismatch, match="do not correspond"):
            match(served, trained)


@given(PERMUTED)
def test_layers_by_attribute_are_found_in_any_order(order: list[int]) -> None:
    trained = {"model": {f"at{n}": dense(f"a{n}") for n in range(len(order))}}
    served = {f"at{n}": dense(f"a{n}") for n in order}
    assert match(served, trained)["a0/kernel"] == "model/at0/kernel"
    crossed = {f"at{place}": dense(f"a{n}") for place, n in enumerate(order)}
    if order != sorted(order):
        with pytest.raises(ObjectMismatch):
            match(crossed, trained)


@given(PERMUTED)
def test_names_alone_never_swap_either(order: list[int]) -> None:
    """A graph without objects is matched by names: their order in the checkpoint does not matter."""
    trained = {"model": model(*(f"n{n}" for n in order))}
    found = match([Var(f"n{n}/kernel") for n in range(len(order))], trained)
    assert all(found[f"n{n}/kernel"] == f"model/layers/{order.index(n)}/kernel" for n in order)


def test_the_error_names_both_sides() -> None:
    with pytest.raises(ObjectMismatch) as caught:
        match(model("item", "user"), {"model": model("user", "item")})
    assert "'item/kernel' would get the values of 'user/kernel'" in caught.value.cause


# --- what corresponds ---------------------------------------------------------------------------------------


def test_numbers_of_a_process_do_not_matter_if_they_keep_their_order() -> None:
    found = match(model("dense", "dense_1", "dense_2"), {"net": model("dense_9", "dense_10", "dense_11")})
    assert found["dense_2/kernel"] == "net/layers/2/kernel"


def test_scopes_that_one_side_has_in_addition_do_not_matter() -> None:
    assert match({"a": dense("dense")}, {"a": dense("ranker/dense")})["dense/kernel"] == "a/kernel"


def test_unnamed_variables_go_by_their_objects() -> None:
    tree = {"of": [Var("Variable"), Var("Variable")], "by": {"x": Var("Variable")}}
    found = match({"of": [Var("Variable"), Var("Variable")], "by": {"x": Var("Variable")}}, {"net": tree})
    assert found == {"Variable": "net/of/0", "Variable_1": "net/of/1", "Variable_2": "net/by/x"}


def test_a_tensor_may_be_named_by_another_path() -> None:
    """As Keras 3 does with an optimizer: the first way to a variable names it."""
    kernel = Var("a/kernel")
    trained = {"optimizer": Slotted(_trainable_variables=[kernel]), "model": {"a": {"kernel": kernel}}}
    assert match({"a": {"kernel": Var("a/kernel")}}, trained) == {
        "a/kernel": "optimizer/_trainable_variables/0"
    }


def test_the_model_may_be_wrapped_on_either_side() -> None:
    assert match({"net": model("a")}, model("a"))["a/bias"] == "layers/0/bias"
    assert (
        match(model("a"), {"job": {"state": {"net": model("a")}}})["a/bias"] == "job/state/net/layers/0/bias"
    )


def test_a_cycle_of_objects_ends() -> None:
    served, trained = dict(model("a")), dict(model("a"))
    served["self"], trained["self"] = served, trained
    assert match(served, {"net": trained})["a/bias"] == "net/layers/0/bias"


def test_what_an_optimizer_alone_lists_is_found_in_its_order() -> None:
    """Keras 3 tracks no layers in lists; its optimizer lists all trainable variables."""
    table, one, two = Var("net/table"), Var("net/kernel"), Var("net/kernel")
    trained = {"net": {"table": table}, "optimizer": Slotted(_trainable_variables=[table, one, two])}
    own = Var("net/table")
    served = {"table": own, "trainable_variables": [own, Var("net/kernel"), Var("net/kernel")]}
    found = match(served, trained)
    assert found["net/table"] == "net/table"
    assert found["net/kernel_1"] == "optimizer/_trainable_variables/2"


def test_an_optimizer_that_lists_another_order_is_not_believed() -> None:
    table, one, two = Var("net/table"), Var("net/kernel"), Var("net/kernel")
    trained = {"net": {"table": table}, "optimizer": Slotted(_trainable_variables=[one, table, two])}
    own = Var("net/table")
    served = {"table": own, "trainable_variables": [own, Var("net/kernel"), Var("net/kernel")]}
    with pytest.raises(MissingTensors, match="2 of 3"):
        match(served, trained)


# --- what does not ------------------------------------------------------------------------------------------


def test_a_layer_more_in_the_checkpoint_is_refused() -> None:
    """Numbered names shift: the last layer would get the values of the last but one."""
    with pytest.raises(ObjectMismatch) as caught:
        match(model("dense", "dense_1"), {"model": model("dense", "dense_1", "dense_2")})
    assert "'model/layers/2', the model has nothing there" in caught.value.cause


def test_a_layer_more_in_the_model_is_refused() -> None:
    with pytest.raises(MissingTensors, match=r"2 of 6 .* 'model'"):
        match(model("dense", "dense_1", "dense_2"), {"model": model("dense", "dense_1")})


def test_a_layer_more_is_refused_by_name_too() -> None:
    """No objects in common, as between the two Kerases: numbered names must be complete."""
    names = ("dense", "dense_1", "dense_2")
    trained = {"model": {f"layer-{number}": dense(name) for number, name in enumerate(names)}}
    with pytest.raises(ObjectMismatch, match="'dense_2/kernel' beside"):
        match({"_operations": [dense(name) for name in names[:2]]}, trained)
    found = match({"_operations": [dense(name) for name in names]}, trained)
    assert found["dense_1/bias"] == "model/layer-1/bias"


def test_a_renamed_model_is_refused_until_the_user_says_so() -> None:
    trained = {"model": model("ranker/a", "ranker/b")}
    with pytest.raises(ObjectMismatch) as caught:
        match(model("ranker_v2/a", "ranker_v2/b"), trained)
    assert "'ranker_v2/a/kernel' would get the values of 'ranker/a/kernel'" in caught.value.cause
    assert "--rename" in caught.value.hint
    renamed = {
        f"ranker_v2/{layer}/{leaf}": f"ranker/{layer}/{leaf}" for layer in "ab" for leaf in ("kernel", "bias")
    }
    found = match(model("ranker_v2/a", "ranker_v2/b"), trained, renamed=renamed)
    assert found["ranker_v2/b/bias"] == "model/layers/1/bias"


def test_a_rename_that_is_no_unique_name_still_walks() -> None:
    trained = {"a": {"w": Var("old/w")}, "b": {"w": Var("old/w")}}
    served = {"a": {"w": Var("new/w")}, "b": {"w": Var("new/w")}}
    found = match(served, trained, renamed={"new/w": "old/w", "new/w_1": "old/w"})
    assert found == {"new/w": "a/w", "new/w_1": "b/w"}


@pytest.mark.parametrize(
    "name", ["model/layers/0/kernel", "model/layers/0/kernel/.ATTRIBUTES/VARIABLE_VALUE", "a/kernel"]
)
def test_a_rename_may_name_path_tensor_or_variable(name: str) -> None:
    found = match([Var("mine")], {"model": model("a")}, renamed={"mine": name})
    assert found == {"mine": "model/layers/0/kernel"}


def test_two_models_that_fit_are_refused_and_told_apart_by_path() -> None:
    trained = {"model": model("a"), "average": model("a")}
    with pytest.raises(AmbiguousRename, match="2 objects") as caught:
        match(model("a"), trained)
    assert "'model', 'average'" in caught.value.cause
    assert match(model("a"), trained, path="average")["a/bias"] == "average/layers/0/bias"


def test_names_tell_two_models_apart_where_they_differ() -> None:
    trained = {"user": model("user/a"), "item": model("item/a")}
    assert match(model("item/a"), trained)["item/a/bias"] == "item/layers/0/bias"


def test_an_unknown_path_says_what_is_there() -> None:
    with pytest.raises(UsageError, match="--object-path nett") as caught:
        match(model("a"), {"net": model("a")}, path="nett")
    assert "'net'" in caught.value.cause


def test_two_variables_of_a_name_are_refused() -> None:
    trained = {"a": {"w": Var("w")}, "b": {"w": Var("w")}}
    with pytest.raises(AmbiguousRename, match="2 variables") as caught:
        match([Var("w")], trained)
    assert "'a/w', 'b/w'" in caught.value.cause
    assert match([Var("w")], trained, path="b") == {"w": "b/w"}


def test_an_object_that_is_two_things_there_is_refused() -> None:
    """Weights that the served model shares and the trainer did not."""
    shared = Var("w")
    with pytest.raises(ObjectMismatch, match="do not correspond") as caught:
        match({"a": shared, "b": shared}, {"net": {"a": Var("w"), "b": Var("w")}})
    assert "both 'net/a', 'net/b'" in caught.value.cause


def test_of_two_fitting_objects_the_one_of_the_right_shapes_counts() -> None:
    trained = {"small": {"w": Var("w", (2, 2))}, "large": {"w": Var("w")}}
    assert match({"w": Var("w")}, trained) == {"w": "large/w"}


@pytest.mark.parametrize("change", [{"shape": (2, 2)}, {"dtype": DType.HALF}])
def test_a_wrong_shape_or_precision_is_left_to_the_comparison(change: dict[str, Any]) -> None:
    """The caller compares each pair, and names both."""
    assert match({"w": Var("w", **change)}, {"net": {"w": Var("w", SHAPE)}}) == {"w": "net/w"}


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=5),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=5),
)
def test_every_match_is_of_one_name(served: list[str], trained: list[str]) -> None:
    """Any two models of same-shaped layers: an error, or each variable from one of its own name."""
    theirs, variables = graph_of({"model": model(*trained)}, is_trained=True)
    ours, own = graph_of(model(*served), is_trained=False)
    try:
        found = match_objects(wanted_of(own), ours, TrainedObjects(theirs, tensors_of(variables)), {}).found
    except MappingError:
        return
    names = {v.tensor: v.name for v in variables}
    assert [names[found[v.tensor].tensor] for v in own] == [v.name for v in own]
    assert len({entry.tensor for entry in found.values()}) == len(own)

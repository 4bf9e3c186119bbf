"""Every variable finds its own tensor, or the user is told why not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exporter.catalog import ExtraKind, Naming, TensorRef
from exporter.checkpoint.object_graph import SUFFIX
from exporter.errors import (
    AmbiguousRename,
    MissingTensors,
    PartitionStrategyUnknown,
    ShapeMismatch,
    UsageError,
)
from exporter.graph.inference_graph import PartitionStrategy
from exporter.mapping.build import VariableMapping, build_mapping, check_casts
from exporter.mapping.mapping_rules import CastRule, MappingRules, RenameRule
from exporter.mapping.mapping_spec import RulesDocument
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import DocumentError, decode, encode
from tests.support.values import catalog, graph, parts, tensor, variable

MOD, DIV, NONE = PartitionStrategy.MOD, PartitionStrategy.DIV, PartitionStrategy.NONE


def rules(*renames: str, **options: object) -> MappingRules:
    return MappingRules(renames=tuple(map(RenameRule.parse, renames)), **options)  # type: ignore[arg-type]


def found(mapping: VariableMapping) -> dict[str, tuple[str, str]]:
    return {source.key: (source.tensor.name, source.via) for source in mapping.sources}


def test_by_name() -> None:
    mapping = build_mapping(
        graph(variable("w", 2, 3)), catalog(tensor("w", 2, 3), tensor("w/Adam", 2, 3)), rules()
    )
    assert found(mapping) == {"w": ("w", "name")}
    assert mapping.sources[0].is_verbatim
    assert mapping.bytes_ == 24


def test_rename_rules_match_whole_names_and_keep_groups() -> None:
    source = catalog(tensor("tower/a/w", 2), tensor("b/w", 2))
    mapping = build_mapping(graph(variable("a/w", 2), variable("b/w", 2)), source, rules(r"(a/.*)=tower/\1"))
    assert found(mapping) == {"a/w": ("tower/a/w", "rename"), "b/w": ("b/w", "name")}


def test_rename_that_sends_two_variables_to_one_tensor() -> None:
    with pytest.raises(AmbiguousRename, match="'w' is claimed by 2 variables: a/w, b/w"):
        build_mapping(graph(variable("a/w", 2), variable("b/w", 2)), catalog(tensor("w", 2)), rules(".*/w=w"))


def test_rename_rules_that_disagree() -> None:
    with pytest.raises(AmbiguousRename, match="disagree: 'x', 'y'"):
        build_mapping(graph(variable("w", 2)), catalog(tensor("x", 2), tensor("y", 2)), rules("w=x", ".=y"))


@pytest.mark.parametrize(
    "text", ["nothing", "=x", "x=", "(=x", r"w=\1", r"(w)=\9", r"w=\g<x>", r"w=\g<", r"w=\q"]
)
def test_rename_rule_that_does_not_parse(text: str) -> None:
    with pytest.raises(UsageError, match="rename rule") as caught:
        RenameRule.parse(text)
    assert "--rename '" in caught.value.hint


def test_a_cast_that_no_variable_answers_to_is_refused() -> None:
    mapping = build_mapping(graph(variable("tower/w", 2)), catalog(tensor("tower/w", 2)), rules())
    check_casts(mapping, [CastRule.parse("tower/.*=bfloat16"), CastRule.parse("float16")])
    with pytest.raises(UsageError, match="no floating variable is called so") as caught:
        check_casts(mapping, [CastRule.parse("w=bfloat16")])
    assert "'tower/w'" in caught.value.cause
    assert "--cast '.*w=bfloat16'" in caught.value.hint


def test_average_replaces_what_has_one_and_names_what_has_none() -> None:
    source = catalog(
        tensor("w", 2), tensor("w/ExponentialMovingAverage", 2), tensor("bn/mean", 2), tensor("global_step")
    )
    mapping = build_mapping(graph(variable("w", 2), variable("bn/mean", 2)), source, rules(average="ema"))
    assert found(mapping)["w"] == ("w/ExponentialMovingAverage", "average")
    assert found(mapping)["bn/mean"] == ("bn/mean", "name")
    assert mapping.notes == ("no moving average in the checkpoint, raw value served: bn/mean",)


def test_average_of_a_custom_name() -> None:
    source = catalog(tensor("w", 2), tensor("w/shadow", 2))
    mapping = build_mapping(graph(variable("w", 2)), source, rules(average="shadow"))
    assert found(mapping) == {"w": ("w/shadow", "average")}


def test_average_without_any_is_an_error_not_a_raw_model() -> None:
    with pytest.raises(MissingTensors, match="no moving average of any"):
        build_mapping(graph(variable("w", 2)), catalog(tensor("w", 2)), rules(average="ema"))
    unnamed = replace(catalog(tensor("layers/dense/vars/0", 2)), naming=Naming.LAYERS)
    with pytest.raises(MissingTensors) as caught:
        build_mapping(
            graph(variable("dense/kernel", 2)),
            unnamed,
            rules("dense/kernel=layers/dense/vars/0", average="ema"),
        )
    assert "save a tf.train.Checkpoint" in caught.value.hint


def test_missing_variable_lists_the_nearest_names_and_why_they_do_not_fit() -> None:
    source = catalog(
        tensor("dense_1/kernel", 2, 2),
        tensor("dense_2/kernel", 3, 3),
        tensor("dense_3/kernel", 2, 2, dtype=DType.DOUBLE),
    )
    wanted = graph(variable("dense_1/kernel", 2, 2), variable("dense/kernel", 2, 2))
    with pytest.raises(MissingTensors) as caught:
        build_mapping(wanted, source, rules())
    assert "1 of 2 graph variables" in caught.value.message
    assert "'dense_1/kernel' (taken by dense_1/kernel)" in caught.value.cause
    assert "'dense_2/kernel' (its shape is [3, 3])" in caught.value.cause
    assert "'dense_3/kernel' (it is float64)" in caught.value.cause
    assert caught.value.exit_code == 4


def test_a_thousand_missing_variables_make_a_short_report() -> None:
    wanted = graph(*(variable(f"layer_{number}/w", 2) for number in range(1000)))
    source = catalog(*(tensor(f"other_{number}/v", 2) for number in range(1000)))
    with pytest.raises(MissingTensors) as caught:
        build_mapping(wanted, source, rules())
    assert len(caught.value.cause.strip().splitlines()) == 21
    assert "and 980 more" in caught.value.cause


def test_wrong_shape() -> None:
    with pytest.raises(ShapeMismatch, match=r"\[2, 3\] in the graph, tensor 'w' has \[3, 2\]"):
        build_mapping(graph(variable("w", 2, 3)), catalog(tensor("w", 3, 2)), rules())


def test_scalar_is_not_a_vector() -> None:
    with pytest.raises(ShapeMismatch):
        build_mapping(graph(variable("w", 5)), catalog(tensor("w")), rules())


def test_wrong_dtype() -> None:
    with pytest.raises(ShapeMismatch, match="float32 in the graph, tensor 'w' is float64"):
        build_mapping(graph(variable("w", 2)), catalog(tensor("w", 2, dtype=DType.DOUBLE)), rules())


def test_two_variables_of_one_name() -> None:
    with pytest.raises(AmbiguousRename, match="all claim the checkpoint name"):
        build_mapping(graph(variable("w", 2), variable("w", 2)), catalog(tensor("w", 2)), rules())


def test_declared_slice_that_is_not_stored_is_a_missing_tensor_only_if_needed() -> None:
    whole = tensor("w", 6, 2, rows=[3, 3])
    holed = type(whole)(
        "w",
        whole.dtype,
        whole.shape,
        slices=(whole.slices[0], type(whole.slices[0])(whole.slices[1].spec, None)),
    )
    assert build_mapping(graph(variable("v", 2)), catalog(holed, tensor("v", 2)), rules())
    with pytest.raises(MissingTensors) as caught:
        build_mapping(graph(variable("w", 6, 2)), catalog(holed), rules())
    assert "lacks 1 of its 2 slices" in caught.value.cause


def test_cast_takes_floats_alone() -> None:
    options = rules(casts=(CastRule.parse("bfloat16"),))
    source = catalog(tensor("w", 2), tensor("ids", 2, dtype=DType.INT64))
    mapping = build_mapping(graph(variable("w", 2), variable("ids", 2, dtype=DType.INT64)), source, options)
    assert [source.dtype for source in mapping.sources] == [DType.BFLOAT16, DType.INT64]
    assert mapping.bytes_ == 4 + 16


@pytest.mark.parametrize("text", ["int4", "emb=uint8", "(=bfloat16", "(=int8"])
def test_cast_that_does_not_parse(text: str) -> None:
    with pytest.raises(UsageError):
        CastRule.parse(text)


# Row order: stored parts, how they were trained, served parts, how they are looked up -> moves or refusal

WHOLE, TWO, THREE = (), (4, 3), (3, 2, 2)


@pytest.mark.parametrize(
    ("stored", "trained", "served", "looked_up", "moves"),
    [
        (WHOLE, None, WHOLE, DIV, (0, 0)),
        (TWO, MOD, TWO, MOD, (0, 0)),
        (TWO, DIV, TWO, DIV, (0, 0)),
        (TWO, None, TWO, MOD, (0, 0)),
        (TWO, MOD, WHOLE, DIV, (2, 0)),
        (TWO, MOD, WHOLE, NONE, (2, 0)),
        (TWO, MOD, WHOLE, None, (2, 0)),
        (TWO, MOD, TWO, None, (0, 0)),
        (TWO, MOD, THREE, MOD, (2, 3)),
        (TWO, MOD, THREE, DIV, (2, 0)),
        (TWO, MOD, TWO, DIV, (2, 0)),
        (TWO, DIV, THREE, DIV, (0, 0)),
        (TWO, DIV, THREE, MOD, (0, 3)),
        (TWO, DIV, TWO, MOD, (0, 2)),
        (WHOLE, None, THREE, MOD, (0, 3)),
        (WHOLE, None, THREE, DIV, (0, 0)),
        (TWO, NONE, WHOLE, DIV, (0, 0)),
        (TWO, None, WHOLE, NONE, (0, 0)),
        (TWO, None, WHOLE, None, PartitionStrategyUnknown),
        (TWO, DIV, THREE, None, PartitionStrategyUnknown),
        (WHOLE, None, THREE, None, PartitionStrategyUnknown),
        (TWO, None, THREE, NONE, (0, 0)),
        (TWO, None, WHOLE, DIV, PartitionStrategyUnknown),
        (TWO, None, THREE, MOD, PartitionStrategyUnknown),
        (TWO, None, THREE, DIV, PartitionStrategyUnknown),
        ((5, 2), MOD, WHOLE, DIV, PartitionStrategyUnknown),
        (WHOLE, None, (5, 2), MOD, PartitionStrategyUnknown),
    ],
)
def test_row_order(stored, trained, served, looked_up, moves) -> None:  # type: ignore[no-untyped-def]
    wanted = graph(
        *(parts("emb", 7, 4, rows=served) if served else [variable("emb", 7, 4)]),
        lookups={"emb": looked_up} if looked_up else {},
    )
    source = catalog(tensor("emb", 7, 4, rows=stored))
    options = rules(trained={"emb": trained} if trained else {})
    if moves is PartitionStrategyUnknown:
        with pytest.raises(PartitionStrategyUnknown, match="emb"):
            build_mapping(wanted, source, options)
        return
    (only,) = build_mapping(wanted, source, options).sources
    assert (only.gather_parts, only.scatter_parts) == moves
    assert only.is_verbatim == (moves == (0, 0))


def test_what_the_user_says_wins_over_what_the_graph_tells() -> None:
    wanted = graph(variable("emb", 7, 4), lookups={"emb": DIV})
    options = rules(trained={"emb": DIV}, strategies={"emb": MOD})
    (only,) = build_mapping(wanted, catalog(tensor("emb", 7, 4, rows=TWO)), options).sources
    assert only.gather_parts == 2


def test_the_average_of_a_mod_table_moves_like_the_table() -> None:
    source = catalog(tensor("emb", 7, 4, rows=TWO), tensor("emb/ExponentialMovingAverage", 7, 4, rows=TWO))
    wanted = graph(variable("emb", 7, 4), lookups={"emb": DIV})
    (only,) = build_mapping(wanted, source, rules(average="ema", trained={"emb": MOD})).sources
    assert (only.tensor.name, only.gather_parts) == ("emb/ExponentialMovingAverage", 2)


def test_extras_are_told_by_kind() -> None:
    source = catalog(
        tensor("w", 2),
        tensor("w/Adam", 2),
        tensor("w/Adam_1", 2),
        tensor("w/ExponentialMovingAverage", 2),
        tensor("beta1_power_1"),
        tensor("training/Adagrad/w/accumulator", 2),
        tensor("optimizer/_variables/12", 2),
        tensor(f"opt/_iterations{SUFFIX}", dtype=DType.INT64),
        tensor(f"opt/_variables/2{SUFFIX}", 2),
        tensor(f"net/_variables/2{SUFFIX}", 2),
        tensor("global_step", dtype=DType.INT64),
        tensor("tower/global_step", dtype=DType.INT64),
        tensor("temperature"),
    )
    mapping = build_mapping(graph(variable("w", 2)), source, rules())
    kinds = {extra.tensor.name: extra.kind for extra in mapping.extras}
    assert kinds == {
        "w/Adam": ExtraKind.SLOT,
        "w/Adam_1": ExtraKind.SLOT,
        "w/ExponentialMovingAverage": ExtraKind.MOVING_AVERAGE,
        "beta1_power_1": ExtraKind.SLOT,
        "training/Adagrad/w/accumulator": ExtraKind.SLOT,
        "optimizer/_variables/12": ExtraKind.SLOT,
        f"opt/_iterations{SUFFIX}": ExtraKind.GLOBAL_STEP,
        f"opt/_variables/2{SUFFIX}": ExtraKind.SLOT,
        f"net/_variables/2{SUFFIX}": ExtraKind.OTHER,
        "global_step": ExtraKind.GLOBAL_STEP,
        "tower/global_step": ExtraKind.GLOBAL_STEP,
        "temperature": ExtraKind.OTHER,
    }


@pytest.mark.parametrize(
    ("served", "left"), [("dense", "dense_1"), ("dense_1", "dense"), ("net/dense_1/w", "net/dense_2/w")]
)
def test_a_numbered_twin_that_is_left_over_is_told(served: str, left: str) -> None:
    """A name-based checkpoint is matched by names alone; a layer less would shift numbered ones."""
    (note,) = build_mapping(
        graph(variable(served, 4)), catalog(tensor(served, 4), tensor(left, 4)), rules()
    ).notes
    assert f"{left!r} is left over beside {served!r}" in note


@pytest.mark.parametrize(
    "left",
    [tensor("dense_1", 5), tensor("dense_1", 4, dtype=DType.HALF), tensor("dense/Adam_1", 4), tensor("d", 4)],
)
def test_what_is_no_twin_is_not_told(left: TensorRef) -> None:
    assert not build_mapping(graph(variable("dense", 4)), catalog(tensor("dense", 4), left), rules()).notes


def test_rules_are_kept_as_texts() -> None:
    given = rules("a/(.*)=b", casts=(CastRule.parse("a=bfloat16"),), strategies={"a": MOD}, average="ema")
    kept = RulesDocument.of(given)
    text = encode(kept)
    assert b'"renames":[{"pattern":"a/(.*)","name":"b"}]' in text
    assert b'"casts":[{"pattern":"a","dtype":"bfloat16"}]' in text
    assert decode(text, RulesDocument, "rules", written=encode) == kept


@pytest.mark.parametrize("pattern", ["7", "null", "[]"])
def test_a_rule_that_is_not_a_text_is_named_by_its_field(pattern: str) -> None:
    text = f'{{"renames": [{{"pattern": {pattern}, "name": "b"}}]}}'
    with pytest.raises(DocumentError, match=r"rules\.renames\[0\]\.pattern: "):
        decode(text, RulesDocument, "rules", written=encode)

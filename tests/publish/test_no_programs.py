"""A document holds no program: it keeps what rules gave, and their texts to be compared, which nobody runs.

A pattern that backtracks without end would stop whoever reads it: commands, pulls, a running agent.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.delta.format import ChangeKind, Schema, ServedVariable, TableContents, TableSide
from exporter.errors import SchemaChanged
from exporter.graph.inference_graph import GraphTable
from exporter.mapping.mapping_spec import DynamicTable, MappingSpec, RenameText, RulesDocument
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.publish.served_check import resolved
from exporter.wire.dtypes import DType
from tests.support.commands import export_model
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    publish_base,
    request,
    served_now,
    values_at,
)

ROOT = Path(__file__).parent.parent.parent
ENDLESS = r"(([a-z]|[a-z/])*)*(.|s)*[^a-z/]\9(?P<x>"
"""A pattern that ends with no name in this century; behind it a group that is not closed."""

Recipe = dict[str, Any]


def with_recipe(model: Path, change: Callable[[Recipe], None]) -> None:
    """Change the recipe in the manifest of a model's only version."""
    (manifest,) = model.glob("[0-9]*/manifest.json")
    document = json.loads(manifest.read_text())
    change(document["incremental"]["recipe"])
    manifest.write_text(json.dumps(document))


def of_an_earlier_release(recipe: Recipe) -> None:
    del recipe["renamed"]
    recipe.pop("dtypes", None)
    names = {each["key"]: each["key"].replace("s/", "net/") for each in recipe["variables"]}
    recipe["rules"]["tensors"] = {key: f"{name}/average" for key, name in names.items()}


def followed(tmp_path: Path, serving: Serving) -> tuple[Trainer, Path]:
    trainer, model = Trainer(tmp_path / "train"), tmp_path / "model"
    trainer.save()
    publish_base(trainer, serving, model)
    return trainer, model


def assert_takes_the_next_state(trainer: Trainer, serving: Serving, model: Path) -> None:
    trainer.train()
    trainer.save()
    done = export_incremental(request(trainer, model))
    assert done.published is not None
    log = read_log(model)
    assert_same_bits(values_at(log, log.at.position), served_now(trainer, serving))


SERVING = Serving(parts=3, average=True, cast=True)


def test_patterns_of_a_manifest_are_never_run(tmp_path: Path) -> None:
    """In this process and in commands: reading it, the next delta, what it was compared with."""
    trainer, model = followed(tmp_path, SERVING)

    def hostile(recipe: Recipe) -> None:
        for rule in (*recipe["rules"]["renames"], *recipe["rules"]["casts"]):
            rule["pattern"] = ENDLESS
        recipe["rules"]["renames"][0]["name"] = r"\9\g<x>\g<"

    with_recipe(model, hostile)
    assert export_model("history", model, "--json").code == 0
    assert_takes_the_next_state(trainer, SERVING, model)
    with pytest.raises(SchemaChanged, match="other rules") as caught:
        export_incremental(replace(request(trainer, model), renames=(r"s/(.*)=net/\1",)))
    assert repr(ENDLESS)[1:-1] in caught.value.cause


def test_a_base_of_a_release_that_kept_patterns_alone_takes_deltas(tmp_path: Path) -> None:
    """Its rules gave what its schema and the tensors of its variables show."""
    trainer, model = followed(tmp_path, SERVING)
    now = read_log(model).base.entry.mapping_spec
    with_recipe(model, of_an_earlier_release)
    then = read_log(model).base.entry.mapping_spec
    assert (then.renamed, then.dtypes) == (now.renamed, now.dtypes)
    assert now.dtypes == {"s/users": "bfloat16", "s/items": "bfloat16"}
    assert_takes_the_next_state(trainer, SERVING, model)


def test_names_of_tables_are_found_in_the_schema() -> None:
    """Lookup tables by the node that the schema names; tables by keys by rules that have no pattern."""
    halves = [
        ServedVariable(name, dtype, (-1,), ChangeKind.DENSE, TableContents(node, side, False))
        for node in ("one", "two")
        for side, name, dtype in zip(
            TableSide, (f"old/{node}/k", f"old/{node}/v"), (DType.INT64, DType.INT32), strict=True
        )
    ]
    rules = RulesDocument(
        renames=(
            RenameText(r"(.*)(-keys|-values)", r"old/\1/\2"),
            RenameText(r"ids\.a", "trained.a"),
            RenameText(r"ids.b", "trained.b"),
        )
    )
    tables = [
        GraphTable(node, f"{node}-keys", f"{node}-values", "int64", "int32", (), ())
        for node in ("two", "one")
    ]
    dynamic = tuple(DynamicTable(name, "int64", "float32", 4, 1) for name in ("ids.a", "ids.b"))
    spec = MappingSpec((), {}, rules, tuple(tables), dynamic)
    assert resolved(spec, Schema.of(halves)).renamed == {
        "one-keys": "old/one/k",
        "one-values": "old/one/v",
        "two-keys": "old/two/k",
        "two-values": "old/two/v",
        "ids.a": "trained.a",
    }


# Where a text that a person typed as an option becomes a pattern; and two places that quote a name, or take a
# pattern from a table of their module.
TYPED = {
    ("exporter/options/__init__.py", "parse"),
    ("exporter/graph/deeprec_conversion.py", "__init__"),
    ("exporter/mapping/mapping_rules.py", "parse"),
    ("exporter/mapping/mapping_rules.py", "parse_ignored"),
    ("exporter/graph/servable.py", "library_of"),
    ("exporter/checkpoint/families.py", "_is_v1"),
}


def test_only_options_become_patterns() -> None:
    """And no struct of a document has a field for one: nothing decodes it."""
    found = {
        (str(path.relative_to(ROOT)), function.name)
        for room in ("exporter", "serving")
        for path in (ROOT / room).rglob("*.py")
        for function, call in calls(ast.parse(path.read_text()))
        if not is_constant(call.args[0])
    }
    assert found == TYPED


RUNS = {
    f"re.{name}"
    for name in ("compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
}


def calls(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Yield each call of `re` with the function that it is in."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in RUNS:
                yield function, node


def is_constant(pattern: ast.expr) -> bool:
    """True if a pattern is made of literals, constants of a module and quoted names."""
    quoted = {
        part
        for call in ast.walk(pattern)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "re.escape"
        for part in ast.walk(call)
    }
    names = {node for node in ast.walk(pattern) if isinstance(node, ast.Name)} - quoted
    return all(name.id.isupper() for name in names)

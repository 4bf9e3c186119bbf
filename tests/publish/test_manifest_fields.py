"""Each field of a manifest is believed as far as it fits: errors have names, and publish nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import Exit, ManifestError
from exporter.options import given
from exporter.publish.manifest import BaseEntry, from_json
from exporter.publish.versions import read_manifest
from exporter.wire.json_documents import encode
from tests.support.budget import times
from tests.support.commands import export_model, export_small, run_command
from tests.support.fuzzing import KINDS
from tests.support.mapped_models import MappedModel

GOLDEN = Path(__file__).parents[1] / "golden"
At = tuple[Any, ...]
Document = dict[str, Any]


def _mapped(directory: Path) -> None:
    """Tables that are mapped, in parts and in 8 bits, one delta, and a trainer that has gone on since."""
    model = MappedModel(directory)
    publish = ("--ckpt-dir", model.train, "--out", directory / "m", "--incr")
    given = ("--model", model.model, "--map-tables", "--overlay-rows", "500", "--cast", "emb=int8")
    for step, options in ((8, given), (9, ())):
        ran = export_small(*publish, *options)
        assert ran.code == 0, ran.err
        model.table[:50] += 1
        model.save(step, model.table)


MAKERS: dict[str, Callable[[Path], None]] = {
    "by rows": KINDS["published"].make,
    "by keys": KINDS["table log"].make,
    "mapped, in 8 bits": _mapped,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What is published of a kind: a directory with `train`, which has gone on, and the model `m`."""
    found: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp("made") / "world"
            found[kind].mkdir()
            MAKERS[kind](found[kind])
        return found[kind]

    return make


def commands(world: Path) -> Iterator[tuple[object, ...]]:
    """Those that read a model's manifests."""
    model = world / "m"
    first = min(int(path.name) for path in model.iterdir() if path.name.isdecimal())
    yield "--ckpt-dir", world / "train", "--out", model, "--incr"
    yield "merge", model
    yield "merge", model, "--rebase"
    yield "rollback", model, "--to", first
    yield "resume", model
    yield "history", model
    yield "verify", model, "--bytes"
    yield "doctor", model
    yield "diff", f"{model}@{first}", model
    yield "inspect", model / str(first)


def published(world: Path) -> set[str]:
    names = [*world.glob("m/[0-9]*"), *world.glob("m/deltas/*/*-*"), *world.glob("m/deltas/*/hold")]
    return {str(path.relative_to(world)) for path in names}


def places(value: Any, at: At = ()) -> Iterator[At]:
    """Every field, and of a list its first two."""
    yield at
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*at, name))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from places(value[index], (*at, index))


def others(value: Any) -> Iterator[Any]:
    """Values of the same kind that are not it."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (0, value + 1, 1 << 40, (1 << 62) + 1)
    elif isinstance(value, str):
        yield from ("", "x", f"{value}x", "int8", "float32", "../x")
    elif isinstance(value, list):
        yield from ([], value[:-1], value + value[:1])
    elif value is None:
        yield from (0, "x", [], {})
    else:
        yield {}


def changed(document: Document, at: At, value: Any) -> Document:
    new = copy.deepcopy(document)
    inside: Any = new
    for step in at[:-1]:
        inside = inside[step]
    if value is None:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    rows = [[each.get(name) for name in ("name", "dtype", "shape")] for each in new.get("tensors", [])]
    rows.sort(key=str)  # names come first, and differ
    new["schema_digest"] = hashlib.sha256(encode(rows)).hexdigest()
    return new


def at_of(document: Document, at: At) -> Any:
    for step in at:
        document = document[step]
    return document


def written(world: Path, scratch: Path, manifest: Path, document: Document) -> Path:
    """A copy with another manifest; files are links, since nothing writes to those that are published."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(world, scratch, copy_function=os.link, symlinks=True)
    there = scratch / manifest.relative_to(world)
    there.unlink()
    there.write_text(json.dumps(document))
    return scratch


def manifests(world: Path) -> list[Path]:
    """Of the base, and of the newest delta."""
    return [min(world.glob("m/[0-9]*/manifest.json")), max(world.glob("m/deltas/*/*-*/manifest.json"))]


def assert_refused(world: Path, line: tuple[object, ...]) -> None:
    """The command ends in a named error, and publishes nothing."""
    before = published(world)
    ran = export_model(*line, "--json")
    assert ran.code == Exit.VERIFICATION, ran.err
    assert (ran.error["error"], published(world)) == ("ManifestError", before), line


def _without(name: str) -> Callable[[Document], Document]:
    """Of a base, without everything by that name in a list of records."""

    def change(document: Document) -> Document:
        kept = [each for each in at_of(document, SERVED[name]) if "emb" not in str(each)]
        return changed(document, SERVED[name], kept)

    return change


INCREMENTAL = "incremental"
SERVED: dict[str, At] = {
    "schema": (INCREMENTAL, "schema"),
    "variables": (INCREMENTAL, "recipe", "variables"),
    "tensors": ("tensors",),
}
CASTS: At = (INCREMENTAL, "recipe", "dtypes")
EMB: At = (INCREMENTAL, "recipe", "variables", 0)
TABLE: At = ("mapped", "tables", 0)
DAMAGES: dict[str, Callable[[Document], Document]] = {
    **{f"no {name} of a table": _without(name) for name in SERVED},
    "another shape in the recipe": lambda it: changed(it, (*EMB, "shape"), [20_001, 16]),
    "another cast in the recipe": lambda it: changed(it, CASTS, dict.fromkeys(at_of(it, CASTS), "float16")),
    "another dtype in the recipe": lambda it: changed(it, (*EMB, "dtype"), "int32"),
    "a part that is outside": lambda it: changed(
        changed(it, (*EMB, "full_shape"), [20_000, 16]), (*EMB, "starts"), [1, 0]
    ),
    "another shape in the schema": lambda it: changed(it, (INCREMENTAL, "schema", 0, 2), [20_000, 16]),
    "a scalar that changes by rows": lambda it: changed(
        changed(it, (INCREMENTAL, "schema", 0, 2), []), (INCREMENTAL, "schema", 0, 3), "table"
    ),
    "another mapped table": lambda it: changed(it, (*TABLE, "name"), "whole"),
    "no mapped table": lambda it: changed(it, (*TABLE, "name"), "nothing"),
    "another mapped file": lambda it: changed(it, (*TABLE, "file"), "variables.index"),
    "a mapped file elsewhere": lambda it: changed(it, (*TABLE, "file"), "../saved_model.pb"),
    "more mapped bytes": lambda it: changed(it, (*TABLE, "bytes"), 1 << 40),
    "no overlay": lambda it: changed(it, (*TABLE, "overlay_rows"), None),
    "an overlay of more rows than the table": lambda it: changed(it, (*TABLE, "overlay_rows"), 20_001),
    "a table that is mapped twice": lambda it: changed(
        it, ("mapped", "tables"), [*it["mapped"]["tables"], *it["mapped"]["tables"]]
    ),
    "mapped tables without an id": lambda it: changed(it, ("mapped", "id"), ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_does_not_fit_is_refused_where_it_is_read(
    damage: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    world = made("mapped, in 8 bits")
    base, _ = manifests(world)
    document = DAMAGES[damage](json.loads(base.read_text()))
    there = written(world, tmp_path / "there", base, document)
    for line in commands(there):
        if line[0] in ("--ckpt-dir", "rollback") or line[-1] == "--rebase":
            assert_refused(there, line)


@pytest.mark.landing
@pytest.mark.parametrize("kind", MAKERS)
def test_whichever_field_is_another_errors_have_names_and_publish_nothing(
    kind: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    world, rng = made(kind), random.Random()
    seed = rng.randrange(1 << 32)
    rng.seed(seed)
    for manifest in manifests(world):
        document = json.loads(manifest.read_text())
        for at, value in rng.sample(every_change(document), times(12)):
            there = written(world, tmp_path / "there", manifest, changed(document, at, value))
            for line in commands(there):
                before = published(there)
                what = f"seed {seed}: {at} as {value!r} in {manifest.parent.name}: {line[0]}"
                try:
                    code = run_command(*line, "--json")
                except Exception as error:
                    raise AssertionError(what) from error
                assert code in (Exit.DONE, Exit.DIFFERENT) or published(there) == before, what


def every_change(document: Document) -> list[tuple[At, Any]]:
    """Fields and other values, None for none; those that are refused as they are read are left out."""
    found = []
    for at in [*places(document)][1:]:
        for value in (None, *others(at_of(document, at))):
            try:
                from_json(json.dumps(changed(document, at, value)))
            except ManifestError:
                continue
            found.append((at, value))
    return found


def test_manifests_are_read_by_msgspec_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program gives is coerced where it is given: a manifest's values have their types already."""

    def taken(*_: object) -> None:
        raise AssertionError("a value of a manifest is taken as if a program had given it")

    monkeypatch.setattr(given, "take", taken)
    monkeypatch.setattr(given.Checked, "__call__", taken)
    found = [read_manifest(path.parent) for path in GOLDEN.rglob("manifest.json") if "models" in path.parts]
    assert sum(isinstance(manifest.incremental, BaseEntry) for manifest in found) > 3

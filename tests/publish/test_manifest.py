"""The manifest: every value survives a round trip, every hostile text ends in a named error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.errors import Exit, ManifestError
from exporter.publish.manifest import (
    FileEntry,
    Manifest,
    Origin,
    TensorEntry,
    from_json,
    head_from_json,
    is_inside,
    schema_digest,
    tensor_entries,
    to_json,
)
from exporter.wire.dtypes import DType

MANIFEST = Manifest(
    position=4200,
    step=4100,
    source=Origin("run7", "model.ckpt-4100", "0f" * 32),
    exporter="0.1.0",
    created=datetime(2025, 1, 31, 9, 30, tzinfo=timezone.utc),
    tensors=(
        TensorEntry("emb", "bfloat16", (3, 2), 12, ("9a4f01c2", "00000007")),
        TensorEntry("w", "float32", (), 4, ("00000000",)),
    ),
    files=(
        FileEntry("saved_model.pb", 812, "00c0ffee"),
        FileEntry("variables/variables.data-00000-of-00001", 1 << 40),
    ),
)

COUNTS = st.integers(0, 2**63 - 1)
CRCS = st.integers(0, 2**32 - 1).map("{:08x}".format)
TENSORS = st.builds(
    TensorEntry,
    st.text(min_size=1),
    st.sampled_from([dtype.label for dtype in DType]),
    st.lists(COUNTS, max_size=4).map(tuple),
    COUNTS,
    st.lists(CRCS, max_size=3).map(tuple),
)
FILES = st.builds(FileEntry, st.text(min_size=1, max_size=60).filter(is_inside), COUNTS, st.none() | CRCS)
TIMES = st.datetimes(datetime(1970, 1, 1), timezones=st.just(timezone.utc))
MANIFESTS = st.builds(
    Manifest,
    position=COUNTS,
    step=st.none() | COUNTS,
    lineage=st.none() | st.text(),
    source=st.builds(Origin, st.text(), st.text(), st.none() | st.just("0f" * 32)),
    exporter=st.text(),
    created=TIMES,
    tensors=st.lists(TENSORS, unique_by=lambda tensor: tensor.name, max_size=5).map(tuple),
    files=st.lists(FILES, unique_by=lambda file: file.path, min_size=1, max_size=5).map(tuple),
)


@given(MANIFESTS)
def test_round_trip(manifest: Manifest) -> None:
    assert from_json(to_json(manifest)) == manifest


@given(st.integers(0, 2**63 - 2), st.data())
def test_round_trip_of_a_delta(start: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(start + 1, 2**63 - 1))
    delta = Manifest(**{**asdict(MANIFEST), "from_position": start, "position": position})
    assert from_json(to_json(delta)) == delta


@given(MANIFESTS)
def test_the_stamp_needs_no_tensors(manifest: Manifest) -> None:
    head = head_from_json(to_json(manifest))
    assert (head.position, head.created, head.source) == (
        manifest.position,
        manifest.created,
        manifest.source,
    )


def test_the_text_is_the_documented_one() -> None:
    assert to_json(MANIFEST) == (
        '{"format_version": 1,\n'
        ' "kind": "base",\n'
        ' "position": 4200,\n'
        ' "step": 4100,\n'
        ' "lineage": null,\n'
        f' "schema_digest": "{MANIFEST.schema_digest}",\n'
        f' "source": {{"directory":"run7","checkpoint":"model.ckpt-4100","digest":"{"0f" * 32}"}},\n'
        ' "created": "2025-01-31T09:30:00.000000Z",\n'
        ' "exporter": "0.1.0",\n'
        ' "tensors": [\n'
        '  {"name":"emb","dtype":"bfloat16","shape":[3,2],"bytes":12,"crc32c":["9a4f01c2","00000007"]},\n'
        '  {"name":"w","dtype":"float32","shape":[],"bytes":4,"crc32c":["00000000"]}],\n'
        ' "files": [\n'
        '  {"path":"saved_model.pb","bytes":812,"crc32c":"00c0ffee"},\n'
        '  {"path":"variables/variables.data-00000-of-00001","bytes":1099511627776,"crc32c":null}]}\n'
    )


def test_times_are_written_in_utc() -> None:
    zone = timezone(timedelta(hours=-5))
    local = Manifest(**{**asdict(MANIFEST), "created": MANIFEST.created.astimezone(zone)})
    assert to_json(local) == to_json(MANIFEST)


def test_the_schema_digest_is_stable() -> None:
    text = '[["emb","bfloat16",[3,2]],["w","float32",[]]]'
    assert MANIFEST.schema_digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_schema_digest_sees_names_dtypes_and_shapes_alone() -> None:
    emb, w = MANIFEST.tensors
    assert schema_digest([w, emb]) == MANIFEST.schema_digest
    other_values = TensorEntry("emb", "bfloat16", (3, 2), 12, ("00000001",))
    assert schema_digest([other_values, w]) == MANIFEST.schema_digest
    for changed in (
        TensorEntry("emb2", emb.dtype, emb.shape, 12, ()),
        TensorEntry("emb", "float16", emb.shape, 12, ()),
        TensorEntry("emb", emb.dtype, (2, 3), 12, ()),
    ):
        assert schema_digest([changed, w]) != MANIFEST.schema_digest


def test_unknown_fields_are_ignored() -> None:
    document = json.loads(to_json(MANIFEST))
    document["colour"] = {"any": ["thing", 1.5]}
    document["tensors"][0]["note"] = None
    assert from_json(json.dumps(document)) == MANIFEST


def test_entries_of_a_catalog_are_sorted_and_have_a_crc_for_each_slice() -> None:
    slices = tuple(
        SliceRef(SliceSpec((2, 2), (row, 0), (1, 2)), Extent(row, 0, 8, 10 + row)) for row in range(2)
    )
    refs = {
        "z": TensorRef("z", DType.INT64, (), Extent(0, 8, 8, 5)),
        "a": TensorRef("a", DType.FLOAT, (2, 2), slices=slices),
    }
    catalog = Catalog("test", Path("p"), refs, (Path("s"),), (16,))
    assert tensor_entries(catalog) == (
        TensorEntry("a", "float32", (2, 2), 16, ("0000000a", "0000000b")),
        TensorEntry("z", "int64", (), 8, ("00000005",)),
    )


def test_the_origin_tells_no_path_of_the_trainer() -> None:
    assert Origin.of(Path("/home/alice/secret/run7/model.ckpt-5")) == Origin("run7", "model.ckpt-5")
    assert Origin.of(Path("model.ckpt-5")).directory == Path.cwd().name


Damage = Callable[[dict[str, Any]], Any]


def put(*path: str | int, value: Any) -> Damage:
    def damage(document: dict[str, Any]) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return damage


def drop(*path: str) -> Damage:
    def damage(document: dict[str, Any]) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]

    return damage


def repeat(key: str) -> Damage:
    return lambda document: document[key].append(document[key][0])


HOSTILE = {
    "unknown format version": (put("format_version", value=2), "format version 2"),
    "format version as a string": (put("format_version", value="1"), "format_version"),
    "format version as a float": (put("format_version", value=1.0), "format_version"),
    "no format version": (drop("format_version"), "missing required field `format_version`"),
    "unknown kind": (put("kind", value="patch"), "kind"),
    "position true": (put("position", value=True), "position"),
    "position negative": (put("position", value=-1), "position"),
    "position beyond int64": (put("position", value=2**63), "position"),
    "position null": (put("position", value=None), "position"),
    "step as a string": (put("step", value="4100"), "step"),
    "no step": (drop("step"), "missing required field `step`"),
    "lineage as a number": (put("lineage", value=1), "lineage"),
    "source as a string": (put("source", value="run7"), "source"),
    "source with another digest": (
        put("source", value={"directory": "a", "checkpoint": "b", "digest": "0F"}),
        "source.digest",
    ),
    "source without directory": (
        drop("source", "directory"),
        "source: object missing required field `directory`",
    ),
    "local time": (put("created", value="2025-01-31T09:30:00"), "created"),
    "other zone": (put("created", value="2025-01-31T09:30:00+01:00"), "created"),
    "no such day": (put("created", value="2025-02-31T09:30:00Z"), "created"),
    "tensors as an object": (put("tensors", value={}), "tensors"),
    "tensor as a number": (put("tensors", 0, value=1), "tensors[0]"),
    "tensor without name": (drop("tensors", 0, "name"), "missing required field `name`"),  # type: ignore[arg-type]
    "tensor listed twice": (repeat("tensors"), "tensor is listed twice"),
    "unknown dtype": (put("tensors", 0, "dtype", value="float33"), "dtype"),
    "dtype as a number": (put("tensors", 0, "dtype", value=1), "dtype"),
    "negative dimension": (put("tensors", 0, "shape", value=[3, -2]), "shape"),
    "float dimension": (put("tensors", 0, "shape", value=[3.0, 2]), "shape"),
    "shape as a string": (put("tensors", 0, "shape", value="3,2"), "shape"),
    "crc as a number": (put("tensors", 0, "crc32c", value=[7]), "crc32c"),
    "crc too long": (put("tensors", 0, "crc32c", value=["9a4f01c2a"]), "crc32c"),
    "crc in other digits": (put("tensors", 0, "crc32c", value=["９a4f01c2"]), "crc32c"),  # noqa: RUF001
    "another schema": (put("tensors", 0, "shape", value=[2, 3]), "schema_digest"),
    "file listed twice": (repeat("files"), "file is listed twice"),
    "file size negative": (put("files", 0, "bytes", value=-1), "bytes"),
    "file crc not hex": (put("files", 0, "crc32c", value="zzzzzzzz"), "crc32c"),
    "file name endless": (put("files", 0, "path", value="a" * 5000), "path"),
    "text endless": (put("exporter", value="a" * 70_000), "exporter"),
} | {
    f"path {path!r}": (put("files", 0, "path", value=path), "path")
    for path in (
        "",
        "/etc/passwd",
        "../up",
        "a/../../b",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a\0b",
        "manifest.json",
    )
}


@pytest.mark.parametrize(("damage", "named"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_refused_by_name(damage: Damage, named: str) -> None:
    document = json.loads(to_json(MANIFEST))
    damage(document)
    with pytest.raises(ManifestError) as caught:
        from_json(json.dumps(document))
    assert named in f"{caught.value.message} {caught.value.cause}"
    assert caught.value.exit_code is Exit.VERIFICATION


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format_version": 1, "format_version": 1}',
        '{"format_version": NaN}',
        '{"format_version": ' + "9" * 5000 + "}",
        b"\xff\xfe\x00",
        to_json(MANIFEST)[:-20],
        to_json(MANIFEST) + "{}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_what_is_not_one_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(ManifestError):
        from_json(text)
    with pytest.raises(ManifestError):
        head_from_json(text)


@pytest.mark.parametrize(("start", "end"), [(5, 5), (6, 5)])
def test_a_delta_leads_forward(start: int, end: int) -> None:
    delta = Manifest(**{**asdict(MANIFEST), "from_position": start, "position": end})
    with pytest.raises(ManifestError, match="damaged") as caught:
        from_json(to_json(delta))
    assert "from_position" in caught.value.cause


@given(st.binary(max_size=300))
def test_noise_ends_in_the_named_error(noise: bytes) -> None:
    with pytest.raises(ManifestError):
        from_json(noise)

"""Names out of documents that somebody else wrote: none becomes a path outside its directory."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from exporter.bundle.saved_model_writer import place_assets
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.keras_archive import unpack_assets
from exporter.errors import ExportError, ManifestError, NotServable
from exporter.graph.inference_graph import Asset
from exporter.graph.saved_model import load_saved_model
from exporter.graph.source_graph import GraphRequest
from exporter.graph.sources import SourceFile, changed_sources
from exporter.increments.history import read_history
from exporter.jobs.execute import kept_receipt
from exporter.publish.manifest import from_json
from exporter.storage.files import below
from exporter.storage.layout import LONGEST_PATH, PUSHED_FILE, flaw_of
from exporter.storage.output_directory import open_directory
from exporter.training.store import Store
from exporter.wire import protos
from tests.support.archives import keras_archive, npy, zip_of
from tests.support.commands import export_model
from tests.support.directory_store import BUCKET, reached
from tests.support.logs import Trainer
from tests.support.object_stores import BASE, Bucket
from tests.support.remote_models import published_log

URL = f"s3://{BUCKET}/m"
DELTA = f"deltas/{10:020d}/{10:020d}-{20:020d}"

HOSTILE = [
    "{outside}/secret",
    "../../../../../../../../../../../../../../..{outside}/secret",
    "a/../../secret",
    "~/.ssh/authorized_keys",
    "~root",
    "",
    ".",
    "..",
    "a//b",
    "a/./b",
    "a/",
    "a\0b",
    "a\x1b]0;b\x07",
    "a\nb",
    "n" * 300,
    "n/" * 3000 + "n",
    "\ud800",
]
"""`{outside}` is a directory with a secret, which nobody may open or write to."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    found = tmp_path / "outside"
    found.mkdir()
    (found / "secret").write_bytes(b"4200")
    return found


_TOUCHED: list[str] = []
_WATCHED: list[Path] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _WATCHED and event.startswith(("open", "os.", "shutil.")):
        for each in arguments:
            if isinstance(each, str | bytes | os.PathLike):
                path = os.path.realpath(os.fsdecode(each))
                _TOUCHED.extend(path for top in _WATCHED if path.startswith(f"{top}/"))


sys.addaudithook(_note)


@contextmanager
def untouched(outside: Path) -> Iterator[None]:
    """Nothing there is opened, written or removed by this process."""
    _TOUCHED.clear()
    _WATCHED.append(outside)
    try:
        yield
    finally:
        _WATCHED.clear()
    assert _TOUCHED == []
    assert [path.name for path in outside.rglob("*")] == ["secret"]


def names(outside: Path, *, few: bool = False) -> list[str]:
    """All of them; few where each costs a whole command."""
    found = [name.replace("{outside}", str(outside)) for name in HOSTILE]
    return [name for name in found if name[:1] in "/.~" or "\n" in name] if few else found


def test_what_is_no_name(tmp_path: Path, outside: Path) -> None:
    for name in names(outside):
        assert flaw_of(name), name
        with pytest.raises(ManifestError):
            below(tmp_path, name, "it:")
    for name in ("a", "a/b", ".hidden", "a~", "a..b", "ü/Ω", "a b", "\udcff", "n" * 255, "n/" * 2047 + "n"):
        assert not flaw_of(name), name
        assert below(tmp_path, name, "it:") == tmp_path / name
    assert len("n/" * 2047 + "n") == LONGEST_PATH


def test_what_is_written_goes_through_no_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/deltas").symlink_to(outside)
    (tmp_path / "model/secret").symlink_to(outside / "secret")
    for name in ("deltas/hold", "secret"):
        assert below(tmp_path / "model", name, "it:")
        with pytest.raises(ManifestError):
            below(tmp_path / "model", name, "it:", writes=True)


# --- a store -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer, and its model with a base at 10 and a delta to 20: never change it."""
    directory = tmp_path_factory.mktemp("published")
    published_log(directory, 20)
    return directory


@pytest.fixture
def store(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The model in a store whose objects are files of a directory."""
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))
    with reached(tmp_path / "bucket", monkeypatch):
        assert export_model("push", published / "model", URL).code == 0
        (published / "model" / PUSHED_FILE).unlink()
        yield tmp_path / "bucket/m"


def commands(published: Path, scratch: Path) -> list[tuple[object, ...]]:
    """All that read a model in a store."""
    return [
        ("history", URL),
        ("verify", URL, "--bytes"),
        ("doctor", URL),
        ("inspect", URL),
        ("diff", f"{URL}@10", URL),
        ("diff", URL, published / "train"),
        ("merge", URL, "--dry-run"),
        ("rollback", URL, "--to", "10", "--dry-run"),
        ("--ckpt-dir", published / "train", "--out", URL, "--incr", "--dry-run"),
        ("pull", URL, scratch / "copy"),
        ("push", published / "model", URL, "--dry-run"),
        ("push", published / "model", URL),
        ("resume", URL),
    ]


def refused(*arguments: object) -> Any:
    ran = export_model(*arguments, "--json")
    assert ran.code not in (0, 1), (arguments, ran.out, ran.err)
    return ran.error


HEADS: dict[str, Callable[[str], dict[str, Any]]] = {
    "holds": lambda name: {"holds": {name: "10\n"}},
    "path": lambda name: {"path": name},
    "uploading": lambda name: {"uploading": {"path": name, "manifest": "0" * 64, "files": ""}},
    "given_up": lambda name: {"given_up": {name: ""}},
}


@pytest.mark.landing
@pytest.mark.parametrize("field", HEADS)
def test_heads(field: str, store: Path, published: Path, outside: Path, tmp_path: Path) -> None:
    head = json.loads((store / "head.json").read_bytes())
    for number, name in enumerate(names(outside, few=True)):
        if field == "path" and not name:
            continue  # nothing was published yet
        (store / "head.json").write_text(json.dumps(head | HEADS[field](name)))
        for command in commands(published, tmp_path)[:: 1 if number == 0 else 9]:
            with untouched(outside):
                error = refused(*command)["error"]
            assert error in ("ManifestError", "CheckpointError"), (command, name)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "holds",
    ['{"hold": "\\u0100"}', '{"hold": "\xff"}', '{"hold": "' + "1" * 65 + '"}', '{"hold": [1]}', "7"],
)
def test_holds_that_are_none(store: Path, published: Path, holds: str, tmp_path: Path) -> None:
    (store / "head.json").write_bytes(b'{"format_version": 1, "holds": ' + holds.encode("latin-1") + b"}")
    for command in commands(published, tmp_path)[::9]:
        assert refused(*command)["error"] == "ManifestError"


@pytest.mark.landing
def test_what_a_copy_knows_of_its_store(store: Path, published: Path, outside: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert export_model("pull", URL, copy).code == 0
    known = json.loads((copy / PUSHED_FILE).read_bytes())
    documents = [
        json.dumps({URL: known[URL] | change(name)}).encode()
        for name in names(outside, few=True)
        for field, change in HEADS.items()
        if name or field != "path"
    ]
    documents += [b"\xff", b'{"' + URL.encode() + b'": {"path": "\xff"}}', b"[]", b"[" * 100_000, b'{"a": 1}']
    for document in documents:
        (copy / PUSHED_FILE).write_bytes(document)
        for command in (("pull", URL, copy), ("push", copy, URL)):
            with untouched(outside):
                error = refused(*command)
            assert (error["error"], "remove it" in error["hint"]) == ("ManifestError", True), document[:200]
    (copy / PUSHED_FILE).unlink()
    assert export_model("pull", URL, copy).code == 0


@pytest.mark.parametrize("place", ["10", DELTA])
def test_manifests(place: str, store: Path, published: Path, outside: Path, tmp_path: Path) -> None:
    path = store / place / "manifest.json"
    good = json.loads(path.read_bytes())
    for number, name in enumerate([*names(outside, few=True), "manifest.json", "manifest.json/a"]):
        entry = {"path": name, "bytes": 4, "crc32c": None}
        path.write_text(json.dumps(good | {"files": [*good["files"], entry]}))
        some = [("pull", URL, tmp_path / "copy"), ("push", published / "model", URL), ("verify", URL)]
        for command in some[: 3 if number == 0 else 1]:
            with untouched(outside):
                assert refused(*command)["error"] in ("ManifestError", "CheckpointError"), name
    assert not (tmp_path / "copy" / "10").exists() or place == DELTA


def put(bucket: Bucket, key: str) -> None:
    """As a browser's form does: in a request's path `..` would not arrive."""
    form = f'--b\r\nContent-Disposition: form-data; name="key"\r\n\r\n{key}\r\n'
    form += '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n7\r\n--b--\r\n'
    address = f"{bucket.environment['AWS_ENDPOINT_URL']}/{bucket.name}"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    urllib.request.urlopen(urllib.request.Request(address, form.encode(), headers), timeout=30).close()


def test_keys_of_objects(bucket: Bucket, url: str, published: Path, outside: Path, tmp_path: Path) -> None:
    """What a store holds beside the files of a model is not shown as files."""
    assert export_model("push", published / "model", url).code == 0
    (published / "model" / PUSHED_FILE).unlink()
    for place in ("10", f"deltas/{10:020d}/.state/left-out-1", f"deltas/{10:020d}"):
        for name in ("~/secret", "n" * 300):
            put(bucket, f"{BASE}/{place}/{name}")
    for command in (("history", url), ("verify", url), ("pull", url, tmp_path / "copy")):
        with untouched(outside):
            ran = export_model(*command)
        assert ran.code == 0, ran.err
    assert sorted(path.name for path in (tmp_path / "copy").iterdir() if path.is_dir()) == ["10", "deltas"]
    put(bucket, f"{BASE}/10/../../../../../../../..{outside}/secret")  # which obstore refuses to list
    for command in (("history", url), ("verify", url), ("pull", url, tmp_path / "copy")):
        with untouched(outside):
            assert refused(*command)["error"] == "CheckpointError"


# --- local documents ---------------------------------------------------------------------------------------


def test_manifests_of_a_local_model(published: Path, outside: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(published / "model", tmp_path / "model"))
    path = model / DELTA / "manifest.json"
    good = json.loads(path.read_bytes())
    for name in names(outside):
        path.write_text(json.dumps(good | {"files": [{"path": name, "bytes": 4, "crc32c": None}]}))
        with pytest.raises(ManifestError):
            from_json(path.read_bytes())
    with untouched(outside):
        for command in (("verify", model), ("push", model, "s3://nowhere/m")):
            refused(*command)


def test_a_builders_files(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/builder.py").write_text("a = 1\n")
    own = SourceFile("pkg/builder.py", "0" * 64, "0" * 64)
    assert changed_sources([own], tmp_path / "pkg/builder.py") == ["pkg/builder.py"]
    for name in names(outside):
        with untouched(outside):
            with suppress(ManifestError):
                changed_sources([SourceFile(name, "0" * 64, "0" * 64), own], tmp_path / "pkg/builder.py")
            with pytest.raises(ManifestError):
                changed_sources([own, SourceFile(name, "0" * 64, "0" * 64)], tmp_path / "pkg/builder.py")


def test_markers_of_checkpoints(tmp_path: Path, outside: Path) -> None:
    """Increments are pruned by what their markers say."""
    Trainer(tmp_path / "train").save()
    (tmp_path / "train/increments").mkdir()
    marker = tmp_path / "train/increments/model.ckpt-9.json"
    document = {
        "format_version": 1,
        "kind": "milestone",
        "checkpoint": {"name": "gone", "step": 9, "index_sha256": "0" * 64},
        "run": "0" * 32,
        "after": None,
    }
    (outside / "secret").rename(outside / "secret.json")
    try:
        for name in names(outside):
            document["checkpoint"] |= {"name": name}  # type: ignore[operator]
            marker.write_text(json.dumps(document))
            with pytest.raises(ExportError):
                read_history(tmp_path / "train")
            Store(tmp_path / "train").prune()
            assert not marker.exists()
            assert (outside / "secret.json").exists()
    finally:
        (outside / "secret.json").rename(outside / "secret")


def test_receipts(tmp_path: Path, outside: Path) -> None:
    """A receipt that names another output than its own is none."""
    directory = open_directory(str(tmp_path / "job"))
    for name in names(outside):
        receipt = {"task": name, "written": 4, "tag": str((outside / "secret").stat().st_mtime_ns)}
        directory.put("receipts/000000.json", json.dumps(receipt).encode())
        with untouched(outside):
            assert kept_receipt(directory, "000000") is None
    for content in (b"\xff", b'{"task": "\xff"}', b"[" * 100_000, b"7"):
        directory.put("receipts/000000.json", content)
        assert kept_receipt(directory, "000000") is None


# --- checkpoints and graphs --------------------------------------------------------------------------------


def shards_of_safetensors(path: Path, name: str) -> Path:
    found = path / "m.safetensors.index.json"
    found.write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors" if name else name}}))
    return found


def shards_of_keras(path: Path, name: str) -> Path:
    found = path / "m.weights.json"
    found.write_text(json.dumps({"weight_map": {"/layers/dense/vars": name}}))
    return found


def member(path: Path, name: str) -> Path:
    info = zipfile.ZipInfo("x")
    info.filename = name
    return zip_of(path / "m.npz", [(info, npy(np.ones(3)))])


def asset_of_an_archive(path: Path, name: str) -> Path:
    found = keras_archive(path / "m.keras")
    with zipfile.ZipFile(found, "a") as archive:
        info = zipfile.ZipInfo("x")
        info.filename = f"assets/{name}"
        archive.writestr(info, b"words")
    return found


@pytest.mark.parametrize("make", [shards_of_safetensors, shards_of_keras, member, asset_of_an_archive])
def test_files_of_checkpoints(make: Callable[[Path, str], Path], tmp_path: Path, outside: Path) -> None:
    place = tmp_path / "in"
    place.mkdir()
    save_file({"w": np.ones(3)}, outside / "secret.safetensors")
    (outside / "secret.safetensors").rename(tmp_path / "secret.safetensors")
    for name in names(outside):
        is_archive = make in (member, asset_of_an_archive)
        if is_archive and ("\0" in name or "\ud800" in name or name.endswith("/") or not name):
            continue  # `zipfile` itself cuts or refuses these; `a/` is a directory
        if make is shards_of_safetensors and name in (".", ".."):
            continue  # `..safetensors` is a name
        with untouched(outside):
            found = make(place, name)
            with pytest.raises(ExportError) as error:
                open_checkpoint(found)
                unpack_assets(found, tmp_path / "assets")
        kind = "CorruptFile" if (make, name) == (shards_of_safetensors, "\ud800") else "UnsafeArchive"
        assert type(error.value).__name__ == kind, (name, error.value)
    assert not (tmp_path / "assets").exists()


def test_assets_of_saved_models(tmp_path: Path, outside: Path) -> None:
    model = tmp_path / "saved"
    (model / "assets").mkdir(parents=True)
    for name in names(outside):
        if name == "\ud800":
            continue  # a proto's string is UTF-8
        saved = protos.message_class("SavedModel")()
        meta = saved.meta_graphs.add()
        meta.meta_info_def.tags.append("serve")
        meta.asset_file_def.add(filename=name).tensor_info.name = "path:0"
        (model / "saved_model.pb").write_bytes(saved.SerializeToString())
        with untouched(outside), pytest.raises(ExportError) as error:
            load_saved_model(model, GraphRequest(model=str(model)))
        assert "asset" in error.value.message, name


def test_assets_that_are_placed(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "words").write_text("a\n")
    graph = protos.message_class("MetaGraphDef")()
    graph.graph_def.node.add(name="path", op="Const").attr["value"].tensor.dtype = 7
    for name in names(outside):
        if name:
            asset = Asset("path", tmp_path / "words", name)
            with untouched(outside), pytest.raises(NotServable):
                place_assets([asset], graph, tmp_path / "bundle")

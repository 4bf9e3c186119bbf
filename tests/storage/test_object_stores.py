"""Checkpoints in an object store: read as local ones are, and nothing is fetched that is not needed."""

from __future__ import annotations

import builtins
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array
from exporter.errors import CheckpointChanged, CheckpointError, LinkRefused, PublishError
from exporter.options import DataMode, ExportRequest, Verify
from exporter.pipeline.full import export
from exporter.publish.delta_log import read_log
from exporter.storage import mirror, objects
from exporter.storage.layout import INCREMENTS_DIRECTORY, LOCK_FILE
from exporter.storage.mirror import Ranges, private_directory
from exporter.storage.objects import ObjectReader, ObjectWriter
from exporter.storage.requests import GAP_BYTES, PART_BYTES, requests
from exporter.storage.url import Url
from tests.support.bundles import write
from tests.support.commands import export_model
from tests.support.graph_runs import Trained, train
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import SECRET, Bucket
from tests.support.setting import Setting, followed

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS, SLOT_BYTES = 32768, 32768 * 16 * 4


def scorer(v1: Any) -> None:
    import tensorflow as tf

    image = v1.placeholder(tf.float32, [None, ROWS], name="image")
    table = v1.get_variable("w", [ROWS, 16], partitioner=tf.compat.v1.fixed_size_partitioner(3))
    v1.get_variable("w/Adagrad", [ROWS, 16])
    tf.matmul(image, tf.convert_to_tensor(table), name="scores")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("scorer"), scorer)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name of each object that was read, and how many bytes, in order."""
    found: list[tuple[str, int]] = []
    read = ObjectReader.read

    def counted(self: ObjectReader, each: objects.RemoteObject, start: int, stop: int) -> memoryview:
        found.append((each.key.rpartition("/")[2], stop - start))
        return read(self, each, start, stop)

    monkeypatch.setattr(ObjectReader, "read", counted)
    return found


def asked(url: str, out: Path, **options: Any) -> ExportRequest:
    return ExportRequest(
        Path(url), out, inputs={"image": "image:0"}, outputs={"scores": "scores:0"}, **options
    )


def test_what_is_inspected_is_the_index_alone(
    bucket: Bucket, trained: Trained, fetched: list[tuple[str, int]]
) -> None:
    bucket.upload(trained.prefix.parent, "runs/7")
    ran = export_model("inspect", bucket.url("runs/7"), "--json")
    assert ran.code == 0, ran.err
    assert ran.document["prefix"] == bucket.url(f"runs/7/{trained.prefix.name}")
    sizes = {name: size for name, size in fetched if not name.endswith(".meta")}
    assert set(sizes) == {"checkpoint", f"{trained.prefix.name}.index"}
    assert len(sizes) == len([name for name, _ in fetched if not name.endswith(".meta")])


@pytest.mark.parametrize("place", ["runs/7", "runs/7/model.ckpt"])
def test_a_version_has_what_is_served_and_no_other_byte(
    bucket: Bucket, trained: Trained, fetched: list[tuple[str, int]], tmp_path: Path, place: str
) -> None:
    bucket.upload(trained.prefix.parent, "runs/7")
    bucket.put("runs/70/model.ckpt-9.index", b"another run's")
    done = export(asked(bucket.url(place), tmp_path / "m"))
    assert sum(size for name, size in fetched if ".data-" in name) == SLOT_BYTES
    assert sum(file.stat().st_size for file in done.published.path.glob("variables/*.data-*")) == SLOT_BYTES
    catalog = open_checkpoint(done.published.path)
    assert np.array_equal(read_array(catalog, catalog.tensors["w"]), trained.value("w"))
    assert done.published.manifest.source.directory == "7"


def test_verified_by_what_the_trainers_graph_answers(
    bucket: Bucket, trained: Trained, tmp_path: Path
) -> None:
    bucket.upload(trained.prefix.parent, "runs/7")
    request = asked(bucket.url("runs/7"), tmp_path / "m", verify=Verify.OUTPUTS)
    assert export(request).published.version == 1


def test_a_cast_is_written_from_what_is_fetched(bucket: Bucket, trained: Trained, tmp_path: Path) -> None:
    bucket.upload(trained.prefix.parent)
    done = export(asked(bucket.url(), tmp_path / "m", casts=("bfloat16",)))
    local = ExportRequest(
        trained.prefix,
        tmp_path / "local",
        inputs={"image": "image:0"},
        outputs={"scores": "scores:0"},
        casts=("bfloat16",),
    )
    catalogs = [open_checkpoint(found.published.path) for found in (done, export(local))]
    first, second = (read_array(catalog, catalog.tensors["w"]) for catalog in catalogs)
    assert np.array_equal(first, second)


def test_the_guides_commands(bucket: Bucket, ranker: Path, tmp_path: Path) -> None:
    bucket.upload(ranker, "ranker")
    assert export_model("inspect", bucket.url("ranker")).code == 0
    model = f"{EXAMPLES / 'ranker' / 'model.py'}:serving"
    command = ["--ckpt-dir", bucket.url("ranker"), "--model", model, "--out", tmp_path / "m", "--incr"]
    ran = export_model(*command)
    assert (ran.code, "published" in ran.out) == (0, True), ran.err
    assert "nothing to do" in export_model(*command).out


def test_a_retry_is_nothing_to_do(bucket: Bucket, trained: Trained, tmp_path: Path) -> None:
    bucket.upload(trained.prefix.parent, "runs/7")
    command = [
        *("--ckpt-dir", bucket.url("runs/7"), "--out", tmp_path / "m"),
        *("--input", "image=image:0", "--output", "scores=scores:0", "--json"),
    ]
    assert export_model(*command).document["status"] == "published"
    assert export_model(*command).document["status"] == "nothing_to_do"


def test_links_into_a_store_are_refused(bucket: Bucket, trained: Trained, tmp_path: Path) -> None:
    bucket.upload(trained.prefix.parent)
    with pytest.raises(LinkRefused, match="cannot be linked") as refused:
        export(asked(bucket.url(), tmp_path / "m", data=DataMode.LINK))
    assert "object store" in refused.value.cause
    assert not list((tmp_path / "m").glob("[0-9]*"))


def test_deltas_follow_increments_in_a_store(bucket: Bucket, tmp_path: Path) -> None:
    trainer = followed(tmp_path, (20, 30), published=20)
    setting = Setting(tmp_path)
    for step in (40, 50, 60):
        bucket.upload(trainer.directory, "train")
        ran = export_model("--ckpt-dir", bucket.url("train"), "--out", setting.model, "--incr", "--json")
        assert ran.code == 0, ran.err
        assert_same_bits(values_at(read_log(setting.model)), served_now(trainer, Serving()))
        trainer.train()
        trainer.step = step
        trainer.save() if step == 50 else trainer.increment()
    assert read_log(setting.model).at.step == 50


def test_the_marker_of_a_full_checkpoint_is_waited_for_in_a_store(bucket: Bucket, tmp_path: Path) -> None:
    trainer = followed(tmp_path, (20, 30), published=20)
    trainer.train()
    trainer.step = 40
    full = trainer.save()
    marker = trainer.directory / INCREMENTS_DIRECTORY / f"{full.name}.json"
    content = marker.read_bytes()
    marker.unlink()
    bucket.upload(trainer.directory, "train")
    coming = threading.Timer(1.0, bucket.put, (f"train/{INCREMENTS_DIRECTORY}/{marker.name}", content))
    coming.start()
    model = Setting(tmp_path).model
    ran = export_model("--ckpt-dir", bucket.url("train"), "--out", model, "--incr", "--json")
    coming.join()
    assert ran.code == 0, ran.err
    assert "no increment tells yet" in ran.document["why"]


def test_the_differences_of_a_store_and_a_directory(bucket: Bucket, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    bucket.upload(trainer.directory, "train")
    trainer.train()
    trainer.step += 10
    trainer.save()
    ran = export_model("diff", bucket.url("train"), trainer.directory, "--json")
    assert ran.code == 0, ran.err
    same = export_model("diff", tmp_path / "train" / "model.ckpt-10", trainer.directory, "--json")
    assert ran.document["variables"] == same.document["variables"]


def test_what_is_replaced_meanwhile(bucket: Bucket, trained: Trained, tmp_path: Path) -> None:
    bucket.upload(trained.prefix.parent)
    catalog = open_checkpoint(Path(bucket.url()))
    shard = next(path for path in trained.prefix.parent.glob("*.data-*") if path.stat().st_size)
    bucket.put(shard.name, shard.read_bytes()[::-1])
    with pytest.raises(CheckpointChanged, match=rf"s3://{bucket.name}/.* was replaced"):
        read_array(catalog, catalog.tensors["w"])
    bucket.delete(shard.name)
    with pytest.raises(CheckpointChanged, match="vanished"):
        read_array(catalog, catalog.tensors["w"])


def test_what_was_read_is_read_again_once_it_changed(bucket: Bucket, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    bucket.upload(trainer.directory)
    before = open_checkpoint(Path(bucket.url()))
    name = next(iter(trainer.values))
    assert_same_bits({name: read_array(before, before.tensors[name])}, {name: trainer.values[name]})
    step = trainer.step
    trainer.train()
    trainer.step = step
    trainer.save()  # under the same name
    bucket.upload(trainer.directory)
    after = open_checkpoint(Path(bucket.url()))
    assert_same_bits({name: read_array(after, after.tensors[name])}, {name: trainer.values[name]})


def test_damage_on_the_way_is_found(bucket: Bucket, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    shard = next(trainer.directory.glob("*.data-*"))
    shard.write_bytes(bytes(len(shard.read_bytes())))
    bucket.upload(trainer.directory)
    ran = export_model("inspect", bucket.url())
    assert ran.code == 3
    assert f"{bucket.url(shard.name)} is damaged" in ran.err


def test_what_is_not_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("runs/notes.txt", b"")
    for place in ("runs", "nowhere", "runs/notes"):
        ran = export_model("inspect", bucket.url(place), "--json")
        assert (ran.code, ran.error["error"]) == (3, "CheckpointNotFound")
        assert bucket.url("runs" if place == "runs" else "") in ran.error["message"] + ran.error["hint"]
    ran = export_model("inspect", "s3://no-such-bucket-of-ours/x")
    assert ran.code == 3
    assert "there is no bucket s3://no-such-bucket-of-ours" in ran.err
    assert "name one that is there" in ran.err


def test_a_server_that_is_not_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    ran = export_model("inspect", bucket.url("runs"))
    assert ran.code == 3
    assert "no connection" in ran.err
    assert SECRET not in ran.err + ran.out


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "store", "ftp://store", "http://", "http:// s"])
def test_an_endpoint_that_is_no_url(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    ran = export_model("inspect", bucket.url("runs"))
    assert (ran.code, "AWS_ENDPOINT_URL is not the address of a store" in ran.err) == (2, True), ran.err


def test_keys_that_are_no_file_names(bucket: Bucket, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    bucket.upload(trainer.directory, "train")
    bucket.put("train/directory/", b"")  # as consoles mark an empty one
    assert open_checkpoint(Path(bucket.url("train"))).step == trainer.step
    for key in ("train/../../outside", "train//double", "train/./dot"):
        bucket.put(key, b"x")
        with pytest.raises(CheckpointError, match="a name below it is not a path"):
            open_checkpoint(Path(bucket.url("train")))
        bucket.delete(key)


def test_what_a_killed_run_left_is_removed(bucket: Bucket, tmp_path: Path) -> None:
    write(tmp_path / "train" / "model.ckpt-1")
    bucket.upload(tmp_path / "train")
    code = f"""
import os, signal, sys
from pathlib import Path
from exporter.storage.mirror import local
print(local(Path({bucket.url()!r})), flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as first:
        assert first.stdin and first.stdout
        root = Path(first.stdout.readline().strip())
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as second:
            assert second.stdin and second.stdout
            assert Path(second.stdout.readline().strip()).exists()
            assert root.exists(), "its process lives"
            second.stdin.close()
        first.stdin.close()
    assert root.exists(), "its process was killed"
    ran = subprocess.run(
        [sys.executable, "-m", "exporter", "inspect", bucket.url()], env=environment, timeout=60
    )
    assert ran.returncode == 0
    assert not list(tmp_path.glob("export-model-*"))


def test_nobody_removes_a_directory_that_is_just_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / ".export-model-killed"
    killed.mkdir()
    os.utime(killed, (0, 0))
    real, others = fcntl.flock, list[Path]()

    def flock(descriptor: int, operation: int) -> None:
        if not operation & fcntl.LOCK_NB and not others:  # another command begins right before
            others.append(tmp_path)
            others.append(private_directory())
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert (private_directory() / LOCK_FILE).exists()
    assert (others[1] / LOCK_FILE).exists()
    assert not killed.exists()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("obstore"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(mirror, "_MIRRORS", {})
    monkeypatch.setattr(builtins, "__import__", without)
    ran = export_model("inspect", "s3://bucket/x")
    assert ran.code == 2
    assert "pip install '.[stores]'" in ran.err


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=20))
def test_ranges_are_what_was_added(added: list[tuple[int, int]]) -> None:
    ranges, model = Ranges(), set[int]()
    for start, size in added:
        gaps = list(ranges.gaps(start, start + size))
        assert [at for gap in gaps for at in range(*gap)] == [
            at for at in range(start, start + size) if at not in model
        ]
        if size:
            ranges.add(start, start + size)
            model |= set(range(start, start + size))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://b/a//c/", "s3://b/a/c"),
        ("gs:/b", "gs://b"),
        ("S3://Bucket/./a", "s3://Bucket/a"),
        ("az://box/x", "az://box/x"),
        ("hdfs://b/x", None),
        ("s3://key:secret@b/x", None),
        ("plain/path", None),
    ],
)
def test_urls(text: str, shown: str | None) -> None:
    found = Url.parse(text)
    assert (None if found is None else str(found)) == shown


@given(
    st.lists(st.tuples(st.integers(0, 40 << 20), st.integers(1, 12 << 20)), max_size=12),
    st.integers(0, 1 << 20),
)
def test_requests_cover_their_pieces(ranges: list[tuple[int, int]], offset: int) -> None:
    pieces = [(start, start + size, offset + start) for start, size in ranges]
    planned = list(requests(pieces))
    for request in planned:
        assert 0 < request.stop - request.start <= PART_BYTES
        assert min(piece.start for piece in request.pieces) == request.start
        assert max(piece.stop for piece in request.pieces) == request.stop
        stops = accumulate((piece.stop for piece in request.pieces), max, initial=request.start)
        for stop, piece in zip(stops, request.pieces, strict=False):
            assert piece.start - stop <= GAP_BYTES
            assert piece.offset - piece.start == offset
    found = sorted(piece for request in planned for piece in request.pieces)
    assert sum(piece.stop - piece.start for piece in found) == sum(size for _, size in ranges)
    for start, stop, _ in pieces:
        assert any(piece.start == start for piece in found)
        assert any(piece.stop == stop for piece in found)


def test_pieces_that_lie_near_come_by_one_request() -> None:
    first, second = (0, 10, 0), (10 + GAP_BYTES, 20 + GAP_BYTES, 10)
    third = (21 + 2 * GAP_BYTES, 30 + 2 * GAP_BYTES, 20)
    found = [(request.start, request.stop) for request in requests([third, first, second])]
    assert found == [(0, 20 + GAP_BYTES), third[:2]]
    large = (11, PART_BYTES, 10)
    found = [
        (request.start, request.stop) for request in requests([first, large, (PART_BYTES, PART_BYTES + 1, 0)])
    ]
    assert found == [(0, PART_BYTES), (PART_BYTES, PART_BYTES + 1)]


def test_small_tensors_come_together(bucket: Bucket, fetched: list[tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with BundleWriter(tmp_path / "train" / "model.ckpt-1") as writer:
        for number in range(1000):
            writer.add(f"v{number:04d}", np.full([number % 7 + 1, 16], number, np.float32))
    bucket.upload(tmp_path / "train")
    catalog = open_checkpoint(Path(bucket.url("model.ckpt-1")))
    fetched.clear()
    for number in range(0, 1000, 3):
        value = read_array(catalog, catalog.tensors[f"v{number:04d}"])
        assert np.array_equal(value, np.full([number % 7 + 1, 16], number, np.float32))
    assert len(fetched) == 1


def test_one_object_below_several_urls_is_one_file(bucket: Bucket, tmp_path: Path) -> None:
    for key in ("runs/a/x", "runs/a/y"):
        bucket.put(key, b"1")
    shown = mirror.Mirror(objects.Url("s3", bucket.name, "runs"), is_directory=True)
    shown.refresh()
    mirror.register(shown)
    x, y = (mirror.local(Path(bucket.url(f"runs/a/{name}"))) for name in ("x", "y"))
    assert x != shown.path / "a/x"
    assert mirror.is_same_file(x, shown.path / "a/x")
    assert not mirror.is_same_file(y, shown.path / "a/x")
    (tmp_path / "x").write_bytes(b"1")
    assert not mirror.is_same_file(x, tmp_path / "x")
    bucket.put("runs/a/x", b"2")
    shown.refresh()
    assert not mirror.is_same_file(x, shown.path / "a/x"), "it was replaced"


def test_a_file_that_took_an_objects_place_keeps_its_bytes(bucket: Bucket) -> None:
    bucket.put("runs/x", b"theirs")
    path = mirror.local(Path(bucket.url("runs/x")))
    path.with_name("new").write_bytes(b"ours")
    path.with_name("new").replace(path)
    mirror.fetch(path)
    assert path.read_bytes() == b"ours"


def test_what_vanished_before_it_was_copied(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("runs/a", b"1234")
    bucket.put("runs/b", b"1234")
    found = mirror.Mirror(objects.Url("s3", bucket.name, "runs"))
    found.refresh()
    bucket.delete("runs/a")
    with (tmp_path / "target").open("wb") as file:
        with pytest.raises(CheckpointChanged, match="vanished after it was listed"):
            found.copy("runs/a", file.fileno(), [(0, 4, 0)], tmp_path / "target", lambda amount: None)
        found.refresh()
        with pytest.raises(CheckpointChanged, match="vanished after it was listed"):
            found.copy("runs/a", file.fileno(), [(0, 4, 0)], tmp_path / "target", lambda amount: None)


def test_an_export_lists_few_times(
    bucket: Bucket, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many objects there are, and however often they are looked at."""
    listed: list[str] = []
    for name in ("below", "beside"):
        method = getattr(ObjectReader, name)

        def counted(self: ObjectReader, path: str, _name: str = name, _method: Any = method) -> Any:
            listed.append(_name)
            return _method(self, path)

        monkeypatch.setattr(ObjectReader, name, counted)
    bucket.upload(trained.prefix.parent, "runs/7")
    export(asked(bucket.url("runs/7"), tmp_path / "model"))
    assert len(listed) <= 5


def test_a_write_to_a_bucket_that_is_gone_is_refused(bucket: Bucket) -> None:
    gone = Url.parse(f"s3://{bucket.name}-gone/models/x")
    assert gone is not None
    writer = ObjectWriter(gone)
    for put in (writer.put, writer.create):
        with pytest.raises(PublishError, match=f"{bucket.name}-gone/models/x/a"):
            put("models/x/a", b"content")

"""Verification finds every way a bundle can differ from what it should be, and names it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from exporter.catalog import Catalog, SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.errors import CheckpointChanged, Exit, ManifestError, VerificationError
from exporter.jobs.runner import LocalEngine, Runner
from exporter.jobs.task import Input, Range
from exporter.publish.commit import Staging, publish_version
from exporter.publish.manifest import ManifestDraft, Origin, TensorEntry, tensor_entries
from exporter.publish.versions import read_manifest
from exporter.storage.output_directory import open_directory
from exporter.verify.version_files import Checksum, verify_bytes, verify_file, verify_files, verify_published
from exporter.wire.crc32c import chunks_of, combine, crc_of, extend
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.remote_models import published_log
from tests.support.users import as_user, needs_root

PREFIX = Path("variables", "variables")
SHARD = "variables/variables.data-00000-of-00001"
INDEX = "variables/variables.index"


def write_bundle(directory: Path) -> Catalog:
    """Every kind of run: large, small, empty, scalar, in slices, strings."""
    random = np.random.default_rng(7)
    prefix = directory / PREFIX
    prefix.parent.mkdir(parents=True)
    with BundleWriter(prefix) as writer:
        writer.add("a/large", random.random((40, 25), np.float32))
        writer.add("b/empty", np.zeros((0, 3), np.float32))
        writer.add("c/scalar", np.array(7, np.int64))
        for start in (0, 3):
            part = SliceSpec((6, 4), (start, 0), (3, 4))
            writer.add("d/sliced", random.random((3, 4)).astype(np.float16), part)
        writer.add("e/words", np.array([b"", b"one", b"x" * 300], object))
    (directory / "saved_model.pb").write_bytes(b"a graph")
    return read_catalog(prefix)


def publish_bundle(model: Path) -> Path:
    with Staging(model) as staging:
        tensors = tensor_entries(write_bundle(staging.path))
        draft = ManifestDraft(
            tensors=tensors, source=Origin("run7", "model.ckpt-5"), exporter="0.1.0", step=5
        )
        return publish_version(staging, draft).path


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


# --- files -------------------------------------------------------------------------------------------------


def test_a_published_version_is_what_its_manifest_says(tmp_path: Path) -> None:
    version = publish_bundle(tmp_path)
    assert verify_published(version) == ()


def test_a_staged_bundle_is_what_its_catalog_says(tmp_path: Path) -> None:
    catalog = write_bundle(tmp_path)
    assert verify_files(tmp_path, tensor_entries(catalog)) == ()


def test_a_model_without_variables(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").touch()
    assert verify_files(tmp_path, ()) == ()


def test_files_that_nobody_listed_are_reported(tmp_path: Path) -> None:
    version = publish_bundle(tmp_path)
    (version / "assets").mkdir()
    (version / "assets" / "vocabulary.txt").touch()
    assert verify_published(version) == ("assets/vocabulary.txt",)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("name", ["saved_model.pb", INDEX, SHARD])
@pytest.mark.parametrize("damage", [Path.unlink, cut, grow, to_directory, to_link])
def test_a_file_that_is_not_the_listed_one(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    version = publish_bundle(tmp_path)
    damage(version / name)
    with pytest.raises(VerificationError, match=Path(name).name) as caught:
        verify_published(version)
    assert caught.value.exit_code is Exit.VERIFICATION


@pytest.mark.parametrize("name", ["saved_model.pb", INDEX])
def test_a_flipped_bit_in_a_small_file(tmp_path: Path, name: str) -> None:
    version = publish_bundle(tmp_path)
    flip(version / name, 5)
    with pytest.raises(VerificationError, match="has checksum"):
        verify_published(version)


@needs_root
def test_files_that_this_user_may_not_look_at_are_not_called_missing() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own keeps other users out
        Path(name).chmod(0o755)
        version = publish_bundle(Path(name, "model"))
        entry = next(each for each in read_manifest(version).files if each.path == INDEX)
        for path in (version.parent, version, *version.rglob("*")):
            path.chmod(0o755)
        (version / "variables").chmod(0o700)

        def looked() -> list[str]:
            checks = (lambda: verify_published(version), lambda: verify_file(version, entry))
            return [_failure(check) for check in checks]

        assert as_user(65534, looked) == ["PermissionError", "PermissionError"]


def _failure(check: Callable[[], object]) -> str:
    try:
        check()
    except (VerificationError, OSError) as error:
        return type(error).__name__
    return ""


def test_a_version_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        verify_published(tmp_path)


@pytest.mark.parametrize("name", ["saved_model.pb", INDEX, SHARD])
def test_a_staged_bundle_that_lacks_a_file(tmp_path: Path, name: str) -> None:
    expected = tensor_entries(write_bundle(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(VerificationError, match=Path(name).name):
        verify_files(tmp_path, expected)


def test_a_staged_index_that_is_damaged(tmp_path: Path) -> None:
    expected = tensor_entries(write_bundle(tmp_path))
    flip(tmp_path / INDEX, 20)
    with pytest.raises(VerificationError, match="damaged"):
        verify_files(tmp_path, expected)


def test_a_staged_shard_that_is_too_short(tmp_path: Path) -> None:
    expected = tensor_entries(write_bundle(tmp_path))
    cut(tmp_path / SHARD)
    with pytest.raises(VerificationError, match=r"has .* bytes"):
        verify_files(tmp_path, expected)


def with_tensor(entries: tuple[TensorEntry, ...], changed: str, **changes: object) -> list[TensorEntry]:

    return [structs.replace(entry, **changes) if entry.name == changed else entry for entry in entries]  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"shape": (25, 40)}, {"crc32c": ("00000001",)}, {"bytes_": 3}])
def test_a_tensor_that_is_described_otherwise(tmp_path: Path, changes: dict[str, object]) -> None:
    expected = with_tensor(tensor_entries(write_bundle(tmp_path)), "a/large", **changes)
    with pytest.raises(VerificationError, match="another tensor 'a/large'") as caught:
        verify_files(tmp_path, expected)
    assert "float32[40, 25], 4000 bytes" in caught.value.cause


def test_a_tensor_that_is_missing_or_unexpected(tmp_path: Path) -> None:
    entries = tensor_entries(write_bundle(tmp_path))
    with pytest.raises(VerificationError, match="lacks tensor 'f'"):
        verify_files(tmp_path, with_tensor(entries, "a/large", name="f"))
    with pytest.raises(VerificationError, match="1 unexpected tensors, the first is 'a/large'"):
        verify_files(tmp_path, entries[1:])


# --- bytes -------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.lock, self.total = threading.Lock(), 0

    def advance(self, amount: int) -> None:
        with self.lock:
            self.total += amount


@pytest.fixture(params=[37, 1 << 20], ids=["many pieces", "one batch"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(task_bytes=request.param)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_intact_bytes(tmp_path: Path, runner: Runner, workers: int) -> None:
    catalog, progress = write_bundle(tmp_path), Counter()
    runner = structs.replace(runner, engine=LocalEngine(workers))
    assert verify_bytes(catalog, runner=runner, progress=progress) == catalog.bytes_
    assert progress.total == catalog.bytes_


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return write_bundle(tmp_path_factory.mktemp("bundle"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=times(60), deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_tensor_named(
    intact: Catalog, runner: Runner, data: st.DataObject
) -> None:
    shard = intact.shards[0]
    position = data.draw(st.integers(0, shard.stat().st_size - 1))
    mask = 1 << data.draw(st.integers(0, 7))
    name, extent = next(
        (ref.name, extent)
        for ref in intact.tensors.values()
        for extent in ref.extents
        if extent.offset <= position < extent.offset + extent.size
    )
    flip(shard, position, mask)
    try:
        with pytest.raises(VerificationError) as caught:
            verify_bytes(intact, runner=runner)
    finally:
        flip(shard, position, mask)
    assert repr(name) in caught.value.message
    assert f"{shard}, bytes {extent.offset}-{extent.offset + extent.size}" in caught.value.message
    assert verify_bytes(intact) == intact.bytes_


def test_the_first_damage_in_the_file_is_the_one_named(tmp_path: Path, runner: Runner) -> None:
    catalog = write_bundle(tmp_path)
    for name in ("c/scalar", "a/large"):
        flip(catalog.shards[0], catalog.tensors[name].extents[0].offset)
    with pytest.raises(VerificationError, match="a/large"):
        verify_bytes(catalog, runner=runner)


def test_only_kept_ranges_are_read(tmp_path: Path) -> None:
    catalog = write_bundle(tmp_path)
    flip(catalog.shards[0], 0)
    kept = {name: ref for name, ref in catalog.tensors.items() if name != "a/large"}
    assert verify_bytes(structs.replace(catalog, tensors=kept)) == catalog.bytes_ - 4000


def test_a_run_that_two_names_share_is_read_once(tmp_path: Path) -> None:
    catalog, progress = write_bundle(tmp_path), Counter()
    large = catalog.tensors["a/large"]
    verify_bytes(structs.replace(catalog, tensors={"a": large, "b": large}), progress=progress)
    assert progress.total == 4000


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_bytes_that_are_not_there(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    catalog = write_bundle(tmp_path)
    damage(catalog.shards[0])
    with pytest.raises(VerificationError, match="data-00000-of-00001"):
        verify_bytes(catalog)


@pytest.mark.parametrize("missing", [1, 5000, 1 << 20])
def test_what_a_file_does_not_hold_has_no_checksum(tmp_path: Path, missing: int) -> None:
    """Each caller asks for what the file held when it looked, so it was cut in between."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 19))
    with path.open("rb") as file:
        end = (3 << 19) + missing
        for read in (crc_of, lambda *asked: list(chunks_of(*asked))):
            with pytest.raises(EOFError, match=f"before byte {end}") as caught:
                read(file.fileno(), 10, end - 10)
            assert isinstance(caught.value, OSError), "a caller names the file, as for any other"
    task = Checksum(name="0", inputs=(Input.of(path),), bytes_=end, ranges=(Range(0, 0, end),))
    with pytest.raises(CheckpointChanged, match=f"{path} became shorter"):
        task.run(open_directory(str(tmp_path)))


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_checksums_of_parts_make_the_checksum_of_the_whole(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = combine(crc, extend(0, part), len(part))
    assert crc == extend(0, b"".join(parts))


def test_a_version_under_a_second_number(tmp_path: Path) -> None:
    """By hand, in place of a rollback: its manifest tells of the first, and of no other way to it."""
    plain, updatable = tmp_path / "plain", published_log(tmp_path, 20)
    publish_bundle(plain)
    for model, first, second in ((plain, "5", "6"), (updatable, "10", "50")):
        assert export_model("verify", model).code == 0
        shutil.copytree(model / first, model / second)
        ran = export_model("verify", model, "--json")
        assert (ran.code, ran.error["error"]) == (6, "ManifestError"), ran.out
        assert str(model / second) in ran.error["message"]
        is_copy = "is a copy of" in ran.error["message"]
        assert is_copy or "copied" in ran.error["cause"]
        assert not is_copy or f"export-model rollback {model} --to {first}" in ran.error["hint"]
        assert export_model("push", model, "s3://nowhere/m", "--json").error["error"] == "ManifestError"
        found = export_model("doctor", model, "--json")
        assert (found.code, str(model / second) in found.out) == (6, True), found.out
    ran = export_model("--ckpt-dir", tmp_path / "train", "--out", updatable, "--incr", "--json")
    assert (ran.code, ran.error["error"]) == (6, "ManifestError")
    shutil.rmtree(updatable / "50")
    (delta,) = updatable.glob("deltas/*/*-*")
    delta.rename(delta.with_name(f"{10:020d}-{21:020d}"))
    assert export_model("verify", updatable, "--json").error["error"] == "ManifestError"

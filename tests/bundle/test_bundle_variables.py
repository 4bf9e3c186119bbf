"""`variables/`: links, copies, compaction; what is shared, what moved, every way in which a link fails."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.bundle import link
from exporter.bundle.link import ByteRange, NewFile, coalesce, copy_ranges
from exporter.bundle.variables import (
    LITTLE_KEPT,
    ShardOrigin,
    VariablesReport,
    plan_shards,
    why_not_by_rows,
    write_variables,
)
from exporter.catalog import Catalog, Extent, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import CheckpointChanged, CheckpointError, LinkRefused, PublishError, TargetNotWritable
from exporter.graph.inference_graph import GraphVariable
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.options import DataMode
from exporter.terminal.progress import NoProgress
from exporter.wire.dtypes import DType
from tests.support.budget import times
from tests.support.values import tensor, variable

RNG = np.random.default_rng(7)


def checkpoint(prefix: Path, **extra: np.ndarray) -> Catalog:
    """Kept tensors between slots: one whole, one in slices, one empty, one scalar, one of strings."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    table = RNG.normal(size=(10, 3)).astype(np.float32)
    with BundleWriter(prefix) as writer:
        writer.add("a/slot", RNG.normal(size=50))
        writer.add("dense", RNG.normal(size=(4, 5)).astype(np.float32))
        writer.add("empty", np.zeros((0, 3), np.float32))
        writer.add("scale", np.float64(3.5))
        writer.add("b/slot", RNG.normal(size=30))
        for start, length in ((0, 4), (4, 6)):
            spec = SliceSpec((10, 3), (start, 0), (length, 3))
            writer.add("table", table[start : start + length], spec)
        writer.add("words", np.array([b"x", b"", b"long" * 50], object))
        for name, array in extra.items():
            writer.add(name, array)
    return read_catalog(prefix)


KEPT = ("dense", "empty", "scale", "table", "words")


def keep(catalog: Catalog, *names: str, prefix: str = "") -> VariableMapping:
    """A mapping of whole variables under the names `prefix` + name."""
    sources = []
    for name in names or KEPT:
        ref = catalog.tensors[name]
        variable = GraphVariable(prefix + name, prefix + name, ref.dtype, ref.shape)
        sources.append(TensorSource(prefix + name, (variable,), ref))
    return VariableMapping(catalog, tuple(sources), ())


def assert_values(report: VariablesReport, mapping: VariableMapping) -> None:
    """The bundle on disk is the one reported, and holds the mapping's values (checksums verified)."""
    bundle = read_catalog(report.catalog.prefix)
    assert bundle.tensors == report.catalog.tensors
    assert bundle.shards == report.catalog.shards and bundle.shard_sizes == report.catalog.shard_sizes
    assert bundle.tensors.keys() == {source.key for source in mapping.sources}
    for source in mapping.sources:
        expected = read_array(mapping.catalog, source.tensor)
        np.testing.assert_array_equal(read_array(bundle, bundle.tensors[source.key]), expected, strict=True)


def how(report: VariablesReport) -> list[ShardOrigin]:
    return [shard.how for shard in report.shards]


@pytest.fixture
def other_file_system() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


class Bytes:
    """Progress that adds up."""

    total = 0

    def advance(self, amount: int) -> None:
        self.total += amount


@pytest.mark.parametrize("data", list(DataMode))
def test_every_mode_gives_the_same_values_under_new_names(tmp_path: Path, data: DataMode) -> None:
    mapping = keep(checkpoint(tmp_path / "model.ckpt"), prefix="model/")
    progress = Bytes()
    report = write_variables(mapping, tmp_path / "1", data=data, progress=progress)
    assert_values(report, mapping)
    assert progress.total == report.bytes_linked + report.bytes_copied


class TestLink:
    def test_a_shard_is_the_trainers_own_file_and_nothing_else_is_written(self, tmp_path: Path) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        report = write_variables(mapping, tmp_path / "1")
        (shard,) = report.shards
        assert shard.how is ShardOrigin.LINKED and shard.why == ""
        assert shard.path.stat().st_ino == mapping.catalog.shards[0].stat().st_ino
        assert report.bytes_linked == mapping.catalog.shard_sizes[0]
        written = [path for path in (tmp_path / "1").rglob("*") if path.is_file() and path != shard.path]
        assert [path.name for path in written] == ["variables.index"]
        assert written[0].stat().st_size < 1000

    def test_a_terabyte_is_linked(self, tmp_path: Path) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        os.truncate(catalog.shards[0], 1 << 40)
        quarter = TensorRef("table", DType.FLOAT, (1 << 36,), Extent(0, 0, 1 << 38, 0))
        catalog = replace(read_catalog(catalog.prefix), tensors={"table": quarter})
        report = write_variables(keep(catalog, "table"), tmp_path / "1")
        assert report.bytes_linked == 1 << 40 and report.bytes_copied == 0

    def test_only_used_shards_are_linked_and_renumbered(self, tmp_path: Path) -> None:
        catalog = merged(*(checkpoint(tmp_path / f"part-{n}", **{f"w{n}": np.full(3, n)}) for n in range(5)))
        mapping = keep(catalog, "w3", "w1")
        report = write_variables(mapping, tmp_path / "1")
        assert [shard.path.name for shard in report.shards] == [
            "variables.data-00000-of-00002",
            "variables.data-00001-of-00002",
        ]
        assert [shard.source for shard in report.shards] == [catalog.shards[1], catalog.shards[3]]
        assert_values(report, mapping)

    def test_the_file_behind_a_symlink_is_linked(self, tmp_path: Path) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        target = tmp_path / "blob"
        catalog.shards[0].rename(target)
        catalog.shards[0].symlink_to(Path("blob"))
        report = write_variables(keep(catalog), tmp_path / "1", data=DataMode.LINK)
        found = report.shards[0].path.lstat()
        assert stat.S_ISREG(found.st_mode) and found.st_ino == target.stat().st_ino

    def test_a_pruned_checkpoint_stays_published(self, tmp_path: Path) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        expected = read_array(catalog, catalog.tensors["dense"])
        report = write_variables(keep(catalog), tmp_path / "1")
        for path in tmp_path.glob("model.ckpt*"):
            path.unlink()
        bundle = read_catalog(report.catalog.prefix)
        np.testing.assert_array_equal(read_array(bundle, bundle.tensors["dense"]), expected)

    def test_another_file_system_is_compacted_to_or_refused(
        self, tmp_path: Path, other_file_system: Path
    ) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        report = write_variables(mapping, other_file_system / "1")
        assert how(report) == [ShardOrigin.COMPACTED] and "EXDEV" in report.shards[0].why
        assert_values(report, mapping)
        with pytest.raises(LinkRefused, match=r"model\.ckpt\.data-00000-of-00001") as caught:
            write_variables(mapping, other_file_system / "2", data=DataMode.LINK)
        assert "EXDEV" in caught.value.cause and "--data auto" in caught.value.hint

    def test_a_shard_that_a_server_could_not_read_is_copied_and_left_alone(self, tmp_path: Path) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        shard = mapping.catalog.shards[0]
        shard.chmod(0o600)
        with umask(0o022):
            report = write_variables(mapping, tmp_path / "1")
            with pytest.raises(LinkRefused) as caught:
                write_variables(mapping, tmp_path / "2", data=DataMode.LINK)
        assert how(report) == [ShardOrigin.COMPACTED] and "mode 0600" in report.shards[0].why
        assert "0600" in caught.value.cause
        assert stat.S_IMODE(report.shards[0].path.stat().st_mode) == 0o644
        assert stat.S_IMODE(shard.stat().st_mode) == 0o600
        assert_values(report, mapping)

    def test_a_private_shard_is_linked_where_new_files_are_private_too(self, tmp_path: Path) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        mapping.catalog.shards[0].chmod(0o600)
        with umask(0o077):
            assert how(write_variables(mapping, tmp_path / "1")) == [ShardOrigin.LINKED]

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
    def test_somebody_elses_file_under_protected_hardlinks_is_compacted(self) -> None:
        if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
            pytest.skip("the kernel lets everybody link everything")
        with tempfile.TemporaryDirectory(dir="/tmp") as name:
            directory = Path(name)
            directory.chmod(0o777)
            checkpoint(directory / "model.ckpt")
            script = """
                import os, sys
                from pathlib import Path
                from exporter.bundle.variables import write_variables
                from exporter.checkpoint.tensor_bundle import read_catalog
                from tests.bundle.test_bundle_variables import keep
                directory = Path(sys.argv[1])
                write_variables(keep(read_catalog(directory / "model.ckpt")), directory / "0")  # late imports
                os.setgid(65534); os.setuid(65534)
                report = write_variables(keep(read_catalog(directory / "model.ckpt")), directory / "1")
                print(report.shards[0].how.value, report.shards[0].why)
            """
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script), name],
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("compacted") and "EPERM" in done.stdout


class TestChanges:
    """The trainer does not wait for us."""

    @pytest.mark.parametrize("data", list(DataMode))
    def test_a_pruned_shard(self, tmp_path: Path, data: DataMode) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        catalog.shards[0].unlink()
        with pytest.raises(CheckpointChanged, match="vanished"):
            write_variables(keep(catalog), tmp_path / "1", data=data)

    @pytest.mark.parametrize("data", list(DataMode))
    @pytest.mark.parametrize("by", [-1, 1])
    def test_a_shard_of_another_size(self, tmp_path: Path, data: DataMode, by: int) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        os.truncate(catalog.shards[0], catalog.shard_sizes[0] + by)
        with pytest.raises(CheckpointChanged, match=rf"has {catalog.shard_sizes[0] + by} bytes now"):
            write_variables(keep(catalog), tmp_path / "1", data=data)

    @pytest.mark.parametrize("how", ["replaced", "written to"])
    def test_a_shard_that_changes_while_it_is_linked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        """Its size is right, and its bytes are another checkpoint's."""
        catalog = checkpoint(tmp_path / "model.ckpt")
        link = os.link

        def late(source: Path, target: Path) -> None:
            newer = source.with_name("newer")
            shutil.copyfile(source, newer) if how == "replaced" else os.utime(source, ns=(0, 0))
            if how == "replaced":
                newer.replace(source)
            link(source, target)

        monkeypatch.setattr(os, "link", late)
        with pytest.raises(CheckpointChanged, match="while it was linked"):
            write_variables(keep(catalog), tmp_path / "1", data=DataMode.LINK)

    def test_a_shard_that_shrinks_during_the_copy(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(bytes(1000))
        with ThreadPoolExecutor(1) as pool, pytest.raises(CheckpointChanged, match="became shorter"):
            copy_ranges(
                source,
                tmp_path / "target",
                [ByteRange(500, 0, 600)],
                size=1000,
                pool=pool,
                progress=NoProgress(),
            )

    def test_a_shard_that_is_written_during_the_copy(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(bytes(link.BATCH_BYTES + 1))

        class Trainer:
            """Writes as soon as the first piece is copied."""

            def advance(self, amount: int) -> None:
                os.utime(source, ns=(0, 0))

        whole = ByteRange(0, 0, link.BATCH_BYTES + 1)
        with ThreadPoolExecutor(1) as pool, pytest.raises(CheckpointChanged, match="written to while"):
            copy_ranges(source, tmp_path / "target", [whole], size=whole.size, pool=pool, progress=Trainer())

    @pytest.mark.parametrize("data", list(DataMode))
    def test_a_shard_that_cannot_be_opened(self, tmp_path: Path, data: DataMode) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        catalog.shards[0].unlink()
        catalog.shards[0].symlink_to(catalog.shards[0].name)
        with pytest.raises(CheckpointError, match="cannot read") as caught:
            write_variables(keep(catalog), tmp_path / "1", data=data)
        assert "symbolic links" in caught.value.cause


class TestTarget:
    def test_a_directory_in_use_is_not_overwritten(self, tmp_path: Path) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        write_variables(mapping, tmp_path / "1")
        with pytest.raises(PublishError, match="variables"):
            write_variables(mapping, tmp_path / "1")

    def test_a_file_in_the_way_is_named(self, tmp_path: Path) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(TargetNotWritable, match="file"):
            write_variables(mapping, tmp_path / "file")

    @pytest.mark.parametrize("data", [DataMode.COPY, DataMode.COMPACT])
    def test_a_full_disk_is_named(self, tmp_path: Path, data: DataMode) -> None:
        """A limit on the size of files stands for a disk: the same calls fail, with EFBIG."""
        checkpoint(tmp_path / "model.ckpt", big=np.zeros(100_000))
        script = """
            import resource, signal, sys
            from pathlib import Path
            from exporter.bundle.variables import write_variables
            from exporter.checkpoint.tensor_bundle import read_catalog
            from exporter.errors import PublishError
            from exporter.options import DataMode
            from tests.bundle.test_bundle_variables import keep
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
            root = Path(sys.argv[1])
            try:
                mapping = keep(read_catalog(root / "model.ckpt"), "big")
                write_variables(mapping, root / "1", data=DataMode(sys.argv[2]))
            except PublishError as error:
                print(type(error).__name__, error.message)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), data.value],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(("PublishError", "DiskFull")), done.stdout
        assert "variables.data-00000-of-00001" in done.stdout

    def test_a_model_without_variables_writes_nothing(self, tmp_path: Path) -> None:
        report = write_variables(
            replace(keep(checkpoint(tmp_path / "model.ckpt")), sources=()), tmp_path / "1"
        )
        assert report.shards == () and not (tmp_path / "1").exists()


class TestCompact:
    def test_only_kept_bytes_are_written_in_their_order(self, tmp_path: Path) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt"))
        report = write_variables(mapping, tmp_path / "1", data=DataMode.COMPACT)
        kept = sum(source.tensor.bytes_ for source in mapping.sources)
        assert report.shards[0].path.stat().st_size == report.bytes_copied == kept
        assert kept < mapping.catalog.shard_sizes[0] / 2
        moved = sorted(extent.offset for ref in report.catalog.tensors.values() for extent in ref.extents)
        assert moved[0] == 0

    def test_checksums_come_from_the_source_so_that_damage_is_found_later(self, tmp_path: Path) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        extent = catalog.tensors["dense"].extents[0]
        with catalog.shards[0].open("r+b") as file:
            file.seek(extent.offset)
            file.write(b"\x55")
        report = write_variables(keep(catalog), tmp_path / "1", data=DataMode.COMPACT)
        assert report.catalog.tensors["dense"].extents[0].crc32c == extent.crc32c

    def test_one_range_for_two_names_is_written_once(self, tmp_path: Path) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        mapping = keep(catalog, "dense")
        twin = replace(mapping.sources[0], key="twin")
        mapping = replace(mapping, sources=(*mapping.sources, twin))
        report = write_variables(mapping, tmp_path / "1", data=DataMode.COMPACT)
        assert report.bytes_copied == catalog.tensors["dense"].bytes_
        assert_values(report, mapping)

    def test_a_declared_slice_that_is_not_stored_stays_so(self, tmp_path: Path) -> None:
        catalog = checkpoint(tmp_path / "model.ckpt")
        table = catalog.tensors["table"]
        table = replace(table, slices=(table.slices[0], replace(table.slices[1], extent=None)))
        catalog = replace(catalog, tensors={"table": table})
        report = write_variables(keep(catalog, "table"), tmp_path / "1", data=DataMode.COMPACT)
        stored = read_catalog(report.catalog.prefix).tensors["table"]
        assert [part.extent is None for part in stored.slices] == [False, True]


class TestLittleKept:
    """A link to a shard of which little is kept would hold the rest as long as the version lives."""

    @pytest.mark.parametrize(("others", "origin"), [(7, ShardOrigin.LINKED), (8, ShardOrigin.COMPACTED)])
    def test_an_eighth_is_linked_and_less_is_copied(
        self, tmp_path: Path, others: int, origin: ShardOrigin
    ) -> None:
        with BundleWriter(tmp_path / "model.ckpt") as writer:
            for number in range(1 + others):
                writer.add(f"w{number}", np.arange(100 * number, 100 * number + 100, dtype=np.int32))
        mapping = keep(read_catalog(tmp_path / "model.ckpt"), "w5")
        report = write_variables(mapping, tmp_path / "1")
        (shard,), (planned,) = report.shards, plan_shards(mapping, tmp_path / "1", DataMode.AUTO)
        assert (planned.how, planned.why, planned.bytes_) == (shard.how, shard.why, shard.bytes_)
        assert shard.how is origin and shard.source_bytes == 400 * (1 + others)
        assert (shard.path.stat().st_ino == mapping.catalog.shards[0].stat().st_ino) is (others == 7)
        assert shard.path.stat().st_size == (400 if others == 8 else 3200)
        assert_values(report, mapping)

    def test_it_is_decided_shard_by_shard(self, tmp_path: Path) -> None:
        """A table in two shards, as its partitions lie in a cluster; a scalar lies in a third one."""
        large, small = RNG.normal(size=1000), RNG.normal(size=1)
        parts = [
            checkpoint(tmp_path / "0", first=large),
            checkpoint(tmp_path / "1", second=large),
            checkpoint(tmp_path / "2", scalar=small, slot=large),
        ]
        mapping = keep(merged(*parts), "scalar", "first", "second")
        report = write_variables(mapping, tmp_path / "served")
        assert how(report) == [ShardOrigin.LINKED, ShardOrigin.LINKED, ShardOrigin.COMPACTED]
        assert [shard.why for shard in report.shards] == ["", "", LITTLE_KEPT]
        assert report.bytes_copied == 8
        assert_values(report, mapping)

    @pytest.mark.parametrize(
        ("data", "origin"), [(DataMode.LINK, ShardOrigin.LINKED), (DataMode.COPY, ShardOrigin.COPIED)]
    )
    def test_who_asks_for_whole_shards_gets_them(
        self, tmp_path: Path, data: DataMode, origin: ShardOrigin
    ) -> None:
        mapping = keep(checkpoint(tmp_path / "model.ckpt", slot=RNG.normal(size=1000)))
        assert how(write_variables(mapping, tmp_path / "1")) == [ShardOrigin.COMPACTED]
        report = write_variables(mapping, tmp_path / "2", data=data)
        assert how(report) == [origin] and report.shards[0].bytes_ == mapping.catalog.shard_sizes[0]
        assert_values(report, mapping)


class TestKernelCopy:
    @given(
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12).map(sorted),
        st.integers(1, 16),
    )
    @settings(max_examples=times(60), deadline=None)
    def test_ranges_are_packed_and_hold_every_extent(
        self, extents: list[tuple[int, int]], batch: int
    ) -> None:
        data = bytes(range(100))
        ranges = coalesce(extents)
        for first, second in pairwise(ranges):
            assert second.target == first.target + first.size
            assert second.source != first.source + first.size, "neighbours are one range"
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            source, target = Path(name, "source"), Path(name, "target")
            source.write_bytes(data)
            patch.setattr(link, "BATCH_BYTES", batch)
            with ThreadPoolExecutor(2) as pool:
                copy_ranges(source, target, ranges, size=100, pool=pool, progress=NoProgress())
            packed = target.read_bytes()
        assert packed == b"".join(data[piece.source : piece.source + piece.size] for piece in ranges)
        for offset, size in extents:
            holders = [p for p in ranges if p.source <= offset and offset + size <= p.source + p.size]
            assert holders

    def test_bytes_pass_through_memory_where_the_kernel_does_not_copy(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(RNG.bytes(1_000_000))
        with (
            source.open("rb") as reader,
            (tmp_path / "target").open("wb") as writer,
        ):
            copied = link._copy_through_memory(reader.fileno(), writer.fileno(), ByteRange(1, 3, 999_999))
        assert copied == 999_999
        assert (tmp_path / "target").read_bytes() == bytes(3) + source.read_bytes()[1:]


@pytest.mark.parametrize(
    ("new", "old", "lost"),
    [
        # (mode, uid, gid) of a new file, of the trainer's shard; who would lose access
        ((0o644, 1, 1), (0o644, 1, 1), ""),
        ((0o644, 1, 1), (0o644, 2, 2), ""),
        ((0o644, 1, 1), (0o444, 2, 2), ""),
        ((0o644, 1, 1), (0o640, 1, 1), "others"),
        ((0o640, 1, 1), (0o640, 1, 1), ""),
        ((0o640, 1, 1), (0o640, 2, 1), ""),
        ((0o640, 1, 1), (0o640, 1, 2), "group"),
        ((0o640, 1, 1), (0o600, 1, 1), "group"),
        ((0o600, 1, 1), (0o600, 1, 1), ""),
        ((0o600, 1, 1), (0o600, 2, 1), "owner"),
        ((0o600, 1, 1), (0o640, 2, 1), ""),
        ((0o600, 1, 1), (0o040, 1, 1), "owner"),
    ],
)
def test_who_could_no_longer_read(new: tuple[int, int, int], old: tuple[int, int, int], lost: str) -> None:
    mode, uid, gid = old
    other = os.stat_result((mode | stat.S_IFREG, 1, 1, 1, uid, gid, 0, 0, 0, 0))
    assert NewFile(*new).readers_lost_by(other) == lost


def test_scalars_and_strings_are_no_rows() -> None:
    for ref in (tensor("t"), tensor("t", 4, dtype=DType.STRING)):
        source = TensorSource("t", (variable("t", *ref.shape, dtype=ref.dtype),), ref)
        assert why_not_by_rows(source) == "it is not an array of rows"
    assert not why_not_by_rows(TensorSource("t", (variable("t", 4, 2),), tensor("t", 4, 2)))


def test_new_files_are_looked_at_and_removed(tmp_path: Path) -> None:
    with umask(0o027):
        found = NewFile.in_directory(tmp_path)
    assert stat.S_IMODE(found.mode) == 0o640
    assert list(tmp_path.iterdir()) == []


def merged(*catalogs: Catalog) -> Catalog:
    """One checkpoint whose shards are those of several; the last tensor of a name stays."""
    tensors = {}
    for shard, catalog in enumerate(catalogs):
        for name, ref in catalog.tensors.items():
            move = lambda extent, shard=shard: extent and replace(extent, shard=shard)  # noqa: E731
            slices = tuple(replace(part, extent=move(part.extent)) for part in ref.slices)
            tensors[name] = replace(ref, extent=move(ref.extent), slices=slices)
    shards = tuple(catalog.shards[0] for catalog in catalogs)
    return replace(
        catalogs[0],
        tensors=tensors,
        shards=shards,
        shard_sizes=tuple(path.stat().st_size for path in shards),
    )


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_target_that_exists_is_not_written_into(tmp_path: Path) -> None:
    """It may be another name of a published file."""
    source, published, target = (tmp_path / name for name in ("source", "published", "target"))
    source.write_text("new")
    published.write_text("old")
    for there in (published, source):
        target.unlink(missing_ok=True)
        target.hardlink_to(there)
        with pytest.raises(FileExistsError):
            link.link_or_copy(source, target)
        assert (published.read_text(), source.read_text()) == ("old", "new")

"""Both directions against TensorFlow's own kernels, bit for bit."""

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.catalog import Catalog, SliceSpec, TensorRef
from exporter.checkpoint import tensor_values
from exporter.checkpoint.sstable import read_table
from exporter.checkpoint.tensor_bundle import (
    BundleWriter,
    check_values,
    encode_index,
    index_path,
    memory_map,
    read_array,
    read_catalog,
    shard_path,
)
from exporter.checkpoint.tensor_values import checked_map, read_blocks
from exporter.errors import CheckpointChanged, CorruptFile, UnsupportedFormat
from exporter.wire.dtypes import DType
from tests.support.budget import times
from tests.support.bundles import entry, header, restore, save, save_parts, write, write_index

Array = np.ndarray[Any, Any]

LATER = ("int2", "uint2", "float4_e2m1fn")
"""What an ml-dtypes of TensorFlow 2.15's years lacks."""
NUMERIC = [
    dtype
    for dtype in DType
    if (dtype.label not in LATER or hasattr(ml_dtypes, dtype.label))
    if dtype.itemsize and not dtype.name.startswith("Q")
]
SMALL_RANGE = {
    DType.INT4: (-8, 8),
    DType.UINT4: (0, 16),
    DType.INT2: (-2, 2),
    DType.UINT2: (0, 4),
    DType.BOOL: (0, 2),
}

quick = settings(
    max_examples=times(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = draw(st.sampled_from([*NUMERIC, DType.STRING]))
    if dtype is DType.STRING:
        count = int(np.prod(shape))
        strings = np.empty(count, object)
        strings[:] = draw(st.lists(st.binary(max_size=200), min_size=count, max_size=count))
        return strings.reshape(shape)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    if dtype in SMALL_RANGE:
        return random.integers(*SMALL_RANGE[dtype], shape).astype(dtype.numpy)
    return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.numpy.itemsize), dtype.numpy).reshape(shape)


def assert_same(found: Array, expected: Array) -> None:
    """Equal bits: NaN, -0.0 and all."""
    assert found.shape == expected.shape
    if expected.dtype == object:
        assert found.tolist() == expected.tolist()
    else:
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


def every_value(catalog: Catalog) -> Iterator[tuple[str, Array]]:
    for name, ref in catalog.tensors.items():
        if ref.extent is not None:
            check_values(catalog, ref)
        yield name, read_array(catalog, ref)


def test_our_numbers_of_the_data_types_are_tensorflows() -> None:
    from tensorflow.core.framework import types_pb2

    theirs = {name.removeprefix("DT_"): number for name, number in types_pb2.DataType.items()}
    found = {name: n for name, n in theirs.items() if not name.endswith("_REF") and n}
    assert found.items() <= DType.__members__.items()  # an older TensorFlow has fewer


def test_a_type_that_ml_dtypes_lacks_is_an_error_by_name(tmp_path: Path) -> None:
    write_index(tmp_path / "m", [header(), entry("few bits", dtype=DType.INT2)])
    older = "import ml_dtypes, numpy; vars(ml_dtypes).pop('int2', None); numpy.sctypeDict.pop('int2', None)"
    read = "from pathlib import Path; from exporter.checkpoint.tensor_bundle import read_catalog"
    read += f"; read_catalog(Path({str(tmp_path / 'm')!r}))"
    done = subprocess.run([sys.executable, "-c", f"{older}; {read}"], capture_output=True, text=True)
    assert "UnsupportedFormat" in done.stderr
    assert "'few bits' has the data type int2" in done.stderr


def test_our_numpy_types_are_tensorflows() -> None:
    import tensorflow as tf

    for dtype in NUMERIC:
        assert dtype.numpy == tf.dtypes.as_dtype(int(dtype)).as_numpy_dtype, dtype
        assert DType.of(np.dtype(dtype.numpy).name) is dtype


@quick
@given(st.dictionaries(names, arrays(), min_size=1, max_size=6))
def test_we_read_what_tensorflow_writes(tmp_path: Path, tensors: dict[str, Array]) -> None:
    save(tmp_path / "m", tensors)
    catalog = read_catalog(tmp_path / "m")
    assert set(catalog.tensors) == set(tensors)
    for name, found in every_value(catalog):
        assert_same(found, tensors[name])
        if found.dtype != object:
            assert_same(np.array(memory_map(catalog, catalog.tensors[name])), tensors[name])


@quick
@given(st.dictionaries(names, arrays(), min_size=1, max_size=6))
def test_we_write_the_bytes_that_tensorflow_writes_and_it_reads_them(
    tmp_path: Path, tensors: dict[str, Array]
) -> None:
    save(tmp_path / "theirs", tensors)
    with BundleWriter(tmp_path / "ours") as writer:
        for name, value in tensors.items():
            writer.add(name, value)
    for path_of in (index_path, lambda prefix: shard_path(prefix, 0, 1)):
        assert path_of(tmp_path / "ours").read_bytes() == path_of(tmp_path / "theirs").read_bytes()
    refs = read_catalog(tmp_path / "ours").tensors.values()
    for ref, found in zip(refs, restore(tmp_path / "ours", refs), strict=True):
        assert_same(found, tensors[ref.name])


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.name.startswith("Q")])
def test_quantised_types_hold_their_integers(tmp_path: Path, dtype: DType) -> None:
    import tensorflow as tf

    value = np.array([1, 2, 3], dtype.numpy)
    theirs = tf.bitcast(tf.constant(value), tf.dtypes.as_dtype(int(dtype)))
    tf.raw_ops.SaveV2(prefix=str(tmp_path / "m"), tensor_names=["v"], shape_and_slices=[""], tensors=[theirs])
    catalog = read_catalog(tmp_path / "m")
    assert catalog.tensors["v"].dtype is dtype
    assert_same(read_array(catalog, catalog.tensors["v"]), value)
    with BundleWriter(tmp_path / "ours") as writer:
        writer.add_chunks("v", dtype, (3,), [value])
    assert index_path(tmp_path / "ours").read_bytes() == index_path(tmp_path / "m").read_bytes()


def test_variants_are_checked_but_not_decoded(tmp_path: Path) -> None:
    import tensorflow as tf

    variant = tf.raw_ops.TensorListReserve(element_shape=[2], num_elements=3, element_dtype=tf.float32)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "m"), tensor_names=["v"], shape_and_slices=[""], tensors=[variant]
    )
    catalog = read_catalog(tmp_path / "m")
    check_values(catalog, catalog.tensors["v"])
    for read in (read_array, memory_map):
        with pytest.raises(UnsupportedFormat, match="variant"):
            read(catalog, catalog.tensors["v"])


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[SliceSpec]]:
    """A shape, and boxes that tile it: cut along one axis or two."""
    shape = tuple(draw(st.lists(st.integers(2, 200), min_size=1, max_size=3)))
    boxes: list[list[tuple[int, int]]] = [[]]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
        ranges = list(zip([0, *cuts], [*cuts, size], strict=True))
        boxes = [[*box, (start, end - start)] for box in boxes for start, end in ranges]
    specs = [SliceSpec(shape, *zip(*box, strict=True)) for box in boxes]
    return shape, draw(st.permutations(specs))


@pytest.mark.parametrize("name", ["\0", "\0x", "\0\xff"])
def test_a_partitioned_tensor_whose_name_begins_with_nul(tmp_path: Path, name: str) -> None:
    """Its key stands among those of slices, whose first byte is a NUL, too."""
    whole = np.arange(6, dtype=np.int32).reshape(2, 3)
    specs = [SliceSpec((2, 3), (row, 0), (1, 3)) for row in range(2)]
    parts = [spec.restore_spec for spec in specs]
    save_parts(tmp_path / "theirs", [name, name, "x"], [whole[:1], whole[1:], whole], [*parts, ""])
    catalog = read_catalog(tmp_path / "theirs")
    assert_same(read_array(catalog, catalog.tensors[name]), whole)
    assert_same(read_array(catalog, catalog.tensors["x"]), whole)


@quick
@given(names, partitions(), st.booleans(), st.data())
def test_slices_in_both_directions(
    tmp_path: Path,
    name: str,
    partition: tuple[tuple[int, ...], list[SliceSpec]],
    short: bool,
    data: st.DataObject,
) -> None:
    shape, specs = partition
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    values = [
        whole[
            tuple(
                slice(start, start + length) for start, length in zip(spec.starts, spec.lengths, strict=True)
            )
        ]
        for spec in specs
    ]
    with_dashes = [  # a dimension taken whole, in the short form that TensorFlow accepts
        " ".join(
            [
                *map(str, shape),
                ":".join(
                    "-" if (at, n) == (0, full) else f"{at},{n}"
                    for at, n, full in zip(spec.starts, spec.lengths, shape, strict=True)
                ),
            ]
        )
        for spec in specs
    ]
    save_parts(
        tmp_path / "theirs",
        [name] * len(specs),
        values,
        with_dashes if short else [spec.restore_spec for spec in specs],
    )
    with BundleWriter(tmp_path / "ours") as writer:
        for spec, value in zip(specs, values, strict=True):
            writer.add(name, value, spec)
    for prefix in (tmp_path / "theirs", tmp_path / "ours"):
        catalog = read_catalog(prefix)
        ref = catalog.tensors[name]
        assert ref.is_complete
        assert_same(read_array(catalog, ref), whole)
        for part in ref.slices:
            check_values(catalog, ref, part)
        if len(specs) > 1:
            at = data.draw(st.integers(0, len(specs) - 1))
            mapped = memory_map(catalog, ref, next(part for part in ref.slices if part.spec == specs[at]))
            assert_same(np.array(mapped), values[at])
        again = prefix.with_name("again")
        index_path(again).write_bytes(encode_index([ref], 1))
        shard_path(again, 0, 1).unlink(missing_ok=True)
        shard_path(again, 0, 1).hardlink_to(shard_path(prefix, 0, 1))
        assert_same(restore(again, [ref])[0], whole)
        assert_same(restore(again, [ref], [specs[0].restore_spec])[0], values[0])
    if not short:
        assert index_path(tmp_path / "ours").read_bytes() == index_path(tmp_path / "theirs").read_bytes()


def test_a_sharded_saver_with_partitioned_variables(tmp_path: Path) -> None:
    """What a parameter-server job writes: SaveV2 on each device, a merge, a partitioner's slices."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        for at in range(3):
            with tf.device(f"/cpu:{at}"):
                v1.get_variable(
                    f"dense{at}",
                    [4, 3],
                    use_resource=at % 2 == 0,
                    initializer=v1.random_uniform_initializer(seed=at),
                )
                table = v1.get_variable(
                    f"emb{at}",
                    [10, 4],
                    partitioner=v1.fixed_size_partitioner(3),
                    initializer=v1.random_uniform_initializer(seed=9 + at),
                )
                bias = v1.get_variable(f"bias{at}", [], dtype=tf.bfloat16, initializer=v1.zeros_initializer())
        del table, bias
        v1.train.get_or_create_global_step()
        saver = v1.train.Saver(sharded=True)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 3})) as session:
            session.run(v1.global_variables_initializer())
            prefix = Path(saver.save(session, str(tmp_path / "model.ckpt"), global_step=5))
            values = session.run({v.op.name: v for v in v1.global_variables() if "/part_" not in v.op.name})
    catalog = read_catalog(prefix)
    assert len(catalog.shards) == 4, "one for each device, one for the global step"
    assert catalog.step == 0, "the tensor global_step goes before the name"
    assert {name for name, ref in catalog.tensors.items() if ref.slices} == {"emb0", "emb1", "emb2"}
    theirs, ours = (
        dict(read_table(data, prefix))
        for data in (index_path(prefix).read_bytes(), encode_index(catalog.tensors.values(), 4))
    )
    for at in range(3):  # a merge leaves the number of some shard here, which means nothing
        del ours[b"emb%d" % at], theirs[b"emb%d" % at]
    assert ours == theirs
    reader = tf.train.load_checkpoint(str(prefix))
    for name, found in every_value(catalog):
        assert_same(found, np.asarray(reader.get_tensor(name)))
        if name in values:
            assert_same(found, np.asarray(values[name]))


@pytest.mark.landing
def test_twenty_thousand_names(tmp_path: Path) -> None:
    tensors = {f"model/layer_{at:05d}/κernel/Adam_{at % 3}": np.float32(at) for at in range(20_000)}
    save(tmp_path / "m", tensors)
    catalog = read_catalog(tmp_path / "m")
    assert len(catalog.tensors) == 20_000
    assert all(memory_map(catalog, ref) == tensors[name] for name, ref in catalog.tensors.items())
    theirs = index_path(tmp_path / "m").read_bytes()
    assert len(theirs) > 2 * 262_144, "several blocks"
    assert encode_index(catalog.tensors.values(), 1) == theirs


def test_a_new_index_over_linked_shards_serves_chosen_tensors_under_new_names(tmp_path: Path) -> None:
    save(tmp_path / "m", {"a": np.arange(3.0), "b": np.array([b"x"], object), "c": np.float32(2)})
    catalog = read_catalog(tmp_path / "m")
    kept = [replace(catalog.tensors[name], name=f"served/{name}") for name in "cb"]
    index_path(tmp_path / "new").write_bytes(encode_index(kept, 1))
    shard_path(tmp_path / "new", 0, 1).hardlink_to(catalog.shards[0])
    c, b = restore(tmp_path / "new", kept)
    assert_same(c, np.array(2, np.float32))
    assert b.tolist() == [b"x"]


def test_only_shards_in_use_need_to_exist(tmp_path: Path) -> None:
    write(tmp_path / "m", w=np.zeros(2, np.float32))
    refs = read_catalog(tmp_path / "m").tensors.values()
    index_path(tmp_path / "m").write_bytes(encode_index(refs, 3))
    shard_path(tmp_path / "m", 0, 1).rename(shard_path(tmp_path / "m", 0, 3))
    catalog = read_catalog(tmp_path / "m")
    assert catalog.shard_sizes == (8, 0, 0)
    assert len(catalog.shards) == 3


def test_a_name_that_begins_with_nul_is_a_name(tmp_path: Path) -> None:
    prefix = write_index(tmp_path / "m", [header(), entry("\0w"), entry("w")])
    assert list(read_catalog(prefix).tensors) == ["w", "\0w"]


STEPS = [
    ("model.ckpt-12", {}, 12),
    ("model.ckpt", {}, None),
    ("cp-0003.ckpt", {}, None),
    ("model.ckpt-12", {"global_step": np.int64(34)}, 34),
    ("model.ckpt", {"global_step": np.int32(5)}, 5),
    ("model.ckpt-12", {"global_step": np.int64(-1)}, 12),
    ("model.ckpt-12", {"global_step": np.float32(34)}, 12),
    ("model.ckpt-12", {"global_step": np.array([34])}, 12),
]


@pytest.mark.parametrize(("name", "tensors", "step"), STEPS)
def test_the_step(tmp_path: Path, name: str, tensors: dict[str, Array], step: int | None) -> None:
    assert read_catalog(write(tmp_path / name, w=np.zeros(2), **tensors)).step == step


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_in_a_shard_is_found(tmp_path: Path) -> None:
    prefix = write(tmp_path / "m", a=np.arange(4.0), s=np.array([b"one", b"two"], object))
    catalog = read_catalog(prefix)
    for name, at in (("a", 3), ("s", 40)):
        damage(catalog.shards[0], at)
        for read in (read_array, check_values):
            with pytest.raises(CorruptFile, match=f"'{name}': its checksum is") as caught:
                read(catalog, catalog.tensors[name])
            assert str(catalog.shards[0]) in caught.value.message


def test_a_damaged_global_step_is_not_a_step(tmp_path: Path) -> None:
    prefix = write(tmp_path / "model.ckpt-7", global_step=np.int64(7))
    damage(shard_path(prefix, 0, 1), 0)
    with pytest.raises(CorruptFile, match="global_step"):
        read_catalog(prefix)


def test_a_map_is_read_only_unaligned_and_survives_pruning(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path / "m", a=np.array([True]), b=np.arange(3000.0), e=np.zeros((0, 2))))
    mapped = memory_map(catalog, catalog.tensors["b"])
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    catalog.shards[0].unlink()
    assert_same(mapped.copy(), np.arange(3000.0))
    with pytest.raises(CheckpointChanged, match="vanished"):
        memory_map(catalog, catalog.tensors["b"])


def test_a_shard_that_shrank_is_not_mapped(tmp_path: Path) -> None:
    """Touching such a map would kill the process."""
    catalog = read_catalog(write(tmp_path / "m", b=np.arange(3000.0)))
    catalog.shards[0].write_bytes(bytes(100))
    for read in (memory_map, read_array, check_values):
        with pytest.raises(CheckpointChanged, match="shorter"):
            read(catalog, catalog.tensors["b"])


@pytest.mark.parametrize("at", [1000, 2999])
def test_blocks_of_a_shard_that_is_written_to_after_its_checksum_was_right(tmp_path: Path, at: int) -> None:
    catalog = read_catalog(write(tmp_path / "m", b=np.arange(3000.0)))
    blocks = read_blocks(catalog, catalog.tensors["b"], 1000)
    assert_same(next(blocks), np.arange(1000.0))
    with catalog.shards[0].open("r+b") as file:
        file.seek(8 * at)
        file.write(b"other")
    assert_same(next(blocks)[1:], np.arange(1001.0, 2000))
    with pytest.raises(CheckpointChanged, match="was written to while it was read"):
        next(blocks)


def test_blocks_of_a_shard_that_is_cut_after_its_checksum_was_right(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path / "m", b=np.arange(3000.0)))
    blocks = read_blocks(catalog, catalog.tensors["b"], 1000)
    assert_same(next(blocks), np.arange(1000.0))
    os.truncate(catalog.shards[0], 8 * 1500)
    with pytest.raises(CheckpointChanged, match="became shorter"):
        next(blocks)


@pytest.mark.parametrize("read", [checked_map, check_values, read_array])
@pytest.mark.parametrize("size", [8 * 3000, 100])
def test_a_shard_that_is_written_to_while_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., object], size: int
) -> None:
    catalog = read_catalog(write(tmp_path / "m", b=np.arange(3000.0)))

    def then_write(checksum: Callable[..., int]) -> Callable[..., int]:
        def checked(*args: Any) -> int:
            found = checksum(*args)
            catalog.shards[0].write_bytes(bytes(size))
            return found

        return checked

    for name in ("crc_of", "read_into"):
        monkeypatch.setattr(tensor_values, name, then_write(getattr(tensor_values, name)))
    with pytest.raises(CheckpointChanged):
        read(catalog, catalog.tensors["b"])


def test_an_index_that_is_replaced_while_it_is_read_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write(tmp_path / "m")

    def read_then_replace(path: Path, *limit: int) -> bytes:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        return data

    monkeypatch.setattr("exporter.checkpoint.tensor_bundle.read_regular", read_then_replace)
    with pytest.raises(CheckpointChanged, match="replaced"):
        read_catalog(prefix)


def test_parts_are_mapped_one_by_one_and_joined_only_if_complete(tmp_path: Path) -> None:
    half = SliceSpec((4,), (0,), (2,))
    with BundleWriter(tmp_path / "m") as writer:
        writer.add("w", np.arange(2.0), half)
    catalog = read_catalog(tmp_path / "m")
    ref = catalog.tensors["w"]
    assert not ref.is_complete
    with pytest.raises(CorruptFile, match="not stored"):
        read_array(catalog, ref)
    with pytest.raises(ValueError, match="stored in slices"):
        memory_map(catalog, ref)
    assert memory_map(catalog, ref, ref.slices[0]).tolist() == [0, 1]


def test_partitioned_strings_are_joined(tmp_path: Path) -> None:
    parts = [SliceSpec((3,), (0,), (2,)), SliceSpec((3,), (2,), (1,))]
    with BundleWriter(tmp_path / "m") as writer:
        writer.add("w", np.array([b"a", b"bb"], object), parts[0])
        writer.add("w", np.array([b"ccc"], object), parts[1])
    catalog = read_catalog(tmp_path / "m")
    assert read_array(catalog, catalog.tensors["w"]).tolist() == [b"a", b"bb", b"ccc"]


def test_text_becomes_utf8(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path / "m", s=np.array("né")))
    assert read_array(catalog, catalog.tensors["s"]).tolist() == "né".encode()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">f4").reshape(2, 3, 4),
        np.arange(24.0).reshape(4, 6)[::-1, ::2],
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.array(7, ">i8"),
        np.broadcast_to(np.float32(1), (3, 0, 2)),
        np.broadcast_to(np.array([1, 2], ml_dtypes.bfloat16), (500_000, 2)),
    ],
    ids=["big-endian", "strided", "fortran", "scalar", "empty", "broadcast"],
)
def test_any_memory_layout_is_written_in_order(tmp_path: Path, array: Array) -> None:
    catalog = read_catalog(write(tmp_path / "m", w=array))
    assert_same(
        read_array(catalog, catalog.tensors["w"]), np.array(array, array.dtype.newbyteorder("<"), order="C")
    )


def test_nothing_has_a_final_name_before_the_end(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "m") as writer:
        writer.add("w", np.zeros(3))
        assert not any(path.exists() for path in writer.files)
    assert sorted(writer.files) == sorted(tmp_path.iterdir())
    assert [ref.name for ref in writer.tensors] == ["w"]


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    BundleWriter(tmp_path / "m").add("old", np.zeros(99))
    catalog = read_catalog(write(tmp_path / "m", new=np.arange(2.0)))
    assert catalog.shard_sizes == (16,)
    assert read_array(catalog, catalog.tensors["new"]).tolist() == [0, 1]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), BundleWriter(tmp_path / "m") as writer:
        writer.add("w", np.zeros(3))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_the_writer_refuses_what_would_not_be_read(tmp_path: Path) -> None:
    part = SliceSpec((4,), (0,), (2,))
    with BundleWriter(tmp_path / "m") as writer:
        writer.add("w", np.zeros(3))
        writer.add("p", np.zeros(2), part)
        with pytest.raises(ValueError, match="'w' was added before"):
            writer.add("w", np.zeros(3))
        with pytest.raises(ValueError, match="'p' was added before"):
            writer.add("p", np.zeros(2, np.float32), part)
        with pytest.raises(ValueError, match="'w' was added before"):
            writer.add("w", np.zeros(2), part)
        with pytest.raises(ValueError, match="for a slice of"):
            writer.add("q", np.zeros(3), part)
        with pytest.raises(ValueError, match="4 bytes for float64\\[1\\]"):
            writer.add_chunks("x", DType.DOUBLE, (1,), [b"1234"])
        with pytest.raises(ValueError, match="string tensors cannot"):
            writer.add_chunks("x", DType.STRING, (1,), [b"1234"])
        with pytest.raises(ValueError, match="3 is not a string"):
            writer.add("x", np.array([b"one", 3], object))
        with pytest.raises(KeyError):
            writer.add("x", np.zeros(1, "M8[s]"))
        writer.add("last", np.arange(2.0))
    catalog = read_catalog(tmp_path / "m")
    assert list(catalog.tensors) == ["last", "p", "w"]
    assert read_array(catalog, catalog.tensors["last"]).tolist() == [0, 1]


def test_a_large_tensor_passes_through_in_chunks(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(64 << 20)
    big = np.memmap(tmp_path / "big", np.float32, "r").reshape(-1, 64)
    tracemalloc.start()
    with BundleWriter(tmp_path / "m") as writer:
        writer.add("straight", big)
        writer.add("turned", big[:, ::-1])
    catalog = read_catalog(tmp_path / "m")
    for ref in catalog.tensors.values():
        check_values(catalog, ref)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_an_index_needs_unique_names() -> None:
    ref = TensorRef("w", DType.FLOAT, ())
    with pytest.raises(ValueError, match="must increase"):
        encode_index([ref, ref], 1)
    with pytest.raises(ValueError, match="must increase"):
        encode_index([replace(ref, name="")], 1)

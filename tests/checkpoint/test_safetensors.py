"""`.safetensors` files and lists of their shards, written by the library of that name and by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

from exporter.catalog import Naming
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    TruncatedFile,
    UnsafeArchive,
    UnsupportedFormat,
)
from exporter.wire.dtypes import DType
from tests.support.archives import legacy_file, values
from tests.support.commands import export_model

tf1 = tf.compat.v1
WEIGHTS = {
    "tower/dense/kernel:0": np.arange(12, dtype=np.float32).reshape(4, 3),
    "tower/dense/bias:0": np.array([1, -1, 0.5], np.float32),
    "global_step": np.array(70, np.int64),
}


def serving() -> tuple[dict[str, Any], dict[str, Any]]:
    x = tf1.placeholder(tf.float32, [None, 4], name="x")
    with tf1.variable_scope("tower/dense"):
        kernel, bias = tf1.get_variable("kernel", [4, 3]), tf1.get_variable("bias", [3])
    return {"x": x}, {"y": tf.matmul(x, kernel) + bias}


def sharded(directory: Path, weights: dict[str, Any] = WEIGHTS) -> Path:
    """A tensor in each file, and their list, as `save_torch_state_dict` of huggingface_hub names them."""
    files = {}
    for number, (name, value) in enumerate(weights.items(), 1):
        files[name] = f"model-{number:05}-of-{len(weights):05}.safetensors"
        save_file({name: value}, directory / files[name])
    total = sum(value.nbytes for value in weights.values())
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    return path


def by_hand(path: Path, header: Any, data: bytes = b"", *, size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def entry(begin: int, end: int, *, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


# --- files of the library ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [False, True])
def test_named_tensors(is_sharded: bool, tmp_path: Path) -> None:
    """`save_file({variable.name: value})`: names are variables' names."""
    if is_sharded:
        sharded(tmp_path)
    else:
        save_file(WEIGHTS, tmp_path / "m.safetensors", metadata={"format": "tf"})
    catalog = open_checkpoint(tmp_path)
    assert (catalog.naming, catalog.step, catalog.is_bundle) == (Naming.NAMES, 70, False)
    assert len(catalog.shards) == (4 if is_sharded else 1)
    found = values(catalog, tmp_path / "out")
    for name, value in WEIGHTS.items():
        np.testing.assert_array_equal(found[name.removesuffix(":0")], value, strict=True)


ALL_TYPES = [
    np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.float16, np.uint32, np.int32, np.float32, np.uint64,
    np.int64, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=lambda dtype: dtype.__name__)
def test_every_type_and_its_bits_survive(dtype: Any, tmp_path: Path) -> None:
    odd = np.ones(1, np.int8)  # so that what follows begins at an odd place
    value = np.array([[0, 1, 1, 0], [1, 0, 0, 1]]).astype(dtype)
    save_file({"a": odd, "w": value, "none": np.zeros((0, 3), dtype)}, tmp_path / "m.safetensors")
    found = values(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "out")
    np.testing.assert_array_equal(found["w"].view(np.uint8), value.view(np.uint8))
    assert found["none"].shape == (0, 3)


def test_large_tensors_stream_in_blocks(tmp_path: Path) -> None:
    value = np.arange(3_000_001, dtype=np.float32)
    save_file({"w": value}, tmp_path / "m.safetensors")
    (ref,) = open_checkpoint(tmp_path).tensors.values()
    assert ref.content is not None
    blocks = list(ref.content.blocks())
    assert max(block.nbytes for block in blocks) <= 4 << 20
    np.testing.assert_array_equal(np.concatenate(blocks), value)


def test_the_newest_of_a_series(tmp_path: Path) -> None:
    for step in (9, 10):
        save_file({"w": np.full(2, step, np.float32)}, tmp_path / f"model-{step}.safetensors")
    assert open_checkpoint(tmp_path).step == 10


# --- the whole tool ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [False, True])
def test_export_inspect_verify_and_diff(is_sharded: bool, tmp_path: Path) -> None:
    train = tmp_path / "train"
    train.mkdir()
    source = sharded(train) if is_sharded else train / "m.safetensors"
    if not is_sharded:
        save_file(WEIGHTS, source)
    model = tmp_path / "m"
    ran = export_model("--ckpt-dir", source, "--model", f"{__file__}:serving", "--out", model, "--json")
    assert ran.code == 0, ran.err
    family = ran.document["checkpoint"]["family"].partition(",")[0]
    assert (ran.document["version"], family) == (70, "safetensors")
    answer = tf.saved_model.load(model / "70").signatures["serving_default"](x=tf.ones([2, 4]))["y"]
    expected = np.ones([2, 4], np.float32) @ WEIGHTS["tower/dense/kernel:0"] + WEIGHTS["tower/dense/bias:0"]
    np.testing.assert_array_equal(answer, expected)
    assert export_model("verify", model).code == 0

    shown = export_model("inspect", source, "--tensors")
    assert shown.code == 0 and "tower/dense/kernel" in shown.out
    other = tmp_path / "other.safetensors"
    save_file(WEIGHTS | {"tower/dense/bias:0": np.zeros(3, np.float32)}, other)
    differs = export_model("diff", source, other, "--exit-code", "--json")
    assert differs.code == 10, differs.err
    assert "tower/dense/bias" in differs.out and "tower/dense/kernel" not in differs.out
    assert export_model("diff", source, source, "--exit-code").code == 0


@pytest.mark.parametrize("kind", ["npz", "h5", "bundle"])
def test_diff_with_other_families(kind: str, tmp_path: Path) -> None:
    """Values are compared, whichever file they lie in."""
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    other = dict(WEIGHTS) | {"tower/dense/bias:0": np.zeros(3, np.float32)}
    match kind:
        case "npz":
            np.savez(path := tmp_path / "m.npz", **other)
        case "h5":
            path = legacy_file(tmp_path / "m.h5", {"tower": other}, keras_version="2.3.0")
        case _:
            path = tmp_path / "train" / "model.ckpt-70"
            path.parent.mkdir()
            with BundleWriter(path) as writer:
                for name, value in sorted(other.items()):
                    writer.add(name.removesuffix(":0"), value)
    for pair in ((tmp_path / "m.safetensors", path), (path, tmp_path / "m.safetensors")):
        ran = export_model("diff", *pair, "--exit-code", "--json")
        assert ran.code == 10, ran.err
        assert [found["name"] for found in ran.document["variables"]] == ["tower/dense/bias"]
        assert not ran.document["only_a"] + ran.document["only_b"]


def test_other_names_are_mapped_by_rules(tmp_path: Path) -> None:
    """Names of another program, with dots, go where a rename says."""
    save_file(
        {f"net.{name[12:-2]}": v for name, v in WEIGHTS.items() if ":" in name}, tmp_path / "m.safetensors"
    )
    names = ["--rename", "tower/dense/kernel=net.kernel", "--rename", "tower/dense/bias=net.bias"]
    line = [
        "--ckpt-dir",
        tmp_path / "m.safetensors",
        "--model",
        f"{__file__}:serving",
        "--out",
        tmp_path / "m",
    ]
    refused = export_model(*line)
    assert refused.code == 4 and "tower/dense/kernel" in refused.err
    ran = export_model(*line, *names)
    assert ran.code == 0, ran.err


def test_a_replaced_file_is_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(WEIGHTS, path)
    catalog = open_checkpoint(path)
    save_file(WEIGHTS | {"more": np.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="replaced or written to"):
        values(catalog, tmp_path / "out")


# --- shards ------------------------------------------------------------------------------------------------


def test_shards_without_their_list_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path).unlink()
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint") as caught:
        open_checkpoint(tmp_path)
    assert "is one of 3 shards" in (caught.value.cause or "")
    with pytest.raises(MissingShard) as alone:
        open_checkpoint(tmp_path / "model-00002-of-00003.safetensors")
    assert "model.safetensors.index.json" in alone.value.hint


def test_a_list_that_names_what_is_not_there(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MissingShard, match="model-00002-of-00003"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"w": "../m.safetensors"}, UnsafeArchive),
        ({"w": "/etc/passwd"}, UnsafeArchive),
        ({"w": ".."}, UnsafeArchive),
        ({"w": "other.bin"}, UnsafeArchive),
        ({"w": 3}, CorruptFile),
        ({"missing": "model-00001-of-00003.safetensors"}, CorruptFile),
        ([], CorruptFile),
        ({}, CorruptFile),
    ],
)
def test_hostile_lists(change: Any, error: type[CheckpointError], tmp_path: Path) -> None:
    path = sharded(tmp_path)
    path.write_text(json.dumps({"weight_map": change}))
    with pytest.raises(error):
        open_checkpoint(path)


# --- hostile files -----------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[Any, bytes, type[CheckpointError]]] = {
    "no JSON": (b"{", b"", CorruptFile),
    "a list": ([], b"", CorruptFile),
    "no tensors": ({"__metadata__": {}}, b"", CorruptFile),
    "too deep": (b"[" * 100_000, b"", CorruptFile),
    "a name twice": (b'{"w":%b,"w":%b}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4), CorruptFile),
    "two of one name": ({"w": entry(0, 4), "w:0": entry(4, 8)}, bytes(8), CorruptFile),
    "no name": ({":0": entry(0, 4)}, bytes(4), CorruptFile),
    "overlapping": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), CorruptFile),
    "the same bytes": ({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), CorruptFile),
    "a gap": ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), CorruptFile),
    "bytes of nobody": ({"a": entry(0, 4)}, bytes(8), CorruptFile),
    "behind the end": ({"a": entry(0, 8)}, bytes(4), TruncatedFile),
    "far behind the end": ({"a": entry(2**62, 2**62 + 4)}, bytes(4), TruncatedFile),
    "backwards": ({"a": entry(4, 0, shape=[1])}, bytes(4), CorruptFile),
    "negative": ({"a": entry(-4, 0)}, bytes(4), CorruptFile),
    "another size": ({"a": entry(0, 8, shape=[3])}, bytes(8), CorruptFile),
    "a huge shape": ({"a": entry(0, 8, shape=[2**62] * 200)}, bytes(8), CorruptFile),
    "a huge rank": ({"a": entry(0, 4, shape=[1] * 1000)}, bytes(4), CorruptFile),
    "a negative shape": ({"a": entry(0, 8, shape=[-1, -2])}, bytes(8), CorruptFile),
    "a fraction": ({"a": entry(0, 4, shape=[1.0])}, bytes(4), CorruptFile),
    "three offsets": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        bytes(8),
        CorruptFile,
    ),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), CorruptFile),
    "an entry that is none": ({"a": 1}, bytes(4), CorruptFile),
    "an unknown type": ({"a": entry(0, 4, dtype="Q7")}, bytes(4), UnsupportedFormat),
    "packed bits": ({"a": entry(0, 4, dtype="F4", shape=[8])}, bytes(4), UnsupportedFormat),
    "a type that is none": ({"a": entry(0, 4) | {"dtype": 1}}, bytes(4), CorruptFile),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    header, data, error = HOSTILE[case]
    path = by_hand(tmp_path / "m.safetensors", header, data)
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert type(caught.value) is error
    ran = export_model("--ckpt-dir", path, "--model", f"{__file__}:serving", "--out", tmp_path / "m")
    assert ran.code == 3 and "Traceback" not in ran.err
    assert not (tmp_path / "m").exists() or not list((tmp_path / "m").iterdir())


@pytest.mark.parametrize(
    ("size", "error"),
    [(2**63, CorruptFile), (2**40, CorruptFile), (100_000_001, CorruptFile), (3000, TruncatedFile)],
)
def test_a_lying_size_of_the_header(size: int, error: type[CheckpointError], tmp_path: Path) -> None:
    path = by_hand(tmp_path / "m.safetensors", {"a": entry(0, 4)}, bytes(4), size=size)
    with pytest.raises(error):
        open_checkpoint(path)


@pytest.mark.parametrize("data", [b"", b"\0" * 7])
def test_a_file_too_short_for_a_header(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(TruncatedFile):
        open_checkpoint(tmp_path / "m.safetensors")


def test_padding_and_metadata_are_no_tensors(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": {"step": "3"}, "w": entry(0, 4)}).encode() + b" " * 13
    catalog = open_checkpoint(by_hand(tmp_path / "m.safetensors", text, bytes(4)))
    assert [(ref.name, ref.dtype, ref.shape) for ref in catalog.tensors.values()] == [
        ("w", DType.FLOAT, (1,))
    ]

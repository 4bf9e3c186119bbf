"""Programs of JAX (`tests/fixtures/jax/make.py`): those that only compute are served, others if asked for."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import AccessRefused
from exporter.graph.stablehlo import is_plain_module, read_program
from exporter.options import ExportRequest, Updates, Verify
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.training import IncrementWriter
from exporter.wire import protos
from tests.support.budget import times
from tests.support.trained import answers_in_session
from tests.support.updatable import loaded

ARCHIVE = Path(__file__).parents[1] / "fixtures/jax/0.9.0.tar.xz"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("jax")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def programs(model: Path) -> list[bytes]:
    read = protos.message_class("SavedModel").FromString((model / "saved_model.pb").read_bytes())
    functions = read.meta_graphs[0].graph_def.library.function
    nodes = [node for function in functions for node in function.node_def]
    found = [bytes(node.attr["module"].s) for node in nodes if node.op == "XlaCallModule"]
    assert found
    return found


def assert_answers_as_jax(version: Path, model: Path) -> None:
    with np.load(f"{model}.answers.npz") as answers:
        found = answers_in_session(version, {"rows": answers["inputs/rows"]})
        np.testing.assert_allclose(found["y"], answers["outputs/y"], atol=1e-6)


@pytest.mark.parametrize("name", ["fixed", "any_rows"])
def test_a_program_that_only_computes_is_served(name: str, models: Path, tmp_path: Path) -> None:
    request = ExportRequest(models / name, tmp_path / "model", verify=Verify.OUTPUTS)
    assert_answers_as_jax(export(request).published.path, models / name)


def test_a_base_of_a_program_takes_deltas(models: Path, tmp_path: Path) -> None:
    """The trainer gives arrays by the names of the SavedModel's variables."""
    with np.load(models / "any_rows.answers.npz") as answers:
        rows = answers["inputs/rows"]
    weights = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    writer = IncrementWriter(tmp_path / "train")
    writer.save(1, {"weights": weights})
    request = ExportRequest(
        tmp_path / "train", tmp_path / "model", model=str(models / "any_rows"), updates=Updates()
    )
    with loaded(export(request).published.path) as server:
        assert_is_softmax(server.predict(rows=rows)["y"], rows @ weights)
        writer.write(2, {"weights": weights * 2})
        export_incremental(request)
        server.update()
        assert_is_softmax(server.predict(rows=rows)["y"], rows @ (weights * 2))


def assert_is_softmax(found: Any, products: Any) -> None:
    exponents = np.exp(np.tanh(products))
    np.testing.assert_allclose(found, exponents / exponents.sum(axis=1, keepdims=True), atol=1e-6)


def test_a_program_that_calls_other_functions_is_served_if_asked_for(models: Path, tmp_path: Path) -> None:
    with pytest.raises(AccessRefused, match="XlaCallModule") as caught:
        export(ExportRequest(models / "factors", tmp_path / "model"))
    assert "--allow file-ops" in (caught.value.hint or "")
    export(ExportRequest(models / "factors", tmp_path / "model", allow="file-ops"))


def test_every_custom_call_counts(models: Path) -> None:
    for program in programs(models / "any_rows"):
        assert is_plain_module(program)
        assert read_program(program).texts == {"", "shape_assertion"}
        assert not is_plain_module(program.replace(b"shape_assertion", b"shape_assertiom"))
    replaced = b"\0broadcast_in_dim\0"  # the name of a place in the source
    backward = next(each for each in programs(models / "any_rows") if replaced in each)
    assert not is_plain_module(backward.replace(replaced, b"\0call_target_name\0"))
    for program in programs(models / "factors"):
        assert any(text.startswith("lapack_") for text in read_program(program).texts or ())
        assert not is_plain_module(program)


def test_every_kind_of_operation_counts(models: Path) -> None:
    (*_, program) = programs(models / "fixed")
    assert is_plain_module(program)
    assert {"vhlo.tanh_v2", "vhlo.dot_general_v2", "builtin.module"} <= read_program(program).operations
    for other in (b"send_v2", b"tonh_v2"):
        assert not is_plain_module(program.replace(b"tanh_v2", other))
    assert not is_plain_module(program.replace(b"vhlo", b"mhlo"))


def test_properties_without_the_attributes_that_they_number_are_no_plain_program() -> None:
    def number(value: int) -> bytes:
        return bytes([value << 1 | 1])

    def section(kind: int, content: bytes) -> bytes:
        return bytes([kind]) + number(len(content)) + content

    names = [b"vhlo\0", b"custom_call_v1\0"]
    texts = number(2) + b"".join(number(len(each)) for each in reversed(names)) + b"".join(names)
    dialects = b"".join(map(number, (1, 0, 1, 0, 1, 2)))
    head = b"ML\xefR" + number(6) + b"x\0"
    assert not is_plain_module(head + section(0, texts) + section(1, dialects) + section(8, number(0)))


def test_other_bytes_are_no_plain_program(models: Path) -> None:
    (*_, program) = programs(models / "fixed")
    for other in (b"", b"module {}", b"ML\xefR", program[4:], b"ML\xefR\xff" + program[5:], program * 2):
        assert not is_plain_module(other)
    for length in range(0, len(program), 7):
        is_plain_module(program[:length])
    chance = random.Random(1)
    for _ in range(times(300)):
        damaged = bytearray(program)
        for _ in range(3):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        is_plain_module(bytes(damaged))

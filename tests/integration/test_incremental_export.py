"""Base and deltas beside a full export of the same checkpoint: the same bits, served by TensorFlow itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.chunk_digest import chunk_digest, chunks
from exporter.delta.format import ChangeKind
from exporter.publish.delta_log import read_log
from exporter.publish.versions import read_manifest
from tests.conftest import ROOT
from tests.support.commands import export_model
from tests.support.forks import run_warm
from tests.support.made_again import assert_made_again
from tests.support.updatable import Loaded, loaded_quickly

MODEL = f"{ROOT / 'examples/ranker/model.py'}:serving"
FEEDS = {"user": np.arange(0, 5000, 7), "item": np.arange(0, 5000, 7) % 2000}


def train(directory: Path, steps: int) -> None:
    run_warm(ROOT / "examples/ranker/train.py", "--out", directory, "--steps", steps)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--average", "ema", "--cast", ".*embedding.*=bfloat16"),
        ("--model-arg", "parts=1"),
        ("--model-arg", "parts=2"),
    ],
    ids=["plain", "averages and casts", "one part", "other parts"],
)
def test_a_delta_from_a_full_checkpoint_serves_what_a_full_export_serves(
    ranker: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    checkpoints, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(ranker, checkpoints)
    common = ["--ckpt-dir", checkpoints, "--model", MODEL, *options]
    first = export_model(*common, "--out", model, "--incr", "--add=stamp", "--json")
    assert first.code == 0, first.err
    assert first.document["position"] == 20
    train(checkpoints, 10)
    second = export_model(*common, "--out", model, "--incr", "--json")
    assert second.code == 0, second.err
    assert (second.document["from_position"], second.document["position"]) == (20, 30)
    assert export_model(*common, "--out", tmp_path / "full").code == 0
    with loaded_quickly(model / "20") as server, loaded_quickly(tmp_path / "full/30") as expected:
        before = server.predict(**FEEDS)
        assert server.update()["position"] == 30
        after, wanted = server.predict(**FEEDS), expected.predict(**FEEDS)
    assert not np.array_equal(before["click"], after["click"])
    np.testing.assert_array_equal(after["click"], wanted["click"])
    assert set(after["model_position"]) == {30}


@pytest.fixture(scope="module")
def followed(ranker: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of steps 20, 30 and 40, and what following them published: a base and two deltas."""
    directory = tmp_path_factory.mktemp("followed")
    checkpoints, model = directory / "train", directory / "model"
    shutil.copytree(ranker, checkpoints)
    for position in (20, 30, 40):
        if position > 20:
            train(checkpoints, 10)
        ran = export_model(
            *("--ckpt-dir", checkpoints, "--model", MODEL, "--out", model, "--incr", "--add=stamp", "--json")
        )
        assert ran.document["position"] == position
    return checkpoints, model


def test_merged_deltas_rollback_and_resumption_serve_what_their_positions_served(
    followed: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(followed[1], model)
    with loaded_quickly(model / "20") as server:
        answers = {20: server.predict(**FEEDS)["click"]}
        for position in (30, 40):
            server.update(position)
            answers[position] = server.predict(**FEEDS)["click"]
        assert export_model("merge", model, "-q").code == 0
        assert export_model("rollback", model, "--to", 30, "-q").code == 0
        assert server.update()["position"] == 41
        np.testing.assert_array_equal(server.predict(**FEEDS)["click"], answers[30])
        assert export_model("resume", model, "-q").code == 0
        assert server.update()["position"] == 42
        np.testing.assert_array_equal(server.predict(**FEEDS)["click"], answers[40])
    with loaded_quickly(model / "20") as server:
        done = server.update()
        assert (done["position"], done["deltas"]) == (42, 2), "nobody passes 40 on the way back to 30"
        np.testing.assert_array_equal(server.predict(**FEEDS)["click"], answers[40])


def test_a_rebased_base_stands_where_its_deltas_led_and_goes_on(
    followed: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoints, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(followed[0], checkpoints)
    shutil.copytree(followed[1], model)
    assert export_model("merge", model, "--rebase", "--json").document["position"] == 40
    assert_made_again(model / "40")
    assert export_model("verify", model, "--bytes", "-q").code == 0
    assert read_manifest(model / "40").source.digest is None, "no checkpoint holds what increments made of it"
    with loaded_quickly(model / "20") as old, loaded_quickly(model / "40") as new:
        assert set(new.predict(**FEEDS)["model_step"]) == {40}
        assert old.update()["position"] == new.position() == 40
        np.testing.assert_array_equal(old.predict(**FEEDS)["click"], new.predict(**FEEDS)["click"])
        train(checkpoints, 10)
        assert export_model("--ckpt-dir", checkpoints, "--out", model, "--incr", "-q").code == 0
        for server in (old, new):
            assert server.update()["position"] == 50
        np.testing.assert_array_equal(old.predict(**FEEDS)["click"], new.predict(**FEEDS)["click"])
        assert set(new.predict(**FEEDS)["model_step"]) == {50}


def test_a_new_base_is_published_where_no_delta_fits_and_only_if_asked(
    followed: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(followed[1], model)
    common = [
        "--ckpt-dir",
        followed[0],
        "--model",
        MODEL,
        "--out",
        model,
        "--incr",
        "--average",
        "ema",
        "--json",
    ]
    refused = export_model(*common)
    assert (refused.code, refused.error["error"]) == (5, "SchemaChanged")
    assert "--new-base if-needed" in refused.error["hint"]
    done = export_model(*common, "--new-base=if-needed")
    assert (done.code, done.document["position"]) == (0, 41)
    assert export_model(*common).document["from_position"] == 41
    with loaded_quickly(model / "41") as server:
        assert server.update()["position"] == 41, "the deltas of the log before are not its own"
        assert set(server.predict(**FEEDS)["model_position"]) == {41}, "stamped as the base before it"


def test_a_server_tells_digests_that_the_published_log_predicts(
    followed: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoints, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(followed[0], checkpoints)
    common = ["--ckpt-dir", checkpoints, "--model", MODEL, "--out", model, "--incr", "--add=digest", "-q"]
    assert export_model(*common).code == 0
    train(checkpoints, 10)
    assert export_model(*common).code == 0
    assert predicted(model, 40) != predicted(model, 50)
    with loaded_quickly(model / "40") as server:
        for position in (40, 50):
            server.update(position)
            assert_digests(server, model, position)


def predicted(model: Path, position: int) -> list[int]:
    """The digests of all chunks of what the log has at a position."""
    log = read_log(model)
    state, kinds = log.state(position), {variable.name: variable.kind for variable in log.schema.variables}
    return [
        chunk_digest(
            state.rows(chunk.variable, chunk.start, chunk.stop)
            if kinds[chunk.variable] is ChangeKind.TABLE
            else np.atleast_1d(state.whole(chunk.variable))[chunk.start : chunk.stop]
        )
        for chunk in chunks(log.schema)
    ]


def assert_digests(server: Loaded, model: Path, position: int) -> None:
    expected = predicted(model, position)
    found = server.call("incremental_digest", rows=list(range(len(expected))))
    assert [int(digest) for digest in found["digest"]] == expected
    assert set(found["position_before"]) == set(found["position_after"]) == {position}


@pytest.mark.landing
def test_a_server_holds_rounded_rows_as_the_log_has_them_and_then_exact_ones(
    followed: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoints, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(followed[0], checkpoints)
    common = [
        "--ckpt-dir",
        checkpoints,
        "--model",
        MODEL,
        "--out",
        model,
        "--incr",
        "--add=digest",
        "--json",
    ]
    assert export_model(*common).code == 0
    sizes = {}
    with loaded_quickly(model / "40") as server:
        for dtype in ("int8", "bfloat16"):
            train(checkpoints, 10)
            done = export_model(*common, "--delta-dtype", dtype).document
            assert done["rounded"]["dtype"] == dtype and 0 < done["rounded"]["largest"] < 0.01
            sizes[dtype] = bytes_a_row(Path(done["path"]))
            assert server.update()["position"] == done["position"]
            assert_digests(server, model, done["position"])
        exact = export_model(*common).document
        assert (exact["position"], exact["rounded"]) == (61, None)
        assert exact["rows"] >= done["rounded"]["rows"]
        sizes["exact"] = bytes_a_row(Path(exact["path"]))
        assert server.update()["position"] == 61
        assert_digests(server, model, 61)
        found = server.predict(**FEEDS)
        assert export_model("rollback", model, "--to", 50, "-q").code == 0
        assert server.update()["position"] == 62
        assert predicted(model, 62) == predicted(model, 50)
        assert_digests(server, model, 62)
    assert sizes["int8"] < sizes["bfloat16"] < sizes["exact"]
    assert export_model("--ckpt-dir", checkpoints, "--model", MODEL, "--out", tmp_path / "full").code == 0
    with loaded_quickly(tmp_path / "full/60") as expected:
        np.testing.assert_array_equal(found["click"], expected.predict(**FEEDS)["click"])


def bytes_a_row(delta: Path) -> float:
    """Of tables, without the row numbers."""
    tensors = read_catalog(delta / "delta").tensors.values()
    rows = sum(ref.shape[0] for ref in tensors if ref.name.endswith("/ids"))
    kept = ("/values", "/exact", "/packed", "/scales")
    return sum(ref.bytes_ for ref in tensors if ref.name.endswith(kept)) / rows


@pytest.mark.landing
def test_a_server_follows_deltas_that_leave_rows_out_and_ends_where_an_exact_one_leads(
    followed: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoints, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(followed[0], checkpoints)
    shutil.copytree(followed[1], model)
    common = ["--ckpt-dir", checkpoints, "--out", model, "--incr", "--json"]
    with loaded_quickly(model / "20") as server:
        for position in (50, 60):
            train(checkpoints, 10)
            done = export_model(*common, "--delta-budget", "change=0.002").document
            assert (done["position"], done["left_out"]["bound"]) == (position, 0.002)
            assert 0 < done["left_out"]["largest"] < 0.002
            assert done["left_out"]["rows"] > 0
            assert done["rows"] > 0
            assert server.update()["position"] == position
        exact = export_model(*common).document
        assert (exact["position"], exact["left_out"]) == (61, None)
        assert exact["rows"] >= done["left_out"]["rows"]
        assert server.update()["position"] == 61
        found = server.predict(**FEEDS)
    assert export_model("--ckpt-dir", checkpoints, "--model", MODEL, "--out", tmp_path / "full").code == 0
    with loaded_quickly(tmp_path / "full/60") as expected:
        np.testing.assert_array_equal(found["click"], expected.predict(**FEEDS)["click"])

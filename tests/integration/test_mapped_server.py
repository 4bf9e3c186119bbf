"""`serve-model run` with mapped tables: a process maps them, swaps versions, and outlives their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.options import Updates
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.publish.served import ServedTables
from serving.cli import app
from serving.client import ModelClient
from serving.updates import read_incremental_status, update
from tests.support.commands import run_app
from tests.support.mapped_models import IDS, ROWS, MappedModel, mapped_below
from tests.support.server_processes import DEADLINE_SECONDS, ROOT, running


def rows(client: ModelClient) -> Any:
    return client.predict({"ids": IDS}).outputs["rows"]


@pytest.mark.landing
def test_a_server_maps_swaps_and_outlives_the_files(tmp_path: Path) -> None:
    model = MappedModel(tmp_path / "a model")
    export(model.request())
    with running(model.out) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split(" on ")[1].strip()
        assert any("served version 7: tables mapped" in line for line in process.stderr)
        with ModelClient(address, "served") as client:
            np.testing.assert_array_equal(rows(client), model.table[IDS])
            assert {Path(path).parts[-3] for path in mapped_below(model.out, process.pid)} == {"7"}
            model.save(9)
            export(model.request())
            deadline = time.monotonic() + DEADLINE_SECONDS
            while {Path(path).parts[-3] for path in mapped_below(model.out, process.pid)} != {"9"}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            np.testing.assert_array_equal(rows(client), model.table[IDS])
            shutil.rmtree(model.out / "7")
            for shard in (model.out / "9/variables").iterdir():  # as retention does; the directory stays
                shard.unlink()
            np.testing.assert_array_equal(rows(client), model.table[IDS])
        assert process.poll() is None


@pytest.mark.landing
def test_a_server_says_why_it_restores(tmp_path: Path) -> None:
    model = MappedModel(tmp_path / "one")
    export(model.request())
    moved = Path(shutil.move(model.out, tmp_path / "two"))
    with running(moved) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split(" on ")[1].strip()
        assert any("two version 7: tables restored: " in line for line in process.stderr)
        with ModelClient(address, "two") as client:
            np.testing.assert_array_equal(rows(client), model.table[IDS])
            assert not mapped_below(tmp_path, process.pid)


def test_the_loader_of_tensorflow_serving_maps_and_restores(tmp_path: Path) -> None:
    """TF_LoadSessionFromSavedModel of the C library, in a process without Python's TensorFlow."""
    model = MappedModel(tmp_path / "one")
    export(model.request())
    assert stock_load(model.out / "7") == ("", 1)
    assert stock_load(Path(shutil.copytree(model.out / "7", tmp_path / "copy"))) == ("", 1)
    shutil.rmtree(model.out)
    assert stock_load(tmp_path / "copy") == ("", 0)
    for shard in (tmp_path / "copy/variables").glob("*.data-*"):
        shard.write_bytes(b"")
    error, mapped = stock_load(tmp_path / "copy")
    assert (error != "", mapped) == (True, 0)


def stock_load(version: Path) -> tuple[str, int]:
    run = [sys.executable, ROOT / "tests/matrix/stock_load.py", version]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    return found["error"], found["mapped"]


@pytest.mark.landing
def test_a_server_takes_deltas_over_mapped_tables(tmp_path: Path) -> None:
    model = MappedModel(tmp_path / "one")
    options = {"updates": Updates(stamp=True), "overlay_rows": 200}
    export(model.request(**options))
    with running(model.out) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split(" on ")[1].strip()
        with ModelClient(address, "served") as client:
            assert len(mapped_below(model.out, process.pid)) == 1
            for step in (8, 9, 10):
                changed = np.arange(50 * (step - 8), 50 * (step - 7))
                model.table[changed] += 1
                model.save(step, model.table)
                export_incremental(model.request(**options))
                assert update(client).position == step
                found = client.predict({"ids": np.arange(ROWS)}).outputs
                np.testing.assert_array_equal(found["rows"], model.table)
            status = read_incremental_status(client, 7)
            assert status is not None
            assert status.tables == ServedTables(1, 1, 75)
            ran = run_app(app, "status", address, "--model-name", "served", "--json")
            assert ran.code == 0, ran.err
            (version,) = ran.document["versions"]
            assert (version["tables"], version["overlay_percent"]) == ("mapped, overlay 75 % full", 75)


def test_the_loader_of_tensorflow_serving_maps_a_base(tmp_path: Path) -> None:
    model = MappedModel(tmp_path / "one")
    export(model.request(updates=Updates()))
    assert stock_load(model.out / "7") == ("", 1)

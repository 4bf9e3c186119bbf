"""TensorFlow's own `gs://` file system: a version is loaded from a bucket, and takes the deltas beside it.

That is how the stock model server reads a bucket, with nothing of ours beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exporter.options import ExportRequest
from exporter.pipeline.incremental import export_incremental
from exporter.storage.layout import MANIFEST_FILE
from exporter.storage.objects import ObjectWriter
from exporter.transfer.push import plan_push, push
from tests.support.commands import export_model
from tests.support.gs_reader import Reader, reading
from tests.support.machines import killed_at
from tests.support.object_stores import Bucket
from tests.support.publishers import Killed
from tests.support.step_models import published, save


@pytest.fixture
def request_(tmp_path: Path) -> ExportRequest:
    """A base at 10 and deltas to 20 and 30."""
    return published(tmp_path, 10, 20, 30)


def publish(given: ExportRequest, step: int) -> None:
    """All rows are `step` from then on."""
    save(given.ckpt_dir, step)
    export_incremental(given)


def row(server: Reader) -> float:
    return float(server.call("serving_default", ids=[3])["rows"][0][0])


def test_a_server_reads_the_bucket_itself(
    gs_bucket: Bucket, request_: ExportRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = gs_bucket.url("models/ranker")
    assert export_model("push", request_.out, url).code == 0
    with reading(f"{url}/10", {**os.environ, **gs_bucket.environment}) as server:
        assert row(server) == 10
        assert server.update(20) == (20, "reached: 20")
        assert row(server) == 20
        assert server.update() == (30, "current: at 30")
        assert row(server) == 30

        publish(request_, 40)
        with killed_at(monkeypatch, ObjectWriter, ("copy_if_there",), 0), pytest.raises(Killed):
            push(plan_push(request_.out, url))  # replaced the head, uploaded the files, and died
        names = {Path(key).name for key in [*gs_bucket.keys()] if f"-{40:020d}/" in key}
        assert {"delta.index", "delta.data-00000-of-00001"} < names
        assert MANIFEST_FILE not in names
        assert server.update() == (30, "current: at 30")
        push(plan_push(request_.out, url))
        assert server.update() == (40, "current: at 40")
        assert row(server) == 40

        assert export_model("rollback", request_.out, "--to", "20").code == 0
        with killed_at(monkeypatch, ObjectWriter, ("upload",), 1), pytest.raises(Killed):
            push(plan_push(request_.out, url))
        assert server.update()[0] == 40
        push(plan_push(request_.out, url))
        assert server.update() == (41, "current: at 41")
        assert row(server) == 20
        publish(request_, 50)
        push(plan_push(request_.out, url))
        assert server.update()[0] == 41, "it is held"
        assert export_model("resume", request_.out).code == 0
        push(plan_push(request_.out, url))
        assert server.update()[0] == 50
        assert row(server) == 50

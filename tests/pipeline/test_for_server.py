"""`--for-server`: what is published for older servers, what remembers it, and what contradicts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.errors import NotServable, SchemaChanged, UsageError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.old_servers import oldest_server
from exporter.options import ExportFormat, ExportRequest, Updates
from exporter.pipeline.full import export
from exporter.pipeline.incremental import as_base, export_incremental
from exporter.pipeline.inspected import BundleView
from exporter.pipeline.inspection import inspect
from exporter.pipeline.log_maintenance import rollback
from exporter.pipeline.rebase import rebase
from exporter.publish.versions import read_manifest
from tests.support import served_tables
from tests.support.commands import export_model
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.mapped_models import MappedModel

OLD = (1, 15)


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    return MappedModel(tmp_path)


def asked(model: MappedModel, **options: Any) -> ExportRequest:
    request: ExportRequest = model.request(map_tables=False, **options)
    return request


def oldest_of(version: Path) -> tuple[int, int]:
    """What the version's own graph needs."""
    return oldest_server(read_saved_model(version).meta_graphs[0].graph_def)


def test_a_version_says_which_servers_load_it(model: MappedModel) -> None:
    newest = export(asked(model))
    assert oldest_of(newest.published.path) == (2, 8)
    manifest = newest.published.manifest
    assert (manifest.for_server, manifest.oldest_server) == (None, "2.8")
    again = export(asked(model, for_server="1.15.5"))
    assert again.published.version > newest.published.version  # another plan of the same checkpoint
    manifest = read_manifest(again.published.path)
    assert (manifest.for_server, manifest.oldest_server) == ("1.15", "1.15")
    assert oldest_of(again.published.path) == OLD
    view = inspect(again.published.path)
    assert isinstance(view, BundleView)
    assert view.oldest_server == "1.15"
    assert "servers     TensorFlow 1.15 and newer" in export_model("inspect", model.out).out


def test_cloud_mls_pair_is_made_for_them_too(model: MappedModel) -> None:
    from exporter.wire import protos

    done = export(asked(model, for_server="1.15", format=ExportFormat.METAGRAPH))
    meta = protos.MetaGraphDef.FromString((done.published.path / "export.meta").read_bytes())
    assert oldest_server(meta.graph_def) == OLD


def test_a_log_remembers_it(model: MappedModel) -> None:
    updates = Updates(stamp=True, digest=True, finite=True)
    base = export(asked(model, for_server="1.15", updates=updates)).published
    assert oldest_of(base.path) == OLD
    table = model.table.copy()
    table[:9] += 1
    model.save(8, table)
    with pytest.raises(SchemaChanged, match=r"--for-server 2\.4: the base was exported --for-server 1\.15"):
        export_incremental(asked(model, for_server="2.4"))
    export_incremental(asked(model, for_server="1.15.5"))
    later = asked(model)
    assert as_base(later).for_server == "1.15"
    assert as_base(replace(later, for_server="2.4")).for_server == "2.4"
    merged = rebase(model.out)
    assert merged is not None
    rollback(model.out, base.version)
    for version in (merged.path, model.out / "8"):
        manifest = read_manifest(version)
        assert (manifest.for_server, manifest.oldest_server) == ("1.15", "1.15")
        assert oldest_of(version) == OLD


@pytest.mark.landing
def test_a_base_that_was_not_made_for_them_takes_no_such_delta(model: MappedModel) -> None:
    export(asked(model, updates=Updates()))
    model.save(8)
    with pytest.raises(SchemaChanged, match="the base was exported without --for-server"):
        export_incremental(asked(model, for_server="2.4"))


@pytest.mark.landing
@pytest.mark.parametrize("casts", [(), ("int8",)], ids=["float", "8 bits"])
def test_tables_by_keys_need_nothing_newer(tmp_path: Path, casts: tuple[str, ...]) -> None:
    trainer = DeepRecTrainer(tmp_path / "train", has_codes=True)
    trainer.train()
    trainer.save()
    request = served_tables.request(trainer, for_server="1.15", casts=casts, updates=Updates(digest=True))
    assert oldest_of(export(request).published.path) == OLD


@pytest.mark.landing
def test_mapped_tables_are_for_servers_that_map(model: MappedModel) -> None:
    with pytest.raises(UsageError, match=r"--map-tables --for-server 1\.15"):
        export(model.request(for_server="1.15"))
    done = export(model.request(for_server="2.4", updates=Updates()))
    assert oldest_of(done.published.path) <= (2, 4)


NEW = """
import tensorflow as tf

def build():
    ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
    emb = tf.compat.v1.get_variable("emb", [20000, 16])
    rows = tf.gather(emb, ids)
    return {"ids": ids}, {"rows": tf.raw_ops.ApproxTopK(input=rows, k=3, reduction_dimension=1)[0]}
"""


def test_what_the_users_graph_needs_is_refused_before_anything_is_written(model: MappedModel) -> None:
    (model.directory / "model.py").write_text(NEW)
    with pytest.raises(NotServable, match=r"lack ApproxTopK \(from 2\.\d+ on\)"):
        export(asked(model, for_server="2.4"))
    assert not model.out.exists()


@pytest.mark.parametrize("text", ["", "old", "1", "2.4;", "1.15.5 ", "-1.2", "99999.1"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not the version of a TensorFlow"):
        ExportRequest(Path("train"), Path("out"), for_server=text)


@pytest.mark.parametrize("text", ["1.14", "1.2.0", "0.12"])
def test_servers_that_are_too_old_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--for-server {text} is too old"):
        ExportRequest(Path("train"), Path("out"), for_server=text)


@pytest.mark.parametrize(("text", "known"), [("1.15.5", "1.15"), ("2.4", "2.4"), ("2.22.0rc0", "2.22")])
def test_of_a_version_two_numbers_count(text: str, known: str) -> None:
    assert ExportRequest(Path("train"), Path("out"), for_server=text).for_server == known

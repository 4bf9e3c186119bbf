"""A shard of which little is served as it is stored is copied: what versions and logs hold then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.bundle.variables import LITTLE_KEPT
from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.options import DataMode, Updates, Verify
from exporter.pipeline.full import export
from exporter.pipeline.log_maintenance import resume, rollback
from exporter.publish.delta_log import read_log
from exporter.storage.layout import VARIABLES_PREFIX
from tests.support.commands import export_model
from tests.support.mapped_models import DIM, ROWS, MappedModel
from tests.support.publishing import delta_of

KERNEL_BYTES = DIM * 2 * 4


CAST = ("--cast", "emb=int8")


MODEL = f"""
import tensorflow as tf

def build():
    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    emb = v1.get_variable("emb", [{ROWS}, {DIM}])
    kernel = v1.get_variable("kernel", [{DIM}, 2])
    rows = tf.gather(emb, ids)
    return {{"ids": ids}}, {{"rows": rows, "scores": tf.matmul(rows, kernel)}}
"""


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    """Of its checkpoint's shard the kernel alone is served as it is stored, once the table is cast."""
    made = MappedModel(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return made


def request(model: MappedModel, **more: Any) -> Any:
    return model.request(**{"map_tables": False, "casts": ("emb=int8",), **more})


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_a_cast_table_does_not_keep_its_shard(model: MappedModel) -> None:
    done = export(request(model, verify=Verify.BYTES))
    shard = next(each for each in done.variables.shards if each.source is not None)
    assert (shard.how.value, shard.why, shard.bytes_) == ("compacted", LITTLE_KEPT, KERNEL_BYTES)
    assert size(done.published.path) < ROWS * (DIM + 4) + 100_000 < size(model.train) / 3
    trained = read_catalog(model.train / "model.ckpt-7")
    served = read_catalog(done.published.path / VARIABLES_PREFIX)
    kernel = read_array(served, served.tensors["kernel"])
    np.testing.assert_array_equal(kernel, read_array(trained, trained.tensors["kernel"]))
    for path in model.train.iterdir():
        path.unlink()
    assert export_model("verify", model.out, "--bytes").code == 0


def test_the_plan_says_which_shards_are_copied_and_why(model: MappedModel) -> None:
    arguments = ("--ckpt-dir", model.train, "--model", model.model, "--out", model.out)
    shard = str(model.train / "model.ckpt-7.data-00000-of-00001")
    whole = Path(shard).stat().st_size
    little = [
        {
            "source": shard,
            "how": "compacted",
            "why": LITTLE_KEPT,
            "bytes": KERNEL_BYTES,
            "source_bytes": whole,
        }
    ]
    linked = [{"source": shard, "how": "linked", "why": None, "bytes": whole, "source_bytes": whole}]
    assert export_model(*arguments, "--dry-run", "--json").document["shards"] == linked
    assert export_model(*arguments, *CAST, "--dry-run", "--json").document["shards"] == little
    told = export_model(*arguments, *CAST, "--dry-run").out
    assert f"data        1 shard compacted, {KERNEL_BYTES} B of 3.7 MiB ({LITTLE_KEPT})" in told
    done = export_model(*arguments, *CAST, "--json")
    assert done.document["shards"] == little and done.document["bytes_copied"] == KERNEL_BYTES


@pytest.mark.landing
def test_a_log_goes_on_over_such_a_base(model: MappedModel, url: str, tmp_path: Path) -> None:
    """Deltas, a rollback, a new base and a copy in a store hold the same values as over a linked shard."""
    linked = tmp_path / "linked"
    of_linked = request(model, out=linked, updates=Updates(), data=DataMode.LINK)
    ours = request(model, updates=Updates())
    export(of_linked)
    export(ours)
    for step in (8, 9):
        model.save(step)
        for each in (ours, of_linked):
            delta_of(each)
    for out in (model.out, linked):
        rollback(out, 8)
        resume(out)
    assert_same_values(model.out, linked)
    assert export_model("merge", model.out, "--rebase").code == 0
    assert_same_values(model.out, linked)
    assert export_model("verify", model.out, "--bytes").code == 0
    assert export_model("push", model.out, url).code == 0
    assert export_model("pull", url, tmp_path / "pulled").code == 0
    assert_same_values(tmp_path / "pulled", linked)
    assert size(model.out / "7") < size(linked / "7") / 3


def assert_same_values(a: Path, b: Path) -> None:
    one, other = read_log(a), read_log(b)
    assert one.at == other.at
    states = one.state(), other.state()
    for variable in one.schema.variables:
        np.testing.assert_array_equal(*(state.whole(variable.name) for state in states))


def test_damage_in_the_copied_bytes_is_found_before_they_are_published(model: MappedModel) -> None:
    """The checksums are the checkpoint's."""
    catalog = read_catalog(model.train / "model.ckpt-7")
    with catalog.shards[0].open("r+b") as shard:
        shard.seek(catalog.tensors["kernel"].extents[0].offset)
        shard.write(b"\x55")
    ran = export_model(
        *("--ckpt-dir", model.train, "--model", model.model, "--out", model.out, "--verify", "bytes"),
        *CAST,
    )
    assert ran.code != 0 and "kernel" in ran.err
    assert not list(model.out.glob("[0-9]*"))

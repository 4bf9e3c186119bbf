"""`diff` compares tables by keys, wherever they stand: checkpoints, positions, and one with the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.delta.table_changes import ServedTable
from exporter.errors import CorruptFile
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.wire.dtypes import DType
from tests.support.commands import export_model
from tests.support.deeprec import Ev, write_full
from tests.support.deeprec_logs import DeepRecTrainer, publish_base, request


@pytest.fixture
def trainer(tmp_path: Path) -> DeepRecTrainer:
    trainer = DeepRecTrainer(tmp_path / "train")
    for name in trainer.names:
        trainer.upsert(name, range(100))
        trainer.tables[name] = dict.fromkeys(range(100), np.ones(3, np.float32).tobytes())
    trainer.save()
    publish_base(trainer, tmp_path / "model")
    return trainer


def diff(a: object, b: object) -> Any:
    found = export_model("diff", a, b, "--json")
    assert found.code == 0, found.err
    return found.document


def change(trainer: DeepRecTrainer) -> None:
    """Three keys go, two come, one gets another row."""
    trainer.evict("item", [1, 2, 3])
    trainer.upsert("item", [500, 600])
    trainer.tables["item"][50] = np.array([1, 4, 5], np.float32).tobytes()
    trainer.step += 1
    trainer.save()


CHANGED = {
    "name": "item",
    "keys": 97,
    "only_a": 3,
    "only_b": 2,
    "changed_rows": 1,
    "norm": 5.0,
    "largest": 4.0,
}


def test_two_positions(trainer: DeepRecTrainer, tmp_path: Path) -> None:
    change(trainer)
    export_incremental(request(trainer, tmp_path / "model"))
    newest = read_log(tmp_path / "model").at.position
    found = diff(f"{tmp_path / 'model'}@10", f"{tmp_path / 'model'}@{newest}")
    assert (found["tables"], found["variables"], found["compared"]) == ([CHANGED], [], 3)
    assert (found["only_a"], found["only_b"]) == ([], [])
    assert diff(tmp_path / "model", tmp_path / "model")["equal"]


@pytest.mark.parametrize("part", ["index_seeds", "index_rows", "keys", "values"])
def test_a_published_table_whose_variable_has_another_rank(
    trainer: DeepRecTrainer, tmp_path: Path, part: str
) -> None:
    log = read_log(tmp_path / "model")
    (table, *_) = log.base.entry.mapping_spec.dynamic
    (name,) = (key for key in table.keys if key.endswith(f"/{part}"))
    others = [variable for variable in log.schema.variables if variable.name != name]
    schema = Schema.of([*others, ServedVariable(name, DType.INT64, (), ChangeKind.DENSE)])
    with pytest.raises(CorruptFile, match=f"variables of table {table.name!r} are inconsistent"):
        ServedTable.of(table, schema, log.state())


def test_a_model_and_the_trainers_checkpoint(trainer: DeepRecTrainer, tmp_path: Path) -> None:
    assert diff(tmp_path / "model", trainer.directory)["equal"]
    change(trainer)
    found = diff(tmp_path / "model", trainer.directory)
    assert (found["tables"], found["variables"], found["equal"]) == ([CHANGED], [], False)
    back = diff(trainer.directory, tmp_path / "model")
    assert back["tables"] == [{**CHANGED, "only_a": 2, "only_b": 3}]
    export_incremental(request(trainer, tmp_path / "model"))
    assert diff(tmp_path / "model", trainer.directory)["equal"]
    assert "97" in export_model("diff", trainer.directory / "model.ckpt-10", trainer.directory).out


def test_two_checkpoints_with_the_same_keys_elsewhere(trainer: DeepRecTrainer, tmp_path: Path) -> None:
    ev = trainer.ev("item", trainer.tables["item"])
    turned = Ev(ev.keys[::-1].copy(), ev.values)
    slots = {"item/Adagrad": ev}
    write_full(tmp_path / "a-1", {"item": ev}, slots=slots, parts=2, dense={"kernel": trainer.kernel})
    write_full(tmp_path / "b-2", {"item": turned}, slots=slots, parts=3, dense={"kernel": trainer.kernel})
    found = diff(tmp_path / "a-1", tmp_path / "b-2")
    assert (found["equal"], found["compared"]) == (True, 3)


def test_rows_of_another_length_are_another_table(tmp_path: Path) -> None:
    dense = {"kernel": np.zeros(2)}
    write_full(tmp_path / "a-1", {"t": Ev.random(9, 3)}, parts=0, dense=dense)
    write_full(tmp_path / "b-1", {"t": Ev.random(9, 4)}, parts=0, dense=dense)
    found = diff(tmp_path / "a-1", tmp_path / "b-1")
    assert (found["tables"], found["only_a"]) == ([], ["t-values"])

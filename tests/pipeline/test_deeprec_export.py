"""DeepRec's files to a stock SavedModel: what is served equals numpy's answers, before and after deltas."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import exporter.bundle.mapped_tables as mapped_tables
from exporter.errors import MissingTensors, SchemaChanged
from exporter.options import ExportRequest, Updates, Verify
from exporter.pipeline import log_maintenance
from exporter.pipeline.both_sides import compare_names
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.wire.int8_codes import to_codes
from tests.support.deeprec_graphs import Generation, deeprec_graph
from tests.support.deeprec_models import (
    DIM,
    INPUTS,
    ITEMS,
    NO_USER,
    OUTPUTS,
    USERS,
    Trainer,
    assert_answers,
    build,
)
from tests.support.publishing import delta_of
from tests.support.updatable import Loaded, loaded_quickly


def request(trainer: Trainer, out: Path, **options: Any) -> ExportRequest:
    return ExportRequest(trainer.directory, out, inputs=INPUTS, outputs=OUTPUTS, **options)


def assert_serves(server: Loaded, trainer: Trainer, more: list[int] | None = None) -> None:
    asked = trainer.probes(more or ())
    assert_answers(server.predict(**asked), trainer.answers(asked))


@pytest.mark.parametrize("generation", [*Generation], ids=lambda one: one.name.lower())
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_full_export(tmp_path: Path, generation: Generation, parts: int) -> None:
    trainer = Trainer(tmp_path / "train", parts=parts, generation=generation)
    trainer.save()
    done = export(request(trainer, tmp_path / "model", verify=Verify.BYTES))
    with loaded_quickly(done.published.path) as server:
        assert_serves(server, trainer)
    assert not done.plan.notes


def test_outputs_are_compared_with_the_trainers_graph(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    asked = {name: value.tolist() for name, value in trainer.probes().items()}
    inputs = tmp_path / "requests.jsonl"
    inputs.write_text(json.dumps({"signature_name": "serving_default", "inputs": asked}))
    done = export(request(trainer, tmp_path / "model", verify=Verify.OUTPUTS, verify_inputs=inputs))
    assert {difference.output for difference in done.differences} == {*OUTPUTS}


def test_a_saved_model_with_a_newer_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    with deeprec_graph() as program:
        tensors = build(program)
        saved = program.saved_model(
            tmp_path / "saved",
            {name: tensors[name] for name in INPUTS},
            {name: tensors[name] for name in OUTPUTS},
        )
    done = export(ExportRequest(trainer.directory, tmp_path / "model", model=str(saved)))
    with loaded_quickly(done.published.path) as server:
        assert_serves(server, trainer)


def test_a_graph_of_other_parts_than_the_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train", parts=2)
    trainer.save()
    with deeprec_graph() as program:
        build(program, parts=5)
        other = program.save_meta(tmp_path / "other.meta")
    done = export(request(trainer, tmp_path / "model", model=str(other)))
    with loaded_quickly(done.published.path) as server:
        assert_serves(server, trainer)


def test_increments_and_full_checkpoints_become_deltas(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    asked = request(trainer, tmp_path / "model", updates=Updates(stamp=True))
    base = export(asked)
    with loaded_quickly(base.published.path) as server:
        assert_serves(server, trainer)
        for seed in range(3):
            trainer.train(seed)
            trainer.save_increment()
            delta_of(asked)
            assert server.update()["position"] == trainer.step
            assert_serves(server, trainer)
        trainer.train(9)
        gone = trainer.evict()
        trainer.save()
        delta_of(asked)
        server.update()
        assert_serves(server, trainer, gone)


def test_rows_as_bfloat16(tmp_path: Path) -> None:
    """Rows and default rows are stored rounded; the index is not."""
    import ml_dtypes

    trainer = Trainer(tmp_path / "train")
    trainer.save()
    asked = request(trainer, tmp_path / "model", casts=(".*_embedding/values=bfloat16",), updates=Updates())
    with loaded_quickly(export(asked).published.path) as server:
        for seed in range(2):
            probes = trainer.probes()
            rows = trainer.answers(probes)["user_rows"]
            found = server.predict(**probes)["user_rows"]
            assert np.array_equal(found, rows.astype(ml_dtypes.bfloat16).astype(np.float32))
            trainer.train(seed)
            trainer.save_increment()
            export_incremental(asked)
            server.update()


@pytest.mark.landing
@pytest.mark.parametrize("maps", [False, True])
def test_rows_in_8_bits(tmp_path: Path, maps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted graph multiplies what it gathers, default rows among them; deltas carry codes."""
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    asked = request(trainer, tmp_path / "model", casts=("int8",), map_tables=maps, updates=Updates())
    done = export(asked)
    assert done.variables.rounded.keys() == {f"{USERS}/values", f"{ITEMS}/values"}
    with loaded_quickly(done.published.path) as server:
        for seed in range(3):
            probes = trainer.probes()
            codes, scales, _ = to_codes(trainer.answers(probes)["user_rows"])
            found = server.predict(**probes)
            np.testing.assert_array_equal(found["user_rows"], codes * scales[:, np.newaxis])
            near = trainer.answers(probes)["item_rows"]  # sums of some rows
            np.testing.assert_allclose(found["item_rows"], near, atol=0.05)
            trainer.train(seed)
            trainer.save() if seed == 1 else trainer.save_increment()
            delta_of(asked)
            server.update()


def test_rollback_resume_and_merge(tmp_path: Path) -> None:
    """New keys of a delta that is taken back are absent again; merged deltas lead to the same rows."""
    trainer, model = Trainer(tmp_path / "train"), tmp_path / "model"
    trainer.save()
    asked = request(trainer, model, updates=Updates())
    base = export(asked)
    states = [state_of(trainer)]
    with loaded_quickly(base.published.path) as server:
        for seed in range(3):
            trainer.train(seed)
            trainer.save_increment()
            export_incremental(asked)
            states.append(state_of(trainer))
        server.update()
        everything = trainer.probes()
        assert_answers(server.predict(**everything), states[3].answers(everything))
        back = log_maintenance.rollback(model, states[1].step)
        assert server.update()["position"] == back.position
        assert_answers(server.predict(**everything), states[1].answers(everything))
        log_maintenance.resume(model)
        server.update()
        assert_answers(server.predict(**everything), states[3].answers(everything))
        assert log_maintenance.merge(model) is not None
    with loaded_quickly(base.published.path) as server:
        assert server.update()["deltas"] == 1
        assert_answers(server.predict(**everything), states[3].answers(everything))


def state_of(trainer: Trainer) -> Trainer:
    return dataclasses.replace(trainer)


def test_another_graph_is_no_delta(tmp_path: Path) -> None:
    """Another constant for absent keys is another graph; a later `.meta` of the same program is not."""
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    asked = request(trainer, tmp_path / "model", updates=Updates())
    export(asked)
    trainer.train(1)
    trainer.save()
    export_incremental(asked)
    trainer.train(2)
    trainer.save()
    with pytest.raises(SchemaChanged, match="graph"):
        export_incremental(request(trainer, tmp_path / "model", updates=Updates(), absent_keys={".*": "3"}))


def test_a_table_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    prefix = trainer.save()
    trainer.directory.joinpath("checkpoint").unlink()
    with deeprec_graph() as program:
        other = program.embedding_variable("other", 4, initializer=0.0)
        import tensorflow as tf

        ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
        tf.identity(program.embedding_lookup(other, ids), name="rows")
        meta = program.save_meta(tmp_path / "other.meta")
    wrong = ExportRequest(prefix, tmp_path / "m", model=str(meta), inputs={"x": "ids"}, outputs={"y": "rows"})
    with pytest.raises(MissingTensors, match="other"):
        export(wrong)


def test_tables_of_other_names(tmp_path: Path) -> None:
    """A table of names may rename tables; `--unmatched` says which are to be renamed."""
    import tensorflow as tf

    trainer = Trainer(tmp_path / "train")
    trainer.save()
    with deeprec_graph() as program:
        other = program.embedding_variable("scope/users", DIM, parts=2, initializer=NO_USER)
        user = tf.compat.v1.placeholder(tf.int64, [None], name="user")
        tf.identity(program.embedding_lookup(other, user), name="rows")
        meta = program.save_meta(tmp_path / "other.meta")
    ends: dict[str, Any] = {"inputs": {"user": "user"}, "outputs": {"rows": "rows"}}
    asked = ExportRequest(trainer.directory, tmp_path / "model", model=str(meta), updates=Updates(), **ends)
    (lost,) = compare_names(asked).unmatched.variables
    assert lost.variable.key == "scope/users"
    assert {ref.name for ref in lost.candidates} == {USERS, ITEMS}

    names = tmp_path / "names"
    names.write_text(f"scope/users {USERS}\n")
    renamed = structs.replace(asked, rename_file=names)
    left = compare_names(renamed).unmatched
    assert not left.variables
    assert not [ref for ref in left.tensors if ref.name.startswith(USERS)]
    with loaded_quickly(export(renamed).published.path) as server:
        for seed in range(2):
            found = server.predict(user=trainer.probes()["user"])["rows"]
            assert np.array_equal(found, trainer.answers(trainer.probes())["user_rows"])
            trainer.train(seed)
            trainer.save_increment()
            export_incremental(renamed)
            server.update()


def test_dry_run_and_inspect_do_not_import_tensorflow(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train")
    prefix = trainer.save()
    ends = [f"--input={name}={tensor}" for name, tensor in INPUTS.items()]
    ends += [f"--output={name}={tensor}" for name, tensor in OUTPUTS.items()]
    code = (
        "import sys; from exporter.cli.app import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "assert 'tensorflow' not in sys.modules; sys.exit(code)"
    )

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = ["--out", str(tmp_path / "model")]
    planned = json.loads(run("--ckpt-dir", str(trainer.directory), *out, *ends, "--dry-run", "--json"))
    assert planned["status"] == "planned"
    seen = json.loads(run("inspect", f"{prefix}.meta", "--json"))
    assert [spec["name"] for spec in seen["placeholders"]] == ["user", "items"]
    assert seen["likely_outputs"][0]["tensor"] == "scores:0"
    assert len(seen["embedding_variables"]) == 2

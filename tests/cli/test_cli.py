"""The command line as its users meet it: help, modes, exit codes, errors, nothing written by a dry run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter import errors
from exporter.errors import ExportError, printable
from exporter.terminal.output import escape, rendered
from tests.support.commands import export_model


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_help_names_every_option_with_examples_and_exit_codes() -> None:
    ran = export_model("--help-all")
    assert ran.code == 0
    for word in ("--ckpt-dir", "--dry-run", "Examples:", "Exit codes:", "inspect"):
        assert word in ran.out


def test_export_says_what_it_did_and_what_comes_next(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    ran = export_model("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m")
    assert ran.code == 0
    assert ran.err == ""
    lines = dict(line.split(maxsplit=1) for line in ran.out.splitlines())
    assert lines["checkpoint"].startswith("model.ckpt-20 (TensorFlow V2, name-based), step 20: 19 tensors")
    assert lines["signature"] == "serving_default(item int64[?], user int64[?]) -> click float32[?]"
    assert lines["variables"].startswith("6, 443.8 KiB")
    assert lines["ignored"].startswith(
        "6 optimizer slots (443.8 KiB); 1 global step (8 B); 6 moving averages"
    )
    assert lines["published"].startswith(str(tmp_path / "m/20"))
    assert lines["next"] == f"serve-model run {tmp_path / 'm'}"


def test_an_export_says_whether_the_version_takes_deltas(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path]
    planned, plain = export_model(*options, "--dry-run"), export_model(*options)
    for ran in (planned, plain):
        assert "\ndeltas      not taken: --new-base always publishes a version that takes them\n" in ran.out
    base = export_model(*options, "--new-base", "always")
    assert f"published   {tmp_path}/21 in " in base.out
    assert "\ndeltas      taken: the next export with --incr publishes what changed\n" in base.out
    assert (
        export_model(*options, "--new-base", "always", "--again", "--json").document["takes_deltas"] is True
    )


def test_an_export_says_how_rows_are_put_in_order(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    strategy = ["--partition-strategy", "ranker/user_embedding=mod"]
    ran = export_model("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", *strategy)
    assert "  ranker/user_embedding: rows gathered from 3 mod partitions\n" in ran.out, ran.out + ran.err


def test_export_is_a_command_too(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", "--json"]
    assert export_model("export", *options, "--version", "7").document["version"] == 7
    assert export_model(*options).document["status"] == "nothing_to_do"


def test_json_is_one_document_with_its_version_first(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    ran = export_model("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert next(iter(ran.document)) == "format_version"
    assert ran.document["version"] == ran.document["position"] == 20
    assert ran.document["bytes_linked"] > 0 == ran.document["bytes_copied"]
    assert {variable["via"] for variable in ran.document["variables"]} == {"name"}
    assert ran.document["ignored"]["moving average"]["tensors"] == 6


def test_quiet_says_nothing(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    ran = export_model("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "20").is_dir()


def test_dry_run_writes_nothing_and_agrees_with_the_run(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "--json"]
    dry = export_model(*options, "--dry-run").document
    assert tree(tmp_path) == []
    real = export_model(*options).document
    assert dry.pop("dry_run") is True
    assert (dry.pop("status"), real["status"]) == ("planned", "published")
    assert dry == {key: real[key] for key in dry}


def test_version_goes_up_when_the_step_does_not(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "--json", "--again"]
    assert [export_model(*options).document["version"] for _ in range(3)] == [20, 21, 22]


def test_inspect_tells_a_checkpoint_a_graph_a_version_and_a_model_apart(
    ranker: Path, ranker_graph: Path
) -> None:
    assert export_model("inspect", ranker, "--json").document["kind"] == "checkpoint"
    assert export_model("inspect", ranker / "model.ckpt-20.meta", "--json").document["kind"] == "graph"
    assert export_model("inspect", ranker_graph, "--json").document["kind"] == "saved_model"
    assert export_model("inspect", ranker_graph.parent, "--json").document["kind"] == "model"


def test_inspect_lists_tensors(ranker: Path) -> None:
    document = export_model("inspect", ranker, "--tensors", "--json").document
    tensors = {entry["name"]: entry for entry in document["tensors"]}
    table = {"name": "ranker/user_embedding", "dtype": "float32", "shape": [5000, 16], "slices": 3}
    assert tensors["ranker/user_embedding"] == table | {"bytes": 320_000}
    assert document["step"] == 20
    assert "ranker/user_embedding" in export_model("inspect", ranker, "--tensors").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ckpt-dir is missing"),
        (["--ckpt-dir", "x"], "--out is missing"),
        (["--bogus"], "No such option"),
        (["--data", "teleport"], "teleport"),
        (["--out", "x", "inspect", "y"], "--out before 'inspect' has no effect"),
        (["--ckpt-dir", "x", "--out", "y", "--input", "a"], "--input 'a' is not of the form NAME=VALUE"),
        (["--ckpt-dir", "x", "--out", "y", "--feed", "a=1", "--feed", "a=2"], "--feed names 'a' twice"),
        (["--ckpt-dir", "x", "--out", "y", "--version", "-1"], "neither `time` nor an integer"),
        (["--ckpt-dir", "x", "--out", "y", "--cast", "int3"], "expected bfloat16, float16 or int8"),
        (["--ckpt-dir", "x", "--out", "y", "--partition-strategy", "a=up"], "expected mod or div"),
        (["--ckpt-dir", "x", "--out", "y", "--keep", "0"], "--keep 0 is too small"),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    ran = export_model(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert "hint:" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("options", [(), ("--model-arg", "a=b")])
def test_a_file_of_weights_is_no_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    np.savez(tmp_path / "w.npz", a=np.ones((2, 3), np.float32))
    file = tmp_path / "w.npz"
    ran = export_model("--ckpt-dir", file, "--out", tmp_path / "m", "--model", file, *options)
    assert (ran.code, f"--model {file} holds weights and no model" in ran.err) == (2, True), ran.err
    assert "--model pkg.mod:fn" in ran.err


def test_an_error_is_an_object_with_json_and_a_traceback_with_debug(tmp_path: Path) -> None:
    options = ["--ckpt-dir", tmp_path / "none", "--out", tmp_path / "m"]
    ran = export_model(*options, "--json")
    assert ran.code == ran.error["exit_code"] == 3
    assert ran.error["error"] == "CheckpointNotFound"
    assert ran.error["hint"]
    assert "Traceback" in export_model(*options, "--debug").err
    assert "Traceback" not in export_model(*options).err


def test_every_error_has_a_hint_and_a_documented_exit_code() -> None:
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ExportError)
    ]
    assert len(classes) > 20
    documented = errors.__doc__ or ""
    for kind in classes:
        assert kind.default_hint
        assert kind.__name__ in documented
        assert kind.exit_code in errors.Exit


def test_colours_are_decided_for_each_stream(ranker: Path) -> None:
    def plain(environment: dict[str, str]) -> bool:
        command = [sys.executable, "-m", "exporter.cli", "inspect", str(ranker)]
        clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
        done = subprocess.run(
            [sys.executable, "-c", "from exporter.cli import main; main()", *command[3:]],
            env=clean | environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return "\x1b[" not in done.stdout

    assert plain({})
    assert plain({"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert not plain({"FORCE_COLOR": "1"})


def test_a_closed_pipe_is_no_crash(ranker: Path) -> None:
    code = "from exporter.cli import main; main()"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, "inspect", str(ranker), "--tensors", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert "Traceback" not in done.stderr


def test_commands_without_a_builder_never_import_tensorflow(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    runs = [
        ["inspect", ranker],
        ["inspect", ranker_graph.parent],
        ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "--dry-run"],
        ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "--verify", "bytes"],
    ]
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.commands import export_model
for arguments in {json.loads(json.dumps(runs, default=str))!r}:
    assert export_model(*arguments).code == 0, arguments
    assert "tensorflow" not in sys.modules, arguments
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@given(st.text(), st.text())
def test_text_is_printed_as_it_is_beside_styles(text: str, after: str) -> None:
    line = f"[bold red]{escape(text)}[/]{escape(after)}"
    shown, behind = printable(text), printable(after)
    assert rendered(line, coloured=False) == shown + behind
    assert rendered(line, coloured=True) == f"\x1b[1;31m{shown}\x1b[0m{behind}"


def test_a_cause_tells_what_the_system_said_without_its_number() -> None:
    said = str(FileNotFoundError(errno.ENOENT, "No such file or directory", "golden.json"))
    assert ExportError("found", cause=said).cause == "No such file or directory: 'golden.json'"


def test_an_unknown_rank_is_no_vector(tmp_path: Path) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        any_rank = tf.compat.v1.placeholder(tf.float32, None, "any_rank")
        vector = tf.compat.v1.placeholder(tf.float32, [None], "vector")
        tf.add(any_rank, vector, "y")
        tf.compat.v1.train.export_meta_graph(str(tmp_path / "m.meta"))

    shown = export_model("inspect", tmp_path / "m.meta").out

    assert "any_rank float32[...]" in shown
    assert "vector float32[?]" in shown

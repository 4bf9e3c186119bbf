"""Options that are said once: by environment variables, and by a file of options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exporter.training.exports import export_environment
from serving import cli as serving_cli
from tests.support.commands import export_model, run_app


@pytest.fixture
def places(ranker: Path, ranker_graph: Path, tmp_path: Path) -> list[object]:
    return ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m"]


def test_a_variable_says_what_is_not_typed(places: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VERIFY": "bytes", "CAST": "bfloat16", "DRY_RUN": "1"}.items():
        monkeypatch.setenv(f"EXPORT_MODEL_{name}", value)
    ran = export_model(*places, "--cast", "ranker/user_embedding=float16", "--json")
    assert ran.code == 0, ran.err
    taken = {one["option"]: (one["value"], one["source"]) for one in ran.document["taken"]}
    assert taken == {
        "--verify": ("bytes", "EXPORT_MODEL_VERIFY"),
        "--dry-run": ("1", "EXPORT_MODEL_DRY_RUN"),
    }
    assert ran.document["status"] == "planned"
    rewritten = [one["name"] for one in ran.document["variables"] if one["rewritten"]]
    assert rewritten == ["ranker/user_embedding"]
    said = export_model(*places).err
    assert said.startswith(
        "not typed: --cast bfloat16 (EXPORT_MODEL_CAST), --dry-run 1 (EXPORT_MODEL_DRY_RUN)"
    )


def test_a_file_says_what_neither_is_typed_nor_a_variable(
    places: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "options.json"
    said = {"verify": "bytes", "keep": 3, "no_such": 1, "data": "copy", "cast": ["a.*=bfloat16"]}
    file.write_text(json.dumps(said))
    ran = export_model(*places, "--config", file)
    assert (ran.code, "unknown option 'no_such' in " in ran.err) == (2, True)
    del said["no_such"], said["cast"]
    file.write_text(json.dumps(said))
    monkeypatch.setenv("EXPORT_MODEL_DATA", "compact")
    document = export_model(*places, "--config", file, "--verify", "none", "--json").document
    assert document["verified"] == "none"
    assert document["bytes_linked"] == 0
    sources = {one["option"]: one["source"] for one in document["taken"]}
    assert sources == {"--data": "EXPORT_MODEL_DATA", "--keep": str(file)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read"),
        ("[]", "expected a JSON object"),
        ('{"kep": 3}', "did you mean 'keep'?"),
        ('{"keep": "three"}', "'three' is not a whole number"),
        ('{"options": "x"}', "'options' is only valid on the command line"),
        ('{"tolerance": []}', "'tolerance' is []: expected one value"),
        ('{"tolerance": [1, 2]}', "'tolerance' is [1, 2]: expected one value"),
        ('{"tolerance": {"a": 1}}', "expected one value"),
        ('{"keep": {"a": 1}}', "'a=1' is not a whole number"),
        ('{"keep": true}', "'keep' is true: expected a text or a number"),
        ('{"model": null}', "'model' is null: expected a text or a number"),
        ('{"incr": null}', "expected true or false"),
        ('{"incr": [true]}', "expected one value"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "options.json"
    file.write_text(text)
    ran = export_model("--ckpt-dir", tmp_path, "--out", tmp_path / "m", "--config", file)
    assert (ran.code, says in ran.err) == (2, True), ran.err


def test_a_url_is_shown_without_its_password(
    places: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORT_MODEL_MODEL_ARG", "source=https://me:s3cret@host/x")
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"feed": {"y": "https://me:s3cret@host/y"}}))
    said = export_model(*places, "--config", file, "--dry-run").err
    assert "--model-arg source=https://...@host/x (EXPORT_MODEL_MODEL_ARG)" in said
    assert f"--feed y=https://...@host/y ({file})" in said
    assert "s3cret" not in said


def test_the_same_values_are_the_same_plan(
    places: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert export_model(*places, "--data", "copy", "--verify", "bytes").code == 0
    monkeypatch.setenv("EXPORT_MODEL_DATA", "copy")
    (tmp_path / "o.json").write_text('{"verify": "bytes"}')
    ran = export_model("export", *places, "--config", tmp_path / "o.json", "--json")
    assert ran.document["status"] == "nothing_to_do"
    monkeypatch.setenv("EXPORT_MODEL_DATA", "compact")
    ran = export_model(*places, "--verify", "bytes", "--json")
    assert ran.document["status"] == "published", "another value is another plan"


def test_what_has_no_effect_is_left_out(places: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TOLERANCE": "0.5",
        "INTERVAL": "2",
        "ADD": "stamp",
        "DELTA_BUDGET": "change=0.1",
    }.items():
        monkeypatch.setenv(f"EXPORT_MODEL_{name}", value)
    ran = export_model(*places, "--dry-run", "--json")
    assert (ran.code, ran.document["taken"]) == (0, []), ran.err
    assert export_model(*places, "--tolerance", "0.5").code == 2, "what is typed is meant"


def test_subcommands_and_the_other_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPORT_MODEL_HISTORY_LAST", "none")
    assert "'none' is not a whole number" in export_model("history", tmp_path).err
    monkeypatch.setenv("SERVE_MODEL_RUN_PORT", "http")
    assert "'http' is not a whole number" in run_app(serving_cli.app, "run", str(tmp_path)).err
    monkeypatch.setenv("EXPORT_MODEL_JSON", "1")
    assert export_model("--ckpt-dir", tmp_path / "none", "--out", tmp_path / "m").error["exit_code"] == 3


def test_a_wrong_value_is_told_with_the_place_that_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = ("--ckpt-dir", tmp_path, "--out", tmp_path / "m")
    file = tmp_path / "options.json"
    file.write_text('{"keep": "three"}')
    said = export_model(*places, "--config", file).err
    assert (f"error: {file}: " in said, f"correct it in {file}" in said) == (True, True), said
    monkeypatch.setenv("EXPORT_MODEL_KEEP", "three")
    said = export_model(*places).err
    assert "error: EXPORT_MODEL_KEEP: " in said
    assert "hint:  correct EXPORT_MODEL_KEEP, or unset it" in said
    said = export_model(*places, "--keep", "four").err
    assert "EXPORT_MODEL_KEEP" not in said, "what is typed goes first"


def test_a_variable_that_is_nearly_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPORT_MODEL_KEPE", "3")
    monkeypatch.setenv("EXPORT_MODEL_HISTORY_LSAT", "3")
    for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_80_TCP", "PORT_80_TCP_PROTO"):
        monkeypatch.setenv(f"EXPORT_MODEL_{name}", "tcp://10.0.0.1:80")  # as Kubernetes sets for a service
    ran = export_model("--ckpt-dir", tmp_path, "--out", tmp_path / "m")
    told = [line for line in ran.err.splitlines() if line.startswith("warning")]
    assert [line.partition("did you mean ")[2] for line in told] == [
        "EXPORT_MODEL_HISTORY_LAST?",
        "EXPORT_MODEL_KEEP?",
    ]


def test_exports_beside_a_training_are_what_their_request_says() -> None:
    assert "EXPORT_MODEL_KEEP" not in export_environment({"EXPORT_MODEL_KEEP": "1"})

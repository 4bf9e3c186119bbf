"""An option that would change nothing is refused, with what would give it an effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.errors import UsageError
from exporter.options import ExportRequest, Verify
from serving import cli as serving_cli
from tests.support.commands import export_model, run_app

EXPORT = ["--ckpt-dir", "train", "--out", "model"]
ALONE = {
    "--interval": ([*EXPORT, "--interval", "2"], "--watch"),
    "--tolerance": ([*EXPORT, "--tolerance", "0.1", "--verify", "bytes"], "--verify outputs"),
    "--verify-inputs": ([*EXPORT, "--verify-inputs", "requests"], "--verify outputs"),
    "--no-warmup": ([*EXPORT, "--no-warmup"], "--incr or --updatable or --map-tables"),
    "--grpc-ca": ([*EXPORT, "--incr", "--grpc-ca", "system"], "--notify"),
    "--keep": (["merge", "model", "--keep", "2"], "--rebase"),
    "--despite-hold": (["merge", "model", "--despite-hold"], "--rebase"),
    "--engine": (["verify", "model", "--engine", "ray"], "--bytes"),
    "--patience": (["doctor", "model", "--patience", "2"], "--target"),
    "--deadline": (["doctor", "model", "--deadline", "2"], "--target"),
    "--model-name": (["doctor", "model", "--model-name", "m"], "--target"),
}
AGENT = ["agent", "--model-base-path", "model", "--target", "localhost"]


@pytest.mark.parametrize("option", ALONE)
def test_an_option_is_refused_without_what_it_goes_with(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    arguments, needs = ALONE[option]
    ran = export_model(*arguments)
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert option in ran.err
    assert f"with {needs}" in ran.err
    assert f"hint:  add {needs}" in ran.err


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["--pace-max-delay", "2"], "--pace-factor"),
        (["--probe-seconds", "2"], "--pace-factor"),
        (["--canary-drift", "2"], "--canary"),
        (["--canary-seconds", "2"], "--canary"),
    ],
)
def test_the_agents_options_too(arguments: list[str], needs: str) -> None:
    ran = run_app(serving_cli.app, *AGENT, *arguments)
    assert (ran.code, f"hint:  add {needs}, or leave out {arguments[0]}" in ran.err) == (2, True), ran.err


def test_only_what_is_given_is_named() -> None:
    ran = export_model(*EXPORT, "--notify", "localhost", "--min-change", "0.1")
    assert "error: --notify and --min-change go with --incr\n" in ran.err
    assert "hint:  add --incr, or leave out --notify and --min-change\n" in ran.err


def test_a_request_from_python_is_judged_by_what_it_holds() -> None:
    with pytest.raises(UsageError, match=r"^--tolerance goes with --verify outputs"):
        ExportRequest(Path("train"), Path("model"), tolerance=0.1)
    request = ExportRequest(Path("train"), Path("model"), tolerance=0.1, verify=Verify.OUTPUTS)
    assert request.tolerance == 0.1
    ExportRequest(Path("train"), Path("model"), min_change=0.1)  # `export_incremental` is no option


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["--object-path", "net"], "holds no objects", "leave out --object-path"),
        (["--by-order"], "the checkpoint's arrays have names", "leave out --by-order"),
        (
            ["--partition-strategy", "ranker/user_embeddin=mod"],
            "no served variable is called so",
            "or name a variable: ranker/user_embedding, for example",
        ),
        (
            ["--rename", "user_embedding=x"],
            "no served variable is called so",
            "or name a variable: ranker/user_embedding, for example",
        ),
    ],
)
def test_what_no_variable_is_matched_by(
    ranker: Path, ranker_graph: Path, tmp_path: Path, arguments: list[str], said: str, hint: str
) -> None:
    places = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m"]
    ran = export_model(*places, *arguments)
    assert (ran.code, arguments[0] in ran.err, said in ran.err) == (2, True, True), ran.err
    assert hint in ran.err
    assert not (tmp_path / "m").exists()

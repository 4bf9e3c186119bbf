"""Stores elsewhere are refused where a local path is expected, and nothing is made in their name."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from exporter import ExportRequest
from exporter.cli import app as cli
from exporter.errors import UsageError
from exporter.pipeline import full, incremental
from exporter.storage.local_paths import local_path
from exporter.training.chief import checkpoint_dir
from exporter.training.exports import ExportArguments
from exporter.training.hook import IncrementHook
from serving import cli as serving_cli
from serving.server import ModelServer
from tests.support.commands import export_model, run_app

IN_STORES = {
    ("export-model", "ckpt_dir"),
    ("export-model", "out"),
    ("inspect", "path"),
    *(("init", name) for name in ("ckpt_dir", "out")),
    ("doctor", "ckpt_dir"),
    ("status", "model_base_path"),
    ("update", "model_base_path"),
    *(
        (command, "model")
        for command in ("merge", "rollback", "resume", "tag", "verify", "history", "doctor")
    ),
    *((command, "model") for command in ("push", "pull")),  # which refuse it, and know what was meant
}
"""What checkpoints and published models are named by."""


@pytest.mark.parametrize("app", [cli.app, serving_cli.app], ids=["export-model", "serve-model"])
def test_every_path_of_a_command_line_refuses_stores(app: typer.Typer) -> None:
    """Each option and argument that is a path."""
    root = typer.main.get_command(app)
    context = root.make_context("program", [], resilient_parsing=True)
    found = 0
    for command in (root, *root.commands.values()):
        for parameter in command.params:
            parser = getattr(getattr(parameter.type, "func", None), "__qualname__", "")
            if not parser.startswith(("path_parser.", "checkpoint_parser.")):
                continue
            found += 1
            with pytest.raises(UsageError, match="only local paths"):
                parameter.type_cast_value(context, "hdfs://name:8020/m")
            name = "export-model" if command is root else command.name
            if (name, parameter.name) in IN_STORES:
                assert parameter.type_cast_value(context, "gs://bucket/m") == Path("gs:/bucket/m")
                continue
            with pytest.raises(UsageError, match="only local paths"):
                parameter.type_cast_value(context, "gs://bucket/m")
    assert found >= 8


@pytest.mark.parametrize(
    ("option", "url"),
    [
        (option, url)
        for option in ("--ckpt-dir", "--out", "--signatures", "--rename", "--requests")
        for url in ("gs://bucket/m", "s3://bucket/m", "hdfs://name:8020/m", "azfs://a/b")
        if option not in ("--ckpt-dir", "--out") or url[:2] not in ("gs", "s3")
    ],
)
def test_a_store_is_a_usage_error_and_no_directory(
    option: str, url: str, ranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"--ckpt-dir": str(ranker), "--out": "m", option: url}
    ran = export_model(*[text for pair in given.items() for text in pair], "--json")
    assert ran.code == 2, ran.err
    assert f"{option} {url}: only local paths" in ran.error["message"]
    assert "LOCAL" in ran.error["hint"] or "the store's own tool" in ran.error["hint"]
    assert ("publish to a local directory" in ran.error["hint"]) is (option == "--out")
    if url.startswith("hdfs:"):
        assert ("hdfs dfs -put" in ran.error["hint"]) is (option == "--out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "hdfs://name/m"),
        ("inspect", "train", "--unmatched", "gs://bucket/graph.meta"),
        ("diff", "hdfs://name/m@900", "train"),
        ("diff", "train", "viewfs://name/m"),
        ("verify", "hdfs://name/m"),
        ("merge", "s3a://bucket/m"),
        ("rollback", "hdfs://name/m", "--to", "9"),
        ("resume", "hdfs://name/m"),
        ("history", "hdfs://name/m"),
        ("doctor", "hdfs://name/m"),
        ("--ckpt-dir", "train", "--out", "m", "--model", "gs://bucket/graph.meta"),
        ("--ckpt-dir", "train", "--out", "m", "--custom-objects", "gs://bucket/layers.py"),
        ("--ckpt-dir", "train", "--out", "m", "--engine", "local", "--job-dir", "hdfs://name/jobs"),
    ],
)
def test_other_commands_refuse_stores(
    arguments: tuple[str, ...], ranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").symlink_to(ranker)
    ran = export_model(*arguments, "--json")
    assert (ran.code, ran.error["error"]) == (2, "UsageError"), ran.err
    assert "only local paths" in ran.error["message"]


@pytest.mark.parametrize("url", ["s3://", "s3:///m", "gs://", "az:///", "gs://bucket/m#part"])
def test_a_url_without_a_bucket(url: str) -> None:
    ran = export_model("inspect", url, "--json")
    assert (ran.code, f"PATH {url}: expected {url[:2]}://" in ran.error["message"]) == (2, True), ran.err


@pytest.mark.parametrize("url", ["s3://bucket/m/../other", "gs://bucket/../../etc", "az://box/a\nb/m"])
def test_a_url_that_names_no_object(url: str, tmp_path: Path) -> None:
    for arguments in (("history", url), ("inspect", url), ("push", tmp_path, url), ("pull", url, tmp_path)):
        ran = export_model(*arguments, "--json")
        assert (ran.code, "cannot be part of an object's name" in ran.error["message"]) == (2, True), ran.err


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("s3a://bucket/m", "s3://bucket/m"),
        ("gcs://bucket/m", "gs://bucket/m"),
        ("abfss://box@account.dfs.core.windows.net/a/m", "az://box/a/m"),
        ("wasbs://box@account.blob.core.windows.net/m", "az://box/m"),
        ("s3:bucket/m", "s3://bucket/m"),
        ("s3//bucket/m", "s3://bucket/m"),
        ("GS:bucket/m", "gs://bucket/m"),
        ("s3a:/bucket/m", "s3://bucket/m"),
        ("az:box/m", "az://box/m"),
    ],
)
def test_other_names_of_our_stores(url: str, known: str, tmp_path: Path) -> None:
    for arguments in (
        ("inspect", url),
        ("--ckpt-dir", url, "--out", tmp_path / "m"),
        ("--ckpt-dir", tmp_path, "--out", url),
        ("push", tmp_path, url),
        ("pull", url, tmp_path / "m"),
    ):
        ran = export_model(*arguments, "--json")
        assert (ran.code, f"write {known}" in ran.error["hint"]) == (2, True), ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:S3cr3t@bucket/m",
        "hdfs://who:S3cr3t@name/m",
        "https://account.blob.core.windows.net/box/m?sv=1&sig=S3cr3t",
        "s3a://key:S3cr3t@bucket/m",
        "az://box/m?sig=S3cr3t",
        "s3:key:S3cr3t@bucket/m",
        "https:who:S3cr3t@name/m",
    ],
)
def test_no_secret_of_a_url_is_shown(url: str, tmp_path: Path) -> None:
    for arguments in (
        ("inspect", url),
        ("--ckpt-dir", url, "--out", tmp_path / "m"),
        ("--ckpt-dir", tmp_path, "--out", url),
        ("push", tmp_path, url),
        ("pull", url, tmp_path / "m"),
    ):
        ran = export_model(*arguments)
        assert ran.code == 2, ran.err
        assert "S3cr3t" not in ran.out + ran.err
    assert list(tmp_path.iterdir()) == []


def test_serve_model_refuses_stores() -> None:
    for arguments in (("gs://bucket/models/m",), ("--model_base_path=gs://bucket/models/m",)):
        ran = run_app(serving_cli.app, "run", *arguments)
        assert ran.code == 2
        assert "gs://bucket/models/m: only local paths" in ran.err
        assert "export-model pull gs://bucket/models/m m, then serve-model run m " in ran.err
    for url in ("s3:models/m", "s3:/models/m", "s3//models/m"):
        ran = run_app(serving_cli.app, "run", url)
        assert (ran.code, "export-model pull s3://models/m m, then" in ran.err) == (2, True), ran.err
    ran = run_app(
        serving_cli.app,
        "predict",
        "127.0.0.1:1",
        "--model-name",
        "m",
        "--json-input",
        "gs://bucket/request.json",
    )
    assert (ran.code, "--json-input gs://bucket/request.json: only local" in ran.err) == (2, True)


def test_file_urls_are_paths(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    ran = export_model(
        *("--ckpt-dir", f"file://{ranker}", "--model", f"file://{ranker_graph}"),
        *("--out", f"file://localhost{tmp_path}/m"),
    )
    assert ran.code == 0, ran.err
    assert (tmp_path / "m" / "20" / "saved_model.pb").is_file()
    assert export_model("verify", f"file://{tmp_path}/m").code == 0


def test_requests_take_file_urls_and_refuse_others() -> None:
    request = ExportRequest(Path("file:///train"), Path("file:///models/m"), model="file:///x/graph.meta")
    assert (request.ckpt_dir, request.out, request.model) == (
        Path("/train"),
        Path("/models/m"),
        "/x/graph.meta",
    )
    assert ExportRequest(Path("a"), Path("b"), model="my.mod:fn").model == "my.mod:fn"
    assert ExportRequest(Path("gs://b/train"), Path("m")).ckpt_dir == Path("gs:/b/train")
    assert ExportRequest("train", "gs://b/m").out == Path("gs:/b/m"), "the functions of exporter open it"
    for paths in ((Path("hdfs://b/train"), Path("m")), (Path("train"), Path("hdfs://b/m"))):
        with pytest.raises(UsageError, match=r"://b/(train|m): only local paths"):
            ExportRequest(*paths)
    for refuses in (full.plan, incremental.plan_incremental):
        with pytest.raises(UsageError, match=r"gs://b/m: only local paths"):
            refuses(ExportRequest("train", "gs://b/m", model="my.mod:fn"))


@pytest.mark.parametrize("url", ["file://", "file://host/a", "file://models", "file:models"])
def test_file_urls_of_elsewhere_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected a path on this machine"):
        local_path("--out", url)


@pytest.mark.parametrize("text", ["a:b", "C:/x", "./gs:", "models/ranker", "a.py:fn", "-", "x://y"])
def test_what_is_no_url_stays_as_it_is(text: str) -> None:
    assert local_path("--out", text) == Path(text)


def test_a_path_that_is_there_is_no_misspelt_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, command in (
        ("hdfs:name/m", "hdfs dfs -get hdfs://name/m LOCAL"),
        ("hdfs:/name/m", "hdfs dfs -get"),
    ):
        with pytest.raises(UsageError) as refused:
            local_path("PATH", url)
        assert command in refused.value.hint
    Path("hdfs:name/m").mkdir(parents=True)
    assert local_path("PATH", "hdfs:name/m") == Path("hdfs:name/m")
    assert (
        local_path("--out", "file:/models/m")
        == local_path("--out", Path("file:///models/m"))
        == Path("/models/m")
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--ckpt-dir", "train", "--model", "m.py:f", "--out="],
        ["--ckpt-dir=", "--model", "m.py:f", "--out", "m"],
        ["inspect", ""],
        ["history", ""],
        ["push", "", "s3://bucket/m"],
    ],
)
def test_an_empty_path_is_not_the_working_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell's variable that is not set."""
    monkeypatch.chdir(tmp_path)
    ran = export_model(*words, "--json")
    assert (ran.code, "is empty: expected a path" in ran.error["message"]) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_trainers_refuse_stores_before_they_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="only local paths"):
        ExportArguments.of(ExportRequest(Path("gs://bucket/train"), Path("m")))
    with pytest.raises(UsageError, match="only local paths"):
        IncrementHook("gs://bucket/train", save_increment_secs=60)
    with pytest.raises(UsageError, match="only local paths"), checkpoint_dir("gs://bucket/train"):
        pass
    for arguments in (
        ["--ckpt-dir", "train", "--out", "hdfs://name/m"],
        ["--ckpt-dir", "train", "--out=hdfs://name/m"],
        ["--ckpt-dir=gs://bucket/train", "--out", "m"],
    ):
        with pytest.raises(UsageError, match="only local paths"):
            ExportArguments.of(arguments)
    with pytest.raises(UsageError, match="only local paths"):
        ModelServer("gs://bucket/m", name="m")
    assert list(tmp_path.iterdir()) == []

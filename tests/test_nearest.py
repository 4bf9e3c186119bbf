"""A mistyped name of a model, a version or a graph is answered with the nearest one that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.storage import local_paths
from exporter.storage.files import nearest
from exporter.storage.local_paths import quoted
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, publish_base


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models/ranker` with version 10, `models/notes` without any, `train` with a checkpoint, a builder."""
    directory = tmp_path_factory.mktemp("place")
    trainer = Trainer(directory / "train")
    trainer.save()
    publish_base(trainer, Serving(), directory / "models" / "ranker")
    (directory / "models" / "notes").mkdir()
    (directory / "my_model.py").write_text("def serving(): ...\n")
    (directory / "train" / "graph.meta").write_bytes(b"")
    return directory


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("models/rnaker", "models/ranker"),
        ("models/rank", "models/ranker"),
        ("modles/ranker", "models/ranker"),
        ("modles/rnaker", "models/ranker"),
        ("models/ranker/10", None),
        ("models/zzz", None),
        ("nothing/like/it", None),
        ("my_model.py/ranker", None),
    ],
)
def test_the_nearest_path(place: Path, typed: str, meant: str | None) -> None:
    assert nearest(place / typed) == (None if meant is None else place / meant)


def test_relative_paths_stay_relative(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert nearest(Path("modles/ranker")) == Path("models/ranker")


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "M"),
        ("merge", "M"),
        ("merge", "M", "--rebase"),
        ("rollback", "M", "--to", "10"),
        ("resume", "M"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("typed", ["models/rnaker", "modles/ranker", "models", "models/ranker/10"])
def test_commands_name_the_model_that_was_meant(place: Path, command: tuple[str, ...], typed: str) -> None:
    ran = export_model(*(place / typed if word == "M" else word for word in command))
    assert ran.code == 5
    assert f"did you mean {place / 'models' / 'ranker'}?" in ran.err
    assert not list((place / "models").glob(".*")), "nothing is written where nothing is published"


def test_a_model_without_neighbours_gets_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    ran = export_model("verify", tmp_path / "model", "--json")
    assert (ran.code, ran.error["error"]) == (5, "NotUpdatable")
    assert ran.error["hint"].startswith("publish a base: export-model")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("models/rank", "models/ranker/10"),
        ("models/ranker", "models/ranker/10"),
        ("modles/ranker/10", "models/ranker/10"),
        ("my_modle.py", "my_model.py:FUNCTION"),
        ("my_modle.py:serving", "my_model.py:serving"),
        ("train/grpah.meta", "train/graph.meta"),
    ],
)
def test_a_mistyped_graph(place: Path, typed: str, meant: str) -> None:
    ran = export_model(
        "--ckpt-dir", place / "train", "--model", place / typed, "--out", place / "out", "--json"
    )
    assert ran.code != 0
    assert f"--model {place / meant}" in ran.error["hint"]


def test_a_mistyped_checkpoint_directory(place: Path) -> None:
    ran = export_model("inspect", place / "trian" / "model.ckpt-10", "--json")
    assert ran.code == 3
    assert ran.error["hint"] == f"did you mean {place / 'train' / 'model.ckpt-10'}?"
    ran = export_model("inspect", place / "trian" / "tower.keras", "--json")
    assert ran.error["hint"] == f"did you mean {place / 'train'}?", "what is not there is not named"


def test_what_is_proposed_can_be_pasted(place: Path) -> None:
    spaced = place / "of two words"
    (place / "models").rename(spaced)
    ran = export_model("verify", place / "of two word" / "ranker", "--json")
    assert ran.error["hint"] == f"did you mean '{spaced / 'ranker'}'?"
    ran = export_model("--ckpt-dir", place / "train", "--out", spaced / "ranker" / "10", "--json")
    assert ran.error["hint"].endswith(f": '{spaced / 'ranker'}'")


def test_a_path_that_stands_for_a_url_is_quoted_as_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_paths, "shown", lambda text: text.replace("/tmp/m", "s3://b/a model"))
    assert quoted(Path("/tmp/m/20")) == "'s3://b/a model/20'"


def test_a_hint_names_a_model_in_a_store_by_its_url() -> None:
    assert quoted(Path("s3://bucket/ranker")) == "s3://bucket/ranker"
    assert quoted(Path("C:/ranker")) == "C:/ranker"

"""`--keep N` that keeps more than N versions says which, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.publish.versions import lease
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, publish_base
from tests.support.step_models import MODEL, save

RECENT = "it was superseded less than 300 s ago"


def test_an_export_says_why_it_kept_more(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    options = ("--ckpt-dir", tmp_path / "train", "--model", f"{tmp_path / 'model.py'}:build")
    options = (*options, "--out", tmp_path / "model", "--keep", 1)
    save(tmp_path / "train", 10)
    first = export_model(*options, "--json").document
    assert first["versions_kept"] == []
    save(tmp_path / "train", 20)
    ran = export_model(*options)
    assert ran.code == 0
    assert f"version 10, too: {RECENT}" in ran.out
    save(tmp_path / "train", 30)
    with lease(tmp_path / "model" / "10"):
        third = export_model(*options, "--json").document
    assert third["versions_kept"] == [{"version": number, "reason": RECENT} for number in (10, 20)]


@pytest.mark.parametrize("as_json", [True, False])
def test_so_does_a_new_base(tmp_path: Path, as_json: bool) -> None:
    trainer, model = Trainer(tmp_path / "train"), tmp_path / "model"
    trainer.save()
    publish_base(trainer, Serving(), model)
    trainer.train()
    trainer.increment()
    assert export_model("--ckpt-dir", trainer.directory, "--out", model, "--incr", "-q").code == 0
    ran = export_model("merge", model, "--rebase", "--keep", 1, *(["--json"] if as_json else []))
    if as_json:
        assert ran.document["versions_kept"] == [{"version": 10, "reason": RECENT}]
    else:
        assert f"version 10, too: {RECENT}" in ran.out

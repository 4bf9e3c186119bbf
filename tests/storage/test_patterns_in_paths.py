"""TensorFlow takes some paths for patterns of names: models are neither published nor served there."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from exporter.errors import UsageError
from exporter.storage.local_paths import require_no_pattern
from serving.cli import app as serving_app
from tests.support.commands import export_model, run_app
from tests.support.mapped_models import MappedModel

CHARACTERS = sorted({*string.printable, "é"} - {"/"} - {*string.whitespace[1:]})
PATTERNS = ("a*b", "a?b", "a[b]", "a\\b")


@pytest.mark.parametrize("character", CHARACTERS)
def test_what_tensorflow_takes_for_a_pattern_is_refused_and_nothing_else(
    character: str, tmp_path: Path
) -> None:
    """A name is one if a list of what is in that directory is another one."""
    import tensorflow as tf

    own = tmp_path / f"x{character}y]"
    for name in ("xy", "x0y]", "xy]", own.name):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "delta").touch()
    listed = [bytes(path).decode() for path in tf.io.matching_files(f"{own}/*").numpy()]
    try:
        require_no_pattern("--out", own)
        is_refused = False
    except UsageError:
        is_refused = True
    assert is_refused == (listed != [f"{own}/delta"])


@pytest.mark.parametrize("name", PATTERNS)
def test_no_command_publishes_or_serves_there(name: str, tmp_path: Path) -> None:
    model, place = MappedModel(tmp_path / "one"), tmp_path / name
    plain = ("--ckpt-dir", model.train, "--model", model.model)
    for options in (
        ("--out", place / "ranker"),
        ("--out", place / "ranker", "--incr"),
        ("--out", model.out, "--map-tables", "--served-at", f"/models/{name}"),
    ):
        ran = export_model(*plain, *options, "--json")
        assert (ran.code, "for a pattern" in ran.error["message"]) == (2, True), ran.err
    assert not place.exists()
    assert not model.out.exists()
    ran = run_app(serving_app, "run", place, "--port", 0, "--json")
    assert (ran.code, "for a pattern" in ran.error["message"]) == (2, True), ran.err
    config = tmp_path / "models.config"
    path = str(place).replace("\\", "\\\\")
    entry = f'name: "m" base_path: "{path}" model_platform: "tensorflow"'
    config.write_text(f"model_config_list {{ config {{ {entry} }} }}")
    ran = run_app(serving_app, "run", "--model-config-file", config, "--port", 0, "--json")
    assert (ran.code, "for a pattern" in ran.err) == (2, True), ran.err

"""The command for a new base is whole: it can be typed, from any directory."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.publish.kept_export import look_at_trainer
from exporter.publish.made_by import new_base
from exporter.publish.versions import newest_version
from exporter.storage.layout import MADE_BY_FILE
from tests.support.commands import export_model
from tests.support.logs import Serving
from tests.support.object_stores import Bucket
from tests.support.setting import followed

ROOT = Path(__file__).parents[2]


def run(line: str) -> subprocess.CompletedProcess[str]:
    """Type a line into a shell, in a directory that has nothing to do with it."""
    program = f'export-model() {{ {sys.executable} -m exporter "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", program + line],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_what_was_exported_is_exported_again_by_the_command(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    model = tmp_path / "it's here" / "ranker"
    done = export_model(
        *("--ckpt-dir", ranker, "--model", ranker_graph, "--out", model, "--new-base=always"),
        *("--cast", ".*user_embedding=float16", "--keep", "3"),
    )
    assert done.code == 0, done.err
    line = new_base(model)
    assert line.startswith(f"cd {Path.cwd()} && export-model --ckpt-dir={ranker} ")
    kept = model / MADE_BY_FILE
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    before = newest_version(model)
    done_again = run(line)
    assert done_again.returncode == 0, done_again.stderr
    after = newest_version(model)
    assert before is not None and after is not None and after.version > before.version
    manifests = [json.loads((each.path / "manifest.json").read_text()) for each in (before, after)]
    assert manifests[0]["plan_digest"] == manifests[1]["plan_digest"], "by the same options"
    asked = run(look_at_trainer(model))
    assert (asked.returncode, "would write   nothing" in asked.stdout) == (0, True), asked


def test_of_a_model_in_a_store_it_is_whole_too(
    ranker: Path, ranker_graph: Path, bucket: Bucket, tmp_path: Path
) -> None:
    url = bucket.url("models/ranker")
    done = export_model("--ckpt-dir", ranker, "--model", ranker_graph, "--out", url, "--new-base=always")
    assert done.code == 0, done.err
    line = new_base(url)
    assert f"--out={url}" in line
    assert MADE_BY_FILE not in "".join(bucket.names()), "it is this user's alone"
    again = run(line)
    assert again.returncode == 0, again.stderr
    asked = run(look_at_trainer(url))
    assert (asked.returncode, "would write   nothing" in asked.stdout) == (0, True), asked
    assert look_at_trainer(bucket.url("other")) == f"export-model doctor {bucket.url('other')}"


def test_without_it_the_manifest_has_the_names(tmp_path: Path) -> None:
    followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3, name="ranker")
    assert new_base(tmp_path / "ranker").startswith("export-model --ckpt-dir train --model WHAT --out ")
    golden = ROOT / "tests/golden/0.2.1/models/ranker"
    assert "--ckpt-dir train --model model.py:serving --out" in new_base(golden)
    for damage in ("{", "[]", '{"arguments": 3}', '{"arguments": [1], "directory": null}'):
        (tmp_path / "ranker" / MADE_BY_FILE).write_text(damage)
        assert new_base(tmp_path / "ranker").startswith("export-model --ckpt-dir train")
    assert new_base(tmp_path / "none").startswith("export-model --ckpt-dir DIR --model WHAT --out")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_another_user_wrote_is_no_command(tmp_path: Path) -> None:
    kept = tmp_path / MADE_BY_FILE
    kept.write_text(json.dumps({"directory": "/", "arguments": ["--model=evil.py:f"]}))
    assert "evil" in new_base(tmp_path)
    os.chown(kept, 12345, 12345)
    assert "evil" not in new_base(tmp_path)

"""Examples run as a reader of them would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.clusters import DIGITS


def test_the_demo_serves_what_it_trained(tmp_path: Path) -> None:
    command = [sys.executable, DIGITS / "demo.py", "--keep", tmp_path, "--steps", "200"]
    done = subprocess.run(command, cwd=DIGITS.parents[1], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "--model examples/digits/model.py:serving" in done.stdout
    assert re.search(r"serving digits version 2\d\d on 127\.0\.0\.1:\d+", done.stdout)
    assert "served scores are equal to the training graph's" in done.stdout
    assert done.stdout.count("\n") < 40
    assert done.stderr == ""
    assert list((tmp_path / "models" / "digits").glob("*/saved_model.pb"))


def test_the_readme_of_the_examples_names_files_that_exist() -> None:
    readme = (DIGITS.parent / "README.md").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", readme)
    assert linked
    assert [name for name in linked if not (DIGITS.parent / name).exists()] == []

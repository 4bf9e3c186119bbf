"""Examples run as a reader of them would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters import DIGITS, DigitsTraining

ROOT = DIGITS.parents[1]
RANKER = DIGITS.with_name("ranker")


def test_the_first_look_needs_no_tensorflow(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "tensorflow.py").write_text("raise ModuleNotFoundError(name='tensorflow')\n")
    command = [sys.executable, DIGITS.with_name("first") / "demo.py", "--keep", tmp_path / "kept"]
    environment = os.environ | {"PYTHONPATH": str(absent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("   $ export-model ") == 4
    assert "published   models/plain/300" in done.stdout
    assert re.search(r"users +40 +800 ", done.stdout)
    assert "delta         239 rows in 3 variables" in done.stdout
    assert re.search(r"delta +320 +320 +changes since 300; 239 rows", done.stdout)
    (delta,) = (tmp_path / "kept/models/clicks/deltas").glob("*/*-*/manifest.json")
    assert delta.stat().st_size > 0


@pytest.mark.landing
def test_the_demo_serves_what_it_trained(digits: DigitsTraining) -> None:
    printed = digits.printed
    assert "--model examples/digits/model.py:serving" in printed
    assert re.search(r"serving digits version 3\d\d on 127\.0\.0\.1:\d+", printed)
    assert "served scores are equal to the training graph's" in printed
    assert printed.count("\n") < 40
    assert list((digits.directory / "models" / "digits").glob("*/saved_model.pb"))


def test_the_demo_keeps_a_running_model_fresh(tmp_path: Path) -> None:
    command = [sys.executable, RANKER / "demo.py", "--keep", tmp_path, "--updates", "2", "--replicas", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    base = re.search(r"serving ranker version (\d+) on 127\.0\.0\.1:\d+", done.stdout)
    row = r"^ +(\d+) +([\d,]+) +[\d,]+ KiB +([\d.]+)% +[\d.]+ s +([\d,]+) of 1,000 +0\.\d{4}$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    steps = [int(step) for step, *_ in rows]  # twice the same: rows that a worker wrote after it had counted
    assert base
    assert len(rows) >= 2
    assert sorted([int(base[1]), *steps]) == [int(base[1]), *steps]
    assert all(touched != "0" and float(part) < 50 for _, touched, part, _ in rows)
    assert any(changed != "0" for *_, changed in rows)
    assert len(re.findall(r"serving ranker version \d+ on", done.stdout)) == 2
    assert re.search(r"answers of all 2 servers: [\d.]+ s \(median\), [\d.]+ s \(longest\)", done.stdout)
    assert f"training ended at step {steps[-1]}: " in done.stdout
    assert "equal to the trainer's own" in done.stdout
    assert f"the servers have loaded version {base[1]} and nothing else" in done.stdout
    assert done.stdout.count("\n") < 30
    assert done.stderr == ""
    assert [path.parent.name for path in (tmp_path / "models/ranker").glob("*/saved_model.pb")] == [base[1]]
    assert (tmp_path / f"models/ranker/deltas/{int(base[1]):020d}").is_dir()


def test_the_readme_of_the_examples_names_files_that_exist() -> None:
    readme = (DIGITS.parent / "README.md").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", readme)
    assert linked
    assert [name for name in linked if not (DIGITS.parent / name).exists()] == []

"""The task that the page on pipelines has for Airflow, without Airflow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.forks import run_warm
from tests.support.guide_pages import ROOT, Page

OPERATORS = "airflow.providers.standard.operators.bash"


def test_the_task_of_airflow_hands_over_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As BashOperator runs it: both streams are one, the last line is kept; once more is a retry."""
    names = OPERATORS.split(".")
    for end in range(len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[: end + 1]), ModuleType(names[end]))
    monkeypatch.setattr(sys.modules[OPERATORS], "BashOperator", SimpleNamespace, raising=False)
    (block,) = [each for each in Page("docs/scripts.md").blocks if OPERATORS in each.text]
    found: dict[str, Any] = {}
    exec(block.text, found)
    task = found["export"]
    command = task.bash_command.replace("/data/code", str(ROOT / "examples/ranker"))
    command = command.replace("/data/", f"{tmp_path}/")
    run_warm(ROOT / "examples/ranker/train.py", "--out", tmp_path / "train", "--steps", "20")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run() -> Any:
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        return task.output_processor(done.stdout.splitlines()[-1])

    published, again = run(), run()
    assert (published["status"], published["position"]) == ("published", 20)
    assert Path(published["path"]) == tmp_path / "models/ranker/20"
    assert (again["status"], again["position"]) == ("nothing_to_do", 20)
    command = command.replace("/train ", "/nothing ")
    with pytest.raises(AssertionError, match="nothing"):
        run()

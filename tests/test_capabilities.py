"""Real processes prove in `make test` what a user can do: each command, each guide, and what carries them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from exporter.cli.app import app as export_model
from serving.cli import app as serve_model
from tests.support.guide_pages import Block, Page, pages

TESTS = Path(__file__).parent
PROGRAMS = {"export-model": export_model, "serve-model": serve_model}

PROOFS = {
    "a cluster trains, a watch publishes increments, an agent updates servers": (
        "integration/test_examples.py::test_the_demo_keeps_a_running_model_fresh"
    ),
    "a checkpoint becomes a version that a server answers from": "guides/test_start.py",
    "a delta of full checkpoints": (
        "integration/test_incremental_export.py::test_a_delta_from_a_full_checkpoint_serves_what_a_full_export_serves"
    ),
    "merge, rollback, resume": (
        "integration/test_incremental_export.py"
        "::test_merged_deltas_rollback_and_resumption_serve_what_their_positions_served"
    ),
    "a server that starts catches up before it answers": (
        "integration/test_incremental_server.py::test_a_started_server_has_caught_up_before_its_first_answer"
    ),
    "serve-model run ends as it should": "integration/test_server_process.py",
    "the agent keeps replicas fresh": (
        "integration/test_agent.py::test_every_replica_follows_and_one_that_hangs_holds_back_nobody"
    ),
    "readiness": "integration/test_agent_ready.py",
    "a damaged delta": "integration/test_agent.py::test_a_damaged_delta_is_quarantined_and_a_base_asked_for",
    "models in a store": "transfer/test_transfer.py::test_there_and_back",
    "a job on an engine": "jobs/test_engines.py::test_every_operation_and_whatever_goes_wrong",
    "a command that is killed": "integration/test_crash_points.py",
    "an installed wheel": "test_installing.py::test_readme_installs_it",
}
"""What a user relies on, and the test of the first tier, or the file, that proves it with real processes."""


def commands() -> list[str]:
    """Every command line's beginning: the programs with each of their subcommands."""
    found = []
    for name, app in PROGRAMS.items():
        root: Any = typer.main.get_command(app)
        found += [f"{name} {sub}" for sub in root.commands]
    return found


def run_blocks() -> Iterator[Block]:
    """The blocks of README and docs that a test runs."""
    for page in pages():
        yield from (block for block in page.blocks if block.is_followed or block.marker == "tested by")


def typed_lines() -> str:
    return "\n".join(block.text for block in run_blocks())


@pytest.mark.parametrize("command", [each for each in commands() if not each.endswith((" help", " export"))])
def test_each_command_is_typed_in_a_guide_that_is_run(command: str) -> None:
    assert re.search(rf"(^|[ $]){re.escape(command)}\b", typed_lines(), re.MULTILINE)


ELSEWHERE = {
    "tests/integration/test_trainers_of_any_age.py::test_the_guide",
    "tests/integration/test_increments_from_torch.py::test_the_torch_guide",
    "tests/integration/test_jax.py::test_the_jax_guide",
    "tests/integration/test_libraries_of_trainers.py::test_autodist",
    "tests/integration/test_libraries_of_trainers.py::test_easyrec",
}
"""What guides show that runs in environments of its own, which take minutes to make."""


def test_the_guides_and_what_they_name_are_in_the_first_tier() -> None:
    files = [*(TESTS / "guides").glob("test_*.py")]
    assert len(files) > 5
    assert not [file.name for file in files if is_landing(file, "")]
    named = {block.argument for page in pages() for block in page.blocks if block.marker == "tested by"}
    assert {name for name in named if landing(name.removeprefix("tests/"))} == ELSEWHERE


def test_each_guide_of_the_readme_is_run() -> None:
    rows = re.findall(r"^\| [a-z].* \| (\[.*) \|$", Page("README.md").text, re.MULTILINE)
    linked = [re.findall(r"\((docs/[\w/.-]+\.md)\)", row) for row in rows]
    assert len(linked) > 5
    run = {block.page for block in run_blocks()}
    for links in linked:
        assert run & {*links} or all("reference" in link or "glossary" in link for link in links), links


@pytest.mark.parametrize("what", PROOFS)
def test_a_proof_is_there_and_in_the_first_tier(what: str) -> None:
    assert not landing(PROOFS[what])


def landing(name: str) -> bool:
    """True if a test, or each test of a file, is left to `make test-all`."""
    file, _, test = name.partition("::")
    return is_landing(TESTS / file, test)


def is_landing(file: Path, test: str) -> bool:
    """True if the file, or the test if one is named, has the mark."""
    tree = ast.parse(file.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    marked = {name for name, node in functions.items() if _has_mark(*node.decorator_list)}
    module = [node.value for node in tree.body if isinstance(node, ast.Assign) and _sets_marks(node)]
    if test:
        assert test in functions, f"{file}::{test} is not there"
        return _has_mark(*module) or test in marked
    return _has_mark(*module) or all(name in marked for name in functions if name.startswith("test_"))


def _has_mark(*nodes: ast.expr) -> bool:
    return any("mark.landing" in ast.unparse(node) for node in nodes)


def _sets_marks(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)

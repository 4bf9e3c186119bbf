"""A budget of code lines, and of modules that know a subject: growth is a line in `code_lines.toml`.

Code lines are those without blank lines, docstrings, comments and imports, so layout does not change them. A
module knows a subject if a code line names it and the module is not the subject's own. Below ten modules a
subject is walled well; one that ten must know is designed wrongly.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.project import tomllib

ROOT = Path(__file__).parent.parent
BUDGET = tomllib.loads((ROOT / "tests/code_lines.toml").read_text())
SLACK = 60
"""So far below its budget a room may fall before the smaller figure has to be written down."""

SUBJECTS = {  # the modules that are the subject, and the words that name it
    "signing": (
        r"publish\.signing$",
        r"\b[Ss]igning\b|[Tt]rusting\b|sign_key|signed_as|NotTrusted|trust_in\(|is_trusting|require_trusted"
        r"|require_signer|require_signed|signer_of|trust_of|\bforged\b|untrusted|UNSIGNED\b|ANYBODY\b",
    ),
    "holds": (
        r"publish\.(hold|permission)$|pipeline\.restoration$",
        r"[Rr]ollback|plan_resume|resume\(|\bHold\(|\.hold\b|HeldAt|HeldBy|hold_in_force|ModelHeld"
        r"|despite_hold|HOLD_|held_by|lift_",
    ),
    "object stores": (
        r"exporter\.transfer\.|storage\.(mirror|objects|requests|waiting|url)$|agent\.puller$"
        r"|cli\.transfer_commands$",
        r"exporter\.transfer|\.carry\(|OpenModel|is_remote|\bmirror\b|storage\.objects|\bUrl\b|obstore",
    ),
    "mapped tables": (
        r"bundle\.(mapped_tables|hot_rows)$|subgraph\.overlay$|graph\.(overlaid|placed)_reads$"
        r"|pipeline\.(hot_files|stage_hot_rows|overlay_room)$|publish\.mapped_state$",
        r"map_tables|is_mapped|Mapped(Table|Record|Tables)|mapped_(tables|state|record|files)"
        r"|\boverla(y|id|ys)\b|hot_rows|\bHotRows\b",
    ),
    "canary": (r"agent\.canary(_keeper)?$|publish\.approval$", r"[Cc]anary"),
}


def code_lines(text: str) -> list[str]:
    left_out = set[int]()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (is_text and isinstance(node.value.value, str)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return [line for n, line in numbered if n not in left_out and line.split("#")[0].strip()]


def figures() -> tuple[Counter[str], Counter[str]]:
    """Code lines by room, and the number of modules by subject that they know."""
    rooms, knows = Counter[str](), Counter[str]()
    for path in (path for package in ("exporter", "serving") for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        lines, module = code_lines(path.read_text()), ".".join(parts)
        rooms["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += len(lines)
        for subject, (own, words) in SUBJECTS.items():
            knows[subject] += not re.search(own, module) and any(re.search(words, line) for line in lines)
    return rooms, knows


ROOMS, KNOWS = figures()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_stays_within_its_budget(room: str) -> None:
    budget, found = BUDGET["rooms"].get(room, 0), ROOMS[room]
    assert found <= budget, f"{room} has {found} code lines, more than the {budget} of tests/code_lines.toml"
    assert found > budget - SLACK, f"{room} has {found} code lines: write that into tests/code_lines.toml"


@pytest.mark.parametrize("subject", sorted(SUBJECTS))
def test_a_subject_stays_behind_its_walls(subject: str) -> None:
    budget, found = BUDGET["knows"][subject], KNOWS[subject]
    assert found <= budget, f"{found} modules know {subject}, more than the {budget} of tests/code_lines.toml"
    assert found == budget, f"{found} modules know {subject}: write that into tests/code_lines.toml"


def test_no_room_of_the_budget_is_gone() -> None:
    assert BUDGET["rooms"].keys() == ROOMS.keys()

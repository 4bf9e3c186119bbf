"""The table of rooms in docs/architecture.md: their order from its test, their purpose from the code."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.reference.markdown import table, text

ROOT = Path(__file__).parent.parent.parent
BEGIN, END = "<!-- rooms: made by tools.reference -->\n", "<!-- end of rooms -->\n"


def page() -> str:
    """docs/architecture.md with the table as the code has it now."""
    before, begin, rest = (ROOT / "docs/architecture.md").read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "docs/architecture.md has lost the marks around its table of rooms"
    return f"{before}{BEGIN}\n{_rooms()}\n{END}{after}"


def stages() -> list[set[str]]:
    """The rooms, line by line: `STAGES` of tests/test_architecture.py."""
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text())
    values = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAGES"
    )
    found: list[set[str]] = ast.literal_eval(next(values))
    return found


def _rooms() -> str:
    rows = [
        (str(level), f"`{room}{'/' if _path(room).name == '__init__.py' else ''}`", text(_purpose(room)))
        for level, rooms in enumerate(stages(), 1)
        for room in sorted(rooms)
    ]
    return table(("line", "room", "what is in it"), rows)


def _path(room: str) -> Path:
    package = ROOT / "exporter" / room / "__init__.py"
    return package if package.exists() else package.parent.with_suffix(".py")


def _purpose(room: str) -> str:
    """The first paragraph of the room's docstring."""
    docstring = ast.get_docstring(ast.parse(_path(room).read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())

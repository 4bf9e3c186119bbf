"""The shape of the house: imports point against the flow of data, and TensorFlow is imported late."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from exporter.storage import layout

ROOT = Path(__file__).parent.parent

# A room may import the rooms of the lines above its own, and no other room of its own line.
STAGES = [
    {"late_names", "newer_python", "while_needed"},
    {"errors", "version", "wire"},
    {"storage", "limited"},
    {"catalog"},
    {"options"},
    {"terminal"},
    {"checkpoint"},
    {"jobs"},
    {"tables"},
    {"graph"},
    {"mapping"},
    {"delta", "bundle"},
    {"increments", "subgraph"},
    {"publish"},
    {"verify", "training"},
    {"pipeline"},
    {"transfer"},
    {"api"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(STAGES) for room in rooms}
# What serving may know of the exporter: values and the wire, never the stages that make a model.
SERVING_MAY_IMPORT = {"errors", "newer_python", "while_needed", "wire", "publish", "terminal"}
# What both command lines share, the algebra of positions, by which the agent plans as the graph does,
# the name of what it compares, and what both ask a model before it is served by all.
SERVING_SHARES = {
    "exporter.delta.chunk_digest",
    "exporter.delta.spans",
    "exporter.options",  # how an option is declared
    "exporter.verify.golden",
    "exporter.verify.log",
    "exporter.storage.arrivals",
    "exporter.storage.files",
    "exporter.storage.layout",
    "exporter.storage.local_paths",
    # The agent fetches what its servers read, and what is published is read where it is.
    "exporter.storage.waiting",
    "exporter.transfer.opened",
    "exporter.transfer.pull",
    "exporter.transfer.push",
}
# Commands that ask servers, or have a port. No other module may, and none when a file is imported.
ASKS_SERVERS = {"exporter.pipeline.doctor", "exporter.cli.notify", "exporter.cli.watched"}
HEAVY = {"tensorflow", "tensorflow_serving", "keras", "tf_keras", "h5py"}


@cache
def sources(package: str) -> tuple[Path, ...]:
    found = tuple(sorted((ROOT / package).rglob("*.py")))
    assert len(found) > {"exporter": 200, "serving": 15}[package], "most files were not looked at"
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module: str) -> str:
    return module.split(".")[1]


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """(module, is it imported when the file is) for every import that runs."""
    return tuple(_imports_of(ast.parse(path.read_text())))


def _imports_of(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in inside_functions
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in inside_functions


def exporter_imports(package: str) -> Iterator[tuple[str, str]]:
    """(module, what it imports of the exporter) for every file of a package."""
    for path in sources(package):
        for imported, _ in imports_of(path):
            if imported.startswith("exporter.") and room_of(imported) in LEVEL:
                yield module_of(path), imported


def test_every_room_has_its_place() -> None:
    rooms = {room_of(module_of(path)) for path in sources("exporter")} - {"__init__"}
    assert rooms == set(LEVEL), "decide in STAGES where a new room belongs; take those out that are gone"


@pytest.mark.landing
def test_imports_point_against_the_flow() -> None:
    arrows = [
        (module, imported)
        for module, imported in exporter_imports("exporter")
        if room_of(module) in LEVEL and room_of(imported) != room_of(module)
    ]
    assert len(arrows) > 1000
    wrong = [
        f"{module} imports {imported}"
        for module, imported in arrows
        if LEVEL[room_of(imported)] >= LEVEL[room_of(module)]
    ]
    assert not wrong, "a room imports one that lies to its right"


def test_no_files_import_each_other() -> None:
    """For types neither: what two files both need has a place of its own."""
    files = {
        module_of(path).removesuffix(".__init__"): path
        for path in [*sources("exporter"), *sources("serving")]
    }
    needs = {
        module: set(_files_of(ast.parse(path.read_text()), files)) - {module}
        for module, path in files.items()
    }
    assert sum(map(len, needs.values())) > 1000
    # The keyword arguments are made from the options, which take them: one declaration, seen from two sides.
    needs["exporter.options"].remove("exporter.options.keywords")
    TopologicalSorter(needs).prepare()  # CycleError names the circle


def _files_of(tree: ast.Module, files: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (names & set(files)) or {node.module}


def test_the_exporter_knows_nothing_of_serving() -> None:
    asked = [
        (module_of(path), imported, at_import)
        for path in sources("exporter")
        for imported, at_import in imports_of(path)
        if imported.split(".")[0] == "serving"
    ]
    assert {module for module, _, _ in asked} == ASKS_SERVERS
    assert not [f"{module} imports {imported}" for module, imported, at_import in asked if at_import]


def test_serving_knows_values_alone() -> None:
    arrows = list(exporter_imports("serving"))
    assert len(arrows) > 50
    wrong = [
        f"{module} imports {imported}"
        for module, imported in arrows
        if room_of(imported) not in SERVING_MAY_IMPORT
        and not any(f"{imported}.".startswith(f"{shared}.") for shared in SERVING_SHARES)
    ]
    assert not wrong


def test_heavy_libraries_are_imported_late() -> None:
    heavy = [
        (module_of(path), imported, at_import)
        for path in sources("exporter") + sources("serving")
        for imported, at_import in imports_of(path)
        if imported.split(".")[0] in HEAVY
    ]
    assert len(heavy) > 20
    assert not [f"{module} imports {imported}" for module, imported, at_import in heavy if at_import]


def test_a_name_stands_for_one_thing() -> None:
    paths = [path for path in sources("exporter") + sources("serving") if not path.stem.startswith("__")]
    says_nothing = {"utils", "util", "common", "helpers", "misc"}
    assert not [str(path) for path in paths if path.stem in says_nothing]
    doubled = {name for name, count in Counter(path.stem for path in paths).items() if count > 1}
    assert not doubled, "two rooms have a file of the same name"


def test_no_tests_import_other_tests() -> None:
    """What several of them need stands once, in tests/support."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    assert len(paths) > 200
    wrong = [
        f"{module_of(path)} imports {imported}"
        for path in paths
        for imported, _ in imports_of(path)
        if _A_TEST.match(imported)
    ]
    assert not wrong


_A_TEST = re.compile(r"tests\.(?:\w+\.)*test_")


def strings_of(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(string, is it part of a path) for every string that is no documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    in_paths: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            in_paths |= {id(node.left), id(node.right)}
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in {"Path", "PurePath", "joinpath", "with_name", "glob"}:
                in_paths |= set(map(id, node.args))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value, id(node) in in_paths


TRAINER_SIDE = "exporter.training.trainer_side"
"""It imports nothing of ours, so it says such names itself: see tests/training/test_trainer_side.py."""


def test_names_on_disk_stand_in_one_place() -> None:
    values = [value for name, value in vars(layout).items() if name.isupper()]
    names = {str(value) for value in values if isinstance(value, str | Path)}
    unmistakable = {name for name in names if not name.isalpha()}  # `variables` is a key in documents, too
    assert len(names) > 20 and len(unmistakable) > 10
    found = [
        f"{module_of(path)}: {text!r}"
        for path in sources("exporter") + sources("serving")
        if module_of(path) not in (layout.__name__, TRAINER_SIDE)
        for text, is_in_path in strings_of(ast.parse(path.read_text()))
        if text in unmistakable or (is_in_path and text in names)
    ]
    assert not found, "say it by its name in exporter/storage/layout.py"


# What stands in a proposed command without quotes: addresses and numbers.
NEEDS_NO_QUOTES = {"address", "before", "start", "end", "port"}


def test_commands_that_are_proposed_can_be_pasted() -> None:
    """Paths, URLs and names stand in them as `exporter.storage.local_paths.quoted` writes them."""
    found, bare = 0, []
    for path in [*sources("exporter"), *sources("serving")]:
        for text in ast.walk(ast.parse(path.read_text())):
            if not isinstance(text, ast.JoinedStr):
                continue
            said = ""
            for part in text.values:
                if isinstance(part, ast.FormattedValue) and _IN_A_COMMAND.search(said):
                    found += 1
                    named = ast.unparse(part.value)
                    if not named.startswith("quoted(") and named.split(".")[-1] not in NEEDS_NO_QUOTES:
                        bare.append(f"{module_of(path)}:{part.lineno}: {named}")
                said += str(part.value) if isinstance(part, ast.Constant) else "-"
    assert found > 20
    assert not bare


_IN_A_COMMAND = re.compile(r"(?:export|serve)-model [a-z]+(?: [^\s:]+)* $")


@pytest.mark.parametrize("module", ["exporter.cli.app", "serving.cli"])
def test_the_command_lines_start_without_tensorflow(module: str) -> None:
    heavy = "{'tensorflow', 'tensorflow_serving', 'grpc', 'keras', 'numpy'}"
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    assert done.stdout.strip() == ""

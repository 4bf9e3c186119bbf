"""README.md and every page of docs/: nothing to run escapes, links lead somewhere, named options exist."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

import tests.guides
from tests.support.guide_artefacts import MAKERS
from tests.support.guide_pages import OUTPUT, ROOT, Block, Page, pages

PAGES = pages()
BLOCKS = [block for page in PAGES for block in page.blocks]
OTHERS = [Page(name) for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
"""Pages for people who have the repository before them: nothing in them is typed as it stands."""


def followed_pages() -> set[str]:
    """The pages that some module of this directory follows."""
    names = [each.name for each in pkgutil.iter_modules(tests.guides.__path__)]
    modules = [importlib.import_module(f"tests.guides.{name}") for name in names]
    return {name for module in modules for name in getattr(module, "FOLLOWED", [])}


def test_every_page_with_something_to_run_is_followed() -> None:
    with_commands = {block.page for block in BLOCKS if block.is_followed}
    assert with_commands == with_commands & followed_pages()
    assert len(with_commands) > 5


def test_every_fence_is_a_block_that_the_tests_see() -> None:
    """An indented or unclosed fence would be shown, and run by nobody."""
    for page in PAGES:
        fences = re.findall(r"^ *(?:```|~~~)", page.text, re.MULTILINE)
        assert len(fences) == 2 * len(page.blocks), page.name


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    if block.marker == "not run":
        assert len(block.argument.split()) >= 3, f"{block}: a reason of some words"
    elif block.marker == "tested by":
        file, _, test = block.argument.partition("::")
        functions = [
            node
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert test in {function.name for function in functions}
    elif block.marker == "file":
        commands = [
            command.text
            for each in Page(block.page).blocks
            for command in each.commands
            if each.line > block.line
        ]
        assert any(block.argument in command for command in commands), f"{block}: no command reads the file"
    else:
        assert block.language in {"console", "python"} | OUTPUT, f"{block}: nobody runs {block.language!r}"


def test_comments_about_blocks_are_understood() -> None:
    for page in PAGES:
        said = re.findall(r"<!-- (?:not run|tested by|file):", page.text)
        assert len(said) == sum(bool(block.marker) for block in page.blocks), f"{page.name}: one is misplaced"
        before = re.findall(r"<!--.*-->\n```\w", page.text)
        assert len(before) == len(said), f"{page.name}: a comment before a block is none of those"
        assert set(page.starts_with) <= set(MAKERS)


def test_options_that_the_guide_names_exist() -> None:
    from exporter.cli.app import app as export_app
    from serving.cli import app as serve_app

    roots = [typer.main.get_command(app) for app in (export_app, serve_app)]
    commands = [command for root in roots for command in (root, *root.commands.values())]
    known = {"--help"} | {name for command in commands for option in command.params for name in option.opts}
    for page in PAGES:
        for option in set(re.findall(r"(?<=[`\s])--[a-z][a-z-]+(?![\w-])", page.text)):
            assert option in known, f"{page.name} names {option}, which no command has"


def test_functions_that_the_guide_names_exist() -> None:
    import exporter

    (first_cells,) = [re.findall(r"^\| (`\w+\(.+?) \|", Page("docs/scripts.md").text, re.MULTILINE)]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)\(", cell)}
    assert {"export", "watch", "rollback"} <= named
    assert [name for name in sorted(named) if not callable(getattr(exporter, name, None))] == []


def test_pages_beside_the_guide_have_nothing_to_run() -> None:
    assert {block.language for page in OTHERS for block in page.blocks} <= OUTPUT


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    here = (ROOT / page.name).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.text, flags=re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (here / path).resolve() if path else ROOT / page.name
        assert linked.exists(), f"{page.name}: {target}"
        if anchor and linked.suffix == ".md":  # that of a picture says in which light it is shown
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in {anchor_of(heading) for heading in headings}, f"{page.name}: {target}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/assets").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_still_where_its_reader_asks_for_that(picture: Path) -> None:
    """It runs nothing, fetches nothing, says in words what it shows, and is light or dark."""
    root = ElementTree.parse(picture).getroot()
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not names & {"script", "foreignObject", "image", "a"}
    if picture.name == "favicon.svg":
        return
    assert names >= {"title", "desc"}
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text
    assert ("animation:" in text) == ("prefers-reduced-motion: no-preference" in text)
    assert any(f"assets/{picture.name}" in page.text for page in PAGES), "no page shows it"


def anchor_of(heading: str) -> str:
    """What GitHub and the site make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")

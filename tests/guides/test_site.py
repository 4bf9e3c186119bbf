"""The documentation site: built strictly, and whole without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.guide_pages import ROOT, pages

mkdocs_build = pytest.importorskip("mkdocs.commands.build", reason="make docs installs it")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every warning ends a strict build: broken links and anchors, pages that the navigation omits."""
    from mkdocs.config import load_config

    directory = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        mkdocs_build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True))
    return directory


def test_every_page_is_in_the_site(site: Path) -> None:
    names = [page.name.removeprefix("docs/") for page in pages() if page.name.startswith("docs/")]
    expected = {str(Path(name).with_suffix(".html")) for name in names} | {"index.html", "changelog.html"}
    assert {str(path.relative_to(site)) for path in site.rglob("*.html")} >= expected


class Fetched(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("img", "script", "iframe", "source", "video"):
            self.addresses += [found.get("src") or "", found.get("srcset") or ""]
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(found.get("href") or "")


def fetched(site: Path) -> Iterator[tuple[Path, str]]:
    for page in site.rglob("*.html"):
        parser = Fetched()
        parser.feed(page.read_text())
        yield from ((page, address) for address in parser.addresses if address)
    for style in site.rglob("*.css"):
        yield from ((style, address) for address in re.findall(r"url\(['\"]?([^'\")]+)", style.read_text()))


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    addresses = [*fetched(site)]
    assert len(addresses) > 50
    elsewhere = [(page.name, address) for page, address in addresses if re.match(r"(https?:)?//", address)]
    assert elsewhere == []


def test_every_picture_and_link_inside_is_there(site: Path) -> None:
    """Strict builds check links of Markdown; this checks those of HTML, and what hooks rewrote."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r"(?:href|src)=\"([^\"#:]+)(?:#[^\"]*)?\"", page.read_text()):
            assert (page.parent / target).resolve().exists(), f"{page.name}: {target}"


def test_the_picture_is_on_the_front_page(site: Path) -> None:
    assert 'src="assets/hot-update.svg"' in (site / "index.html").read_text()

"""Hooks of the documentation site: the repository's own pages beside those of docs/.

README.md is the front page; CHANGELOG.md, CONTRIBUTING.md and SECURITY.md are pages of their own. Their
links are written for readers of the repository, and are rewritten to lead to the same places in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root, and what they are called in the site."""

_LINK = re.compile(r"(\]\(|\b(?:src|srcset|href)=\")([^)\"\s:#]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    for source, name in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to where the linked files are in the site."""
    name = page.file.src_uri
    sources = {site: source for source, site in PAGES.items()}
    source = sources.get(name, f"docs/{name}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        inside = PAGES.get(target, target.removeprefix("docs/"))
        if inside == target:
            return match[0]  # neither in docs/ nor one of ours: the strict build says so
        return match[1] + posixpath.relpath(inside, posixpath.dirname(name) or ".")

    return _LINK.sub(moved, markdown)

"""What this repository brings along: licences of the libraries that it installs, and no secrets."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.project import ROOT, requirements

PERMISSIVE = re.compile(r"\b(Apache|MIT|0?BSD|ISC|PSF|Zlib|CC0|Unlicense|MPL|Mozilla Public License)\b", re.I)
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|General Public License|SSPL|BUSL|Commons Clause)\b", re.I)
SECRETS = {
    "a private key": r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}",
    "a key of AWS": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})\b",
    "a token of GitLab": r"\bglpat-[A-Za-z0-9_-]{20,}\b",
    "a token of Slack": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a key of Google": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a token of an index": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "a key of an account": r"(?i)\b(?:AccountKey|aws_secret_access_key)\s*[=:]\s*['\"]?[A-Za-z0-9+/]{40,}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
}
EXAMPLES = {"AKIAIOSFODNN7EXAMPLE"}
"""Values of public documentation, which open nothing."""


def runtime() -> list[str]:
    """The installed libraries that a user gets with all extras but the engines', and what they need."""
    todo = requirements("server", "agent", "stores")
    found: dict[str, None] = {}
    while todo:
        needed = todo.pop()
        wanted = [{"extra": extra} for extra in (*needed.extras, "")]
        if needed.marker and not any(needed.marker.evaluate(extra) for extra in wanted):
            continue
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        if name not in found:
            found[name] = None
            todo += map(Requirement, metadata.requires(name) or [])
    return [*found]


def licence(name: str) -> str:
    """What a library's metadata says, or the heading of its licence's text."""
    told = metadata.metadata(name)
    classifiers = [each for each in told.get_all("Classifier") or [] if each.startswith("License ::")]
    said = [told.get("License-Expression") or "", *classifiers, (told.get("License") or "")[:200]]
    if not "".join(said):
        files = [file for file in metadata.files(name) or [] if "LICENSE" in file.name.upper()]
        said = [Path(str(file.locate())).read_text()[:500] for file in files]
    return " ".join(said)


def test_every_library_may_be_used_and_passed_on() -> None:
    told = {name: licence(name) for name in runtime()}
    assert len(told) > 15
    assert {name: said for name, said in told.items() if not PERMISSIVE.search(said)} == {}
    assert {name: said for name, said in told.items() if COPYLEFT.search(said)} == {}


def secrets(text: str) -> list[tuple[str, str]]:
    """The secrets in a text, and what each is."""
    found = [(what, match[0]) for what, pattern in SECRETS.items() for match in re.finditer(pattern, text)]
    return [(what, secret) for what, secret in found if secret not in EXAMPLES]


def test_no_secret_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no clone")
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    assert "pyproject.toml" in names
    texts = ((name, (ROOT / name).read_bytes().decode("latin-1")) for name in names)
    assert {name: found for name, text in texts if (found := secrets(text))} == {}


@pytest.mark.parametrize(
    "secret",
    [
        "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEowIBAAKCAQEAabcdefgh",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "ghp_" + "a1" * 18,
        "AccountKey=" + "Ab1+" * 20 + "==",
        "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0" + ".c2lnbmF0dXJlLg",
    ],
)
def test_a_secret_would_be_found(secret: str) -> None:
    assert secrets(f"key = {secret}\n")

"""The public names: each resolves, none is missing for type checkers, and importing the package is cheap."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import exporter


@pytest.mark.parametrize("name", exporter.__all__)
def test_each_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(exporter, name).__doc__


def test_type_checkers_see_the_same_names() -> None:
    source = Path(exporter.__file__).read_text()
    assert sorted(re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE)) == exporter.__all__
    assert (Path(exporter.__file__).parent / "py.typed").exists()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        exporter.nothing_of_the_kind  # noqa: B018 - the access is the test


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, exporter; print(len({'numpy', 'click', 'msgspec', 'tensorflow'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "0"

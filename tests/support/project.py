"""What pyproject.toml says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(*extras: str) -> list[Requirement]:
    """What the package needs with some extras, in the file's order."""
    project = PROJECT["project"]
    listed = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(each) for group in listed for each in group]

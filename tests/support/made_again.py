"""Whether a merged base comes out of its parts again, in another directory, byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from exporter.jobs.runner import LOCAL
from exporter.pipeline.merged_base import write_again
from exporter.publish.staging import Staging
from exporter.publish.versions import read_manifest


def assert_made_again(base: Path) -> None:
    """A copy of the model without the base has all that the same files are made of."""
    manifest = read_manifest(base)
    assert manifest.merged_from is not None
    with TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(base.parent, copy, ignore=shutil.ignore_patterns(".*", base.name))
        with Staging(copy) as staging:
            write_again(copy, manifest, staging.path, lambda _: LOCAL)
            for file in manifest.files:
                made, published = staging.path / file.path, base / file.path
                assert made.read_bytes() == published.read_bytes(), f"{file.path} differs"

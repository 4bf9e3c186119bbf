"""Small bundles to stage and publish, and what a reader of a model base path must always find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter.options import ExportRequest
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.commit import PublishedVersion, Staging, VersionRule, publish_version
from exporter.publish.manifest import Manifest, ManifestDraft, Origin, TensorEntry
from exporter.publish.retention import Keep
from exporter.publish.versions import read_manifest, version_dirs

SAVED_MODEL = b"a graph"
SHARD = "variables/variables.data-00000-of-00001"
FILES = {"saved_model.pb": SAVED_MODEL, "variables/variables.index": b"an index", SHARD: b"weights"}


def delta_of(request: ExportRequest, **how: Any) -> ExportedDelta:
    """What is done where a base is published already."""
    done = export_incremental(request, **how)
    assert isinstance(done, ExportedDelta)
    return done


def draft(step: int | None = None) -> ManifestDraft:
    tensors = (TensorEntry("w", "float32", (1, 2), 8, ("9a4f01c2",)),)
    return ManifestDraft(tensors=tensors, source=Origin("run7", "model.ckpt"), exporter="0.1.0", step=step)


def fill(directory: Path) -> None:
    for name, content in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def publish(
    model: Path,
    step: int | None = None,
    *,
    version: int | str = "position",
    keep: int | None = None,
    grace_seconds: float = 0,
    now: float = 1_700_000_000.0,
) -> PublishedVersion:
    rule = VersionRule.parse(None if version == "position" else str(version))
    with Staging(model) as staging:
        fill(staging.path)
        kept = None if keep is None else Keep(keep)
        return publish_version(
            staging, draft(step), rule, keep=kept, grace_seconds=grace_seconds, clock=lambda: now
        )


def versions(model: Path) -> list[int]:
    """What TensorFlow Serving would take for versions."""
    return sorted(child.version for child in version_dirs(model))


def whole_versions(model: Path) -> Iterator[Manifest]:
    """Every version that a reader can list, after checking that all of it is there."""
    for version in versions(model):
        directory = model / str(version)
        manifest = read_manifest(directory)
        listed = {file.path: file.bytes_ for file in manifest.files}
        found = {
            str(path.relative_to(directory)): path.stat().st_size
            for path in directory.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        }
        assert found == listed == {name: len(content) for name, content in FILES.items()}
        assert all((directory / name).read_bytes() == content for name, content in FILES.items())
        yield manifest


def hidden(model: Path) -> list[str]:
    """Left-overs of staging and retention."""
    return [name for name in names(model) if name.startswith((".staging-", ".trash-"))]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())

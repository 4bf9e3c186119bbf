"""From distributed TensorFlow checkpoints to TensorFlow Serving.

    from exporter import ExportRequest, export
    done = export(ExportRequest(Path("train"), Path("models/ranker"), model="my_model.py:serving"))

The names below are the public API; each is imported when first used, so that `import exporter` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from exporter.version import __version__ as __version__

if TYPE_CHECKING:
    from exporter.catalog import Catalog as Catalog
    from exporter.checkpoint import open_checkpoint as open_checkpoint
    from exporter.errors import ExportError as ExportError
    from exporter.options import DataMode as DataMode
    from exporter.options import DeltaDtype as DeltaDtype
    from exporter.options import ExportRequest as ExportRequest
    from exporter.options import Updates as Updates
    from exporter.options import Verify as Verify
    from exporter.pipeline.export import export as export
    from exporter.pipeline.full import Exported as Exported
    from exporter.pipeline.full import Plan as Plan
    from exporter.pipeline.full import execute as execute
    from exporter.pipeline.full import plan as plan
    from exporter.pipeline.incremental import ExportedDelta as ExportedDelta
    from exporter.pipeline.incremental import export_incremental as export_incremental
    from exporter.pipeline.inspection import inspect as inspect
    from exporter.pipeline.log_maintenance import merge as merge
    from exporter.pipeline.log_maintenance import resume as resume
    from exporter.pipeline.log_maintenance import rollback as rollback
    from exporter.pipeline.rebase import rebase as rebase
    from exporter.pipeline.watch import watch as watch
    from exporter.pipeline.watch_loop import StopWhen as StopWhen
    from exporter.pipeline.watch_loop import Watching as Watching
    from exporter.roles import Role as Role
    from exporter.roles import is_chief as is_chief
    from exporter.roles import node_role as node_role
    from exporter.transfer.opened import opened as opened
    from exporter.verify.log import verify_model as verify_model


_HOMES = {
    "Catalog": "exporter.catalog",
    "DataMode": "exporter.options",
    "DeltaDtype": "exporter.options",
    "ExportError": "exporter.errors",
    "ExportRequest": "exporter.options",
    "Exported": "exporter.pipeline.full",
    "ExportedDelta": "exporter.pipeline.incremental",
    "Plan": "exporter.pipeline.full",
    "Role": "exporter.roles",
    "StopWhen": "exporter.pipeline.watch_loop",
    "Updates": "exporter.options",
    "Verify": "exporter.options",
    "Watching": "exporter.pipeline.watch_loop",
    "execute": "exporter.pipeline.full",
    "export": "exporter.pipeline.export",
    "export_incremental": "exporter.pipeline.incremental",
    "inspect": "exporter.pipeline.inspection",
    "is_chief": "exporter.roles",
    "merge": "exporter.pipeline.log_maintenance",
    "node_role": "exporter.roles",
    "open_checkpoint": "exporter.checkpoint",
    "opened": "exporter.transfer.opened",
    "plan": "exporter.pipeline.full",
    "rebase": "exporter.pipeline.rebase",
    "resume": "exporter.pipeline.log_maintenance",
    "rollback": "exporter.pipeline.log_maintenance",
    "verify_model": "exporter.verify.log",
    "watch": "exporter.pipeline.watch",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'exporter' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

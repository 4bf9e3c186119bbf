"""From distributed TensorFlow checkpoints to TensorFlow Serving.

    from exporter import export
    done = export("train", "models/ranker", model="my_model.py:serving")

The names below are the public API; each is imported when first used, so that `import exporter` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exporter.late_names import late_names, short_help
from exporter.version import __version__ as __version__

if TYPE_CHECKING:
    from exporter.api import diff as diff
    from exporter.api import doctor as doctor
    from exporter.api import execute as execute
    from exporter.api import export as export
    from exporter.api import export_incremental as export_incremental
    from exporter.api import history as history
    from exporter.api import inspect as inspect
    from exporter.api import merge as merge
    from exporter.api import open_checkpoint as open_checkpoint
    from exporter.api import plan as plan
    from exporter.api import pull as pull
    from exporter.api import push as push
    from exporter.api import rebase as rebase
    from exporter.api import resume as resume
    from exporter.api import rollback as rollback
    from exporter.api import tag as tag
    from exporter.api import tags as tags
    from exporter.api import untag as untag
    from exporter.api import verify_model as verify_model
    from exporter.api import watch as watch
    from exporter.catalog import Catalog as Catalog
    from exporter.errors import ExportError as ExportError
    from exporter.errors import ExportWarning as ExportWarning
    from exporter.options import DataMode as DataMode
    from exporter.options import DeltaDtype as DeltaDtype
    from exporter.options import ExportRequest as ExportRequest
    from exporter.options import Jobs as Jobs
    from exporter.options import Signing as Signing
    from exporter.options import Trusting as Trusting
    from exporter.options import Updates as Updates
    from exporter.options import Verify as Verify
    from exporter.pipeline.full import Exported as Exported
    from exporter.pipeline.full import Plan as Plan
    from exporter.pipeline.incremental import ExportedDelta as ExportedDelta
    from exporter.pipeline.watch_loop import StopWhen as StopWhen
    from exporter.pipeline.watch_loop import Watching as Watching
    from exporter.training.roles import Role as Role
    from exporter.training.roles import is_chief as is_chief
    from exporter.training.roles import node_role as node_role
    from exporter.transfer.opened import opened as opened


_NAMES = {
    "exporter.api": "diff doctor execute export export_incremental history inspect merge open_checkpoint "
    "plan pull push rebase resume rollback tag tags untag verify_model watch",
    "exporter.catalog": "Catalog",
    "exporter.errors": "ExportError ExportWarning",
    "exporter.options": "DataMode DeltaDtype ExportRequest Jobs Signing Trusting Updates Verify",
    "exporter.pipeline.full": "Exported Plan",
    "exporter.pipeline.incremental": "ExportedDelta",
    "exporter.pipeline.watch_loop": "StopWhen Watching",
    "exporter.training.roles": "Role is_chief node_role",
    "exporter.transfer.opened": "opened",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)
__getattr__ = late_names(__name__, _HOMES)
short_help(__name__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

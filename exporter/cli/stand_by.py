"""Print that this node of a cluster leaves the export to its chief."""

from __future__ import annotations

from exporter.cli.documents.exported import StandBy
from exporter.roles import Role
from exporter.terminal.markup import labelled
from exporter.terminal.output import Output


def stand_by(role: Role, sink: Output) -> None:
    """Say which role the node has, where that is known from, and how to export in spite of it."""
    document = StandBy("nothing_to_do", None, role.type, role.index, role.source)
    why = f"this node is {role} ({role.source}), and the chief exports; --any-role exports here, too"
    sink.result(document, [labelled("nothing to do", why)], is_done=True)

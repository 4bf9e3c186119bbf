"""Print the result of `diff`, as a JSON document, and as lines for people."""

from __future__ import annotations

import math
from typing import TypeVar

from msgspec.structs import replace

from exporter.cli.documents import differences as documents
from exporter.cli.render import in_rows
from exporter.pipeline.comparison import ComparedState, Differences, TableDifference, VariableDifference
from exporter.terminal.output import Output, labelled

DifferenceT = TypeVar("DifferenceT", VariableDifference, TableDifference)


def differences(found: Differences, sink: Output) -> None:
    """Print the differences between two states: a document, or lines and tables for people."""
    document = documents.Differences(
        a=_side(found.a),
        b=_side(found.b),
        equal=found.is_empty,
        compared=found.compared,
        variables=list(map(_printable, found.variables)),
        tables=list(map(_printable, found.tables)),
        only_a=found.only_a,
        only_b=found.only_b,
    )
    lines = [
        labelled("a", _side_text(found.a)),
        labelled("b", _side_text(found.b)),
        labelled("differ", f"{len(found.variables) + len(found.tables)} of {found.compared} variables"),
        *(labelled("only in a", name) for name in found.only_a),
        *(labelled("only in b", name) for name in found.only_b),
    ]
    sink.result(document, lines)
    if found.variables:
        columns = {"variable": "left", "rows": "right", "of": "right", "norm": "right", "largest": "right"}
        rows = (
            (in_rows(v.name), v.changed_rows, v.rows, _number(v.norm), _number(v.largest))
            for v in found.variables
        )
        sink.table("", columns, rows)
    if found.tables:
        names = ("keys of both", "only in a", "only in b", "changed", "norm", "largest")
        columns = {"table": "left", **dict.fromkeys(names, "right")}
        sink.table(
            "",
            columns,
            (
                (t.name, t.keys, t.only_a, t.only_b, t.changed_rows, _number(t.norm), _number(t.largest))
                for t in found.tables
            ),
        )


def _side(side: ComparedState) -> documents.Side:
    at = side.at
    position = at.position if at and side.log is not None else None
    return documents.Side(side.label, position, at.step if at else None)


def _printable(found: DifferenceT) -> DifferenceT:
    """Return a difference with None for a norm or largest move of NaN or infinity, which JSON cannot hold."""
    return replace(found, norm=_if_finite(found.norm), largest=_if_finite(found.largest))


def _if_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _side_text(side: ComparedState) -> str:
    if side.at is None:
        return side.label
    return f"{side.label}, " + (f"position {side.at}" if side.log is not None else f"step {side.at.step}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"

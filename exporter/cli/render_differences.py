"""Print the result of `diff`, as a JSON document, and as lines for people."""

from __future__ import annotations

import math
from typing import TypeVar

from msgspec.structs import replace

from exporter.cli.render import in_rows
from exporter.pipeline.comparison import Differences, TableDifference, VariableDifference
from exporter.terminal.output import Output, labelled

DifferenceT = TypeVar("DifferenceT", VariableDifference, TableDifference)


def differences(found: Differences, sink: Output) -> None:
    """Print the differences between two states: a document, or lines and tables for people."""
    variables, tables = tuple(map(_printable, found.variables)), tuple(map(_printable, found.tables))
    lines = [
        labelled("a", found.a),
        labelled("b", found.b),
        labelled("differ", f"{len(found.variables) + len(found.tables)} of {found.compared} variables"),
        *(labelled("only in a", name) for name in found.only_a),
        *(labelled("only in b", name) for name in found.only_b),
    ]
    sink.result(replace(found, variables=variables, tables=tables), lines)
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


def _printable(found: DifferenceT) -> DifferenceT:
    """Return a difference with None for a norm or largest move of NaN or infinity, which JSON cannot hold."""
    return replace(found, norm=_if_finite(found.norm), largest=_if_finite(found.largest))


def _if_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"

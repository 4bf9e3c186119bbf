"""The norms beyond which rows of tables count as wild, by the rules of `--max-norm`.

`auto` learns a table's bound from the base: ten times the norm that 99.99 % of its rows stay below, and at
least ten times the square root of the number of elements, since rows of a young model are small. Of a large
table some hundred thousand rows are sampled, in evenly spaced ranges. Learned bounds are kept beside the log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from contextlib import suppress

import numpy as np

from exporter.delta.format import ServedVariable
from exporter.delta.row_reader import RowReader
from exporter.delta.tolerance import row_norms
from exporter.options import NormRule
from exporter.publish.delta_log import DeltaLog
from exporter.storage.files import read_record, replace_file
from exporter.storage.layout import NORMS_FILE
from exporter.wire.int8_codes import values_of

_TIMES = 10.0
_SHARE = 0.9999
_RANGES, _RANGE_ROWS = 64, 4096


_MAX_BYTES = 64 << 20


def norm_bounds(log: DeltaLog, rules: Iterable[str], coded: Collection[str]) -> dict[str, float]:
    """Return the largest permitted Euclidean norm of a row, by the name of each variable that a rule names.

    `rules` are the texts of `--max-norm`; the first rule that names a variable counts. Of a variable that is
    not a table the bound is for the norm of all of it. `coded` are the names of the tables whose rows are
    8-bit codes with a scale. Variables that are neither floats nor coded have no bound. Learned bounds are
    read from the base, and kept in a file beside the log. Raises UsageError for a malformed rule,
    CheckpointError if the base cannot be read.
    """
    parsed = [NormRule.parse("--max-norm", text) for text in rules]
    found: dict[str, float] = {}
    learned: list[ServedVariable] = []
    for variable in log.schema.variables:
        if variable.dtype.is_floating or variable.name in coded:
            named = (rule for rule in parsed if rule.is_for(variable.name))
            # A number for all tables does not apply to variables of any size that are served whole.
            rule = next((rule for rule in named if variable.is_table or rule.is_of_whole), None)
            if rule is not None and rule.bound is not None:
                found[variable.name] = rule.bound
            elif rule is not None:
                learned.append(variable)
    return found | _learned(log, learned, coded) if learned else found


def _learned(log: DeltaLog, tables: Collection[ServedVariable], coded: Collection[str]) -> dict[str, float]:
    """Return the bounds learned from the newest base, by variable; known ones are read from the cache.

    `tables` are the variables, `coded` the names of variables whose rows are 8-bit codes with a scale. New
    bounds are written to the cache; a failure to write it is ignored. Raises CheckpointError if the base
    cannot be read.
    """
    path, key = log.path / NORMS_FILE, f"{log.lineage}-{log.base.at.position}"
    known: dict[str, float] = {}
    # Whatever JSON may be in the file, of other types or nested too deeply for the parser.
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        found = json.loads(read_record(path, _MAX_BYTES))
        known = {str(name): float(bound) for name, bound in found.get(key, {}).items()}
    # `not` of a comparison: NaN, which a damaged cache may hold, is learned again, too.
    missing = [variable for variable in tables if not known.get(variable.name, 0.0) > 0]
    if missing:
        stored = log.base.stored()
        for each in missing:
            known[each.name] = _bound(stored[each.name], each, is_coded=each.name in coded)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({key: known}).encode())
    return {variable.name: known[variable.name] for variable in tables}


def _bound(stored: RowReader, variable: ServedVariable, *, is_coded: bool) -> float:
    if not variable.is_table:
        value = stored.whole()[np.newaxis]
        return _TIMES * max(float(np.nan_to_num(row_norms(value), posinf=0.0)[0]), math.sqrt(value.size))
    rows = stored.shape[0]
    step = max(_RANGE_ROWS, -(-rows // _RANGES))
    norms, elements = [np.empty(0)], 1
    for start in range(0, rows, step):
        values = stored.rows(start, min(rows, start + _RANGE_ROWS))
        values = values_of(values) if is_coded else values
        norms.append(row_norms(values))
        elements = math.prod(values.shape[1:])
    usual = np.concatenate(norms)
    usual = np.sort(usual[np.isfinite(usual) & (usual > 0)])  # rows of no key are zero
    largest = float(usual[math.ceil(_SHARE * len(usual)) - 1]) if len(usual) else 0.0
    return _TIMES * max(largest, math.sqrt(elements))

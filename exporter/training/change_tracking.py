"""Plan what to record of a training: each checkpointed variable, its parts, and how its changes are found."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.training.writes import RowWrite, VariableUse, variable_use
from exporter.wire.dtypes import DType

Variable = Any


class TrackingMode(Enum):
    """How the changes of a variable are found.

    `TOUCHED`: every write names its rows, which are recorded. `COMPARED`: rows are looked up, but some write
    may move any of them, so that they are compared with those written last. `WHOLE`: it is written as a whole
    if a digest of it changed. `FIXED`: nothing in the graph writes to it after its initializer.
    """

    TOUCHED = "touched rows"
    COMPARED = "compared rows"
    WHOLE = "digest"
    FIXED = "nothing, as nobody writes them"


class VariablePart(Struct, frozen=True):
    """A variable of the graph: the box of `shape` at `starts` of the whole one."""

    variable: Variable
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    row_writes: tuple[RowWrite, ...]

    @property
    def rows(self) -> int:
        """Its rows; a scalar has one."""
        return self.shape[0] if self.shape else 1

    @property
    def offset(self) -> int:
        """Its first row's number in the whole variable."""
        return self.starts[0] if self.starts else 0


class VariableTracking(Struct, frozen=True):
    """A variable as checkpoints name it. `whole_writes` are the operations that keep it from `TOUCHED`.

    `is_keyed` says that it holds the rows of a table by keys, whose name is `name`.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[VariablePart, ...]
    mode: TrackingMode
    whole_writes: tuple[str, ...]
    is_keyed: bool = False

    @property
    def bytes_(self) -> int:
        """Bytes of the whole variable."""
        return math.prod(self.shape) * (self.dtype.itemsize or 0)


def plan_tracking(
    variables: Iterable[Variable], tables: Mapping[str, Variable] = MappingProxyType({})
) -> tuple[VariableTracking, ...]:
    """How to find the changes of these variables of one graph, by their names in checkpoints.

    `tables` are the rows of tables by keys, by the tables' names.

    Raises:
        UsageError: a variable has no fixed shape, or holds strings.
    """
    groups: dict[str, list[VariableUse]] = defaultdict(list)
    for variable in variables:
        slice_info = variable._get_save_slice_info()
        groups[slice_info.full_name if slice_info else variable.op.name].append(variable_use(variable))
    shapes = {name: _full_shape(uses[0].variable) for name, uses in groups.items()}
    keyed = {name: variable_use(rows) for name, rows in tables.items()}
    used = [*(use for uses in groups.values() for use in uses), *keyed.values()]
    gathered = {_shape(use.variable) for use in used if use.is_gathered or use.row_writes}
    found = [_tracked(name, shapes[name], uses, gathered) for name, uses in groups.items()]
    found += [_keyed(name, use) for name, use in keyed.items()]
    return tuple(sorted(found, key=lambda entry: entry.name))


def tracking_digest(tracked: Iterable[VariableTracking]) -> int:
    """An int64 that two graphs share if the changes of the same variables are found in the same way."""
    plan = [(entry.name, entry.shape, entry.dtype.label, entry.mode.name) for entry in tracked]
    return int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:8], "little", signed=True)


def _tracked(
    name: str, shape: tuple[int, ...], uses: list[VariableUse], tables: set[tuple[int, ...]]
) -> VariableTracking:
    parts = tuple(sorted(map(_part, uses), key=lambda part: part.starts))
    if len(parts) == 1 and parts[0].shape != shape:
        # A slot of one part of a table: savers declare it in the table's shape, under a name of its own.
        shape, parts = parts[0].shape, (replace(parts[0], starts=(0,) * len(shape)),)
    whole_writes = tuple(sorted({kind for use in uses for kind in use.whole_writes}))
    is_by_rows = bool(shape) and all(part.shape[1:] == shape[1:] for part in parts)
    if not whole_writes and not any(use.row_writes for use in uses):
        mode = TrackingMode.FIXED
    elif is_by_rows and not whole_writes:
        mode = TrackingMode.TOUCHED
    elif is_by_rows and any(part.shape in tables for part in parts):  # also a slot, or a moving average
        mode = TrackingMode.COMPARED
    else:
        mode = TrackingMode.WHOLE
    return VariableTracking(name, _dtype(name, uses[0].variable), shape, parts, mode, whole_writes)


def _keyed(name: str, use: VariableUse) -> VariableTracking:
    """A table by keys: even if no gradient writes its rows, keys come and go."""
    found = _tracked(name, _shape(use.variable), [use], {_shape(use.variable)})
    mode = TrackingMode.TOUCHED if found.mode is TrackingMode.FIXED else found.mode
    return replace(found, mode=mode, is_keyed=True)


def _part(use: VariableUse) -> VariablePart:
    shape = _shape(use.variable)
    slice_info = use.variable._get_save_slice_info()
    starts = tuple(slice_info.var_offset) if slice_info else (0,) * len(shape)
    return VariablePart(use.variable, shape, starts, use.row_writes)


def _full_shape(variable: Variable) -> tuple[int, ...]:
    slice_info = variable._get_save_slice_info()
    return tuple(slice_info.full_shape) if slice_info else _shape(variable)


def _shape(variable: Variable) -> tuple[int, ...]:
    if not variable.shape.is_fully_defined():
        raise UsageError(
            f"increments cannot hold {variable.op.name!r}: its shape is {variable.shape}",
            hint="give the variable a fixed shape (validate_shape=True)",
        )
    return tuple(variable.shape.as_list())


def _dtype(name: str, variable: Variable) -> DType:
    dtype = DType(variable.dtype.base_dtype.as_datatype_enum)
    if dtype.itemsize is None:
        raise UsageError(
            f"increments cannot hold {name!r}: it is a {dtype.label} variable",
            hint="take it out of the global variables: collections=[LOCAL_VARIABLES]",
        )
    return dtype

"""Write the variables of a base anew, with a trainer's increments laid over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.delta.snapshot import Array, Snapshot
from exporter.layout import VARIABLES_PREFIX
from exporter.mapping.mapping_spec import MappingSpec

_CHUNK_BYTES = 4 << 20


def write_merged(mapping_spec: MappingSpec, schema: Schema, state: Snapshot, bundle: Path) -> None:
    """Write `variables/` of a bundle with the values of a state, which the caller has checked.

    Raises:
        CheckpointError: a value that is read as a whole is damaged, or a file changed.
        OSError: it cannot be written.
    """
    prefix = bundle / VARIABLES_PREFIX
    prefix.parent.mkdir()
    variables = {variable.name: variable for variable in schema.variables}
    with BundleWriter(prefix) as writer:
        for source in mapping_spec.sources():
            if not source.variables:  # the keys or values of a lookup table
                writer.add(source.key, state.whole(source.key))
            for part in source.variables:
                variable = variables[part.served_name]
                if variable.kind is ChangeKind.DENSE:
                    writer.add(source.key, state.whole(variable.name), part.part)
                else:
                    rows = row_blocks(state, variable)
                    writer.add_chunks(source.key, variable.dtype, variable.shape, rows, part.part)


def row_blocks(state: Snapshot, variable: ServedVariable) -> Iterator[Array]:
    """The rows of a table, a bounded number at a time."""
    row_bytes = max(1, int(np.prod(variable.shape[1:])) * variable.dtype.numpy.itemsize)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, variable.shape[0], step):
        yield state.rows(variable.name, start, min(start + step, variable.shape[0]))

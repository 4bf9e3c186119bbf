"""Entries of lookup tables in a delta: as many keys as values; all buckets of one are a power of two."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.format import OPEN, ChangeKind, Schema, ServedVariable, TableContents, TableSide
from exporter.subgraph.read_delta import _checks_of_lookups
from exporter.wire.dtypes import DType


def is_refused(keys: int, values: int, *, has_all_buckets: bool, changed: bool = True) -> bool:
    """Whether a delta with so many keys and values of a table is refused."""
    sides = ((TableSide.KEYS, "seen/keys"), (TableSide.VALUES, "seen/values"))
    schema = Schema.of(
        ServedVariable(
            name, DType.INT64, (OPEN,), ChangeKind.DENSE, TableContents("seen", side, has_all_buckets)
        )
        for side, name in sides
    )
    tensors = [tf.constant(np.zeros((int(changed), count), np.int64)) for count in (keys, values)]
    (check,) = _checks_of_lookups(schema, dict(zip(schema.variables, tensors, strict=True)))
    return bool(check.fails)


@pytest.mark.parametrize("count", [1, 2, 4, 1024])
def test_a_power_of_two_is_taken(count: int) -> None:
    assert not is_refused(count, count, has_all_buckets=True)


@pytest.mark.parametrize("count", [0, 3, 6, 1023])
def test_other_numbers_of_buckets_are_refused(count: int) -> None:
    assert is_refused(count, count, has_all_buckets=True)
    assert not is_refused(count, count, has_all_buckets=False)


def test_a_table_that_did_not_change_has_no_buckets() -> None:
    assert not is_refused(0, 0, has_all_buckets=True, changed=False)


@pytest.mark.parametrize("has_all_buckets", [True, False])
def test_as_many_keys_as_values(has_all_buckets: bool) -> None:
    assert is_refused(2, 4, has_all_buckets=has_all_buckets)

"""Sets of integers: the same as numpy's own answers, for any arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exporter.tables.integer_sets import among, distinct

INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)).map(
    lambda found: np.array(found, np.int64)
)


@given(INTEGERS, INTEGERS)
def test_sets_are_those_of_numpy(a: np.ndarray, b: np.ndarray) -> None:
    assert np.array_equal(distinct(a), np.unique(a))
    assert np.array_equal(among(a, np.sort(b)), np.isin(a, b))
